"""schedule: Staged + Plan -> Scheduled. Build the plan's schedule and lower it; say which collectives it has.

before: 0F0 0F1 0B0 0B1
after:  0F0 0SEND0>1 0F1 0SEND1>1 0RECV0>1 0B0 0RECV1>1 0B1, and with `with_collectives` the GATHERs and REDUCEs of each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from autopart import schedules
from autopart.codegen.moves import moves
from autopart.ir import plan_text
from autopart.ir.action import COMPLETES, LOOKUPS, SHARED, Action, Kind, Schedule, Scheduled, Weights
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.ir.state import Unit
from autopart.passes.overlap import check_loop
from autopart.schedules import placed
from autopart.schedules.filling import Filled
from autopart.schedules.lookups import looking_up
from autopart.schedules.spell import AUTO, is_table
from autopart.schedules.stream import overlaps, stream_of, table_of


def schedule(staged: Staged, plan: Plan) -> Scheduled:
    """The lowered schedule. A program without a backward runs its forwards in rounds.

    Raises ValueError for a schedule that places stages elsewhere than the plan does, one that needs what programs
    cannot do yet, and a step without a loss under one that begins a backward before all forwards are done.
    """
    captured = staged.segmented.captured
    if captured.training and overlaps(plan.schedule):
        return _endless(staged, plan)
    made = built(plan, training=captured.training)
    if made.slices != staged.slices:
        raise ValueError(
            f"schedule: {plan_text.schedule(plan.schedule)} cuts the sequence into {made.slices} slices, but the plan "
            f"into {staged.slices}; plan again with this schedule"
        )
    if made.places != (plan.place, *plan.mirrors[: staged.copies - 1]):
        raise ValueError(
            f"schedule: {plan_text.schedule(plan.schedule)} has its {made.stages} stages on the pipeline ranks "
            f"{_told(made.places)}, but the plan its {len(plan.place)} stages on "
            f"{_told((plan.place, *plan.mirrors))}; plan again with this schedule"
        )
    made = schedules.executable(made)
    if made.barriers != plan.barriers:
        raise ValueError(
            f"schedule: {plan_text.schedule(plan.schedule)} has its output layer split over the pipeline ranks by "
            f"{made.barriers} barriers, but the plan by {plan.barriers}; plan again with this schedule"
        )
    if captured.deferred:
        _check_deferred(made)
    one, width = staged.depth + staged.parts + staged.lookups, staged.width  # the stages of one copy, of one slice
    ends = {(e.source, e.target) for e in staged.edges if max(e.source, e.target) < one}
    if staged.slices > 1:  # what slices of the sequence hand to each other stays on its stage
        ends = {(source % width, target % width) for source, target in ends if source % width != target % width}
    edges = frozenset(ends)
    return unfolded(schedules.lower(made, edges))


def _endless(staged: Staged, plan: Plan) -> Scheduled:
    """The rows of a loop whose steps overlap, for as many batches as show a beginning, a middle and an end."""
    check_loop(staged, plan)
    found, edges = stream_of(plan), frozenset((edge.source, edge.target) for edge in staged.edges)
    table = found.numbered() if isinstance(found, Filled) else built(plan)
    return Scheduled(table, found.rows(edges, found.shown))


def built(plan: Plan, *, training: bool = True) -> Schedule:
    """The plan's schedule; without `training`, the forwards of its stages in rounds.

    Where steps overlap, that of a few batches. Raises ValueError for a schedule that cannot be made for the plan's
    ranks and microbatches.
    """
    if training and overlaps(plan.schedule):
        return table_of(plan)
    if training:
        made = schedules.make(plan.schedule, ranks=plan.mesh.degree("pp"), microbatches=plan.microbatches)
    else:
        made = placed.forwards(plan.place, plan.microbatches, plan.barriers)
    return looking_up(made, wanted=plan.lookup)


def _told(places: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(map(str, places))


def unfolded(scheduled: Scheduled) -> Scheduled:
    """With the stages of every copy of the model, or slice of the sequence, numbered through, as programs have them.

    So are the parts of an output layer.

    before: 1F0 1F2p1   after: 1F0 3F2   (two copies, or slices (1F2s1), of two stages)
    before: 1F0 1S0     after: 1F0 3S0   (an output layer split over two stages)
    before: 1E0 1D0     after: 5F0 5B0   (an input embedding, too, whose parts are stages like others)
    """
    schedule = scheduled.schedule
    if not schedule.mirrors and not schedule.barriers and schedule.slices == 1:
        return scheduled

    def renumbered(action: Action) -> Action:
        first = (action.pipe or action.slice or action.kind in SHARED) * schedule.stages
        if action.kind in LOOKUPS:
            kind = Kind.F if action.kind is Kind.E else Kind.B
            return replace(action, kind=kind, stage=action.stage + 2 * schedule.stages)
        peer = action.peer + first if action.peer >= 0 else action.peer  # of a message of a layer in parts: as it is
        return replace(action, stage=action.stage + first, peer=peer, pipe=0, slice=0)

    table, lowered = (tuple(tuple(map(renumbered, row)) for row in rows) for rows in (schedule.table, scheduled.table))
    parts = schedule.place * (bool(schedule.barriers) + schedule.looks_up)
    place = sum(schedule.mirrors, schedule.place) * schedule.slices + parts
    whole = replace(schedule, place=place, table=table, mirrors=(), slices=1)
    return Scheduled(whole, lowered)


def check_deferred(schedule: str | Schedule | None) -> None:
    """Refuse a schedule, as it was given, that a step without a loss cannot follow."""
    if schedule is None:
        return
    text = schedules.spell(schedule)
    if text == AUTO:  # the solver looks only at schedules that such a step can follow
        return
    try:
        made = schedules.read(text) if is_table(text) else schedules.make(text, ranks=4, microbatches=8)
    except ValueError:  # it is for other numbers, which are known once there is a plan
        return
    _check_deferred(made)


def _check_deferred(made: Schedule) -> None:
    if not placed.is_forwards_first(made):
        raise ValueError(
            f"schedule: {made.name!r} begins backwards before all forwards are done, but the module returns no loss "
            "that requires grad, so what its outputs are used for is known only after the call; leave the schedule out "
            "(all forwards come first then, as with 'gpipe'), or return the loss from forward, or pass loss_fn= and "
            "call train_step"
        )


def forwards_first(plan: Plan) -> Plan:
    """The plan with all forwards before all backwards, as steps without a loss need, if its schedule is another."""
    if placed.is_forwards_first(built(plan)):
        return plan
    option = f"lengths={plan.lengths}" if plan.lengths else f"slices={plan.slices}"
    plain = "gpipe" if plan.slices == 1 else f"terapipe({option})"
    name = plain if plan.place == tuple(range(len(plan.place))) else None
    return replace(plan, schedule=name or str(placed.forwards_first(plan.place, plan.microbatches)))


def with_collectives(staged: Staged, scheduled: Scheduled, widths: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Each pp rank's row with every GATHER and REDUCE where it performs them; `widths` are the data ranks of each.

    Those of a compute action follow it; those of the step as a whole have stage and microbatch -1.
    """
    if scheduled.schedule.weights is not Weights.SYNC:
        pairs = zip(scheduled.table, widths, strict=True)
        return tuple(tuple(_with_updates(staged, row, degree)) for row, degree in pairs)
    rows = []
    completed = [
        staged.completed(stage, widths[column], scheduled.unfinished(stage))
        for stage, column in enumerate(scheduled.schedule.place)
    ]
    lasts = [scheduled.last_backward(stage) for stage in range(scheduled.schedule.stages)]
    known: dict[tuple[int, Kind, bool], tuple[tuple[Kind, str], ...]] = {}
    for column, (row, degree) in enumerate(zip(scheduled.table, widths, strict=True)):
        units = staged.state.on(column)
        made = [Action(Kind.GATHER, -1, -1, unit=unit.name) for unit in units if unit.updated_in_parts(degree)]
        for action in row:
            last = action.kind in COMPLETES and action.microbatch == lasts[action.stage]
            key = action.stage, action.kind, last
            if key not in known:
                done = completed[action.stage] if last else {}
                known[key] = tuple(_inside(staged, action.stage, action.kind, degree, done))
            made.append(action)
            made += [Action(kind, action.stage, action.microbatch, unit=name) for kind, name in known[key]]
        made += [Action(Kind.REDUCE, -1, -1, unit=unit.name) for unit in staged.shared(column)]
        rows.append(tuple(made))
    return tuple(rows)


