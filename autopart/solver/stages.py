"""What a stage takes and whether it fits, for any run of segments, recomputing no more than its memory asks for.

With p stages in order on p ranks, stage k keeping f(k) microbatches, a run of segments is a stage if

    resident + f(k) * (saved - what recomputing saves) + transient <= limit

and of the ways to recompute some of its segments it is the one that takes least time more: all it needs to be known of
a stage is its own memory, since a faster stage makes no plan slower. Segments of a kind are exchangeable, so a way is a
number of each kind: the first ones of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopart.solver.holding import Holding
from autopart.solver.kinds import Again, Largest, Table

Counts = tuple[int, ...]
"""How many segments of each kind of `Table.again` are recomputed."""

PATIENCE = 2000
"""How many ways to recompute one stage are looked at."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a stage is run: what is recomputed, and the time that takes more."""

    counts: Counts
    more: int


class Stages:
    """The stages that one setting of the global choices allows; `tired` once a search in them was cut short."""

    def __init__(
        self, table: Table, holding: Holding, flights: Sequence[int], limit: int | None, *, recomputing: bool
    ) -> None:
        """`flights`: how many microbatches each stage keeps; `limit`: bytes per device, None for any."""
        self.table, self.holding, self.flights, self.limit = table, holding, flights, limit
        self.again = table.again if recomputing else ()
        self.spare: tuple[int, ...] = ()
        self.plain = Way((0,) * len(self.again), 0)
        self.transient = Largest(table.kinds, [n.recomputed_bytes for n in table.numbers])
        self.tired = False
        self._known: dict[tuple[int, int, int], Way | None] = {}

    def way(self, stage: int, start: int, stop: int) -> Way | None:
        """How segments `start` to `stop` - 1 are run as this stage; None if they do not fit."""
        if self.limit is None:
            return self.plain
        flight, table = self.flights[stage], self.table
        kept = flight * (table.saved[stop] - table.saved[start])
        over = self.holding.resident(start, stop) + kept + self.transient.value(start, stop) - self.limit
        if over <= 0:
            return self.plain
        if not self.again:
            return None
        key = flight, start, stop
        if key not in self._known:
            self._known[key] = self._cheapest(start, stop, flight, over)
        return self._known[key]

    def need(self, stage: int, start: int, stop: int) -> int:
        """The fewest bytes that these segments can be a stage with."""
        flight, table = self.flights[stage], self.table
        kept = flight * (table.saved[stop] - table.saved[start])
        least, plain = kept + self.transient.value(start, stop), self.transient.value(start, stop)
        for most in {again.transient for again in self.again}:
            gain = sum(
                flight * each.gain * (each.before[stop] - each.before[start])
                for each in self.again
                if each.transient <= most
            )
            least = min(least, kept - gain + max(plain, most))
        return self.holding.resident(start, stop) + least

    def held(self, stage: int, start: int, stop: int, way: Way) -> int:
        """The bytes of these segments as this stage, run in some way."""
        chosen = [(count, each) for count, each in zip(way.counts, self.again, strict=False) if count]
        kept = self.table.saved[stop] - self.table.saved[start] - sum(count * each.gain for count, each in chosen)
        transient = max([self.transient.value(start, stop), *(each.transient for _, each in chosen)])
        return self.holding.resident(start, stop) + self.flights[stage] * kept + transient

    def time(self, stage: int, start: int, stop: int) -> int | None:
        """The time of a microbatch through these segments as this stage; None if they do not fit."""
        way = self.way(stage, start, stop)
        return None if way is None else self.taken(stage, start, stop, way)

    def taken(self, stage: int, start: int, stop: int, way: Way) -> int:
        """The time of a microbatch through these segments as this stage, run in some way."""
        return self.table.time(start, stop) + way.more

    def actions(self, stage: int, start: int, stop: int, way: Way) -> tuple[int, ...]:
        """The time of a forward, a backward, and its halves, of these segments as this stage, run in some way."""
        return tuple(
            total[stop]
            - total[start]
            + sum(count * each.more[at] for count, each in zip(way.counts, self.again, strict=True))
            for at, total in enumerate(self.table.actions)
        )

    def seconds(self, starts: Sequence[int], ways: Sequence[Way]) -> dict[str, list[int]]:
        """The time of each kind of action at each stage of a split."""
        stops = [*starts[1:], self.table.segments]
        made: dict[str, list[int]] = {"F": [], "B": [], "I": [], "W": []}
        for stage, (start, stop, way) in enumerate(zip(starts, stops, ways, strict=True)):
            f, b, i, w = self.actions(stage, start, stop, way)
            for kind, time in zip("FBIW", (f, b, i, w) if stage else (f, b, 0, b), strict=True):
                made[kind].append(time)
        return made

    def speed(self, stage: int) -> int:
        """How fast a stage's device is, in thousandths of the fastest that there could be."""
        return 1000

    def recomputed(self, start: int, stop: int, way: Way) -> list[int]:
        """The segments that are recomputed in a stage."""
        found = []
        for count, each in zip(way.counts, self.again, strict=True):
            found += [i for i in range(start, stop) if self.table.kinds.of[i] == each.kind][:count]
        return sorted(found)

    def everything(self, stage: int, start: int, stop: int) -> Way:
        """All that keeps less by it recomputed."""
        counts = tuple(each.before[stop] - each.before[start] for each in self.again)
        more = sum(n * (each.more[0] + each.more[1]) for n, each in zip(counts, self.again, strict=True))
        return Way(counts, more)

    def _cheapest(self, start: int, stop: int, flight: int, over: int) -> Way | None:
        """The way that takes least time more, of those that recompute segments up to each size of transient."""
        plain, best = self.transient.value(start, stop), None
        for most in sorted({each.transient for each in self.again}):
            there = [(each.before[stop] - each.before[start]) * (each.transient <= most) for each in self.again]
            found = self._cover(there, [flight * each.gain for each in self.again], over + max(0, most - plain))
            if found is not None and (best is None or found.more < best.more):
                best = found
        return best

    def _cover(self, there: Sequence[int], gains: Sequence[int], over: int) -> Way | None:
        """The numbers of each kind that save at least `over` bytes in the least time more."""
        costs = [each.more[0] + each.more[1] for each in self.again]
        order = sorted((n for n, count in enumerate(there) if count), key=lambda n: (costs[n] / gains[n], n))
        if sum(there[n] * gains[n] for n in order) < over:
            return None
        cover = _Cover(order, there, gains, costs)
        cover.look(0, over, 0, ())
        self.tired |= cover.looked > PATIENCE
        counts = dict(zip(order, cover.best, strict=False))
        return Way(tuple(counts.get(n, 0) for n in range(len(there))), cover.least)


