"""Lookups: a table whose output layer is split over all ranks, with the input embedding split over them as well.

before: 0F0 0F1 0S0 ...            1F0 1F1 1S0 ...
after:  0E0 0F0 0E1 0F1 0S0 ...    1E0 1E1 1F0 1E2 1F1 1S0 ...

What a microbatch begins with is looked up a microbatch ahead of its need, and what its gradient adds to the table is
added up a microbatch late, so that messages have time. Where stage 0 itself is, nothing has to travel: E stands before
F there, D behind the backward. The table keeps its order, and where E and D take no time its times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.dependencies import GRADIENT
from autopart.schedules.timing import Interval
from autopart.schedules.validate import examine

Row = Sequence[tuple[Action, Interval]]
"""The actions of a rank and when they run, at unit costs."""


def with_lookups(schedule: Schedule) -> Schedule:
    """The schedule with an E of each microbatch on every rank, and a D of each where it has backwards.

    Raises ValueError for one that `validate` refuses, that has some already, or whose output layer is not split.
    """
    if schedule.looks_up or not schedule.barriers:
        what = "has lookups already" if schedule.looks_up else "does not split its output layer"
        raise ValueError(f"schedule {schedule.name!r} {what}, so none can be put in")
    found = examine(schedule)
    rows = [list(zip(row, times, strict=True)) for row, times in zip(schedule.table, found.intervals, strict=True)]
    home = schedule.place[0]
    first = [(action, times) for action, times in rows[home] if action.stage == 0]
    begun = [(action.microbatch, start) for action, (start, _) in first if action.kind is Kind.F]
    ended = [(action.microbatch, end) for action, (_, end) in first if action.kind in GRADIENT]
    table = tuple(
        tuple(_beside(row) if rank == home else _ahead(row, schedule.place.index(rank), begun, ended))
        for rank, row in enumerate(rows)
    )
    return replace(schedule, table=table)


def looking_up(schedule: Schedule, *, wanted: bool) -> Schedule:
    """The schedule with lookups, put in if need be, where they are wanted.

    Raises ValueError for one that has some, of its own, where they are not.
    """
    if schedule.looks_up and not wanted:
        raise ValueError(
            "schedule: its table has E and D, of an input embedding that is split over the pipeline ranks, but this "
            "model's is whole, on the first rank; leave them out: they are put in where it can be split"
        )
    return with_lookups(schedule) if wanted and not schedule.looks_up else schedule


def _beside(row: Row) -> Iterator[Action]:
    """The row of stage 0: what it needs before its forward, what follows from its backward behind that."""
    for action, _ in row:
        if action.kind is Kind.F:
            yield replace(action, kind=Kind.E)
        yield action
        if action.kind in GRADIENT:
            yield replace(action, kind=Kind.D)


def _ahead(
    row: Row, stage: int, begun: Sequence[tuple[int, float]], ended: Sequence[tuple[int, float]]
) -> Iterator[Action]:
    """The row of another stage's rank, given when each microbatch's forward begins on stage 0, its backward ends.

    An E comes when the forward before its own begins, a D when the backward after its own has ended; the last D last.
    """
    starts, ends = [start for _, (start, _) in row], [end for _, (_, end) in row]
    slots: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    for (microbatch, _), (_, late) in zip(ended, [*ended[1:], (0, float("inf"))], strict=False):
        slots[bisect_left(starts, late)].append(Action(Kind.D, stage, microbatch))
    for (microbatch, _), (_, early) in zip(begun, [(0, 0.0), *begun], strict=False):
        slots[bisect_right(ends, early)].append(Action(Kind.E, stage, microbatch))
    for slot, (action, _) in zip(slots, row, strict=False):
        yield from (*slot, action)
    yield from slots[-1]
