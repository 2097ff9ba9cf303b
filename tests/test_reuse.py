"""A result takes the memory of an operand that dies: where it may, nowhere else, and with the same bits as without."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autopart.api import parallelize
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.collectives import is_collective, operator
from autopart.draws import Draws
from autopart.ir.action import Kind
from autopart.ir.graph import Node, Ref, Size, Value
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.ir.segmented import Function, Segmented
from autopart.ir.staged import Staged
from autopart.passes import emit as emitting
from autopart.passes.reuse import in_place, ordered_formals, reuse
from autopart.passes.segment import segment
from autopart.rules.memory import IN_PLACE
from autopart.testing.parity import train
from tests import zoo
from tests.axis_models import program as on_axes
from tests.interpret import execute
from tests.models import MODELS
from tests.random_models import RANDOM_MODELS
from tests.test_split_output import program as in_parts

aten = torch.ops.aten
ROWS = Size(1, 0)
WRITING = {f"aten.{path}" for path, _ in IN_PLACE.values()}


# What may be written over


def value(name: str, *shape: int | Size, dtype: torch.dtype = torch.float32) -> Value:
    return Value(name, shape, dtype)


def node(op: Any, out: Value | tuple[Value, ...], *args: Any) -> Node:
    outs = out if isinstance(out, tuple) else (out,)
    return Node(op, args, (), outs, not isinstance(out, tuple), False, "", "")


X, W, HALF = value("x", ROWS, 8), value("w", 8, 8), torch.bfloat16
MM = node(aten.mm.default, value("mm", ROWS, 8), Ref("x"), Ref("w"))
TANH = node(aten.tanh.default, value("tanh", ROWS, 8), Ref("mm"))


def over(*nodes: Node, returned: str = "out", kept: str = "", ordered: str = "x w") -> list[str]:
    """What the nodes of a function of `x` and `w` (and a few more) write over, a result and an operand each."""
    more = (value("row", 8), value("grid", 4, 8), value("i", ROWS, dtype=torch.int64))
    function = Function((X, W, *more), nodes, tuple(returned.split()))
    made = in_place(function, kept.split(), set(ordered.split()))
    assert [n.outs for n in made.nodes] == [n.outs for n in nodes] and made.outputs == function.outputs
    changed = [new for new, old in zip(made.nodes, nodes, strict=True) if new != old]
    return [f"{n.outs[0].name} {dict(n.kwargs).get('out', n.args[0]).name}" for n in changed if n.outs[0]]


def out_of(op: Any, *args: Any, name: str = "out", dtype: torch.dtype = torch.float32) -> Node:
    return node(op, value(name, ROWS, 8, dtype=dtype), *args)


@pytest.mark.parametrize("op", [aten.tanh.default, aten.relu.default])
def test_a_value_that_dies(op: Any) -> None:
    assert over(MM, out_of(op, Ref("mm"))) == ["out mm"]


def test_one_after_the_other() -> None:
    assert over(MM, TANH, out_of(aten.mul.Tensor, Ref("tanh"), Ref("x"))) == ["tanh mm", "out tanh"]


def test_the_same_operand_twice_and_the_first_of_two_that_die() -> None:
    assert over(MM, out_of(aten.mul.Tensor, Ref("mm"), Ref("mm"))) == ["out mm"]
    other = out_of(aten.mm.default, Ref("x"), Ref("w"), name="other")
    assert over(MM, other, out_of(aten.add.Tensor, Ref("other"), Ref("mm"))) == ["out other"]


def test_a_view_of_all_of_it() -> None:
    view = node(aten.view.default, value("view", ROWS, 2, 4), Ref("mm"), [ROWS, 2, 4])
    exp = node(aten.exp.default, value("out", ROWS, 2, 4), Ref("view"))
    assert over(MM, view, exp) == ["out view"]
    late = node(aten.sum.default, value("late"), Ref("view"))
    assert over(MM, view, out_of(aten.exp.default, Ref("mm")), late, returned="out late") == []


def test_neither_what_is_read_later_nor_what_leaves_the_function() -> None:
    assert over(MM, TANH, out_of(aten.mul.Tensor, Ref("tanh"), Ref("mm"))) == ["out tanh"]
    assert over(MM, out_of(aten.tanh.default, Ref("mm")), returned="out mm") == []
    assert over(MM, out_of(aten.tanh.default, Ref("mm")), kept="mm") == []
    flat = node(aten.view.default, value("flat", Size(8, 0)), Ref("mm"), [Size(8, 0)])
    assert over(MM, flat, out_of(aten.tanh.default, Ref("mm")), kept="flat") == []


def test_not_what_was_given() -> None:
    assert over(out_of(aten.tanh.default, Ref("x"))) == []
    view = node(aten.view.default, value("view", ROWS, 8), Ref("x"), [ROWS, 8])
    assert over(view, out_of(aten.tanh.default, Ref("view"))) == []


def test_not_a_part_of_it_nor_another_order_of_it() -> None:
    parts = (value("left", ROWS, 4), value("right", ROWS, 4))
    split = node(aten.split.Tensor, parts, Ref("mm"), 4, 1)
    assert over(MM, split, node(aten.tanh.default, value("out", ROWS, 4), Ref("left"))) == []
    square = node(aten.mm.default, value("square", ROWS, ROWS), Ref("x"), Ref("w"))
    turned = node(aten.t.default, value("turned", ROWS, ROWS), Ref("square"))
    assert over(square, turned, node(aten.tanh.default, value("out", ROWS, ROWS), Ref("turned"))) == []
    reshaped = node(aten.reshape.default, value("reshaped", ROWS, ROWS), Ref("turned"), [ROWS, ROWS])
    assert over(square, turned, reshaped, node(aten.tanh.default, value("out", ROWS, ROWS), Ref("reshaped"))) == []


def test_not_another_dtype_or_shape() -> None:
    low = out_of(aten.mm.default, Ref("x"), Ref("w"), name="low", dtype=HALF)
    assert over(low, out_of(aten.add.Tensor, Ref("low"), Ref("x"))) == []
    assert over(MM, low, out_of(aten.add.Tensor, Ref("low"), Ref("mm"))) == ["out mm"]
    one = node(aten.mm.default, value("one", ROWS, 1), Ref("x"), Ref("w"))
    assert over(one, MM, out_of(aten.mul.Tensor, Ref("one"), Ref("mm"))) == ["out mm"]
    assert over(one, out_of(aten.mul.Tensor, Ref("one"), Ref("x"))) == []


def test_only_where_the_result_is_known_to_be_row_major() -> None:
    added = out_of(aten.add.Tensor, Ref("x"), Ref("mm"))
    assert over(MM, added) == ["out mm"]
    assert over(MM, added, ordered="w") == []
    assert over(MM, out_of(aten.add.Tensor, Ref("mm"), Ref("row"))) == ["out mm"], "a row has no order of dims"
    assert over(MM, out_of(aten.add.Tensor, Ref("mm"), Ref("grid"))) == []
    assert over(MM, out_of(aten._softmax.default, Ref("mm"), 1, False), ordered="") == ["out mm"]


def test_not_what_is_small_nor_with_other_operators() -> None:
    fixed = node(aten.mm.default, value("fixed", 8, 8), Ref("w"), Ref("w"))
    assert over(fixed, node(aten.tanh.default, value("out", 8, 8), Ref("fixed"))) == []
    assert over(MM, out_of(aten.cumsum.default, Ref("mm"), 0)) == []
    assert over(MM, out_of(aten.mm.default, Ref("mm"), Ref("w"))) == []


def test_in_place_for_the_first_operand_alone() -> None:
    mask = node(aten.gt.Scalar, value("mask", ROWS, 8, dtype=torch.bool), Ref("x"), 0)
    assert over(MM, mask, out_of(aten.masked_fill.Scalar, Ref("mm"), Ref("mask"), 0.0)) == ["out mm"]
    assert over(MM, mask, out_of(aten.masked_fill.Scalar, Ref("x"), Ref("mask"), 0.0)) == []


def test_not_what_a_collective_has() -> None:
    summed = out_of(operator("all_reduce"), Ref("mm"), "tp", "sum", name="summed")
    assert over(MM, summed, out_of(aten.tanh.default, Ref("mm")), returned="out summed") == []
    assert over(MM, summed, out_of(aten.tanh.default, Ref("summed"))) == []


# The same bits


def functions(staged: Staged) -> Iterator[tuple[tuple[int, Kind], Function]]:
    """Every function of every body, with its place in `ordered_formals`."""
    for number, body in enumerate(staged.segmented.bodies):
        found = {Kind.F: body.forward, Kind.B: body.backward}
        if body.halves is not None:
            found |= {Kind.I: body.halves.input, Kind.W: body.halves.weight}
        yield from (((number, kind), each) for kind, each in found.items() if each is not None)


def filled(item: Value, batch: int, strided: bool) -> torch.Tensor:
    """A tensor for an input: small numbers, or an index that every table has; `strided`: its dims lie the other way."""
    shape = item.at(batch)
    if (shape, item.dtype) == ((6,), torch.int64):
        return Draws(0, 0).of(item.name, 0, batch, 2 * batch)
    if not item.dtype.is_floating_point and not item.dtype.is_complex:
        return torch.zeros(shape, dtype=item.dtype)
    dims = shape[::-1] if strided else shape
    made = (torch.rand(dims, dtype=torch.float64) + 0.5).to(item.dtype)
    return made.permute(tuple(reversed(range(made.ndim)))) if strided else made


def results(function: Function, given: dict[str, torch.Tensor], kept: tuple[str, ...], batch: int) -> dict[str, Any]:
    """What a function hands on, each with its strides; what it was given must be as it was."""
    before = {name: tensor.clone() for name, tensor in given.items()}
    made = execute(function.nodes, given, batch, 2 * batch)
    assert all(torch.equal(before[name].nan_to_num(), given[name].nan_to_num()) for name in given)
    return {name: (made[name], made[name].stride()) for name in (*function.outputs, *kept)}


def check_bodies(staged: Staged, batch: int) -> int:
    """Each function with and without: the same bits in the same order of memory. How many nodes write over something.

    What is not known to be row-major comes with its dims turned, as far as no view forbids that.
    """
    known, count = ordered_formals(staged), 0
    for ((number, kind), plain), (_, written) in zip(functions(staged), functions(reuse(staged)), strict=True):
        body = staged.segmented.bodies[number]
        kept = {Kind.F: body.saved, Kind.I: body.halves.stash if body.halves is not None else ()}.get(kind, ())
        writing = sum(node.opname in WRITING for node in written.nodes)
        count += writing
        assert [n for n, m in zip(written.nodes, plain.nodes, strict=True) if n != m and n.opname not in WRITING] == []
        if not writing or any(is_collective(node.op) for node in plain.nodes):
            continue
        viewed = {name for node in plain.nodes if node.aten in ("view", "_unsafe_view") for name in node.refs()}
        ordered = known.get((number, kind), frozenset()) | viewed
        given = {item.name: filled(item, batch, item.name not in ordered) for item in plain.inputs}
        expected, found = (results(each, given, kept, batch) for each in (plain, written))
        for name, (tensor, strides) in expected.items():
            assert strides == found[name][1], (name, strides, found[name][1])
            assert torch.equal(tensor.nan_to_num(7.0), found[name][0].nan_to_num(7.0)), (number, kind, name)
    return count


def segmented_of(make: Any) -> Segmented:
    torch.manual_seed(0)
    model, args, *kwargs = make()
    return segment(captured_step(model, read(model, args, kwargs[0] if kwargs else {}), None, False, "direct"))


def planned(segmented: Segmented, mesh: dict[str, int], **pins: Any) -> Program:
    plan = solve(segmented, devices=Mesh.of(mesh).size, mesh=mesh, **pins)
    return lower(segmented, plan)


class Feedforward(nn.Module):
    """Few layers, wide ones, of most operators of the table; softmaxes written out, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(16, 8)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(1, 2)) / 3
        x = x + scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(torch.relu(self.down(nn.functional.silu(gate) * torch.sigmoid(up))).repeat(1, 1, 2))
        return nn.functional.smooth_l1_loss(x, y) + torch.exp(x - 3).mean() + x.abs().clamp(min=0.1).log().mean()


