"""Tensor placements in the order of processing: decided with a plan, found again for each program, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import gcd

from autopart.cluster import Cluster
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Inner, Mesh
from autopart.ir.placed import PlacedStep
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.ir.plan import around, pinned_chunks
from autopart.ir.segmented import Segmented
from autopart.ir.state import State
from autopart.ir.tensor_plan import TensorPlan
from autopart.passes.chunked import Chunks, chunked
from autopart.passes.costs import costs
from autopart.passes.experts import has_experts
from autopart.passes.places import at_place, check_places, likewise, takes_samples
from autopart.solver.axis import WHOLE, Axis, linked
from autopart.solver.place import Placed, front, place
from autopart.solver.presets import Pinned
from autopart.solver.request import Pins
from autopart.solver.resolve import pinned_mesh, whole
from autopart.solver.search import shapes
from autopart.solver.tensor import Along, Pin
from autopart.solver.variants import Costed, Degrees

Steps = tuple[Segmented, ...]
"""The steps of all places of some axes, which differ in numbers only; the axis that was placed last varies fastest."""


MANY = 16
"""Of nodes with more devices than this only the powers of two are looked at as degrees."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What is asked of one axis inside segments."""

    axis: str
    degree: int
    cluster: Cluster
    sizes: tuple[int, ...]  # samples of the microbatches whose time counts
    divides: bool  # whether places may have some of the samples each, where their number is a multiple of `degree`
    pins: tuple[tuple[str, Pin], ...]  # by parameter
    alike: bool = False  # whether another axis is placed after it

    def on(self, samples: int, *, divides: bool = False, outer: tuple[Axis, ...] = ()) -> Axis:
        """The axis for microbatches of so many samples, of which places may have some each if it `divides` them.

        `outer` are the axes that were placed before.
        """
        return Axis(self.axis, self.degree, self.cluster, samples, divides=divides, outer=outer, alike=self.alike)


def asked(captured: Captured, batch: int, pins: Pins, inputs: str = "global") -> tuple[Inside, ...]:
    """What the pins ask of each axis inside segments that the mesh has, in the order in which they are placed.

    Samples may be split on an axis of parts of parameters that is the only one, or on ``ep`` if it is placed last,
    where microbatches are multiples of the degree; where each data rank passes its own samples, that is not known. They
    are on ``dp``, where it is one of them.

    Raises ValueError or TypeError for placements of tensors that cannot be meant.
    """
    pin, mesh = pins.get("placement"), pinned_mesh(pins.get("mesh"))
    axes = list(mesh.inside) if mesh is not None else []
    wanted = pinned(pin, captured, axes)
    if mesh is None:
        return ()
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)
    sizes = (_samples(batch, mesh, pins),)
    return tuple(
        Inside(
            axis,
            mesh.degree(axis),
            linked(cluster, mesh, axis),
            sizes,
            _divides(axis, axes, inputs),
            wanted[axis],
            alike=axis != axes[-1],
        )
        for axis in axes
    )


def _divides(axis: str, axes: Sequence[str], inputs: str) -> bool:
    """Whether the places of one of the `axes` may have some of the samples each."""
    return axis == "dp" or (inputs == "global" and axis not in WHOLE and (len(axes) == 1 or axis == "ep"))


def degrees(segmented: Segmented, batch: int, pins: Pins, inputs: str = "global") -> Degrees:
    """The axes inside segments of a free mesh, and what finds the placements that come into question on them.

    ``tp`` of every degree that divides the devices and those of a node, in which such axes stay; where a layer has
    experts, ``ep`` beside it; where there are fewer samples than devices, as with long sequences, ``cp``, with and
    without it. None where tensors are pinned.
    """
    mesh, devices, pin = pinned_mesh(pins.get("mesh")), pins.get("devices"), pins.get("placement")
    if devices is not None:
        whole("devices", devices)
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=devices or (mesh.size if mesh else 1))
    count = devices or (mesh.size if mesh else cluster.devices)
    if isinstance(pin, Mapping) and any(isinstance(value, Mapping) for value in pin.values()):
        return {}
    near = gcd(count, *(group.per_node for group in cluster.groups))
    beside = ["cp"] * (batch < count) + ["ep"] * has_experts(segmented.captured)
    made: dict[Inner, Callable[[], tuple[Costed, ...]]] = {}
    for inner in _inner(near, beside):
        meshes = [m for m in shapes(count, inner, len(segmented.segments)) if m.parts <= batch]
        if meshes:
            sizes = tuple(sorted({_samples(batch, each, pins) for each in meshes}))
            axes = list(meshes[0].inside.items())
            insides = tuple(
                Inside(axis, degree, linked(cluster, meshes[0], axis), sizes, divides, (), alike=axis != axes[-1][0])
                for axis, degree in axes
                for divides in (_divides(axis, [name for name, _ in axes], inputs),)
            )
            made[inner] = cache(partial(_if_any, segmented, insides, pinned_chunks(pins.get("chunks"))))
    return made


