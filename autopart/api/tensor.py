"""Tensor placements in the order of processing: decided with a plan, found again for each program, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from math import gcd

from autopart.cluster import Cluster
from autopart.ir.captured import Captured
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh
from autopart.ir.placed import PlacedStep
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.plan import around
from autopart.ir.segmented import Segmented
from autopart.ir.tensor_plan import TensorPlan
from autopart.passes.costs import costs
from autopart.passes.places import at_place, check_places, takes_samples
from autopart.passes.recompute import recompute
from autopart.solver.axis import WHOLE, Axis, linked
from autopart.solver.place import Placed, front, place
from autopart.solver.request import Pinned, Pins, pinned_mesh, whole
from autopart.solver.search import shapes
from autopart.solver.tensor import Along, Pin
from autopart.solver.variants import INSIDE, Degrees

Found = tuple[TensorPlan, tuple[SegmentCost, ...], tuple[SegmentCost, ...]]
"""What is decided inside segments, and what they cost then, plain and recomputed."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What is asked of the axis inside segments."""

    axis: str
    degree: int
    cluster: Cluster
    sizes: tuple[int, ...]  # samples of the microbatches whose time counts
    divides: bool  # whether places may have some of the samples each, where their number is a multiple of `degree`
    pins: tuple[tuple[str, Pin], ...]  # by parameter

    def on(self, samples: int, *, divides: bool = False) -> Axis:
        """The axis for microbatches of so many samples, of which places may have some each if it `divides` them."""
        return Axis(self.axis, self.degree, self.cluster, samples, divides=divides)


def axis_inside(mesh: Mesh | None) -> tuple[str, int] | None:
    """The axis of a mesh that splits the tensors inside segments, with its degree; None where it has none."""
    sizes = dict(mesh.axes) if mesh is not None else {}
    return next(((axis, sizes[axis]) for axis in INSIDE if sizes.get(axis, 1) > 1), None)


def asked(captured: Captured, batch: int, pins: Pins, inputs: str = "global") -> Inside | None:
    """What the pins ask of the axis inside segments; None where the mesh has none.

    Samples may be split on axes of parts of parameters, where microbatches are multiples of the degree; where each data
    rank passes its own samples, that is not known.

    Raises ValueError or TypeError for placements of tensors that cannot be meant.
    """
    pin, mesh = pins.get("placement"), pinned_mesh(pins.get("mesh"))
    found = axis_inside(mesh)
    wanted = pinned(pin, captured, found[0] if found else None)
    if found is None or mesh is None:
        return None
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)
    axis, degree = found
    sizes = (_samples(batch, mesh, pins),)
    return Inside(axis, degree, linked(cluster, mesh, axis), sizes, inputs == "global" and axis not in WHOLE, wanted)


def degrees(segmented: Segmented, batch: int, pins: Pins, inputs: str = "global") -> Degrees:
    """The tensor degrees of a free mesh, and what finds the placements that come into question at each.

    They are the powers of two that divide the devices and those of a node, as a tensor axis stays in one. None where
    tensors are pinned.
    """
    mesh, devices, pin = pinned_mesh(pins.get("mesh")), pins.get("devices"), pins.get("placement")
    if devices is not None:
        whole("devices", devices)
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=devices or (mesh.size if mesh else 1))
    count = devices or (mesh.size if mesh else cluster.devices)
    if isinstance(pin, Mapping) and any(isinstance(value, Mapping) for value in pin.values()):
        return {}
    near = gcd(count, *(group.per_node for group in cluster.groups))
    made: dict[int, Callable[[], tuple[Found, ...]]] = {}
    for degree in (1 << i for i in range(1, near.bit_length())):
        meshes = [m for m in shapes(count, degree, len(segmented.segments)) if m.degree("dp") <= batch]
        if near % degree == 0 and meshes:
            sizes = {_samples(batch, each, pins) for each in meshes}
            near_links = linked(cluster, meshes[0], "tp")
            inside = Inside("tp", degree, near_links, tuple(sorted(sizes)), inputs == "global", ())
            made[degree] = cache(partial(placements, segmented, inside))
    return made


def _samples(batch: int, mesh: Mesh, pins: Pins) -> int:
    """The samples of the microbatch that placements are made for: of the pinned number, else of a usual one."""
    share, count = -(-batch // mesh.degree("dp")), pins.get("microbatches")
    count = count if isinstance(count, int) and count > 0 else 1 if mesh.degree("pp") == 1 else 4 * mesh.degree("pp")
    return max(1, -(-share // count))


def placements(segmented: Segmented, asked: Inside) -> tuple[Found, ...]:
    """The placements inside segments that come into question at one degree, and what segments cost in them.

    The fastest for microbatches of each of the `sizes`, with and without splitting the samples; and for single samples
    the fastest, that which holds least, and one between them. Each once. Raises ValueError for pins that cannot be
    kept.
    """
    pins = dict(asked.pins)
    axes = [asked.on(n, divides=True) for n in asked.sizes if asked.divides and n % asked.degree == 0]
    axes += [asked.on(n) for n in asked.sizes if n > 1]
    found = [(axis, place(segmented, axis, pins)) for axis in axes]
    found += [(asked.on(1), each) for each in front(segmented, asked.on(1), pins)]
    kept: dict[object, TensorPlan] = {}
    for axis, each in found:
        step = _step(segmented, each, axis)
        multiple = axis.degree if axis.divides and takes_samples(at_place(segmented, step, 0)) else 1
        made = TensorPlan.of(step, each.costs, axis.cluster, axis.batch, multiple)
        kept.setdefault((made.choices, made.segments, made.parameters, made.between), made)
    return tuple((made, *costs_of(segmented, made)) for made in kept.values())


def costs_of(
    segmented: Segmented, tensor: TensorPlan | None = None
) -> tuple[tuple[SegmentCost, ...], tuple[SegmentCost, ...]]:
    """What segments cost, plain and recomputed; with tensors split inside them, at the first place, which has most."""
    here, rates = segmented, None
    if tensor is not None:
        here, rates = at_place(segmented, placed_step(segmented, tensor), 0), exchanged(tensor)
    return costs(recompute(here), rates), costs(recompute(here, [each.name for each in here.segments]), rates)


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
        pins: dict[str, Pin] = {target: how for target, how in tensor.parameters if target in used}
        divides = fits and tensor.multiple > 1
        axis = Axis(tensor.axis, tensor.degree, tensor.cluster, tensor.samples, divides=divides)
        placed = _step(segmented, place(segmented, axis, pins), axis)
        known = dict(placed.parameters) | dict(tensor.parameters)
        placed = PlacedStep(placed.axis, placed.degree, placed.bodies, placed.between, tuple(known.items()))
    check_places(segmented, placed)
    return placed


def _step(segmented: Segmented, found: Placed, axis: Axis) -> PlacedStep:
    """A placement as that of a step."""
    parameters = _parameters(segmented, found)
    between = tuple((name, how) for name, how in found.between.items() if name not in parameters)
    return PlacedStep(axis.name, axis.degree, found.segments, between, tuple(parameters.items()))


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
