"""The plan: everything that was decided about a training step, as frozen data that a file can hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopart.ir import explanation, plan_text
from autopart.ir.choice import Alternative, SegmentFact
from autopart.ir.cost import PRECISIONS
from autopart.ir.document import Document
from autopart.ir.mesh import Mesh, pieces
from autopart.ir.placement import Placement
from autopart.ir.state import BUCKET
from autopart.ir.tensor_plan import TensorPlan

VERSION = 6

OUTPUT = "<output layer>"
"""Among the cuts of a segmented model: the last segment is the product with the vocabulary and what comes after it."""

INPUT = "<input embedding>"
"""Among the cuts of a segmented model: the first segment is the lookup in the input embedding, if it can be split."""

INPUTS = ("global", "local")
"""What a rank may pass to a call: the whole batch, as every other rank does, or its data rank's own samples."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous run of segments and the ranks that hold it (several where the batch is split over data ranks).

    A pipeline rank may hold several stages: then they have the same ranks.
    """

    segments: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Predicted peak bytes of each rank that holds a stage, by state, with all the stages that it holds."""

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0  # those saved for backward, of all microbatches in flight at once
    transient: int = 0  # of the largest segment: gathered parameters, gradients not yet reduced, what is recomputed
    host: int = 0  # on the host of each rank, and so no part of its total

    @property
    def total(self) -> int:
        """The sum over the states."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.transient


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan is expected to cost."""

    step_seconds: float
    bubble: float  # the part of the step that ranks wait for each other, 0 to 1
    stage_seconds: tuple[float, ...]  # forward and backward of one microbatch, a stage; of an output layer, its part
    memory: tuple[StageMemory, ...]  # a stage
    sent: tuple[tuple[tuple[str, int], ...], ...] = ()  # a rank: (collective, bytes sent per step)
    samples_per_second: float = 0.0  # of forwards alone, batches following each other without a pause; else 0

    @property
    def peak(self) -> int:
        """The bytes of the fullest rank."""
        return max(need.total for need in self.memory)

    def sent_by(self, rank: int) -> dict[str, int]:
        """Bytes sent per step by a rank, by collective."""
        return dict(self.sent[rank])


