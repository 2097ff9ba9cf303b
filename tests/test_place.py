"""Placements that the solver finds unaided, run on all places of an axis beside the whole body."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.graph import Size
from autopart.ir.placed import Move, PlacedBody
from autopart.ir.placement import Partial, PerSlice, Replicate, Shard, TensorPlacement
from autopart.passes.consistent import faults
from autopart.passes.localise import localise
from autopart.passes.segment import segment
from autopart.solver.axis import Axis
from autopart.solver.eliminate import picks, solve
from autopart.solver.place import Placed, front, place
from autopart.solver.tensor import layout_of
from tests import places
from tests.tensor_cases import LENGTH, SAMPLES, WIDTH, Ran, run, steps

FAST = Cluster.uniform(8, 2**40, 1e11, 1e18, 1e10, 1e-6)
"""Products take long and so does each message; memory is as fast as can be, so splitting norms is worth nothing."""

SLOW = Cluster.uniform(8, 2**40, 1e11, 1e10, 1e10, 1e-8)
"""Memory is slow, messages are cheap: what is not split costs."""

NEAR = Cluster.uniform(8, 2**40, 1e10, 1e18, 1e9, 1e-7)
"""Bytes take long, and messages as such do not."""

TOKENS = SAMPLES * LENGTH * WIDTH * 8
"""The bytes of the hidden states."""


@cache
def placed(name: str, degree: int, cluster: Cluster) -> Placed:
    made, _, batch = steps(name)
    return place(made, Axis("tp", degree, cluster, batch, copies=1))


def ran(name: str, found: Placed) -> list[Ran]:
    """Every segment on all places; asserts that all is as on one device."""
    _, each, batch = steps(name)
    results = []
    for step, body in zip(each, found.segments, strict=True):
        assert faults(body, step.segment) == ()
        results.append(run(body, step, batch))
        assert results[-1].worst < 1e-12, (step.segment.name, results[-1].worst)
    return results


def parameters(name: str, found: Placed, number: int) -> dict[str, object]:
    """How a segment's parameters are placed, by target."""
    segment = steps(name)[0].segments[number]
    inputs = found.segments[number].forward.inputs
    return dict(zip(segment.forward_parameters, inputs[len(inputs) - len(segment.forward_parameters) :], strict=True))


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3])
def test_megatron_is_found(degree: int) -> None:
    """Column, then row: two all-reduces forward and two backward a layer, 8bsh(t-1)/t elements; heads are not cut."""
    found = placed("gpt", degree, FAST)
    results = ran("gpt", found)
    for number in (1, 2, 3):
        assert results[number].counts() == {"all_reduce": 4}
        assert results[number].sent() == 8 * 8 * SAMPLES * LENGTH * WIDTH * (degree - 1) // degree
        layer = f"blocks.{number - 1}"
        assert {k.removeprefix(f"{layer}."): v for k, v in parameters("gpt", found, number).items()} == {
            "norm1.weight": Replicate(), "norm1.bias": Replicate(), "norm2.weight": Replicate(),
            "norm2.bias": Replicate(), "qkv.weight": Shard(0, 3), "qkv.bias": Shard(0, 3), "out.weight": Shard(1),
            "out.bias": Replicate(), "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1),
            "down.bias": Replicate(),
        }  # fmt: skip
    assert found.segments[1] is found.segments[2]


