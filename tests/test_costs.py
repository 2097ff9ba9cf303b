"""Costs of the real graph: FLOPs against torch's counter, saved bytes against the storages that really are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopart.bags import BAG_SUM, BAG_SUM_BACKWARD
from autopart.capture import capture, read
from autopart.capture.call import Call
from autopart.cluster import Cluster
from autopart.ir.cost import batch_symbol
from autopart.ir.graph import Node, Ref, Size, Value
from autopart.ir.segmented import Segmented
from autopart.passes.costs import costs
from autopart.passes.normalise import normalise
from autopart.passes.recompute import recompute
from autopart.passes.segment import segment
from autopart.rules.alias import roots, viewed
from autopart.rules.flops import contracts, flops
from autopart.solver.timing import halves_seconds, roofline, segment_seconds
from tests.interpret import bind, execute, microbatch_values, part_sizes, run_function
from tests.models import GPT, MLP, MODELS, Sample

aten = torch.ops.aten
b = batch_symbol()


def segmented(sample: Sample) -> tuple[nn.Module, Call, Segmented]:
    module, args, kwargs = sample
    call = read(module, args, kwargs)
    return module, call, segment(normalise(capture(module, call, route="direct")))


def small_gpt() -> Sample:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8))
    return GPT(layers=4).double(), (ids, ids.flip(0)), {}


@cache
def small_gpt_step() -> Segmented:
    return segmented(small_gpt())[2]


def transposed_batch() -> Sample:
    """A batch along dim 1 of one input, and an input that is not split."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return (self.b(self.a(x) * x + shift) ** 2).mean()

    torch.manual_seed(0)
    return Model().double(), (torch.randn(3, 4, 5).double(), torch.randn(5).double()), {}


