"""Lighter placements: of a plan that fits, the layers that may send less, as far as their ranks have memory for it.

before: *: fsdp                       with zero1 for all, the fullest rank would not fit
after:  h.0 .. h.9: zero1; *: fsdp    it has room for so many, and its collectives take less time

Mesh, split and all else stay. Of what a rank can give its layers, all is looked at where that is little (`EVERY`); else
the move that saves most time for its bytes is made for as many equal layers as fit, and so on. Only ranks whose
collectives take longest are looked at. Parameters that several layers use keep their placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopart.cluster import Cluster
from autopart.ir.placement import Placement
from autopart.ir.plan import first_match
from autopart.solver.axis import linked
from autopart.solver.memory import MemoryModel
from autopart.solver.presets import Rules
from autopart.solver.request import Request
from autopart.solver.search import Solved, columns_of, exchanged_seconds
from autopart.solver.timing import exchange_seconds

EVERY = 1000
"""Up to how many ways to place the layers of a rank all are looked at."""

Chosen = dict[int, Placement]
"""The placement of each segment, by number."""


def lighter(request: Request, solved: Solved) -> Solved | None:
    """The solution with lighter placements for some segments, None if that makes the step no shorter."""
    options = tuple(dict.fromkeys(rules[-1][1] for rules in request.placements))
    if len(options) == 1 or solved.candidate.schedule.mirrors or request.output is not None:
        return None
    *pinned, (_, base) = solved.candidate.placements
    ranks = [_Rank.of(request, solved, rank, options) for rank in range(solved.candidate.schedule.ranks)]
    before = [each.time(dict.fromkeys(each.segments, base)) for each in ranks]
    found = [each.best(base) for each in ranks]
    least = max(each.time(chosen) for each, chosen in zip(ranks, found, strict=True))
    changed = {
        i: placement
        for each, chosen, time in zip(ranks, found, before, strict=True)
        for i, placement in chosen.items()
        if time > least and placement != base and i in each.free
    }
    rules = (*pinned, *((request.names[i], placement) for i, placement in sorted(changed.items())), ("*", base))
    made = placed(request, solved, rules)
    shorter = exchanged_seconds(request, made) < exchanged_seconds(request, solved) * (1 - 1e-9)
    return made if changed and shorter else None


def placed(request: Request, solved: Solved, rules: Rules) -> Solved:
    """The solution with its segments placed by other rules."""
    modes = tuple(first_match(rules, name).on("dp") for name in request.names)
    models = tuple(replace(model, modes=modes) for model in solved.models)
    return replace(solved, candidate=replace(solved.candidate, placements=rules), models=models)


@dataclass(frozen=True)
class _Rank:
    """What a rank holds, and what its segments may be placed as: those that are `free`, told apart by their numbers."""

    model: MemoryModel
    runs: tuple[tuple[int, int], ...]
    moments: tuple[tuple[int, ...], ...]
    limit: int
    cluster: Cluster
    microbatches: int
    options: tuple[Placement, ...]
    free: tuple[int, ...]
    times: dict[tuple[int, Placement], float]

    @classmethod
    def of(cls, request: Request, solved: Solved, rank: int, options: Sequence[Placement]) -> _Rank:
        held, problem, candidate = solved.held()[rank], solved.problem, solved.candidate
        columns = columns_of(request, candidate)
        runs = tuple(solved.runs[stage] for stage in held)
        pinned = candidate.placements[:-1]
        model, segments = solved.models[rank], [i for start, stop in runs for i in range(start, stop)]
        free = [i for i in segments if not model.segments[i].tied and not _matched(request.names[i], pinned)]
        return cls(
            model,
            runs,
            tuple(tuple(counts[stage] for stage in held) for counts, at in problem.moments if at == rank),
            problem.room(rank),
            linked(columns.clusters[rank], candidate.mesh, "dp"),
            candidate.microbatches,
            tuple(options),
            tuple(free),
            {},
        )

    @property
    def segments(self) -> list[int]:
        """All segments that the rank has."""
        return [i for start, stop in self.runs for i in range(start, stop)]

    def taken(self, i: int, placement: Placement) -> float:
        """The time in a step of the collectives of a segment."""
        key = id(self.model.segments[i]), placement
        if key not in self.times:
            degree, modes = self.model.degree, placement.on("dp")
            self.times[key] = exchange_seconds(
                [self.model.segments[i]], [modes], degree, self.microbatches, self.cluster
            )
        return self.times[key]

    def time(self, chosen: Mapping[int, Placement]) -> float:
        """The time of the collectives of all segments."""
        return sum(self.taken(i, placement) for i, placement in chosen.items())

    def need(self, chosen: Mapping[int, Placement]) -> int:
        """The bytes that the rank needs."""
        modes = list(self.model.modes)
        for i, placement in chosen.items():
            modes[i] = placement.on("dp")
        return replace(self.model, modes=tuple(modes)).rank(self.runs, self.moments).total

    def best(self, base: Placement) -> Chosen:
        """The placements of its segments with the least time that fit: what is not free stays."""
        if len(self.options) ** len(self.free) <= EVERY:
            ways = (dict(zip(self.free, way, strict=True)) for way in product(self.options, repeat=len(self.free)))
            fitting = (way for way in ways if self.need(way) <= self.limit)
            found = min(fitting, key=lambda way: (self.time(way), self.need(way)))
        else:
            found = self._greedily(dict.fromkeys(self.free, base))
        return {**dict.fromkeys(self.segments, base), **found}

    def _greedily(self, chosen: Chosen) -> Chosen:
        moved = True
        while moved:
            moved = False
            for _, alike, placement in sorted(self._moves(chosen), key=lambda move: -move[0]):
                left = [i for i in alike if self.taken(i, placement) < self.taken(i, chosen[i])]
                count = self._most(chosen, left, placement)
                chosen = {**chosen, **dict.fromkeys(left[:count], placement)}
                moved |= count > 0
        return chosen

    def _moves(self, chosen: Chosen) -> Iterator[tuple[float, list[int], Placement]]:
        """Time saved for each byte, the segments that are alike, and a placement that takes less time for these."""
        groups: dict[tuple[int, Placement], list[int]] = {}
        for i, placement in chosen.items():
            groups.setdefault((id(self.model.segments[i]), placement), []).append(i)
        for (_, before), alike in groups.items():
            for placement in self.options:
                saved = self.taken(alike[0], before) - self.taken(alike[0], placement)
                more = self.need({**chosen, alike[0]: placement}) - self.need(chosen)
                if saved > 0:
                    yield saved / max(more, 1), alike, placement

    def _most(self, chosen: Chosen, alike: Sequence[int], placement: Placement) -> int:
        """How many of some segments, the first ones, may have another placement."""
        low, high = 0, len(alike)
        while low < high:
            count = (low + high + 1) // 2
            if self.need({**chosen, **dict.fromkeys(alike[:count], placement)}) <= self.limit:
                low = count
            else:
                high = count - 1
        return low


def _matched(name: str, rules: Rules) -> bool:
    """Whether a rule before the last speaks of a segment."""
    try:
        first_match(rules, name)
    except ValueError:
        return False
    return True
