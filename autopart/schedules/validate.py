"""The gate that every schedule passes: placement, completeness, local order, termination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.dependencies import dependencies
from autopart.schedules.text import grid
from autopart.schedules.timing import run_time

COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""What a schedule's table may hold."""


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that is not one: ValueError, its message showing the table with the fault in brackets.

    Every stage sits on one of the ranks and every rank has a stage; each (stage, microbatch) has exactly one F and
    exactly one of B or the pair I, W, on the rank of its stage (no backward anywhere is a forward-only schedule); an
    action comes after what it needs on the same rank; and the table as a whole terminates under the chain of stages. A
    schedule that passes also terminates under any other set of edges between stages, since the chain orders all of
    them.
    """
    _check_place(schedule)
    where = _positions(schedule)
    _check_complete(schedule, where)
    needs = dependencies(schedule)
    _check_local_order(schedule, where, needs)
    _check_terminates(schedule, needs)


Position = tuple[int, int]
"""Rank and step."""


def _check_place(schedule: Schedule) -> None:
    ranks = range(schedule.ranks)
    if schedule.microbatches < 1:
        raise ValueError(f"schedule {schedule.name!r}: microbatches must be at least 1, not {schedule.microbatches}")
    for stage, rank in enumerate(schedule.place):
        if rank not in ranks:
            raise ValueError(
                f"schedule {schedule.name!r}: stage {stage} is on rank {rank}, but ranks are 0 to {len(ranks) - 1}"
            )
    idle = sorted(set(ranks) - set(schedule.place))
    if idle or not schedule.place:
        raise ValueError(f"schedule {schedule.name!r}: rank {idle[0] if idle else 0} holds no stage")


def _positions(schedule: Schedule) -> dict[Action, Position]:
    """Where each action stands; refuses actions that are foreign, misplaced or there twice."""
    where: dict[Action, Position] = {}
    for rank, row in enumerate(schedule.table):
        for step, action in enumerate(row):
            fault = _fault(schedule, rank, action)
            if fault:
                raise _refusal(schedule, {(rank, step): ""}, f"rank {rank}, step {step}: {action} {fault}")
            if action in where:
                raise _refusal(
                    schedule,
                    {where[action]: "", (rank, step): ""},
                    f"rank {rank}, step {step}: {action} is there twice",
                )
            where[action] = (rank, step)
    return where


def _fault(schedule: Schedule, rank: int, action: Action) -> str:
    """What is wrong with an action by itself, or nothing."""
    if action.kind not in COMPUTE or action != Action(action.kind, action.stage, action.microbatch):
        return "is not one of F, B, I and W of a whole microbatch"
    if not 0 <= action.stage < schedule.stages:
        return f"names stage {action.stage}, but stages are 0 to {schedule.stages - 1}"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"names microbatch {action.microbatch}, but microbatches are 0 to {schedule.microbatches - 1}"
    if schedule.place[action.stage] != rank:
        return f"is misplaced: stage {action.stage} belongs to rank {schedule.place[action.stage]}"
    return ""


def _check_complete(schedule: Schedule, where: Mapping[Action, Position]) -> None:
    """Each stage and microbatch has one F and, unless the schedule has no backward at all, one of B or I and W."""
    trains = any(action.kind is not Kind.F for action in where)
    for stage, rank in enumerate(schedule.place):
        for microbatch in range(schedule.microbatches):
            f, b, i, w = (Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if b in where and (i in where or w in where):
                split = i if i in where else w
                raise _refusal(
                    schedule,
                    {where[b]: "", where[split]: ""},
                    f"rank {rank}: both {b} and {split}; B is I and W in one",
                )
            wanted = [f]
            if trains:
                wanted += [i, w] if i in where or w in where else [b]
            for action in wanted:
                if action not in where:
                    raise _missing(schedule, action, rank)


def _check_local_order(
    schedule: Schedule, where: Mapping[Action, Position], needs: Mapping[Action, tuple[Action, ...]]
) -> None:
    for action, (rank, step) in where.items():
        for need in needs[action]:
            peer, other = where[need]
            if peer == rank and other > step:
                raise _refusal(
                    schedule,
                    {(rank, step): "", where[need]: ""},
                    f"rank {rank}, step {step}: {action} comes before {need}, which it needs",
                )


def _check_terminates(schedule: Schedule, needs: Mapping[Action, tuple[Action, ...]]) -> None:
    intervals = run_time(schedule.table, needs, cost=lambda action: 1, delay=lambda need, action: 0)
    stuck = {(rank, len(done)): "" for rank, done in enumerate(intervals) if len(done) < len(schedule.table[rank])}
    if stuck:
        done = {action for row, ran in zip(schedule.table, intervals, strict=True) for action in row[: len(ran)]}
        waits = "; ".join(_waits(schedule, stuck, done, needs))
        raise _refusal(schedule, stuck, f"the table never ends: {waits}")


def _waits(
    schedule: Schedule, stuck: Mapping[Position, str], done: set[Action], needs: Mapping[Action, tuple[Action, ...]]
) -> Iterator[str]:
    for rank, step in stuck:
        action = schedule.table[rank][step]
        missing = next(need for need in needs[action] if need not in done)
        yield f"rank {rank} waits at {action} for {missing}"


def _missing(schedule: Schedule, action: Action, rank: int) -> ValueError:
    """The refusal of a schedule without an action, which the grid shows where that of the microbatch before stands."""
    row = schedule.table[rank]
    before = Action(action.kind, action.stage, action.microbatch - 1)
    step = row.index(before) + 1 if before in row else len(row)
    table = [*schedule.table]
    table[rank] = (*row[:step], action, *row[step:])
    shown = grid(table, {(rank, step): f"no {action}"})
    return ValueError(f"schedule {schedule.name!r}: rank {rank}: {action} is missing\n{shown}")


def _refusal(schedule: Schedule, marks: Mapping[Position, str], fault: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {fault}\n{grid(schedule.table, marks)}")
