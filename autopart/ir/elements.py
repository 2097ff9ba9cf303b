"""Elements of a tensor: which of them lie somewhere, as runs along every dim, and what two such choices share.

What a place has of a tensor comes from cutting dims, one after the other, so it is every combination of some indices of
each dim. These are kept as ascending runs, which makes equal choices equal and finds shared elements box by box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

Runs = tuple[tuple[int, int], ...]
"""Indices of one dim: those of each ``[start, stop)``; ascending, none empty, none touching the next."""

Box = tuple[slice, ...]
"""A slice for every dim."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Some elements of a tensor of `shape`: those whose index along each dim is in the dim's runs.

    The tensor that has them alone keeps their order and the number of dims. A tensor without dims is taken as one row,
    which is there or not at all: it has runs for one dim.
    """

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]

    @classmethod
    def all(cls, shape: tuple[int, ...]) -> Elements:
        """Every element of a tensor of `shape`."""
        return cls(shape, tuple(((0, size),) if size else () for size in shape or (1,)))

    def cut(self, dim: int, start: int, stop: int, *, outer: int = 1) -> Elements:
        """What is left of these if dim `dim` of the tensor that has them alone keeps ``[start, stop)``.

        With `outer` the dim is seen as so many equal runs, and keeps that of each. A tensor without dims is cut along
        dim 0.
        """
        length = _length(self.runs[dim]) // outer
        kept = (run for k in range(outer) for run in _within(self.runs[dim], k * length + start, k * length + stop))
        return Elements(self.shape, (*self.runs[:dim], _joined(kept), *self.runs[dim + 1 :]))

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the tensor that has these elements alone; (0,) if that without dims is not there."""
        lengths = tuple(map(_length, self.runs))
        return lengths if self.shape or not lengths[0] else ()

    @property
    def count(self) -> int:
        """How many they are."""
        return prod(map(_length, self.runs))

    @property
    def everything(self) -> bool:
        """Whether no element is left out."""
        return self == Elements.all(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a whole tensor; a view unless some dim has several runs."""
        if not self.shape:
            return whole if self.runs[0] else whole.reshape(1)[:0]
        for dim, (runs, size) in enumerate(zip(self.runs, self.shape, strict=True)):
            if _length(runs) == size:
                continue
            parts = [whole.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return whole

    def shared(self, other: Elements) -> Iterator[tuple[Box, Box]]:
        """The elements that both have, box by box: where each box is in the tensor of these, and in that of `other`."""
        dims = [list(_shared(mine, theirs)) for mine, theirs in zip(self.runs, other.runs, strict=True)]
        for found in product(*dims):
            yield tuple(mine for mine, _ in found if self.shape), tuple(theirs for _, theirs in found if self.shape)


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _within(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of the indices in `runs`, counted from 0, those from number `start` to before number `stop`."""
    before = 0
    for first, last in runs:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            yield first + low, first + high
        before += last - first


def _joined(runs: Iterator[tuple[int, int]]) -> Runs:
    """Ascending runs, those that touch made one."""
    made: list[tuple[int, int]] = []
    for start, stop in runs:
        if made and made[-1][1] == start:
            start = made.pop()[0]
        made.append((start, stop))
    return tuple(made)


def _shared(mine: Runs, theirs: Runs) -> Iterator[tuple[slice, slice]]:
    """The runs of indices that are in both, as places among the indices of each."""
    i = j = before = behind = 0  # a run of each, and the indices of mine and of theirs before it
    while i < len(mine) and j < len(theirs):
        (a, b), (c, d) = mine[i], theirs[j]
        first, last = max(a, c), min(b, d)
        if first < last:
            yield (
                slice(before + first - a, before + last - a),
                slice(behind + first - c, behind + last - c),
            )
        if b <= d:
            i, before = i + 1, before + b - a
        else:
            j, behind = j + 1, behind + d - c
