"""Segments that cost the same, once: a model of many equal layers is a few kinds in a row.

A table has what every segment takes and keeps at one microbatch size, in whole numbers, as sums from the first segment
on: what a run of segments takes is a difference of two of them, however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from autopart.cluster import Cluster
from autopart.ir.cost import SegmentCost, SegmentNumbers
from autopart.solver.timing import halves_seconds, segment_seconds

FEMTOSECONDS = 10**15
"""Whole femtoseconds make sums of times exact, so that equal plans compare equal."""

Sums = tuple[int, ...]

Times = tuple[int, int, int, int]
"""Of a forward, a backward, and its halves: for the inputs, for the weights."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What segments cost, plain and recomputed (None: that keeps no less); `kinds` numbers those that are alike."""

    plain: tuple[SegmentCost, ...]
    again: tuple[SegmentCost | None, ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, plain: Sequence[SegmentCost], again: Sequence[SegmentCost | None]) -> Costs:
        """The costs of a model's segments, in order."""
        known: dict[object, int] = {}
        pairs = [(facts(p), None if a is None else facts(a)) for p, a in zip(plain, again, strict=True)]
        return cls(tuple(plain), tuple(again), tuple(known.setdefault(pair, len(known)) for pair in pairs))

    def firsts(self) -> list[int]:
        """The first segment of each kind."""
        return [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]


def facts(cost: SegmentCost) -> tuple[object, ...]:
    """All of a cost but its name."""
    return tuple(getattr(cost, field.name) for field in fields(cost) if field.name != "name")


@dataclass(frozen=True, slots=True)
class Again:
    """What recomputing a segment of a kind changes: more time, fewer bytes that a microbatch keeps, and a transient."""

    kind: int
    more: Times
    gain: int
    transient: int
    before: Sums  # how many such segments there are before each segment


@dataclass(frozen=True, slots=True)
class Table:
    """The segments at one microbatch size; a sum has an entry more than there are segments."""

    kinds: tuple[int, ...]
    numbers: tuple[SegmentNumbers, ...]  # of each kind
    longest: int  # the time of the longest segment
    forward: Sums
    backward: Sums
    inputs: Sums
    weights: Sums
    saved: Sums
    again: tuple[Again, ...]
    share: float  # the largest part of a segment's time that is its forward's

    @classmethod
    def of(cls, costs: Costs, batch: int, cluster: Cluster, *, halved: bool) -> Table:
        """The table of some segments for microbatches of `batch` samples; `halved`: backwards are in two."""
        firsts = costs.firsts()
        numbers = [handed(costs.plain[i].at(batch), halved) for i in firsts]
        times = [_times(n, cluster) for n in numbers]
        again = []
        for kind, i in enumerate(firsts):
            cost = costs.again[i]
            found = None if cost is None else handed(cost.at(batch), halved)
            if found is not None and found.saved_bytes < numbers[kind].saved_bytes:
                f, b, i_, w = (a - b for a, b in zip(_times(found, cluster), times[kind], strict=True))
                gain = numbers[kind].saved_bytes - found.saved_bytes
                before = tuple(accumulate((other == kind for other in costs.kinds), initial=0))
                again.append(Again(kind, (f, b, i_, w), gain, found.recomputed_bytes, before))

        def sums(values: Sequence[int]) -> Sums:
            return tuple(accumulate((values[kind] for kind in costs.kinds), initial=0))

        forward, backward, inputs, weights = (sums(values) for values in zip(*times, strict=True))
        return cls(
            kinds=costs.kinds,
            numbers=tuple(numbers),
            longest=max(f + b for f, b, _, _ in times),
            forward=forward,
            backward=backward,
            inputs=inputs,
            weights=weights,
            saved=sums([n.saved_bytes for n in numbers]),
            again=tuple(again),
            share=max((f / (f + b) for f, b, _, _ in times if f + b), default=1.0),
        )

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.kinds)

    @property
    def total(self) -> int:
        """The time of a microbatch through all segments, nothing recomputed."""
        return self.forward[-1] + self.backward[-1]

    def time(self, start: int, stop: int) -> int:
        """The time of a microbatch through segments `start` to `stop` - 1, nothing recomputed."""
        return self.forward[stop] - self.forward[start] + self.backward[stop] - self.backward[start]

    def values(self, of_kind: Sequence[int]) -> list[int]:
        """A value of every kind as one of every segment."""
        return [of_kind[kind] for kind in self.kinds]


def handed(numbers: SegmentNumbers, halved: bool) -> SegmentNumbers:
    """The numbers where a backward is in two: W is handed what it needs."""
    return replace(numbers, saved_bytes=max(numbers.saved_bytes, numbers.stash_bytes)) if halved else numbers


def _times(numbers: SegmentNumbers, cluster: Cluster) -> Times:
    (f, b), (i, w) = segment_seconds(numbers, cluster), halves_seconds(numbers, cluster)
    return round(f * FEMTOSECONDS), round(b * FEMTOSECONDS), round(i * FEMTOSECONDS), round(w * FEMTOSECONDS)
