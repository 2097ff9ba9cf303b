"""`autopart.simulate`: a program's or a plan's timeline, from the same costs that the plan was made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopart
from tests.models import MLP, MODELS


def made() -> Any:
    model, args, kwargs = MODELS["mlp"]()
    plan = autopart.plan(model, args, kwargs, mesh={"pp": 2}, microbatches=3, schedule="1f1b", capture="direct")
    return autopart.compile(model, plan, args, kwargs, capture="direct")


def test_a_program_and_its_plan() -> None:
    program = made()
    seconds = program.plan.prediction.stage_seconds
    timeline = autopart.simulate(program.plan)
    assert timeline.makespan >= 3 * max(seconds) and len(timeline.spans) == 12
    found = autopart.simulate(program)
    for stage, each in enumerate(seconds):
        spent = sum(span.end - span.start for span in found.spans if span.action.stage == stage)
        assert spent == pytest.approx(3 * each), "the same roofline on the same default devices"
    quick = autopart.simulate(program, autopart.Cluster.preset("h100-80", per_node=2))
    assert quick.makespan < found.makespan


def test_refusals() -> None:
    program = made()
    cluster = autopart.Cluster.preset("h100-80", per_node=1)
    with pytest.raises(ValueError, match=r"^cluster: 1 devices are too few for the mesh pp=2"):
        autopart.simulate(program, cluster)
    with pytest.raises(ValueError, match=r"^cluster: a plan has the seconds"):
        autopart.simulate(program.plan, cluster)
    with pytest.raises(TypeError, match="expected a Program or a Plan, not str"):
        autopart.simulate("plan.json")


def test_backwards_in_two_take_the_seconds_of_their_halves() -> None:
    """On equal layers W, whose products are as large as those of I, fills idle time; the first stage has no I."""
    torch.manual_seed(0)
    model, args = MLP(width=64, layers=7).double(), (torch.randn(8, 64).double(), torch.randn(8, 3).double())
    pins = {"mesh": {"pp": 4}, "microbatches": 8, "capture": "direct"}
    plans = {name: autopart.plan(model, args, schedule=name, **pins) for name in ("1f1b", "zb-h1")}
    found = {
        name: autopart.simulate(autopart.compile(model, plan, args, capture="direct")) for name, plan in plans.items()
    }
    assert found["zb-h1"].makespan < found["1f1b"].makespan
    assert plans["zb-h1"].prediction.step_seconds < plans["1f1b"].prediction.step_seconds

    def spent(name: str, kind: str, stage: int) -> float:
        spans = [s for s in found[name].spans if s.action.kind == kind and s.action.stage == stage]
        return sum(span.end - span.start for span in spans)

    assert spent("zb-h1", "I", 0) == 0 and spent("zb-h1", "W", 0) == pytest.approx(spent("1f1b", "B", 0))
    of_plan = [s for s in autopart.simulate(plans["zb-h1"]).spans if s.action.kind == "I"]
    assert all((span.end > span.start) == (span.action.stage > 0) for span in of_plan)
    for stage in (1, 2, 3):
        halves = spent("zb-h1", "I", stage), spent("zb-h1", "W", stage)
        assert min(halves) > 0.3 * sum(halves) and sum(halves) == pytest.approx(spent("1f1b", "B", stage), rel=0.2)
