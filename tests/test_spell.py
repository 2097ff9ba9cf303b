"""A schedule as a plan's text: names, options, tables and objects, there and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from autopart import schedules
from autopart.ir.action import Schedule
from autopart.schedules.spell import is_table
from tests.schedule_strategies import schedules as any_schedule

TABLE = "0F0,0B0\n1F0,1B0"


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ("1f1b", "1f1b"),
        (" bfs(chunks=3) ", "bfs(chunks=3)"),
        ("0F0, ,0B0\n\n 1F0,1B0", TABLE),
        ("0F0", "0F0"),
        (schedules.build("bfs", ranks=2, microbatches=2, chunks=3), "bfs(chunks=3)"),
        (replace(schedules.build("gpipe", ranks=2, microbatches=1), name="mine"), TABLE),
    ],
)
def test_one_text_for_each(given_: str | Schedule, text: str) -> None:
    assert schedules.spell(given_) == schedules.spell(text) == text


def test_a_text_is_made_for_ranks_and_microbatches() -> None:
    assert schedules.make("bfs(chunks=3)", ranks=2, microbatches=4).stages == 6
    assert schedules.make(TABLE, ranks=2, microbatches=1).place == (0, 1)
    with pytest.raises(ValueError, match="schedule: the table has 2 rows, one a pipeline rank, but the mesh has pp=3"):
        schedules.make(TABLE, ranks=3, microbatches=1)
    with pytest.raises(ValueError, match="microbatches: the schedule's table has 1 microbatch, not 2"):
        schedules.make(TABLE, ranks=2, microbatches=2)


@given(any_schedule())
def test_any_schedule_is_read_back(schedule: Schedule) -> None:
    text = schedules.spell(schedule)
    assert is_table(text)
    made = schedules.make(text, ranks=schedule.ranks, microbatches=schedule.microbatches)
    assert replace(made, name=schedule.name) == schedule


@pytest.mark.parametrize("family", schedules.names(), ids=lambda family: family.name)
def test_every_family_is_a_name(family: schedules.build.Family) -> None:  # type: ignore[name-defined]
    assert schedules.spell(family.name) == family.name and not is_table(family.name + "(chunks=2, group=3)")


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        (
            "1f2b",
            ValueError,
            "schedule: '1f2b' is not known, did you mean '1f1b'. one of gpipe, 1f1b.* a table of actions has",
        ),
        ("", ValueError, "schedule: '' is not known"),
        ("0F0,0B1", ValueError, "schedule 'custom': rank 0: 0B0 is missing"),
        ("0F0,0X0", ValueError, "line 1, cell 2: not an action: '0X0'"),
        (None, TypeError, "schedule: expected a name such as '1f1b'"),
    ],
)
def test_what_is_no_schedule_is_refused(given_: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        schedules.spell(given_)  # type: ignore[arg-type]
