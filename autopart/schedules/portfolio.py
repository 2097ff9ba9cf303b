"""The orders from which `auto` starts: published families, and 1F1B with more or fewer forwards to warm up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules import zero_bubble
from autopart.schedules.build import build
from autopart.schedules.fill import Ahead, fill
from autopart.schedules.problem import Problem
from autopart.schedules.rows import Row, loop, warmed, wave

PATIENCE = (0.0, 0.5, 1.0)
AHEAD: tuple[Ahead, ...] = ("never", "idle", "eager")


def families(problem: Problem) -> Iterator[Schedule]:
    """The published schedules on the problem's placement, each of which may hold too much."""
    v, names = problem.chunks, ["zb-h1", "zb-h2", "1f1b", "gpipe"]
    if v > 1:
        names = []
        if problem.place == loop(problem.ranks, v):
            names += [f"{name}(chunks={v})" for name in ("interleaved-zb", "interleaved", "gis", "zeropp", "bfs")]
        if problem.place == wave(problem.ranks, v):
            names += ["zb-v", "vhalf", "vmin", "vzb", "v1f1b"] if v == 2 else []
            names += [f"hanayo(waves={v // 2})"] if v % 2 == 0 else []
    for name in names:
        yield build(name, ranks=problem.ranks, microbatches=problem.microbatches)


def orders(problem: Problem, published: Sequence[Schedule]) -> Iterator[list[Row]]:
    """Orders of F and I (or B), to be filled with W: warm-ups of 1F1B, the `families`', one microbatch at a time."""
    p, m = problem.ranks, problem.microbatches
    backward = Kind.B if problem.whole else Kind.I
    if problem.chunks == 1:
        room = problem.limit - p
        for extra in sorted(range(p), key=lambda extra: abs(extra - room)):  # the likely ones first
            counts = zero_bubble.warmups(p, m, extra, problem.limit)
            yield warmed(counts, m, backward)
    else:
        for schedule in published:
            yield [unfilled(row, backward) for row in schedule.table]
    yield [_one_at_a_time(stages, m, backward) for stages in problem.held]


def filled(problem: Problem, rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """The order with its W filled in, in several ways; W come at once where backwards are whole."""
    for ahead in AHEAD if problem.chunks > 1 else AHEAD[:1]:
        for patience in (0.0,) if problem.whole else PATIENCE:
            yield fill(rows, problem.clock(), problem.limit, ahead=ahead, patience=patience)


def unfilled(row: Row, backward: Kind) -> Row:
    """A row without its W, its backwards of one kind."""
    return tuple(
        action if action.kind is Kind.F else Action(backward, action.stage, action.microbatch)
        for action in row
        if action.kind is not Kind.W
    )


def fused(row: Row) -> Row:
    """A row with a B where an I stands right before its W."""
    made: list[Action] = []
    for action in row:
        if action.kind is Kind.W and made[-1] == Action(Kind.I, action.stage, action.microbatch):
            made[-1] = Action(Kind.B, action.stage, action.microbatch)
        else:
            made.append(action)
    return tuple(made)


def _one_at_a_time(stages: Sequence[int], microbatches: int, backward: Kind) -> Row:
    return tuple(
        Action(kind, stage, microbatch)
        for microbatch in range(microbatches)
        for kind, order in ((Kind.F, stages), (backward, reversed(stages)))
        for stage in order
    )
