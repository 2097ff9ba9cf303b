"""Local search: neighbours on the longest chain of a run change places, as long as that helps.

What makes a run long is a chain of actions each of which starts when the one before it has ended (or its value has
come). Only a change to that chain can shorten the run, so only neighbours on it are exchanged. The best exchange is
made even if it does not help, and is not undone for a while, so that the search leaves local optima (tabu search).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopart.ir.action import Action, Kind
from autopart.schedules.play import follow
from autopart.schedules.problem import Problem
from autopart.schedules.rows import Row

MEMORY = 12
"""For how many rounds an exchange is not undone."""

Swap = tuple[int, int]
"""A rank and the step whose action changes places with the next one's."""


def improve(problem: Problem, rows: Sequence[Row], *, target: float, trials: int) -> tuple[Row, ...]:
    """The best rows met on the way from these, until `target` is reached or `trials` runs have been made."""
    current = best = tuple(rows)
    shortest = problem.measure(best)
    forbidden: dict[tuple[Action, Action], int] = {}
    turn = 0
    while trials > 0 and shortest > target:
        turn += 1
        found: tuple[float, tuple[Row, ...], tuple[Action, Action]] | None = None
        for rank, step in critical(problem, current):
            pair = current[rank][step], current[rank][step + 1]
            changed = _exchanged(current, rank, step)
            length = problem.measure(changed)
            trials -= 1
            if length == math.inf or (forbidden.get(pair, 0) >= turn and length >= shortest):
                continue
            if found is None or length < found[0]:
                found = length, changed, pair
        if found is None:
            break
        length, current, (first, second) = found
        forbidden[second, first] = turn + MEMORY
        if length < shortest:
            shortest, best = length, current
    return best


def critical(problem: Problem, rows: Sequence[Row]) -> Iterator[Swap]:
    """The neighbours on a longest chain of the run that may change places."""
    clock = problem.clock()
    follow(rows, clock)
    where = {action: (rank, step) for rank, row in enumerate(rows) for step, action in enumerate(row)}
    ends = [spans[-1][1] - (spans[0][0] if problem.per_rank else 0.0) for spans in clock.spans]
    rank = ends.index(max(ends))
    step = len(rows[rank]) - 1
    while True:
        start = clock.spans[rank][step][0]
        if step and clock.spans[rank][step - 1][1] >= start:
            if not _ordered(rows[rank][step - 1], rows[rank][step]):
                yield rank, step - 1
            step -= 1
            continue
        causes = [where[need] for need in _needs(problem, rows[rank][step]) if need in where]
        causes = [
            (r, s) for r, s in causes if clock.spans[r][s][1] + (problem.comm if r != rank else 0.0) >= start - 1e-12
        ]
        if not causes:
            return
        rank, step = causes[0]


def _exchanged(rows: Sequence[Row], rank: int, step: int) -> tuple[Row, ...]:
    row = rows[rank]
    return (*rows[:rank], (*row[:step], row[step + 1], row[step], *row[step + 2 :]), *rows[rank + 1 :])


def _ordered(first: Action, second: Action) -> bool:
    """Whether two neighbours must stay as they are: one needs the other, or they are one kind at one stage."""
    if first.stage != second.stage:
        return first.microbatch == second.microbatch and abs(first.stage - second.stage) == 1
    if first.kind is second.kind:
        return True
    return first.microbatch == second.microbatch


def _needs(problem: Problem, action: Action) -> Iterator[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        if stage:
            yield Action(Kind.F, stage - 1, microbatch)
    elif action.kind is Kind.W:
        yield Action(Kind.I, stage, microbatch)
    else:
        yield Action(Kind.F, stage, microbatch)
        if stage + 1 < len(problem.place):
            yield Action(Kind.I, stage + 1, microbatch)
            yield Action(Kind.B, stage + 1, microbatch)
