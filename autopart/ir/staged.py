"""Stages: the segments dealt to pipeline stages, and what flows between stages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopart.ir.action import Kind
from autopart.ir.dealing import How
from autopart.ir.graph import Value
from autopart.ir.segmented import Phase, Segment, Segmented
from autopart.ir.sharded import Sharded
from autopart.ir.state import State, Unit, used_units


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that stage `source` hands to `target` for each microbatch, all activations or all gradients.

    `deal` says how each is dealt among the data ranks, where the two stages differ in their number.
    """

    source: int
    target: int
    values: tuple[Value, ...]
    deal: tuple[How, ...] = ()

    def nbytes(self, batch: int) -> int:
        """The bytes sent for a microbatch of `batch` samples."""
        return sum(value.nbytes(batch) for value in self.values)


def averaged(buffer: Value) -> bool:
    """Whether a buffer that forwards update is averaged over the data ranks; others are made the largest."""
    return buffer.dtype.is_floating_point or buffer.dtype.is_complex


@dataclass(frozen=True, slots=True)
class Staged:
    """The step cut into stages. ``stages[s]`` are the segments of stage s, in order.

    `backwards` are, by stage, the kinds of actions that perform a backward: B; or, in two, I and W; or all three, where
    microbatches differ. Without it they are B.

    A schedule may place several `copies` of the model, of which a microbatch travels one. They are stages of their own:
    of S stages a copy, stage s of copy c is number c S + s, has the same segments and uses the same units. So are the
    `slices` of the sequence: of S stages, stage s of slice j is number j S + s, on the rank of stage s, whose units it
    uses; a microbatch passes all of them.

    Where the output layer is split over the pipeline ranks, its `parts` are stages behind the others, one a rank: they
    have S and T in place of forward and backward. Where the lookup in the input embedding is, its parts, the
    `lookups`, are the last stages: what they make goes to the first one, which hands them its gradient.

    In a loop that computes the first `front` stages a batch ahead, they have forwards alone, and other pipeline ranks
    may have copies of them, to help: of S stages, front stage j of helper number i is number S + i `front` + j. A
    microbatch passes one of these copies, which hands on what it makes as the front itself does, under its names.
    """

    sharded: Sharded
    stages: tuple[tuple[Segment, ...], ...]
    edges: tuple[Edge, ...]
    state: State
    backwards: tuple[tuple[Kind, ...], ...] = ()
    copies: int = 1
    parts: int = 0
    slices: int = 1
    lookups: int = 0
    front: int = 0
    helpers: int = 0

    @property
    def depth(self) -> int:
        """The number of stages that a microbatch passes: those of a copy of the model, in every slice.

        The parts of an output layer, or of an input embedding, are not among them, nor a helper's copies of the front.
        """
        return (self._fronts - self.parts - self.lookups) // self.copies

    @property
    def _fronts(self) -> int:
        """Where the helpers' copies of the front begin."""
        return len(self.stages) - self.helpers * self.front

    def is_part(self, stage: int) -> bool:
        """Whether a stage is a part of the output layer."""
        return 0 <= stage - len(self.stages) + self.lookups + self.parts < self.parts

    def is_lookup(self, stage: int) -> bool:
        """Whether a stage is a part of the input embedding."""
        return stage >= len(self.stages) - self.lookups

    def home(self, stage: int) -> int:
        """The stage of the front that a helper's one is a copy of; of any other stage itself."""
        first = self._fronts
        return (stage - first) % self.front if stage >= first else stage

    def is_front(self, stage: int) -> bool:
        """Whether a stage is one of the front, or a helper's copy of one."""
        return self.home(stage) < self.front

    def helper(self, stage: int) -> int:
        """The number of the helper that has a stage's copy of the front; -1 for all other stages."""
        first = self._fronts
        return (stage - first) // self.front if stage >= first else -1

    def onward(self, source: int, target: int) -> bool:
        """Whether what one stage hands to another are activations: gradients go back."""
        return self.is_lookup(source) or (self.home(source) < target and not self.is_lookup(target))

    def in_order(self, stages: Collection[int]) -> tuple[int, ...]:
        """Some stages in the order in which a microbatch passes them forward."""
        return tuple(sorted(stages, key=lambda stage: (not self.is_lookup(stage), stage)))

    @property
    def width(self) -> int:
        """The number of stages that a slice of the sequence passes."""
        return self.depth // self.slices

    @property
    def segmented(self) -> Segmented:
        """The segments, their bodies and the graph."""
        return self.sharded.segmented

    def copy_of(self, stage: int) -> int:
        """The copy of the model that a stage belongs to; there is one where layers are in parts."""
        return 0 if self.parts or self.helper(stage) >= 0 else stage // self.depth

    def kinds(self, stage: int) -> tuple[Kind, ...]:
        """The kinds of actions that a stage performs in a training step."""
        if self.is_part(stage):
            return Kind.S, Kind.T
        if self.is_front(stage):
            return (Kind.F,)
        return Kind.F, *(self.backwards[stage] if self.backwards else (Kind.B,))

    def phases(self, stage: int, kind: Kind) -> tuple[tuple[Segment, Phase], ...]:
        """What an action of a stage consists of, in order: the last segment comes first in a backward."""
        row = self.stages[stage] if kind in (Kind.F, Kind.S) else reversed(self.stages[stage])
        found = ((segment, self.segmented.phase(segment, kind)) for segment in row)
        return tuple((segment, phase) for segment, phase in found if phase is not None)

    def enters(self, stage: int, kind: Kind) -> bool:
        """Whether an action begins a stage's backward: it takes the gradients that come in, and what F saved.

        That is W where I has nothing to do.
        """
        return kind in (Kind.B, Kind.T) or bool(self.phases(stage, Kind.I)) == (kind is Kind.I)

    def trained(self) -> tuple[Unit, ...]:
        """The units that get gradients in this step."""
        graded = {out.target for out in self.segmented.captured.outputs if out.kind == "grad"}
        return tuple(u for u in self.state.units if u.trainable and any(p.name in graded for p in u.parameters))

    def shared(self, column: int) -> tuple[Unit, ...]:
        """The units that get gradients on pp rank `column` and on others, which are added up at the step's end."""
        return tuple(unit for unit in self.trained() if column in unit.columns and len(unit.columns) > 1)

    def completed(self, stage: int, degree: int, unfinished: Collection[int] = ()) -> dict[str, tuple[Unit, ...]]:
        """By segment of a stage, the units whose gradients are complete after the segment's last backward.

        Those that are reduced over `degree` data ranks once a step. A unit of several segments is complete after the
        first of them, which the backward reaches last; one that the stages `unfinished` of the rank use too, after
        theirs.
        """
        homes = self.state.homes()
        aside = {
            unit.name
            for other in unfinished
            for segment in self.stages[other]
            for unit in used_units(segment.gradients, homes)
        }
        found: dict[str, tuple[Unit, ...]] = {}
        for segment in self.stages[stage]:
            units = used_units(segment.gradients, homes)
            mine = tuple(u for u in units if degree > 1 and not u.reduced_at_once(degree) and u.name not in aside)
            aside.update(unit.name for unit in mine)
            if mine:
                found[segment.name] = mine
        return found

    def updated(self, stage: int) -> tuple[tuple[str, Value], ...]:
        """The buffers that the forwards of a stage update, in order, each with its new value."""
        captured = self.segmented.captured
        made = {out.target: out.name for out in captured.updates()}
        targets = [target for segment in self.stages[stage] for target in segment.updates]
        values = {value.name: value for value in captured.values()} if targets else {}
        return tuple((target, values[made[target]]) for target in targets)

    def deal(self, source: int, target: int) -> tuple[How, ...]:
        """How the values are dealt that a stage hands to one of another width; empty for one of the same."""
        return next((e.deal for e in self.edges if (e.source, e.target) == (source, target)), ())

    def into(self, stage: int, *, forward: bool) -> tuple[Edge, ...]:
        """The edges that end at a stage, in order of their source; from the front, not from copies of it elsewhere."""
        helpers = (-1, self.helper(stage))
        found = (e for e in self.edges if e.target == stage and self.onward(e.source, stage) == forward)
        return tuple(edge for edge in found if self.helper(edge.source) in helpers)

    def out_of(self, stage: int, *, forward: bool) -> tuple[Edge, ...]:
        """The edges that begin at a stage, in order of their target."""
        return tuple(e for e in self.edges if e.source == stage and self.onward(stage, e.target) == forward)

    def part_edges(self, stage: int, kind: Kind) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
        """The edges of a part of the output layer whose values its S, or its T, takes; and those of what it makes."""
        phases = self.phases(stage, kind)
        taken = {name for _, phase in phases for name in phase.takes}
        given = {name for _, phase in phases for name in phase.gives}
        into = tuple(edge for edge in self.edges if edge.target == stage and edge.values[0].name in taken)
        return into, tuple(edge for edge in self.edges if edge.source == stage and edge.values[0].name in given)

    def __str__(self) -> str:
        """A line a stage and a line an edge."""
        lines = [f"stage {i}: {', '.join(segment.name for segment in row)}" for i, row in enumerate(self.stages)]
        lines += [f"{e.source} -> {e.target}: {', '.join(value.name for value in e.values)}" for e in self.edges]
        return "\n".join(lines)
