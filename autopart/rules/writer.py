"""Writing one operator call at one place of an axis, where it needs all of a loop of which the place has a piece.

A `Spread` says which loop that is and what the places tell each other; its `write` writes the nodes with a `Writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart.collectives import operator
from autopart.ir.graph import Dim, Node, Ref, Value
from autopart.ir.placed import Cut
from autopart.rules.factor import Call, plus

aten = torch.ops.aten


class Writer:
    """Writes the nodes of one operator call at one place, whose operands are `refs` (by slot) and results `outs`.

    `cut` is how the loop is split, `pieces` how long each place's piece of every run is, `place` which of them this is;
    `name` gives unused names.
    """

    def __init__(
        self, node: Node, refs: Mapping[str, Value], outs: Sequence[Value | None], axis: str, cut: Cut,
        pieces: Sequence[Dim], place: int, name: Callable[[str], str],
    ) -> None:  # fmt: skip
        self.node, self.refs, self.outs, self.axis, self.cut, self.place = node, refs, outs, axis, cut, place
        self.pieces = tuple(pieces)
        self.nodes: list[Node] = []
        self.unused = name

    @property
    def degree(self) -> int:
        """How many places there are."""
        return len(self.pieces)

    @property
    def start(self) -> Dim:
        """Where this place's piece of a run begins."""
        return plus(self.pieces[: self.place])

    @property
    def length(self) -> Dim:
        """How long this place's piece of a run is."""
        return self.pieces[self.place]

    def __call__(self, op: Any, *args: Any, like: Value, name: str = "", **kwargs: Any) -> Value:
        """Append a call whose result has the shape and dtype of `like`; values in the arguments become references."""
        value = Value(name or self.unused(op.overloadpacket.__name__.strip("_")), like.shape, like.dtype)
        self.put(op, args, (value,), kwargs)
        return value

    def put(
        self, op: Any, args: Sequence[Any], outs: Sequence[Value | None], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Append a call with these results."""
        node = self.node
        made = tuple(Ref(a.name) if isinstance(a, Value) else a for a in args)
        single = len(op._schema.returns) == 1
        keywords = tuple((kwargs or {}).items())
        self.nodes.append(Node(op, made, keywords, tuple(outs), single, node.backward, node.module, node.source))

    def last(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Append the call that makes the node's (first) result."""
        out = self.outs[0]
        assert out is not None  # dead calls are not placed
        self(op, *args, like=out, name=out.name, **kwargs)

    def named(self, out: Value, made: Value) -> None:
        """Let `made`, which some call here has made, be a result of the node; of another dtype, by a cast."""
        if made.dtype != out.dtype:
            self(aten._to_copy.default, made, like=out, name=out.name, dtype=out.dtype)
            return
        ref, new = Ref(made.name), Ref(out.name)
        self.nodes = [
            replace(
                node.mapped(lambda arg: new if arg == ref else arg),
                outs=tuple(out if x is not None and x.name == made.name else x for x in node.outs),
            )
            for node in self.nodes
        ]

    def reduced(self, op: Any, x: Value, dim: int, how: str) -> Value:
        """``all_reduce(op(x, dim, keepdim))``."""
        thin = Value("", tuple(1 if i == dim else n for i, n in enumerate(x.shape)), x.dtype)
        part = self(op, x, (dim,), True, like=thin)
        return self(operator("all_reduce"), part, self.axis, how, like=thin)

    def mine(self, index: Value) -> tuple[Value, Value]:
        """An index counted from the start of this place's piece, and whether it is in it."""
        flag = Value("", index.shape, torch.bool)
        own = self(aten.sub.Tensor, index, self.start, like=index)
        low, high = self(aten.ge.Scalar, own, 0, like=flag), self(aten.lt.Scalar, own, self.length, like=flag)
        return own, self(aten.logical_and.default, low, high, like=flag)


@dataclass(frozen=True, slots=True)
class Sent:
    """What places send each other: a collective on what is as large as an operand, maybe without one of its dims.

    A shift is once round the ring: one less than there are places. To a gather each place brings that much.
    """

    kind: str
    slot: str
    without: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A blocked loop that may be split after all: `write` writes one place's nodes; results that lack the loop add up.

    But for those in `whole`, by number, which every place has whole then.

    `beside` are loops that are split with it in the same way, of other operands and results. `sends` is what the places
    tell each other. `fits` says which cuts may be, given the number of places. In `turns`, as many as there are places,
    all that a place has is read.
    """

    factor: int
    write: Callable[[Writer, Call], None]
    fits: Callable[[Cut, int], bool]
    sends: tuple[Sent, ...] = ()
    beside: tuple[int, ...] = ()
    turns: bool = False
    whole: tuple[int, ...] = ()

    def allows(self, cut: Cut, degree: int) -> bool:
        """Whether the loop may be cut so."""
        return cut.factor == self.factor and self.fits(cut, degree)

    def together(self, cut: Cut) -> tuple[Cut, ...]:
        """The cuts of all loops that `cut` splits."""
        return (cut, *(Cut(factor, cut.outer, cut.unit) for factor in self.beside))


def consecutive(cut: Cut, degree: int) -> bool:
    """Of a loop of which each place needs one run."""
    return cut.outer == 1


def anyhow(cut: Cut, degree: int) -> bool:
    """Of a loop whose order does not matter."""
    return True
