"""split: Sharded + Plan -> Staged. Deal segments to stages; name what crosses between them; put parameters in units.

before: wte | h.0 | h.1 | h.2 | h.3 | head
after:  stage 0: wte h.0 h.1   stage 1: h.2 h.3 head   edges 0 -> 1 (activations), 1 -> 0 (gradients)
        with a second copy of the model: the same as stages 2 and 3, edges 2 -> 3 and 3 -> 2, units on 0 and 2, 1 and 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autopart.errors import CaptureError
from autopart.ir import plan_text
from autopart.ir.captured import Captured
from autopart.ir.placement import Modes
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segment, Segmented
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Edge, Staged
from autopart.ir.state import Parameter, State, Unit
from autopart.passes.dealing import check_shared, check_widths, dealt
from autopart.passes.output_functions import Stages
from autopart.passes.split_input import split_input
from autopart.passes.split_output import split_output


def split(sharded: Sharded, plan: Plan, *, state: State | None = None) -> Staged:
    """Cut into the plan's stages. With `state` (another program's), parameters stay in its units.

    Without a backward, a step goes through the first copy of the model alone.

    Raises CaptureError if this program uses a parameter on a stage that does not hold it, or a buffer elsewhere than
    where its forwards update it; where the plan has further copies of the model, if a forward updates buffers, or if
    the step makes anything but sums over the batch, of which every copy would have some samples; where the output layer
    or the input embedding is split over the pipeline ranks, if it cannot be; where pipeline ranks differ in width, for
    what cannot be dealt between them (ValueError for what does not go beside that).
    """
    check_widths(sharded.segmented.captured, plan)
    slices = 1 + max(segment.slice for segment in sharded.segmented.segments)
    sharded, stages, parameters = _divided(sharded, _stages(sharded.segmented, plan, slices), plan)
    segmented, ranks = sharded.segmented, plan.mesh.degree("pp")
    parts, lookups = ranks * bool(plan.barriers), ranks * plan.lookup
    if state is None:
        state = place(segmented, stages, plan, parameters)
    elif segmented.here is not None:
        state = state.having(segmented.pieces())
    _check_holders(stages, state)
    check_shared(state, plan.mesh)
    _check_buffers(segmented.captured, stages)
    copies = 1 + len(plan.mirrors) * segmented.captured.training
    if copies > 1:
        _check_copies(segmented.captured, plan)
    front, helpers = (plan.front, len(plan.helpers)) if segmented.captured.training else (0, 0)
    one = dealt(sharded, plan, _edges(segmented, stages))
    edges = tuple(
        replace(edge, source=edge.source + first, target=edge.target + first)
        for first in range(0, copies * len(stages), len(stages))
        for edge in one
    )
    edges += tuple(
        replace(edge, source=edge.source + first, target=edge.target + first * (edge.target < front))
        for first in range(len(stages), len(stages) + helpers * front, max(front, 1))
        for edge in one
        if edge.source < front
    )
    return Staged(
        sharded,
        stages * copies + stages[:front] * helpers,
        edges,
        state,
        copies=copies,
        parts=parts,
        slices=slices,
        lookups=lookups,
        front=front,
        helpers=helpers,
    )


def _divided(sharded: Sharded, stages: Stages, plan: Plan) -> tuple[Sharded, Stages, dict[str, Parameter]]:
    """The step with what the plan splits over the pipeline ranks in parts, stages of their own behind the others.

    And the parameters of the parts, by their targets.
    """
    if plan.lookup != sharded.segmented.lookup:
        raise CaptureError(
            "this program does not begin with a lookup in an embedding of which each pipeline rank can have a part, as "
            "the plan has it; plan again from a call that uses the model this way"
        )
    if not plan.barriers:
        return sharded, stages, {}
    lookups: Stages = ()
    parameters: dict[str, Parameter] = {}
    if plan.lookup:
        looked, ranks = split_input(sharded, stages), len(stages)
        stages, lookups = looked.stages[:ranks], looked.stages[ranks:]
        sharded, parameters = looked.sharded, dict(looked.parameters)
    divided = split_output(sharded, stages, plan.barriers)
    parameters |= divided.parameters
    sharded, stages = divided.sharded, (*divided.stages, *lookups)
    segments = tuple(segment for row in stages for segment in row)
    return replace(sharded, segmented=replace(sharded.segmented, segments=segments)), stages, parameters


def undivided(captured: Captured) -> str:
    """What a step does that copies of the model, each with some of the microbatches, cannot; "" for nothing."""
    if updated := captured.updates():
        return f"the forward updates the buffer {updated[0].target}, microbatch after microbatch"
    kinds = {"output": "the output", "input_grad": "the gradient of the input"}
    whole = [out for out in captured.outputs if out.kind in kinds and not out.partial]
    return f"the step makes {kinds[whole[0].kind]} {whole[0].target!r} beside its loss" if whole else ""


def _check_copies(captured: Captured, plan: Plan) -> None:
    if what := undivided(captured):
        raise CaptureError(
            f"{what}, but the schedule, {plan_text.schedule(plan.schedule)}, has {len(plan.mirrors) + 1} copies of the "
            "model, each of which sees some of the samples only: together they make sums over the batch, such as the "
            "loss; return the loss alone, or pin a schedule with one copy, such as schedule='1f1b'"
        )


def _stages(segmented: Segmented, plan: Plan, slices: int) -> Stages:
    """A stage begins at the segment named first in the plan's stage; the stages of each slice of the sequence alike."""
    names = [segment.name for segment in segmented.segments if not segment.slice]
    starts = [0]
    for stage in plan.stages[1:]:
        if stage.segments[0] not in names[starts[-1] + 1 :]:
            raise CaptureError(
                f"this program has no layer {stage.segments[0]!r} after {names[starts[-1]]!r}, where the plan begins a "
                f"stage; its layers are {', '.join(names)}"
            )
        starts.append(names.index(stage.segments[0], starts[-1] + 1))
    ends = [*starts[1:], len(names)]
    firsts = range(0, slices * len(names), len(names))
    spans = [(first + start, first + end) for first in firsts for start, end in zip(starts, ends, strict=True)]
    return tuple(segmented.segments[start:end] for start, end in spans)


