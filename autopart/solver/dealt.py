"""The stage split with the shortest step where ranks hold several stages: exact for few splits, else a good one.

The stages of a rank share its memory: at every moment of its row (`memory.in_flight`)

    sum over its stages of  resident + transient + microbatches kept then * saved   <= limit

and a rank recomputes nothing, or, where it does not fit so, all that keeps less by it in its stages: nothing else needs
to be known of a rank, since a faster stage makes no plan slower. Splits are enumerated where they are few, as in
`solver.cut`; those are left out which a rank r makes too long, by

    m * sum of T(s) over its stages s  +  sum of T(j), j before its first stage      as nothing reaches it earlier, and
                                                       what it does last goes back through these (where backwards are in
                                                       two, their forwards alone)

Of many, the split nearest to equal stages, or, if it does not fit, those of `solver.chunks`, improved by moving single
cuts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import comb, inf
from typing import overload

from autopart.ir.action import stages_of
from autopart.solver.chunks import least_limit, ways
from autopart.solver.cut import EFFORT, SPLITS, Cut, Found, Pipe, Search, neighbours
from autopart.solver.holding import Holding
from autopart.solver.kinds import Largest
from autopart.solver.split import Moment, SplitProblem
from autopart.solver.stages import Stages, Way

ANY = 1 << 62
"""A limit that is none, in bytes."""

NEAR = 1.05
"""Splits are improved that are at most so much longer than what is known."""

Run = tuple[int, int]
"""The segments of a stage: the first one, and the one after the last."""


class Held:
    """What ranks hold, recomputing nothing or all that keeps less by it."""

    def __init__(self, stages: Stages, pipe: Pipe, place: Sequence[int], moments: Sequence[Moment]) -> None:
        self.stages, self.pipe, self.place, self.moments = stages, pipe, place, moments
        self.limit = ANY if stages.limit is None else stages.limit
        self.ranks = [stages_of(place, rank) for rank in range(max(place) + 1)]
        self.spare = tuple(stages.spare[held[0]] for held in self.ranks) if any(stages.spare) else ()
        self.numbers = [[n for n, (_, at) in enumerate(moments) if at == rank] for rank in range(len(self.ranks))]
        self._known: dict[tuple[int, tuple[Run, ...]], tuple[Way, ...] | None] = {}
        self._needs: dict[tuple[int, tuple[Run, ...]], int] = {}

    @cached_property
    def plain(self) -> SplitProblem:
        """The split where nothing is recomputed."""
        return self._problem(again=False)

    @cached_property
    def every(self) -> SplitProblem | None:
        """The split where all is recomputed that keeps less by it, None where that is nothing."""
        return self._problem(again=True) if self.stages.again else None

    def ways(self, starts: Sequence[int]) -> tuple[Way, ...] | None:
        """How the stages of a split are run; None where a rank does not fit."""
        runs = list(pairwise([*starts, self.stages.table.segments]))
        found: dict[int, Way] = {}
        for rank, held in enumerate(self.ranks):
            chosen = self._rank(rank, tuple(runs[stage] for stage in held))
            if chosen is None:
                return None
            found |= dict(zip(held, chosen, strict=True))
        return tuple(found[stage] for stage in range(len(runs)))

    def peak(self, starts: Sequence[int], chosen: Sequence[Way]) -> int:
        """The bytes of the fullest rank of a split whose stages are run in some ways."""
        runs = list(pairwise([*starts, self.stages.table.segments]))
        most = 0
        for rank, held in enumerate(self.ranks):
            again = any(any(chosen[stage].counts) for stage in held)
            problem = self.every if again and self.every is not None else self.plain
            most = max(most, self._held(problem, rank, tuple(runs[stage] for stage in held)))
        return most

    def reaches(self) -> bool:
        """Whether a split may fit: whether each stage could, if it were alone on its rank."""
        start, segments, search = 0, self.stages.table.segments, Search(self.stages, self.pipe, inf)
        for stage in range(len(self.place)):
            ends = search.ends(stage, start)
            fitting = bisect_left(ends, True, key=lambda stop, k=stage, i=start: not self._alone(k, i, stop))  # type: ignore[misc]
            if not fitting:
                return False
            start = ends[fitting - 1]
        return start == segments

    def least(self) -> int:
        """The smallest limit that some split is known to fit, a rank recomputing nothing or all of its stages."""
        found = least_limit(self.plain)
        return found if self.every is None else least_limit(self.every, found)

    def fits(self) -> bool:
        """Whether some split is found that fits."""
        return self.more() is not None and self.reaches() and self.least() <= self.limit

    def more(self) -> int | None:
        """The least time that recomputation takes in all of a split, for a microbatch; None if no split fits.

        A rank r keeps what its segments save at least f(r) times, the fewest that one of its stages keeps. So the ranks
        hold together no less than what they have at rest, and what is saved, dealt out to those with the least f first,
        each as far as it goes into the limit alone.
        """
        table, again = self.stages.table, self.stages.again
        flights = [max(counts[stage] for counts, _ in self.moments) for stage in range(len(self.place))]
        rooms = [self.plain.room(rank) for rank in range(len(self.ranks))]
        least = sorted(
            (min(flights[stage] for stage in held), most) for held, most in zip(self.ranks, rooms, strict=True)
        )
        room = sum(rooms) - self.stages.holding.own[-1]
        there = [(each, each.before[-1]) for each in again if each.before[-1]]
        there.sort(key=lambda pair: (pair[0].more[0] + pair[0].more[1]) / pair[0].gain)

        def fits(saved: float) -> bool:
            left, held = saved, 0.0
            for flight, most in least:
                part = min(left, most / flight)
                left, held = left - part, held + flight * part
            return left <= 0 and held <= room

        saved, spent = float(table.saved[-1]), 0.0
        for each, count in there:
            if fits(saved):
                break
            gain, cost = count * each.gain, count * (each.more[0] + each.more[1])
            low, high = 0.0, 1.0  # the part of these that is recomputed
            for _ in range(20):
                middle = (low + high) / 2
                low, high = (low, middle) if fits(saved - middle * gain) else (middle, high)
            saved, spent = saved - high * gain, spent + low * cost
        return int(spent) if fits(saved * (1 - 1e-9)) else None

    def over(self, starts: Sequence[int]) -> int:
        """The bytes that a split is short of in all, each rank recomputing all or nothing."""
        runs, short = list(pairwise([*starts, self.stages.table.segments])), 0
        for rank, held in enumerate(self.ranks):
            key = rank, tuple(runs[stage] for stage in held)
            if key not in self._needs:
                problems = filter(None, (self.plain, self.every))
                self._needs[key] = min(self._held(problem, *key) for problem in problems)
            short += max(0, self._needs[key] - self.plain.room(rank))
        return short

    def _alone(self, stage: int, start: int, stop: int) -> bool:
        return any(problem.fits(stage, start, stop) for problem in (self.plain, self.every) if problem is not None)

    def _rank(self, rank: int, runs: tuple[Run, ...]) -> tuple[Way, ...] | None:
        key, room = (rank, runs), self.plain.room(rank)
        if key not in self._known:
            if self._held(self.plain, rank, runs) <= room:
                self._known[key] = (self.stages.plain,) * len(runs)
            elif self.every is not None and self._held(self.every, rank, runs) <= room:
                pairs = zip(self.ranks[rank], runs, strict=True)
                self._known[key] = tuple(self.stages.everything(stage, *run) for stage, run in pairs)
            else:
                self._known[key] = None
        return self._known[key]

    def _held(self, problem: SplitProblem, rank: int, runs: Sequence[Run]) -> int:
        pairs = list(zip(self.ranks[rank], runs, strict=True))
        return max(sum(problem.held(number, stage, *run) for stage, run in pairs) for number in self.numbers[rank])

    def _problem(self, *, again: bool) -> SplitProblem:
        """The split of the segments, each recomputed that keeps less by it or none."""
        stages, pipe = self.stages, self.pipe
        table, n = stages.table, stages.table.segments
        changed = {each.kind: each for each in stages.again} if again else {}
        times = [table.time(i, i + 1) for i in range(n)]
        saved = [table.saved[i + 1] - table.saved[i] for i in range(n)]
        transient = [numbers.recomputed_bytes for numbers in table.numbers]
        for i, kind in enumerate(table.kinds.of):
            if kind in changed:
                times[i] += changed[kind].more[0] + changed[kind].more[1]
                saved[i] -= changed[kind].gain
                transient[kind] = changed[kind].transient
        largest = Largest(table.kinds, transient)
        return SplitProblem(
            times=tuple(times),
            boundaries=pipe.transfer[0],  # ranks of several stages are of one width
            resident=[Row(stages.holding, largest, i, n) for i in range(n)],
            saved=tuple(saved),
            place=tuple(self.place),
            moments=tuple(self.moments),
            limit=self.limit,
            starts=pipe.starts,
            barred=frozenset(range(1, n)) - {*pipe.allowed},
            spare=self.spare,
        )


class Row(Sequence[int]):
    """What runs of segments from one on hold but for activations kept; only what is asked for is counted."""

    def __init__(self, holding: Holding, transient: Largest, start: int, segments: int) -> None:
        self.holding, self.transient, self.start, self.segments = holding, transient, start, segments

    def __len__(self) -> int:
        return self.segments - self.start

    @overload
    def __getitem__(self, more: int) -> int: ...
    @overload
    def __getitem__(self, more: slice) -> list[int]: ...

    def __getitem__(self, more: int | slice) -> int | list[int]:
        if isinstance(more, slice):
            return [self[each] for each in range(len(self))[more]]
        stop = self.start + more + 1
        return self.holding.resident(self.start, stop) + self.transient.value(self.start, stop)


def shortest(stages: Stages, pipe: Pipe, held: Held, known: float = inf) -> Found | None:
    """The split with the shortest step, if it is at most `known`; None if none can be. No bound is found of many."""
    more = held.more()
    if more is None or not held.reaches():
        return None
    least = pipe.microbatches * (stages.table.total + more) // len(held.ranks)
    if least > known:
        return Found(None, least)
    search = Dealt(stages, pipe, held, known)
    many = comb(len(pipe.allowed), pipe.stages - 1)
    if many <= SPLITS and many * pipe.actions <= EFFORT:
        search.every((0,), (0,) * len(held.ranks))
        if search.best is None:
            return Found(None, int(known) + 1) if known < inf else None
        return Found(search.best, search.best.step, search.second)
    search.approach()
    return Found(search.best, least, search.second)


class Dealt(Search):
    """The search in one setting."""

    def __init__(self, stages: Stages, pipe: Pipe, held: Held, known: float) -> None:
        super().__init__(stages, pipe, known)
        self.held, self.place = held, held.place
        # what a segment waits for at least, and what follows its last backward
        self.ahead = self.table.elapsed if pipe.whole else self.table.actions[0]

    def exchanged(self, times: Sequence[int]) -> int:
        """The time of the collectives of the rank that has most, from that of each stage."""
        return max(sum(times[stage] for stage in stages) for stages in self.held.ranks)

    def every(self, starts: tuple[int, ...], loads: tuple[int, ...]) -> None:
        """All splits that begin so, the ranks having so much to do of each microbatch."""
        stage, start = len(starts) - 1, starts[-1]
        rank = self.place[stage]
        for stop in self.ends(stage, start):
            load = loads[rank] + self.table.time(start, stop)
            first = starts[self.held.ranks[rank][0]]
            if self.pipe.microbatches * load + self.ahead[first] > self.limit():
                break
            if stage == self.pipe.stages - 1:
                found = self._run(starts)
                if found is not None:
                    self.consider(found)
            else:
                self.every((*starts, stop), (*loads[:rank], load, *loads[rank + 1 :]))

    def approach(self) -> None:
        """A good split: the best of some, improved by moving single cuts."""
        known, self.known = self.known, self.known * NEAR
        found = [each for each in map(self._run, self._first()) if each is not None]
        if found and min(found, key=lambda each: each.order).step <= self.known:
            for each in found:
                self.consider(each)
            assert self.best is not None
            self.improve(self.best.starts)
        self.known = known
        if self.best is not None and self.best.step > known:
            self.best = self.second = None

    def _first(self) -> Iterator[tuple[int, ...]]:
        """The split nearest to stages of equal times, or one near that fits; else those with a small busiest rank.

        The last take long to find, so it is not done where a plan is known.
        """
        nearest = self._nearest()
        if nearest is not None:
            nearest = self._fitting(nearest)
        if nearest is not None:
            yield nearest
            return
        for problem in filter(None, (self.held.plain, self.held.every) if self.known == inf else ()):
            found = ways(problem)
            yield from (split.starts for split in found)
            if found:
                return

    def _fitting(self, starts: tuple[int, ...]) -> tuple[int, ...] | None:
        """A split that fits, moving single cuts as long as less is short; None where that ends before."""
        over = self.held.over(starts)
        while over:
            near = [(self.held.over(other), other) for other in neighbours(starts, self.pipe.allowed)]
            least, found = min(near, default=(over, starts))
            if least >= over:
                return None
            over, starts = least, found
        return starts

    def _nearest(self) -> tuple[int, ...] | None:
        """The split whose cuts are nearest to those of stages that take equally long; None where pins leave none."""
        starts, total = [0], self.table.total
        *speeds, every = accumulate(map(self.stages.speed, range(self.pipe.stages)))
        for stage, speed in enumerate(speeds):
            ends = self.ends(stage, starts[-1])
            if not ends:
                return None
            even = total * speed
            starts.append(min(ends, key=lambda stop, at=even: abs(self.table.time(0, stop) * every - at)))  # type: ignore[misc]
        return tuple(starts) if self.ends(self.pipe.stages - 1, starts[-1]) else None

    def _run(self, starts: tuple[int, ...]) -> Cut | None:
        if not {*self.pipe.starts} <= {*starts}:
            return None
        chosen = self.held.ways(starts)
        return None if chosen is None else self.step(starts, chosen)
