"""Segments that cost the same, once: a model of many equal layers is a few kinds in a row.

A table has what every segment takes and keeps at one microbatch size, in whole numbers, as sums from the first segment
on: what a run of segments takes is a difference of two of them, however long it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter, mul

from autopart.cluster import Cluster
from autopart.ir.cost import SegmentCost, SegmentNumbers
from autopart.solver.timing import halves_seconds, segment_seconds

FEMTOSECONDS = 10**15
"""Whole femtoseconds make sums of times exact, so that equal plans compare equal."""

Sums = tuple[int, ...]
"""Of some value of every segment, the sums from the first segment on: an entry more than there are segments."""

Times = tuple[int, int, int, int]
"""Of a forward, a backward, and its halves: for the inputs, for the weights."""


Places = tuple[tuple[int, Cluster], ...]
"""Places beside each other: the samples of the largest microbatch of each, and the cluster of its devices."""


class Kinds:
    """Of which kind every segment is: numbers in the order of the kinds' first segments.

    What is asked of all segments is counted kind by kind; sums along the segments are made where they are asked for.
    """

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)
        counts = Counter(self.of)
        self.counts = tuple(counts[kind] for kind in range(len(counts)))
        self._before: dict[int, Sums] = {}

    @classmethod
    def telling(cls, segments: Iterable[object]) -> Kinds:
        """The kinds of segments that are alike where what is given of them is equal."""
        known: dict[object, int] = {}
        return cls([known.setdefault(each, len(known)) for each in segments])

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first segment of each kind."""
        return tuple(map(self.of.index, range(len(self.counts))))

    def total(self, values: Iterable[int]) -> int:
        """A value of every kind, summed over all segments."""
        return sum(map(mul, self.counts, values))

    def sums(self, values: Sequence[int]) -> Sums:
        """A value of every kind, summed from the first segment on."""
        return tuple(accumulate(map(values.__getitem__, self.of), initial=0))

    def before(self, kind: int) -> Sums:
        """How many segments of a kind there are before each segment."""
        if kind not in self._before:
            self._before[kind] = tuple(accumulate((each == kind for each in self.of), initial=0))
        return self._before[kind]


class Largest:
    """The largest values of any run of segments, given one of every kind: those of the run's kinds, the largest first.

    Values of 0 are those of segments that have none.
    """

    def __init__(self, kinds: Kinds, values: Sequence[int]) -> None:
        order = sorted((kind for kind, value in enumerate(values) if value), key=lambda kind: -values[kind])
        self.falling = [(values[kind], kinds.before(kind)) for kind in order]

    def value(self, start: int, stop: int) -> int:
        """The largest value from `start` to `stop` - 1, 0 for none."""
        for value, before in self.falling:
            if before[stop] > before[start]:
                return value
        return 0

    def two(self, start: int, stop: int) -> int:
        """The sum of the two largest values from `start` to `stop` - 1."""
        found, missing = 0, 2
        for value, before in self.falling:
            count = min(missing, before[stop] - before[start])
            found, missing = found + count * value, missing - count
            if not missing:
                break
        return found


@dataclass(frozen=True, slots=True)
class Costs:
    """What segments cost, plain and recomputed (None: that keeps no less)."""

    plain: tuple[SegmentCost, ...]
    again: tuple[SegmentCost | None, ...]
    kinds: Kinds

    @classmethod
    def of(cls, plain: Sequence[SegmentCost], again: Sequence[SegmentCost | None]) -> Costs:
        """The costs of a model's segments, in order."""
        return cls(tuple(plain), tuple(again), Kinds.telling(zip(numbered(plain), numbered(again), strict=True)))


_facts = attrgetter(*(field.name for field in fields(SegmentCost) if field.name != "name"))
"""All of a cost but its name."""


def numbered(costs: Sequence[SegmentCost | None]) -> list[int]:
    """A number for every cost, the same for those that are equal but for their names.

    Equal layers mostly share the very expressions that they cost; only others are compared.
    """
    shared: dict[tuple[int, ...], int] = {}
    known: dict[object, int] = {}
    found = []
    for cost in costs:
        facts = () if cost is None else _facts(cost)
        key = tuple(map(id, facts))
        if key not in shared:
            shared[key] = known.setdefault(facts, len(known))
        found.append(shared[key])
    return found


