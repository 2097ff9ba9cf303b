"""Tensor placements in the order of processing: decided with a plan, found again for each program, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopart.cluster import Cluster, parse_bytes
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh, pieces
from autopart.ir.placed import PlacedStep
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.plan import around
from autopart.ir.segmented import Segmented
from autopart.ir.tensor_plan import Costs, TensorPlan
from autopart.passes.places import at_place, check_places, takes_samples
from autopart.solver.axis import WHOLE, Axis
from autopart.solver.place import Placed, place
from autopart.solver.request import INSIDE, Pinned, Pins, pinned_mesh
from autopart.solver.tensor import Along, Pin


@dataclass(frozen=True, slots=True)
class Inside:
    """What is asked of the axis inside segments."""

    axis: str
    degree: int
    cluster: Cluster
    samples: int  # of a microbatch
    divides: bool  # whether all microbatches are multiples of `degree` samples
    pins: tuple[tuple[str, Pin], ...]  # by parameter


def axis_inside(mesh: Mesh | None) -> tuple[str, int] | None:
    """The axis of a mesh that splits the tensors inside segments, with its degree; None where it has none."""
    sizes = dict(mesh.axes) if mesh is not None else {}
    return next(((axis, sizes[axis]) for axis in INSIDE if sizes.get(axis, 1) > 1), None)


def asked(captured: Captured, batch: int, pins: Pins, inputs: str = "global") -> Inside | None:
    """What the pins ask of the axis inside segments; None where the mesh has none.

    Samples are split on axes of parts of parameters, where the microbatches of the batch are all multiples of the
    degree; where each data rank passes its own samples, that is not known.

    Raises ValueError or TypeError for placements of tensors that cannot be meant.
    """
    pin, mesh, count = pins.get("placement"), pinned_mesh(pins.get("mesh")), pins.get("microbatches")
    found = axis_inside(mesh)
    wanted = pinned(pin, captured, found[0] if found else None)
    if found is None or mesh is None:
        return None
    shares = pieces(batch, mesh.degree("dp"))
    count = count if isinstance(count, int) and count > 0 else 1 if mesh.degree("pp") == 1 else 4 * mesh.degree("pp")
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)
    sizes = [size for share in shares for size in pieces(share, count)]
    divides = inputs == "global" and found[0] not in WHOLE and all(n > 0 and n % found[1] == 0 for n in sizes)
    return Inside(*found, _linked(cluster, mesh, found[0]), max(1, *sizes), divides, wanted)


def _linked(cluster: Cluster, mesh: Mesh, axis: str) -> Cluster:
    """The cluster with the links that the places of an axis have: those of a node, where each group lies in one."""
    (first, *others), joints = cluster.groups, cluster.joints
    nodes = [{rank // first.per_node for rank in mesh.group(rank, axis)} for rank in range(mesh.size)]
    if others or joints or any(len(each) > 1 for each in nodes):
        return cluster
    return replace(cluster, groups=(replace(first, nodes=1),))


def limit(pins: Pins, asked: Inside) -> int:
    """The bytes that a device may hold."""
    memory = pins.get("memory")
    return asked.cluster.memory if memory is None else parse_bytes(memory)


def first_place(segmented: Segmented, tensor: TensorPlan) -> Segmented:
    """The step of the first place, which has most."""
    return at_place(segmented, placed_step(segmented, tensor), 0)


def decide(segmented: Segmented, asked: Inside, memory: int | None = None) -> TensorPlan:
    """The fastest placement inside segments. Raises ValueError for pins that cannot be kept, PlanInfeasible."""
    placed, costs = _solved(segmented, asked, memory)
    multiple = asked.degree if asked.divides and takes_samples(at_place(segmented, placed, 0)) else 1
    return TensorPlan.of(placed, costs, asked.cluster, asked.samples, multiple)


def exchanged(tensor: TensorPlan) -> Callable[[str, int], int]:
    """What a collective inside a segment takes under a plan, in picoseconds, by its kind and payload in bytes."""
    return Axis(tensor.axis, tensor.degree, tensor.cluster, tensor.samples).collective


def placed_step(segmented: Segmented, tensor: TensorPlan, *, fits: bool = True) -> PlacedStep:
    """A program's step as the plan places it; what the plan has not seen is placed now, around the parameters' places.

    So is a step whose microbatches are not the multiples that the plan is for (`Plan.fits`). Raises VerificationError
    where the plan's choices do not make up what one device computes.
    """
    placed = tensor.step(segmented) if fits else None
    if placed is None:
        used = {target for segment in segmented.segments for target in segment.parameters}
        pins: tuple[tuple[str, Pin], ...] = tuple((target, how) for target, how in tensor.parameters if target in used)
        divides = fits and tensor.multiple > 1
        asked = Inside(tensor.axis, tensor.degree, tensor.cluster, tensor.samples, divides, pins)
        placed, _ = _solved(segmented, asked, None)
        known = dict(placed.parameters) | dict(tensor.parameters)
        placed = PlacedStep(placed.axis, placed.degree, placed.bodies, placed.between, tuple(known.items()))
    check_places(segmented, placed)
    return placed


def _solved(segmented: Segmented, asked: Inside, memory: int | None) -> tuple[PlacedStep, tuple[Costs, ...]]:
    """The fastest placement, and what every segment takes in it and in others."""
    axis = Axis(asked.axis, asked.degree, asked.cluster, asked.samples, divides=asked.divides)
    found = place(segmented, axis, dict(asked.pins), memory)
    parameters = _parameters(segmented, found)
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


def pinned(pin: object, captured: Captured, axis: str | None) -> tuple[tuple[str, Pin], ...]:
    """The placements of parameters on `axis` that a placement pin names; of several patterns the first holds.

    Raises ValueError or TypeError, naming the pattern, for one on an axis that the mesh has not, and for what is no
    placement there.
    """
    if not isinstance(pin, Mapping):
        return ()
    rules = [(str(pattern), value) for pattern, value in pin.items() if isinstance(value, Mapping)]
    shapes = {item.target: item.value.shape for item in captured.of_kind("parameter")}
    found: dict[str, Pin] = {}
    for pattern, by_axis in rules:
        targets = [target for target in shapes if any(fnmatchcase(name, pattern) for name in around(target))]
        for name, value in by_axis.items():
            if name != axis:
                raise ValueError(
                    f"placement: {pattern!r} is placed on {name!r}, but "
                    + (f"tensors are split on {axis!r}" if axis else "the mesh has no axis that splits tensors")
                    + '; pin a mesh such as {"tp": 2}'
                )
            for target in targets:
                found.setdefault(target, _pin(value, len(shapes[target]), pattern))
    return tuple(found.items())


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
