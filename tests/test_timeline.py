"""`autopart.simulate`: a program's or a plan's timeline, from the same costs that the plan was made with."""

from __future__ import annotations

from typing import Any

import pytest

import autopart
from tests.models import MODELS


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
