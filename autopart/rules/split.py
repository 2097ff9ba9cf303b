"""Splitting a loop: which part of every dim each place of an axis has, and which loop a split dim belongs to.

A loop or dim of size ``outer x n x unit`` is split in its middle part, as `ir.mesh.pieces` cuts n units. Nothing is
split that would leave a place empty. Samples are split evenly, which takes microbatches that the axis divides
(`takes_samples`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopart.ir.graph import Dim, Size, Value
from autopart.ir.mesh import pieces
from autopart.ir.placed import Cut
from autopart.ir.placement import Dispatched, Own, Shard, TensorPlacement
from autopart.rules.factor import Dims, Factor, Product, ratio, samples_over, times


def product(sizes: Iterable[Dim]) -> Dim:
    """The product of sizes of which at most one moves with the batch."""
    total: Dim = 1
    for size in sizes:
        more = times(total, size)
        assert more is not None  # a dim has the batch once
        total = more
    return total


def lengths(size: Dim, outer: Dim, unit: Dim, degree: int) -> tuple[Dim, ...] | None:
    """The elements of the split part that each place has; None if the split is not legal."""
    count = _units(size, outer, unit)
    if count is None:
        return None
    even = _even(count, degree)
    if even is not None and even != 0:
        return (product((even, unit)),) * degree
    if not isinstance(count, int) or count < degree:
        return None
    return tuple(product((part, unit)) for part in pieces(count, degree))


def fits(value: Value, how: Shard, degree: int) -> bool:
    """Whether a value can be split so."""
    return how.dim < len(value.shape) and lengths(value.shape[how.dim], how.outer, how.unit, degree) is not None


def is_even(size: Dim, outer: Dim, unit: Dim, degree: int) -> bool:
    """Whether all places have equally many units of the split part."""
    count = _units(size, outer, unit)
    return count is not None and _even(count, degree) is not None


def _even(count: Dim, degree: int) -> Dim | None:
    """What each place has of units that are split evenly; None where they are not."""
    whole = ratio(count, degree)
    return samples_over(count, degree) if whole is None else whole


def takes_samples(factors: Sequence[Factor], cut: Cut, degree: int) -> bool:
    """Whether a cut splits the samples themselves, so that the microbatch must be a multiple of `degree` of them."""
    parts = lengths(factors[cut.factor].size, cut.outer, cut.unit, degree)
    return parts is not None and isinstance(parts[0], Size) and parts[0].over > 1


def legal(factors: Sequence[Factor], cut: Cut, degree: int) -> bool:
    """Whether a loop can be split so."""
    return lengths(factors[cut.factor].size, cut.outer, cut.unit, degree) is not None


def shard_of(dims: Dims, factors: Sequence[Factor], cut: Cut, degree: int) -> Shard | None:
    """How a tensor with these factors is split by a cut; None if it does not have the factor."""
    for i, dim in enumerate(dims):
        if cut.factor in dim:
            at = dim.index(cut.factor)
            before, after = (product(factors[f].size for f in part) for part in (dim[:at], dim[at + 1 :]))
            even = is_even(factors[cut.factor].size, cut.outer, cut.unit, degree)
            return Shard(i, product((before, cut.outer)), 1 if even else product((cut.unit, after)))
    return None


def cut_of(dims: Dims, factors: Sequence[Factor], shard: Shard, degree: int) -> Cut | None:
    """The cut of a loop that a split dim is; None if it is not one of these loops that is split."""
    dim = dims[shard.dim]
    found = loop_at(dim, factors, shard.outer)
    if found is None:
        return None
    at, outer = found
    after = product(factors[f].size for f in dim[at + 1 :])
    even = is_even(product(factors[f].size for f in dim), shard.outer, shard.unit, degree)
    return _within(Cut(dim[at], outer), factors[dim[at]].size, after, None if even else shard.unit, degree)


def loop_at(dim: Product, factors: Sequence[Factor], outer: Dim) -> tuple[int, Dim] | None:
    """Which loop of a dim goes on within each of its `outer` equal runs: its place among them, and its runs of these.

    None if the runs do not begin where a loop, or an equal part of one, does.
    """
    before: Dim = 1
    for at, factor in enumerate(dim):
        size, own = factors[factor].size, ratio(outer, before)
        if own is None:
            return None
        rest = ratio(size, own)
        if rest is not None and rest != 1:
            return at, own
        before = product((before, size))
    return None


def _within(cut: Cut, size: Dim, after: Dim, unit: Dim | None, degree: int) -> Cut | None:
    """The cut in units of the dim (None: even), as one in units of the loop, `after` elements of the dim each."""
    if unit is None:
        return cut if is_even(size, cut.outer, 1, degree) else None
    own = ratio(unit, after)
    if own is None or lengths(size, cut.outer, own, degree) is None:
        return None
    return Cut(cut.factor, cut.outer, own)


def span(size: Dim, outer: Dim, unit: Dim, degree: int, place: int) -> tuple[int, int]:
    """The elements ``[start, stop)`` of the split part that a place has, of a loop or dim without the batch."""
    parts = lengths(size, outer, unit, degree)
    assert parts is not None  # only legal splits are chosen
    counts = [part for part in parts if isinstance(part, int)]
    return sum(counts[:place]), sum(counts[: place + 1])


def local_size(size: Dim, outer: Dim, unit: Dim, degree: int, place: int) -> Dim:
    """What a place has of a split loop or dim of `size`."""
    parts = lengths(size, outer, unit, degree)
    assert parts is not None  # only legal splits are chosen
    return product((outer, parts[place]))


def local_shape(shape: Sequence[Dim], how: TensorPlacement, degree: int, place: int) -> tuple[Dim, ...]:
    """The shape that a value of `shape` has at a place of the axis."""
    split = as_shard(how)
    if split is None:
        return tuple(shape)
    own = local_size(shape[split.dim], split.outer, split.unit, degree, place)
    return tuple(own if i == split.dim else size for i, size in enumerate(shape))


def as_shard(how: TensorPlacement | None) -> Shard | None:
    """The split that leaves as much of a value at each place as `how` does: of rows that are dispatched, if evenly."""
    match how:
        case Own(int(dim)) | Dispatched(_, int(dim)):
            return Shard(dim)
        case Dispatched():
            return Shard(0)
    return how if isinstance(how, Shard) else None


def share(shape: Sequence[Dim], how: TensorPlacement | None, degree: int) -> float:
    """The part of the elements of a value that the fullest place has."""
    split = as_shard(how)
    return 1.0 if split is None else part(shape[split.dim], split.outer, split.unit, degree)


def part(size: Dim, outer: Dim, unit: Dim, degree: int) -> float:
    """The part of a split loop or dim that the fullest place has."""
    count = _units(size, outer, unit)
    return -(-count // degree) / count if isinstance(count, int) else 1 / degree


def _units(size: Dim, outer: Dim, unit: Dim) -> Dim | None:
    """How many units the split part has; None if it is not whole units."""
    rest = ratio(size, outer)
    return None if rest is None else ratio(rest, unit)
