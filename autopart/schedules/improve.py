"""Local search: actions on the longest chain of a run change places, as long as that helps.

What makes a run long is a chain of actions each of which starts when the one before it has ended (or its value has
come). Only a change to that chain can shorten the run, so only its actions move, within the stretch of work that they
are in: the first move that helps is made, else the best one, and rows that were met are not met again, so that the
search leaves local optima (tabu search).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter

from autopart.ir.action import Action, Kind
from autopart.schedules.fill import fill
from autopart.schedules.play import follow
from autopart.schedules.problem import Problem
from autopart.schedules.rows import Row, warmed
from autopart.schedules.zero_bubble import warmups

Move = tuple[int, int, int]
"""A rank, a step, and the step to which its action moves."""

Measured = tuple[float, tuple[Row, ...]]
"""Rows, after how long they take."""

LENGTH = itemgetter(0)

KICK = 4
"""How many random moves lead away from the best rows before the search goes on from there."""

ROUND = 60
"""The runs of a search after a kick."""


def improve(problem: Problem, starts: Sequence[Measured], *, target: float, trials: int) -> Measured:
    """The best rows met on the way from these, until `target` is reached or about `trials` runs have been made.

    One half of the trials is shared by the starts; with the other half the search goes on from near the best rows.
    """
    best = min(starts, key=LENGTH)
    for start in starts:
        if best[0] > target:
            best = min(best, _descend(problem, start, target, trials // (2 * len(starts))), key=LENGTH)
    chance = random.Random(0)
    for _ in range(trials // (2 * (ROUND + KICK))):
        if best[0] > target:
            found = _descend(problem, _kicked(problem, best, chance), target, ROUND)
            best = min(found, best, key=LENGTH)  # equal ones take turns
    return best


def _kicked(problem: Problem, start: Measured, chance: random.Random) -> Measured:
    length, rows = start
    for _ in range(KICK):
        rank = chance.randrange(problem.ranks)
        step = chance.randrange(len(rows[rank]) - 1)
        if not _ordered(rows[rank][step], rows[rank][step + 1]):
            changed = _moved(rows, (rank, step, step + 1))
            if (found := problem.measure(changed)) < math.inf:
                length, rows = found, changed
    return length, rows


def _descend(problem: Problem, start: Measured, target: float, trials: int) -> Measured:
    """Tabu search from one start."""
    best = start
    length, current = start
    met = {current}
    while trials > 0 and best[0] > target:
        before, length = length, math.inf
        for move in moves(problem, current):
            changed = _moved(current, move)
            if changed in met:
                continue
            trials -= 1
            if (found := problem.measure(changed)) < length:
                length, following = found, changed
            if length < before or trials <= 0:
                break
        if length == math.inf:
            break
        current = following
        met.add(current)
        best = min(best, (length, current), key=LENGTH)
    return best


def tune(problem: Problem, *, target: float, trials: int) -> Measured:
    """1F1B with the numbers of forwards to warm up found rank by rank; for one stage a rank."""
    m, backward = problem.microbatches, Kind.B if problem.whole else Kind.I

    def filled(counts: tuple[int, ...]) -> Measured:
        rows = fill(warmed(counts, m, backward), problem.clock(), problem.limit)
        return problem.measure(rows), rows

    counts = warmups(problem.ranks, m, 0, problem.limit)
    best = filled(counts)
    changed = True
    while changed and best[0] > target and trials > 0:
        changed = False
        for rank, step in product(range(problem.ranks), (1, -1)):
            count = counts[rank] + step
            if not 0 <= count <= min(m, problem.limit - 1):
                continue
            others = (*counts[:rank], count, *counts[rank + 1 :])
            made = filled(others)
            trials -= 1
            if made[0] < best[0]:
                best, counts, changed = made, others, True
    return best


def moves(problem: Problem, rows: Sequence[Row]) -> Iterator[Move]:
    """Within each stretch of work of the longest chain: neighbours change places, actions go to either end."""
    for rank, first, last in critical(problem, rows):
        row = rows[rank]
        for step in range(first, last + 1):
            for target in {step + 1, first, last} - {step, last + 1}:
                between = row[target:step] if target < step else row[step + 1 : target + 1]
                if not any(_ordered(row[step], other) for other in between):
                    yield rank, step, target


def critical(problem: Problem, rows: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
    """The stretches of work on a longest chain of the run: a rank, and its first and last step there."""
    clock = problem.clock()
    follow(rows, clock)
    where = {action: (rank, step) for rank, row in enumerate(rows) for step, action in enumerate(row)}
    ends = [spans[-1][1] - (spans[0][0] if problem.per_rank else 0.0) for spans in clock.spans]
    rank = ends.index(max(ends))
    step = last = len(rows[rank]) - 1
    while True:
        start = clock.spans[rank][step][0]
        if step and clock.spans[rank][step - 1][1] >= start:
            step -= 1
            continue
        if last > step:
            yield rank, step, last
        causes = [where[need] for need in _needs(problem, rows[rank][step]) if need in where]
        causes = [
            (r, s) for r, s in causes if clock.spans[r][s][1] + (problem.comm if r != rank else 0.0) >= start - 1e-12
        ]
        if not causes:
            return
        rank, step = causes[0]
        last = step


def _moved(rows: Sequence[Row], move: Move) -> tuple[Row, ...]:
    rank, step, target = move
    row = list(rows[rank])
    row.insert(target, row.pop(step))
    return (*rows[:rank], tuple(row), *rows[rank + 1 :])


def _ordered(first: Action, second: Action) -> bool:
    """Whether two actions of a rank keep their order: they are one kind at one stage, or one needs the other."""
    if first.stage == second.stage:
        return first.kind is second.kind or first.microbatch == second.microbatch
    return first.microbatch == second.microbatch and abs(first.stage - second.stage) == 1


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
