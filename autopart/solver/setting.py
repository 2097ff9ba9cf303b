"""Settings of the choices that are searched jointly, and what of them is told apart: schedules, placed segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.action import ENDS, Kind, Schedule
from autopart.ir.cost import SegmentNumbers
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Modes
from autopart.ir.plan import first_match
from autopart.solver.columns import Order
from autopart.solver.kinds import Kinds, Table
from autopart.solver.presets import Rules
from autopart.solver.request import inside


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the global choices; `rank` and `order` are the places of placement and schedule among theirs."""

    mesh: Mesh
    microbatches: int
    placements: Rules
    text: str  # of the schedule
    rank: int = 0
    variant: int = 0  # of what segments cost, by number
    order: int = 0
    groups: Order = ()  # of devices, as they are dealt to the stages; empty where all count alike

    @property
    def preference(self) -> tuple[object, ...]:
        """Of equally fast plans, that with fewer ranks and places, fewer microbatches, less sharded states, 1f1b."""
        places = self.mesh.degree("pp"), inside(self.mesh)
        return *places, self.microbatches, self.rank, self.order, self.variant, self.groups


@dataclass(frozen=True, slots=True)
class Shape:
    """What does not depend on the number of microbatches: the rank of each stage, and whether backwards are in two."""

    place: tuple[int, ...]
    halved: bool

    @property
    def several(self) -> bool:
        """Whether stages lie otherwise than one on each rank, in order."""
        return self.place != tuple(range(len(self.place)))


@dataclass(frozen=True, slots=True)
class Placed:
    """Segments told apart by their placement on the data axis, too.

    Of every such kind: its modes on the axis, and which kind its segments are of if that is left aside.
    """

    kinds: Kinds
    modes: tuple[Modes, ...]
    plain: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Kinds, names: Sequence[str], rules: Rules) -> Placed:
        """The segments called `names`, of some `kinds`, placed by some rules."""
        if len(rules) == 1:
            count = len(kinds.counts)
            return cls(kinds, (rules[0][1].on("dp"),) * count, tuple(range(count)))
        pairs = [(kind, first_match(rules, name).on("dp")) for kind, name in zip(kinds.of, names, strict=True)]
        plain, modes = zip(*dict.fromkeys(pairs), strict=True)
        return cls(Kinds.telling(pairs), modes, plain)

    def numbers(self, table: Table) -> list[SegmentNumbers]:
        """The numbers of every kind."""
        return [table.numbers[kind] for kind in self.plain]


def flights_of(schedule: Schedule) -> tuple[int, ...]:
    """How many microbatches each rank keeps at most, its stage being the only one."""
    found = []
    for row in schedule.table:
        kept = most = 0
        for action in row:
            most = max(most, kept) if action.kind in ENDS else most
            kept += (action.kind is Kind.F) - (action.kind in ENDS)
        found.append(most)
    return tuple(found)
