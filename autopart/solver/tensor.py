"""Tensor placements of one body on one axis: the body as a `Layout`.

Units, in the words of `solver.layout`:

    in x            a value from outside: in any placement, which is the boundary's to choose
    parameter w     a parameter and its gradient: placed alike; it costs its bytes
    a node          one option a strategy (`rules.strategies`); it costs its time
    save x          forward x -> what the backward reads: kept in one placement; it costs its bytes
    out y           a value for outside

Placements that come into question are those that some node can make or read (`solver.candidates`). Forward and backward
are one layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.graph import Node, Size, Value
from autopart.ir.placed import Cut, Strategy, of_gradient
from autopart.ir.placement import Dispatched, Own, Partial, Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, Segment
from autopart.rules.alias import roots
from autopart.rules.dispatch import ways_by_rows
from autopart.rules.flops import flops
from autopart.rules.rows import SORTS
from autopart.rules.split import fits
from autopart.rules.strategies import Ruled, equal, matching, strategies
from autopart.solver.axis import Axis
from autopart.solver.body_layout import LATER, BodyLayout
from autopart.solver.candidates import Candidates, Splits
from autopart.solver.layout import Layout, Option, Unit


@dataclass(frozen=True, slots=True)
class Along:
    """A pin to some split of a dim: into equal runs, by heads, or inside what a view takes apart."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


Pin = TensorPlacement | Along
"""How a parameter is to be placed."""


def _keeps(pin: Pin | None, how: TensorPlacement) -> bool:
    if isinstance(pin, Along):
        return isinstance(how, Shard) and how.dim == pin.dim
    return pin is None or how == pin


def _joined(body: Body, late: Mapping[str, str]) -> tuple[list[Node], dict[str, Value]]:
    """The nodes of forward and backward in a row, and every value; those in `late` have that name in the backward."""
    backward = body.backward or Function((), (), ())
    values = {value.name: value for value in body.forward.inputs}
    values |= {name: replace(v, name=name) for v in backward.inputs for name in (late.get(v.name, v.name),)}
    nodes = [*body.forward.nodes, *(node.renamed(late) for node in backward.nodes)]
    for node in nodes:
        values |= {out.name: out for out in node.outs if out is not None}
    return nodes, values


def _sorted(ruled: Ruled) -> Iterator[tuple[str, int]]:
    """The dims of the rows that a node sorts, counts, or has in their order: on axes before they are together."""
    for way in ruled.by_rows[:1]:
        begins = not any(isinstance(how, Own) for _, how in way.needs)
        for name, how in ruled.places(way):
            dim = how.dim if isinstance(how, Own) or (isinstance(how, Shard) and begins) else None
            if dim is not None:
                yield name, dim


