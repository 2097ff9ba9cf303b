"""The schedule where it is searched for, the other choices being made: the fastest that fits the memory limit.

    families  those of `PORTFOLIO` that the ranks, the microbatches and the number of segments allow, each with its best
              split
    tables    for each number of stages a rank, `schedules.auto` on what the stages of its best family cost, with as
              many microbatches on a rank as memory has room for; then split and measured as families are
    choose    the shortest predicted step; of equals one with a name, whose fullest rank holds least, then the first

Effort is counted in actions, not in seconds, so the same plan is found every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor
from operator import itemgetter

from autopart import schedules
from autopart.ir.plan_text import format_bytes, format_seconds
from autopart.ir.plan_text import schedule as written
from autopart.schedules.auto import CLOSE
from autopart.schedules.bound import lower_bound
from autopart.schedules.problem import problems
from autopart.schedules.spell import is_table
from autopart.solver.chunks import ways
from autopart.solver.memory import in_flight
from autopart.solver.request import FORWARDS_FIRST, Request
from autopart.solver.search import (
    Candidate,
    Solved,
    best_split,
    candidates,
    edge_seconds,
    exchanged_seconds,
    flush,
    pose,
    stage_seconds,
)
from autopart.solver.split import Split, evaluate

PORTFOLIO = (
    *("1f1b", "zb-h1", "zb-auto", "zb-h2", "zb-v", "vhalf", "interleaved-zb", "interleaved", "v1f1b", "vzb", "vmin"),
    *("hanayo", "dualpipev", "zeropp", "gis", "2bp-1f1b", "2bp-gpipe", "gpipe", "bfs", "hanayo(waves=2)"),
    *(f"{name}(chunks={v})" for v in (3, 4) for name in ("interleaved-zb", "interleaved", "zeropp", "gis", "bfs")),
)
"""What is looked at: every family of one copy of the model and whole sequences that programs run, likely ones first."""

LOOKED = 60_000
"""How many actions of families are looked at: those that come later in `PORTFOLIO` are left out."""

EFFORT = 15_000
"""About how many actions each search for a table runs."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The solution with the best schedule; what was looked at, and how good it is, to read."""

    solved: Solved
    note: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A solution, its predicted flush and step, and the bytes of its fullest rank."""

    solved: Solved
    length: float
    seconds: float
    peak: int

    @property
    def text(self) -> str:
        return self.solved.candidate.text

    @property
    def rank(self) -> tuple[float, bool, int]:
        """What is to be least; times that differ by less than predictions can mean are equal."""
        return float(f"{self.seconds:.9e}"), is_table(self.text), self.peak


def search(request: Request, fits: Solved) -> Chosen:
    """The best schedule with the mesh, the placement and the number of microbatches of a solution that fits."""
    if fits.problem.ranks == 1:
        alone = f"{fits.candidate.text}, as one pipeline rank waits for no other"
        return Chosen(fits, f"schedule {alone}", f"schedule {alone}")
    free: dict[tuple[int, ...], tuple[Split, ...]] = {}
    families, left_out = _families(request, fits.candidate, free)
    tables = [] if request.forwards_first else list(_tables(request, families, free))
    best, *others = sorted((*families, *tables), key=lambda tried: tried.rank)
    length, bound = best.length, _bound(request, best.solved)
    gap = f"{max(0.0, length / bound - 1) if bound else 0.0:.1%} over the lower bound for its stages"
    note = (
        f"schedule {written(best.text)}: the fastest of {len(families)} families and {len(tables)} table"
        f"{'s' * (len(tables) != 1)} made for such stages that fit {format_bytes(request.memory)};"
        f" predicted flush {format_seconds(length)}, {gap}"
    )
    if others:
        later = others[0].seconds / best.seconds - 1 if best.seconds else 0.0
        note += f"; the next, schedule {written(others[0].text)}, would make the step {later:.1%} longer"
    if left_out:
        note += f"; not looked at, as there are many actions: {', '.join(left_out)}"
    return Chosen(best.solved, note, f"schedule the best of {1 + len(others)} looked at, {gap}")


def _families(
    request: Request, setting: Candidate, free: dict[tuple[int, ...], tuple[Split, ...]]
) -> tuple[list[_Tried], list[str]]:
    """The families that fit in a setting, each with its best split, and those that were left out."""
    pinned = replace(request, mesh=setting.mesh, microbatches=setting.microbatches, placements=(setting.placements,))
    tried: list[_Tried] = []
    left_out: list[str] = []
    actions = 0
    known = setting.text, *(FORWARDS_FIRST if request.forwards_first else PORTFOLIO)  # what fits is not left out
    for text in dict.fromkeys(known):
        if actions > LOOKED:
            left_out.append(text)
            continue
        for candidate in candidates(replace(pinned, schedules=(text,))):
            actions += sum(map(len, candidate.schedule.table))
            tried += _tried(request, candidate, free)
    return tried, left_out


def _tried(request: Request, candidate: Candidate, free: dict[tuple[int, ...], tuple[Split, ...]]) -> Iterator[_Tried]:
    """The candidate with its best split, if one fits.

    `free` has the splits to choose from for each placement of stages where memory is no matter; they are found once.
    """
    model, problem = pose(request, candidate)
    if problem.stages == problem.ranks:
        splits: Sequence[Split] = ()
    elif problem.place in free:
        splits = free[problem.place]
    else:
        splits = free[problem.place] = ways(replace(problem, moments=()))
    if not splits or any(evaluate(problem, split.starts) is None for split in splits):
        split = best_split(request, candidate, model, problem)
        splits = () if split is None else (split,)
    solutions = [Solved(candidate, model, problem, split) for split in splits]
    if solutions:
        lengths = [flush(request, solved).makespan for solved in solutions]
        best, length = min(zip(solutions, lengths, strict=True), key=itemgetter(1))
        yield _Tried(best, length, length + exchanged_seconds(request, best), best.peak())


def _tables(
    request: Request, families: Sequence[_Tried], free: dict[tuple[int, ...], tuple[Split, ...]]
) -> Iterator[_Tried]:
    """Tables for the stages of the best family of each number of stages, where they may be faster than all families."""
    fitting, ranked = {each.text for each in families}, sorted(families, key=lambda each: each.rank)
    shortest = ranked[0].length
    for stages in sorted({each.solved.problem.stages for each in families}):
        base = next(each.solved for each in ranked if each.solved.problem.stages == stages)
        if _bound(request, base) >= shortest * (1 - CLOSE):
            continue
        ranks, count = base.problem.ranks, base.candidate.microbatches
        costs, edge = _costs(request, base), edge_seconds(request, base)
        for room in _rooms(base):
            made = schedules.auto(ranks, count, costs, edge, limit=room, effort=EFFORT).schedule
            text = schedules.spell(made)
            if text in fitting:
                break
            schedule = request.scheduled(text, ranks, count)
            candidate = replace(base.candidate, text=text, schedule=schedule, moments=in_flight(schedule))
            for tried in _tried(request, candidate, free):
                fitting.add(text)
                yield tried


def _rooms(solved: Solved) -> list[float]:
    """Limits for `schedules.auto`, in microbatches on a rank's share: of the roomiest rank, and one that all have."""
    problem, segments = solved.problem, solved.model.segments
    saved = [sum(max(n.saved_bytes, n.stash_bytes) for n in segments[i:j]) for i, j in solved.runs]
    rooms = []
    for held in solved.held():
        left = problem.limit - sum(problem.resident[i][j - i - 1] for i, j in (solved.runs[stage] for stage in held))
        sizes = [saved[stage] for stage in held]
        most = float(solved.candidate.microbatches)
        mean, dearest = sum(sizes) / len(sizes), max(sizes)
        surely = floor(left / dearest) / len(held) if dearest else most
        rooms.append((min(most, left / mean) if mean else most, min(most, surely)))
    limits = {max(roomy for roomy, _ in rooms), min(surely for _, surely in rooms)}
    return sorted((limit for limit in limits if limit >= 1), reverse=True)


def _costs(request: Request, solved: Solved) -> dict[str, tuple[float, ...]]:
    """What the stages cost, as `schedules.auto` takes it."""
    seconds = stage_seconds(request, solved)
    return {kind: tuple(each[kind] for each in seconds) for kind in ("F", "B", "I", "W")}


def _bound(request: Request, solved: Solved) -> float:
    """A time below which no flush of these stages can come, whatever memory there is."""
    ranks, count = solved.problem.ranks, solved.candidate.microbatches
    edge = edge_seconds(request, solved)
    return min(map(lower_bound, problems(ranks, count, _costs(request, solved), edge, None, "barrier")))
