"""Which cuts of nodes and splits of values come into question: each cut splits values, each split cuts their nodes.

All of them are what follows from every loop that may be split. What follows from one loop alone is a body run along it:
its samples, say, or its hidden units. A view hands its neighbours' splits on, so both are fixed points.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.graph import Size
from autopart.ir.placed import Cut, Strategy
from autopart.ir.placement import Shard
from autopart.rules.factor import is_batch
from autopart.rules.split import takes_samples
from autopart.rules.strategies import Ruled, split
from autopart.solver.axis import Axis


@dataclass(frozen=True, slots=True)
class Splits:
    """The cuts of every node, in order, and the splits of values, by key; `rows`: and that each place sorts its own."""

    cuts: Sequence[set[Cut]]
    shards: Mapping[str, set[Shard]]
    rows: bool = False


class Candidates:
    """The nodes of a body on an axis; values of one `key` must be able to be placed alike.

    `pinned` are splits that parameters must keep, by key: in question whether or not a node can have it so, since in
    another program one can.
    """

    def __init__(
        self, ruled: Sequence[Ruled], axis: Axis, key: Callable[[str], str], pinned: Mapping[str, Shard]
    ) -> None:
        self.ruled, self.axis, self.key, self.pinned = ruled, axis, key, pinned
        self.users: dict[str, list[int]] = {}
        for i, each in enumerate(ruled):
            for name in _names(each):
                users = self.users.setdefault(key(name), [])
                if not users or users[-1] != i:
                    users.append(i)

    def every(self, turns: Collection[int]) -> Splits:
        """What follows from all loops; those as long as one of `turns` may be dealt out in turn, too."""
        begun = ((i, cut) for i, ruled in enumerate(self.ruled) for cut in ruled.cuts(self.axis.degree, turns))
        return self._following(begun, rows=True)

    def loops(self) -> tuple[Splits, ...]:
        """What follows from each loop alone; none is in two of them."""
        found: list[Splits] = []
        for i, ruled in enumerate(self.ruled):
            for cut in sorted(ruled.cuts(self.axis.degree), key=str):
                if self._in_question(ruled, cut) and not any(cut in each.cuts[i] for each in found):
                    assert ruled.rule is not None  # cuts are of its factors
                    rows = is_batch(ruled.rule.factors[cut.factor].size)
                    found.append(self._following([(i, cut)], rows=rows))
        return tuple(found)

    def _following(self, begun: Iterable[tuple[int, Cut]], *, rows: bool) -> Splits:
        cuts: list[set[Cut]] = [set() for _ in self.ruled]
        shards: dict[str, set[Shard]] = {}
        waiting = list(begun)
        found = [*self.pinned.items()]
        if rows:
            found += [(self.key(n), how) for r in self.ruled for way in r.by_rows for n, how in _shards(r, way)]
        for key, shard in found:
            shards.setdefault(key, set()).add(shard)
            waiting += self._cut_by(key, shard)
        while waiting:
            i, cut = waiting.pop()
            if cut in cuts[i] or not self._in_question(self.ruled[i], cut):
                continue
            cuts[i].add(cut)
            for name, shard in self._split_by(self.ruled[i], cut):
                key = self.key(name)
                if shard not in shards.setdefault(key, set()):
                    shards[key].add(shard)
                    waiting += self._cut_by(key, shard)
        return Splits(cuts, shards, rows)

    def _in_question(self, ruled: Ruled, cut: Cut) -> bool:
        assert ruled.rule is not None  # cuts are of its factors
        if self.axis.by_samples:
            return self.axis.divides and isinstance(ruled.rule.factors[cut.factor].size, Size)
        return self.axis.divides or not takes_samples(ruled.rule.factors, cut, self.axis.degree)

    def _cut_by(self, key: str, shard: Shard) -> Iterator[tuple[int, Cut]]:
        """The nodes that read or make values of a key, with their cuts where these are split so."""
        for i in self.users.get(key, ()):
            for name in _names(self.ruled[i]):
                if self.key(name) == key:
                    yield from ((i, cut) for cut in self.ruled[i].cut_for(name, shard, self.axis.degree))

    def _split_by(self, ruled: Ruled, cut: Cut) -> Iterator[tuple[str, Shard]]:
        """The values that a cut of a node splits."""
        made = split(ruled, cut, self.axis.degree)
        yield from () if made is None else _shards(ruled, made)


def _shards(ruled: Ruled, strategy: Strategy) -> Iterator[tuple[str, Shard]]:
    return ((name, how) for name, how in ruled.places(strategy) if isinstance(how, Shard))


def _names(ruled: Ruled) -> tuple[str, ...]:
    """What a node reads and makes, each once."""
    return tuple(dict.fromkeys((*(operand.value.name for operand in ruled.call.operands), *ruled.node.names())))
