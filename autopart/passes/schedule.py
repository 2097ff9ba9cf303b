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

    Raises ValueError for a step without a loss under a schedule that begins a backward before all forwards are done.
    """
    captured = staged.segmented.captured
    if captured.deferred:
        check_deferred(plan.schedule)
    name = plan.schedule if captured.training else "forward"
    built = schedules.build(name, ranks=len(staged.stages), microbatches=plan.microbatches)
    return schedules.lower(built, frozenset((edge.source, edge.target) for edge in staged.edges))


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
            made += [action, *_inside(staged, action, homes, degree)]
        made += _at_the_end(staged, units, degree)
        rows.append(tuple(made))
    return tuple(rows)


def _inside(staged: Staged, action: Action, homes: Mapping[str, Unit], degree: int) -> Iterator[Action]:
    if action.kind not in (Kind.F, Kind.B):
        return
    segments = staged.stages[action.stage]
    for segment in segments if action.kind is Kind.F else reversed(segments):
        body = staged.segmented.bodies[segment.body]
        if action.kind is Kind.B and body.backward is None:
            continue
        units = used_units(segment.parameters, homes)
        for unit in units:
            if unit.gathered(degree):
                yield Action(Kind.GATHER, action.stage, action.microbatch, unit=unit.name)
        if action.kind is Kind.B:
            graded = {unit.name for unit in used_units(segment.gradients, homes)}
            for unit in units:
                if unit.name in graded and unit.reduced_at_once(degree):
                    yield Action(Kind.REDUCE, action.stage, action.microbatch, unit=unit.name)


def _at_the_end(staged: Staged, units: Iterable[Unit], degree: int) -> list[Action]:
    here = {unit.name for unit in units}
    trained = [unit for unit in staged.trained() if unit.name in here]
    over_dp = [unit for unit in trained if degree > 1 and not unit.reduced_at_once(degree)]
    over_pp = [unit for unit in trained if len(unit.stages) > 1]
    return [Action(Kind.REDUCE, -1, -1, unit=unit.name) for unit in (*over_dp, *over_pp)]
