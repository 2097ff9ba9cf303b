"""From the arguments of a caller to a request: pins as typed data, every bad argument refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from math import inf
from types import MappingProxyType

from autopart import schedules
from autopart.cluster import Cluster, parse_bytes
from autopart.ir.action import Schedule
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh, Sizes
from autopart.ir.tensor_plan import TensorPlan
from autopart.schedules.spell import AUTO, is_table, splits_output
from autopart.solver.counts import check_counts
from autopart.solver.families import looked_at
from autopart.solver.presets import Pinned, alternatives, check_host, offloaded, per_layer
from autopart.solver.request import Request
from autopart.solver.variants import Chunked, Costed, Degrees, Variant

MOST_DEVICES = 10**6
"""What is more is taken for a mistake."""


def resolve(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    cluster: Cluster | None,
    devices: int | None,
    mesh: Sizes | Mesh | None,
    stages: int | Sequence[str] | None,
    placement: Pinned,
    schedule: str | Schedule | None,
    microbatches: int | None,
    memory: str | int | None,
    recompute: bool | Sequence[str] | None,
    recomputed: Sequence[SegmentCost] | None,
    optimizer_ratio: float,
    forwards_first: bool,
    tensor: TensorPlan | None = None,
    others: Sequence[Costed] = (),
    degrees: Degrees = MappingProxyType({}),
    chunked: Chunked = MappingProxyType({}),
    looks_up: bool = False,
    offload: bool = False,
    families: bool = False,
    widths: bool = False,
) -> Request:
    """The request behind the arguments of `choose`; ValueError or TypeError names the argument that is wrong."""
    costs, again, output, lookup = _on_stages(costs, recomputed, parted=splits_output(schedule), looks_up=looks_up)
    names = [cost.name for cost in costs]
    whole("batch", batch)
    pinned = pinned_mesh(mesh)
    count = _devices(devices, cluster, pinned)
    wanted = _recompute(recompute, names)
    wide = cluster is not None and pinned is None
    cluster = cluster or Cluster.preset("cpu", per_node=count)
    number, starts = _stages(stages, names)
    if microbatches is not None:
        whole("microbatches", microbatches)
    text = schedules.spell("1f1b" if schedule is None else schedule)
    fixed = schedule if isinstance(schedule, Schedule) else schedules.read(text) if is_table(text) else None
    if fixed is not None:
        microbatches = _agreed(fixed, pinned, microbatches)
    placements = alternatives(placement)
    if not isinstance(offload, bool):
        raise TypeError(f"offload: expected True or False, not {offload!r}")
    check_host(cluster, placements, offload=offload)
    variant = partial(Variant.of, wanted=wanted, everything=recompute is True, batch=batch)
    request = Request(
        variants=(variant((tensor, costs, again)), *map(variant, others)),
        batch=batch,
        cluster=cluster,
        devices=count,
        mesh=pinned,
        stages=number,
        starts=starts,
        placements=offloaded(placements) if offload else placements,
        schedules=looked_at(text, free=schedule is None and families and wide, forwards_first=forwards_first),
        tables=text == AUTO and not forwards_first,
        microbatches=microbatches,
        memory=cluster.memory if memory is None else parse_bytes(memory),
        pinned=memory is not None,
        per_layer=per_layer(placement),
        optimizer_ratio=_ratio(optimizer_ratio),
        forwards_first=forwards_first,
        ranks=fixed.ranks if fixed is not None else None,
        output=output,
        lookup=lookup,
        free=recompute is None,
        degrees={degree: partial(_variants, find, variant) for degree, find in degrees.items()},
        wide=wide,
        chunked=tuple((text, partial(_variants, find, variant)) for text, find in chunked.items()),
        widths=widths and len(cluster.groups) == 1,
    )
    _check_inside(request)
    check_counts(request)
    return request


def _on_stages(
    costs: Sequence[SegmentCost], recomputed: Sequence[SegmentCost] | None, *, parted: bool, looks_up: bool
) -> tuple[Sequence[SegmentCost], Sequence[SegmentCost], SegmentCost | None, SegmentCost | None]:
    """What the segments on stages cost, plain and recomputed; and the layers that are on none, as each rank has a part.

    These are the output layer, if it is `parted`, and the lookup in the input embedding, if the model `looks_up`.
    """
    inner = slice(1 if looks_up else 0, -1 if parted else None)
    if parted and len(costs) == 1:
        raise ValueError("schedule: the model is an output layer alone, with no layer for a stage; pin '1f1b'")
    plain = costs[inner]
    again = plain if recomputed is None else recomputed[inner]
    names = [cost.name for cost in plain]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"costs: at least one segment, each with its own name, is needed; got {names}")
    if [cost.name for cost in again] != names:
        raise ValueError(f"recomputed: expected the costs of {names}, not of {[cost.name for cost in again]}")
    return plain, again, costs[-1] if parted else None, costs[0] if looks_up else None


def _variants(find: Callable[[], Sequence[Costed]], variant: Callable[[Costed], Variant]) -> tuple[Variant, ...]:
    return tuple(variant(placed) for placed in find())


def whole(name: str, value: object) -> None:
    """TypeError or ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, not {value}")


