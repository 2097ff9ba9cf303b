"""Lowering: SEND and RECV put among the compute actions of a schedule.

All transfers have one order, which every row keeps: that of the moments at which their values are made when the table
runs at unit costs. So the two ranks of a pair agree on the order of what passes between them, and the rows end whatever
the transport does (`progress`). Within that order a SEND comes as early and a RECV as late as possible, so that no
receive holds up work that does not need it. Compute that repeats in time gives rows that repeat, so the program text
can loop over them.

rewrite (1f1b, rank 1 of 2):  1F0 1B0 1F1 1B1  -->  1RECV0>0 1F0 1B0 1RECV1>0 1SEND0>0 1F1 1B1 1SEND1>0
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

from autopart.ir.action import LOOKUPS, SHARED, Action, Kind, Schedule, Scheduled
from autopart.schedules.dependencies import Edges, chain, dependencies
from autopart.schedules.timing import Interval, run_time
from autopart.schedules.validate import Examined, examine, unit_cost

MADE = frozenset({Kind.F, Kind.B, Kind.I})
"""The actions between which values travel by SEND and RECV; so they do to and from S, T, E, D, if edges say so."""

ASIDE = SHARED | LOOKUPS
"""Those of layers that are split over all ranks."""

Ends = Sequence[Sequence[float]]
"""When each action ends, row by row."""


@dataclass(frozen=True, slots=True)
class Placing:
    """What is put into a row of actions: it stands before step `slot` of the row, at the latest.

    `time` is when the values of a transfer are made if the table runs at unit costs.
    """

    time: float
    action: Action
    slot: int


def lower(schedule: Schedule, edges: Edges) -> Scheduled:
    """The schedule with its communication: what flows over `edges` is sent as soon as it is made.

    `edges` holds (source stage, target stage) pairs. Forward ones (source < target, also long skips) carry the outputs
    of F(source) to F(target) of the same microbatch and slice; backward ones (source > target) the gradients from B or
    I to B or I. Between stages of one rank nothing is sent. A SEND follows its producer with nothing but other
    transfers between; a RECV stands before its consumer.

    Of S stages, stage S + s is the part of the output layer that stage s has, where that is split: edges to and from it
    carry what its S and T take and make. Stage 2 S + s is that of the input embedding, likewise: its edges to stage 0
    carry outputs, those from there gradients. Where no edge has such an end, these actions have exchanges of their own,
    which are no messages of pairs, and a RECV stands before what waits for a longer one of them. Raises
    ValueError for edges between stages that are not there, and what `validate` raises.
    """
    rows = zip(schedule.table, transfers(schedule, edges)[0], strict=True)
    return Scheduled(schedule, tuple(merged(row, placed) for row, placed in rows))


def transfers(schedule: Schedule, edges: Edges) -> tuple[list[list[Placing]], Sequence[Sequence[Interval]]]:
    """What `lower` puts into each row, in the one order of all transfers; and when each action runs at unit costs."""
    count = schedule.stages * (1 + bool(schedule.barriers) + schedule.looks_up)
    for source, target in sorted(edges):
        if source == target or not {source, target} <= set(range(count)):
            raise ValueError(f"edges: ({source}, {target}) does not join two of the stages 0 to {count - 1}")
    found = examine(schedule)
    plain = frozenset((a, b) for a, b in edges if max(a, b) < schedule.stages)
    if plain != chain(schedule.stages):
        needs = dependencies(schedule, plain, found.columns)
        found = replace(found, needs=needs, intervals=run_time(schedule.table, needs, cost=unit_cost))
    ends = [[end for _, end in times] for times in found.intervals]
    waits = _waits(found, ends) if schedule.barriers and plain == edges else {}
    placed: list[list[Placing]] = [[] for _ in schedule.table]
    for need, number in _crossings(found, ends, edges - plain, schedule):
        producer, consumer = found.parts[need], found.parts[number]
        (source, made), (target, slot) = found.positions[need], found.positions[number]
        which = (producer.microbatch, producer.slice, producer.pipe)
        giver, taker = _number(producer, schedule), _number(consumer, schedule)
        time = ends[source][made]
        placed[source].append(Placing(time, Action(Kind.SEND, giver, *which, taker), made + 1))
        if target in waits:
            held = bisect_right(waits[target], time, key=itemgetter(1))
            slot = min([slot, *(at for at, _ in waits[target][held : held + 1])])
        placed[target].append(Placing(time, Action(Kind.RECV, taker, *which, giver), slot))
    return placed, found.intervals


def _waits(found: Examined, ends: Ends) -> dict[int, list[tuple[int, float]]]:
    """The steps of each row that wait for an exchange of their own, and until when, each later than those before.

    A message made by then must not be taken after them: its sender may be what they wait for.
    """
    waits: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for part, (rank, step), needs in zip(found.parts, found.positions, found.needs, strict=True):
        wanted = [
            found.positions[need]
            for need in needs
            if (part.kind in ASIDE or found.parts[need].kind in ASIDE) and found.parts[need].stage != part.stage
        ]
        until = max((ends[peer][at] for peer, at in wanted), default=0.0)
        if wanted and (not waits[rank] or until > waits[rank][-1][1]):
            waits[rank].append((step, until))
    return waits


def _number(action: Action, schedule: Schedule) -> int:
    """The stage that an action belongs to, the parts of layers that are split counted after the stages."""
    return action.stage + schedule.stages * ((action.kind in SHARED) + 2 * (action.kind in LOOKUPS))


def _crossings(found: Examined, ends: Ends, parts: Edges, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Every value that passes between two ranks, in the one order of all transfers: what makes it, what takes it.

    `parts` are the edges of parts of layers.
    """
    crossings = []
    for number, (part, (rank, _), needs) in enumerate(zip(found.parts, found.positions, found.needs, strict=True)):
        if part.kind not in MADE and not parts:
            continue
        for need in needs:
            source, step = found.positions[need]
            plain = part.kind in MADE and found.parts[need].kind in MADE
            passes = plain or (_number(found.parts[need], schedule), _number(part, schedule)) in parts
            if source != rank and passes:
                # At equal times downstream ranks come first where values flow forward, upstream ones where gradients
                # flow back: a rank then passes on its own value before it takes the next one.
                back, stage = part.stage < found.parts[need].stage, found.parts[need].stage
                order = (stage, -part.stage) if back else (-stage, part.stage)
                crossings.append((ends[source][step], back, *order, number, need))
    crossings.sort()
    return ((need, number) for *_, number, need in crossings)


def merged(row: Sequence[Action], placed: Sequence[Placing]) -> tuple[Action, ...]:
    """The row with what is put into it in the order given, each as late as its slot and those after it allow."""
    latest = [*accumulate((each.slot for each in reversed(placed)), min)][::-1]
    made: list[Action] = []
    done = 0
    for slot, each in zip(latest, placed, strict=True):
        made += row[done:slot]
        made.append(each.action)
        done = slot
    return (*made, *row[done:])