class _Kind(NamedTuple):
    """What the parameters of one unit agree on."""

    owner: str  # the only segment that uses it, else the parameter itself
    shared: bool
    trainable: bool
    graded: bool  # apart, so that a unit's gradients come together or not at all
    dtype: torch.dtype
    modes: Modes


def place(
    segmented: Segmented, stages: Sequence[Sequence[Segment]], plan: Plan, parts: Mapping[str, Parameter]
) -> State:
    """Put every used parameter in a unit: a segment's own together, those of several segments alone.

    A unit is on the stages that use it in every copy of the model, in every slice of the sequence, and on every helper.
    `parts` are those of parameters of the output layer, or the input embedding, by their targets.
    """
    captured, pieces = segmented.captured, segmented.pieces()
    users: dict[str, list[tuple[int, str]]] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            use = number, segment.layer
            for target in segment.parameters:
                users.setdefault(target, []).append(use)
    inputs = {item.target: item for item in captured.of_kind("parameter")}
    on_data = {id(placement): placement.on("dp") for _, placement in plan.placements}
    graded = {out.target for out in captured.outputs if out.kind == "grad"}
    groups: dict[_Kind, list[str]] = {}
    for target, used in users.items():
        name = parts[target].name if target in parts else target
        item, shared = inputs[name], len(used) > 1 and len({layer for _, layer in used}) > 1
        modes = on_data[id(plan.placement_of(name))]
        owner, grad = target if shared else used[0][1], item.requires_grad
        kind = _Kind(owner, shared, grad, grad and name in graded, item.value.dtype, modes)
        groups.setdefault(kind, []).append(target)
    places = plan.places(1 + len(plan.mirrors), plan.slices, helpers=len(plan.helpers))
    fronts = len(places) - len(plan.helpers) * plan.front  # where the helpers' copies of the first stages begin
    depth = len(plan.stages) + plan.mesh.degree("pp") * (bool(plan.barriers) + plan.lookup)
    units: list[Unit] = []
    taken: Counter[str] = Counter()
    for kind, targets in groups.items():
        name = f"{kind.owner}+{taken[kind.owner]}" if taken[kind.owner] else kind.owner
        taken[kind.owner] += 1
        parameters = tuple(
            parts[target]
            if target in parts
            else Parameter.of(target, inputs[target].value.at(1), kind.dtype, pieces.get(target, ()))
            for target in targets
        )
        first = {number % depth for target in targets for number, _ in users[target]}
        homes = (s % depth if s < fronts else (s - fronts) % plan.front for s in range(len(places)))
        holders = tuple(s for s, home in enumerate(homes) if home in first)
        columns = tuple(sorted({places[number] for number in holders}))
        units.append(Unit(name, parameters, kind.trainable, kind.modes, holders, columns))
    return State(tuple(units), tuple(item.target for item in captured.of_kind("buffer", "constant")), plan.bucket)


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
    made: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            made.update(dict.fromkeys((*segment.outputs, *segment.backward_outputs), number))
    crossing: dict[tuple[int, int], dict[str, None]] = {}
    for number, stage in enumerate(stages):
        for segment in stage:
            for name in (*segment.values, *segment.backward_inputs):
                source = made.get(name, number)
                if source != number:
                    crossing.setdefault((source, number), {})[name] = None
    values = segmented.handed_on({name for names in crossing.values() for name in names})
    return tuple(
        Edge(source, target, tuple([values[name] for name in names]))
        for (source, target), names in sorted(crossing.items())
    )