class _Build:
    """One body on its way to a layout."""

    def __init__(
        self,
        body: Body,
        segment: Segment,
        axis: Axis,
        whole: Collection[str],
        pins: Mapping[str, Pin],
        turns: Collection[int] | None,
        others: Sequence[Body],
    ) -> None:
        self.body, self.segment, self.axis, self.degree, self.whole = body, segment, axis, axis.degree, whole
        self.pins, self.turns, self.others = pins, turns or (), others
        self.forward, backward = body.forward, body.backward or Function((), (), ())
        values, fixed = len(segment.values), len(segment.forward_fixed)
        names = [v.name for v in self.forward.inputs]
        self.given, self.fixed = names[:values], names[values : values + fixed]
        owners = dict(zip(segment.forward_parameters, names[values + fixed :], strict=True))
        formals = [v.name for v in backward.inputs]
        self.back_given = formals[: len(segment.backward_inputs)]
        rest = formals[len(segment.backward_inputs) + len(body.saved) :]
        self.back_fixed = rest[: len(segment.backward_fixed)]
        owners |= dict(zip(segment.backward_parameters, rest[len(segment.backward_fixed) :], strict=True))
        self.parameters = owners
        made = backward.outputs[len(segment.backward_outputs) :] if body.backward is not None else ()
        self.gradients = [(owners.get(target), name) for target, name in zip(segment.gradients, made, strict=True)]
        self.late = {v.name: v.name + LATER for v in backward.inputs if v.name not in self.back_given}
        self.nodes, self.values = _joined(body, self.late)
        self.ruled = [Ruled.of(node, self.values) for node in self.nodes]
        self.together: set[tuple[str, int]] = set()
        if axis.divides or axis.alike:
            self._sort_rows(body)
        if turns is None:
            self.ruled = [replace(r, spread=None) if r.spread and r.spread.turns else r for r in self.ruled]
        self._alike: dict[str, str] = {}
        for owner, gradient in self.gradients:
            if owner is not None and not axis.by_samples and self._key(owner) != self._key(gradient):
                self._alike[self._key(gradient)] = self._key(owner)

    def _sort_rows(self, body: Body) -> None:
        """Let each place sort its own rows; on an axis before others they stay `together`, for one of those to do so.

        How many rows a place then has is known to none that is placed after.
        """
        ways = (way for part in ways_by_rows(body, self.degree) for way in part)
        ruled = [replace(each, by_rows=way) for each, way in zip(self.ruled, ways, strict=True)]
        if self.axis.alike:
            self.together = {pair for each in ruled for pair in _sorted(each)}
        else:
            self.ruled = ruled

    def build(self, splits: Splits | None, *, all_of_it: bool = False) -> BodyLayout:
        """The layout in which these `splits` come into question, or (`all_of_it`) are made; None: nothing is split."""
        cuts = splits.cuts if splits is not None else [set[Cut]()] * len(self.nodes)
        cut = zip(self.ruled, [sorted(c, key=str) for c in cuts], strict=True)
        options = [strategies(r, c, self.degree, rows=splits is not None and splits.rows) for r, c in cut]
        if self.together:
            pairs = zip(self.ruled, options, strict=True)
            options = [tuple(way for way in taken if not self._parts(ruled, way)) for ruled, taken in pairs]
        options = options if splits is not None else [taken[:1] for taken in options]
        shards = splits.shards if splits is not None else {}
        for other in self.others:
            options, shards = self._common(options, shards, other)
        if all_of_it or self.axis.by_samples:
            options = [tuple(s for s in taken if s.cut is not None) or taken for taken in options]
        pending, by_rows = self._pending(options), self._by_rows(options)
        self.places: dict[str, tuple[TensorPlacement, ...]] = {}
        for name in self.values:
            key = self._key(name)
            sums = (Partial(),) if key in pending else ()
            split = (*sorted(shards.get(key, ()), key=str), *sorted(by_rows.get(key, ()), key=str))
            self.places[name] = (Replicate(), *sums, *split)
        units = [*self._sources(), *self._own_parameters()]
        found: list[tuple[Strategy, ...]] = [()] * len(units)
        numbers = {name: value.sized(self._plain) for name, value in self.values.items()}
        for number, (ruled, taken) in enumerate(zip(self.ruled, options, strict=True)):
            units.append(self._node(number, ruled, taken, numbers))
            found.append(taken)
        units += [*self._saves(), *self._sinks()]
        found += [()] * (len(units) - len(found))
        read = {name for unit in units for name in unit.reads}
        moves = tuple(
            (name, self.axis.moves(value, self.places[name])) for name, value in self.values.items() if name in read
        )
        moves += tuple((name, ((0,) * len(p),) * len(p)) for name, p in self.places.items() if name not in read)
        layout = Layout(tuple(units), moves)
        return BodyLayout(self.body, self.axis, layout, self.places, tuple(found), None if all_of_it else layout)

    def _parts(self, ruled: Ruled, way: Strategy) -> bool:
        """Whether a strategy splits rows that are to stay together."""
        return any(isinstance(how, Shard) and (name, how.dim) in self.together for name, how in ruled.places(way))

    # ---- which placements come into question -------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        """What names a value and all that must be able to be placed like it: what is saved of it, or a gradient."""
        name = name.removesuffix(LATER)
        while name in self._alike:
            name = self._alike[name]
        return name

    def candidates(self) -> Candidates:
        """What may be split at all; a pinned split is one of its parameter's."""
        pinned = {
            self._key(name): pin
            for name, pin in self.pins.items()
            if isinstance(pin, Shard) and name in self.values and fits(self.values[name], pin, self.degree)
        }
        return Candidates(self.ruled, self.axis, self._key, pinned)

    def work(self, splits: Splits) -> float:
        """The FLOPs of the nodes that have a cut."""
        values = {name: value.sized(self._plain) for name, value in self.values.items()}
        cut = (node for node, cuts in zip(self.nodes, splits.cuts, strict=True) if cuts)
        return sum(float(flops(node.sized(self._plain), values)) for node in cut)

    def _common(
        self, options: Sequence[tuple[Strategy, ...]], shards: Mapping[str, set[Shard]], other: Body
    ) -> tuple[list[tuple[Strategy, ...]], dict[str, set[Shard]]]:
        """Of the strategies and splits those that another place of the axes before can have, too."""
        nodes, values = _joined(other, self.late)
        common = []
        for ruled, node, taken in zip(self.ruled, nodes, options, strict=True):
            found = taken
            if not equal(ruled.node, self.values, node, values):
                there = Ruled.of(node, values)
                found = tuple(strategy for strategy in taken if matching(there, strategy, self.degree) is not None)
            if not found:
                raise ValueError(
                    f"mesh: {node.place()}{node.opname} runs on sizes that the axes before "
                    f"{self.axis.name!r} make unlike at their places, and in no way that fits them all; use sizes of "
                    "these axes that divide what they split, or leave one out"
                )
            common.append(found)
        kept = {key: set(found) for key, found in shards.items()}
        for name, value in values.items():
            key = self._key(name)
            kept[key] = {how for how in kept.get(key, ()) if fits(value, how, self.degree)}
        return common, kept

    def _pending(self, options: Sequence[tuple[Strategy, ...]]) -> set[str]:
        """The values that some strategy needs or gives as a part of a sum."""
        found = {gradient for _, gradient in self.gradients if self.axis.by_samples}
        for ruled, taken in zip(self.ruled, options, strict=True):
            found |= {name for each in taken for name, how in ruled.places(each) if how == Partial()}
        return {self._key(name) for name in found}

    def _by_rows(self, options: Sequence[tuple[Strategy, ...]]) -> dict[str, set[TensorPlacement]]:
        """By key, the placements of rows in an order of each place's own, or with their groups."""
        found: dict[str, set[TensorPlacement]] = {}
        for ruled, taken in zip(self.ruled, options, strict=True):
            for name, how in (pair for strategy in taken for pair in ruled.places(strategy)):
                if isinstance(how, Own | Dispatched):
                    found.setdefault(self._key(name), set()).add(how)
        return found

    # ---- units -------------------------------------------------------------------------------------------------------

    def _place(self, name: str, how: TensorPlacement | None) -> int | None:
        return None if how is None else self.places[name].index(how)

    def _node(self, number: int, ruled: Ruled, taken: Sequence[Strategy], numbers: Mapping[str, Value]) -> Unit:
        node = ruled.node
        reads = tuple(o.value.name for o in ruled.call.operands)
        times = self.axis.times(node.sized(self._plain), ruled, taken, numbers)
        made = []
        for strategy, time in zip(taken, times, strict=True):
            needs = tuple(self._place(n, how) for n, (_, how) in zip(reads, strategy.needs, strict=True))
            outs = [(o.name, how) for o, how in zip(node.outs, strategy.gives, strict=True) if o is not None]
            gives = tuple(self.places[name].index(how) for name, how in outs if how is not None)
            made.append(Option(needs, gives, time))
        return Unit(f"node {number}", reads, node.names(), tuple(made))

    def _plain(self, size: Size) -> int:
        """A size as a plain number."""
        return int(size.at(self.axis.batch))

    def _sources(self) -> Iterator[Unit]:
        for name in (*self.given, *self.back_given):
            picked = [0] if name in self.whole else self._outside(name)
            yield Unit(f"in {name}", (), (name,), tuple(Option((), (i,)) for i in picked))
        for name in (*self.fixed, *(self.late[name] for name in self.back_fixed)):
            yield Unit(f"fixed {name}", (), (name,), (Option((), (0,)),))

    def _own_parameters(self) -> Iterator[Unit]:
        """A parameter has one placement, of which its gradients' follows; it is never a part of a sum."""
        for target, name in self.parameters.items():
            makes = tuple(n for n in (name, self.late.get(name)) if n in self.values)
            grads = tuple(gradient for owner, gradient in self.gradients if owner == name)
            options = []
            for how in self._allowed(target, name, self._kept(makes[0])):
                needs = tuple(self.places[g].index(of_gradient(self.axis.name, how)) for g in grads)
                gives = tuple(self.places[n].index(how) for n in makes)
                options.append(Option(needs, gives, 0, self._bytes(makes[0], how) * self.axis.copies))
            yield Unit(f"parameter {name}", grads, makes, tuple(options))

    def _kept(self, name: str) -> list[TensorPlacement]:
        """The placements in which a parameter may lie."""
        return [Replicate()] if self.axis.whole_parameters else [p for p in self.places[name] if p != Partial()]

    def _allowed(self, target: str, name: str, places: list[TensorPlacement]) -> list[TensorPlacement]:
        """The placements of a parameter that its pin allows."""
        pin = self.pins.get(name)
        if found := [how for how in places if _keeps(pin, how)]:
            return found
        known = ", ".join(map(str, places))
        raise ValueError(f"placement: {target!r} cannot be {pin} on this axis; it can be {known}{self._advice()}")

    def _advice(self) -> str:
        """Where experts could lie apart that cannot here."""
        if self.axis.divides or not any(node.aten in SORTS for node in self.nodes):
            return ""
        return (
            f". Rows go to the places of their groups where microbatches are known to be multiples of {self.degree} "
            "samples, on the only such axis or on ep"
        )

    def _saves(self) -> Iterator[Unit]:
        """What is saved; views of one storage cost their bytes once.

        Where groups end is kept for each place's own rows: it is by these that rows are sent to their groups and back.
        """
        root = roots(self.forward.nodes)
        held = {*self.fixed, *self.parameters.values()}
        for name in self.body.saved:
            base = root.get(name, name)
            options = tuple(
                Option((i,), (i,), 0, 0 if base in held else self._bytes(name, how))
                for i, how in enumerate(self.places[name])
                if not (isinstance(how, Dispatched) and how.dim is None)
            )
            held.add(base)
            yield Unit(f"save {name}", (name,), (name + LATER,), options)

    def _sinks(self) -> Iterator[Unit]:
        for i, name in enumerate(self.forward.outputs):
            whole = (
                i >= len(self.segment.outputs) or name in self.whole
            )  # new values of buffers are the same everywhere
            yield self._sink(f"out {i} {name}", name, whole=whole)
        if self.body.backward is not None:
            taken = {gradient for owner, gradient in self.gradients if owner is not None}
            for i, name in enumerate(self.body.backward.outputs):
                own = i >= len(self.segment.backward_outputs)
                if not own or name not in taken:
                    whole = name in self.whole or (own and self.axis.whole_parameters)
                    how = of_gradient(self.axis.name, Replicate()) if own else Replicate()
                    yield self._sink(f"back {i} {name}", self.late.get(name, name), whole=whole, how=how)

    def _sink(self, unit: str, name: str, *, whole: bool, how: TensorPlacement | None = None) -> Unit:
        picked = [self.places[name].index(how or Replicate())] if whole else self._outside(name)
        return Unit(unit, (name,), (), tuple(Option((i,), ()) for i in picked))

    def _outside(self, name: str) -> list[int]:
        """The placements that a value may have outside: rows in an order of a place's own stay inside."""
        return [i for i, how in enumerate(self.places[name]) if not isinstance(how, Own | Dispatched)]

    def _bytes(self, name: str, how: TensorPlacement) -> int:
        return round(self.axis.local_bytes(self.values[name], how))


