"""Variants: what segments cost with the tensors inside them placed in one way or another on a tensor axis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import AXES, Inner, Mesh, pieces
from autopart.ir.tensor_plan import TensorPlan

Costed = tuple[TensorPlan | None, Sequence[SegmentCost], Sequence[SegmentCost]]
"""What was decided inside segments, None where nothing is split, and what they cost then: plain, and recomputed."""

Degrees = Mapping[Inner, Callable[[], Sequence[Costed]]]
"""By axes inside segments, what finds the placements that come into question on them. Called where it can be of use."""

Chunked = Mapping[str, Callable[[], Sequence[Costed]]]
"""By the argument that asks for it, what finds the costs with some module in chunks. It is called for ways out."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What segments cost where `tensor` was decided inside them, None where nothing is split there.

    `recompute` names those whose forward runs again in their backward, as `costs` says; `again` is what each costs
    then, None where it keeps no less.
    """

    tensor: TensorPlan | None
    costs: tuple[SegmentCost, ...]
    again: tuple[SegmentCost | None, ...]
    recompute: tuple[str, ...] = ()

    @classmethod
    def of(cls, placed: Costed, *, wanted: Collection[str], everything: bool, batch: int) -> Variant:
        """The variant in which the segments that are `wanted` are recomputed, or all that keep less by it.

        Whether they do is asked at `batch` samples.
        """
        tensor, plain, again = placed
        known: dict[tuple[object, object], bool] = {}

        def less(p: SegmentCost, a: SegmentCost) -> bool:
            key = p.saved_bytes, a.saved_bytes  # equal layers share them
            if key not in known:
                known[key] = a.at(batch).saved_bytes < p.at(batch).saved_bytes
            return known[key]

        pairs = list(zip(plain, again, strict=True))
        made = cls(
            tensor,
            tuple(a if p.name in wanted else p for p, a in pairs),
            tuple(a if less(p, a) else None for p, a in pairs),
            tuple(p.name for p in plain if p.name in wanted),
        )
        return made.everything() if everything else made

    @property
    def inner(self) -> Inner:
        """The axes over which tensors are split."""
        axes = self.tensor.axes if self.tensor is not None else ()
        return tuple(sorted(((each.axis, each.degree) for each in axes), key=lambda pair: AXES.index(pair[0])))

    def on(self, mesh: Mesh) -> bool:
        """Whether it is for the axes inside segments that a mesh has, or for a mesh without one."""
        return mesh.inside == dict(self.inner)

    def fits(self, mesh: Mesh, batch: int, microbatches: int) -> bool:
        """Whether each of so many microbatches of every data rank can be split over the places, as `Plan.fits` says."""
        if self.tensor is None or (multiple := self.tensor.of_samples) == 1:
            return True
        shares = {*mesh.dealt(batch)}
        sizes = (pieces(share, microbatches)[at] for share in shares for at in (0, -1))
        return all(size > 0 and size % multiple == 0 for size in sizes)

    def recomputing(self, places: Collection[int]) -> Variant:
        """The variant with some more segments recomputed."""
        pairs = enumerate(zip(self.costs, self.again, strict=True))
        costs = tuple((again or plain) if i in places else plain for i, (plain, again) in pairs)
        names = tuple(c.name for i, c in enumerate(self.costs) if i in places or c.name in self.recompute)
        return replace(self, costs=costs, recompute=names)

    def everything(self) -> Variant:
        """The variant with every segment recomputed that keeps less by it."""
        return self.recomputing([i for i, again in enumerate(self.again) if again is not None])