def test_sequence_parallelism_is_found_where_what_is_not_split_costs() -> None:
    """Reduce-scatter and all-gather in place of each all-reduce, which are the same bytes; small sums for the norms."""
    found = placed("gpt", 2, SLOW)
    for result in ran("gpt", found)[1:4]:
        assert result.counts(least=TOKENS // 2) == {"reduce_scatter": 4, "all_gather": 4}
        assert result.sent(least=TOKENS // 2) == 8 * 8 * SAMPLES * LENGTH * WIDTH // 2
    assert all(found.between[name] == Shard(1) for name in found.between if name.startswith("add_"))


def test_sequence_parallelism_is_found_where_memory_binds() -> None:
    free = placed("gpt", 2, NEAR)
    made, _, batch = steps("gpt")
    fastest, tight, smallest = front(made, Axis("tp", 2, NEAR, batch, copies=1))
    assert fastest == free and smallest.memory < tight.memory <= free.memory * 19 // 20 and tight.time > free.time
    assert free.segments[2].wanted()["x"] == free.segments[2].wanted()["add"] == Replicate()
    for body, result in zip(tight.segments[2:4], ran("gpt", tight)[2:4], strict=True):
        assert result.counts(least=TOKENS // 2) == {"reduce_scatter": 4, "all_gather": 4}
        assert body.wanted()["x"] == body.wanted()["add"] == Shard(1)


@pytest.mark.parametrize(("name", "degree"), [("gpt", 2), ("gpt_wide", 2), ("gpt", 3)])
def test_a_front_is_of_the_fastest_at_some_price_and_equal_layers_are_alike(name: str, degree: int) -> None:
    made, _, batch = steps(name)
    found = front(made, Axis("tp", degree, NEAR, batch))
    assert len(found) > 1 and found[0] == place(made, Axis("tp", degree, NEAR, batch))
    for faster, smaller in pairwise(found):
        assert faster.time < smaller.time and faster.memory > smaller.memory
    slopes = [(b.time - a.time) / (a.memory - b.memory) for a, b in pairwise(found)]
    assert slopes == sorted(slopes), "a byte less costs more and more"
    inner = slice(2, -2)
    assert len({segment.body for segment in made.segments[inner]}) == 1
    assert all(len({id(body) for body in each.segments[inner]}) == 1 for each in found)


def test_a_vocabulary_stays_split_from_the_product_to_the_loss() -> None:
    found = placed("gpt_wide", 2, FAST)
    result = ran("gpt_wide", found)[-1]
    assert parameters("gpt_wide", found, -1)["head.weight"] == Shard(0)
    scores = SAMPLES * LENGTH * 1024 * 8
    assert all(nbytes < scores // 8 for _, nbytes in result.calls), "the scores are never gathered"
    assert result.counts(least=TOKENS - 1) == {"all_reduce": 1}, "the gradient of what is projected"


def test_a_pinned_table_is_looked_up_in_parts() -> None:
    made, _, batch = steps("gpt_wide")
    axis = Axis("tp", 3, FAST, batch)
    found = place(made, axis, {"token.weight": Shard(0)})
    assert parameters("gpt_wide", found, 0)["token.weight"] == Shard(0)
    assert all(result.worst < 1e-12 for result in ran("gpt_wide", found))
    with pytest.raises(ValueError, match=r"'token.weight' cannot be Shard\(0, inside 5\).*it can be Replicate"):
        place(made, axis, {"token.weight": Shard(0, 5)})
    with pytest.raises(ValueError, match="no segment has a parameter 'tokens'"):
        place(made, axis, {"tokens": Shard(0)})


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "degree"), [("llama", 2), ("llama", 3), ("llama", 4), ("gpt2", 2), ("gpt2", 3), ("gpt2", 4)]
)
def test_models_of_transformers(name: str, degree: int) -> None:
    found = placed(name, degree, FAST)
    layer = ran(name, found)[-2]
    if degree in {"gpt2": (2, 3), "llama": (2, 4)}[name]:  # where it divides the heads
        assert layer.counts() == {"all_reduce": 4}
        assert layer.sent() == 8 * 8 * SAMPLES * LENGTH * WIDTH * (degree - 1) // degree
        if name == "llama":
            heads = {k.split(".")[-2]: v for k, v in parameters(name, found, -2).items() if "attn" in k}
            assert heads == {"q_proj": Shard(0), "k_proj": Shard(0), "v_proj": Shard(0), "o_proj": Shard(1)}


@pytest.mark.soak
def test_a_tied_parameter_has_one_placement() -> None:
    """In the embedding and in the head, forward and backward; layers hand each other skips besides."""
    made, _, _ = steps("tied")
    found = placed("tied", 2, FAST)
    ran("tied", found)
    users = [i for i, piece in enumerate(made.segments) if "wte.weight" in piece.forward_parameters]
    assert len(users) == 2
    assert len({parameters("tied", found, i)["wte.weight"] for i in users}) == 1


@pytest.mark.soak
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt", "gpt_wide", "gpt2", "llama", "mlp", "conv", "lookups", "tied"])
def test_whatever_is_found_is_right(name: str, degree: int) -> None:
    for cluster in (FAST, SLOW):
        ran(name, placed(name, degree, cluster))


# ---- every other placement is right, too -----------------------------------------------------------------------------


def drawn(name: str, number: int, degree: int, seed: int) -> PlacedBody:
    """A placement that is best for random costs: any strategy of any node, any boundary."""
    _, each, batch = steps(name)
    random = Random(seed)
    layout = layout_of(each[number].body, each[number].segment, Axis("tp", degree, FAST, batch))
    units = tuple(
        replace(unit, options=tuple(replace(o, time=random.randrange(10**8)) for o in unit.options))
        for unit in layout.layout.units
    )
    values = solve(replace(layout.layout, units=units)).best()
    assert values is not None
    return layout.placed(picks(layout.layout, values))


@pytest.mark.parametrize(
    ("name", "number", "degree"),
    [
        ("gpt", 1, 2),
        ("gpt", -1, 3),
        ("mlp", 1, 4),
        ("conv", 1, 3),
        ("lookups", -1, 3),
        ("backward_only", -1, 2),
        ("backward_only", 0, 3),
    ],
)
def test_any_placement_makes_up_the_whole(name: str, number: int, degree: int) -> None:
    _, each, batch = steps(name)
    for seed in range(3):
        body = drawn(name, number, degree, seed)
        assert faults(body, each[number].segment) == ()
        assert run(body, each[number], batch).worst < 1e-12


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "mlp", "conv", "lookups"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_any_placement_makes_up_the_whole_in_all_layers(name: str, degree: int) -> None:
    _, each, batch = steps(name)
    for number, step in enumerate(each):
        for seed in range(3):
            body = drawn(name, number, degree, seed)
            assert faults(body, step.segment) == ()
            assert run(body, step, batch).worst < 1e-12


# ---- faults ----------------------------------------------------------------------------------------------------------


def layer() -> PlacedBody:
    return placed("gpt", 2, FAST).segments[1]


def told(body: PlacedBody) -> str:
    return "\n".join(faults(body, steps("gpt")[1][1].segment))


def test_a_sum_that_is_never_taken_is_noticed() -> None:
    body = layer()
    sums = [m for m in body.forward.moves if m.source == Partial()]
    without = replace(body.forward, moves=tuple(m for m in body.forward.moves if m is not sums[0]))
    assert f"{sums[0].value} is needed as Replicate()" in told(replace(body, forward=without))


def test_a_sum_that_is_taken_twice_is_noticed() -> None:
    body = layer()
    again = replace(body.forward, moves=(*body.forward.moves, body.forward.moves[0]))
    assert "twice" in told(replace(body, forward=again))


@pytest.mark.parametrize("target", [PerSlice(), Replicate()])
def test_a_move_that_no_collective_makes_is_noticed(target: TensorPlacement) -> None:
    body = layer()
    name = body.forward.function.inputs[0].name
    assert body.forward.inputs[0] == Replicate()
    forward = replace(body.forward, moves=(Move(name, Replicate(), target), *body.forward.moves))
    assert f"{name} is Replicate(): nothing makes it {target}" in told(replace(body, forward=forward))


def test_a_strategy_that_no_rule_allows_is_noticed() -> None:
    body = layer()
    number = next(i for i, n in enumerate(body.forward.function.nodes) if "gelu" in n.opname)
    wrong = replace(body.forward.strategies[number], needs=(("self", Partial()),), gives=(Partial(),), cut=None)
    each = (*body.forward.strategies[:number], wrong, *body.forward.strategies[number + 1 :])
    assert "aten.gelu.default -> gelu cannot run as" in told(
        replace(body, forward=replace(body.forward, strategies=each))
    )


def test_what_is_saved_otherwise_than_it_is_read_is_noticed() -> None:
    body = layer()
    number = next(i for i, how in enumerate(body.saved) if isinstance(how, Shard))
    wrong = (*body.saved[:number], Replicate(), *body.saved[number + 1 :])
    assert "is saved as Replicate(), and the backward takes it for Shard" in told(replace(body, saved=wrong))


def test_a_gradient_placed_otherwise_than_its_parameter_is_noticed() -> None:
    body = layer()
    assert body.backward is not None
    first = len(steps("gpt")[1][1].segment.backward_outputs)
    wrong = (*body.backward.outputs[:first], Partial(), *body.backward.outputs[first + 1 :])
    assert "the gradient of blocks.0" in told(replace(body, backward=replace(body.backward, outputs=wrong)))


def test_a_sum_that_is_not_performed_shows_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself notices what the other tests would have to notice."""
    _, each, batch = steps("gpt")
    assert run(layer(), each[1], batch).worst < 1e-12
    monkeypatch.setattr(places, "_perform", lambda name, tensors, args: tensors)
    with pytest.raises(AssertionError):
        assert run(layer(), each[1], batch).worst < 1e-12


def test_an_axis_of_one_place_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 places"):
        Axis("tp", 1, FAST, 4)


def test_a_program_holds_at_every_batch() -> None:
    """Sizes that move with the batch stay so: the local bodies name no number of samples."""
    local = localise(layer(), 1)
    assert local.backward is not None
    assert local.forward.inputs[0].shape == (Size(1), LENGTH, WIDTH)
    made = [out for node in (*local.forward.nodes, *local.backward.nodes) for out in node.outs if out is not None]
    assert all(SAMPLES not in out.shape for out in made if len(out.shape) == 3)


@pytest.mark.soak
def test_a_llama_of_seventy_billion_on_eight_devices() -> None:
    """Shapes alone: rows and columns for the large products, the sequence split between them, the vocabulary split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=2,
            num_attention_heads=64,
            num_key_value_heads=8,
            use_cache=False,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros((2, 4096), dtype=torch.long)
    call = read(model, (), {"input_ids": ids, "labels": ids})
    made = segment(captured_step(model, call, None, False, "direct"))
    found = place(made, Axis("tp", 8, Cluster.preset("h100-80", per_node=8), 1))
    how: dict[str, object] = {}
    for piece, body in zip(made.segments, found.segments, strict=True):
        assert faults(body, piece) == ()
        inputs = body.forward.inputs
        how |= zip(piece.forward_parameters, inputs[len(inputs) - len(piece.forward_parameters) :], strict=True)
    layer = "model.layers.1."
    columns = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    assert all(how[f"{layer}{name}.weight"] == Shard(0) for name in columns)
    assert how[f"{layer}self_attn.o_proj.weight"] == how[f"{layer}mlp.down_proj.weight"] == Shard(1)
    assert how["lm_head.weight"] == Shard(0)
    hidden = [name for name in made.segments[-1].values if found.between.get(name) is not None]
    assert [found.between[name] for name in hidden] == [Shard(1)]


# ---- samples ---------------------------------------------------------------------------------------------------------

CHEAP = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-8)
"""Computing takes long, messages nothing: all that can be split is."""


def products(found: Placed) -> list[TensorPlacement | None]:
    """How the results of products and convolutions are placed, forward."""
    rows = [zip(body.forward.function.nodes, body.forward.strategies, strict=True) for body in found.segments]
    return [s.gives[0] for row in rows for node, s in row if "mm" in node.opname or "convolution" in node.opname]


@pytest.mark.parametrize(("name", "degree"), [("mlp", 3), pytest.param("conv", 2, marks=pytest.mark.soak)])
def test_data_parallelism_is_found_where_the_axis_divides_the_samples(name: str, degree: int) -> None:
    made, _, batch = steps(name)
    apart, together = (place(made, Axis("tp", degree, CHEAP, batch, divides=divides)) for divides in (True, False))
    ran(name, apart)
    assert products(apart).count(Shard(0)) > len(products(apart)) // 2
    assert Shard(0) not in products(together)


def test_sizes_become_plain_numbers_by_keyword_too() -> None:
    """Those that FLOPs are counted with."""
    made, _, _ = steps("mlp")
    node = replace(made.bodies[0].forward.nodes[0], kwargs=(("size", (Size(2, 1), 7)), ("alpha", 3)))
    plain = node.sized(lambda size: int(size.at(5)))
    assert plain.kwargs == (("size", (11, 7)), ("alpha", 3))
    assert [out.shape for out in plain.outs if out] == [out.at(5) for out in node.outs if out]