@dataclass(frozen=True, slots=True)
class Plan:
    """Mesh, stages, placements, schedule and microbatches, what they are predicted to cost, and how good the choice is.

    Raises ValueError where the parts contradict each other.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    placements: tuple[tuple[str, Placement], ...]  # (pattern, placement), the first match holds, the last is '*'
    schedule: str  # as `schedules.spell` writes it: a name, with options if any, or a table of actions as CSV
    microbatches: int
    recompute: tuple[str, ...]  # the segments whose backward computes their forward again
    batch: int  # the whole batch of the sample call
    prediction: Prediction
    optimality: str
    notes: tuple[str, ...]
    fingerprint: str  # of the model that the plan was made for
    inputs: str = "global"  # what each rank passes: the whole batch, or ("local") the samples of its data rank
    mirrors: tuple[tuple[int, ...], ...] = ()  # of further copies of the model, the pp rank of each stage
    bucket: int = BUCKET  # bytes up to which parameters and gradients of layers in a row travel together
    tensor: TensorPlan | None = None  # what is split inside segments, where the mesh has an axis for that
    barriers: int = 0  # where the last segment, the output layer, is split over the pp ranks: those of the schedule
    lookup: bool = False  # whether the first segment, the lookup in the input embedding, is split over them too
    slices: int = 1  # the pieces into which the schedule cuts the sequence
    lengths: tuple[int, ...] = ()  # the tokens of each; without them, as even as can be
    precision: str | None = None  # what predicted memory takes the optimizer to keep, one of `PRECISIONS`
    front: int = 0  # in a loop that computes the first stages, which train nothing, a batch ahead: how many these are
    chunks: tuple[
        tuple[str, int], ...
    ] = ()  # (pattern of modules, chunks of their tokens at most), the first match holds
    helpers: tuple[int, ...] = ()  # the further pp ranks that hold these stages, to compute them where they would wait
    devices: tuple[int, ...] = ()  # of a cluster of unlike ones, the number of each rank's; empty where all count alike
    alternatives: tuple[Alternative, ...] = ()  # the runners-up, one for each kind of choice
    facts: tuple[SegmentFact, ...] = ()  # what segments cost at the plan's microbatches, equal ones together
    took: float = field(default=0.0, compare=False)  # seconds of the search; no part of the plan, nor of its file

    def __post_init__(self) -> None:
        self._check_stages()
        names = self.segments
        if len(set(names)) != len(names) or not all(stage.segments for stage in self.stages):
            raise ValueError("plan: every stage needs a segment, and every segment exactly one stage")
        if unknown := [name for name in self.recompute if name not in names]:
            raise ValueError(
                f"plan: recompute names {', '.join(map(repr, unknown))}, but the segments are {list(names)}"
            )
        if not self.placements or self.placements[-1][0] != "*":
            raise ValueError("plan: the last placement pattern must be '*'")
        if self.mesh.inside != {each.axis: each.degree for each in self.axes_inside}:
            inside = " and ".join(f"{each.axis}={each.degree}" for each in self.axes_inside) or "no axis"
            coupled = ", whose samples compute together" if self.mesh.coupled else ""
            raise ValueError(f"plan: inside segments it is for {inside}, but its mesh is {self.mesh}{coupled}")
        if self.inputs not in INPUTS:
            raise ValueError(f"plan: inputs must be one of {', '.join(INPUTS)}, not {self.inputs!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"plan: precision must be None or 'mixed', not {self.precision!r}")
        if self.microbatches < 1 or min(self.mesh.dealt(self.batch)) < self.microbatches * self.mesh.widest:
            raise ValueError(
                f"plan: a batch of {self.batch} cannot be cut into {self.microbatches} microbatches on each data rank "
                f"of {self.mesh}"
            )
        if not len(self.prediction.memory) == len(self.prediction.stage_seconds) == len(self.stages):
            raise ValueError(f"plan: the prediction must speak of {len(self.stages)} stages")
        if self.devices and (len(self.devices) != self.mesh.size or len({*self.devices}) != self.mesh.size):
            raise ValueError(f"plan: {self.mesh.size} ranks cannot be on the devices {self.devices}, one each")
        if self.prediction.sent and len(self.prediction.sent) != self.mesh.size:
            raise ValueError(f"plan: bytes sent must be given for all {self.mesh.size} ranks or for none")

    def _check_stages(self) -> None:
        """Raise ValueError unless stages, and what the schedule asks to be beside them, are where they can be."""
        columns = [self.mesh.column(column) for column in range(self.mesh.degree("pp"))]
        for number, stage in enumerate(self.stages):
            if stage.ranks not in columns:
                raise ValueError(
                    f"plan: stage {number} is on the ranks {stage.ranks}; on a mesh of {self.mesh} a stage is on "
                    f"{' or '.join(map(str, columns))}"
                )
        if idle := [column for column in columns if column not in [stage.ranks for stage in self.stages]]:
            raise ValueError(f"plan: no stage is on the ranks {idle[0]} of the mesh {self.mesh}")
        for copy in self.mirrors:
            if len(copy) != len(self.stages) or not set(copy) <= set(range(len(columns))):
                raise ValueError(
                    f"plan: a further copy of the model is on the pp ranks {copy}; it has {len(self.stages)} stages, "
                    f"each on one of the {len(columns)} ranks"
                )
        if self.barriers not in (0, 1, 2) or (self.barriers and (self.mirrors or len(self.stages) != len(columns))):
            raise ValueError(
                f"plan: an output layer split over the pipeline ranks by {self.barriers} barriers needs one stage a "
                "rank, one copy of the model, and one barrier or two"
            )
        if self.lookup and not self.barriers:
            raise ValueError("plan: the input embedding is split over the pipeline ranks where the output layer is")
        if self.slices < 1 or len(self.lengths) not in (0, self.slices):
            raise ValueError(f"plan: {self.slices} slices of the sequence cannot have the lengths {self.lengths}")
        check_chunks(self.chunks)
        known = all(0 <= rank < len(columns) and rank != self.place[0] for rank in self.helpers)
        if not (known and 0 <= self.front < len(self.stages) and (self.front or not self.helpers)):
            raise ValueError(
                f"plan: the pp ranks {self.helpers} cannot compute the first {self.front} stages for rank "
                f"{self.place[0]}"
            )
        if self.chunks and (self.slices > 1 or self.barriers or self.front):
            raise ValueError(
                f"chunks: they are not done yet beside {plan_text.schedule(self.schedule)}: pin schedule='1f1b', say, "
                "or leave chunks out"
            )
        if self.slices > 1 and self.tensor is not None:
            raise ValueError(
                f"schedule: {plan_text.schedule(self.schedule)} cuts the sequence into {self.slices} slices, which is "
                "not done yet where a mesh axis splits tensors inside segments; pin schedule='1f1b', say, or pp and dp"
            )

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments of all stages, in order."""
        return tuple(name for stage in self.stages for name in stage.segments)

    @property
    def place(self) -> tuple[int, ...]:
        """The pp rank of each stage, in the first copy of the model."""
        return tuple(self.mesh.coordinate(stage.ranks[0]).get("pp", 0) for stage in self.stages)

    def places(self, copies: int, slices: int = 1, *, helpers: int = 0) -> tuple[int, ...]:
        """The pp rank of each stage of the first `copies` copies of the model, one copy's after the other's.

        Those of the slices of the sequence likewise. The parts of an output layer that is split over the pp ranks are
        further stages, and so are, after them, those of an input embedding, and the copies of the first stages that the
        first `helpers` have.
        """
        parts = self.place * (bool(self.barriers) + self.lookup)
        fronts = tuple(rank for rank in self.helpers[:helpers] for _ in range(self.front))
        return sum(self.mirrors[: copies - 1], self.place) * slices + parts + fronts

    def together(self, stage: int) -> tuple[int, ...]:
        """The stages that are held where a stage is in the first copy, by whichever copy."""
        every = (self.place, *self.mirrors)
        return tuple(s for s in range(len(self.stages)) if any(at[s] == self.place[stage] for at in every))

    @property
    def axes_inside(self) -> tuple[TensorPlan, ...]:
        """What is decided on each axis that splits tensors inside segments, in the order in which they are placed."""
        return self.tensor.axes if self.tensor is not None else ()

    @property
    def inside(self) -> int:
        """The number of places of the axes that split the tensors inside segments, 1 without one."""
        return self.tensor.places if self.tensor is not None else 1

    def place_inside(self, rank: int) -> int:
        """The place of a rank on the axes that split the tensors inside segments, of all of them together."""
        return self.tensor.place(self.mesh.coordinate(rank)) if self.tensor is not None else 0

    def places_inside(self, rank: int) -> dict[str, int]:
        """The place of a rank on each of these axes."""
        here = self.mesh.coordinate(rank)
        return {each.axis: here[each.axis] for each in self.axes_inside}

    @property
    def largest(self) -> int:
        """The samples of the largest microbatch of the plan's batch."""
        most = -(-max(self.mesh.dealt(self.batch)) // self.microbatches)
        return -(-most // min(self.mesh.widths, default=1))

    def fits(self, shares: Sequence[int] | None = None) -> bool:
        """Whether each microbatch can be split over the places inside segments as the plan has it.

        `shares` are the samples of every data rank, by default those of the plan's batch.
        """
        multiple = self.tensor.of_samples if self.tensor is not None else 1
        shares = shares or self.mesh.dealt(self.batch)
        sizes = (size for share in shares for size in pieces(share, self.microbatches))
        return multiple == 1 or all(size > 0 and size % multiple == 0 for size in sizes)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The calls of modules at which stages begin, but for the first; the model segmented with them has the stages.

        And `OUTPUT` where the output layer is split, `INPUT` where the input embedding is.
        """
        names = tuple(stage.segments[0] for stage in self.stages[1:])
        return (*names, *(OUTPUT,) * bool(self.barriers), *(INPUT,) * self.lookup)

    def placement_of(self, name: str) -> Placement:
        """The placement of a parameter or module by its dotted name: that of the first match (`first_match`)."""
        return first_match(self.placements, name)

    def summary(self) -> str:
        """A table of the stages and the predictions, to read."""
        return plan_text.summary(self)

    def explain(self, name: str | None = None) -> str:
        """Why the plan is as it is, to read; of a segment or module by its dotted name, where it is and what it costs.

        Where tensors are split inside segments, also how they are placed there, and what other placements would take.
        Raises ValueError for a name that no segment has, is inside of, or lies in.
        """
        return explanation.explain(self) if name is None else explanation.segment(self, name)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to another, a line a change; empty if nothing does."""
        return plan_text.diff(self, other)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return _document().to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; ValueError says what differs if the text is something else."""
        return _document().from_json(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        _document().save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file; ValueError names the file and what is wrong with it."""
        return _document().load(path)


def check_chunks(chunks: Sequence[tuple[str, int]]) -> None:
    """Raise TypeError or ValueError unless these are patterns of module names, each with at least 2 chunks."""
    for pattern, count in chunks:
        if not isinstance(pattern, str) or isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(
                f"chunks: expected module names with how many chunks their tokens are computed in, such as "
                f"{{'lm_head': 8}}, not {pattern!r}: {count!r}"
            )
        if count < 2:
            raise ValueError(f"chunks: {pattern!r} in {count} chunks; pin at least 2, or leave it out")


def pinned_chunks(chunks: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """A `chunks` pin as a plan has it. Raises TypeError or ValueError for what is none."""
    if chunks is None:
        return ()
    if not isinstance(chunks, Mapping):
        raise TypeError(f"chunks: expected a mapping such as {{'lm_head': 8, 'h.*.mlp': 4}}, not {chunks!r}")
    made = tuple(chunks.items())
    check_chunks(made)
    return made


def _document() -> Document[Plan]:
    return Document(Plan, "plan", VERSION, sealed=True)


def first_match(placements: tuple[tuple[str, Placement], ...], name: str) -> Placement:
    """The first placement whose pattern matches `name` or a module around it; ValueError if none does."""
    for pattern, placement in placements:
        if pattern == "*" or any(fnmatchcase(candidate, pattern) for candidate in around(name)):
            return placement
    raise ValueError(f"placement: no pattern matches {name!r}; end with '*'")


def around(name: str) -> tuple[str, ...]:
    """What a pattern may match for it to hold for a dotted name: that name and those of the modules around it."""
    parts = name.split(".")
    return tuple(".".join(parts[:length]) for length in range(len(parts), 0, -1))
