"""Tables of actions for the best plan with ``schedule="auto"``, all that has a name having been searched jointly.

    bases     for each number of stages a rank the best plan by a name, with the mesh, the placement and the number of
              microbatches of the best of all
    tables    for each base, `schedules.auto` on what its stages cost, with as many microbatches on a rank as memory has
              room for; then split anew, with what the base recomputes
    choose    the shortest predicted step; of equals one with a name, whose fullest rank holds least, then the first

Effort is counted in actions, not in seconds, so the same plan is found every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor

from autopart import schedules
from autopart.ir.plan_text import format_seconds
from autopart.ir.plan_text import schedule as written
from autopart.schedules.auto import CLOSE
from autopart.schedules.bound import lower_bound
from autopart.schedules.problem import problems
from autopart.schedules.spell import is_table
from autopart.solver.chunks import ways
from autopart.solver.joint import Best, best
from autopart.solver.memory import in_flight
from autopart.solver.request import Request
from autopart.solver.search import (
    Candidate,
    Solved,
    best_split,
    edge_seconds,
    exchanged_seconds,
    flush,
    pose,
    stage_seconds,
)
from autopart.solver.setting import Setting
from autopart.solver.space import Space
from autopart.solver.split import Split, evaluate

EFFORT = 15_000
"""About how many actions each search for a table runs."""

Free = dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[Split, ...]]
"""Splits to choose from where memory is no matter, for a place of the stages and what is recomputed."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The solution with the best schedule; what was looked at, and how good it is, to read."""

    solved: Solved
    note: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A solution of a request, its predicted flush and step."""

    request: Request
    solved: Solved
    length: float
    seconds: float

    @property
    def text(self) -> str:
        return self.solved.candidate.text

    @property
    def rank(self) -> tuple[float, bool, int]:
        """What is to be least; times that differ by less than predictions can mean are equal."""
        return float(f"{self.seconds:.9e}"), is_table(self.text), self.solved.peak()


def search(space: Space, found: Best) -> tuple[Request, Chosen]:
    """The best schedule with the mesh, the placement and the number of microbatches of the best plan by a name."""
    request, solved = space.solved(found.setting, found.cut)
    named = _measured(request, solved)
    if found.setting.mesh.degree("pp") == 1:
        alone = f"schedule {named.text}, as one pipeline rank waits for no other"
        return request, Chosen(solved, alone, alone)
    tables = list(_tables(space, named, _bases(space, found)))
    chosen = min((named, *tables), key=lambda tried: tried.rank)
    bound = _bound(chosen.request, chosen.solved)
    gap = f"{max(0.0, chosen.length / bound - 1) if bound else 0.0:.1%} over the lower bound for its stages"
    note = (
        f"schedule {written(chosen.text)}: the fastest of {len(space.request.schedules)} names, searched jointly,"
        f" and of {len(tables)} table{'s' * (len(tables) != 1)} made for such stages; predicted flush"
        f" {format_seconds(chosen.length)}, {gap}"
    )
    verdict = f"its flush is {gap}"
    if chosen is not named:
        less = 1 - chosen.seconds / named.seconds
        verdict = f"a table makes the step {less:.1%} shorter than any of these names; {verdict}"
    return chosen.request, Chosen(chosen.solved, note, verdict)


def _bases(space: Space, found: Best) -> list[_Tried]:
    """The best plan by a name for each number of stages, in the setting of the best of all."""
    setting, by_stages = found.setting, dict[int, list[Setting]]()
    for each in space.settings:
        if replace(setting, text=each.text, order=each.order) == each:
            by_stages.setdefault(len(space.form(each).place), []).append(each)
    plans = (best(space, settings) for _, settings in sorted(by_stages.items()))
    return [_measured(*space.solved(plan.setting, plan.cut)) for plan in plans if plan is not None]


def _measured(request: Request, solved: Solved) -> _Tried:
    length = flush(request, solved).makespan
    return _Tried(request, solved, length, length + exchanged_seconds(request, solved))


def _tables(space: Space, named: _Tried, bases: Sequence[_Tried]) -> Iterator[_Tried]:
    """Tables for the stages of some plans, where they may be faster than the best one by a name."""
    known = {each.text for each in bases}
    free: Free = {}
    for each in bases:
        request, base = each.request, each.solved
        if _bound(request, base) >= named.length * (1 - CLOSE):
            continue
        ranks, count = base.problem.ranks, base.candidate.microbatches
        costs, edge = _costs(request, base), edge_seconds(request, base)
        for room in _rooms(base):
            made = schedules.auto(ranks, count, costs, edge, limit=room, effort=EFFORT).schedule
            text = schedules.spell(made)
            if text in known:
                break
            known.add(text)
            schedule = request.scheduled(text, ranks, count)
            candidate = replace(base.candidate, text=text, schedule=schedule, moments=in_flight(schedule))
            yield from _tried(space, request, candidate, free)


def _tried(space: Space, request: Request, candidate: Candidate, free: Free) -> Iterator[_Tried]:
    """The candidate with its best split, if one fits; splits that are in `free` are not looked for again."""
    models, problem = pose(request, candidate)
    allowed = space.allowed(problem.stages)
    problem = replace(problem, barred=frozenset(range(1, problem.segments)) - {*allowed})
    splits: Sequence[Split] = ()
    if problem.stages > problem.ranks:
        key = problem.place, request.recompute
        if key not in free:
            free[key] = ways(replace(problem, moments=()))
        splits = free[key]
    if not splits or any(evaluate(problem, split.starts) is None for split in splits):
        split = best_split(request, candidate, models, problem)
        splits = () if split is None else (split,)
    found = [_measured(request, Solved(candidate, models, problem, split)) for split in splits]
    if found:
        yield min(found, key=lambda tried: tried.length)


def _rooms(solved: Solved) -> list[float]:
    """Limits for `schedules.auto`, in microbatches on a rank's share: of the roomiest rank, and one that all have."""
    problem, segments = solved.problem, solved.models[0].segments
    saved = [sum(max(n.saved_bytes, n.stash_bytes) for n in segments[i:j]) for i, j in solved.runs]
    rooms = []
    for rank, held in enumerate(solved.held()):
        left = problem.room(rank) - sum(
            problem.resident[i][j - i - 1] for i, j in (solved.runs[stage] for stage in held)
        )
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
