"""Predicting a schedule's time and memory from the cost of its actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from types import MappingProxyType

from autopart.ir.action import ENDS, Action, Boundary, Kind, Schedule, Weights, stages_of
from autopart.schedules import drawing
from autopart.schedules.dependencies import Needs, dependencies
from autopart.schedules.prices import Comm, Cost, links, prices
from autopart.schedules.timing import Interval, run_time
from autopart.schedules.validate import validate

UNIT: Mapping[str, Cost] = MappingProxyType({"F": 1.0, "I": 1.0, "W": 1.0})

Rows = Sequence[Sequence[Action]]


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
    microbatches on a rank-share (1 / number of the rank's stages in the pipe for each stage, and 1 / number of slices,
    or its part of the lengths, for each slice), held from F to the end of B, or of W where they are split; stages that
    train nothing (`Schedule.anywhere`) hold nothing. `period` is how much later the last of several iterations ends
    than the one before it.
    """

    makespan: float
    flush_bubble: float
    span_bubble: float
    peak_activations: tuple[float, ...]
    spans: tuple[Span, ...]
    idle: tuple[tuple[Interval, ...], ...]
    """The windows of each rank, between 0 and makespan, in which it computes nothing."""
    period: float

    def __str__(self) -> str:
        """The length, what is lost of it, and a line a rank with its share of work, what it holds and a bar of it."""
        return drawing.text(self)

    def to_chrome(self) -> str:
        """The timeline as JSON for chrome://tracing or Perfetto, a row a rank; one unit of cost is one second."""
        return drawing.chrome(self)

    def to_svg(self) -> str:
        """The timeline as an SVG picture: time to the right, a row a rank, a colour a kind, microbatches in boxes."""
        return drawing.svg(self)


def simulate(
    schedule: Schedule,
    costs: Mapping[str, Cost] = UNIT,
    comm: Comm = 0.0,
    *,
    optimizer: str | None = None,
    iterations: int = 1,
) -> Timeline:
    """The timeline of a schedule (one that `validate` accepts) under the chain of stages.

    `costs` gives the time of F, I, W and optionally B, PAIR, S, T and OPT (`schedules.prices` says how, and what is
    taken where they are missing); an OPT that the table does not have comes at the end of every iteration, on each
    stage. `comm` is the latency of an edge between two ranks, or a `Link` with a transfer time too, of all edges or of
    each; it occupies no rank. `iterations` runs the table several times back to back: with the optimizer boundary
    ``"barrier"`` no rank steps before all have ended, with ``"per-rank"`` each goes on alone (by default as the
    schedule says). Raises ValueError for bad costs and for a schedule that never ends, TypeError for what is no
    Schedule.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule: expected a Schedule, which autopart.schedules.build or read makes, not {schedule!r}"
        )
    boundary = Boundary(schedule.optimizer if optimizer is None else optimizer)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    if iterations > 1 and schedule.weights is not Weights.SYNC:
        raise ValueError(
            f"iterations: schedule {schedule.name!r} steps inside its table; build it with more microbatches instead"
        )
    price = prices(schedule, costs)
    whole = _repeated(schedule, iterations)
    stepped = schedule.weights is Weights.SYNC and (iterations > 1 or Kind.OPT in costs)
    if stepped:
        whole = _stepped(schedule, whole, iterations)
    rows, needs = whole.table, dependencies(whole)
    if stepped and boundary is Boundary.BARRIER:
        _tie_steps(rows, needs)
    intervals = run_time(rows, needs, cost=price, link=links(schedule, comm))
    if any(not times or len(times) < len(row) for row, times in zip(rows, intervals, strict=True)):
        validate(schedule)  # says what is wrong with it
    return _timeline(schedule, rows, intervals, iterations)


def _repeated(schedule: Schedule, iterations: int) -> Schedule:
    """The schedule run several times, its microbatches counted on."""
    if iterations == 1:
        return schedule
    shifts = [number * schedule.microbatches for number in range(iterations)]
    table = tuple(tuple(_shifted(action, by) for by in shifts for action in row) for row in schedule.table)
    return replace(schedule, microbatches=iterations * schedule.microbatches, table=table)


def _shifted(action: Action, by: int) -> Action:
    members = tuple(_shifted(member, by) for member in action.members)
    return replace(action, microbatch=action.microbatch + by, members=members)


def _stepped(schedule: Schedule, whole: Schedule, iterations: int) -> Schedule:
    """The repeated schedule with an OPT of each stage at the end of every iteration."""
    rows = []
    for rank, (row, plain) in enumerate(zip(whole.table, schedule.table, strict=True)):
        held = [(stage, pipe) for pipe, place in enumerate(schedule.places) for stage in stages_of(place, rank)]
        pieces = [row[number * len(plain) : (number + 1) * len(plain)] for number in range(iterations)]
        steps = [[Action(Kind.OPT, stage, number, 0, pipe) for stage, pipe in held] for number in range(iterations)]
        rows.append(tuple(action for piece, step in zip(pieces, steps, strict=True) for action in (*piece, *step)))
    return replace(whole, table=tuple(rows))


def _tie_steps(rows: Rows, needs: Needs) -> None:
    """Let every OPT wait for what stands before the OPTs of its number in all rows."""
    ends: dict[int, list[int]] = defaultdict(list)
    steps: list[tuple[int, int]] = []
    number = 0
    for row in rows:
        last: Sequence[int] = ()
        for action in row:
            numbers = range(number, number + len(action.parts))
            if action.kind is Kind.OPT:
                ends[action.microbatch] += last
                steps.append((number, action.microbatch))
                last = ()
            else:
                last = numbers
            number = numbers.stop
    for at, iteration in steps:
        needs[at] = tuple(ends[iteration])


def _timeline(schedule: Schedule, rows: Rows, intervals: list[list[Interval]], iterations: int) -> Timeline:
    spans = tuple(
        Span(rank, action, start, end)
        for rank, (row, times) in enumerate(zip(rows, intervals, strict=True))
        for action, (start, end) in zip(row, times, strict=True)
    )
    makespan = max(times[-1][1] for times in intervals)
    busy = max(sum(end - start for start, end in times) for times in intervals)
    before = max(times[len(times) - len(times) // iterations - 1][1] for times in intervals) if iterations > 1 else 0
    return Timeline(
        makespan=makespan,
        flush_bubble=makespan - busy,
        span_bubble=max(times[-1][1] - times[0][0] for times in intervals) - busy,
        peak_activations=tuple(_peak(schedule, rank) for rank in range(schedule.ranks)),
        spans=spans,
        idle=tuple(_idle(times, makespan) for times in intervals),
        period=makespan - before,
    )


def _peak(schedule: Schedule, rank: int) -> float:
    """The most activations that a rank holds at once, which its order alone decides."""
    trained = (part for action in schedule.table[rank] for part in action.parts if part.stage >= schedule.anywhere)
    parts = list(trained)
    if all(part.kind is Kind.F for part in parts):
        return 0.0
    portions = schedule.portions
    shares = [place[schedule.anywhere :].count(rank) * sum(portions) for place in schedule.places]
    whole = lcm(*(share for share in shares if share))
    change = {Kind.F: 1, **dict.fromkeys(ENDS, -1)}
    held = accumulate(change.get(part.kind, 0) * portions[part.slice] * (whole // shares[part.pipe]) for part in parts)
    return max(held) / whole


def _idle(times: Sequence[Interval], makespan: float) -> tuple[Interval, ...]:
    starts = [start for start, _ in times] + [makespan]
    ends = [0.0] + [end for _, end in times]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)
