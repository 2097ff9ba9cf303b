"""The certificate of a split: z3 must find no faster one, and the split returned is the model of its query.

Over the interval table: Boolean ``begin[k][i]`` says that stage k begins at segment i.

    exactly one i a stage; begin[0][0]
    begin[k][i]  ->  some begin[k + 1][j] such that segments i to j - 1 may be stage k within the bound
    begin[S-1][i] ->  segments i to n - 1 may be the last stage within the bound

A stage may be an interval if it breaks no pin, fits the memory limit and takes at most the bound. With a stage a rank,
z3 sees Booleans only; the numbers stay in the table, where the arithmetic is exact. Where ranks hold several stages,
the sums over a rank are z3's too:

    for each rank    sum over its stages k of  elapsed[i'] begin[k + 1][i'] - elapsed[i] begin[k][i]  <= bound
    for each moment  sum over its rank's stages of what the interval holds then                       <= limit

Which of several equally fast splits is taken (the fastest slowest stage, fewest boundary bytes, earliest cuts) is not
part of the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopart.ir.action import stages_of
from autopart.solver.chunks import PRECISION, fastest
from autopart.solver.split import Split, SplitProblem, evaluate, first_segments

if TYPE_CHECKING:
    import z3


RESOURCES = 3_000_000
"""What z3 may spend on a split of several stages a rank, in its own measure: about a second."""

INTERVALS = 3000
"""With more intervals in the table of such a split, z3 is not asked."""


def many(problem: SplitProblem) -> bool:
    """Whether a problem has more than `INTERVALS`."""
    return (problem.segments - problem.stages + 1) ** 2 * problem.stages > INTERVALS


def certify(problem: SplitProblem, split: Split) -> Split:
    """The split as z3's model has it, counted afresh, once z3 has proven that no busiest rank beats its `least`.

    Where ranks hold several stages, faster means by more than the precision of `solver.chunks`, and a split comes back
    as not exact if there are too many for z3, or it cannot tell within its resources. Raises AssertionError, an
    internal error, where z3 or the count contradicts `split`.
    """
    import z3

    several = problem.ranks < problem.stages
    if several and many(problem):
        if evaluate(problem, split.starts) != split:
            raise AssertionError(f"internal error: the split counts as {evaluate(problem, split.starts)}, not {split}")
        return replace(split, exact=False)
    solver = z3.SolverFor("QF_LIA" if several else "QF_FD")
    begin = [{i: z3.Bool(f"begin_{k}_{i}") for i in first_segments(problem, k)} for k in range(problem.stages)]
    for row in begin:
        solver.add(z3.PbEq([(literal, 1) for literal in row.values()], 1))
    solver.add(*_table(problem, begin, split.busiest))
    if solver.check(*(row[i] for row, i in zip(begin, split.starts, strict=True))) != z3.sat:
        raise AssertionError(f"internal error: z3 refuses the split {split}")
    decoded = _decode(solver.model(), begin)
    counted = evaluate(problem, decoded)
    if counted is None or counted != split:
        raise AssertionError(f"internal error: the split is {split}, its model counts as {counted}")
    if several and not split.exact:
        return replace(split, exact=False)
    solver.add(*_table(problem, begin, split.least - 1 - (fastest(problem) // PRECISION if several else 0)))
    if several:
        solver.set("rlimit", RESOURCES)
    answer = solver.check()
    if answer == z3.sat or (answer != z3.unsat and not several):
        raise AssertionError(f"internal error: a split faster than {split} exists or could not be excluded")
    return replace(split, exact=answer == z3.unsat)


def _table(problem: SplitProblem, begin: list[dict[int, z3.BoolRef]], bound: int) -> list[z3.BoolRef]:
    """The clauses that allow only intervals within `bound`, and the sums over ranks that hold several stages."""
    import z3

    clauses = []
    for stage, row in enumerate(begin):
        following = _following(problem, begin, stage)
        for start, literal in row.items():
            stops = [
                following[stop]
                for stop in problem.stops(stage, start)
                if problem.time(start, stop) <= bound and problem.fits(stage, start, stop)
            ]
            clauses.append(z3.Or(z3.Not(literal), *stops))
    if problem.ranks < problem.stages:
        clauses += [*_times(problem, begin, bound), *_memory(problem, begin)]
    return clauses


def _following(problem: SplitProblem, begin: list[dict[int, z3.BoolRef]], stage: int) -> dict[int, Any]:
    """Where the stage after one begins; behind the last, where the model ends."""
    import z3

    return {problem.segments: z3.BoolVal(True)} if stage == problem.stages - 1 else begin[stage + 1]


def _times(problem: SplitProblem, begin: list[dict[int, z3.BoolRef]], bound: int) -> Iterator[z3.BoolRef]:
    """The time of every rank is within the bound."""
    import z3

    for rank in sorted(set(problem.place)):
        terms = []
        for stage in stages_of(problem.place, rank):
            ends = _following(problem, begin, stage)
            terms += [z3.If(literal, problem.time(0, stop), 0) for stop, literal in ends.items()]
            terms += [z3.If(literal, -problem.time(0, start), 0) for start, literal in begin[stage].items()]
        yield z3.Sum(terms) <= bound


def _memory(problem: SplitProblem, begin: list[dict[int, z3.BoolRef]]) -> Iterator[z3.BoolRef]:
    """What a rank holds at every moment is within the limit."""
    import z3

    interval = {
        (stage, start, stop): z3.Bool(f"interval_{stage}_{start}_{stop}")
        for stage, row in enumerate(begin)
        for start in row
        for stop in problem.stops(stage, start)
    }
    for (stage, start, stop), literal in interval.items():
        yield z3.Or(z3.Not(begin[stage][start]), z3.Not(_following(problem, begin, stage)[stop]), literal)
    for number, (_, rank) in enumerate(problem.moments):
        held = [
            z3.If(literal, problem.held(number, stage, start, stop), 0)
            for (stage, start, stop), literal in interval.items()
            if problem.place[stage] == rank
        ]
        yield z3.Sum(held) <= problem.limit


def _decode(model: z3.ModelRef, begin: list[dict[int, z3.BoolRef]]) -> tuple[int, ...]:
    """The segment at which each stage begins in a model (every one that is true, so that a wrong encoding shows)."""
    import z3

    true = [(i, model.eval(literal, model_completion=True)) for row in begin for i, literal in row.items()]
    return tuple(i for i, value in true if z3.is_true(value))
