"""A text in which values of equal shapes change places is refused, with the names of what is there and what belongs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import Program, VerificationError


class Branches(nn.Module):
    """Layers that drop, two values of one shape between them, a buffer each; two outputs, or a loss of them."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        a = self.one(x + self.shift)
        b = self.two(a * self.scale)
        left, right = self.left(a), self.right(b - y)
        return (left * right).square().mean() if self.loss else (left, right)


@cache
def made(loss: bool, recompute: bool = False, placement: str = "ddp", stages: int = 1) -> Program:
    torch.manual_seed(0)
    model, args = Branches(loss), (torch.randn(8, 4), torch.randn(8, 4))
    pins: dict[str, Any] = {"mesh": {"pp": stages, "dp": 2}, "microbatches": 2, "placement": placement}
    if stages > 1:
        pins |= {"stages": ["left"], "schedule": "gpipe"}
    chosen = autopart.plan(model, args, capture="direct", recompute=recompute, **pins)
    return autopart.compile(model, chosen, args, capture="direct")


def swapped(source: str, one: str, two: str, *, after: str = "") -> str:
    """The text with two pieces of it exchanged behind a place."""
    head, place, tail = source.partition(after) if after else ("", "", source)
    assert one in tail and two in tail, source
    return head + place + tail.replace(one, "\0").replace(two, one).replace("\0", two)


FAULTS: dict[str, tuple[dict[str, Any], Callable[[str], str], str]] = {
    "gradients of outputs": (
        {"loss": False},
        lambda text: swapped(text, 'tangents["d_output_0"]', 'tangents["d_output_1"]'),
        "left_backward .*is given d_output_1 where left takes d_output_0|"
        "right_backward .*is given d_output_0 where right takes d_output_1",
    ),
    "outputs": (
        {"loss": False},
        lambda text: text.replace('"output_0": output_0', '"output_0": output_1'),
        "step gives output_1 as 'output_0'",
    ),
    "inputs": (
        {"loss": True},
        lambda text: swapped(text, 'batch.input("args[0]", k)', 'batch.input("args[1]", k)'),
        "is given y where one.0 takes x",
    ),
    "draws": (
        {"loss": True},
        lambda text: swapped(text, '"one.1#0"', '"two.1#0"'),
        "is given two_1_0_draw where one.1 takes one_1_0_draw",
    ),
    "draws of what is computed again": (
        {"loss": True, "recompute": True},
        lambda text: swapped(text, '"one.1#0"', '"two.1#0"', after="def stage0_backward("),
        "backward .*is given one_1_0_draw where two.1 takes two_1_0_draw",
    ),
    "buffers": (
        {"loss": True},
        lambda text: swapped(text, 'world.buffer("shift")', 'world.buffer("scale")'),
        "is given scale where one.0 takes shift",
    ),
    "a layer twice": (
        {"loss": True},
        lambda text: re.sub(r"( +one_2, kept = .*\n)", r"\1\1", text),
        "9 functions of layers are called, but the stage has 8 layers here",
    ),
    "parameters": (
        {"loss": True},
        lambda text: swapped(text, 'world.parameters("one.0")', 'world.parameters("two.0")'),
        "is given two_0_weight where one.0 takes one_0_weight",
    ),
    "parameters that are gathered ahead, in what computes again": (
        {"loss": True, "recompute": True, "placement": "fsdp"},
        lambda text: swapped(text, '"left"', '"right"', after="def stage0_backward("),
        "rule (text|values): ",
    ),
    "what is sent": (
        {"loss": True, "stages": 2},
        lambda text: re.sub(r"return \((\w+), (\w+)\), saved", r"return (\2, \1), saved", text),
        r"SEND.* is passed where .* belongs",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str) -> None:
    pins, change, message = FAULTS[name]
    good = made(**pins)
    autopart.verify(good)
    changed = change(good.ranks[0].source)
    assert changed != good.ranks[0].source, changed
    ranks = (replace(good.ranks[0], source=changed), *good.ranks[1:])
    with pytest.raises(VerificationError, match=message):
        autopart.verify(replace(good, ranks=ranks))


def test_reductions_that_begin_under_recomputation_are_waited_for() -> None:
    good = made(True, recompute=True)
    (line,) = (line for line in good.ranks[0].source.splitlines(keepends=True) if "world.wait()" in line)
    ranks = tuple(replace(rank, source=rank.source.replace(line, "")) for rank in good.ranks)
    with pytest.raises(VerificationError, match=r"rule gradients: .*it is not waited for before the end"):
        autopart.verify(replace(good, ranks=ranks))
