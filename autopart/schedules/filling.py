"""Filling: idle time of a schedule that flushes goes to forwards of frozen layers, for the batch that comes next.

What comes before all trained layers depends on no step of the optimizer, so it may be computed a batch ahead: it is a
stage of its own on the first rank, whose forwards go where that rank would wait (DiffusionPipe, MLSys 2024, does so
with the layers of all ranks). The loop is a table like any other, of a few batches, in which weights change:

    0F0,0F1, 1F0,1F1,0F2,0F3,1B0,0B0,1B1,0B1,0OPT0,1OPT0, 1F2,...     rank 0: forwards 0F2, 0F3 where it waits for 1B0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.action import Action, Boundary, Kind, Schedule, Weights, stages_of
from autopart.schedules.dependencies import Edges, chain, dependencies
from autopart.schedules.lower import lower
from autopart.schedules.timing import run_time

SHOWN = 3
"""The batches of a table: a beginning, a middle and an end."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A loop whose ranks train on one batch while the first one computes the frozen layers of the next.

    `trained` is the schedule of the other layers for one batch, a stage a rank. ``fills[i]`` forwards of the frozen
    stage come before action i of its first row, with its last entry those after the row.
    """

    trained: Schedule
    fills: tuple[int, ...]
    name: str = "filled"
    weights: Weights = Weights.CURRENT
    shown: int = SHOWN
    lag: int = 0

    @property
    def batch(self) -> int:
        """The microbatches of a batch."""
        return self.trained.microbatches

    @property
    def unfinished(self) -> int:
        """The microbatches before those of the last batch that are still needed."""
        return self.batch

    @property
    def keep(self) -> tuple[int, ...]:
        """No rank keeps older weights."""
        return (0,) * self.trained.ranks

    @property
    def delay(self) -> tuple[int, ...]:
        """No gradient is late."""
        return (0,) * (self.trained.stages + 1)

    @property
    def one(self) -> Schedule:
        """One batch in which the frozen layers are computed when they are needed: what an ordinary call performs."""
        rows = [
            tuple(_with_frozen(row) if rank == 0 else map(_later, row)) for rank, row in enumerate(self.trained.table)
        ]
        return Schedule(self.trained.name, self.batch, (0, *self.trained.place), tuple(rows))

    def batch_rows(self, edges: Edges) -> tuple[tuple[Action, ...], ...]:
        """What each rank does to train on a batch, with its transfers; the frozen forwards are left out."""
        rows = lower(self.one, edges).table
        return tuple(tuple(a for a in row if (a.kind, a.stage) != (Kind.F, 0)) for row in rows)

    def rows(self, edges: Edges, batches: int) -> tuple[tuple[Action, ...], ...]:
        """What each rank does for so many batches, with what is sent and received over `edges`."""
        made = []
        for rank, row in enumerate(self.batch_rows(edges)):
            done = [*self._frozen(0)] if rank == 0 else []
            for number in range(batches):
                coming = self._frozen(number + 1) if rank == 0 and number + 1 < batches else iter(())
                done += self._around(row, coming, number)
                done += (Action(Kind.OPT, stage, number) for stage in stages_of(self.one.place, rank))
            made.append(tuple(done))
        return tuple(made)

    def _frozen(self, number: int) -> Iterator[Action]:
        return (Action(Kind.F, 0, number * self.batch + k) for k in range(self.batch))

    def _around(self, row: Sequence[Action], coming: Iterator[Action], number: int) -> Iterator[Action]:
        """A batch's row with the frozen forwards of the next one where they go."""
        fills = iter(self.fills)
        for action in row:
            if counts(action):
                yield from _taken(coming, next(fills))
            yield replace(action, microbatch=action.microbatch + number * self.batch)
        yield from coming

    def table(self) -> Schedule:
        """The table of a few batches."""
        rows = self.rows(frozenset(), SHOWN)
        place = (0, *self.trained.place)
        return Schedule("filled", SHOWN * self.batch, place, rows, weights=Weights.CURRENT, optimizer=Boundary.PER_RANK)

    @classmethod
    def read(cls, table: Schedule, batch: int) -> Filled | None:
        """What a table of a few batches was made of, None if it is no such table."""
        if table.microbatches != SHOWN * batch or table.stages != table.ranks + 1:
            return None
        first = [_first_batch(row, batch) for row in table.table]
        if not first[0]:
            return None
        trained = tuple(tuple(replace(a, stage=a.stage - 1) for a in row if a.stage) for row in first)
        schedule = Schedule("trained", batch, tuple(range(table.ranks)), trained)
        fills, row = [0], table.table[0][batch:]
        for action in row[: next(i for i, a in enumerate(row) if a.kind is Kind.OPT)]:
            if counts(action):
                fills.append(0)
            elif (action.kind, action.stage) == (Kind.F, 0):
                fills[-1] += 1
        made = cls(schedule, tuple(fills))
        return made if made.table().table == table.table and table.place == made.one.place else None


def fill_idle(trained: Schedule, seconds: Sequence[Mapping[str, float]], frozen: float) -> Filled:
    """The loop in which the idle windows of the first rank take forwards of `frozen` seconds each, in order of time.

    `seconds` are those of a forward (F) and a backward (B) of each stage. What fits into no window comes at the end.
    """
    needs = dependencies(trained, chain(trained.stages))
    intervals = run_time(trained.table, needs, cost=lambda action: seconds[action.stage][action.kind])[0]
    left, end, fills = trained.microbatches, 0.0, []
    for start, stop in intervals:
        fits = min(left, int((start - end) / frozen + 1e-9)) if frozen > 0 else left * (start > end)
        fills.append(fits)
        left, end = left - fits, stop
    return Filled(trained, (*fills, left))


def counts(action: Action) -> bool:
    """Whether an action is one of the trained layers: those between which frozen forwards go."""
    return action.kind in (Kind.F, Kind.B) and action.stage > 0


def _first_batch(row: Sequence[Action], batch: int) -> tuple[Action, ...]:
    return tuple(a for a in row if a.kind is not Kind.OPT and a.microbatch < batch)


def _taken(items: Iterator[Action], count: int) -> Iterator[Action]:
    for _, item in zip(range(count), items, strict=False):
        yield item


def _later(action: Action) -> Action:
    return replace(action, stage=action.stage + 1)


def _with_frozen(row: Sequence[Action]) -> Iterator[Action]:
    """The first rank's row: each microbatch goes through the frozen stage first, whose backward has nothing to do."""
    for action in map(_later, row):
        if action.kind is Kind.F:
            yield Action(Kind.F, 0, action.microbatch)
        yield action
        if action.kind is Kind.B:
            yield Action(Kind.B, 0, action.microbatch)