def calling(op: torch._ops.OpOverload, *args: Any) -> tuple[Node, dict[str, Value]]:
    """The node of a call on real tensors, and the values that it reads."""
    result = op(*args)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    values = {f"a{i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    known = {name: Value(name, tuple(t.shape), t.dtype) for name, t in values.items()}
    given = tuple(Ref(f"a{i}") if isinstance(a, torch.Tensor) else a for i, a in enumerate(args))
    outs = tuple(Value(f"r{i}", tuple(t.shape), t.dtype) if t is not None else None for i, t in enumerate(results))
    return Node(op, given, (), outs, isinstance(result, torch.Tensor), False, "", ""), known


def convolution(stride: int, groups: int, transposed: bool) -> tuple[Any, ...]:
    weight = (4, 6 // groups, 3, 2) if transposed else (6, 4 // groups, 3, 2)
    bias = torch.randn(6)
    return torch.randn(2, 4, 7, 6), torch.randn(weight), bias, [stride] * 2, [1, 1], [1, 1], transposed, [0, 0], groups


CONTRACTIONS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, torch.randn(3, 4), torch.randn(4, 5)),
    "addmm": (aten.addmm.default, torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)),
    "bmm": (aten.bmm.default, torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
    "baddbmm": (aten.baddbmm.default, torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
    "convolution": (aten.convolution.default, *convolution(1, 1, False)),
    "strided groups": (aten.convolution.default, *convolution(2, 2, False)),
    "transposed": (aten.convolution.default, *convolution(2, 2, True)),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_agree_with_torchs_counter(name: str) -> None:
    op, *args = CONTRACTIONS[name]
    with FlopCounterMode(display=False) as counter:
        op(*args)
    assert counter.get_total_flops() > 0
    assert flops(*calling(op, *args)) == counter.get_total_flops()


@pytest.mark.parametrize(("stride", "transposed"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("mask", [(True, True, False), (False, True, False), (True, False, False)])
def test_convolution_backward_agrees_with_torchs_counter(stride: int, transposed: bool, mask: tuple[bool, ...]) -> None:
    x, weight, bias, *rest = convolution(stride, 1, transposed)
    grad = aten.convolution.default(x, weight, bias, *rest)
    args = (grad, x, weight, [6], *rest, list(mask))
    with FlopCounterMode(display=False) as counter:
        aten.convolution_backward.default(*args)
    assert flops(*calling(aten.convolution_backward.default, *args)) == counter.get_total_flops() > 0


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_convolutions_gradients_cost_as_much_as_its_forward_each(transposed: bool) -> None:
    # torch's counter takes the weight's gradient for that of one group with all channels
    x, weight, bias, *rest = convolution(2, 2, transposed)
    forward = flops(*calling(aten.convolution.default, x, weight, bias, *rest))
    grad = aten.convolution.default(x, weight, bias, *rest)
    args = (grad, x, weight, [6], *rest, [True, True, True])
    assert flops(*calling(aten.convolution_backward.default, *args)) == 2 * forward + grad.numel()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((12, 4), (2, 4, 8), 12 * 4 * 8),  # rows of each group, a matrix each
        ((8, 12), (12, 4), 8 * 12 * 4),  # pieces of the inner dim
        ((2, 8, 4), (4, 12), 8 * 4 * 12),  # columns of each group
        ((2, 8, 4), (2, 4, 12), 2 * 8 * 4 * 12),
    ],
)
def test_a_grouped_product_costs_what_the_products_of_its_groups_do(
    left: tuple[int, ...], right: tuple[int, ...], expected: int
) -> None:
    offsets = [torch.tensor([4, 12], dtype=torch.int32)] if 2 in (len(left), len(right)) else []
    node, values = calling(aten._grouped_mm.default, torch.randn(left), torch.randn(right), *offsets)
    assert flops(node, values) == 2 * expected
    assert contracts(node), "it is no sweep of memory"


def test_attention_on_cpu_costs_what_torch_counts_for_the_same_shapes_elsewhere() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward(q, k, v)
    count = flop_registry[aten._scaled_dot_product_flash_attention](q, k, v, out_val=out)
    assert flops(*calling(forward, q, k, v)) == count == 2 * 2 * 3 * 5 * 7 * (8 + 8)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (torch.randn_like(out), q, k, v, out, logsumexp, 0.0, False)
    count = flop_registry[aten._scaled_dot_product_flash_attention_backward](*args[:4], out_val=(q, k, v))
    assert flops(*calling(backward, *args)) == count == 2 * 2 * 3 * 5 * 7 * 5 * 8


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.gelu.default, (torch.randn(3, 4),), 12),
        (aten.add.Tensor, (torch.randn(3, 1), torch.randn(4)), 12),
        (aten.sum.dim_IntList, (torch.randn(3, 4), [0]), 12),
        (aten.view.default, (torch.randn(3, 4), [12]), 0),
        (aten._unsafe_view.default, (torch.randn(3, 4), [12]), 0),
        (aten.split.Tensor, (torch.randn(3, 4), 2), 0),
        (aten.full_like.default, (torch.randn(3, 4), 1.0), 0),
        (aten.embedding.default, (torch.randn(50, 4), torch.tensor([1, 2, 3])), 12),
        (aten.embedding_dense_backward.default, (torch.randn(3, 4), torch.tensor([1, 2, 3]), 50, -1, False), 12),
        (BAG_SUM, (torch.randn(50, 4), torch.tensor([[1, 2, 3], [4, 5, 6]]), None, -1), 24),
        (BAG_SUM_BACKWARD, (torch.randn(2, 4), torch.tensor([[1, 2, 3], [4, 5, 6]]), None, 50, -1), 24),
        (aten.native_layer_norm.default, (torch.randn(3, 4), [4], None, None, 1e-5), 12 + 3 + 3),
    ],
    ids=lambda item: str(item) if isinstance(item, torch._ops.OpOverload) else "",
)
def test_other_operators_count_an_operation_an_element(op: torch._ops.OpOverload, args: Any, expected: int) -> None:
    assert flops(*calling(op, *args)) == expected


