"""What a caller asks of the solver: the pins by name, and the request with its pins resolved, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypedDict

from autopart import schedules
from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Inner, Mesh, Sizes
from autopart.ir.plan_text import format_bytes
from autopart.ir.tensor_plan import TensorPlan
from autopart.schedules.lookups import looking_up
from autopart.solver.columns import Columns
from autopart.solver.families import LEAN, WHOLE
from autopart.solver.presets import Pinned, Rules, offloaded
from autopart.solver.variants import Variant

FEW = 8
"""With more devices than these a free mesh has pipeline ranks of one width: there are too many ways to choose."""


class Pins(TypedDict, total=False):
    """What a caller may pin of a plan, and say of the search; see `choose`."""

    cluster: Cluster | None
    devices: int | None
    mesh: Sizes | Mesh | None
    stages: int | Sequence[str] | None
    placement: Pinned
    schedule: str | Schedule | None
    microbatches: int | None
    memory: str | int | None
    recompute: bool | Sequence[str] | None
    offload: bool
    chunks: Mapping[str, int] | None
    precision: str | None
    objective: str
    time_limit: float | None
    progress: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its pins resolved; None where the solver chooses.

    `variants` are what segments cost with their tensors placed in one way or another; `number` is that of the variant
    which `costs`, `recomputed` and `recompute` are of.
    """

    variants: tuple[Variant, ...]
    batch: int
    cluster: Cluster
    devices: int
    mesh: Mesh | None
    stages: int | None
    starts: tuple[int, ...]  # segments where a stage must begin
    placements: tuple[Rules, ...]  # alternatives, the preferred first
    schedules: tuple[str, ...]  # by `schedules.spell`: alternatives where they are searched, the usual first
    microbatches: int | None
    memory: int  # bytes per device
    optimizer_ratio: float
    degrees: Mapping[Inner, Callable[[], tuple[Variant, ...]]]  # what finds the variants of other axes inside segments
    wide: bool  # whether those axes are looked at, and not only for ways out
    tables: bool = False  # whether tables of actions are made, too
    forwards_first: bool = False  # whether all forwards must come before all backwards
    ranks: int | None = None  # the pipeline ranks that the schedule is for, where it is for no other number
    output: SegmentCost | None = None  # the output layer, where the schedule splits it over the pipeline ranks
    lookup: SegmentCost | None = None  # that in the input embedding, where it is split over them too
    free: bool = False  # whether the solver chooses what is recomputed
    # what finds variants with modules in chunks, by the argument that asks for them
    chunked: tuple[tuple[str, Callable[[], tuple[Variant, ...]]], ...] = ()
    number: int = 0
    widths: bool = False  # whether a free mesh may have pipeline ranks of unlike width
    pinned: bool = False  # whether the memory is, and so the same for devices that have more
    per_layer: bool = False  # whether single segments get a lighter placement in the end

    @property
    def costs(self) -> tuple[SegmentCost, ...]:
        """What segments cost."""
        return self.variants[self.number].costs

    @property
    def recomputed(self) -> tuple[SegmentCost | None, ...]:
        """What segments cost recomputed, None where they keep no less."""
        return self.variants[self.number].again

    @property
    def recompute(self) -> tuple[str, ...]:
        """The segments whose forward runs again in their backward, as `costs` says."""
        return self.variants[self.number].recompute

    @property
    def tensor(self) -> TensorPlan | None:
        """What is decided inside segments."""
        return self.variants[self.number].tensor

    def at(self, number: int) -> Request:
        """The request with the costs of one variant."""
        return self if number == self.number else replace(self, number=number)

    def variants_on(self, mesh: Mesh, microbatches: int | None = None) -> tuple[int, ...]:
        """The variants for a mesh, and for so many microbatches, by number."""
        return tuple(
            number
            for number, variant in enumerate(self.variants)
            if variant.on(mesh) and (microbatches is None or variant.fits(mesh, self.batch, microbatches))
        )

    def with_inner(self, inner: Inner) -> Request:
        """The request with the variants of some more axes inside segments."""
        return replace(self, variants=(*self.variants, *self.degrees[inner]()))

    def again(self, places: Collection[int]) -> Request:
        """The request with some more segments recomputed, in the variant at hand."""
        changed = self.variants[self.number].recomputing(places)
        return replace(self, variants=(*self.variants[: self.number], changed, *self.variants[self.number + 1 :]))

    def allows(self, stages: int) -> bool:
        """Whether the pinned stages allow so many; names on a pinned mesh allow more stages than they begin."""
        if self.mesh is not None and self.starts and self.stages is not None:
            return self.stages <= stages
        return self.stages in (None, stages)

    def placements_on(self, dp: int) -> tuple[Rules, ...]:
        """The placements that differ on so many data ranks: on a single one, by what is on the host only."""
        if dp > 1:
            return self.placements
        known: dict[object, Rules] = {}
        for rules in self.placements:
            known.setdefault(tuple((pattern, each.on("dp").on_host) for pattern, each in rules), rules)
        return tuple(known.values())

    def offloading(self) -> Request:
        """The request with each placement also with the optimizer on the host, and with its gradients there too."""
        return replace(self, placements=offloaded(self.placements))

    def spare(self, columns: Columns) -> tuple[int, ...]:
        """The bytes by which the devices of each column have more than `memory`: none where that is pinned."""
        if self.pinned:
            return (0,) * len(columns.clusters)
        return tuple(each.memory - self.cluster.memory for each in columns.clusters)

    @property
    def room(self) -> str:
        """The memory of a device, to read."""
        least, most = self.memory, max(group.device.memory for group in self.cluster.groups)
        several = not self.pinned and most != self.cluster.memory
        return f"{format_bytes(least)} to {format_bytes(most)}" if several else format_bytes(least)

    def samples(self, mesh: Mesh, microbatches: int) -> int:
        """The samples of the largest of so many microbatches of each data rank."""
        return max(self.taken(mesh, microbatches, column) for column in range(len(mesh.widths) or 1))

    def taken(self, mesh: Mesh, microbatches: int, column: int) -> int:
        """Likewise of the data ranks of one pipeline rank."""
        most = max(self.each(mesh, microbatches))
        return -(-most // mesh.widths[column]) if mesh.widths else most

    def each(self, mesh: Mesh, microbatches: int) -> tuple[int, ...]:
        """For every data rank the samples of the largest of its microbatches."""
        return tuple(-(-taken // microbatches) for taken in mesh.dealt(self.batch))

    @property
    def searched(self) -> bool:
        """Whether the schedule is searched for."""
        return len(self.schedules) > 1

    @property
    def lean(self) -> tuple[str, ...]:
        """Of the schedules those that hold little, for each number of stages a rank if that is pinned; else the usual.

        They say whether something fits.
        """
        names = LEAN if self.stages is not None else LEAN[:4]
        return tuple(text for text in self.schedules if text in names) or self.schedules[:1]

    def scheduled(self, text: str, ranks: int, microbatches: int) -> Schedule:
        """The schedule of a text on so many pipeline ranks; ValueError where it cannot be."""
        made = schedules.executable(schedules.make(text, ranks=ranks, microbatches=microbatches))
        return looking_up(made, wanted=self.lookup is not None)

    def stages_on(self, ranks: int) -> int:
        """How many stages there are on so many pipeline ranks; ValueError where the schedule cannot be on them.

        Where it is searched for, as many as the pins need if each rank may have equally many, else one a rank.
        """
        if self.searched:
            needed = self.stages or ranks
            needed += -needed % ranks if self.starts else 0
            return needed if ranks > 1 and needed in range(ranks, 4 * ranks + 1, ranks) else ranks
        text = self.schedules[0]
        return ranks if text in WHOLE else self.scheduled(text, ranks, self.microbatches or 4 * ranks).stages

    def recomputing(self) -> Request:
        """The request with every segment recomputed that keeps less by it."""
        return replace(self, variants=tuple(variant.everything() for variant in self.variants))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments."""
        return tuple(cost.name for cost in self.costs)


def inside(mesh: Mesh) -> int:
    """The number of places over which a mesh splits the tensors inside segments."""
    return prod(mesh.inside.values())