def layout_of(
    body: Body,
    segment: Segment,
    axis: Axis,
    whole: Collection[str] = (),
    pins: Mapping[str, Pin] | None = None,
    *,
    turns: Collection[int] | None = (),
    split: bool = True,
    others: Sequence[Body] = (),
) -> BodyLayout:
    """The layout of a body, whose formals are those of `segment`, on an axis. What is in `whole` passes it unsplit.

    `others` are the same body at other places of the axes before: what is chosen must fit them, too. `pins` are of
    parameters, by local name. Loops as long as one of `turns` may be dealt out in turn, too; with None attention does
    not go in a ring. Without `split` nothing in the body is split: every place computes all of it. Raises ValueError
    for a pin that nothing in the body can keep, naming those that it can.
    """
    made = _Build(body, segment, axis, whole, pins or {}, turns, others)
    return made.build(made.candidates().every(turns or ()) if split else None)


LOOPS = 3
"""How many loops of a body that is too entangled for more are looked at, those of most work first."""


def layouts_along(
    body: Body,
    segment: Segment,
    axis: Axis,
    whole: Collection[str] = (),
    pins: Mapping[str, Pin] | None = None,
    *,
    others: Sequence[Body] = (),
) -> Iterator[BodyLayout]:
    """Layouts of a body, as by `layout_of`, each along one loop: the samples, say, or the hidden units.

    Every operator that has the loop runs on a part of it, so little is left to choose. Those of most work come first;
    those that cannot keep the pins are left out.
    """
    made = _Build(body, segment, axis, whole, pins or {}, None, others)
    for splits in sorted(made.candidates().loops(), key=made.work, reverse=True)[:LOOPS]:
        with contextlib.suppress(ValueError):
            yield replace(made.build(splits, all_of_it=True), exact=False)
