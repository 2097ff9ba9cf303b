"""What a caller asks of the solver, checked: pins as typed data, every bad argument refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from typing import TypedDict

from autopart import schedules
from autopart.cluster import Cluster, parse_bytes
from autopart.ir import plan_text
from autopart.ir.action import Schedule
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh
from autopart.ir.placement import PRESETS, Placement, executable
from autopart.schedules.spell import AUTO, is_table

Rules = tuple[tuple[str, Placement], ...]
"""(pattern, placement), the first match holds; the last pattern is '*'."""

INSIDE = ("tp", "cp", "ep")
"""The axes that split the tensors inside segments; a mesh has at most one of them."""

LEAN = ("1f1b", "v1f1b", "vhalf", "vmin", *(f"{name}(chunks={v})" for v in (3, 4) for name in ("interleaved", "bfs")))
"""Of the schedules that are searched, those which hold little, for each number of stages a rank: they say whether
something fits."""

FORWARDS_FIRST = ("gpipe", "2bp-gpipe", "bfs", "bfs(chunks=3)", "bfs(chunks=4)")
"""The schedules that are searched for steps without a loss."""


Pinned = str | Placement | Mapping[str, str | Placement | Mapping[str, object]] | None
"""A `placement` pin: a placement, or by pattern placements and, for tensors, a Shard or Replicate by axis."""


class Pins(TypedDict, total=False):
    """What a caller may pin of a plan; see `choose`."""

    cluster: Cluster | None
    devices: int | None
    mesh: Mapping[str, int] | Mesh | None
    stages: int | Sequence[str] | None
    placement: Pinned
    schedule: str | Schedule | None
    microbatches: int | None
    memory: str | int | None
    recompute: bool | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its pins resolved; None where the solver chooses."""

    costs: tuple[SegmentCost, ...]
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
    recompute: tuple[str, ...] = ()  # the segments whose forward runs again in their backward, as `costs` says
    recomputed: tuple[SegmentCost | None, ...] = ()  # what a segment costs then, None where it keeps no less
    forwards_first: bool = False  # whether all forwards must come before all backwards
    ranks: int | None = None  # the pipeline ranks that the schedule is for, where it is for no other number
    output: SegmentCost | None = None  # the output layer, where the schedule splits it over the pipeline ranks

    @property
    def searched(self) -> bool:
        """Whether the schedule is searched for."""
        return len(self.schedules) > 1

    def scheduled(self, text: str, ranks: int, microbatches: int) -> Schedule:
        """The schedule of a text on so many pipeline ranks; ValueError where it cannot be."""
        return schedules.executable(schedules.make(text, ranks=ranks, microbatches=microbatches))

    def stages_on(self, ranks: int) -> int:
        """How many stages there are on so many pipeline ranks; ValueError where the schedule cannot be on them.

        Where it is searched for, as many as the pins need if each rank may have equally many, else one a rank.
        """
        if self.searched:
            needed = self.stages or ranks
            needed += -needed % ranks if self.starts else 0
            return needed if ranks > 1 and needed in range(ranks, 4 * ranks + 1, ranks) else ranks
        return self.scheduled(self.schedules[0], ranks, self.microbatches or 4 * ranks).stages

    def recomputing(self) -> Request:
        """The request with every segment recomputed that keeps less by it."""
        pairs = zip(self.costs, self.recomputed, strict=True)
        names = tuple(plain.name for plain, again in pairs if again is not None or plain.name in self.recompute)
        costs = tuple(again or plain for plain, again in zip(self.costs, self.recomputed, strict=True))
        return replace(self, costs=costs, recompute=names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments."""
        return tuple(cost.name for cost in self.costs)


def resolve(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    cluster: Cluster | None,
    devices: int | None,
    mesh: Mapping[str, int] | Mesh | None,
    stages: int | Sequence[str] | None,
    placement: Pinned,
    schedule: str | Schedule | None,
    microbatches: int | None,
    memory: str | int | None,
    recompute: bool | Sequence[str] | None,
    recomputed: Sequence[SegmentCost] | None,
    optimizer_ratio: float,
    forwards_first: bool,
    output: SegmentCost | None = None,
) -> Request:
    """The request behind the arguments of `choose`; ValueError or TypeError names the argument that is wrong."""
    names = [cost.name for cost in costs]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"costs: at least one segment, each with its own name, is needed; got {names}")
    whole("batch", batch)
    pinned = pinned_mesh(mesh)
    count = _devices(devices, cluster, pinned)
    wanted = _recompute(recompute, names)
    again = tuple(costs if recomputed is None else recomputed)
    if [cost.name for cost in again] != names:
        raise ValueError(f"recomputed: expected the costs of {names}, not of {[cost.name for cost in again]}")
    cluster = cluster or Cluster.preset("cpu", per_node=count)
    number, starts = _stages(stages, names)
    if microbatches is not None:
        whole("microbatches", microbatches)
    text = schedules.spell("1f1b" if schedule is None else schedule)
    fixed = schedule if isinstance(schedule, Schedule) else schedules.read(text) if is_table(text) else None
    if fixed is not None:
        microbatches = _agreed(fixed, pinned, microbatches)
    request = Request(
        costs=tuple(a if p.name in wanted else p for p, a in zip(costs, again, strict=True)),
        batch=batch,
        cluster=cluster,
        devices=count,
        mesh=pinned,
        stages=number,
        starts=starts,
        placements=_placements(placement),
        schedules=(text,) if text != AUTO else FORWARDS_FIRST if forwards_first else LEAN,
        microbatches=microbatches,
        memory=cluster.memory if memory is None else parse_bytes(memory),
        optimizer_ratio=_ratio(optimizer_ratio),
        recompute=wanted,
        recomputed=tuple(
            a if a.at(batch).saved_bytes < p.at(batch).saved_bytes else None for p, a in zip(costs, again, strict=True)
        ),
        forwards_first=forwards_first,
        ranks=fixed.ranks if fixed is not None else None,
        output=output,
    )
    _check_counts(request)
    return request.recomputing() if recompute is True else request


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
    if devices is None:
        return mesh.size if mesh is not None else cluster.devices if cluster else 1
    whole("devices", devices)
    if mesh is not None and mesh.size != devices:
        raise ValueError(f"mesh: {mesh} has {mesh.size} ranks, but there are {devices} devices")
    if cluster and devices > cluster.devices:
        raise ValueError(f"devices: {devices} asked for, but the cluster has {cluster.devices}")
    return devices


def pinned_mesh(mesh: Mapping[str, int] | Mesh | None) -> Mesh | None:
    """A mesh pin as a mesh. Raises TypeError for what is none, ValueError for axes that no plan has together."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh | Mapping):
        raise TypeError(f"mesh: expected axis sizes such as {{'pp': 2, 'dp': 2}}, not {mesh!r}")
    made = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh)
    inside = [axis for axis, size in made.axes if axis in INSIDE and size > 1]
    if len(inside) > 1:
        raise ValueError(f"mesh: {made} splits tensors on {' and '.join(inside)}; use one of these, of their product")
    return made


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


