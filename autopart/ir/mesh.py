"""The device mesh: named axes over ranks, row-major in the order written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
"""What each axis is to have: a number, or for ``dp`` the shares of the batch that its places take, as ``(3, 1)``."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names with their sizes. Rank numbers are row-major: the last axis varies fastest.

    The batch is cut over ``dp``, unless its samples compute together (`coupled`): then every rank of dp is given the
    whole batch, and dp splits the samples inside segments, with collectives where they meet. Where the parts of the
    batch are unequal, `shares` has what each place of dp takes, in proportion, in lowest terms.
    """

    axes: tuple[tuple[str, int], ...]
    coupled: bool = False
    shares: tuple[int, ...] = ()

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
        """A mesh from a mapping, in the order written; ``{"dp": (3, 1)}`` are two places with unequal shares."""
        shares = {name: tuple(size) for name, size in sizes.items() if isinstance(size, tuple | list)}
        if odd := [name for name in shares if name != "dp"]:
            raise ValueError(
                f"mesh: the size of {odd[0]!r} must be a whole number, not {shares[odd[0]]}; 'dp' has shares"
            )
        axes = tuple((name, len(shares[name]) if name in shares else size) for name, size in sizes.items())
        return cls(axes).sharing(shares.get("dp", ()))  # type: ignore[arg-type]  # sizes are checked there

    def sharing(self, shares: Sequence[int]) -> Mesh:
        """The mesh whose places of dp take these shares of the batch, empty for equal ones."""
        if not shares or not all(isinstance(n, int) for n in shares):
            return replace(self, shares=tuple(shares))
        common = gcd(*shares)
        return replace(self, shares=tuple(n // common for n in shares) if len(set(shares)) > 1 else ())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.axes)

    def degree(self, axis: str) -> int:
        """The size of an axis, 1 for one that is not there."""
        return dict(self.axes).get(axis, 1)

    @property
    def parts(self) -> int:
        """The number of parts into which the batch is cut."""
        return 1 if self.coupled else self.degree("dp")

    def part(self, rank: int) -> int:
        """The part of the batch that a rank has."""
        return 0 if self.coupled else self.coordinate(rank).get("dp", 0)

    def dealt(self, batch: int) -> tuple[int, ...]:
        """The samples of each part of a batch, by the largest remainders; of equal parts the first ones are larger."""
        weights = self.shares or (1,) * self.parts
        whole = sum(weights)
        found = [batch * each // whole for each in weights]
        order = sorted(range(len(weights)), key=lambda part: (-(batch * weights[part] % whole), part))
        for part in order[: batch - sum(found)]:
            found[part] += 1
        return tuple(found)

    def least(self, count: int) -> int:
        """A batch of which each part has at least `count` samples, the smallest but where parts are unequal."""
        return count * (sum(self.shares) or self.parts)

    @property
    def inside(self) -> dict[str, int]:
        """The axes that split tensors inside segments, in the order of `INSIDE`, with their sizes."""
        found = {axis: self.degree(axis) for axis in INSIDE if axis != "dp" or self.coupled}
        return {axis: size for axis, size in found.items() if size > 1}

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank sits on each axis."""
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate (axes left out count as 0)."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinate.get(name, 0)
        return number

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` only, in order of their place on it, `rank` among them."""
        here = self.coordinate(rank)
        return tuple(self.rank({**here, axis: place}) for place in range(self.degree(axis)))

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of those that have the same stages and the same samples."""
        here = self.coordinate(rank)
        return not any(here[axis] for axis in self.inside)

    def __str__(self) -> str:
        shares = ":".join(map(str, self.shares))
        return " x ".join(f"{n}={shares if shares and n == 'dp' else size}" for n, size in self.axes) or "1 device"


def pieces(total: int, parts: int) -> tuple[int, ...]:
    """Sizes as ``torch.tensor_split`` cuts, larger parts first."""
    size, larger = divmod(total, parts)
    return tuple(size + (part < larger) for part in range(parts))