@dataclass(frozen=True, slots=True)
class Again:
    """What recomputing a segment of a kind changes: more time, fewer bytes that a microbatch keeps, and a transient."""

    kind: int
    more: Times
    gain: int
    transient: int
    before: Sums  # how many such segments there are before each segment


@dataclass(frozen=True)
class Table:
    """The segments at one microbatch size; `numbers` and `times` have an entry a kind."""

    kinds: Kinds
    numbers: tuple[SegmentNumbers, ...]
    times: tuple[Times, ...]
    again: tuple[Again, ...]

    @classmethod
    def of(cls, costs: Costs, places: Places, *, halved: bool) -> Table:
        """The table of some segments for the microbatches of some places; `halved`: backwards are in two.

        A segment takes as long as at the place where that is longest, and holds what the largest microbatch does.
        """
        batch = max(samples for samples, _ in places)
        numbers = [handed(costs.plain[i].at(batch), halved) for i in costs.kinds.firsts]
        times = [_longest(costs.plain[i], places) for i in costs.kinds.firsts]
        again = []
        for kind, i in enumerate(costs.kinds.firsts):
            cost = costs.again[i]
            if cost is None:
                continue
            found = handed(cost.at(batch), halved)
            if found.saved_bytes < numbers[kind].saved_bytes:
                f, b, i_, w = (a - b for a, b in zip(_longest(cost, places), times[kind], strict=True))
                gain = numbers[kind].saved_bytes - found.saved_bytes
                again.append(Again(kind, (f, b, i_, w), gain, found.recomputed_bytes, costs.kinds.before(kind)))
        return cls(costs.kinds, tuple(numbers), tuple(times), tuple(again))

    @classmethod
    def least(cls, tables: Sequence[Table]) -> Table:
        """The times that are least in any of some tables of the same segments, by kind; else the first of them."""
        times: list[Times] = []
        for row in zip(*(each.times for each in tables), strict=True):
            f, b, i, w = map(min, zip(*row, strict=True))
            times.append((f, b, i, w))
        return replace(tables[0], times=tuple(times))

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.kinds.of)

    @cached_property
    def total(self) -> int:
        """The time of a microbatch through all segments, nothing recomputed."""
        return self.kinds.total(f + b for f, b, _, _ in self.times)

    @cached_property
    def longest(self) -> int:
        """The time of the longest segment."""
        return max(f + b for f, b, _, _ in self.times)

    @cached_property
    def share(self) -> float:
        """The largest part of a segment's time that is its forward's."""
        return max((f / (f + b) for f, b, _, _ in self.times if f + b), default=1.0)

    @cached_property
    def elapsed(self) -> Sums:
        """Forwards and backwards."""
        return self.kinds.sums([f + b for f, b, _, _ in self.times])

    @cached_property
    def actions(self) -> tuple[Sums, Sums, Sums, Sums]:
        """Forwards, backwards, and both halves of these, apart."""
        f, b, i, w = map(self.kinds.sums, zip(*self.times, strict=True))
        return f, b, i, w

    @cached_property
    def saved(self) -> Sums:
        """What a microbatch keeps."""
        return self.kinds.sums([n.saved_bytes for n in self.numbers])

    def time(self, start: int, stop: int) -> int:
        """The time of a microbatch through segments `start` to `stop` - 1, nothing recomputed."""
        return self.elapsed[stop] - self.elapsed[start]

    def values(self, of_kind: Sequence[int]) -> list[int]:
        """A value of every kind as one of every segment."""
        return [of_kind[kind] for kind in self.kinds.of]


def handed(numbers: SegmentNumbers, halved: bool) -> SegmentNumbers:
    """The numbers where a backward is in two: W is handed what it needs."""
    return replace(numbers, saved_bytes=max(numbers.saved_bytes, numbers.stash_bytes)) if halved else numbers


def _longest(cost: SegmentCost, places: Places) -> Times:
    """The times of a segment at the place where each is longest."""
    f, b, i, w = map(max, zip(*(_times(cost.at(samples), cluster) for samples, cluster in places), strict=True))
    return f, b, i, w


def _times(numbers: SegmentNumbers, cluster: Cluster) -> Times:
    (f, b), (i, w) = segment_seconds(numbers, cluster), halves_seconds(numbers, cluster)
    return round(f * FEMTOSECONDS), round(b * FEMTOSECONDS), round(i * FEMTOSECONDS), round(w * FEMTOSECONDS)
