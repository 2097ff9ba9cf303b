"""Tensor placements: how every value of the segmented step is placed on the mesh's data axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Segmented


@dataclass(frozen=True, slots=True)
class Sharded:
    """The segmented step with a placement on `axis` for every value.

    `between` has those that pass between segments, by name in the whole graph; ``inside[i]`` those of body i, by
    local name, forward and backward. Microbatches are the same split in time, so the placements say how they join,
    too. Where tensors are split inside segments, it is the whole step that was judged: nothing is said of the bodies.
    `numbering` are those that number the samples of a microbatch, from 0.
    """

    segmented: Segmented
    axis: str
    between: Mapping[str, TensorPlacement]
    inside: tuple[Mapping[str, TensorPlacement], ...]
    numbering: tuple[str, ...] = ()

    def of(self, segmented: Segmented) -> Sharded:
        """The same placements between the segments of what one place of an axis inside segments runs."""
        return Sharded(segmented, self.axis, self.between, ({},) * len(segmented.bodies), self.numbering)

    def __str__(self) -> str:
        """A line a value that passes between segments."""
        return "\n".join(f"{name}: {placement} on {self.axis}" for name, placement in self.between.items())
