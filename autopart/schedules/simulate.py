"""Predicting a schedule's time and memory from the cost of its actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.dependencies import dependencies
from autopart.schedules.timing import Interval, run_time
from autopart.schedules.validate import validate

Cost = float | Sequence[float] | Mapping[int, float]
"""One number a rank-share (a microbatch through all of a rank's stages), or one number for each stage."""

UNIT: Mapping[str, Cost] = MappingProxyType({"F": 1.0, "I": 1.0, "W": 1.0})


@dataclass(frozen=True, slots=True)
class Span:
    """One action as it ran; times in the unit of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated run of a schedule; times in the unit of the costs.

    `busy` in the two bubbles is the work of the busiest rank. `flush_bubble` is makespan - busy: what is lost when all
    ranks wait for each other before the optimizer steps. `span_bubble` is the longest time from a rank's first start to
    its last end, - busy: what is lost when each rank steps alone. `peak_activations` counts, for each rank,
    microbatches on a rank-share (1 / number of the rank's stages for each stage), held from F to the end of B, or of W
    where they are split.
    """

    makespan: float
    flush_bubble: float
    span_bubble: float
    peak_activations: tuple[float, ...]
    spans: tuple[Span, ...]
    idle: tuple[tuple[Interval, ...], ...]
    """The windows of each rank, between 0 and makespan, in which it computes nothing."""


def simulate(schedule: Schedule, *, costs: Mapping[str, Cost] = UNIT, comm: float = 0.0) -> Timeline:
    """The timeline of a schedule (one that `validate` accepts) under the chain of stages.

    `costs` gives the time of F, I, W and B (default I + W) as one number a rank-share, which the rank's stages divide
    equally, or as a tuple or mapping with the time of each stage itself. `comm` is the latency of an edge between two
    ranks; it occupies neither. Raises ValueError for costs that are unknown, missing, negative or not one a stage, and
    for a schedule that never ends.
    """
    price = _prices(schedule, costs)
    if not (math.isfinite(comm) and comm >= 0):
        raise ValueError(f"comm must be a latency of at least 0, not {comm}")
    place = schedule.place
    intervals = run_time(
        schedule.table,
        dependencies(schedule),
        cost=lambda action: price[action.kind, action.stage],
        delay=lambda need, action: 0.0 if place[need.stage] == place[action.stage] else comm,
    )
    if any(not times or len(times) < len(row) for row, times in zip(schedule.table, intervals, strict=True)):
        validate(schedule)  # says what is wrong with it
    return _timeline(schedule, intervals)


def _timeline(schedule: Schedule, intervals: list[list[Interval]]) -> Timeline:
    spans = tuple(
        Span(rank, action, start, end)
        for rank, (row, times) in enumerate(zip(schedule.table, intervals, strict=True))
        for action, (start, end) in zip(row, times, strict=True)
    )
    makespan = max(times[-1][1] for times in intervals)
    busy = max(sum(end - start for start, end in times) for times in intervals)
    return Timeline(
        makespan=makespan,
        flush_bubble=makespan - busy,
        span_bubble=max(times[-1][1] - times[0][0] for times in intervals) - busy,
        peak_activations=tuple(_peak(schedule, rank) for rank in range(schedule.ranks)),
        spans=spans,
        idle=tuple(_idle(times, makespan) for times in intervals),
    )


def _peak(schedule: Schedule, rank: int) -> float:
    """The most activations that a rank holds at once, which its order alone decides."""
    row = schedule.table[rank]
    if all(action.kind is Kind.F for action in row):
        return 0.0
    change = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
    return max(accumulate(change[action.kind] for action in row)) / schedule.place.count(rank)


def _idle(times: Sequence[Interval], makespan: float) -> tuple[Interval, ...]:
    starts = [start for start, _ in times] + [makespan]
    ends = [0.0] + [end for _, end in times]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)


def _prices(schedule: Schedule, costs: Mapping[str, Cost]) -> dict[tuple[Kind, int], float]:
    """The time of each kind of action that the schedule uses, at each stage."""
    unknown = sorted(set(costs) - {"F", "B", "I", "W"})
    if unknown:
        raise ValueError(f"costs: unknown kind {unknown[0]!r}; the kinds are F, B, I and W")
    given = {Kind(kind): _by_stage(schedule, kind, cost) for kind, cost in costs.items()}
    if Kind.B not in given and Kind.I in given and Kind.W in given:
        given[Kind.B] = [i + w for i, w in zip(given[Kind.I], given[Kind.W], strict=True)]
    for kind in sorted({action.kind for _, action in schedule.actions()}):
        if kind not in given:
            raise ValueError(
                f"costs: schedule {schedule.name!r} needs the cost of {kind}" + (", or of I and W" * (kind is Kind.B))
            )
    return {(kind, stage): time for kind, times in given.items() for stage, time in enumerate(times)}


def _by_stage(schedule: Schedule, kind: str, cost: Cost) -> list[float]:
    """The time of each stage."""
    stages = range(schedule.stages)
    if isinstance(cost, Mapping):
        complete, times = set(cost) == set(stages), list(cost.values())
        times = [cost[stage] for stage in stages] if complete else times
    elif isinstance(cost, Sequence):
        complete, times = len(cost) == len(stages), list(cost)
    else:
        complete, times = True, [cost / schedule.place.count(rank) for rank in schedule.place]
    if not complete:
        raise ValueError(f"costs: {kind!r} must have a number for each of the {len(stages)} stages, not {cost!r}")
    for time in times:
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"costs: {kind!r} must be times of at least 0, not {cost!r}")
    return times
