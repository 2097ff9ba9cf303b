"""Tensor placements in the order of processing: decided with a plan, found again for each program, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from autopart.cluster import Cluster, parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.placed import PlacedStep
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.plan import around
from autopart.ir.segmented import Segmented
from autopart.ir.state import State
from autopart.ir.tensor_plan import Costs, TensorPlan
from autopart.passes.places import at_place, check_places, likewise
from autopart.solver.axis import Axis
from autopart.solver.place import Placed, place
from autopart.solver.request import INSIDE, Pinned, Pins, pinned_mesh
from autopart.solver.tensor import Along, Pin


@dataclass(frozen=True, slots=True)
class Inside:
    """What is asked of one axis inside segments."""

    axis: str
    degree: int
    cluster: Cluster
    samples: int  # of a microbatch
    pins: tuple[tuple[str, Pin], ...]  # by parameter


def asked(captured: Captured, batch: int, pins: Pins) -> tuple[Inside, ...]:
    """What the pins ask of each axis inside segments that the mesh has, in the order in which they are placed.

    Raises ValueError or TypeError for placements of tensors that cannot be meant.
    """
    pin, mesh, count = pins.get("placement"), pinned_mesh(pins.get("mesh")), pins.get("microbatches")
    axes = [axis for axis in INSIDE if mesh is not None and mesh.degree(axis) > 1]
    wanted = pinned(pin, captured, axes)
    if mesh is None:
        return ()
    share = -(-batch // mesh.degree("dp"))
    count = count if isinstance(count, int) and count > 0 else 1 if mesh.degree("pp") == 1 else 4 * mesh.degree("pp")
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)
    return tuple(
        Inside(axis, mesh.degree(axis), _linked(cluster, mesh, axis), max(1, -(-share // count)), wanted[axis])
        for axis in axes
    )


def _linked(cluster: Cluster, mesh: Mesh, axis: str) -> Cluster:
    """The cluster with the links that the places of an axis have: those of a node, where each group lies in one."""
    (first, *others), joints = cluster.groups, cluster.joints
    nodes = [{rank // first.per_node for rank in mesh.group(rank, axis)} for rank in range(mesh.size)]
    if others or joints or any(len(each) > 1 for each in nodes):
        return cluster
    return replace(cluster, groups=(replace(first, nodes=1),))


def limit(pins: Pins, asked: Sequence[Inside]) -> int:
    """The bytes that a device may hold."""
    memory = pins.get("memory")
    return asked[0].cluster.memory if memory is None else parse_bytes(memory)


Steps = tuple[Segmented, ...]
"""The steps of all places of some axes, which differ in numbers only; the axis that was placed last varies fastest."""


def first_place(segmented: Segmented, tensor: TensorPlan) -> Segmented:
    """The step of the first place, which has most, of the step that was planned."""
    for each in tensor.axes:
        placed = each.step(segmented)
        assert placed is not None, "what is decided is decided of this step"
        segmented = at_place(segmented, placed, 0, alike=each.inner is not None)
    return segmented


def places(segmented: Segmented, tensor: TensorPlan, state: State | None = None) -> Steps:
    """The step of every place, in the order of `TensorPlan.place`, as the plan places it.

    What the plan has not seen is placed now, around the parameters' places. Raises VerificationError where the plan's
    choices do not make up what one device computes.
    """
    steps: Steps = (segmented,)
    for number, each in enumerate(tensor.axes):
        placed = _placed(steps, each, tensor.axes[:number])
        steps = _cut(steps, placed, state, alike=each.inner is not None)
    return steps


def _cut(steps: Steps, placed: PlacedStep, state: State | None = None, *, alike: bool) -> Steps:
    """What every place of one more axis runs of each step, where `placed` is what is decided of the first."""
    found: list[Segmented] = []
    for number, step in enumerate(steps):
        own = likewise(placed, step) if number else placed
        check_places(step, own)
        found += [at_place(step, own, place, state=state, alike=alike) for place in range(placed.degree)]
    return tuple(found)


def decide(segmented: Segmented, asked: Sequence[Inside], memory: int | None = None) -> TensorPlan:
    """The fastest placement inside segments, of one axis after the other, each of what those before it leave.

    Where `memory` (bytes) binds, an axis may leave what those after it could divide among their places; if they cannot,
    no more than one device holds. Raises ValueError for pins that cannot be kept, PlanInfeasible.
    """
    if memory is None:
        return _decided(segmented, asked, [None] * len(asked))
    try:
        later = [prod(each.degree for each in asked[number + 1 :]) for number in range(len(asked))]
        return _decided(segmented, asked, [memory * degree for degree in later])
    except PlanInfeasible:
        return _decided(segmented, asked, [memory] * len(asked))


def _decided(segmented: Segmented, asked: Sequence[Inside], limits: Sequence[int | None]) -> TensorPlan:
    steps: Steps = (segmented,)
    plans: list[TensorPlan] = []
    for each, memory in zip(asked, limits, strict=True):
        placed, costs = _solved(steps, each, _axes(plans), memory)
        plans.append(TensorPlan.of(placed, costs, each.cluster, each.samples))
        if len(plans) < len(asked):
            steps = _cut(steps, placed, alike=True)
    return TensorPlan.nested(plans)


def exchanged(tensor: TensorPlan) -> Callable[[str, str, int], int]:
    """What a collective inside a segment takes under a plan, in picoseconds, by its axis, kind and payload in bytes."""
    axes = {axis.name: axis for axis in _axes(tensor.axes)}
    return lambda axis, kind, nbytes: axes[axis].collective(kind, nbytes)


def _axes(plans: Sequence[TensorPlan]) -> tuple[Axis, ...]:
    return tuple(Axis(each.axis, each.degree, each.cluster, each.samples) for each in plans)


def _placed(steps: Steps, tensor: TensorPlan, outer: Sequence[TensorPlan]) -> PlacedStep:
    """The first step as the plan places it on one axis, `outer` being those before; one that it has not seen, anew."""
    first = steps[0]
    placed = tensor.step(first)
    if placed is None:
        used = {target for segment in first.segments for target in segment.parameters}
        pins: tuple[tuple[str, Pin], ...] = tuple((target, how) for target, how in tensor.parameters if target in used)
        wanted = Inside(tensor.axis, tensor.degree, tensor.cluster, tensor.samples, pins)
        placed, _ = _solved(steps, wanted, _axes(outer), None)
        known = dict(placed.parameters) | dict(tensor.parameters)
        placed = replace(placed, parameters=tuple(known.items()))
    return placed


def _solved(
    steps: Steps, asked: Inside, outer: tuple[Axis, ...], memory: int | None
) -> tuple[PlacedStep, tuple[Costs, ...]]:
    """The fastest placement of the first step, and what every segment takes in it and in others."""
    first, *others = steps
    axis = Axis(asked.axis, asked.degree, asked.cluster, asked.samples, outer=outer)
    found = place(first, axis, dict(asked.pins), memory, others=others)
    parameters = _parameters(first, found)
    between = tuple((name, how) for name, how in found.between.items() if name not in parameters)
    step = PlacedStep(asked.axis, asked.degree, found.segments, between, tuple(parameters.items()))
    return step, found.costs


def _parameters(segmented: Segmented, found: Placed) -> dict[str, TensorPlacement]:
    """How each parameter lies, by target."""
    how: dict[str, TensorPlacement] = {}
    for segment, body in zip(segmented.segments, found.segments, strict=True):
        parts = [(body.forward.inputs, segment.forward_parameters)]
        if body.backward is not None:
            parts.append((body.backward.inputs, segment.backward_parameters))
            made = body.backward.outputs[len(segment.backward_outputs) :]
            how |= dict(zip(segment.gradients, made, strict=True))
        for inputs, targets in parts:
            how |= dict(zip(targets, inputs[len(inputs) - len(targets) :], strict=True))
    return how


def without_tensors(pin: Pinned) -> Pinned:
    """A placement pin without what it says of axes inside segments."""
    if not isinstance(pin, Mapping):
        return pin
    rest = {pattern: value for pattern, value in pin.items() if not isinstance(value, Mapping)}
    return rest or None


def pinned(pin: object, captured: Captured, axes: Sequence[str]) -> dict[str, tuple[tuple[str, Pin], ...]]:
    """The placements of parameters that a placement pin names, by axis; of several patterns the first holds.

    Raises ValueError or TypeError, naming the pattern, for one on an axis that the mesh has not, and for what is no
    placement there.
    """
    if not isinstance(pin, Mapping):
        return {axis: () for axis in axes}
    rules = [(str(pattern), value) for pattern, value in pin.items() if isinstance(value, Mapping)]
    shapes = {item.target: item.value.shape for item in captured.of_kind("parameter")}
    known = " and ".join(map(repr, axes))
    found: dict[str, dict[str, Pin]] = {axis: {} for axis in axes}
    for pattern, by_axis in rules:
        targets = [target for target in shapes if any(fnmatchcase(name, pattern) for name in around(target))]
        for name, value in by_axis.items():
            if name not in axes:
                raise ValueError(
                    f"placement: {pattern!r} is placed on {name!r}, but "
                    + (f"tensors are split on {known}" if axes else "the mesh has no axis that splits tensors")
                    + '; pin a mesh such as {"tp": 2}'
                )
            for target in targets:
                found[name].setdefault(target, _pin(value, len(shapes[target]), pattern))
    return {axis: tuple(pins.items()) for axis, pins in found.items()}


def _pin(value: object, dims: int, pattern: str) -> Pin:
    """What is pinned of a tensor of so many dims, by a placement of ours or torch's of the same name.

    Raises TypeError for what is neither Shard nor Replicate, ValueError for a dim that is not there.
    """
    kind = type(value).__name__
    if kind == "Replicate":
        return Replicate()
    if kind != "Shard" or not isinstance(dim := getattr(value, "dim", None), int):
        raise TypeError(
            f"placement: {pattern!r} has {value!r}; on an axis it is autopart.Shard(dim) or autopart.Replicate()"
        )
    if not -dims <= dim < dims:
        raise ValueError(f"placement: {pattern!r} is to be split along dim {dim}, but it has {dims} dims")
    return value if isinstance(value, Shard) and value != Shard(dim) else Along(dim % dims)
