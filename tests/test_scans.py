"""Cumulative sums along a split dim: a sum of each place's own, and the totals of the places before, or after."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from autopart.scans import FROM_END, cumsum_from_end
from autopart.testing import assert_parity
from autopart.testing.rules import as_node
from tests.ring_models import NEAR
from tests.tensor_axis import axes, soak
from tests.test_rule_strategies import run_all

aten = torch.ops.aten


def test_from_the_end_is_flipped_summed_and_flipped() -> None:
    x = torch.randn(3, 7, 2)
    assert torch.equal(FROM_END(x, 1), x.flip(1).cumsum(1).flip(1))
    assert FROM_END(x.to("meta"), -1).shape == x.shape and torch.equal(FROM_END(x, -2), cumsum_from_end(x, 1))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("op", [aten.cumsum.default, FROM_END], ids=str)
def test_the_places_together_sum_up(op: Any, degree: int) -> None:
    """Of seven elements, in uneven pieces; whole numbers and flags become sums of 64 bits."""
    for x in (torch.randn(3, 7, 2).double(), torch.arange(21).view(3, 7, 1)):
        found = run_all(*as_node((op, x, 1)), degree)
        assert sum(strategy.spread for strategy in found) == 1
    if op is aten.cumsum.default:
        assert any(strategy.spread for strategy in run_all(*as_node((op, torch.rand(5, 7) > 0.5, -1)), degree))


# ---- causal linear attention -----------------------------------------------------------------------------------------

WIDTH = 6


class Causal(nn.Module):
    """Causal linear attention: each query meets the sum of the outer products of keys and values so far."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        h = self.norm(x)
        query, key, value = self.query(h), torch.tanh(self.key(h)), self.value(h)
        state = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(1)
        mixed = (query.unsqueeze(-2) @ state).squeeze(-2)
        return F.cross_entropy(self.head(x + self.out(mixed)).flatten(0, 1), targets.flatten())


@cache
def made(length: int) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    torch.manual_seed(0)
    model, ids = Causal().double(), torch.randint(11, (1, length))
    args = ids, ids.roll(-1, 1)
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, "direct"))


@cache
def program(length: int, mesh: tuple[tuple[str, int], ...]) -> Program:
    segmented = made(length)[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=NEAR))


def opnames(step: Segmented) -> set[str]:
    functions = [f for body in step.bodies for f in (body.forward, body.backward) if f is not None]
    return {node.opname for function in functions for node in function.nodes}


def test_the_backward_of_a_sum_so_far_is_one_operator() -> None:
    found = opnames(made(24)[2])
    assert "autopart.cumsum_from_end.default" in found and "aten.flip.default" not in found


@pytest.mark.parametrize(("length", "mesh"), [(47, axes(cp=2)), soak(48, axes(cp=4)), soak(48, axes(tp=2, cp=2))])
def test_causal_linear_attention_hands_on_totals(length: int, mesh: Any) -> None:
    """Unaided the solver splits the tokens: forward and backward exchange states, none of them with a token dim."""
    whole = program(length, mesh)
    text = whole.ranks[1].source
    assert "cumsum_from_end" in text
    if len(mesh) == 1:
        gathered = re.findall(r"world\.all_gather_values\(\w+, axis=\"cp\", dim=1, pieces=\[1(?:, 1)+\]\)", text)
        assert len(gathered) == 2  # of the sum, and of its backward
        assert set(re.findall(r"world\.(\w+)_values", text)) <= {"all_gather", "all_reduce"}
    assert_parity(*made(length)[:2], plan=whole, steps=2)
