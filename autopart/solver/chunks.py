"""The split where ranks hold several stages: the stages of a rank share its time and its memory.

Minimise   max over ranks of  sum of times over the rank's stages                      (the busiest rank)
subject to what a rank holds <= limit at every moment                                  -> `SplitProblem.moments`
           every stage has a segment; every segment in `starts` begins a stage         -> `SplitProblem.stops`
then       the slowest stage, then the bytes over all cuts,
then       the first cut nearest to where equal stages would have it, the second cut, ... (of two, the earlier).

Each bound is found by halving the range between what is possible at best and the best split known, down to a part of it
(`PRECISION`; exactly, for small numbers). The question asked is whether a split exists that keeps all bounds: a depth
first search over the stages in order, nearest cuts first, which gives up a partial split when the ranks have too little
time left for the remaining segments, and remembers from where it failed. A search longer than `PATIENCE` counts as
failed; then the result is not known to be the best (`Split.exact`).

The busiest rank is not all that a flush waits for: uneven stages make bubbles. So splits whose busiest rank takes a
little more (`SLACKS`), with a slowest stage that may be faster, are asked how long their flush is, and the shortest is
taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopart.solver.split import Split, SplitProblem, bottleneck, evaluate, fewest_bytes

PATIENCE = 2000
"""How many partial splits one search looks at."""

PRECISION = 1000
"""The least value of a bound is found to this part of it."""

SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""How much longer than the least a busiest rank may take."""

MANY = 400
"""With more different interval times than this, their sums are not looked at."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a split must keep: the time of a rank, that of a stage, the bytes over all cuts."""

    busiest: int
    slowest: int
    boundary: int


def solve_chunks(problem: SplitProblem, flush: Callable[[Split], float] | None = None) -> Split | None:
    """The best split, None if none fits the limit; the same answer every time.

    With `flush`, the time of a split's flush, that of the shortest one among those with a little slack.
    """
    found = ways(problem, SLACKS if flush is not None else SLACKS[:1])
    return min(found, key=flush or found.index, default=None)


def ways(problem: SplitProblem, slacks: Sequence[float] = SLACKS) -> tuple[Split, ...]:
    """The best split for each slack that the busiest rank is given, the same ones once; none if none fits the limit."""
    total = sum(problem.times)
    bounds = Bounds(total, total, sum(problem.boundaries))
    search = _Search(problem)
    best = search.first(bounds)
    if best is None:
        return ()
    best, bounds = search.improved(best, bounds, fastest(problem), lambda split: split.busiest, "busiest")
    found = dict.fromkeys(search.settled(best, bounds, slack) for slack in slacks)
    return tuple(replace(split, least=bounds.busiest, exact=not search.tired) for split in found)