def _inner(near: int, beside: Sequence[str]) -> Iterator[Inner]:
    """The axes that are looked at on `near` devices: tp of each degree, and other axes `beside` it."""
    degrees = [n for n in range(2, near + 1) if near % n == 0 and (near <= MANY or n & (n - 1) == 0)]
    yield from ((("tp", degree),) for degree in degrees)
    for axis in beside:
        yield from (((axis, degree),) for degree in degrees if axis in WHOLE)
        yield from (((axis, one), ("tp", other)) for one in degrees for other in degrees if near % (one * other) == 0)


def _if_any(segmented: Segmented, asked: Sequence[Inside], chunks: Chunks) -> tuple[Costed, ...]:
    """The `placements`, none where modules cannot be run in chunks in any."""
    try:
        return placements(segmented, asked, chunks=chunks)
    except CaptureError:
        return ()


def _samples(batch: int, mesh: Mesh, pins: Pins) -> int:
    """The samples of the microbatch that placements are made for: of the pinned number, else of a usual one."""
    share, count = max(mesh.dealt(batch)), pins.get("microbatches")
    count = count if isinstance(count, int) and count > 0 else 1 if mesh.degree("pp") == 1 else 4 * mesh.degree("pp")
    return max(1, -(-share // count))


def placements(segmented: Segmented, asked: Sequence[Inside], *, chunks: Chunks = ()) -> tuple[Costed, ...]:
    """The placements inside segments that come into question on some axes, and what segments cost in them.

    The fastest for microbatches of each of the `sizes`, with and without splitting the samples; and for single samples
    the fastest, that which holds least, and one between them. Each once. Where there are several axes, the ways are
    those of the first, and the others are each placed in the like way on what those before it leave, in each of the
    `_orders`. On the data axis there is one way. Raises ValueError for pins that cannot be kept in any order,
    CaptureError where no way goes with `chunks`.
    """
    kept: dict[object, TensorPlan] = {}
    refused: list[ValueError] = []
    for order in _orders(asked):
        try:
            for made in _in_order(segmented, order):
                key = tuple((one.choices, one.segments, one.parameters, one.between) for one in made.axes)
                kept.setdefault(key, made)
        except ValueError as error:
            refused.append(error)
    if not kept:
        raise refused[0]
    return tuple(_costed(segmented, tuple(kept.values()), chunks))


def _orders(asked: Sequence[Inside]) -> tuple[tuple[Inside, ...], ...]:
    """The orders in which axes are placed: as asked, and the other way round; the data axis is last in both."""
    last = [each for each in asked if each.axis == "dp"]
    first = [each for each in asked if each.axis != "dp"]
    orders = [[*first, *last], [*reversed(first), *last]] if len(first) > 1 else [[*first, *last]]
    return tuple(tuple(_in_place(each, each is order[-1]) for each in order) for order in orders)


def _in_place(each: Inside, last: bool) -> Inside:
    """An axis in its order: samples are split on the last alone, and on the data axis, which is last."""
    return replace(each, alike=not last, divides=each.divides and last)


def _in_order(segmented: Segmented, asked: Sequence[Inside]) -> Iterator[TensorPlan]:
    """The placements that come into question where the axes are placed in this order, see `placements`."""
    first, *rest = asked
    pins = dict(first.pins)
    axes = [first.on(n, divides=True) for n in first.sizes if first.divides and n % first.degree == 0]
    if first.axis != "dp":
        axes += [first.on(n) for n in first.sizes if n > 1]
    alone = [first.on(1)] if first.axis != "dp" else []
    refused: list[ValueError] = []
    for axis in (*axes, *alone):
        try:
            ways = front(segmented, axis, pins) if axis in alone else (place(segmented, axis, pins),)
            yield from [nested(segmented, axis, each, rest, size) for size, each in enumerate(ways)]
        except ValueError as error:  # a pin that another way may keep: experts are dealt out where samples are split
            refused.append(error)
    if len(refused) == len(axes) + len(alone):
        raise refused[0]


def _costed(segmented: Segmented, found: Sequence[TensorPlan], chunks: Chunks) -> Iterator[Costed]:
    """The placements with what segments cost in them; none in which modules cannot be run in chunks, if others can."""
    refused: list[CaptureError] = []
    for made in found:
        try:
            yield (made, *costs_of(segmented, made, chunks=chunks))
        except CaptureError as error:
            refused.append(error)
    if len(refused) == len(found):
        raise refused[0]


def nested(segmented: Segmented, axis: Axis, found: Placed, rest: Sequence[Inside], size: int = 0) -> TensorPlan:
    """A placement on an axis and, each on what those before it leave, on the `rest`.

    Of their fronts it is the one of number `size`, the fastest being the first, or the last there is.
    """
    steps: Steps = (segmented,)
    outer: tuple[Axis, ...] = (axis,)
    plans = [_planned(steps[0], axis, found)]
    for inside in rest:
        steps = _cut(steps, _step(steps[0], found, axis), alike=True)
        samples = inside.sizes[0] if inside.axis == "dp" else axis.batch
        divides = inside.divides and (inside.axis == "dp" or samples % inside.degree == 0)
        axis = inside.on(samples, divides=divides, outer=outer)
        first, pins, others = steps[0], dict(inside.pins), steps[1:]
        ways = front(first, axis, pins, others=others) if size else (place(first, axis, pins, others=others),)
        found = ways[min(size, len(ways) - 1)]
        plans.append(_planned(steps[0], axis, found))
        outer = (*outer, axis)
    return TensorPlan.nested(plans)


def _planned(segmented: Segmented, axis: Axis, found: Placed) -> TensorPlan:
    """A placement on one axis, as what is decided."""
    step = _step(segmented, found, axis)
    multiple = axis.degree if axis.divides and takes_samples(at_place(segmented, step, 0)) else 1
    return TensorPlan.of(step, found.costs, axis.cluster, axis.batch, multiple)


def costs_of(
    segmented: Segmented, tensor: TensorPlan | None = None, *, chunks: Chunks = ()
) -> tuple[tuple[SegmentCost, ...], tuple[SegmentCost, ...]]:
    """What segments cost, plain and recomputed; with tensors split inside them, at the first place, which has most."""
    here, rates = segmented, None
    if tensor is not None:
        here, rates = first_place(segmented, tensor), exchanged(tensor)
    plain, again = (
        chunked(here, chunks, names, whole=segmented) for names in ((), [each.name for each in here.segments])
    )
    return costs(plain, rates), costs(again, rates)


def first_place(segmented: Segmented, tensor: TensorPlan) -> Segmented:
    """The step of the first place, which has most, of the step that was planned."""
    for each in tensor.axes:
        placed = each.step(segmented)
        assert placed is not None, "what is decided is decided of this step"
        segmented = at_place(segmented, placed, 0, alike=each.inner is not None)
    return segmented


def exchanged(tensor: TensorPlan) -> Callable[[str, str, int], int]:
    """What a collective inside a segment takes under a plan, in picoseconds, by its axis, kind and payload in bytes."""
    axes = {axis.name: axis for axis in _axes(tensor.axes)}
    return lambda axis, kind, nbytes: axes[axis].collective(kind, nbytes)


def _axes(plans: Sequence[TensorPlan]) -> tuple[Axis, ...]:
    return tuple(Axis(each.axis, each.degree, each.cluster, each.samples) for each in plans)


def places(segmented: Segmented, tensor: TensorPlan, state: State | None = None, *, fits: bool = True) -> Steps:
    """The step of every place, in the order of `TensorPlan.place`, as the plan places it.

    What the plan has not seen is placed now, around the parameters' places. So is a step whose microbatches are not the
    multiples that the plan is for (`Plan.fits`). Raises VerificationError where the plan's choices do not make up what
    one device computes.
    """
    steps: Steps = (segmented,)
    for number, each in enumerate(tensor.axes):
        placed = _placed(steps, each, tensor.axes[:number], fits=fits)
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


def _placed(steps: Steps, tensor: TensorPlan, outer: Sequence[TensorPlan], *, fits: bool) -> PlacedStep:
    """The first step as the plan places it on one axis, `outer` being those before; one that it has not seen, anew."""
    first, *others = steps
    placed = tensor.step(first) if fits else None
    if placed is None:
        used = {target for segment in first.segments for target in segment.parameters}
        pins: dict[str, Pin] = {target: how for target, how in tensor.parameters if target in used}
        divides = fits and tensor.multiple > 1
        alike = tensor.inner is not None
        axis = Axis(
            tensor.axis, tensor.degree, tensor.cluster, tensor.samples, divides=divides, outer=_axes(outer), alike=alike
        )
        placed = _step(first, place(first, axis, pins, others=others), axis)
        known = dict(placed.parameters) | dict(tensor.parameters)
        placed = replace(placed, parameters=tuple(known.items()))
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
            lie = (Replicate() if one == Partial() else one for one in made)  # a sum on the data axis
            how |= dict(zip(segment.gradients, lie, strict=True))
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
