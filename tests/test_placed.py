"""Orders for stages that have their places: valid for any placement, forwards alone or all of them first."""

from __future__ import annotations

import pytest
from hypothesis import given

from autopart import schedules
from autopart.ir.action import Kind, Schedule
from autopart.schedules.placed import forwards, forwards_first, is_forwards_first
from tests.schedule_strategies import schedules as any_schedule


@given(any_schedule())
def test_any_placement_has_both(schedule: Schedule) -> None:
    for made in (forwards, forwards_first):
        order = made(schedule.place, schedule.microbatches)
        schedules.validate(order)
        assert order.place == schedule.place and is_forwards_first(order)
        assert (made is forwards) == all(action.kind is Kind.F for _, action in order.actions())


def test_a_stage_a_rank_is_gpipe() -> None:
    assert forwards_first((0, 1, 2), 4).table == schedules.build("gpipe", ranks=3, microbatches=4).table
    assert forwards((0, 1, 2), 4).table == schedules.build("forward", ranks=3, microbatches=4).table


def test_forwards_go_through_all_stages_in_rounds() -> None:
    assert str(forwards((0, 1, 1, 0), 3)) == "0F0,0F1,3F0,3F1,0F2,3F2\n1F0,1F1,2F0,2F1,1F2,2F2"


@pytest.mark.parametrize(("name", "first"), [("gpipe", True), ("bfs", True), ("1f1b", False), ("hanayo", False)])
def test_which_families_do_all_forwards_first(name: str, first: bool) -> None:
    assert is_forwards_first(schedules.build(name, ranks=2, microbatches=4)) == first
