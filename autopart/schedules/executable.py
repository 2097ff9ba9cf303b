"""What of a schedule the compiler can turn into programs, and a schedule in the form that it takes."""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.action import Schedule, Weights


def executable(schedule: Schedule) -> Schedule:
    """The schedule as programs perform it: without pairs.

    Raises ValueError for one that can be built, checked and simulated, but not compiled yet, saying what it needs.
    """
    needed = {
        "several copies of the model, each for slices of the sequence": schedule.slices > 1 and bool(schedule.mirrors),
        "an output layer split over the pipeline ranks, and slices of the sequence": (
            schedule.slices > 1 and schedule.barriers > 0
        ),
    }
    if schedule.weights is not Weights.SYNC:
        raise ValueError(
            f"schedule: {schedule.name!r} takes the optimizer's steps between the microbatches of one call, and never "
            "flushes; autopart.train_loop(model, optimizer, batches, schedule=...) trains so; '1f1b' runs the same "
            f"microbatches on {schedule.ranks} ranks and flushes after each batch"
        )
    missing = [what for what, wanted in needed.items() if wanted]
    if missing:
        raise ValueError(
            f"schedule: {schedule.name!r} cannot be compiled yet, only simulated (autopart.schedules.simulate): "
            f"it needs {' and '.join(missing)}; '1f1b' and 'gpipe' run the same microbatches on {schedule.ranks} ranks"
        )
    # A forward before the backward that it was paired with: what waits for what, and is computed, stays the same.
    table = tuple(tuple(part for action in row for part in action.parts) for row in schedule.table)
    return replace(schedule, table=table)
