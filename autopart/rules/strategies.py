"""Strategies: every legal way to run one operator call on the places of a mesh axis, derived from its factor rule.

    whole     every operand Replicate                    every result Replicate
    a cut     a loop is split: Shard in every operand    Shard where a result has it, Partial where it is summed over
              that has it, Partial where it is added
    a sum     a linear set is Partial                    every result Partial

Operators that need all of a loop at once may have it split all the same if `spread` knows how.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autopart.ir.graph import Arg, Node, Value
from autopart.ir.placed import Cut, Strategy
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.rules.factor import Call, Dims, Rule, bind
from autopart.rules.ring import deal
from autopart.rules.split import cut_of, legal, shard_of
from autopart.rules.spread import spread
from autopart.rules.table import rule_of
from autopart.rules.writer import Spread


@dataclass(frozen=True, slots=True)
class Ruled:
    """A node with its call, its rule, and how its blocked loops may be split after all; no rule: it runs whole.

    `by_rows` are its ways to run on rows that each place has sorted by itself (`rules.dispatch`).
    """

    node: Node
    call: Call
    rule: Rule | None
    spread: Spread | None
    by_rows: tuple[Strategy, ...] = ()

    @classmethod
    def of(cls, node: Node, values: Mapping[str, Value], by_rows: tuple[Strategy, ...] = ()) -> Ruled:
        """The node, with `values` giving the tensors that it reads."""
        call = bind(node, values)
        rule = rule_of(node, call)
        return cls(node, call, rule, None if rule is None else spread(call, rule), by_rows)

    def cuts(self, degree: int, turns: Collection[int] = ()) -> frozenset[Cut]:
        """The loops that can be split as they are, without looking at how a neighbour splits them.

        Those as long as one of `turns` may be dealt out in turn, too.
        """
        factors = () if self.rule is None else self.rule.factors
        found = [Cut(number) for number in range(len(factors))]
        dealt = [deal(number, each.size, degree) for number, each in enumerate(factors) if each.size in turns]
        return frozenset(cut for cut in (*found, *dealt) if cut is not None and self.allows(cut, degree))

    def allows(self, cut: Cut, degree: int) -> bool:
        """Whether a loop of this node can be split so."""
        assert self.rule is not None  # cuts are of its factors
        if not legal(self.rule.factors, cut, degree):
            return False
        if not self.rule.factors[cut.factor].blocked:
            return True
        spread = self.spread
        if spread is None or not spread.allows(cut, degree):
            return False
        return all(legal(self.rule.factors, other, degree) for other in spread.together(cut))

    def cut_for(self, name: str, shard: Shard, degree: int) -> Iterator[Cut]:
        """The cuts under which an operand or a result of this name is split so."""
        if self.rule is None:
            return
        dims = [d for (_, d), o in zip(self.operands(), self.call.operands, strict=True) if o.value.name == name]
        dims += [d for d, out in zip(self.rule.results, self.node.outs, strict=False) if out and out.name == name and d]
        for found in dims:
            cut = cut_of(found, self.rule.factors, shard, degree)
            if cut is not None:
                yield from (each for each in self._with(cut) if self.allows(each, degree))

    def _with(self, cut: Cut) -> tuple[Cut, ...]:
        """The cut of a loop, and that of a loop which it may be split beside."""
        if self.spread is None or cut.factor not in self.spread.beside:
            return (cut,)
        return cut, Cut(self.spread.factor, cut.outer, cut.unit)

    def places(self, strategy: Strategy) -> Iterator[tuple[str, TensorPlacement]]:
        """What is placed by a strategy: the names of operands and results, and how these are."""
        for operand, (_, how) in zip(self.call.operands, strategy.needs, strict=True):
            if how is not None:
                yield operand.value.name, how
        for out, given in zip(self.node.outs, strategy.gives, strict=True):
            if out is not None and given is not None:
                yield out.name, given

    def operands(self) -> list[tuple[str, Dims]]:
        """The loops of every tensor operand, by slot."""
        assert self.rule is not None  # loops are its factors
        dims = dict(self.rule.operands)
        return [(operand.slot, dims[operand.slot]) for operand in self.call.operands]


def strategies(ruled: Ruled, cuts: Iterable[Cut], degree: int, *, rows: bool = True) -> tuple[Strategy, ...]:
    """Every legal strategy of a node on an axis of `degree` places: whole, `cuts`, linear sets, by `rows`."""
    if ruled.rule is None:
        return (_whole(ruled),)
    found = [made for cut in cuts if (made := split(ruled, cut, degree)) is not None]
    sums = [_pending(ruled, together) for together in ruled.rule.linear if _summable(ruled, together)]
    sums = [made for made in sums if not _adds_flags(ruled, made)]
    return tuple(dict.fromkeys((_whole(ruled), *found, *sums, *(ruled.by_rows if rows else ()))))


def allowed(ruled: Ruled, strategy: Strategy, degree: int) -> bool:
    """Whether a strategy is one of a node's."""
    cut = strategy.cut
    if strategy in ruled.by_rows:
        return True
    if cut is None or ruled.rule is None:
        return strategy in strategies(ruled, (), degree)
    return (
        cut.factor in range(len(ruled.rule.factors))
        and ruled.allows(cut, degree)
        and strategy in strategies(ruled, (cut,), degree)
    )