def test_an_mlp_costs_what_a_hand_calculation_says() -> None:
    *_, found = segmented((MLP(width=8).double(), (torch.randn(6, 8).double(), torch.randn(6, 3).double()), {}))
    first, second = costs(found)[:2]
    assert second.forward_flops == (2 * 8 * 8 + 8) * b  # addmm, tanh
    assert second.backward_flops == (2 * 2 * 8 * 8 + 8 + 8) * b  # two mm, tanh_backward, the sum of the bias's gradient
    assert first.backward_flops == (2 * 8 * 8 + 8 + 8) * b  # the batch needs no gradient
    assert second.forward_bytes == 8 * (4 * 8 * b + 8 * 8 + 8)  # x and result of both, weight and bias
    assert second.forward_swept == 8 * 2 * 8 * b  # of these, those of tanh
    assert second.backward_swept == 8 * (3 * 8 * b + 8 * b + 8)  # tanh_backward, the sum of the bias's gradient
    assert second.parameter_bytes == second.trainable_bytes == 8 * (8 * 8 + 8)
    assert (first.saved_bytes, second.saved_bytes) == (8 * 8 * b, 2 * 8 * 8 * b)  # tanh; what came in, tanh
    assert (first.boundary_bytes, second.boundary_bytes) == (0, 8 * 8 * b)
    assert second.at(3).forward_flops == 3 * (2 * 8 * 8 + 8)


def test_a_device_sweeps_memory_while_it_multiplies_nothing() -> None:
    device = Cluster.uniform(1, memory=1, flops=10.0, bandwidth=2.0, link_bandwidth=1.0)
    assert roofline(100, 60, 0, device) == 30, "of products and their bytes the longer"
    assert roofline(100, 60, 50, device) == 10 + 25, "then what sweeps"
    assert roofline(0, 60, 60, device) == 30


def test_the_halves_of_a_backward_sweep_what_the_backward_does() -> None:
    *_, found = segmented((MLP(width=8).double(), (torch.randn(6, 8).double(), torch.randn(6, 3).double()), {}))
    second = costs(found)[1].at(4)
    assert 0 < second.input_swept < second.backward_swept
    device = Cluster.uniform(1, memory=1, flops=1e3, bandwidth=1e3, link_bandwidth=1.0)
    assert sum(halves_seconds(second, device)) == pytest.approx(segment_seconds(second, device)[1])


def test_repeated_segments_share_their_expressions() -> None:
    *_, found = segmented((MLP(layers=6).double(), (torch.randn(6, 8).double(), torch.randn(6, 3).double()), {}))
    made = [c for c in costs(found) if c.name in ("layers.1", "layers.2", "layers.3", "layers.4")]
    assert len(made) == 4 and len({id(c.forward_flops) for c in made}) == len({id(c.saved_bytes) for c in made}) == 1
    assert len({c.name for c in made}) == 4


def test_one_body_used_on_the_batch_and_on_an_activation_has_two_boundaries() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            self.layers[:3].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layers(x) ** 2).mean()

    *_, found = segmented((Model().double(), (torch.randn(6, 8).double(),), {}))
    assert found.segments[0].body == found.segments[1].body, "the case that this test is about"
    assert [c.boundary_bytes for c in costs(found)[:2]] == [0, 64 * b]
    assert [(c.trainable_bytes, c.backward_flops) for c in costs(found)[:3]] == [(0, 0)] * 3


def test_tied_parameters_are_named_by_all_their_segments_and_counted_whole() -> None:
    found = small_gpt_step()
    by_name = {c.name: c for c in costs(found)}
    ties = [(c.name, t.name, t.nbytes, t.trainable) for c in by_name.values() for t in c.tied]
    assert ties == [("wte", "wte.weight", 32 * 16 * 8, True), ("norm", "wte.weight", 32 * 16 * 8, True)]
    assert by_name["norm"].parameter_bytes == 8 * (32 * 16 + 2 * 16)


