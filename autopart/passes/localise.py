"""localise: PlacedBody + place -> Body. What one place of an axis runs: local shapes, and collectives as nodes.

before: y = x @ w    x: Replicate, w: Shard(1), y read whole    after: y = x @ w                     w: [k, n/2]
                                                                       y_all = all_gather(y, "tp", 1, 1, (n/2, n/2))

Each node runs under its strategy: on local operands, with the sizes among its arguments cut down; a draw of random
numbers is told which part of the whole it makes. A value that is read in another placement than it is given in is moved
once, before its first reader; later readers share it. What every place can do alone (taking its piece of a whole value,
or leaving a whole value to the first place for a sum) is written in aten operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopart.collectives import operator
from autopart.ir.graph import Arg, Dim, Node, Ref, Value
from autopart.ir.names import fresh
from autopart.ir.placed import Move, PlacedBody, PlacedFunction, Strategy, collective_of
from autopart.ir.placement import Dispatched, Own, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, defined
from autopart.rules.drawn import is_draw, located
from autopart.rules.factor import plus, slots, with_argument
from autopart.rules.split import lengths, local_shape, local_size, product
from autopart.rules.strategies import Ruled
from autopart.rules.writer import Writer

aten = torch.ops.aten

DENSE: tuple[tuple[str, Arg], ...] = (("memory_format", torch.contiguous_format),)

WISHES = {
    "all_reduce": "sum", "reduce_scatter": "sum", "all_gather": "all", "all_to_all": "swapped",
    "dispatch": "dispatched", "combine": "combined",
}  # fmt: skip
"""What a collective's result is called, after the value's name."""


def localise(placed: PlacedBody, place: int, *, alike: bool = False) -> Body:
    """The body that place number `place` of the axis runs; the names of formals stay where placements allow it.

    If `alike`, the bodies of all places have the same nodes and differ in numbers only, as another axis that is placed
    on them needs it. Else the first place leaves out what it need not do.

    What is saved in another placement than it is made in has the name of what it was moved to.
    """
    names = set(defined(placed.body.forward))
    if placed.body.backward is not None:
        names |= defined(placed.body.backward).keys()
    forward = _Local(placed, placed.forward, place, names, alike=alike)
    first = forward.written(placed.wanted().items())
    kept = tuple(forward.have[name, how].name for name, how in placed.wanted().items())
    if placed.backward is None:
        return Body(placed.body.name, first, kept, None)
    saved = dict(zip(placed.body.saved, kept, strict=True))
    backward = _Local(placed, placed.backward, place, names, saved, alike=alike)
    return Body(placed.body.name, first, kept, backward.written())


class _Local:
    """One function on its way to what one place runs; `have` is where each value is, by name and placement."""

    def __init__(
        self,
        placed: PlacedBody,
        part: PlacedFunction,
        place: int,
        names: set[str],
        saved: Mapping[str, str] | None = None,
        *,
        alike: bool,
    ) -> None:
        self.alike = alike
        self.axis, self.degree, self.place, self.part, self.names = placed.axis, placed.degree, place, part, names
        self.values = defined(part.function)
        self.nodes: list[Node] = []
        self.have: dict[tuple[str, TensorPlacement], Value] = {}
        self.given: dict[str, TensorPlacement] = {}
        self.gathered: dict[str, Value] = {}
        self.origin = {(move.value, move.target): move.source for move in part.moves}
        inputs = []
        for value, how in zip(part.function.inputs, part.inputs, strict=True):
            inputs.append(self._local(value, how, (saved or {}).get(value.name, value.name)))
            self._define(value.name, how, inputs[-1])
        self.inputs = tuple(inputs)
        self.here = part.function.nodes[0] if part.function.nodes else None

    def _local(self, value: Value, how: TensorPlacement, name: str) -> Value:
        return replace(value, name=name, shape=local_shape(value.shape, how, self.degree, self.place))

    def _define(self, name: str, how: TensorPlacement, value: Value) -> None:
        self.have[name, how] = value
        self.given.setdefault(name, how)

    def written(self, kept: Iterable[tuple[str, TensorPlacement]] = ()) -> Function:
        """The function; the values `kept` are then in these placements, too."""
        for node, strategy in zip(self.part.function.nodes, self.part.strategies, strict=True):
            self.here = node
            self._node(node, strategy)
        wanted = zip(self.part.function.outputs, self.part.outputs, strict=True)
        outputs = tuple([self.read(name, how).name for name, how in wanted])
        for name, how in kept:
            self.read(name, how)
        return Function(self.inputs, tuple(self.nodes), outputs)

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, node: Node, strategy: Strategy) -> None:
        ruled = Ruled.of(node, self.values)
        refs = {}
        for operand, (slot, how) in zip(ruled.call.operands, strategy.needs, strict=True):
            name = operand.value.name
            refs[slot] = self.read(name, self.given[name] if how is None else how)
        outs: list[Value | None] = []
        for out, given in zip(node.outs, strategy.gives, strict=True):
            local = None if out is None or given is None else self._local(out, given, out.name)
            outs.append(local)
            if local is not None and given is not None:
                self._define(local.name, given, local)
        if strategy.spread:
            self._spread(ruled, strategy, refs, outs)
        else:
            self._plain(ruled, strategy, refs, outs)

    def _plain(self, ruled: Ruled, strategy: Strategy, refs: Mapping[str, Value], outs: Iterable[Value | None]) -> None:
        """The node itself, with local operands and sizes."""
        made = ruled.node
        sizes = self._sizes(ruled, strategy)
        for slot, path, _ in slots(ruled.node):
            if slot in refs:
                made = with_argument(made, path, Ref(refs[slot].name))
            elif slot in sizes:
                made = with_argument(made, path, sizes[slot])
        (whole, *_), (how, *_) = ruled.node.outs, strategy.gives
        if is_draw(made) and whole is not None and isinstance(how, Shard):
            dim, _, parts = self._split(whole, how)
            made = located(made, dim, plus(parts[: self.place]), parts[self.place], plus(parts))
        self.nodes.append(replace(made, outs=tuple(outs)))

    def _sizes(self, ruled: Ruled, strategy: Strategy) -> dict[str, Dim]:
        """The integer arguments that a split loop makes smaller."""
        rule, cut = ruled.rule, strategy.cut
        if rule is None or cut is None:
            return {}
        sizes = [factor.size for factor in rule.factors]
        sizes[cut.factor] = local_size(sizes[cut.factor], cut.outer, cut.unit, self.degree, self.place)
        return {slot: product(sizes[f] for f in loops) for slot, loops in rule.sizes if cut.factor in loops}

    def _spread(
        self, ruled: Ruled, strategy: Strategy, refs: Mapping[str, Value], outs: Iterable[Value | None]
    ) -> None:
        """The nodes by which the places together run an operator that needs all of the split loop."""
        rule, cut = ruled.rule, strategy.cut
        assert rule is not None and cut is not None and ruled.spread is not None  # the strategy is spread
        parts = lengths(rule.factors[cut.factor].size, cut.outer, cut.unit, self.degree)
        assert parts is not None  # only legal splits are chosen
        writer = Writer(ruled.node, refs, tuple(outs), self.axis, cut, parts, self.place, self._fresh)
        ruled.spread.write(writer, ruled.call)
        self.nodes += writer.nodes

    # ---- moves -------------------------------------------------------------------------------------------------------

    def read(self, name: str, how: TensorPlacement) -> Value:
        """A value in a placement: as it is there, or moved now."""
        if (name, how) not in self.have:
            source = self.origin[name, how]
            self.have[name, how] = self._move(self.read(name, source), Move(name, source, how))
        return self.have[name, how]

    def _move(self, x: Value, move: Move) -> Value:
        """A collective on the splits before and after, or what every place does alone."""
        whole, kind = self.values[move.value], collective_of(move.source, move.target)
        splits = [self._split(whole, how) for how in (move.source, move.target) if isinstance(how, Shard)]
        if kind == "slice":
            return self._slice(x, *splits[0], move)
        if kind == "first":
            return self._first(x, move)
        if kind == "ends":
            return self._ends(x, move)
        if kind in ("dispatch", "combine"):
            return self._exchanged(x, kind, move)
        if kind is None:
            raise AssertionError(f"{move.value}: nothing moves {move.source} to {move.target}")
        args: Iterable[Any] = (arg for each in splits for arg in each) if splits else ("sum",)
        return self._call(operator(kind), x, self.axis, *args, move=move, wish=WISHES[kind])

    def _first(self, x: Value, move: Move) -> Value:
        """A whole value at the first place, nothing at the others."""
        if not self.alike:
            return x if self.place == 0 else self._call(aten.zeros_like.default, x, move=move, wish="none")
        own = replace(x, name=self._fresh(f"{move.value}_own"), dtype=torch.bool)
        self._put(aten.full_like.default, (Ref(x.name), self.place == 0), (("dtype", torch.bool),), own)
        return self._call(aten.where.ScalarOther, own, Ref(x.name), 0, move=move, wish="first")

    # ---- rows and their groups (`rules.dispatch`) --------------------------------------------------------------------

    def _exchanged(self, x: Value, kind: str, move: Move) -> Value:
        """Rows at the places of their groups, or back where they came from."""
        how = move.target if isinstance(move.target, Dispatched) else move.source
        assert isinstance(how, Dispatched) and how.dim is not None  # one of both is
        rows = self._local(self.values[move.value], Own(how.dim), "").shape[how.dim]
        every = Ref(self._every(how.ends).name)
        args = (how.dim, rows, self._groups(how.ends), every)
        return self._call(operator(kind), x, self.axis, *args, move=move, wish=WISHES[kind])

    def _every(self, ends: str) -> Value:
        """Where the groups end in the rows of every place, place after place."""
        if ends not in self.gathered:
            own = self.read(ends, Own())
            groups = own.shape[0]
            every = replace(own, name=self._fresh(f"{ends}_all"), shape=(product((groups, self.degree)),))
            args = (Ref(own.name), self.axis, 0, 1, (groups,) * self.degree)
            self._put(operator("all_gather"), args, (), every)
            self.gathered[ends] = every
        return self.gathered[ends]

    def _ends(self, own: Value, move: Move) -> Value:
        """Where this place's groups end in the rows of all places that are in them."""
        every, pieces, groups = self._every(move.value), self._groups(move.value), own.shape[0]
        before = plus(pieces[: self.place])
        total = replace(own, name=self._fresh(f"{move.value}_total"))
        each = replace(every, name=self._fresh(f"{move.value}_each"), shape=(self.degree, groups))
        self._put(aten.view.default, (Ref(every.name), each.shape), (), each)
        self._put(aten.sum.dim_IntList, (Ref(each.name), (0,)), (("dtype", own.dtype),), total)
        here = self._call(
            aten.slice.Tensor, total, 0, before, plus((before, pieces[self.place])), move=move, wish="here"
        )
        if before == 0:
            return here
        last = replace(own, name=self._fresh(f"{move.value}_before"), shape=(1,))
        self._put(aten.slice.Tensor, (Ref(total.name), 0, plus((before, -1)), before), (), last)
        return self._call(aten.sub.Tensor, here, Ref(last.name), move=move, wish="own")

    def _groups(self, ends: str) -> tuple[Dim, ...]:
        """How many groups each place has."""
        return self._split(self.values[ends], Shard(0))[2]

    def _split(self, whole: Value, how: Shard) -> tuple[int, Dim, tuple[Dim, ...]]:
        """The arguments by which a collective knows a split: dim, what is outside, the places' lengths."""
        parts = lengths(whole.shape[how.dim], how.outer, how.unit, self.degree)
        assert parts is not None  # only legal splits are chosen
        return how.dim, how.outer, parts

    def _slice(self, x: Value, dim: int, outer: Dim, parts: tuple[Dim, ...], move: Move) -> Value:
        """This place's piece of a whole value; a dim with an outer part is taken apart for it. Dense, as others are."""
        shape, start, own = list(x.shape), plus(parts[: self.place]), parts[self.place]
        if outer == 1:
            piece = self._call(aten.slice.Tensor, x, dim, start, plus((start, own)), move=move, wish="part")
            return self._call(aten.clone.default, piece, move=move, wish="part", keywords=DENSE)
        spread = [*shape[:dim], outer, plus(parts), *shape[dim + 1 :]]
        local = [*shape[:dim], outer, own, *shape[dim + 1 :]]
        apart = self._call(aten.reshape.default, x, tuple(spread), move=move, wish="part", shape=spread)
        piece = self._call(
            aten.slice.Tensor, apart, dim + 1, start, plus((start, own)), move=move, wish="part", shape=local
        )
        dense = self._call(aten.clone.default, piece, move=move, wish="part", shape=local, keywords=DENSE)
        merged = local_shape(shape, move.target, self.degree, self.place)
        return self._call(aten.view.default, dense, merged, move=move, wish="part")

    def _call(
        self, op: Any, x: Value, *args: Any, move: Move, wish: str, shape: Iterable[Dim] | None = None,
        keywords: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:  # fmt: skip
        """Append a call on `x`, whose result has the shape of the move's target unless another is given."""
        local = self._local(self.values[move.value], move.target, self._fresh(f"{move.value}_{wish}"))
        out = local if shape is None else replace(local, shape=tuple(shape))
        self._put(op, (Ref(x.name), *args), keywords, out)
        return out

    def _put(self, op: Any, args: tuple[Arg, ...], keywords: tuple[tuple[str, Arg], ...], out: Value) -> None:
        """Append a call where the function is."""
        at = self.here
        backward, module, source = (at.backward, at.module, at.source) if at is not None else (False, "", "")
        self.nodes.append(Node(op, args, keywords, (out,), True, backward, module, source))

    def _fresh(self, wish: str) -> str:
        name = fresh(wish, self.names)
        self.names.add(name)
        return name