def feedforward() -> Any:
    return Feedforward(), (torch.randn(4, 5, 8), torch.randn(4, 5, 8))


SMALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "feedforward": (feedforward, {}),
    "mlp": (MODELS["mlp"], {"recompute": True}),
    "gpt": (MODELS["gpt"], {"schedule": "zb-h1", "mesh": {"pp": 2}}),
    "dropping": (RANDOM_MODELS["dropping"], {"recompute": True}),
}


@pytest.mark.parametrize("name", SMALL)
def test_functions_give_the_same_bits(name: str) -> None:
    make, pins = SMALL[name]
    segmented = segmented_of(make)
    program = planned(segmented, **{"mesh": {"dp": 1}, "microbatches": 2, **pins})
    assert check_bodies(program.staged, 3) > 0


SPECIMENS = (
    "resnet",
    "unet",
    "vit",
    "recurrent",
    "cells",
    "bert",
    "gpt2",
    "t5",
    "mixture",
    "reused",
    "lora",
)


@pytest.mark.soak
@pytest.mark.parametrize("name", SPECIMENS)
def test_functions_of_many_models_give_the_same_bits(name: str) -> None:
    made = zoo.gpt2(0.0) if name == "gpt2" else getattr(zoo, name)()
    segmented = segmented_of(lambda: (made.model, made.args, made.kwargs))
    check_bodies(planned(segmented, {"dp": 1}, microbatches=1).staged, 3)


