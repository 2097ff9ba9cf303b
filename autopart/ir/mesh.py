"""The device mesh: named axes over ranks, row-major in the order written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, prod

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes known today, in default order (tp varies fastest)."""

INSIDE = ("tp", "ep", "cp", "dp")
"""The axes that split tensors inside segments, in the order in which they are placed: the fastest links first.

``dp`` is one of them where the samples of the batch compute together (`Mesh.coupled`).
"""


Inner = tuple[tuple[str, int], ...]
"""Axes that split tensors inside segments, in the default order, with their sizes; empty for none."""

Sizes = Mapping[str, int | Sequence[int]]
"""What each axis is to have: a number, or for ``dp`` the shares of the batch that its places take, as ``(3, 1)``.

For ``pp`` it may be how many data ranks each pipeline rank has, as ``(2, 1, 1)``.
"""

Span = tuple[int, int]
"""Samples of a batch: the first, and how many."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names with their sizes. Rank numbers are row-major: the last axis varies fastest.

    The batch is cut over ``dp``, unless its samples compute together (`coupled`): then every rank of dp is given the
    whole batch, and dp splits the samples inside segments, with collectives where they meet. Where the parts of the
    batch are unequal, `shares` has what each place of dp takes, in proportion, in lowest terms.

    Where pipeline ranks differ in width, `widths` has how many data ranks each has, and the only axis with a size is
    ``pp``; ranks are numbered pipeline rank by pipeline rank. The batch is then cut into microbatches first, and each
    of these over the data ranks of a stage, so that stages of unlike width have the same microbatches.
    """

    axes: tuple[tuple[str, int], ...]
    coupled: bool = False
    shares: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh: an axis is named twice in {names}")
        for name, size in self.axes:
            if name not in AXES:
                raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: the size of {name!r} must be a whole number of at least 1, not {size!r}")
        self._check_shares()
        self._check_widths()

    def _check_widths(self) -> None:
        widths = self.widths
        if widths and not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in widths):
            raise ValueError(f"mesh: the widths of 'pp' must be whole numbers of at least 1, not {widths!r}")
        if widths and (self.axes != (("pp", len(widths)),) or len(set(widths)) == 1):
            beside = ", ".join(name for name, _ in self.axes if name != "pp")
            raise ValueError(
                f"mesh: pipeline ranks of {' and '.join(map(str, widths))} data ranks go with no other axis yet, but "
                f"the mesh has {beside}; give pp as a number beside it"
                if beside
                else f"mesh: widths {widths} are not those of pp={self.degree('pp')}, unequal"
            )
        if widths and self.coupled:
            raise ValueError(
                f"mesh: the samples of this step's batch compute together, which pipeline ranks of unlike width, "
                f"{widths}, cannot do yet; give pp and dp as numbers"
            )

    def _check_shares(self) -> None:
        shares = self.shares
        if shares and not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shares):
            raise ValueError(f"mesh: the shares of 'dp' must be whole numbers of at least 1, not {shares!r}")
        if shares and (len(shares) != self.degree("dp") or gcd(*shares) > 1 or len(set(shares)) == 1):
            raise ValueError(f"mesh: shares {shares} are not those of dp={self.degree('dp')}, unequal, in lowest terms")
        if shares and self.coupled:
            raise ValueError(
                f"mesh: the samples of this step's batch compute together, so dp has equal parts of them, not "
                f"{shares}; give dp as a number"
            )

    @classmethod
    def of(cls, sizes: Sizes) -> Mesh:
        """A mesh from a mapping, in the order written; ``{"dp": (3, 1)}`` are two places with unequal shares.

        ``{"pp": (2, 1)}`` are two pipeline ranks, of two data ranks and of one.
        """
        several = {name: tuple(size) for name, size in sizes.items() if isinstance(size, tuple | list)}
        if odd := [name for name in several if name not in ("pp", "dp")]:
            raise ValueError(
                f"mesh: the size of {odd[0]!r} must be a whole number, not {several[odd[0]]}; 'dp' has shares, 'pp' "
                "widths"
            )
        axes = tuple((name, len(several[name]) if name in several else size) for name, size in sizes.items())
        made, widths = cls(axes).sharing(several.get("dp", ())), several.get("pp", ())  # type: ignore[arg-type]
        return made.wide(widths) if widths else made

    def wide(self, widths: Sequence[int]) -> Mesh:
        """The mesh whose pipeline ranks have so many data ranks each; of equal ones it is one with an axis dp."""
        if len(set(widths)) == 1 and self.axes == (("pp", len(widths)),) and isinstance(widths[0], int):
            return replace(self, axes=(*self.axes, ("dp", widths[0])) if widths[0] != 1 else self.axes)
        return replace(self, widths=tuple(widths))

    def sharing(self, shares: Sequence[int]) -> Mesh:
        """The mesh whose places of dp take these shares of the batch, empty for equal ones."""
        if not shares or not all(isinstance(n, int) for n in shares):
            return replace(self, shares=tuple(shares))
        common = gcd(*shares)
        return replace(self, shares=tuple(n // common for n in shares) if len(set(shares)) > 1 else ())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.widths) or prod(size for _, size in self.axes)

    def degree(self, axis: str) -> int:
        """The size of an axis, 1 for one that is not there.

        Raises ValueError for ``dp`` where pipeline ranks differ in it: there `width` has that of each.
        """
        if axis == "dp" and self.widths:
            raise ValueError(f"mesh: {self} has no one size of dp: its pipeline ranks differ in width")
        return dict(self.axes).get(axis, 1)

    def width(self, column: int) -> int:
        """The data ranks of a pipeline rank."""
        return self.widths[column] if self.widths else self.degree("dp")

    @property
    def data(self) -> int:
        """The data ranks of the pipeline rank that has most."""
        return max(self.widths) if self.widths else self.degree("dp")

    def column(self, column: int) -> tuple[int, ...]:
        """The ranks of a pipeline rank."""
        if self.widths:
            first = sum(self.widths[:column])
            return tuple(range(first, first + self.widths[column]))
        return tuple(rank for rank in range(self.size) if self.coordinate(rank).get("pp", 0) == column)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return (*(name for name, _ in self.axes), *("dp",) * bool(self.widths))

    @property
    def sizes(self) -> dict[str, int | tuple[int, ...]]:
        """The size of each axis, of pp the widths where they differ."""
        return {"pp": self.widths} if self.widths else dict(self.axes)

    @property
    def parts(self) -> int:
        """The number of parts into which the batch is cut, before these are cut into microbatches."""
        return 1 if self.coupled or self.widths else self.degree("dp")

    def part(self, rank: int) -> int:
        """The part of the batch that a rank has."""
        return 0 if self.coupled or self.widths else self.coordinate(rank).get("dp", 0)

    @property
    def widest(self) -> int:
        """Over how many data ranks a microbatch of a part of the batch is cut at most."""
        return max(self.widths, default=1)

    def spans(self, rank: int, shares: Sequence[int], microbatches: int) -> tuple[Span, ...]:
        """The samples of the batch that a rank has in each microbatch; `shares` are those of each part of the batch."""
        part, here = self.part(rank), self.coordinate(rank)
        place, width = (here["dp"], self.widths[here["pp"]]) if self.widths else (0, 1)
        whole = spans_of(sum(shares[:part]), shares[part], microbatches)
        return tuple(spans_of(first, count, width)[place] for first, count in whole)

    def dealt(self, batch: int) -> tuple[int, ...]:
        """The samples of each part of a batch, by the largest remainders; of equal parts the first ones are larger."""
        if not self.shares:
            return pieces(batch, self.parts)
        weights, whole = self.shares, sum(self.shares)
        found = [batch * each // whole for each in weights]
        order = sorted(range(len(weights)), key=lambda part: (-(batch * weights[part] % whole), part))
        for part in order[: batch - sum(found)]:
            found[part] += 1
        return tuple(found)

    def least(self, count: int) -> int:
        """A batch of which each part has at least `count` samples, the smallest but where parts are unequal.

        Where pipeline ranks differ in width, each data rank of the widest.
        """
        return count * (sum(self.shares) or self.parts * self.widest)

    @property
    def inside(self) -> dict[str, int]:
        """The axes that split tensors inside segments, in the order of `INSIDE`, with their sizes."""
        found = {axis: self.degree(axis) for axis in INSIDE if axis != "dp" or self.coupled}
        return {axis: size for axis, size in found.items() if size > 1}

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank sits on each axis."""
        for column, width in enumerate(self.widths):
            if rank < width:
                return {"pp": column, "dp": rank}
            rank -= width
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate (axes left out count as 0)."""
        if self.widths:
            column, place = coordinate.get("pp", 0), coordinate.get("dp", 0)
            assert place < self.widths[column], f"pipeline rank {column} has {self.widths[column]} data ranks"
            return sum(self.widths[:column]) + place
        number = 0
        for name, size in self.axes:
            number = number * size + coordinate.get(name, 0)
        return number

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` only, in order of their place on it, `rank` among them."""
        here = self.coordinate(rank)
        if self.widths:
            wide = [column for column, width in enumerate(self.widths) if here["dp"] < width]
            return self.column(here["pp"]) if axis == "dp" else tuple(self.rank({**here, "pp": c}) for c in wide)
        return tuple(self.rank({**here, axis: place}) for place in range(self.degree(axis)))

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of those that have the same stages and the same samples."""
        here = self.coordinate(rank)
        return not any(here[axis] for axis in self.inside)

    def __str__(self) -> str:
        if self.widths:
            return f"pp={len(self.widths)} x dp={' then '.join(map(str, self.widths))}"
        shares = ":".join(map(str, self.shares))
        return " x ".join(f"{n}={shares if shares and n == 'dp' else size}" for n, size in self.axes) or "1 device"


def spans_of(first: int, total: int, parts: int) -> tuple[Span, ...]:
    """The pieces into which so many samples from `first` on are cut, as `pieces` cuts."""
    sizes = pieces(total, parts)
    return tuple(zip(accumulate(sizes[:-1], initial=first), sizes, strict=True))


def pieces(total: int, parts: int) -> tuple[int, ...]:
    """Sizes as ``torch.tensor_split`` cuts, larger parts first."""
    size, larger = divmod(total, parts)
    return tuple(size + (part < larger) for part in range(parts))
