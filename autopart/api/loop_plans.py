"""The plans of loops whose steps overlap: over the state of a plan for ordinary calls, with another schedule."""

from __future__ import annotations

from dataclasses import replace

from autopart.api import compiler
from autopart.cluster import Cluster
from autopart.ir.action import Kind
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segmented
from autopart.passes.costs import costs
from autopart.passes.segment import segment
from autopart.schedules.filling import Filled, fill_idle
from autopart.schedules.spell import make
from autopart.schedules.stream import overlaps
from autopart.solver.front import front_split
from autopart.solver.request import Pins
from autopart.solver.timing import segment_seconds, timeline


def of_state(captured: Captured, schedule: str, mesh: Mesh, microbatches: int, *, batch: int, pins: Pins) -> Plan:
    """The plan for ordinary calls of a model that has none when a loop begins: a stage a rank, parameters whole.

    Where `schedule` flushes, the frozen layers in front are a stage of their own on the first rank, and ValueError is
    raised if there are none.
    """
    kept: Pins = {
        **pins,
        "mesh": mesh,
        "microbatches": microbatches,
        "placement": pins.get("placement") or "ddp",
        "schedule": "1f1b",
    }
    if not overlaps(schedule):
        kept["stages"] = _with_front(captured, mesh, -(-batch // (mesh.degree("dp") * microbatches)), kept)
        kept["schedule"] = _ordinary(schedule, mesh, microbatches)
    return compiler.planned(captured, batch=batch, **kept)


def of_loop(segmented: Segmented, plan: Plan, schedule: str, microbatches: int) -> Plan:
    """The plan of a loop over the state of another plan.

    Raises ValueError where `schedule` flushes and that plan has no stage of frozen layers in front.
    """
    made = _endless(plan, schedule, microbatches) if overlaps(schedule) else _filled(plan, schedule)
    return compiler.predicted(segmented, made)


def _endless(plan: Plan, schedule: str, microbatches: int) -> Plan:
    """Its step is the steady one, in which nobody waits: that of the busiest stage."""
    seconds = microbatches * max(plan.prediction.stage_seconds)
    steady = replace(plan.prediction, step_seconds=seconds, bubble=0.0)
    note = f"schedule {schedule}: as train_loop was asked; steps overlap, and the prediction is of one among many"
    return replace(plan, schedule=schedule, microbatches=microbatches, prediction=steady, notes=(*plan.notes, note))


def _ordinary(schedule: str, mesh: Mesh, microbatches: int) -> str:
    """What an ordinary call performs where loops fill the idle time of `schedule`, as a table."""
    return str(Filled(make(schedule, ranks=mesh.degree("pp"), microbatches=microbatches), ()).one)


def _with_front(captured: Captured, mesh: Mesh, size: int, pins: Pins) -> list[str]:
    """Where stages begin if the frozen layers are one and the others, by the time of microbatches of `size`, a rank's.

    Raises ValueError where nothing in front is frozen.
    """
    segmented = segment(captured, cuts=compiler.named(pins.get("stages")))
    cluster = pins.get("cluster") or Cluster.preset("cpu", per_node=mesh.size)
    seconds = [sum(segment_seconds(cost.at(size), cluster)) for cost in costs(segmented)]
    return [segmented.segments[i].name for i in front_split(seconds, _frozen(segmented), mesh.degree("pp"))]


def _frozen(segmented: Segmented) -> int:
    """How many segments come before the first one that has a backward."""
    trained = (i for i, item in enumerate(segmented.segments) if segmented.phase(item, Kind.B) is not None)
    return next(trained, len(segmented.segments))


def _filled(plan: Plan, schedule: str) -> Plan:
    """Its idle time is filled with the forwards of its frozen layers. Raises ValueError for a plan without these."""
    if plan.schedule != _ordinary(schedule, plan.mesh, plan.microbatches):
        raise ValueError(
            f"schedule: the model's plan has no stage of frozen layers in front that {schedule!r} goes with; train a "
            "model that has not been called yet, or in an ordinary loop"
        )
    seconds = plan.prediction.stage_seconds
    trained = make(schedule, ranks=plan.mesh.degree("pp"), microbatches=plan.microbatches)
    parts = [{"F": each / 3, "B": 2 * each / 3, "I": 0.0, "W": 0.0} for each in seconds[1:]]
    found = fill_idle(trained, parts, seconds[0])
    front = {"F": seconds[0], "B": 0.0, "I": 0.0, "W": 0.0}
    line = timeline(found.table(), [front, *parts])
    windows = sum(map(bool, found.fills[:-1]))
    note = (
        f"frozen layers: the forwards of a batch fill {windows} idle windows of rank 0 while the one before it is "
        f"trained on; {found.fills[-1]} of {found.batch} microbatches fit into none and come after them"
    )
    steady = replace(
        plan.prediction, step_seconds=line.makespan / found.shown, bubble=line.flush_bubble / line.makespan
    )
    return replace(plan, schedule=str(found.table()), prediction=steady, notes=(*plan.notes, note))
