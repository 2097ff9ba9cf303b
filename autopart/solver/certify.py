"""The certificate of a split: z3 must find no faster one, and the split returned is the model of its query.

Over the interval table: Boolean ``begin[k][i]`` says that stage k begins at segment i.

    exactly one i a stage; begin[0][0]
    begin[k][i]  ->  some begin[k + 1][j] such that segments i to j - 1 may be stage k within the bound
    begin[p-1][i] ->  segments i to n - 1 may be the last stage within the bound

A stage may be an interval if it breaks no pin, fits the memory limit and takes at most the bound. z3 sees Booleans
only; the numbers stay in the table, where the arithmetic is exact. Which of several equally fast splits is taken
(fewest boundary bytes, earliest cuts) is not part of the proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopart.solver.split import Split, SplitProblem, evaluate, first_segments

if TYPE_CHECKING:
    import z3


def certify(problem: SplitProblem, split: Split) -> Split:
    """The split as z3's model has it, counted afresh, once z3 has proven that no split has a faster slowest stage.

    Raises AssertionError, an internal error, where z3 or the count contradicts `split`.
    """
    import z3

    solver = z3.SolverFor("QF_FD")
    begin = [{i: z3.Bool(f"begin_{k}_{i}") for i in first_segments(problem, k)} for k in range(problem.stages)]
    for row in begin:
        solver.add(z3.PbEq([(literal, 1) for literal in row.values()], 1))
    solver.add(*_table(problem, begin, split.slowest))
    if solver.check(*(row[i] for row, i in zip(begin, split.starts, strict=True))) != z3.sat:
        raise AssertionError(f"internal error: z3 refuses the split {split}")
    decoded = _decode(solver.model(), begin)
    counted = evaluate(problem, decoded)
    if counted is None or counted != split:
        raise AssertionError(f"internal error: the split is {split}, its model counts as {counted}")
    solver.add(*_table(problem, begin, split.slowest - 1))
    if solver.check() != z3.unsat:
        raise AssertionError(f"internal error: a split faster than {split} exists or could not be excluded")
    return counted


def _table(problem: SplitProblem, begin: list[dict[int, z3.BoolRef]], bound: int) -> list[z3.BoolRef]:
    """The clauses that allow only intervals within `bound`."""
    import z3

    clauses = []
    for stage, row in enumerate(begin):
        last = stage == problem.stages - 1
        following: dict[int, Any] = {problem.segments: z3.BoolVal(True)} if last else begin[stage + 1]
        for start, literal in row.items():
            stops = [
                following[stop]
                for stop in problem.stops(stage, start)
                if problem.time(start, stop) <= bound and problem.fits(stage, start, stop)
            ]
            clauses.append(z3.Or(z3.Not(literal), *stops))
    return clauses


def _decode(model: z3.ModelRef, begin: list[dict[int, z3.BoolRef]]) -> tuple[int, ...]:
    """The segment at which each stage begins in a model (every one that is true, so that a wrong encoding shows)."""
    import z3

    true = [(i, model.eval(literal, model_completion=True)) for row in begin for i, literal in row.items()]
    return tuple(i for i, value in true if z3.is_true(value))
