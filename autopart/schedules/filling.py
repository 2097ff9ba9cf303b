"""Filling: idle time of a schedule that flushes goes to forwards of frozen layers, for the batch that comes next.

What comes before all trained layers, the front, depends on no step of the optimizer, so it may be computed a batch
ahead, by any rank that waits (DiffusionPipe, MLSys 2024): the rank of the first trained layer, its home, has it, and so
have its helpers. What a helper makes of a microbatch goes to the ranks that train on it as soon as it is there. The
loop is a table like any other, of a few batches, in which weights change; the front's stages are the first ones:

    0F0, 1F0,1F1,1B0,0F2,1B1,1OPT0, 1F2,...     rank 0: forward 0F2 of the next batch where it waits for 2B1
    0F1, 0F3,2F0,2B0,2F1,2B1,2OPT0, 0F5,...     rank 1: 0F3 before it has anything to train on

In programs a helper's copy of the front are further stages: of S stages, piece j of the front is stage S + i n + j on
helper number i, where the front has n pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopart.ir.action import Action, Boundary, Kind, Schedule, Weights, stages_of
from autopart.schedules.dependencies import GRADIENT, Edges
from autopart.schedules.lower import Placing, merged, transfers

SHOWN = 3
"""The batches of a table: a beginning, a middle and an end."""

Gaps = tuple[tuple[Action, ...], ...]
"""The frozen forwards of a rank for the next batch: those of gap i come before action i of its row, the last after."""

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A loop whose ranks train on one batch while they compute the frozen layers of the next.

    `trained` is the schedule of the other layers for one batch: its stage s is stage ``front + s`` of the loop.
    ``fills[r]`` are the forwards of the front's stages that rank r performs; all those of a microbatch are on one rank.
    """

    trained: Schedule
    fills: tuple[Gaps, ...]
    front: int = 1
    name: ClassVar[str] = "filled"
    weights: ClassVar[Weights] = Weights.CURRENT
    shown: ClassVar[int] = SHOWN
    lag: ClassVar[int] = 0

    @property
    def batch(self) -> int:
        """The microbatches of a batch."""
        return self.trained.microbatches

    @property
    def unfinished(self) -> int:
        """The microbatches before those of the last batch that are still needed."""
        return self.batch

    @property
    def stages(self) -> int:
        """The number of stages, a helper's copies of the front left out."""
        return self.front + self.trained.stages

    @property
    def home(self) -> int:
        """The rank that has the front in any case: that of the first trained stage."""
        return self.trained.place[0]

    @property
    def helpers(self) -> tuple[int, ...]:
        """The other ranks that perform forwards of the front, ascending."""
        return tuple(rank for rank, gaps in enumerate(self.fills) if rank != self.home and any(gaps))

    @property
    def place(self) -> tuple[int, ...]:
        """The rank of every stage of a program, the helpers' copies of the front included."""
        copies = (rank for rank in self.helpers for _ in range(self.front))
        return (*self._table_place, *copies)

    @property
    def _table_place(self) -> tuple[int, ...]:
        return (*(self.home for _ in range(self.front)), *self.trained.place)

    @property
    def keep(self) -> tuple[int, ...]:
        """No rank keeps older weights."""
        return (0,) * self.trained.ranks

    @property
    def delay(self) -> tuple[int, ...]:
        """No gradient is late."""
        return (0,) * len(self.place)

    @property
    def one(self) -> Schedule:
        """One batch in which the frozen layers are computed when they are needed: what an ordinary call performs."""
        rows = [
            tuple(self._with_front(row) if rank == self.home else map(self._later, row))
            for rank, row in enumerate(self.trained.table)
        ]
        return Schedule(self.trained.name, self.batch, self._table_place, tuple(rows))

    def parted(self) -> tuple[int, ...]:
        """The pieces of the front that do not always come right after the one before: others need not be apart."""
        found = {0}
        for gap in (gap for gaps in self.fills for gap in gaps):
            for before, action in zip((None, *gap), gap, strict=False):
                if before != replace(action, stage=action.stage - 1):
                    found.add(action.stage)
        return tuple(sorted(found))

    def table(self, batches: int = SHOWN) -> Schedule:
        """The table of a few batches; a forward of the front is on the rank that performs it."""
        place, count = self._table_place, batches * self.batch
        steady = [tuple(self._around(row, gaps)) for row, gaps in zip(self.trained.table, self.fills, strict=True)]
        rows = self._batches([self._mine(rank) for rank in range(self.trained.ranks)], steady, batches)
        return Schedule(
            self.name, count, place, rows, weights=self.weights, optimizer=Boundary.PER_RANK, anywhere=self.front
        )

    def numbered(self) -> Schedule:
        """The table with the stages of programs, in which each helper's copy of the front has its own."""
        table = self.table()
        rows = (
            tuple(self._own(rank, action) if action.stage < self.front else action for action in row)
            for rank, row in enumerate(table.table)
        )
        return replace(table, place=self.place, table=tuple(rows))

    def rows(self, edges: Edges, batches: int) -> Rows:
        """What each rank does for so many batches, with what is sent and received over `edges`; stages as of programs.

        All transfers of a batch have one order, as those of `lower` do: what the front makes is sent once it is there,
        at the time when the action before it ends, after what is made by then; its receive stands before what begins
        at that time or later.
        """
        return self._batches(self.first(edges), self.steady(edges), batches)

    def number(self, rank: int, piece: int) -> int:
        """The stage of a program that a piece of the front is on a rank."""
        if rank == self.home:
            return piece
        return self.stages + self.helpers.index(rank) * self.front + piece

    @classmethod
    def read(cls, table: Schedule, batch: int) -> Filled | None:
        """What a table of a few batches was made of, None if it is no such table."""
        front = table.anywhere
        if not front or table.microbatches != SHOWN * batch or table.mirrors:
            return None
        first = [_first_batch(row, front, batch) for row in table.table]
        place = tuple(table.place[front:])
        trained = Schedule("trained", batch, place, tuple(row for row, _ in first))
        made = cls(trained, tuple(gaps for _, gaps in first), front)
        if not place or any(len(ranks) != 1 for ranks in made._performers()):
            return None
        return made if (made.table().table, made._table_place) == (table.table, table.place) else None

    def _performers(self) -> list[set[int]]:
        """For each microbatch, the ranks that perform forwards of the front for it."""
        found: list[set[int]] = [set() for _ in range(self.batch)]
        for rank, gaps in enumerate(self.fills):
            for action in (action for gap in gaps for action in gap):
                found[action.microbatch].add(rank)
        return found

    def _batches(self, first: Sequence[Iterable[Action]], steady: Sequence[Sequence[Action]], batches: int) -> Rows:
        """The front of the first batch, then batch by batch: each with the front of the next one, if there is one."""
        made = []
        for rank, (before, row) in enumerate(zip(first, steady, strict=True)):
            done, held = [*before], stages_of(self.trained.place, rank)
            for number in range(batches):
                there = (a for a in row if a.microbatch < self.batch or number + 1 < batches)
                done += (_shifted(a, number * self.batch) for a in there)
                done += (Action(Kind.OPT, self.front + stage, number) for stage in held)
            made.append(tuple(done))
        return tuple(made)

    def _mine(self, rank: int) -> list[Action]:
        """The forwards of the front that a rank performs for the first batch, before all else."""
        mine = (action for gap in self.fills[rank] for action in gap)
        return sorted(mine, key=lambda action: (action.microbatch, action.stage))

    def first(self, edges: Edges) -> list[list[Action]]:
        """What each rank does before all else: the front of the first batch, microbatch by microbatch."""
        onward = self._onward(edges)
        rows: list[list[Action]] = [[] for _ in self.trained.table]
        for k, (rank,) in enumerate(self._performers()):
            for piece in range(self.front):
                made, taken = self._performed(rank, Action(Kind.F, piece, k), onward)
                rows[rank] += made
                for target, action in taken:
                    rows[target].append(action)
        return rows

    def steady(self, edges: Edges) -> list[tuple[Action, ...]]:
        """A batch's rows with their transfers, and the front of the next batch, whose microbatches come after its."""
        onward = self._onward(edges)
        inner = range(self.front, self.stages)
        plain = frozenset((a - self.front, b - self.front) for a, b in edges if a in inner and b in inner)
        placed, times = transfers(self.trained, plain)
        placed = [[replace(each, action=self._later(each.action)) for each in row] for row in placed]
        starts = [[start for start, _ in row] for row in times]
        fills = [
            (times[rank][gap - 1][1] if gap else 0.0, rank, gap, place, action)
            for rank, gaps in enumerate(self.fills)
            for gap, actions in enumerate(gaps)
            for place, action in enumerate(actions)
        ]
        for time, rank, gap, _, action in sorted(fills, key=lambda fill: fill[:4]):
            made, taken = self._performed(rank, _shifted(action, self.batch), onward)
            placed[rank] += (Placing(time, each, gap) for each in made)
            for target, each in taken:
                placed[target].append(Placing(time, each, bisect_left(starts[target], time)))
        for row in placed:  # what is trained on comes first at equal times; both kinds are in order already
            row.sort(key=lambda each: (each.time, each.action.microbatch >= self.batch))
        rows = zip(self.trained.table, placed, strict=True)
        return [merged([self._later(action) for action in row], each) for row, each in rows]

    def _onward(self, edges: Edges) -> list[tuple[int, int]]:
        """The edges from the front to trained stages."""
        return sorted((a, b) for a, b in edges if a < self.front <= b < self.stages)

    def _performed(
        self, rank: int, action: Action, onward: Sequence[tuple[int, int]]
    ) -> tuple[list[Action], list[tuple[int, Action]]]:
        """A forward of the front on a rank with its sends, and the receives with their ranks."""
        mine = self._own(rank, action)
        made, taken = [mine], []
        for piece, target in onward:
            peer = self.trained.place[target - self.front]
            if piece == action.stage and peer != rank:
                made.append(Action(Kind.SEND, mine.stage, action.microbatch, peer=target))
                taken.append((peer, Action(Kind.RECV, target, action.microbatch, peer=mine.stage)))
        return made, taken

    def _own(self, rank: int, action: Action) -> Action:
        return replace(action, stage=self.number(rank, action.stage))

    def _around(self, row: Sequence[Action], gaps: Gaps) -> Iterator[Action]:
        """A batch's row with the front of the next one in its gaps."""
        for gap, action in zip(gaps, (*row, None), strict=True):
            yield from (_shifted(each, self.batch) for each in gap)
            if action is not None:
                yield self._later(action)

    def _later(self, action: Action) -> Action:
        peer = action.peer + self.front if action.peer >= 0 else action.peer
        return replace(action, stage=action.stage + self.front, peer=peer)

    def _with_front(self, row: Sequence[Action]) -> Iterator[Action]:
        """The home's row: each microbatch goes through the front first, whose backward has nothing to do."""
        for action in map(self._later, row):
            if (action.kind, action.stage) == (Kind.F, self.front):
                yield from (Action(Kind.F, piece, action.microbatch) for piece in range(self.front))
            yield action
            if action.kind in GRADIENT and action.stage == self.front:
                yield from (Action(Kind.B, piece, action.microbatch) for piece in reversed(range(self.front)))


def _first_batch(row: Sequence[Action], front: int, batch: int) -> tuple[tuple[Action, ...], Gaps]:
    """The first batch of a row of a table, its stages counted from the front on; and the front in its gaps."""
    end = next((i for i, action in enumerate(row) if action.kind is Kind.OPT), len(row))
    trained: list[Action] = []
    gaps: list[tuple[Action, ...]] = [()]
    for action in row[:end]:
        if action.stage >= front:
            trained.append(replace(action, stage=action.stage - front))
            gaps.append(())
        elif batch <= action.microbatch < 2 * batch:
            gaps[-1] += (_shifted(action, -batch),)
    return tuple(trained), tuple(gaps)


def _shifted(action: Action, by: int) -> Action:
    return replace(action, microbatch=action.microbatch + by)
