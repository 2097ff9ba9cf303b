"""The stage split with the shortest step, where each rank holds one stage: exact for few splits, else with a bound.

The step is the flush of the pipeline, then the collectives of the data axis of the rank that has most. What a flush
takes at least, T(k) being the time of a microbatch on stage k, F(k) its forward's, e that of a message, T* the least
that the slowest stage of any split can take (`slowest`):

    m T(k) + sum of T(j), j < k, + 2 k e       k is busy so long; before its first forward and after its last
                                               backward those of the stages before it run (where backwards are
                                               in two, their forwards alone)
    sum of T + (m - 1) T(k) - min(m - 1, p - 1 - k) F(k) + 2 (p - 1) e
                                               of 1f1b: microbatch 0 there and back to k, then k's row from there

Splits are enumerated where they are few (`EFFORT`); those that cannot beat the best are left out by the first line. Of
many, the one whose slowest stage is T* (`even`), improved by moving single cuts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb, inf

from autopart.solver.flush import Flush
from autopart.solver.kinds import Sums
from autopart.solver.stages import Stages, Way

EFFORT = 40_000
"""How many actions are run at most to compare splits of one setting."""

SPLITS = 2000
"""With more splits than this they are not enumerated."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """What a pipeline's step is made of, beside its stages. Times in whole femtoseconds."""

    stages: int
    microbatches: int
    actions: int  # of its schedule
    flush: Callable[[], Flush]
    whole: bool  # whether backwards are whole
    alternating: bool  # whether it is 1f1b
    latency: int
    transfer: tuple[tuple[int, ...], ...]  # what the message into each segment takes, at each stage, latency left out
    exchanged: tuple[Sums, ...]  # the collectives of the data axis, at each stage, summed from the first segment on
    allowed: tuple[int, ...]  # segments where a stage may begin, but for the first one
    starts: tuple[int, ...] = ()  # those where one must


@dataclass(frozen=True, slots=True)
class Cut:
    """A split and how its stages are run; its step, the time of its slowest stage, the bytes' time over its cuts."""

    starts: tuple[int, ...]
    ways: tuple[Way, ...]
    step: int
    slowest: int
    crossing: int

    @property
    def recomputed(self) -> int:
        """How many segments are recomputed for memory."""
        return sum(sum(way.counts) for way in self.ways)

    @property
    def order(self) -> tuple[int, int, int, tuple[int, ...]]:
        """What is least of the best: equal steps have a faster slowest stage, less over the cuts, earlier cuts."""
        return self.step, self.slowest, self.crossing, self.starts


@dataclass(frozen=True, slots=True)
class Found:
    """The best split that was found, None if none is at most as long as asked for; no split of all is below `bound`."""

    cut: Cut | None
    bound: int
    next: Cut | None = None  # the best of the others that were looked at


def shortest(stages: Stages, pipe: Pipe, known: float = inf) -> Found | None:
    """The split with the shortest step, if it is at most `known`; None if none can be."""
    search = Search(stages, pipe, known)
    longest = known // pipe.microbatches if known < inf else inf
    if search.furthest(longest) is None:  # nothing fits, or the slowest stage alone takes longer than is asked for
        return Found(None, search.bound(search.least, 0)) if stages.tired and known < inf else None
    many = comb(len(pipe.allowed), pipe.stages - 1)
    if many <= SPLITS and many * pipe.actions <= EFFORT:
        search.enumerate(0, (0,), (), 0, 0)
        if not stages.tired:
            bound = int(known) + 1 if search.best is None else search.best.step
            return Found(search.best, bound, search.second)
    slowest = search.slowest()
    bound = search.bound(slowest, 0)
    if bound <= known:
        if search.best is None:
            search.improve(search.even(slowest))
        least = known if search.best is None else search.best.step
        bound = max(bound, search.bound(slowest, search.more(least / pipe.microbatches)))
    if stages.tired:  # stages may take less than is known of them
        bound = search.bound(search.least, 0)
    return Found(search.best, bound, search.second)


