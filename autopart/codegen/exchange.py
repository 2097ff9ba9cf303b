"""Collectives inside bodies on shapes: what the world's calls on values return, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.chunks import nodes_of
from autopart.codegen.parsed import executing
from autopart.collectives import collective_name, is_collective
from autopart.ir.graph import Node, Ref, Size, map_arg
from autopart.ir.segmented import Function
from autopart.ir.traffic import counted, wire


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective that a body calls: its name and axis, the shape and dtype of the whole, and its other arguments.

    `what` is how it reduces, or how the dim is cut: dim, outer and pieces, of all-to-all twice, of a shift after the
    hops; of rows to their groups and back dim, rows and pieces. `value` is the local name of what a place brings;
    `line` counts from the body's first line.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    what: tuple[Any, ...]
    value: str
    line: int = 0

    def same(self) -> tuple[object, ...]:
        """What all places must have in common."""
        return self.kind, self.axis, self.shape, self.dtype, self.what

    @property
    def even(self) -> bool:
        """Whether all places have equally much."""
        return all(len(set(each)) == 1 for each in self.what if isinstance(each, tuple))

    @property
    def counted(self) -> str:
        """The kind as which its bytes are counted."""
        return counted(self.kind)

    @property
    def payload(self) -> int:
        """The bytes that are counted (`ir.traffic.wire`)."""
        return wire(self.kind, self.shape, self.dtype.itemsize, self.what)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}_values of {self.value}: {name}{list(self.shape)} over {self.axis!r} by {self.what}"


def exchange_of(node: Node, batch: int) -> Exchange:
    """The collective that a node is, at a microbatch of `batch` samples."""
    (out,), (x, axis, *rest) = node.outs, node.args
    assert out is not None and isinstance(x, Ref)  # a collective that nothing reads is not written

    def number(arg: Any) -> Any:
        return int(arg.at(batch)) if isinstance(arg, Size) else arg

    what = tuple(map_arg(tuple(arg for arg in rest if not isinstance(arg, Ref)), number))
    shape, kind = out.at(batch), collective_name(node.op)
    if kind in ("reduce_scatter", "all_to_all", "shift"):
        dim, outer, pieces = what[-3:]
        shape = (*shape[:dim], outer * sum(pieces), *shape[dim + 1 :])
    if kind in ("dispatch", "combine"):
        dim, rows, pieces = what
        shape = (*shape[:dim], rows * len(pieces), *shape[dim + 1 :])
    return Exchange(kind, axis, shape, out.dtype, what, x.name)


def exchanges(function: Function, batch: int) -> tuple[Exchange, ...]:
    """The collectives of a body's function, in order; those of its loops once a chunk."""
    found, at = list[Node](), 0
    for loop in function.loops:
        found += function.nodes[at : loop.start]
        found += (node for length in loop.lengths(batch) for node in nodes_of(function, loop, length))
        at = loop.stop
    return tuple(exchange_of(node, batch) for node in (*found, *function.nodes[at:]) if is_collective(node.op))


