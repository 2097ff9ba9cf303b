"""The plans of filled loops: which ranks help, and how the front is cut, by the predicted step and by memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopart import capture as capturing
from autopart.api import compiler, loop_plans
from autopart.errors import PlanInfeasible
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from tests.test_filled import FAST, Conditioned, batches

MESH = Mesh.of({"pp": 2})


@pytest.fixture(scope="module")
def step() -> Captured:
    """Of a model whose front is computed by both ranks."""
    return captured(12)


def captured(depth: int, table: int = 0) -> Captured:
    model = Conditioned(depth, table).double()
    call = capturing.read(model, batches()[0], {}, batch=None, target=capturing.NO_TARGET)
    return compiler.captured_step(model, call, None, False, "compile")


def plans(step: Captured, schedule: str = "1f1b", **pins: Any) -> tuple[Plan, Plan]:
    """The plan of ordinary calls, and that of the loop."""
    made: Any = {"cluster": FAST, "devices": 2, **pins}
    ordinary = loop_plans.of_state(step, schedule, MESH, 4, batch=8, pins=made)
    segmented = segment(step, cuts=ordinary.cuts)
    return ordinary, loop_plans.of_loop(segmented, ordinary, schedule, 4, pins=made)


def test_ranks_without_room_do_not_help() -> None:
    """The last rank holds a table of words; with the front it would hold more than there is."""
    step = captured(30, table=500)
    one, free = plans(step)
    assert free.helpers == (1,) and len(one.stages) == 4 and free.front == 2, "whole microbatches fit no window"
    assert free.prediction.step_seconds < one.prediction.step_seconds
    most = free.prediction.memory[-1].total
    assert plans(step, memory=most)[1].helpers == (1,)
    full = plans(step, memory=most - 1)[1]
    assert full.helpers == () and full.prediction.step_seconds > free.prediction.step_seconds
    assert full.prediction.memory[-1].parameters == one.prediction.memory[-1].parameters
    with pytest.raises(PlanInfeasible, match=r"memory: rank 1 would hold .* what the frozen layers make of the batch"):
        plans(step, memory=full.prediction.memory[-1].total - 1)
    assert any("rank 1 does not help, as it would hold" in note for note in full.notes)


def test_parameters_that_are_placed_stay_where_they_are(step: Captured) -> None:
    """After an ordinary call the front is on rank 0 alone; after a loop it is where that put it."""
    pins: Any = {"cluster": FAST, "devices": 2}
    one, free = plans(step)
    segmented = segment(step, cuts=one.cuts)
    for plan, helpers in ((one, ()), (free, (1,))):
        state = split(shard(segmented), plan).state
        columns = {unit.columns for unit in state.units if 0 in unit.stages}
        assert columns == {(0, *helpers)}
        assert loop_plans.of_loop(segmented, one, "1f1b", 4, pins=pins, state=state).helpers == helpers


def test_a_plan_of_a_filled_loop_is_kept_and_others_are_refused(step: Captured) -> None:
    one, free = plans(step)
    segmented = segment(step, cuts=one.cuts)
    assert loop_plans.of_loop(segmented, free, "1f1b", 4, pins={}) == free
    with pytest.raises(ValueError, match="has no stage of frozen layers in front that 'gpipe' goes with"):
        loop_plans.of_loop(segmented, one, "gpipe", 4, pins={})
    for wrong in ({"helpers": (0,)}, {"helpers": (2,)}, {"front": 0}, {"front": 3}):
        with pytest.raises(ValueError, match="cannot compute the first"):
            replace(free, **wrong)


def test_what_slow_links_do(step: Captured) -> None:
    """Where messages take longer than all layers, there is much time to fill on the first rank, and none helps."""
    slow = 1e-7
    plan = plans(step, cluster=type(FAST).uniform(2, 10**9, 1e12, 1e12, 1e9, slow))[1]
    assert plan.helpers == () and "4 on rank 0; 0 end after all else" in plan.notes[-1]
    assert plan.prediction.step_seconds > 8 * slow, "messages count in the step"