def matching(ruled: Ruled, strategy: Strategy, degree: int) -> Strategy | None:
    """The strategy that places what a node reads and makes as this one of the same node with other numbers does."""
    reads = zip((o.value.name for o in ruled.call.operands), (how for _, how in strategy.needs), strict=True)
    makes = zip((out.name if out is not None else "" for out in ruled.node.outs), strategy.gives, strict=True)
    split = [(name, how) for name, how in (*reads, *makes) if isinstance(how, Shard)]
    cuts = dict.fromkeys(cut for name, how in split for cut in ruled.cut_for(name, how, degree))
    wanted = strategy.needs, strategy.gives, strategy.spread
    return next((s for s in strategies(ruled, cuts, degree) if (s.needs, s.gives, s.spread) == wanted), None)


def equal(one: Node, values: Mapping[str, Value], other: Node, others: Mapping[str, Value]) -> bool:
    """Whether two nodes that differ in numbers at most are equal in these, too, and in the shapes of their values."""
    pairs = [(values[name], others[name]) for name in one.refs()]
    pairs += [(a, b) for a, b in zip(one.outs, other.outs, strict=True) if a is not None and b is not None]
    return one.form == other.form and all(a.shape == b.shape for a, b in pairs)


def _adds_flags(ruled: Ruled, strategy: Strategy) -> bool:
    """Whether truth values are to be parts of a sum."""
    values = [operand.value for operand in ruled.call.operands]
    places = [*zip(values, (how for _, how in strategy.needs), strict=True)]
    places += [(out, how) for out, how in zip(ruled.node.outs, strategy.gives, strict=True) if out is not None]
    return any(how == Partial() and value.dtype == torch.bool for value, how in places)


def _whole(ruled: Ruled) -> Strategy:
    return Strategy(
        tuple((o.slot, None if _ignored(ruled, o.slot) else Replicate()) for o in ruled.call.operands),
        tuple(None if out is None else Replicate() for out in ruled.node.outs),
    )


def _ignored(ruled: Ruled, slot: str) -> bool:
    """Whether an operand is read neither for its content nor for its shape: no result has one of its loops."""
    rule = ruled.rule
    if rule is None or slot not in rule.shape_only:
        return False
    loops = {factor for dim in dict(rule.operands)[slot] for factor in dim}
    return not any(factor in loops for dims in rule.results for dim in dims or () for factor in dim)


def split(ruled: Ruled, cut: Cut, degree: int) -> Strategy | None:
    """The strategy that splits a loop; None where a result does not come together from its pieces by adding numbers."""
    rule = ruled.rule
    assert rule is not None
    added = rule.additive(cut.factor)
    if not _only_zeros(ruled.call, added):
        return None
    needs: list[tuple[str, TensorPlacement | None]] = []
    for slot, dims in ruled.operands():
        shard = _split_of(ruled, dims, cut, degree)
        other: TensorPlacement | None = None if _ignored(ruled, slot) else Replicate()
        needs.append((slot, shard or (Partial() if slot in added else other)))
    gives = tuple(
        None if out is None else _result(ruled, number, cut, degree) for number, out in enumerate(ruled.node.outs)
    )
    if any(how is None and out is not None for how, out in zip(gives, ruled.node.outs, strict=True)):
        return None
    made = Strategy(tuple(needs), gives, cut, rule.factors[cut.factor].blocked)
    return None if _adds_flags(ruled, made) else made


def _split_of(ruled: Ruled, dims: Dims, cut: Cut, degree: int) -> Shard | None:
    """How a tensor with these loops is split by a cut, and by those of loops that are split beside that."""
    assert ruled.rule is not None  # cuts are of its factors
    factors, spread = ruled.rule.factors, ruled.spread
    cuts = spread.together(cut) if spread is not None and spread.factor == cut.factor else (cut,)
    return next((how for each in cuts if (how := shard_of(dims, factors, each, degree)) is not None), None)


def _result(ruled: Ruled, number: int, cut: Cut, degree: int) -> TensorPlacement | None:
    rule = ruled.rule
    assert rule is not None
    shard = _split_of(ruled, rule.results[number] or (), cut, degree)
    if shard is not None:
        return shard
    known = ruled.spread is not None and cut.factor == ruled.spread.factor and number in ruled.spread.whole
    if known or not rule.contracts(number, cut.factor):
        return Replicate()
    return Partial() if rule.factors[cut.factor].reduction == "sum" else None  # a maximum does not add up


def _summable(ruled: Ruled, together: frozenset[str]) -> bool:
    return _only_zeros(ruled.call, together) and any(ruled.call.has(slot) for slot in together)


def _only_zeros(call: Call, slots: frozenset[str]) -> bool:
    """Whether the numbers among these slots are 0: any other would be added once a place."""
    return all(_is_zero(call.args.get(slot)) for slot in slots if not call.has(slot))


def _is_zero(arg: Arg) -> bool:
    return isinstance(arg, int | float | complex) and arg == 0


def _pending(ruled: Ruled, together: frozenset[str]) -> Strategy:
    def need(slot: str) -> TensorPlacement | None:
        return Partial() if slot in together else None if _ignored(ruled, slot) else Replicate()

    return Strategy(
        tuple((o.slot, need(o.slot)) for o in ruled.call.operands),
        tuple(None if out is None else Partial() for out in ruled.node.outs),
    )
