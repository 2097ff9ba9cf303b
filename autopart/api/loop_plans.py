"""The plans of loops whose steps overlap: over the state of a plan for ordinary calls, with another schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopart.api import compiler
from autopart.cluster import Cluster, parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.action import Kind, Schedule
from autopart.ir.captured import Captured
from autopart.ir.cost import SegmentNumbers
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.ir.plan_text import format_bytes
from autopart.ir.segmented import Segmented
from autopart.ir.state import State
from autopart.passes.costs import costs
from autopart.passes.recompute import recompute
from autopart.passes.segment import layers, segment
from autopart.schedules import executable
from autopart.schedules.filling import Filled
from autopart.schedules.idle import fill_idle, steady
from autopart.schedules.spell import make
from autopart.schedules.stream import overlaps
from autopart.solver.front import even_split, front_split
from autopart.solver.request import Pins
from autopart.solver.timing import action_seconds, exchange_seconds, segment_seconds

PIECES = (1, 2, 4, 8)
"""Into how many pieces of about the same time a front is tried to be cut."""

FINER = 0.98
"""It is cut into more where that makes the predicted step at least so much shorter."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """What the stages of a loop with a frozen front take: a microbatch of each piece, of each stage, of a message."""

    frozen: tuple[float, ...]
    trained: tuple[dict[str, float], ...]
    edge: float

    def filled(self, schedule: Schedule, ranks: Sequence[int] | None = None) -> tuple[Filled, float, float]:
        """The loop that some ranks fill, the seconds of its step, and the part of it that they wait."""
        loop = fill_idle(schedule, self.trained, self.frozen, ranks=ranks, comm=self.edge)
        found = steady(loop, self.trained, self.frozen, self.edge)
        return loop, found.seconds, found.bubble


def of_state(captured: Captured, schedule: str, mesh: Mesh, microbatches: int, *, batch: int, pins: Pins) -> Plan:
    """The plan for ordinary calls of a model that has none when a loop begins: parameters whole, a stage a rank.

    Where `schedule` flushes, the stages are its, and the frozen layers in front are one or several before them, on the
    rank of the first; ValueError is raised if there are none.
    """
    kept: Pins = {
        **pins,
        "mesh": mesh,
        "microbatches": microbatches,
        "placement": pins.get("placement") or "ddp",
        "schedule": "1f1b",
    }
    if not overlaps(schedule):
        size = -(-max(mesh.dealt(batch)) // microbatches)
        trained = executable(make(schedule, ranks=mesh.degree("pp"), microbatches=microbatches))
        kept["stages"], pieces = _with_front(captured, mesh, size, trained, kept)
        kept["schedule"] = _ordinary(trained, pieces)
    return compiler.planned(captured, batch=batch, **kept)


def of_loop(
    segmented: Segmented, plan: Plan, schedule: str, microbatches: int, *, pins: Pins, state: State | None = None
) -> Plan:
    """The plan of a loop over the state of another plan, of which `state` says where parameters are already.

    Raises ValueError where `schedule` flushes and that plan has no stage of frozen layers in front, PlanInfeasible
    where the loop does not fit the memory.
    """
    if overlaps(schedule):
        return compiler.predicted(segmented, _endless(plan, schedule, microbatches))
    if plan.front:  # it is of such a loop itself
        return compiler.predicted(segmented, plan)
    return _filled(segmented, plan, schedule, pins, state)


def _endless(plan: Plan, schedule: str, microbatches: int) -> Plan:
    """Its step is the steady one, in which nobody waits: that of the busiest stage."""
    seconds = microbatches * max(plan.prediction.stage_seconds)
    steady = replace(plan.prediction, step_seconds=seconds, bubble=0.0)
    note = f"schedule {schedule}: as train_loop was asked; steps overlap, and the prediction is of one among many"
    return replace(plan, schedule=schedule, microbatches=microbatches, prediction=steady, notes=(*plan.notes, note))


def _ordinary(trained: Schedule, front: int) -> str:
    """What an ordinary call performs where loops fill the idle time of a schedule, as a table."""
    return str(Filled(trained, ((),) * trained.ranks, front).one)


def _cluster(pins: Pins, mesh: Mesh) -> Cluster:
    return pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)


def _with_front(captured: Captured, mesh: Mesh, size: int, trained: Schedule, pins: Pins) -> tuple[list[str], int]:
    """Where the stages of a loop begin, by the time of microbatches of `size`; and how many of them are the front.

    The front is cut into pieces where that makes the step shorter. Raises ValueError where nothing in front is frozen.
    """
    segmented = _apart(captured, compiler.named(pins.get("stages")), trained.stages)
    cluster = _cluster(pins, mesh)
    numbers = [cost.at(size) for cost in costs(segmented)]
    seconds = [sum(segment_seconds(each, cluster)) for each in numbers]
    count = _frozen(segmented)
    behind = front_split(seconds, count, trained.stages)

    def filled(front: Sequence[int]) -> tuple[Filled, float]:
        return _timed(numbers, (*front, *behind), len(front), cluster, mesh).filled(trained)[:2]

    front: tuple[int, ...] = (0,)
    loop, best = filled(front)
    for pieces in (each for each in PIECES[1:] if each <= count):
        finer = even_split(seconds[:count], pieces)
        found, length = filled(finer)
        if length < FINER * best:
            front, loop, best = finer, found, length
    parted = tuple(front[piece] for piece in loop.parted())
    if parted != front and filled(parted)[1] <= best:
        front = parted
    return [segmented.segments[i].name for i in (*front, *behind)][1:], len(front)


def _apart(captured: Captured, cuts: tuple[str, ...], stages: int) -> Segmented:
    """The segments of a model; beside a large front, which leaves too few of the rest, every layer is one."""
    segmented = segment(captured, cuts=cuts)
    if len(segmented.segments) - _frozen(segmented) >= stages:
        return segmented
    return segment(captured, cuts=(*dict.fromkeys((*cuts, *layers(captured))),))


def _timed(
    numbers: Sequence[SegmentNumbers], starts: Sequence[int], front: int, cluster: Cluster, mesh: Mesh
) -> _Timed:
    """What stages that begin at these segments take, the first `front` being the front's."""
    stages = [numbers[i:j] for i, j in pairwise([*starts, len(numbers)])]
    taken = [action_seconds(stage, cluster, first=number == front) for number, stage in enumerate(stages)]
    most = max((stage[0].boundary_bytes for stage in stages[1:]), default=0)
    edge = cluster.link_latency + most / cluster.link_bandwidth if mesh.degree("pp") > 1 else 0.0
    return _Timed(tuple(each["F"] for each in taken[:front]), tuple(taken[front:]), edge)


