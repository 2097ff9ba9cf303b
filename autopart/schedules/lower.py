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
from collections.abc import Iterator, Sequence
from operator import itemgetter

from autopart.ir.action import SHARED, Action, Kind, Schedule, Scheduled
from autopart.schedules.dependencies import Edges, Needs, chain, dependencies
from autopart.schedules.timing import run_time
from autopart.schedules.validate import Position, Where, examine, unit_cost

MADE = frozenset({Kind.F, Kind.B, Kind.I})
"""The actions between which values travel by SEND and RECV."""

Ends = Sequence[Sequence[float]]
"""When each action ends, row by row."""

Crossing = tuple[Action, Position, Action, Position]
"""A value that passes between two ranks: what makes it and where that stands, what takes it and where that stands."""

Slotted = tuple[int, Action]
"""A SEND or RECV, and the step of the row before which it must stand."""


def lower(schedule: Schedule, edges: Edges) -> Scheduled:
    """The schedule with its communication: what flows over `edges` is sent as soon as it is made.

    `edges` holds (source stage, target stage) pairs. Forward ones (source < target, also long skips) carry the outputs
    of F(source) to F(target) of the same microbatch and slice; backward ones (source > target) the gradients from B or
    I to B or I. Between stages of one rank nothing is sent. A SEND follows its producer with nothing but other
    transfers between; a RECV stands before its consumer, and before what waits for an exchange of S or T that takes
    longer (these exchanges are no messages of pairs: all ranks take part). Raises ValueError for edges between stages
    that are not there, and what `validate` raises.
    """
    for source, target in sorted(edges):
        if source == target or not {source, target} <= set(range(schedule.stages)):
            raise ValueError(f"edges: ({source}, {target}) does not join two of the stages 0 to {schedule.stages - 1}")
    where, needs, intervals = examine(schedule)
    if edges != chain(schedule.stages):
        needs = dependencies(schedule, edges)
        intervals = run_time(schedule.table, needs, cost=unit_cost)
    ends = [[end for _, end in times] for times in intervals]
    waits = [_waits(row, needs, where, ends) if schedule.barriers else [] for row in schedule.table]
    transfers: list[list[Slotted]] = [[] for _ in schedule.table]
    for producer, (source, made), consumer, (target, slot) in _crossings(needs, where, ends):
        which = (producer.microbatch, producer.slice, producer.pipe)
        send = Action(Kind.SEND, producer.stage, *which, peer=consumer.stage)
        receive = Action(Kind.RECV, consumer.stage, *which, peer=producer.stage)
        transfers[source].append((made + 1, send))
        if waits[target]:
            held = bisect_right(waits[target], ends[source][made], key=itemgetter(1))
            slot = min([slot, *(at for at, _ in waits[target][held : held + 1])])
        transfers[target].append((slot, receive))
    return Scheduled(schedule, tuple(map(_merge, schedule.table, transfers)))


def _waits(row: Sequence[Action], needs: Needs, where: Where, ends: Ends) -> list[tuple[int, float]]:
    """The steps of a row that wait for an exchange of S or T, and until when, each later than those before.

    A message made by then must not be taken after them: its sender may be what they wait for.
    """
    found: list[tuple[int, float]] = []
    for step, action in enumerate(row):
        wanted = [
            where[need]
            for part in action.parts
            for need in needs[part]
            if (part.kind in SHARED or need.kind in SHARED) and need.stage != part.stage
        ]
        until = max((ends[rank][at] for rank, at in wanted), default=0.0)
        if wanted and (not found or until > found[-1][1]):
            found.append((step, until))
    return found


def _crossings(needs: Needs, where: Where, ends: Ends) -> list[Crossing]:
    """Every value that passes between two ranks, in the one order of all transfers."""

    def order(crossing: Crossing) -> tuple[float, bool, int, int]:
        # At equal times downstream ranks come first where values flow forward, upstream ones where gradients flow back:
        # a rank then passes on its own value before it takes the next one.
        producer, (rank, step), consumer, _ = crossing
        source, target = producer.stage, consumer.stage
        return (
            (ends[rank][step], True, source, -target) if target < source else (ends[rank][step], False, -source, target)
        )

    found = []
    for action, wanted in needs.items():
        if action.kind in MADE:
            here = where[action]
            for need in wanted:
                if need.kind in MADE and (there := where[need])[0] != here[0]:
                    found.append((need, there, action, here))
    return sorted(found, key=order)


def _merge(row: Sequence[Action], transfers: Sequence[Slotted]) -> tuple[Action, ...]:
    """The row with its transfers in the order given, each as late as its step and those after it allow."""
    slots = [step for step, _ in transfers]
    for index in reversed(range(len(slots) - 1)):
        slots[index] = min(slots[index], slots[index + 1])
    before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    for slot, (_, transfer) in zip(slots, transfers, strict=True):
        before[slot].append(transfer)
    return tuple(_interleave(row, before))


def _interleave(row: Sequence[Action], before: Sequence[Sequence[Action]]) -> Iterator[Action]:
    for transfers, action in zip(before, row, strict=False):
        yield from transfers
        yield action
    yield from before[-1]