def _with_updates(staged: Staged, row: Sequence[Action], degree: int) -> Iterator[Action]:
    """A row of a loop whose steps overlap, with the REDUCEs before each step of the optimizer."""
    for steps, part in groupby(row, lambda action: action.kind is Kind.OPT):
        actions = [*part]
        if steps and degree > 1:
            stages = {action.stage for action in actions}
            units = (unit for unit in staged.trained() if not stages.isdisjoint(unit.stages))
            yield from (Action(Kind.REDUCE, -1, -1, unit=unit.name) for unit in units)
        yield from actions


def _inside(
    staged: Staged,
    stage: int,
    kind: Kind,
    degree: int,
    completed: Mapping[str, tuple[Unit, ...]],
) -> Iterator[tuple[Kind, str]]:
    """The GATHERs and REDUCEs of an action, by unit, `completed` being the units that it completes, by segment."""
    if kind not in staged.kinds(stage):
        return
    started = False
    for each in moves(staged, stage, kind, degree, completed):
        for bucket, then in each.gathers:  # each was begun with the one before it, but for the first
            yield from ((Kind.GATHER, unit.name) for unit in (*(() if started else bucket), *then))
            started = True
        yield from ((Kind.REDUCE, unit.name) for bucket in each.reduces for unit in bucket)
