"""The stage split: n segments in order cut into contiguous stages, exactly. Here each rank holds one of them.

Minimise   max over stages k of  sum of times[i] over the segments i of k              -> `bottleneck`
subject to resident(k) + kept[k] * sum of saved[i] <= limit for every stage k          -> `SplitProblem.fits`
           every stage has a segment; every segment in `starts` begins a stage         -> `SplitProblem.stops`
then       the least sum of boundaries[i] over the segments i that begin a later stage,
then       the earliest first cut, the earliest second cut, ...                        -> `solve_split`

Times are whole numbers, so sums are exact and ties are real. Backward dynamic programming over (stage, first segment):
the best way to finish from there does not depend on how it was reached. O(p n^2). Where ranks hold several stages, it
does: `solver.chunks`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

Moment = tuple[tuple[int, ...], int]
"""How many microbatches every stage of a rank keeps at once (0 for stages of other ranks), and the rank."""


@dataclass(frozen=True, slots=True)
class SplitProblem:
    """What is to be split; one entry a segment unless said otherwise."""

    times: tuple[int, ...]  # of one microbatch, in any whole unit
    boundaries: tuple[int, ...]  # bytes that flow in from earlier segments
    resident: Sequence[Sequence[int]]  # [i][j - i - 1]: bytes of segments i to j - 1 without activations
    saved: tuple[int, ...]  # activation bytes that one microbatch keeps
    place: tuple[int, ...]  # the rank of a stage; an entry a stage
    moments: tuple[Moment, ...]  # those at which a rank may hold most
    limit: int  # bytes per device
    starts: tuple[int, ...] = ()  # segments where a stage must begin
    barred: frozenset[int] = frozenset()  # those where none may
    spare: tuple[int, ...] = ()  # the bytes that each rank's device has beyond the limit; empty where none has any
    _elapsed: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _kept: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _flight: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.segments:
            raise ValueError(f"stages: {self.segments} segments cannot be split into {self.stages} stages")
        if not all(0 <= start < self.segments for start in self.starts):
            raise ValueError(f"stages: starts {self.starts} must be segment numbers below {self.segments}")
        if len({*self.starts, 0}) > self.stages:
            raise ValueError(f"stages: starts {self.starts} make more than {self.stages} stages")
        object.__setattr__(self, "_elapsed", tuple(accumulate(self.times, initial=0)))
        object.__setattr__(self, "_kept", tuple(accumulate(self.saved, initial=0)))
        flight = (max((counts[stage] for counts, _ in self.moments), default=0) for stage in range(self.stages))
        object.__setattr__(self, "_flight", tuple(flight))

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self.times)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.place)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(set(self.place))

    def room(self, rank: int) -> int:
        """The bytes of a rank's device."""
        return self.limit + (self.spare[rank] if self.spare else 0)

    def time(self, start: int, stop: int) -> int:
        """The time of segments `start` to `stop` - 1."""
        return self._elapsed[stop] - self._elapsed[start]

    def furthest(self, start: int, time: int) -> int:
        """The end of the longest run of segments from `start` that takes at most `time`."""
        return bisect_right(self._elapsed, self._elapsed[start] + time) - 1

    def need(self, stage: int, start: int, stop: int) -> int:
        """The peak bytes of a stage made of segments `start` to `stop` - 1, without the other stages of its rank."""
        return self.resident[start][stop - start - 1] + self._flight[stage] * (self._kept[stop] - self._kept[start])

    def held(self, moment: int, stage: int, start: int, stop: int) -> int:
        """The bytes of such a stage at a moment of its rank."""
        kept = self.moments[moment][0][stage]
        return self.resident[start][stop - start - 1] + kept * (self._kept[stop] - self._kept[start])

    def fits(self, stage: int, start: int, stop: int) -> bool:
        """Whether such a stage stays within the limit, alone."""
        return self.need(stage, start, stop) <= self.room(self.place[stage])

    def stops(self, stage: int, start: int) -> Sequence[int]:
        """Where a stage from `start` may end, memory left aside: later stages need a segment each, pins a cut."""
        if stage == self.stages - 1:
            return range(self.segments, self.segments + (not any(pin > start for pin in self.starts)))
        last = self.segments - (self.stages - 1 - stage)
        found = range(start + 1, min([last, *(pin for pin in self.starts if pin > start)]) + 1)
        return [stop for stop in found if stop not in self.barred] if self.barred else found