def _frozen(segmented: Segmented) -> int:
    """How many segments come before the first one that has a backward."""
    trained = (i for i, item in enumerate(segmented.segments) if segmented.phase(item, Kind.B) is not None)
    return next(trained, len(segmented.segments))


def _filled(segmented: Segmented, plan: Plan, schedule: str, pins: Pins, state: State | None) -> Plan:
    """Its idle time is filled with the forwards of its frozen layers, on the ranks that have room for these.

    Raises ValueError for a plan without such layers, PlanInfeasible where what they make of a batch has no room.
    """
    trained = executable(make(schedule, ranks=plan.mesh.degree("pp"), microbatches=plan.microbatches))
    front = len(plan.stages) - trained.stages
    if front < 1 or plan.schedule != _ordinary(trained, front):
        raise ValueError(
            f"schedule: the model's plan has no stage of frozen layers in front that {schedule!r} goes with; train a "
            "model that has not been called yet, or in an ordinary loop"
        )
    cluster, limit = _cluster(pins, plan.mesh), pins.get("memory")
    most = cluster.memory if limit is None else parse_bytes(limit)
    numbers = [cost.at(plan.largest) for cost in costs(recompute(segmented, plan.recompute))]
    sizes = [0, *(len(stage.segments) for stage in plan.stages)]
    timed = _timed(numbers, [sum(sizes[: i + 1]) for i in range(len(plan.stages))], front, cluster, plan.mesh)
    ranks, notes = _holders(plan, front, state), list(plan.notes)
    while True:
        loop, seconds, bubble = timed.filled(trained, ranks)
        step = replace(plan.prediction, step_seconds=seconds + _exchanged(plan, numbers, cluster), bubble=bubble)
        made = compiler.predicted(
            segmented,
            replace(plan, schedule=str(loop.table()), prediction=step, front=front, helpers=loop.helpers),
        )
        full = {rank: nbytes for rank, nbytes in _grown(plan, made) if nbytes > most}
        if not full:
            return replace(made, notes=(*notes, _told(loop)))
        if full.keys().isdisjoint(loop.helpers):
            rank, nbytes = next(iter(full.items()))
            raise PlanInfeasible(
                f"memory: rank {rank} would hold {format_bytes(nbytes)}, more than the {format_bytes(most)} that there "
                "are, with what the frozen layers make of the batch that comes next; train in an ordinary loop, or on "
                "smaller batches"
            )
        notes += (
            f"frozen layers: rank {rank} does not help, as it would hold {format_bytes(full[rank])} with them, more "
            f"than the {format_bytes(most)} that there are"
            for rank in loop.helpers
            if rank in full
        )
        ranks = [rank for rank in ranks if rank not in full or rank not in loop.helpers]


def _grown(before: Plan, after: Plan) -> Iterator[tuple[int, int]]:
    """The pipeline ranks that hold more under the second plan, with what that is."""
    for rank in range(after.mesh.degree("pp")):
        stage = after.place.index(rank)
        nbytes = after.prediction.memory[stage].total
        if nbytes > before.prediction.memory[stage].total:
            yield rank, nbytes


def _holders(plan: Plan, front: int, state: State | None) -> list[int]:
    """The pipeline ranks that may hold the front: all, or those that do where parameters are placed already."""
    ranks = [*range(plan.mesh.degree("pp"))]
    if state is None:
        return ranks
    units = [unit for unit in state.units if any(stage < front for stage in unit.stages)]
    return [rank for rank in ranks if all(rank in unit.columns for unit in units)]


def _exchanged(plan: Plan, numbers: Sequence[SegmentNumbers], cluster: Cluster) -> float:
    """The seconds of a step's collectives on the data axis, which overlap nothing: those of the rank with most."""
    degree, known = plan.mesh.degree("dp"), {each.name: each for each in numbers}
    taken = [0.0] * plan.mesh.degree("pp")
    for stage, rank in zip(plan.stages, plan.place, strict=True):
        mine = [known[name] for name in stage.segments]
        modes = [plan.placement_of(name).on("dp") for name in stage.segments]
        taken[rank] += exchange_seconds(mine, modes, degree, plan.microbatches, cluster)
    return max(taken)


def _told(loop: Filled) -> str:
    """Who computes the front, to read."""
    shares = [sorted({a.microbatch for gap in gaps for a in gap}) for gaps in loop.fills]
    ranks = ", ".join(f"{len(share)} on rank {rank}" for rank, share in enumerate(shares) if share)
    late = len({action.microbatch for gaps in loop.fills for action in gaps[-1]})
    pieces = f", in {loop.front} pieces each" if loop.front > 1 else ""
    return (
        f"frozen layers: while ranks train on a batch, those of the next one's {loop.batch} microbatches are computed "
        f"where they would wait: {ranks}{pieces}; {late} end after all else"
    )