class ExchangeWorld:
    """Stands for the world in a body that runs on tensors without data: notes collectives, makes their shapes.

    `places` are those of this rank, by axis; `operands` the names of what collectives are given, by line of the body;
    `lend` is told of each value that one is given.
    """

    def __init__(
        self,
        places: Mapping[str, int],
        operands: Mapping[int, str],
        file: str,
        first: int,
        lend: Callable[[torch.Tensor], None],
    ) -> None:
        self.places, self.operands, self.file, self.first, self.lend = places, operands, file, first, lend
        self.noted: list[Exchange] = []

    def all_reduce_values(self, x: torch.Tensor, *, axis: str, how: str) -> torch.Tensor:
        """A sum, or the maximum, over an axis."""
        if how not in ("sum", "max"):
            raise TypeError(f"values are reduced by 'sum' or 'max', not {how!r}")
        self._note("all_reduce", axis, x, tuple(x.shape), (how,))
        return torch.empty_like(x)

    def all_gather_values(
        self, x: torch.Tensor, *, axis: str, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """The whole of a value that is split along a dim."""
        shape = self._whole(x, axis, dim, outer, pieces)
        self._note("all_gather", axis, x, shape, (dim, outer, tuple(pieces)))
        return x.new_empty(shape)

    def reduce_scatter_values(
        self, x: torch.Tensor, *, axis: str, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """This place's piece of a sum."""
        self._note("reduce_scatter", axis, x, tuple(x.shape), (dim, outer, tuple(pieces)))
        return x.new_empty(self._piece(tuple(x.shape), axis, dim, outer, pieces))

    def all_to_all_values(
        self,
        x: torch.Tensor,
        *,
        axis: str,
        from_dim: int,
        from_outer: int = 1,
        from_pieces: Sequence[int],
        dim: int,
        outer: int = 1,
        pieces: Sequence[int],
    ) -> torch.Tensor:
        """A value that is split along one dim, split along another."""
        shape = self._whole(x, axis, from_dim, from_outer, from_pieces)
        what = (from_dim, from_outer, tuple(from_pieces), dim, outer, tuple(pieces))
        self._note("all_to_all", axis, x, shape, what)
        return x.new_empty(self._piece(shape, axis, dim, outer, pieces))

    def shift_values(
        self, x: torch.Tensor, *, axis: str, hops: int, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """The piece of the place `hops` before this one."""
        shape = self._whole(x, axis, dim, outer, pieces, before=hops - 1)
        self._note("shift", axis, x, shape, (hops, dim, outer, tuple(pieces)))
        return x.new_empty(self._piece(shape, axis, dim, outer, pieces, before=hops))

    def dispatch_values(
        self, x: torch.Tensor, *, axis: str, dim: int, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> torch.Tensor:
        """As many rows of this place's groups as there are if all have as many."""
        return self._rows("dispatch", x, axis, dim, rows, pieces, ends)

    def combine_values(
        self, x: torch.Tensor, *, axis: str, dim: int, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> torch.Tensor:
        """This place's own rows."""
        return self._rows("combine", x, axis, dim, rows, pieces, ends)

    def _rows(
        self, kind: str, x: torch.Tensor, axis: str, dim: int, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> torch.Tensor:
        shape = tuple(x.shape)
        if not 0 <= dim < len(shape) or shape[dim] != rows:
            raise TypeError(f"{list(shape)} has no {rows} rows along dim {dim}")
        if ends.shape != (len(pieces) * sum(pieces),) or ends.dtype.is_floating_point:
            raise TypeError(f"{list(ends.shape)} are not the ends of {sum(pieces)} groups at {len(pieces)} places")
        self.lend(ends)
        whole = (*shape[:dim], rows * len(pieces), *shape[dim + 1 :])
        self._note(kind, axis, x, whole, (dim, rows, tuple(pieces)))
        return x.new_empty(shape)

    def _place(self, axis: str) -> int:
        if axis not in self.places:
            raise TypeError(f"the mesh has no axis {axis!r} to exchange values on; it has {', '.join(self.places)}")
        return self.places[axis]

    def _whole(
        self, x: torch.Tensor, axis: str, dim: int, outer: int, pieces: Sequence[int], before: int = 0
    ) -> tuple[int, ...]:
        """The shape of the whole of which `x` is the piece of this place, or of one so many `before` it in the ring."""
        place, shape = self._holder(axis, before, pieces), tuple(x.shape)
        if not 0 <= dim < len(shape) or place not in range(len(pieces)) or shape[dim] != outer * pieces[place]:
            raise TypeError(
                f"place {place} of {axis!r} has {list(shape)}, not {outer} x {list(pieces)} along dim {dim}"
            )
        return (*shape[:dim], outer * sum(pieces), *shape[dim + 1 :])

    def _piece(
        self, shape: tuple[int, ...], axis: str, dim: int, outer: int, pieces: Sequence[int], before: int = 0
    ) -> tuple[int, ...]:
        place = self._holder(axis, before, pieces)
        if not 0 <= dim < len(shape) or place not in range(len(pieces)) or shape[dim] != outer * sum(pieces):
            raise TypeError(f"{list(shape)} is cut along dim {dim} into {outer} x {list(pieces)}")
        return (*shape[:dim], outer * pieces[place], *shape[dim + 1 :])

    def _holder(self, axis: str, before: int, pieces: Sequence[int]) -> int:
        place = self._place(axis) - before
        return place + len(pieces) if place < 0 else place

    def _note(self, kind: str, axis: str, x: torch.Tensor, shape: tuple[int, ...], what: tuple[Any, ...]) -> None:
        self._place(axis)
        self.lend(x)
        line = executing(self.file) - self.first
        self.noted.append(Exchange(kind, axis, shape, x.dtype, what, self.operands.get(line, ""), line))