@dataclass(frozen=True, slots=True)
class Split:
    """Where stages begin (the first at 0), times of the busiest rank and the slowest stage, the bytes over all cuts.

    `least` is the least that a busiest rank can take, by default what this one's does; `exact` is False where that may
    be less.
    """

    starts: tuple[int, ...]
    busiest: int
    slowest: int
    boundary: int
    exact: bool = field(default=True, compare=False)
    least: int = field(default=-1, compare=False)

    def __post_init__(self) -> None:
        if self.least < 0:
            object.__setattr__(self, "least", self.busiest)


def solve_split(problem: SplitProblem) -> Split | None:
    """The best split where each rank holds one stage, None if none fits the limit; the same answer every time."""
    slowest = bottleneck(problem, lambda k, i, j: problem.time(i, j) if problem.fits(k, i, j) else inf)
    if slowest == inf:
        return None

    def crossing(stage: int, start: int, stop: int) -> float:
        if problem.time(start, stop) > slowest or not problem.fits(stage, start, stop):
            return inf
        return problem.boundaries[start] if stage else 0

    least = _finish(problem, crossing, lambda here, later: here + later)
    starts, stage, start = [0], 0, 0
    while stage < problem.stages - 1:
        start = next(
            stop
            for stop in problem.stops(stage, start)
            if crossing(stage, start, stop) + least[stage + 1][stop] == least[stage][start]
        )
        stage += 1
        starts.append(start)
    return Split(tuple(starts), int(slowest), int(slowest), int(least[0][0]))


def fewest_bytes(problem: SplitProblem, slowest: int) -> list[list[float]]:
    """[k][i]: the fewest bytes over the cuts before stages k and later if k begins at i, none slower than `slowest`."""

    def crossing(stage: int, start: int, stop: int) -> float:
        if problem.time(start, stop) > slowest:
            return inf
        return problem.boundaries[start] if stage else 0

    return _finish(problem, crossing, lambda here, later: here + later)


def bottleneck(problem: SplitProblem, cost: Callable[[int, int, int], float]) -> float:
    """The least possible value of the largest cost(stage, start, stop) over the stages; inf if there is no split.

    With the need for memory as the cost it is the smallest limit under which the problem has a solution.
    """
    return _finish(problem, cost, max)[0][0]


def evaluate(problem: SplitProblem, starts: Sequence[int]) -> Split | None:
    """The split that begins its stages at `starts`, counted afresh from the segments; None if it breaks a rule."""
    cuts = [*starts, problem.segments]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if len(starts) != problem.stages or starts[0] != 0 or min(sizes) < 1 or not {*problem.starts} <= {*starts}:
        return None
    inside = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    seconds = [sum(problem.times[run]) for run in inside]
    loads = Counter[int]()
    for rank, time in zip(problem.place, seconds, strict=True):
        loads[rank] += time
    for counts, rank in problem.moments:
        held = sum(
            problem.resident[run.start][run.stop - run.start - 1] + count * sum(problem.saved[run])
            for run, count, at in zip(inside, counts, problem.place, strict=True)
            if at == rank
        )
        if held > problem.room(rank):
            return None
    boundary = sum(problem.boundaries[start] for start in starts[1:])
    return Split(tuple(starts), max(loads.values()), max(seconds), boundary)


def first_segments(problem: SplitProblem, stage: int) -> Iterator[int]:
    """The segments at which a stage may begin when every stage has at least one."""
    yield from range(stage, problem.segments - problem.stages + stage + 1) if stage else (0,)


def _finish(
    problem: SplitProblem, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> list[list[float]]:
    """[k][i]: the least joined cost of stages k and later if stage k begins at segment i; inf where it cannot."""
    table = [[inf] * (problem.segments + 1) for _ in range(problem.stages + 1)]
    table[problem.stages][problem.segments] = 0
    for stage in reversed(range(problem.stages)):
        later = table[stage + 1]
        for start in first_segments(problem, stage):
            table[stage][start] = min(
                (join(cost(stage, start, stop), later[stop]) for stop in problem.stops(stage, start)), default=inf
            )
    return table