def fastest(problem: SplitProblem) -> int:
    """What the busiest rank takes at least, however the segments are dealt: the mean, or the longest segment."""
    return max(-(-sum(problem.times) // problem.ranks), *problem.times)


def least_limit(problem: SplitProblem, known: int | None = None) -> int:
    """The smallest limit under which the problem has a solution, as far as the search can tell.

    Where that is not below a `known` one, it is not looked for: `known` is returned.
    """
    total = sum(problem.times)
    bounds = Bounds(total, total, sum(problem.boundaries))
    search = _Search(problem)
    if known is not None and search.first(bounds, known - 1) is None:
        return known
    low = 0
    high = max(sum(problem.need(stage, 0, problem.segments) for stage in range(problem.stages)), 1)
    while low < high:
        middle = (low + high) // 2
        if search.first(bounds, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


class _Search:
    """Searches in one problem; `tired` once one of them took too long."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem, self.tired = problem, False
        self.numbers = [[i for i, (_, rank) in enumerate(problem.moments) if rank == at] for at in problem.place]
        self.sums = _sums(problem)
        self.fastest = int(bottleneck(problem, lambda _, start, stop: problem.time(start, stop)))
        self.fewest = cache(lambda slowest: fewest_bytes(problem, slowest))

    def settled(self, best: Split, bounds: Bounds, slack: float) -> Split:
        """The split with the fastest slowest stage, and so on, whose busiest rank takes at most so much longer."""
        bounds = replace(bounds, busiest=bounds.busiest + int(slack * bounds.busiest))
        best, bounds = self.improved(best, bounds, self.fastest, lambda split: split.slowest, "slowest")
        least = int(self.fewest(bounds.slowest)[0][0])
        best, bounds = self.improved(best, bounds, least, lambda split: split.boundary, "boundary")
        return self.first(bounds) or best

    def improved(
        self, best: Split, bounds: Bounds, least: int, value: Callable[[Split], int], name: str
    ) -> tuple[Split, Bounds]:
        """The best split found for one of the bounds, and the bounds with that one as good as it is."""
        low, high = least, value(best)
        while high - low > least // PRECISION:
            middle = (low + high) // 2
            found = self.first(replace(bounds, **{name: middle}))
            if found is None:
                low = middle + 1
            else:
                best, high = found, value(found)
        return best, replace(bounds, **{name: high})

    def first(self, bounds: Bounds, limit: int | None = None) -> Split | None:
        """The split with the nearest cuts that keeps the bounds, None if there is none or none was found in time.

        `limit` is that of the problem unless given.
        """
        problem = self.problem
        if sum(self._most(rank, bounds.busiest) for rank in range(problem.ranks)) < sum(problem.times):
            return None
        self.bounds, self.looked = bounds, 0
        self.limit = problem.limit if limit is None else limit
        self.crossing = self.fewest(bounds.slowest)
        self.failed: set[tuple[int, int, tuple[int, ...], tuple[int, ...], int]] = set()
        held = tuple(
            problem.limit - problem.room(rank) for _, rank in problem.moments
        )  # what a device has more, it lacks
        starts = self._from(0, 0, (0,) * problem.ranks, held, 0)
        self.tired |= self.looked > PATIENCE
        return evaluate(replace(problem, limit=self.limit), starts) if starts is not None else None

    def _most(self, rank: int, busiest: int) -> int:
        """The most time up to a bound that as many intervals as a rank has stages can add up to."""
        sums = self.sums.get(self.problem.place.count(rank))
        if sums is None:
            return busiest
        at = bisect_right(sums, busiest)
        return sums[at - 1] if at else -1

    def _from(
        self, stage: int, start: int, loads: tuple[int, ...], held: tuple[int, ...], crossed: int
    ) -> tuple[int, ...] | None:
        """Where this stage and those after it begin, given what the ranks have to do and hold already."""
        problem = self.problem
        if stage == problem.stages:
            return ()
        key = stage, start, loads, held, crossed
        self.looked += 1
        if key in self.failed or self.looked > PATIENCE:
            return None
        rank = problem.place[stage]
        for stop in self._nearest(stage, start, min(self.bounds.slowest, self.bounds.busiest - loads[rank])):
            more = self._held(stage, start, stop, held)
            if more is None or crossed + self.crossing[stage + 1][stop] > self.bounds.boundary:
                continue
            then = (*loads[:rank], loads[rank] + problem.time(start, stop), *loads[rank + 1 :])
            if self._reaches(stage + 1, stop, then):
                over = crossed + (problem.boundaries[stop] if stop < problem.segments else 0)
                rest = self._from(stage + 1, stop, then, more, over)
                if rest is not None:
                    return (start, *rest)
        self.failed.add(key)
        return None

    def _nearest(self, stage: int, start: int, room: int) -> list[int]:
        """Where a stage may end within some time, what is nearest to the end of equal stages first."""
        problem = self.problem
        most = problem.furthest(start, room)
        even = problem.time(0, problem.segments) * (stage + 1)
        return sorted(
            (stop for stop in problem.stops(stage, start) if stop <= most),
            key=lambda stop: abs(problem.time(0, stop) * problem.stages - even),
        )

    def _held(self, stage: int, start: int, stop: int, held: tuple[int, ...]) -> tuple[int, ...] | None:
        """What is held at each moment with this stage too, None if it is more than the limit."""
        more = list(held)
        for number in self.numbers[stage]:
            more[number] += self.problem.held(number, stage, start, stop)
            if more[number] > self.limit:
                return None
        return tuple(more)

    def _reaches(self, stage: int, start: int, loads: Sequence[int]) -> bool:
        """Whether the stages from `stage` on could take all segments from `start` on, each as its rank's last one."""
        problem, bounds = self.problem, self.bounds
        left = problem.time(start, problem.segments)
        rest = problem.place[stage:]
        if left > sum(min(bounds.busiest - loads[rank], rest.count(rank) * bounds.slowest) for rank in set(rest)):
            return False
        for later in range(stage, problem.stages):
            room = min(bounds.slowest, bounds.busiest - loads[problem.place[later]])
            start = max(start, problem.furthest(start, room))
        return start >= problem.segments


def _sums(problem: SplitProblem) -> dict[int, list[int]]:
    """By a number of stages, all times that so many intervals can add up to; none where there are too many."""
    one = {problem.time(i, j) for i in range(problem.segments) for j in range(i + 1, problem.segments + 1)}
    found: dict[int, list[int]] = {}
    sums = {0}
    for count in range(1, max(map(problem.place.count, problem.place)) + 1):
        sums = {a + b for a in sums for b in one} if len(one) <= MANY and len(sums) <= MANY else set()
        if not sums:
            break
        found[count] = sorted(sums)
    return found
