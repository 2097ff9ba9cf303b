"""The device mesh: named axes over ranks, row-major in the order written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes known today, in default order (tp varies fastest)."""

INSIDE = ("tp", "ep", "cp", "dp")
"""The axes that split tensors inside segments, in the order in which they are placed: the fastest links first.

``dp`` is one of them where the samples of the batch compute together (`Mesh.coupled`).
"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names with their sizes. Rank numbers are row-major: the last axis varies fastest.

    The batch is cut over ``dp``, unless its samples compute together (`coupled`): then every rank of dp is given the
    whole batch, and dp splits the samples inside segments, with collectives where they meet.
    """

    axes: tuple[tuple[str, int], ...]
    coupled: bool = False

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh: an axis is named twice in {names}")
        for name, size in self.axes:
            if name not in AXES:
                raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: the size of {name!r} must be a whole number of at least 1, not {size!r}")

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """A mesh from a mapping, in the order written."""
        return cls(tuple(sizes.items()))

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
        return " x ".join(f"{name}={size}" for name, size in self.axes) or "1 device"


def pieces(total: int, parts: int) -> tuple[int, ...]:
    """Sizes as ``torch.tensor_split`` cuts, larger parts first."""
    size, larger = divmod(total, parts)
    return tuple(size + (part < larger) for part in range(parts))
