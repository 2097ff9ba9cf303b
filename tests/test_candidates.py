"""Bodies along one loop: what follows from it, what it costs beside the best there is, and loops over time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.ir.placement import Shard
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented, defined
from autopart.passes.consistent import faults
from autopart.passes.segment import segment
from autopart.rules.flops import flops
from autopart.solver import eliminate
from autopart.solver.axis import Axis
from autopart.solver.eliminate import picks
from autopart.solver.place import Placed, place
from autopart.solver.tensor import layout_of, layouts_along
from autopart.testing import assert_parity
from tests.tensor_axis import CHEAP
from tests.tensor_cases import run, steps
from tests.zoo import ZOO


@pytest.mark.parametrize(("name", "number", "degree"), [("mlp", 1, 2), ("lookups", -1, 3), ("backward_only", 0, 2)])
def test_along_each_loop_a_body_computes_the_same_and_is_no_faster_than_the_best(
    name: str, number: int, degree: int
) -> None:
    _, each, batch = steps(name)
    step, axis = each[number], Axis("tp", degree, CHEAP, batch, divides=batch % degree == 0)
    best = eliminate.solve(layout_of(step.body, step.segment, axis).layout).least()
    found = list(layouts_along(step.body, step.segment, axis))
    assert found and best is not None
    for layout in found:
        solved = eliminate.solve(layout.layout)
        values, cost = solved.best(), solved.least()
        assert not layout.exact and values is not None and cost is not None and cost >= best
        body = layout.placed(picks(layout.layout, values))
        parts = [part for part in (body.forward, body.backward) if part is not None]
        assert any(strategy.cut is not None for part in parts for strategy in part.strategies)
        assert faults(body, step.segment) == ()
        assert run(body, step, batch).worst < 1e-12


# ---- loops over time -------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM over a few steps, whose forward and backward are one entangled body."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.out(self.rnn(x)[0]), y)


@cache
def recurrent(samples: int) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    torch.manual_seed(0)
    model = Recurrent().double()
    args = torch.randn(samples, 3, 6).double(), torch.randn(samples, 3, 3).double()
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, "direct"))


def program(samples: int, **pins: Any) -> Program:
    segmented = recurrent(samples)[2]
    return lower(segmented, solve(segmented, mesh={"tp": 2}, cluster=CHEAP, **pins))


def whole(segmented: Segmented, placed: Placed, samples: int) -> float:
    """The share of a step's FLOPs that every place does."""
    total = alone = 0.0
    for body in placed.segments:
        for part in (body.forward, body.backward):
            if part is None:
                continue
            values = {k: v.sized(lambda size: int(size.at(samples))) for k, v in defined(part.function).items()}
            for node, strategy in zip(part.function.nodes, part.strategies, strict=True):
                work = float(flops(node.sized(lambda size: int(size.at(samples))), values))
                total, alone = total + work, alone + work * (strategy.cut is None)
    return alone / total


@pytest.mark.parametrize("samples", [pytest.param(4, marks=pytest.mark.soak), 3])
def test_a_loop_over_time_runs_by_samples_or_by_hidden_units(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few samples run by hidden units, which each step gathers, also where the axis divides them; a note says so."""
    monkeypatch.setattr("autopart.solver.place.LARGEST", 1 << 12)  # a longer loop is too entangled by itself
    found = program(samples)
    (note,) = [note for note in found.plan.notes if "too entangled" in note]
    assert note.startswith("tp inside rnn") and "a placement may be faster, by " in note
    assert "Shard(1) -> Replicate()" in found.ranks[0].source
    assert_parity(*recurrent(samples)[:2], plan=found, steps=2)


@pytest.mark.soak
def test_pins_hold_in_a_loop_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopart.solver.place.LARGEST", 1 << 12)
    found = program(3, placement={"rnn.weight_ih_l0": {"tp": Shard(0, 4)}})
    assert found.plan.tensor is not None
    assert dict(found.plan.tensor.parameters)["rnn.weight_ih_l0"] == Shard(0, 4)
    assert_parity(*recurrent(3)[:2], plan=found, steps=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["lstm", "gru-time-first", "cells", "mixture"])
def test_hardly_anything_of_a_model_is_computed_everywhere(name: str) -> None:
    """Less than 1 FLOP in 100 on two places: single numbers, and what is not worth splitting."""
    found = ZOO[name]()
    call = read(found.model, found.args, found.kwargs, batch=found.batch)
    made = segment(captured_step(found.model, call, None, False, found.capture, found.semantics))
    assert whole(made, place(made, Axis("tp", 2, CHEAP, 6, divides=True)), 6) < 0.01
