"""schedule: Staged + Plan -> Scheduled. Build the plan's schedule and lower it; say which collectives it has.

before: 0F0 0F1 0B0 0B1
after:  0F0 0SEND0>1 0F1 0SEND1>1 0RECV0>1 0B0 0RECV1>1 0B1, and with `with_collectives` the GATHERs and REDUCEs of each
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autopart import schedules
from autopart.ir.action import Action, Kind, Scheduled
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.ir.state import Unit, used_units

FORWARDS_FIRST = "gpipe"
"""The schedule of all forwards, then all backwards."""


def schedule(staged: Staged, plan: Plan) -> Scheduled:
    """The lowered schedule. A program without a backward runs all its forwards in order.

    Raises ValueError for a step without a loss under a schedule that begins a backward before all forwards are done,
    and for a schedule that needs what programs cannot do yet.
    """
    captured = staged.segmented.captured
    if captured.deferred:
        check_deferred(plan.schedule)
    name = plan.schedule if captured.training else "forward"
    built = schedules.build(name, ranks=len(staged.stages), microbatches=plan.microbatches)
    schedules.check_executable(built)
    edges = frozenset((edge.source, edge.target) for edge in staged.edges)
    return schedules.lower(schedules.unpaired(built), edges)


def check_deferred(name: str | None) -> None:
    """Refuse a schedule, given by name, that a step without a loss cannot follow."""
    if name not in (None, FORWARDS_FIRST):
        raise ValueError(
            f"schedule: {name!r} begins backwards before all forwards are done, but the module returns no loss that "
            "requires grad, so what its outputs are used for is known only after the call; leave the schedule out "
            f"(it is {FORWARDS_FIRST!r} then), or return the loss from forward, or pass loss_fn= and call train_step"
        )


def with_collectives(staged: Staged, scheduled: Scheduled, degree: int) -> tuple[tuple[Action, ...], ...]:
    """Each pp rank's row with every GATHER and REDUCE where the program performs it (`degree` is that of dp).

    Those of a compute action follow it; those of the step as a whole have stage and microbatch -1.
    """
    homes = staged.state.homes()
    rows = []
    for column, row in enumerate(scheduled.table):
        held = [s for s, place in enumerate(scheduled.schedule.place) if place == column]
        units = [unit for unit in staged.state.units if set(unit.stages) & set(held)]
        made = [Action(Kind.GATHER, -1, -1, unit=unit.name) for unit in units if unit.updated_in_parts(degree)]
        for action in row:
            last = action.kind is Kind.B and action.microbatch == scheduled.last_backward(action.stage)
            made += [action, *_inside(staged, action, homes, degree, last)]
        made += _across_stages(staged, units)
        rows.append(tuple(made))
    return tuple(rows)


def _inside(staged: Staged, action: Action, homes: Mapping[str, Unit], degree: int, last: bool) -> Iterator[Action]:
    if action.kind not in (Kind.F, Kind.B):
        return
    back = action.kind is Kind.B
    segments = [
        segment
        for segment in (reversed(staged.stages[action.stage]) if back else staged.stages[action.stage])
        if not back or staged.segmented.bodies[segment.body].backward is not None
    ]
    completed = staged.completed(action.stage, degree) if last else {}
    used = [used_units(segment.parameters, homes) for segment in segments]
    gathers = [unit.name for units in used for unit in units if unit.gathered(degree)]
    done = 0  # gathers that were begun: with the first use of all the next one too, and so on
    for segment, units in zip(segments, used, strict=True):
        for _ in (unit for unit in units if unit.gathered(degree)):
            ahead = gathers[done : done + 1 + (done == 0)]
            done += len(ahead)
            yield from (Action(Kind.GATHER, action.stage, action.microbatch, unit=name) for name in ahead)
        if back:
            graded = {unit.name for unit in used_units(segment.gradients, homes)}
            reduced = [unit for unit in units if unit.name in graded and unit.reduced_at_once(degree)]
            reduced += completed.get(segment.name, ())
            for unit in reduced:
                yield Action(Kind.REDUCE, action.stage, action.microbatch, unit=unit.name)


def _across_stages(staged: Staged, units: Iterable[Unit]) -> list[Action]:
    here = {unit.name for unit in units}
    shared = [unit for unit in staged.trained() if unit.name in here and len(unit.stages) > 1]
    return [Action(Kind.REDUCE, -1, -1, unit=unit.name) for unit in shared]
