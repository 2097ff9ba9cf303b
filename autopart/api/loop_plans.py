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
from autopart.solver.front import front_split
from autopart.solver.request import Pins
from autopart.solver.timing import segment_seconds, timeline


def endless(segmented: Segmented, plan: Plan, schedule: str, microbatches: int) -> Plan:
    """The plan of a loop whose steps overlap, over the state of another plan.

    Its step is the steady one, in which nobody waits: that of the busiest stage.
    """
    seconds = microbatches * max(plan.prediction.stage_seconds)
    steady = replace(plan.prediction, step_seconds=seconds, bubble=0.0)
    note = f"schedule {schedule}: as train_loop was asked; steps overlap, and the prediction is of one among many"
    made = replace(plan, schedule=schedule, microbatches=microbatches, prediction=steady, notes=(*plan.notes, note))
    return compiler.predicted(segmented, made)


def with_front(
    captured: Captured, schedule: str, mesh: Mesh, microbatches: int, *, batch: int, devices: int, pins: Pins
) -> Plan:
    """The plan in which the frozen layers in front are a stage of their own on the first rank.

    The others, a stage a rank, follow `schedule`. Raises ValueError where nothing in front is frozen.
    """
    segmented = segment(captured, cuts=compiler.named(pins.get("stages")))
    ranks, cluster = mesh.degree("pp"), pins.get("cluster") or Cluster.preset("cpu", per_node=devices)
    size = -(-batch // (mesh.degree("dp") * microbatches))
    seconds = [sum(segment_seconds(cost.at(size), cluster)) for cost in costs(segmented)]
    starts = front_split(seconds, _frozen(segmented), ranks)
    trained = make(schedule, ranks=ranks, microbatches=microbatches)
    kept: Pins = {
        **pins,
        "mesh": mesh,
        "microbatches": microbatches,
        "devices": devices,
        "schedule": str(Filled(trained, ()).one),
        "stages": [segmented.segments[i].name for i in starts],
    }
    return compiler.planned(captured, batch=batch, **kept)


def _frozen(segmented: Segmented) -> int:
    """How many segments come before the first one that has a backward."""
    trained = (i for i, item in enumerate(segmented.segments) if segmented.phase(item, Kind.B) is not None)
    return next(trained, len(segmented.segments))


def filled(segmented: Segmented, plan: Plan, schedule: str) -> Plan:
    """The plan of a loop that fills idle time of `plan`, one of `with_front`, with its frozen layers' forwards.

    Raises ValueError for another plan.
    """
    ranks, seconds = plan.mesh.degree("pp"), plan.prediction.stage_seconds
    trained = make(schedule, ranks=ranks, microbatches=plan.microbatches)
    if plan.schedule != str(Filled(trained, ()).one):
        raise ValueError(
            f"schedule: the model's plan has no stage of frozen layers in front that {schedule!r} goes with; train a "
            "model that has not been called yet, or in an ordinary loop"
        )
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
    made = replace(plan, schedule=str(found.table()), prediction=steady, notes=(*plan.notes, note))
    return compiler.predicted(segmented, made)
