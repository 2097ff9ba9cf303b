"""Experts on a mesh axis: rows that each place sorts by itself, and rows at the places that have their groups.

    keys, order = sort(expert of each row)            each place those of its own samples           Own(0)
    rows = x[order // k]                              its own rows, group after group               Own(0)
    y = grouped_mm(rows, w, ends)                     every place's rows of this place's groups     Dispatched(0)
    out = y[inverse of order]                         its own rows, brought back; its own samples   Own(0), Shard(0)

A place's samples are a microbatch of a kind. So what `dependence` says of a node for the batch is how it runs where the
samples are split: by samples (Shard) until they are sorted, then in an order of each place's own (Own). Of rows in such
an order nothing is made but by row and by group: they may as well be computed where the matrix of their group is
(Dispatched), which takes an all-to-all of as many rows as there happen to be, and one back. No row is dropped (Gale et
al., MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Node, Size, Value
from autopart.ir.placed import Cut, Strategy
from autopart.ir.placement import Dispatched, Own, Partial, Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, defined
from autopart.rules.dependence import NeededWhole, batch_dims, depend
from autopart.rules.fact import Fact, Of, Order
from autopart.rules.factor import Dims
from autopart.rules.rows import SORTS
from autopart.rules.split import as_shard, cut_of, fits, legal, shard_of
from autopart.rules.strategies import Ruled

Ways = tuple[tuple[Strategy, ...], ...]
"""Of each node of a function, in order, its ways to run on such rows."""


def ways_by_rows(body: Body, degree: int) -> tuple[Ways, Ways]:
    """The ways of the nodes of forward and backward on `degree` places that have equally many samples each."""
    forward, backward = body.forward, body.backward or Function((), (), ())
    if not any(node.aten in SORTS for node in forward.nodes):
        return ((),) * len(forward.nodes), ((),) * len(backward.nodes)
    first = _Rows(forward, _given(forward), {}, degree)
    known = _given(backward)
    for name in body.saved:
        known.pop(name, None)
    known |= {name: first.known[name] for name in body.saved if name in first.known}
    ends = {order: name for order, name in first.ends.items() if name in known}
    return first.ways, _Rows(backward, known, ends, degree).ways


def _given(function: Function) -> dict[str, Fact]:
    """What is known of values from outside, each split by its samples if it has any."""
    known = {}
    for value in function.inputs:
        dims = batch_dims(value)
        size = value.shape[dims[0]] if dims else 0
        if not dims:
            known[value.name] = Fact(Replicate(), free=False)
        elif len(dims) == 1 and isinstance(size, Size) and size.constant == 0:
            known[value.name] = Fact(Shard(dims[0]), free=False)
    return known


class _Rows:
    """One function, node after node: what is `known` of its values by samples, and the ways that follow.

    `ends` is, by the order of rows, the value that says where their groups end.
    """

    def __init__(self, function: Function, known: dict[str, Fact], ends: Mapping[Order, str], degree: int) -> None:
        self.values, self.known, self.ends, self.degree = defined(function), known, dict(ends), degree
        self.ways = tuple([tuple(self._node(node)) for node in function.nodes])

    def _node(self, node: Node) -> Iterator[Strategy]:
        if any(name not in self.known for name in node.refs()):
            return
        try:
            found = depend(node, self.values, self.known)
        except (CaptureError, NeededWhole):
            return
        if found.shares:
            return
        self.known |= found.facts
        ruled = Ruled.of(node, self.values)
        if (own := self._own(ruled)) is not None:
            yield own
            if (sent := self._dispatched(ruled, own)) is not None:
                yield sent

    def _own(self, ruled: Ruled) -> Strategy | None:
        """On each place's own samples, where something is in an order of the place's own."""
        needs = tuple((operand.slot, self._place(operand.value)) for operand in ruled.call.operands)
        gives = tuple(None if out is None else self._place(out) for out in ruled.node.outs)
        own = Strategy(needs, gives, self._cut(ruled, needs, gives))
        places = [*ruled.places(own)]
        even = all(self._evenly(name, how) for name, how in places)
        return own if even and any(isinstance(how, Own) for _, how in places) else None

    def _place(self, value: Value) -> TensorPlacement:
        fact = self.known[value.name]
        if fact.groups is not None and fact.groups.of is not Of.KEYS:
            return Own()
        if isinstance(fact.place, Shard) and (fact.order is not None or fact.picks is not None):
            return Own(fact.place.dim)
        return fact.place

    def _evenly(self, name: str, how: TensorPlacement) -> bool:
        """Whether a value's samples are split as its placement says."""
        place = self.known[name].place
        shard = as_shard(how)
        return not isinstance(place, Shard) or (shard == place and fits(self.values[name], place, self.degree))

    def _cut(
        self, ruled: Ruled, needs: tuple[tuple[str, TensorPlacement], ...], gives: tuple[TensorPlacement | None, ...]
    ) -> Cut | None:
        """The loop over the samples or rows."""
        rule = ruled.rule
        assert rule is not None  # a node without one depends on nothing that is known
        dims: list[tuple[Dims | None, TensorPlacement | None]] = [*zip(rule.results, gives, strict=True)]
        dims += [(dict(rule.operands)[slot], how) for slot, how in needs]
        pairs = [(loops, shard) for loops, how in dims if loops is not None and (shard := as_shard(how)) is not None]
        cuts = (cut_of(loops, rule.factors, shard, self.degree) for loops, shard in pairs)
        return next((cut for cut in cuts if cut is not None), None)

    def _dispatched(self, ruled: Ruled, own: Strategy) -> Strategy | None:
        """On the rows of a place's groups: all that has rows has them in one order, and nothing says how many."""
        rule, call = ruled.rule, ruled.call
        assert rule is not None  # it has a way already
        slots = [slot for _, slot in rule.ends if dict(own.needs)[slot] == Own()]
        names = {operand.value.name for operand in call.operands if operand.slot in slots}
        by = self._by({*ruled.places(own)}, names)
        groups = {factor for slot in slots for dim in dict(rule.operands)[slot] for factor in dim}
        cut = Cut(*groups) if len(groups) == 1 else None
        if by is None or any(map(_has_size, call.args.values())) or len(groups) > 1:
            return None
        if cut is not None and not legal(rule.factors, cut, self.degree):
            return None

        def moved(how: TensorPlacement, dims: Dims) -> TensorPlacement:
            if isinstance(how, Own):
                return Dispatched(by, how.dim)
            shard = None if cut is None else shard_of(dims, rule.factors, cut, self.degree)
            return how if shard is None else shard

        needs = tuple((slot, moved(how, dict(rule.operands)[slot])) for slot, how in own.needs if how is not None)
        gives = tuple(
            None if how is None else moved(how, dims or ()) for how, dims in zip(own.gives, rule.results, strict=True)
        )
        return replace(own, needs=needs, gives=gives)

    def _by(self, places: set[tuple[str, TensorPlacement]], ends: set[str]) -> str | None:
        """The ends of the groups of a node's rows, `ends` if it reads any; None where rows are not in one order."""
        rows = {name for name, how in places if isinstance(how, Own) and how.dim is not None}
        other = {how for name, how in places if name not in rows | ends}
        orders = {None if self.known[name].picks is not None else self.known[name].order for name in rows}
        order = orders.pop() if len(orders) == 1 else None
        if order is None or not all(how in (Replicate(), Partial()) for how in other):
            return None
        for name in ends:
            self.ends.setdefault(order, name)
        by = self.ends.get(order)
        return by if ends <= {by} else None


def _has_size(arg: Arg) -> bool:
    """Whether an argument moves with the batch."""
    return any(map(_has_size, arg)) if isinstance(arg, tuple | list) else isinstance(arg, Size)