def _agreed(fixed: Schedule, mesh: Mesh | None, microbatches: int | None) -> int:
    """The microbatches of a schedule that is for so many and no others; refuses pins that ask for other numbers."""
    if mesh is not None and mesh.degree("pp") != fixed.ranks:
        raise ValueError(
            f"schedule: it is for {fixed.ranks} pipeline ranks, a row each, but the mesh of {mesh} has "
            f"pp={mesh.degree('pp')}"
        )
    if microbatches not in (None, fixed.microbatches):
        raise ValueError(f"microbatches: {microbatches} contradict the schedule, which is for {fixed.microbatches}")
    return fixed.microbatches


def _ratio(value: float) -> float:
    """Bytes of optimizer state per byte of trainable parameter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"optimizer_ratio: expected a number such as 2 for AdamW, not {value!r}")
    if not 0 <= value < inf:
        raise ValueError(f"optimizer_ratio: state bytes per parameter byte cannot be {value}")
    return value


def _devices(devices: int | None, cluster: Cluster | None, mesh: Mesh | None) -> int:
    if devices is not None:
        whole("devices", devices)
    count = devices or (mesh.size if mesh is not None else cluster.devices if cluster else 1)
    if count > MOST_DEVICES:
        raise ValueError(f"devices: {count:,} are more than the {MOST_DEVICES:,} that plans are made for")
    if devices is None:
        return count
    if mesh is not None and mesh.size != devices:
        raise ValueError(f"mesh: {mesh} has {mesh.size} ranks, but there are {devices} devices")
    if cluster and devices > cluster.devices:
        raise ValueError(f"devices: {devices} asked for, but the cluster has {cluster.devices}")
    return devices


def pinned_mesh(mesh: Sizes | Mesh | None) -> Mesh | None:
    """A mesh pin as a mesh. Raises TypeError for what is none, ValueError for axes that are not known."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh | Mapping):
        raise TypeError(f"mesh: expected axis sizes such as {{'pp': 2, 'dp': 2}}, not {mesh!r}")
    return mesh if isinstance(mesh, Mesh) else Mesh.of(mesh)


def _stages(stages: int | Sequence[str] | None, names: list[str]) -> tuple[int | None, tuple[int, ...]]:
    """The number of stages, None if free (with names: the least number), and the segments that must begin one."""
    if stages is None:
        return None, ()
    if isinstance(stages, int):
        whole("stages", stages)
        return stages, ()
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not all(isinstance(s, str) for s in stages):
        raise TypeError(f"stages: expected a count or the module names where a stage begins, not {stages!r}")
    starts = tuple(sorted(_segment(name, names) for name in stages))
    if len(set(starts)) != len(starts):
        raise ValueError(f"stages: two of {list(stages)} begin at the same segment")
    return len({0, *starts}), starts


def _segment(name: str, names: list[str]) -> int:
    """The segment that a module name stands for: its own, else the first one inside the module."""
    for number, segment in enumerate(names):
        if segment == name or segment.startswith(f"{name}."):
            return number
    near = get_close_matches(name, names, n=3) or names[:8]
    raise ValueError(f"stages: no stage can begin at {name!r}; a stage begins at a segment, such as {', '.join(near)}")


def _recompute(pin: bool | Sequence[str] | None, names: list[str]) -> tuple[str, ...]:
    """The segments that a pin names: each module's own, else those inside the module."""
    if pin is None or isinstance(pin, bool):
        return ()
    if isinstance(pin, str) or not isinstance(pin, Sequence) or not all(isinstance(name, str) for name in pin):
        raise TypeError(f"recompute: expected True, False or a list of module names, not {pin!r}")
    wanted: set[str] = set()
    for module in pin:
        found = [name for name in names if name == module or name.startswith((f"{module}.", f"{module}@"))]
        if not found:
            around = [name for name in names if module.startswith(f"{name}.")]
            near = around or get_close_matches(module, names, n=3) or names[:8]
            raise ValueError(
                f"recompute: no segment is called {module!r}; whole segments are recomputed, such as {', '.join(near)}"
                + ("; a part of one is with torch.utils.checkpoint in its forward" if around else "")
            )
        wanted.update(found)
    return tuple(name for name in names if name in wanted)


def _check_inside(request: Request) -> None:
    """Refuse a mesh that splits tensors inside segments where nothing was decided, or the output layer is split."""
    mesh = request.mesh
    if request.output is not None and request.tensor is not None:
        raise ValueError(
            f"schedule: it splits the output layer over the pipeline ranks, and the mesh {mesh} splits tensors inside "
            "segments, which do not go together yet; pin another schedule, such as schedule='1f1b'"
        )
    if mesh is not None and not request.variants_on(mesh):
        raise ValueError(f"mesh: {mesh} splits tensors inside segments; use autopart.plan, which places them")