def trained(segmented: Segmented, make: Any, pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, on: bool) -> Any:
    """The program, two steps of it, and what its ranks then held."""
    with monkeypatch.context() as patch:
        if not on:
            patch.setattr(emitting, "reuse", lambda staged: staged)
        program = planned(segmented, **pins)
    torch.manual_seed(0)
    model, args, *kwargs = make()
    parallel = parallelize(model, plan=program, capture="direct")
    data = (args, kwargs[0] if kwargs else {})
    found = train(parallel, lambda step: data, 2, lambda p: torch.optim.SGD(p, lr=0.1), 1.0)
    held = [(rank.peak_memory, rank.peak_activations) for rank in parallel.report().ranks]
    return program, found, held


RUNS = [
    ("mlp", {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}),
    ("mlp", {"mesh": {"pp": 4}, "schedule": "zb-h1", "microbatches": 5}),
]
SOAK_RUNS = [
    ("gpt", {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}),
    *itertools.product(
        ("gpt", "mlp"), ({"mesh": {"pp": 2}, "schedule": s, "microbatches": 4} for s in ("gpipe", "1f1b"))
    ),
    ("gpt", {"mesh": {"pp": 2}, "schedule": "zb-v", "microbatches": 4}),
    ("gpt", {"mesh": {"pp": 2}, "schedule": "dualpipev", "microbatches": 4}),
    ("gpt", {"mesh": {"dp": 2}, "placement": "zero1", "microbatches": 2, "recompute": True}),
    ("llama", {"mesh": {"pp": 2}, "schedule": "seq1f1b(slices=2)", "microbatches": 2}),
    ("gpt2", {"mesh": {"dp": 2}, "placement": "zero2", "microbatches": 1}),
]


@pytest.mark.parametrize(("name", "pins"), [*RUNS, *(pytest.param(*row, marks=pytest.mark.soak) for row in SOAK_RUNS)])
def test_training_gives_the_same_bits(name: str, pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    segmented = segmented_of(MODELS[name])
    both = (trained(segmented, MODELS[name], pins, monkeypatch, on=on) for on in (True, False))
    (program, found, held), (plain, expected, before) = both
    assert found.losses == expected.losses and found.norms == expected.norms
    for a, b in zip((*found.gradients, found.parameters), (*expected.gradients, expected.parameters), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert any(re.search(r"\bout=", rank.source) for rank in program.ranks)
    assert not any(re.search(r"\bout=", rank.source) for rank in plain.ranks)
    assert held == before


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt", "dense", "capacity"])
def test_places_of_an_axis(name: str) -> None:
    for staged in on_axes(name, (("tp", 2),)).places:
        check_bodies(staged, 2)


@pytest.mark.soak
@pytest.mark.parametrize("tied", [False, True])
def test_layers_in_parts(tied: bool) -> None:
    assert check_bodies(in_parts("vocab(barriers=2)", 2, 4, tied=tied).staged, 3) > 0