def saved_storages(module: nn.Module, call: Call, found: Segmented, microbatches: int) -> list[tuple[int, list[int]]]:
    """(samples, bytes of distinct storages that each segment really saves) of every microbatch.

    Not counted are the storages of parameters, buffers and the caller's batch.
    """
    captured = found.captured
    whole = bind(module, captured, call)
    elsewhere = {t.untyped_storage().data_ptr() for t in whole.values()}
    once = execute(captured.prologue, whole, call.batch, call.batch)
    parameters = {item.target: whole[item.value.name] for item in captured.of_kind("parameter")}
    counted = []
    for part in microbatch_values(captured, call, whole, microbatches):
        flow = {**once, **{name: value.contiguous() for name, value in part.items()}}
        batch = part_sizes(captured, part)[0]
        row = []
        for item in found.segments:
            body = found.bodies[item.body]
            given = [flow[n] for n in (*item.values, *item.forward_fixed)]
            given += [parameters[t] for t in item.forward_parameters]
            env = run_function(body.forward, given, batch, call.batch)
            flow.update(zip(item.outputs, (env[name] for name in body.forward.outputs), strict=True))
            kept = [env[name].untyped_storage() for name in body.saved]
            row.append(sum({s.data_ptr(): s.nbytes() for s in kept if s.data_ptr() not in elsewhere}.values()))
        counted.append((batch, row))
    return counted


SAMPLES: dict[str, Callable[[], Sample]] = {
    **{name: MODELS[name] for name in ("mlp", "half_frozen", "gpt2", "llama")},
    "gpt": small_gpt,
    "transposed batch": transposed_batch,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name == "llama" else []) for name in SAMPLES]
)
def test_saved_bytes_are_those_of_the_storages_that_are_kept(name: str) -> None:
    module, call, found = segmented(SAMPLES[name]())
    predicted = costs(found)
    for batch, row in saved_storages(module, call, found, 3):
        assert [cost.at(batch).saved_bytes for cost in predicted] == row
    assert any(cost.saved_bytes != 0 for cost in predicted)


def test_views_count_their_base_once() -> None:
    """A saved value, its reshaped form and a slice of it are one storage: what a count that trusts names would miss."""

    def node(op: torch._ops.OpOverload, args: Any, *names: str) -> Node:
        outs = tuple(Value(name, (Size(2), 4), torch.float32) for name in names)
        return Node(op, args, (), outs, len(names) == 1, False, "", "")

    nodes = (
        node(aten.mm.default, (Ref("x"), Ref("w")), "y"),
        node(aten._unsafe_view.default, (Ref("y"), (2, 4)), "z"),
        node(aten.split.Tensor, (Ref("z"), 2), "p", "q"),
        node(aten.t.default, (Ref("q"),), "t"),
        node(aten.clone.default, (Ref("t"),), "c"),
    )
    assert roots(nodes) == {"z": "y", "p": "y", "q": "y", "t": "y"}
    assert [viewed(n) for n in nodes] == [None, "y", "z", "q", None]


def test_expressions_depend_on_the_batch_alone() -> None:
    made = costs(small_gpt_step())
    assert all(sympy.Poly(c.forward_flops, b).degree() == 1 for c in made)
    assert made[1].at(2).saved_bytes == 2 * made[1].at(1).saved_bytes > 0


def test_the_halves_of_a_backward_by_hand() -> None:
    """I has the product with the weight and tanh's gradient; W is handed that and x, has the rest, and makes up B."""
    *_, found = segmented((MLP(width=8).double(), (torch.randn(6, 8).double(), torch.randn(6, 3).double()), {}))
    first, second = costs(found)[:2]
    assert (first.input_flops, first.input_bytes, first.stash_bytes) == (0, 0, 0)  # the batch needs no gradient
    assert second.input_flops == (2 * 8 * 8 + 8) * b
    assert (
        second.backward_flops - second.input_flops == (2 * 8 * 8 + 8) * b
    )  # a product, the sum of the bias's gradient
    assert second.input_bytes == 8 * (3 * 8 * b + 2 * 8 * b + 8 * 8)
    assert second.stash_bytes == 2 * 8 * 8 * b


def test_a_recomputed_block_hands_over_more_than_it_saves() -> None:
    """So a schedule with I and W is planned for with what is kept between the two."""
    plain = small_gpt_step()
    made = recompute(plain, [segment.name for segment in plain.segments])
    cost = next(cost for cost in costs(made) if cost.name == "blocks.1").at(4)
    assert cost.stash_bytes > 3 * cost.saved_bytes > 0
