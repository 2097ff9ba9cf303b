"""split: Sharded + Plan -> Staged. Deal segments to stages; name what crosses between them; put parameters in units.

before: wte | h.0 | h.1 | h.2 | h.3 | head
after:  stage 0: wte h.0 h.1   stage 1: h.2 h.3 head   edges 0 -> 1 (activations), 1 -> 0 (gradients)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Value
from autopart.ir.placement import Modes
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segment, Segmented
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Edge, Staged
from autopart.ir.state import Parameter, State, Unit


def split(sharded: Sharded, plan: Plan, *, state: State | None = None) -> Staged:
    """Cut into the plan's stages. With `state` (another program's), parameters stay in its units.

    Raises CaptureError if this program uses a parameter on a stage that does not hold it, or a buffer elsewhere than
    where its forwards update it.
    """
    segmented = sharded.segmented
    stages = _stages(segmented, plan)
    state = state or place(segmented.captured, stages, plan)
    _check_holders(stages, state)
    _check_buffers(segmented.captured, stages)
    return Staged(sharded, stages, _edges(segmented, stages), state)


def _stages(segmented: Segmented, plan: Plan) -> tuple[tuple[Segment, ...], ...]:
    """A stage begins at the segment named first in the plan's stage."""
    names = [segment.name for segment in segmented.segments]
    starts = [0]
    for stage in plan.stages[1:]:
        if stage.segments[0] not in names[starts[-1] + 1 :]:
            raise CaptureError(
                f"this program has no layer {stage.segments[0]!r} after {names[starts[-1]]!r}, where the plan begins a "
                f"stage; its layers are {', '.join(names)}"
            )
        starts.append(names.index(stage.segments[0], starts[-1] + 1))
    ends = [*starts[1:], len(names)]
    return tuple(segmented.segments[start:end] for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the parameters of one unit agree on."""

    owner: str  # the only segment that uses it, else the parameter itself
    shared: bool
    trainable: bool
    graded: bool  # apart, so that a unit's gradients come together or not at all
    dtype: torch.dtype
    modes: Modes


def place(captured: Captured, stages: Sequence[Sequence[Segment]], plan: Plan) -> State:
    """Put every used parameter in a unit: a segment's own together, those of several segments alone."""
    users: dict[str, list[tuple[int, str]]] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            for target in segment.parameters:
                users.setdefault(target, []).append((number, segment.name))
    inputs = {item.target: item for item in captured.of_kind("parameter")}
    graded = {out.target for out in captured.outputs if out.kind == "grad"}
    groups: dict[_Kind, list[str]] = {}
    for target, used in users.items():
        item, shared = inputs[target], len(used) > 1
        modes = plan.placement_of(target).on("dp")
        owner, grad = target if shared else used[0][1], item.requires_grad
        kind = _Kind(owner, shared, grad, grad and target in graded, item.value.dtype, modes)
        groups.setdefault(kind, []).append(target)
    units: list[Unit] = []
    taken: Counter[str] = Counter()
    for kind, targets in groups.items():
        name = f"{kind.owner}+{taken[kind.owner]}" if taken[kind.owner] else kind.owner
        taken[kind.owner] += 1
        parameters = tuple(Parameter(target, inputs[target].value.at(1), kind.dtype) for target in targets)
        holders = tuple(sorted({number for target in targets for number, _ in users[target]}))
        columns = tuple(sorted({plan.place[number] for number in holders}))
        units.append(Unit(name, parameters, kind.trainable, kind.modes, holders, columns))
    return State(tuple(units), tuple(item.target for item in captured.of_kind("buffer", "constant")))


def _check_holders(stages: Sequence[Sequence[Segment]], state: State) -> None:
    holders = {p.target: unit.stages for unit in state.units for p in unit.parameters}
    for number, stage in enumerate(stages):
        for segment in stage:
            for target in segment.parameters:
                if number not in holders.get(target, ()):
                    raise CaptureError(
                        f"{segment.name} uses {target} on stage {number}, but the plan keeps it on stages "
                        f"{holders.get(target, ())}; plan again from a call that uses the model this way"
                    )


def _check_buffers(captured: Captured, stages: Sequence[Sequence[Segment]]) -> None:
    """A buffer that forwards update is read on the same stage, by no later segment: it has changed by then."""
    places = [(number, segment) for number, stage in enumerate(stages) for segment in stage]
    updated = {target: i for i, (_, segment) in enumerate(places) for target in segment.updates}
    held = {item.value.name: item.target for item in captured.of_kind("buffer")}
    for i, (stage, segment) in enumerate(places):
        for target in (held.get(name, "") for name in (*segment.forward_fixed, *segment.backward_fixed)):
            at = updated.get(target, i)
            if at < i or places[at][0] != stage:
                raise CaptureError(
                    f"the buffer {target} is updated in {places[at][1].name} on stage {places[at][0]}, and its value "
                    f"before that is read in {segment.name} on stage {stage}, where another microbatch's update may "
                    "come first; keep both in one layer, or on one stage with the update last (stages=[...])"
                )


def _edges(segmented: Segmented, stages: Sequence[Sequence[Segment]]) -> tuple[Edge, ...]:
    values = {value.name: value for value in segmented.captured.values()}
    made: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            made.update(dict.fromkeys((*segment.outputs, *segment.backward_outputs), number))
    crossing: dict[tuple[int, int], dict[str, Value]] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            for name in (*segment.values, *segment.backward_inputs):
                source = made.get(name, number)
                if source != number:
                    crossing.setdefault((source, number), {})[name] = values[name]
    return tuple(Edge(source, target, tuple(found.values())) for (source, target), found in sorted(crossing.items()))
