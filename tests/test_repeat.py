"""Stacks of equal blocks, captured by a few of them: the graph is that of a trace of all, name by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopart import capture as capturing
from autopart.capture import blocks, capture, capture_again, dynamo, read
from autopart.capture.repeat import _same, repeated
from autopart.ir.captured import Captured


class Block(nn.Module):
    """A residual block; `kind` says what is peculiar about it."""

    def __init__(self, kind: str, place: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.kind, self.place = kind, place
        if kind == "rates":
            self.rate = 0.5 + place
        if kind == "widths" and place == 5:
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if kind == "frozen":
            self.up.requires_grad_(False)
        if kind == "statistics":
            self.norm = nn.BatchNorm1d(8)
        if kind == "conjugate":
            size = torch.ones(8, dtype=torch.complex64)
            self.size = nn.Parameter(size.conj() if place == 3 else size)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.kind == "dropout":
            h = F.dropout(h, 0.25, self.training)
        if self.kind == "rates":
            h = h * self.rate
        if self.kind == "conjugate":
            x = x * self.size.abs()
        if self.kind == "branch" and self.place % 2:
            h = torch.tanh(h)
        return x + self.down(h) * other


class Stack(nn.Module):
    """Blocks between two layers, all of which read a value that is computed before them and gets gradients of each."""

    def __init__(self, kind: str = "", count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.blocks = nn.ModuleList(Block(kind, i) for i in range(count))
        if kind == "shared":
            for block in self.blocks:
                block.down = self.blocks[0].down
        self.scales = nn.Parameter(torch.ones(count))

    def forward(self, x: Tensor) -> Any:
        x = first = self.first(x)
        other = torch.sigmoid(x)
        between = []
        for i, block in enumerate(self.blocks):
            x = block(x, other)
            if self.kind == "scaled":
                x = 1.5 * x
            if self.kind == "scaled by a parameter":
                x = self.scales[i] * x
            if self.kind == "skip" and i > 1:
                x = x + between[-2]
            if self.kind == "first":
                x = x + first
            between.append(x)
        if self.kind == "outputs":
            return x
        if self.kind == "all outputs":
            return between
        penalty = self.blocks[3].up.weight.sum() if self.kind == "penalty on one" else 0.0
        return (self.last(x) ** 2).sum() + penalty


EQUAL = ("dropout", "shared", "", "scaled", "frozen", "first", "outputs", "evaluation")
DIFFERENT = (
    *("skip", "rates", "branch", "widths", "statistics", "scaled by a parameter", "all outputs"),
    *("penalty on one", "conjugate"),
)
QUICK = ("dropout", "shared", "skip", "penalty on one")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Captured | None]:
    """Short stacks are repeated, too; what was made of each."""
    made: list[Captured | None] = []
    monkeypatch.setattr(blocks, "FEWEST", 5)

    def noted(*args: Any) -> Captured | None:
        made.append(repeated(*args))
        return made[-1]

    monkeypatch.setattr(capturing, "repeated", noted)
    return made


def whole(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Captured]) -> Captured:
    """What a trace of all blocks gives."""
    with monkeypatch.context() as patch:
        patch.setattr(dynamo, "find_run", lambda *_: None)
        return make()


def equal(one: Captured, other: Captured) -> bool:
    """Whether two steps are the same, sequence numbers up to where they begin."""
    rest = [replace(each, nodes=(), constants=()) for each in (one, other)]
    return str(one) == str(other) and _same(one, other) and rest[0] == rest[1]


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.soak) for kind in EQUAL + DIFFERENT]
)
def test_a_stack_is_what_a_trace_of_all_its_blocks_says(
    kind: str, few: list[Captured | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Stack(kind), torch.randn(4, 8)

    def captured() -> Captured:
        with torch.set_grad_enabled(kind != "evaluation"):
            return capture(model, read(model, (x,)))

    again, fresh = captured(), whole(monkeypatch, captured)
    assert equal(again, fresh)
    assert [made is not None for made in few] == ([True] if kind in EQUAL else [])


def test_another_number_of_samples_has_its_pattern_in_the_parts(
    few: list[Captured | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack("dropout")
    _, patterns = capture_again(model, read(model, (torch.randn(4, 3, 8),)), ())
    call = read(model, (torch.randn(4, 5, 8),))
    again, known = capture_again(model, call, (patterns,))
    assert known is patterns and len(patterns) == 2 and len(few) == 2
    assert equal(again, whole(monkeypatch, lambda: capture(model, call)))


def test_parts_that_do_not_fit_are_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of four blocks that is not the step of three with one more stops the short way, not the capture."""
    model, call = Stack(), read(Stack(), (torch.randn(4, 8),))
    monkeypatch.setattr(blocks, "FEWEST", 5)
    refused = []

    def faulty(three: Captured, four: Captured, paths: Any) -> Captured | None:
        middle = next(i for i, node in enumerate(four.nodes) if node.module == f"{paths[-2]}.up")
        nodes = list(four.nodes)
        nodes[middle] = replace(nodes[middle], source="elsewhere.py:1")
        refused.append(repeated(three, replace(four, nodes=tuple(nodes)), paths))
        return refused[-1]

    monkeypatch.setattr(capturing, "repeated", faulty)
    found = capture(model, call)
    assert refused == [None]
    assert equal(found, whole(monkeypatch, lambda: capture(model, call)))
