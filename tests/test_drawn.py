"""Draws in parts: each place draws its own elements of the unsplit tensor, and no value has as many as the whole."""

from __future__ import annotations

import re
from functools import cache
from math import prod
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.draws import Draws, bernoulli, normal, uniform
from autopart.ir.program import Program
from autopart.ir.segmented import Function, Segmented, defined
from autopart.passes.segment import segment
from autopart.passes.slice_sequence import slice_sequence
from autopart.rules.drawn import is_draw
from autopart.testing import assert_parity
from autopart.testing.rules import as_node
from tests.ring_models import only_rings
from tests.tensor_axis import CHEAP, axes, soak
from tests.test_rule_strategies import run_all
from tests.test_verify import refused

CPU = torch.device("cpu")
drawn = torch.ops.autopart

# ---- elements --------------------------------------------------------------------------------------------------------


def cut(whole: torch.Tensor, dim: int, outer: int, start: int, length: int) -> torch.Tensor:
    """What a piece has of `outer` equal runs of a dim: of each, `length` elements from `start` on."""
    apart = whole.unflatten(dim, (outer, whole.shape[dim] // outer)) if whole.shape[dim] else whole.unsqueeze(dim)
    return apart.narrow(dim + 1, start, length).flatten(dim, dim + 1)


@pytest.mark.parametrize("seed", range(12))
def test_a_part_of_a_part_is_that_of_the_whole_draw(seed: int) -> None:
    """Cuts of cuts: into runs, uneven, in turn, of one element or none, on top of a microbatch's samples."""
    draw, draws = Random(seed), Draws(seed, 3)
    size = tuple(draw.choice((1, 2, 4, 6, 12)) for _ in range(draw.randint(1, 4)))
    dim = draw.randrange(len(size))
    count = draw.randint(1, size[dim])
    first = draw.randint(0, size[dim] - count)
    names = draws.of("x#0"), draws.of("x#0", first, count, size[dim])
    exact = uniform(names[0], size, dtype=torch.float64, device=CPU), bernoulli(names[0], 0.4, size, device=CPU)
    own = [x.narrow(dim, first, count) for x in exact]
    part: list[int] = []
    for _ in range(draw.randint(0, 4)):
        at = draw.randrange(len(size))
        outer = draw.choice([n for n in range(1, own[0].shape[at] + 1) if own[0].shape[at] % n == 0])
        whole = own[0].shape[at] // outer
        start = draw.randint(0, whole)
        length = draw.randint(0 if seed % 4 == 0 else min(1, whole - start), whole - start)
        if length == 0 and seed % 4:
            continue
        own = [cut(x, at, outer, start, length) for x in own]
        part += [at, start, length, whole]
        if not own[0].numel():
            break
    shape = own[0].shape
    assert torch.equal(uniform(names[1], shape, dim, part, dtype=torch.float64, device=CPU), own[0])
    assert torch.equal(bernoulli(names[1], 0.4, shape, dim, part, device=CPU), own[1])
    bell = normal(names[1], shape, dim, part, dtype=torch.float64, device=CPU)
    assert torch.equal(bell, torch.erfinv(own[0] * 2 - 1) * 2**0.5)


def test_parts_beyond_32_bits_and_larger_than_is_hashed_at_once() -> None:
    whole = Draws(1, 0).of("x#0", 2**29 - 2, 4, 2**30)  # rows of 8 elements: on both sides of 2**32
    rows = uniform(whole, (4, 8), 0, dtype=torch.float64, device=CPU)
    for start, length in ((0, 3), (3, 5)):
        part = [1, start, length, 8]
        found = uniform(whole, (4, length), 0, part, dtype=torch.float64, device=CPU)
        assert torch.equal(found, rows[:, start : start + length])
    name = Draws(1, 0).of("y#0")
    large = bernoulli(name, 0.5, (3, 200, 399), device=CPU)
    assert torch.equal(bernoulli(name, 0.5, (3, 150, 399), None, [1, 50, 150, 200], device=CPU), large[:, 50:])
    assert torch.equal(bernoulli(name, 0.5, (3, 200, 133), None, [2, 1, 1, 3], device=CPU), large[:, :, 1::3])


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("op", [drawn.uniform.default, drawn.normal.default, drawn.bernoulli.default], ids=str)
def test_every_split_of_a_draw_makes_up_the_whole(op: Any, degree: int) -> None:
    """Each dim, evenly or not, and dealt out in turn; of what is a part already, too."""
    for dim, part in ((None, ()), (0, ()), (1, ()), (0, (1, 3, 7, 10)), (0, (1, 1, 7, 8, 1, 0, 7, 9))):
        size, name = [5, 7, 12], Draws(0, 0).of("x#0")
        args = (name, *((0.4,) if "bernoulli" in str(op) else ()), size, dim, list(part))
        if dim is not None:
            args = (Draws(0, 0).of("x#0", 1, size[dim], size[dim] + 3), *args[1:])
        keywords = {"device": CPU, **({} if "bernoulli" in str(op) else {"dtype": torch.float64})}
        found = run_all(*as_node((op, args, keywords)), degree, {12})
        assert len(found) == 1 + 3 + (12 % degree == 0)  # whole, a dim each, the last in turn


# ---- programs --------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """A causal layer that drops what it adds and half of its hidden units, of sizes that are all unlike."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(11, 6), nn.Embedding(length, 6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.up, self.down, self.head = nn.Linear(6, 30), nn.Linear(30, 6), nn.Linear(6, 11)
        self.drop, self.wide = nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.token(ids) + self.place(torch.arange(ids.size(1))))
        q, k, v = (part.unflatten(-1, (3, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        x = x + self.drop(self.down(self.wide(torch.relu(self.up(x)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def model() -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    torch.manual_seed(0)
    made, ids = Dropping().double(), torch.randint(11, (3, 8))
    args = ids, ids.roll(-1, 1)
    return made, args, segment(captured_step(made, read(made, args, {}), None, False, "direct"))


@cache
def program(mesh: tuple[tuple[str, int], ...], **pins: Any) -> Program:
    segmented = model()[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=CHEAP, **pins))


def functions(step: Segmented) -> list[Function]:
    return [f for body in step.bodies for f in (body.forward, body.backward) if f is not None]


def drawn_in(step: Segmented, samples: int = 3) -> list[tuple[int, ...]]:
    """The shapes of all draws of a step."""
    nodes = (node for function in functions(step) for node in function.nodes if is_draw(node))
    return [out.at(samples) for node in nodes for out in node.outs if out is not None]


def largest(step: Segmented, samples: int = 3) -> int:
    """The elements of the largest value that a step ever has."""
    return max(prod(value.at(samples)) for f in functions(step) for value in defined(f).values())


def places(found: Program) -> list[Segmented]:
    return [found.staged_on(rank).segmented for rank in range(found.plan.mesh.size)]


@pytest.mark.parametrize("mesh", [axes(tp=2), soak(axes(tp=4)), soak(axes(cp=3)), axes(tp=2, cp=2)], ids=str)
def test_no_full_mask_is_ever_made(mesh: Any) -> None:
    """On shapes: no value at any place is as large as the mask of the hidden units; each element is drawn once."""
    whole = drawn_in(model()[2])
    steps = places(program(mesh))
    assert (3, 8, 30) in whole and largest(model()[2]) == prod((3, 8, 30))
    assert all(largest(step) < prod((3, 8, 30)) for step in steps)
    counts = [sum(map(prod, drawn_in(step))) for step in steps]
    assert sum(counts) == sum(map(prod, whole)) and max(counts) == min(counts)


class Narrow(nn.Module):
    """Two layers of one unit, so that there is nothing to split but the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(1, 1), nn.Linear(1, 1), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.two(self.drop(torch.tanh(self.one(x)))), y)


def test_places_with_samples_of_their_own_draw_those() -> None:
    """On top of the microbatch's samples, of which each place has one in two."""
    torch.manual_seed(0)
    args = torch.randn(60, 1).double(), torch.randn(60, 1).double()
    made = segment(captured_step(net := Narrow().double(), read(net, args, {}), None, False, "direct"))
    found = lower(made, solve(made, mesh={"tp": 2}, cluster=CHEAP, microbatches=2))
    assert all(drawn_in(step, 30) == [(15, 1)] for step in places(found))
    assert "draw, 0.7, [b // 2, 1], 0, [0, b // 2, b // 2, b]," in found.ranks[1].source
    assert_parity(net, args, plan=found, steps=2)


def test_slices_of_the_sequence_draw_their_tokens() -> None:
    step = slice_sequence(model()[2], 3)
    assert sum(map(prod, drawn_in(step))) == sum(map(prod, drawn_in(model()[2])))
    assert largest(step) < prod((3, 8, 30))


# ---- the numbers of one device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        (axes(tp=2, cp=2), {}),
        soak(axes(tp=4), {}),
        soak(axes(cp=3), {}),
        soak(axes(dp=2, tp=2), {"placement": "zero1"}),
        soak(axes(pp=2, tp=2), {"microbatches": 3, "schedule": "1f1b"}),
        soak(axes(tp=2), {"recompute": True, "microbatches": 2}),
        (axes(pp=2), {"microbatches": 2, "schedule": "seq1f1b(slices=3)"}),
        soak(axes(pp=2), {"microbatches": 2, "schedule": "terapipe(slices=2)"}),
    ],
    ids=str,
)
def test_training_is_that_of_one_device(mesh: Any, pins: dict[str, Any]) -> None:
    assert_parity(*model()[:2], plan=program(mesh, **pins), steps=2)


def test_a_ring_drops_what_one_device_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopart.solver.tensor.strategies", only_rings)
    found = program.__wrapped__(axes(cp=2))
    assert "shift" in found.ranks[0].source and re.search(
        r"0\.5, \[b, 4, 30\], 0, \[1, 0, 1, 2\]", found.ranks[0].source
    )
    assert_parity(*model()[:2], plan=found, steps=2)


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[2, 15, 15, 30]", "[2, 0, 15, 30]"),  # the other place's elements
        ("[2, 15, 15, 30]", "[2, 15, 15, 45]"),
        (", [2, 15, 15, 30]", ""),
        ("draw, 0.5,", "draw, 0.6,"),
    ],
)
def test_a_wrong_part_is_refused(old: str, new: str) -> None:
    pattern = "rule values: .*stage 0, microbatch 0.*it draws .*bernoulli.* where .*bernoulli.*is due"
    refused(program(axes(tp=2)), {1: [(old, new)]}, pattern)


def test_a_draw_more_or_less_is_refused() -> None:
    text = program(axes(tp=2)).ranks[1].source
    (line,) = [line for line in text.splitlines() if "[2, 15, 15, 30]" in line]
    indent = line[: len(line) - len(line.lstrip())]
    again = re.sub(r"^(\s*)\w+ =", r"\1again =", line)
    refused(
        program(axes(tp=2)), {1: [(line, f"{line}\n{again}\n{indent}del again")]}, "it draws again = .* where .* is due"
    )
    alike = re.sub(r"= torch.*", "= aten.ones.default([b, 8, 15], dtype=torch.bool, device=DEVICE)", line)
    refused(program(axes(tp=2)), {1: [(line, alike)]}, "it draws .* where .*15, 15, 30.*is due")
