"""Which version of the weights each action of a schedule uses; a version is the number of steps that made it."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.action import ENDS, Action, Kind, Schedule, Weights
from autopart.schedules.dependencies import batch_size


@dataclass(frozen=True, slots=True)
class Staleness:
    """`crossed`: the most optimizer steps that a microbatch meets between its forward and its backward on a stage.

    `live`: how many versions of the weights forwards used that still await their backward, with the newest one: what a
    stage keeps if each backward is to use its forward's.
    """

    crossed: int
    live: int


def versions(schedule: Schedule) -> dict[Action, int]:
    """The version that every F, B, I and W of a schedule (one that `validate` accepts) uses, by its weight policy."""
    used: dict[Action, int] = {}
    batch = batch_size(schedule)
    for row in schedule.table:
        steps: dict[int, int] = {}
        forwards: dict[tuple[int, int, int], int] = {}
        for part in (part for action in row for part in action.parts):
            newest, unit = steps.get(part.stage, 0), (part.stage, part.microbatch, part.slice)
            if part.kind is Kind.OPT:
                steps[part.stage] = newest + 1
            elif part.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                match schedule.weights:
                    case Weights.SYNC:
                        used[part] = 0
                    case Weights.CURRENT:
                        used[part] = newest
                    case Weights.STASH:
                        used[part] = forwards.setdefault(unit, newest)
                    case Weights.DOUBLE:
                        used[part] = max(part.microbatch // batch - 1, 0)
    return used


def staleness(schedule: Schedule) -> tuple[Staleness, ...]:
    """How stale weights get on every stage, whatever the weight policy."""
    found = []
    for stage in range(schedule.stages):
        steps, crossed, live = 0, 0, 1
        forwards: dict[tuple[int, int], int] = {}
        for action in schedule.table[schedule.place[stage]]:
            for part in (part for part in action.parts if part.stage == stage):
                unit = (part.microbatch, part.slice)
                if part.kind is Kind.OPT:
                    steps += 1
                elif part.kind is Kind.F:
                    forwards[unit] = steps
                elif part.kind in ENDS:
                    crossed = max(crossed, steps - forwards[unit])
                    live = max(live, len({*forwards.values(), steps}))
                    del forwards[unit]
        found.append(Staleness(crossed, live))
    return tuple(found)