class Search:
    def __init__(self, stages: Stages, pipe: Pipe, known: float) -> None:
        self.stages, self.pipe, self.known = stages, pipe, known
        self.table, self.segments = stages.table, stages.table.segments
        self.best: Cut | None = None
        self.second: Cut | None = None
        self.spent = 0
        self.least = max(self.table.longest, -(-self.table.total // pipe.stages))  # of any split's slowest stage

    # ---- one split ---------------------------------------------------------------------------------------------------

    def step(self, starts: tuple[int, ...], ways: tuple[Way, ...]) -> Cut:
        """The step of a split whose stages fit."""
        pipe, stops = self.pipe, [*starts[1:], self.segments]
        times = self.stages.seconds(starts, ways)
        messages = [pipe.transfer[stage][start] for stage, start in enumerate(starts) if stage]
        edge = pipe.latency + max(messages, default=0)
        exchanged = self.exchanged(
            [taken[j] - taken[i] for taken, i, j in zip(pipe.exchanged, starts, stops, strict=True)]
        )
        self.spent += pipe.actions
        if pipe.stages == 1:
            length = pipe.microbatches * (times["F"][0] + times["B"][0])
        else:
            length = pipe.flush().length(times, edge)
        slowest = max(f + b for f, b in zip(times["F"], times["B"], strict=True))
        return Cut(starts, ways, length + exchanged, slowest, sum(messages))

    def exchanged(self, times: Sequence[int]) -> int:
        """The time of the collectives of the rank that has most, from that of each stage."""
        return max(times)

    def consider(self, found: Cut) -> None:
        """Keep the best and the next best."""
        if found.step > self.known:
            return
        if self.best is None or found.order < self.best.order:
            found, self.best = self.best or found, found
        if found is not self.best and (self.second is None or found.order < self.second.order):
            self.second = found

    def ends(self, stage: int, start: int) -> Sequence[int]:
        """Where a stage may end, time and memory left aside: later stages have to begin somewhere, pins ask for it."""
        pins = [pin for pin in self.pipe.starts if pin > start]
        if stage == self.pipe.stages - 1:
            return range(self.segments, self.segments + (not pins))
        allowed, later = self.pipe.allowed, self.pipe.stages - 2 - stage
        most = len(allowed) - later
        return allowed[bisect_right(allowed, start) : min([most, *(bisect_right(allowed, pin) for pin in pins)])]

    # ---- all splits --------------------------------------------------------------------------------------------------

    def enumerate(self, stage: int, starts: tuple[int, ...], ways: tuple[Way, ...], before: int, most: int) -> None:
        """All splits that begin so; `before`: the time before and after this stage, `most`: the most collectives."""
        pipe, start = self.pipe, starts[-1]
        for stop in self.ends(stage, start):
            way = self.stages.way(stage, start, stop)
            if way is None:
                break  # nor does a longer one fit
            time = self.stages.taken(stage, start, stop, way)
            exchanged = max(most, pipe.exchanged[stage][stop] - pipe.exchanged[stage][start])
            if pipe.microbatches * time + before + 2 * stage * pipe.latency + exchanged > self.limit():
                break
            if stage == pipe.stages - 1:
                self.consider(self.step(starts, (*ways, way)))
                continue
            forward = self.table.actions[0]
            then, left = before + (time if pipe.whole else forward[stop] - forward[start]), pipe.stages - 1 - stage
            rest = -(-self.table.time(stop, self.segments) // left)
            if pipe.microbatches * rest + then + 2 * (stage + 1) * pipe.latency + exchanged <= self.limit():
                self.enumerate(stage + 1, (*starts, stop), (*ways, way), then, exchanged)

    def limit(self) -> float:
        """What a step must not exceed to be of use: the best known, or the second best."""
        return self.known if self.second is None else min(self.known, self.second.step)

    # ---- many splits -------------------------------------------------------------------------------------------------

    def reach(self, stage: int, start: int, time: float, more: float = inf) -> int:
        """The end of the longest run from `start` that can be this stage within some time; `start` if none can.

        Recomputation takes at most `more` of it.
        """
        ends = self.ends(stage, start)

        def beyond(stop: int) -> bool:
            way = self.stages.way(stage, start, stop)
            return way is None or way.more > more or self.stages.taken(stage, start, stop, way) > time

        fitting = bisect_left(ends, True, key=beyond)
        return ends[fitting - 1] if fitting else start

    def furthest(self, time: float, more: float = inf) -> list[int] | None:
        """The ends of the stages, each as far as it can be within some time; None if they do not reach the end.

        Recomputation takes at most `more` of each stage's.
        """
        stops, start = [], 0
        for stage in range(self.pipe.stages):
            stop = self.reach(stage, start, time, more)
            if stop == start:
                return None
            stops.append(stop)
            start = stop
        return stops if start == self.segments else None

    def slowest(self) -> int:
        """The least time of the slowest stage of a split, some split fitting. Any part of a stage is one too."""
        stops = self.furthest(inf)
        assert stops is not None
        times = [self.stages.time(k, i, j) for k, (i, j) in enumerate(zip([0, *stops], stops, strict=False))]
        high = max(time for time in times if time is not None)
        low = self.least
        while low < high:
            middle = (low + high) // 2
            if self.furthest(middle) is None:
                low = middle + 1
            else:
                high = middle
        return high

    def windows(self, time: int) -> list[list[int]]:
        """Where each stage may begin if none takes longer than `time`."""
        last = self.furthest(time)
        assert last is not None
        first, stop, places = [], self.segments, (0, *self.pipe.allowed)
        for stage in reversed(range(self.pipe.stages)):
            candidates = places[stage : bisect_left(places, stop)]

            def short(start: int, stage: int = stage, stop: int = stop) -> bool:
                needed = self.stages.time(stage, start, stop)
                return needed is not None and needed <= time and not any(start < pin < stop for pin in self.pipe.starts)

            stop = candidates[bisect_left(candidates, True, key=short)]
            first.append(stop)
        pairs = zip(reversed(first), [0, *last], strict=False)
        return [[place for place in places if low <= place <= high] for low, high in pairs]

    def even(self, slowest: int) -> tuple[int, ...]:
        """The split none of whose stages is slower, with least over its cuts, then the earliest."""
        windows = [*self.windows(slowest), [self.segments]]
        tables: list[dict[int, tuple[int, int]]] = [{self.segments: (0, -1)}]
        for stage in reversed(range(self.pipe.stages)):
            later, here = tables[-1], dict[int, tuple[int, int]]()
            for start in windows[stage]:
                within = self.reach(stage, start, slowest)
                options = [
                    (later[stop][0], stop) for stop in windows[stage + 1] if start < stop <= within and stop in later
                ]
                if options:
                    least, stop = min(options)
                    here[start] = least + (self.pipe.transfer[stage][start] if stage else 0), stop
            tables.append(here)
        starts = [0]
        for table in tables[:1:-1]:
            starts.append(table[starts[-1]][1])
        return tuple(starts)

    def improve(self, starts: tuple[int, ...]) -> None:
        """That split, and better ones that differ in one cut each."""
        first = self._run(starts)
        assert first is not None, "the even split fits"
        self.consider(first)
        seen, waiting = {starts}, True
        while waiting and self.best is not None:
            waiting = False
            for other in neighbours(self.best.starts, self.pipe.allowed):
                if other in seen or self.spent > EFFORT:
                    continue
                seen.add(other)
                found, before = self._run(other), self.best
                if found is not None:
                    self.consider(found)
                waiting |= self.best is not before

    def _run(self, starts: tuple[int, ...]) -> Cut | None:
        if not {*self.pipe.starts} <= {*starts}:
            return None
        stops = [*starts[1:], self.segments]
        ways = [self.stages.way(k, i, j) for k, (i, j) in enumerate(zip(starts, stops, strict=True))]
        return self.step(starts, tuple(way for way in ways if way is not None)) if None not in ways else None

    def more(self, longest: float) -> int:
        """The least time that recomputation takes in all, of splits whose stages take no longer than `longest`."""
        if self.stages.limit is None or not self.stages.again or (self.best is not None and not self.best.recomputed):
            return 0
        if self.furthest(longest, more=0) is not None:  # nothing has to be
            return 0
        least = {0: 0}
        for stage in range(self.pipe.stages):
            later: dict[int, int] = {}
            for start, spent in least.items():
                for stop in self.ends(stage, start):
                    way = self.stages.way(stage, start, stop)
                    if way is None or self.table.time(start, stop) + way.more > longest:
                        break
                    later[stop] = min(later.get(stop, spent + way.more), spent + way.more)
            least = later
        return least.get(self.segments, 0)

    def bound(self, slowest: int, more: int) -> int:
        """What no step is below, the least times of the slowest stage and of all recomputation being known."""
        pipe, table = self.pipe, self.table
        most, total = pipe.microbatches, table.total + more
        least = most * slowest
        if pipe.alternating:
            spare = min(most - 1, pipe.stages - 1) * table.share
            longer = self._next(slowest)
            last = table.total - (pipe.stages - 1) * slowest  # of the last stage, if no other run is longer than T*
            within = max(total + int(slowest * (most - 1 - spare)), total + (most - 1) * max(0, last))
            beyond = inf if longer is None else max(total + int(longer * (most - 1 - spare)), most * longer)
            least = max(least, int(min(within, beyond)) + 2 * (pipe.stages - 1) * pipe.latency)
        return least + -(-min(taken[-1] for taken in pipe.exchanged) // pipe.stages)

    def _next(self, slowest: int) -> int | None:
        """The least time of a run of segments, nothing recomputed, that is longer than T*."""
        elapsed = self.table.elapsed
        stops = (bisect_right(elapsed, before + slowest) for before in elapsed)
        longer = (elapsed[j] - before for before, j in zip(elapsed, stops, strict=True) if j < len(elapsed))
        return min(longer, default=None)


def neighbours(starts: tuple[int, ...], allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The splits in which one stage begins at the place before or after."""
    for k in range(1, len(starts)):
        place = bisect_left(allowed, starts[k])
        for other in (*allowed[max(0, place - 1) : place], *allowed[place + 1 : place + 2]):
            if other not in starts and starts[k - 1] < other < (*starts, inf)[k + 1]:
                yield (*starts[:k], other, *starts[k + 1 :])


def within(stages: Stages, pipe: Pipe) -> Callable[[int], bool]:
    """Whether some split fits a limit, as a function of that."""
    segments = stages.table.segments
    search = Search(stages, pipe, inf)

    def fits(limit: int) -> bool:
        start = 0
        for stage in range(pipe.stages):
            allowed = search.ends(stage, start)
            if stage == pipe.stages - 1:
                return len(allowed) > 0 and stages.need(stage, start, segments) <= limit
            far = bisect_left(allowed, True, key=lambda j, k=stage, i=start: stages.need(k, i, j) > limit)  # type: ignore[misc]
            if far == 0:
                return False
            start = allowed[far - 1]
        return False

    return fits


def least_need(stages: Stages, pipe: Pipe) -> int:
    """The smallest limit under which some split fits."""
    fits = within(stages, pipe)
    low = -max((0, *stages.spare))
    high = sum(stages.need(k, 0, stages.table.segments) - low for k in range(pipe.stages))
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high