def _placements(pin: Pinned) -> tuple[Rules, ...]:
    presets = tuple(Placement.preset(name) for name in PRESETS)
    if pin is None:
        return tuple((("*", preset),) for preset in presets)
    if not isinstance(pin, Mapping):
        return ((("*", _placement(pin)),),)
    rules = tuple((pattern, _placement(value)) for pattern, value in pin.items() if pattern != "*")
    if not all(isinstance(pattern, str) for pattern, _ in rules):
        raise TypeError(f"placement: patterns must be module or parameter names, not {[p for p, _ in rules]}")
    rest = (_placement(pin["*"]),) if "*" in pin else presets
    return tuple((*rules, ("*", preset)) for preset in rest)


def _placement(value: object) -> Placement:
    if isinstance(value, str):
        value = Placement.preset(value)
    if not isinstance(value, Placement):
        raise TypeError(f"placement: expected one of {', '.join(PRESETS)} or a Placement, not {value!r}")
    return executable(value)


def _check_counts(request: Request) -> None:
    """Refuse counts that cannot go together: segments and stages, devices and stages, batch and microbatches."""
    pp = _pipelines(request)
    dp = request.mesh.degree("dp") if request.mesh is not None else request.devices // max(pp)
    count = request.microbatches or 1
    if request.batch < dp * count:
        raise ValueError(
            f"microbatches: a batch of {request.batch} over dp={dp} allows at most {request.batch // dp}, not {count}"
            if request.batch >= dp
            else f"batch: {request.batch} samples are too few for dp={dp}; at least {dp} are needed"
        )


def _pipelines(request: Request) -> list[int]:
    """The numbers of pipeline ranks that the pins allow; ValueError if there is none."""
    if request.mesh is not None:
        pp = request.mesh.degree("pp")
        _check_stages(request, request.stages_on(pp))
        return [pp]
    found: dict[int, int] = {}
    refused: ValueError | None = None
    for pp in (pp for pp in range(1, request.devices + 1) if request.devices % pp == 0):
        if request.ranks not in (None, pp):
            continue
        try:
            found[pp] = request.stages_on(pp)
        except ValueError as error:  # a family may be for even numbers only, say
            refused = error
    allowed = [pp for pp, stages in found.items() if request.stages in (None, stages)]
    if not found and refused is not None:
        raise refused
    if not found:
        raise ValueError(f"schedule: it is for {request.ranks} pipeline ranks, which {request.devices} devices are not")
    if not allowed:
        raise ValueError(
            f"stages: {request.devices} devices cannot be divided into {request.stages} equal stages"
            if all(pp == stages for pp, stages in found.items())
            else f"stages: {plan_text.schedule(request.schedules[0])} on {request.devices} devices has "
            f"{' or '.join(map(str, found.values()))} stages, not {request.stages}"
        )
    fitting = [pp for pp in allowed if found[pp] <= len(request.costs)]
    if not fitting:
        _check_stages(request, min(found[pp] for pp in allowed))
    return fitting


def _check_stages(request: Request, stages: int) -> None:
    """Refuse a number of stages that contradicts the `stages` pin, or for which there are too few segments."""
    segments, wanted, mesh = len(request.costs), request.stages, request.mesh
    if mesh is not None and wanted is not None and (wanted > stages if request.starts else wanted != stages):
        ranks = mesh.degree("pp")
        begun = f"{[request.names[i] for i in request.starts]} make " if request.starts else ""
        chunks, over = divmod(wanted, ranks)
        several = "" if over or chunks < 2 else f", or a schedule such as 'interleaved(chunks={chunks})'"
        raise ValueError(
            f"stages: {begun}{wanted} stages contradict the mesh of {mesh} (pp={ranks}), on which the schedule has "
            f"{stages}; pin {stages}, or another mesh{several}"
        )
    if stages > segments:
        chunked = mesh is not None and stages > mesh.degree("pp")
        pinned = "stages" if mesh is None or wanted == stages else "schedule" if chunked else "mesh"
        raise ValueError(
            f"{pinned}: {stages} stages need {stages} segments, but the model has {segments}: "
            f"{', '.join(request.names)}; have fewer pipeline ranks"
            + (f", or fewer stages on each than {plan_text.schedule(request.schedules[0])}" if chunked else "")
        )
