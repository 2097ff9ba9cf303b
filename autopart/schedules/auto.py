"""The best schedule that a search finds for given costs and memory, and how far it is from the best there can be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from autopart.ir.action import Boundary, Kind, Schedule
from autopart.schedules.bound import lower_bound
from autopart.schedules.family import check_count
from autopart.schedules.improve import improve, tune
from autopart.schedules.portfolio import families, filled, fused, orders
from autopart.schedules.problem import Problem, problems
from autopart.schedules.prove import Question
from autopart.schedules.rows import Row
from autopart.schedules.simulate import Timeline, simulate

EFFORT = 400_000
"""About how many actions a search runs in its portfolio and, after it, in its local search, unless told otherwise."""

STARTS = 5
"""From how many orders local search sets out."""

TRIALS = 3000
"""The most runs that a local search makes."""

PROVEN = "optimal"

CLOSE = 1e-9
"""Lengths that differ by no more than this, relatively, are equal."""


@dataclass(frozen=True, slots=True)
class Found:
    """What `auto` found: a schedule, how it runs, and what is known of better ones.

    `length` is what was to be short: the makespan, or with per-rank steps the longest time from a rank's first start
    to its last end. No schedule of these stages on the placements that were tried is shorter than `bound`; `gap` is
    (length - bound) / bound. `certificate` says in words what is proven, and how.
    """

    schedule: Schedule
    timeline: Timeline
    length: float
    bound: float
    gap: float
    certificate: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    problem: Problem
    name: str
    rows: tuple[Row, ...]
    length: float


def auto(
    ranks: int,
    microbatches: int,
    costs: Mapping[str, float | Sequence[float]],
    comm: float = 0.0,
    limit: float | None = None,
    optimizer: str = "barrier",
    prove: bool = False,
    seconds: float = 60.0,
    effort: int = EFFORT,
) -> Found:
    """The best schedule found for these costs: published families and their neighbours, then local search.

    `costs` has the times of F, and of I and W or of B (default I + W): one number for all stages, of which there is
    then one a rank, or one number a stage; v stages a rank lie on the loop or on the wave placement, whichever is
    better. `comm` is the latency between ranks, `limit` the most microbatches on a rank-share that a rank may hold
    (default: any number). `optimizer` says what is to be short: with ``"barrier"`` the time until all ranks are done,
    with ``"per-rank"`` (each steps alone) the longest time of a rank. With `prove`, z3 looks for a shorter schedule
    until there is none, for at most `seconds` in all. `effort` is about how many actions are run, which says how long
    the search takes: the same answer every time. Raises TypeError or ValueError that names a bad argument.
    """
    check_count("effort", effort)
    asked = problems(ranks, microbatches, costs, comm, limit, optimizer)
    best = min((_search(problem, effort // len(asked)) for problem in asked), key=lambda each: each.length)
    bound = min(lower_bound(problem) for problem in asked)
    certificate = _certificate(best, bound)
    if prove and best.length > bound * (1 + CLOSE):
        best, certificate = _prove(asked, best, seconds)
        bound = best.length if certificate.startswith(PROVEN) else bound
    boundary = Boundary(optimizer)
    schedule = Schedule(best.name, microbatches, best.problem.place, best.rows, optimizer=boundary)
    timeline = simulate(schedule, costs={kind.value: each for kind, each in best.problem.costs.items()}, comm=comm)
    gap = best.length / bound - 1 if bound else 0.0
    return Found(schedule, timeline, best.length, bound, gap, certificate)


def _certificate(best: _Candidate, bound: float) -> str:
    if best.length <= bound * (1 + CLOSE):
        return f"{PROVEN}: {best.length:g} is the lower bound, which counts a rank's work and the waits it cannot avoid"
    gap = best.length / bound - 1
    return f"not proven: {best.length:g} is {gap:.1%} over the lower bound {bound:g}; prove=True asks z3"


def _prove(asked: Sequence[Problem], best: _Candidate, seconds: float) -> tuple[_Candidate, str]:
    """Ask z3 for shorter schedules until there are none; every answer is measured again."""
    until = perf_counter() + seconds
    for problem in asked:
        question = Question(problem)
        while (answer := question.shorter(best.length, until - perf_counter())) != "none":
            if answer == "unknown":
                return best, f"not proven within {seconds:g} s: z3 found nothing shorter than {best.length:g}"
            length = problem.measure(answer)
            if length >= best.length:
                return best, f"not proven: {best.length:g}; shorter ones may mix whole and split backwards"
            best = _Candidate(problem, "auto", answer, length)
    return best, f"{PROVEN}: z3 finds no schedule of these stages shorter than {best.length:g}"


def _search(problem: Problem, effort: int) -> _Candidate:
    """The best of the portfolio, or what its best ones are improved to; the search stops where the bound is reached."""
    target = lower_bound(problem) * (1 + CLOSE)
    met: dict[float, _Candidate] = {}
    spent = 0
    for name, rows in _candidates(problem):
        length = problem.measure(rows)
        spent += sum(map(len, rows))
        if length < math.inf:
            met.setdefault(length, _Candidate(problem, name, rows, length))
        if met and (min(met) <= target or spent > effort):
            break
    if min(met) > target and problem.chunks == 1:
        length, rows = tune(problem, target=target, trials=_share(effort - spent, met[min(met)].rows))
        met.setdefault(length, _Candidate(problem, "auto", rows, length))
    starts = [met[length] for length in sorted(met)[:STARTS]]
    best = starts[0]
    if best.length > target:
        trials = _share(effort - spent, best.rows)
        length, rows = improve(problem, [(each.length, each.rows) for each in starts], target=target, trials=trials)
        best = best if length >= best.length else _Candidate(problem, "auto", rows, length)
    return best


def _share(effort: int, rows: Sequence[Row]) -> int:
    """How many runs of these rows the effort allows."""
    return min(TRIALS, max(0, effort) // sum(map(len, rows)))


def _candidates(problem: Problem) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """The families on the problem's placement as they are, then their orders and others filled anew."""
    kinds = {Kind.F, Kind.B} if problem.whole else set(Kind)
    published = []
    for schedule in families(problem):
        published.append(schedule)
        if {action.kind for _, action in schedule.actions()} <= kinds:
            yield schedule.name, schedule.table
    complete = len(problem.place) * problem.microbatches * (2 if problem.whole else 3)
    for order in orders(problem, published):
        for rows in filled(problem, order):
            if sum(map(len, rows)) == complete:
                yield "auto", rows
                if problem.saves:
                    yield "auto", tuple(map(fused, rows))