class Unlike(Stages):
    """The stages of a pipeline of unlike devices, each as its own device runs and holds it.

    `table` is that of a device that is nowhere slower. `limit` is that of the device with least memory; each stage's
    device has `spare` bytes more.
    """

    def __init__(self, table: Table, stages: Sequence[Stages], spare: Sequence[int], limit: int | None) -> None:
        """`stages`: for each stage those of its device, within the limit that it has there."""
        self.table, self.holding, self.each, self.spare = table, stages[0].holding, tuple(stages), tuple(spare)
        self.limit, self.again, self.plain = limit, _fastest([each.again for each in stages]), stages[0].plain
        self.tired = False

    def way(self, stage: int, start: int, stop: int) -> Way | None:
        """How segments `start` to `stop` - 1 are run as this stage; None if they do not fit."""
        found = self.each[stage].way(stage, start, stop)
        self.tired |= self.each[stage].tired
        return found

    def need(self, stage: int, start: int, stop: int) -> int:
        """The smallest limit that these segments can be a stage with."""
        return self.each[stage].need(stage, start, stop) - self.spare[stage]

    def held(self, stage: int, start: int, stop: int, way: Way) -> int:
        """The bytes of these segments as this stage, run in some way."""
        return self.each[stage].held(stage, start, stop, way)

    def taken(self, stage: int, start: int, stop: int, way: Way) -> int:
        """The time of a microbatch through these segments as this stage, run in some way."""
        return self.each[stage].taken(stage, start, stop, way)

    def actions(self, stage: int, start: int, stop: int, way: Way) -> tuple[int, ...]:
        """The time of a forward, a backward, and its halves, of these segments as this stage, run in some way."""
        return self.each[stage].actions(stage, start, stop, way)

    def everything(self, stage: int, start: int, stop: int) -> Way:
        """All that keeps less by it recomputed."""
        return self.each[stage].everything(stage, start, stop)

    def speed(self, stage: int) -> int:
        """How fast a stage's device is, in thousandths of the fastest that there could be."""
        own = self.each[stage].table.total
        return max(1, 1000 * self.table.total // own) if own else 1000


def _fastest(every: Sequence[tuple[Again, ...]]) -> tuple[Again, ...]:
    """What may be recomputed, in the least time that it takes on any device; if of other kinds there, the first's."""
    if any([again.kind for again in each] != [again.kind for again in every[0]] for each in every):
        return every[0]
    found = []
    for column in zip(*every, strict=True):
        f, b, i, w = map(min, zip(*(again.more for again in column), strict=True))
        found.append(replace(column[0], more=(f, b, i, w)))
    return tuple(found)


class _Cover:
    """Branch and bound over how many of each kind, the one that saves most for its time first."""

    def __init__(self, order: Sequence[int], there: Sequence[int], gains: Sequence[int], costs: Sequence[int]) -> None:
        self.order, self.there, self.gains, self.costs = order, there, gains, costs
        self.least, self.looked = 1 << 200, 0  # more than any time
        self.best: Counts = ()

    def look(self, at: int, over: int, spent: int, counts: Counts) -> None:
        """The ways that begin with some counts."""
        if over <= 0:
            if spent < self.least:
                self.least, self.best = spent, counts
            return
        self.looked += 1
        if at == len(self.order) or self.looked > PATIENCE:
            return
        kind = self.order[at]
        gain, cost = self.gains[kind], self.costs[kind]
        if spent + over * cost // gain >= self.least:  # later kinds save less for their time
            return
        enough = -(-over // gain)
        for count in range(min(enough, self.there[kind]), -1, -1):
            self.look(at + 1, over - count * gain, spent + count * cost, (*counts, count))
