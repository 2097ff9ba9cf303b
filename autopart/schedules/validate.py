"""The gate that every schedule passes: placement, completeness, local order, termination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from autopart.ir.action import SHARED, Action, Kind, Schedule, Weights
from autopart.schedules.dependencies import Needs, dependencies
from autopart.schedules.text import grid
from autopart.schedules.timing import Interval, run_time

UNIT = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.PAIR: 3, Kind.S: 1, Kind.T: 1, Kind.OPT: 0}
"""What a schedule's table may hold, and what `unit_cost` says of it."""

Position = tuple[int, int]
"""Rank and step."""

Where = Mapping[Action, Position]
"""Where each action stands; the members of a PAIR stand where it does."""


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that is not one: ValueError, its message showing the table with the fault in brackets.

    Every stage of every pipe sits on one of the ranks and every rank has a stage; every microbatch travels one pipe;
    each (stage, microbatch, slice) has exactly one F and exactly one of B or the pair I, W, on the rank of its stage
    (no backward anywhere is a forward-only schedule), and an S and a T where the output layer is split; where weights
    change inside the table every stage has the same number of OPTs, each after an equal share of the microbatches; an
    action comes after what it needs on the same rank; and the table as a whole terminates under the chain of stages. A
    schedule that passes also terminates under any other set of edges between stages, since the chain orders all of
    them.
    """
    examine(schedule)


def examine(schedule: Schedule) -> tuple[Where, Needs, list[list[Interval]]]:
    """What `validate` found on its way: where each action stands, what it needs, and when it runs at unit costs."""
    _check_settings(schedule)
    where = _positions(schedule)
    _check_complete(schedule, where)
    needs = dependencies(schedule)
    intervals = run_time(schedule.table, needs, cost=unit_cost)
    _check_ends(schedule, where, needs, intervals)
    return where, needs, intervals


def unit_cost(action: Action) -> float:
    """The time of an action if all stages were alike: 1 for F, I, W, S and T."""
    return UNIT[action.kind]


def _check_settings(schedule: Schedule) -> None:
    """The placement of every pipe, and what the settings ask of each other."""
    name, ranks = schedule.name, range(schedule.ranks)
    for count, value in (("microbatches", schedule.microbatches), ("slices", schedule.slices)):
        if value < 1:
            raise ValueError(f"schedule {name!r}: {count} must be at least 1, not {value}")
    for pipe, place in enumerate(schedule.places):
        of = f" of pipe {pipe}" if schedule.mirrors else ""
        if len(place) != schedule.stages:
            raise ValueError(f"schedule {name!r}: pipe {pipe} has {len(place)} stages, but pipe 0 {schedule.stages}")
        for stage, rank in enumerate(place):
            if rank not in ranks:
                raise ValueError(
                    f"schedule {name!r}: stage {stage}{of} is on rank {rank}, but ranks are 0 to {len(ranks) - 1}"
                )
    idle = sorted(set(ranks).difference(*schedule.places))
    if idle or not schedule.place:
        raise ValueError(f"schedule {name!r}: rank {idle[0] if idle else 0} holds no stage")
    if schedule.barriers not in (0, 1, 2):
        raise ValueError(f"schedule {name!r}: barriers must be 0, 1 or 2, not {schedule.barriers}")
    if schedule.barriers and (schedule.mirrors or schedule.stages != schedule.ranks):
        raise ValueError(f"schedule {name!r}: an output layer split over the ranks needs one stage a rank and one pipe")
    if schedule.weights is not Weights.SYNC and schedule.mirrors:
        raise ValueError(f"schedule {name!r}: weights that change inside the table need one pipe")


def _positions(schedule: Schedule) -> dict[Action, Position]:
    """Where each action stands; refuses actions that are foreign, misplaced or there twice."""
    where: dict[Action, Position] = {}
    pipes: dict[int, Action] = {}
    for rank, row in enumerate(schedule.table):
        for step, action in enumerate(row):
            for part in action.parts:
                fault = _fault(schedule, rank, part) or _pair_fault(action)
                first = part if part.kind is Kind.OPT else pipes.setdefault(part.microbatch, part)
                if not fault and first.pipe != part.pipe:
                    fault = f"travels pipe {part.pipe}, but {first} of the same microbatch pipe {first.pipe}"
                if fault:
                    raise _refusal(schedule, {(rank, step): ""}, f"rank {rank}, step {step}: {part} {fault}")
                if part in where:
                    marks = {where[part]: "", (rank, step): ""}
                    raise _refusal(schedule, marks, f"rank {rank}, step {step}: {part} is there twice")
                where[part] = (rank, step)
    return where


def _fault(schedule: Schedule, rank: int, action: Action) -> str:
    """What is wrong with an action by itself, or nothing."""
    if action.kind not in UNIT or action.peer != -1 or action.unit or action.members:
        return "is not one of F, B, I, W, S, T and OPT, or a PAIR of an F and a B"
    if not 0 <= action.stage < schedule.stages:
        return f"names stage {action.stage}, but stages are 0 to {schedule.stages - 1}"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"names microbatch {action.microbatch}, but microbatches are 0 to {schedule.microbatches - 1}"
    if not 0 <= action.slice < schedule.slices:
        return f"names slice {action.slice}, but slices are 0 to {schedule.slices - 1}"
    if not 0 <= action.pipe < len(schedule.places):
        return f"names pipe {action.pipe}, but pipes are 0 to {len(schedule.places) - 1}"
    if schedule.rank(action) != rank:
        return f"is misplaced: stage {action.stage} belongs to rank {schedule.rank(action)}"
    if action.kind in SHARED and not schedule.barriers:
        return "is of an output layer split over the ranks, which this schedule does not have (barriers: 0)"
    if action.kind is Kind.OPT and schedule.weights is Weights.SYNC:
        return "changes the weights inside the table, which needs one of the weights stash, double and current"
    return ""


def _pair_fault(action: Action) -> str:
    wrong = action.members and tuple(member.kind for member in action.members) != (Kind.F, Kind.B)
    return "is in a PAIR that is not of an F and a B" if wrong else ""


def _check_complete(schedule: Schedule, where: Where) -> None:
    """Each stage, microbatch and slice has what it must have, and each stage its share of the OPTs."""
    trains = any(action.kind is not Kind.F for action in where)
    pipes = {action.microbatch: action.pipe for action in where if action.kind is not Kind.OPT}
    known = {(a.kind, a.stage, a.microbatch, a.slice, a.pipe) for a in where}
    shares = (Kind.S, Kind.T) if schedule.barriers else ()
    everything = product(range(schedule.stages), range(schedule.microbatches), range(schedule.slices))
    for stage, microbatch, piece in everything:
        unit = (stage, microbatch, piece, pipes.get(microbatch, 0))
        split = (Kind.I, *unit) in known or (Kind.W, *unit) in known
        if split and (Kind.B, *unit) in known:
            fused, part = Action(Kind.B, *unit), Action(Kind.I if (Kind.I, *unit) in known else Kind.W, *unit)
            marks = {where[fused]: "", where[part]: ""}
            raise _refusal(schedule, marks, f"rank {where[fused][0]}: both {fused} and {part}; B is I and W in one")
        backward = ((Kind.I, Kind.W) if split else (Kind.B,)) if trains else ()
        for kind in (Kind.F, *backward, *shares):
            if (kind, *unit) not in known:
                raise _missing(schedule, Action(kind, *unit), where)
    if not all(schedule.table):
        idle = [bool(row) for row in schedule.table].index(False)
        raise ValueError(f"schedule {schedule.name!r}: rank {idle} has nothing to do: no microbatch travels its pipe")
    if schedule.weights is not Weights.SYNC:
        _check_updates(schedule, where)


def _check_updates(schedule: Schedule, where: Where) -> None:
    """Every stage has OPTs 0 to n - 1, and n divides the number of microbatches."""
    updates = 1 + max((action.microbatch for action in where if action.kind is Kind.OPT), default=0)
    for stage, number in product(range(schedule.stages), range(updates)):
        if Action(Kind.OPT, stage, number) not in where:
            raise _missing(schedule, Action(Kind.OPT, stage, number), where)
    if schedule.microbatches % updates:
        raise ValueError(
            f"schedule {schedule.name!r}: {updates} OPTs a stage, which do not divide {schedule.microbatches} "
            "microbatches into batches of one size"
        )


def _check_local_order(schedule: Schedule, where: Where, needs: Needs) -> None:
    for action, (rank, step) in where.items():
        for need in needs[action]:
            peer, other = where[need]
            if peer == rank and other >= step:
                how = "comes before" if other > step else "is in one PAIR with"
                raise _refusal(
                    schedule,
                    {(rank, step): "", where[need]: ""},
                    f"rank {rank}, step {step}: {action} {how} {need}, which it needs",
                )


def _check_ends(schedule: Schedule, where: Where, needs: Needs, intervals: list[list[Interval]]) -> None:
    """Every row ends; of one that does not, because of an order on one rank if there is such a fault."""
    stuck = {(rank, len(done)): "" for rank, done in enumerate(intervals) if len(done) < len(schedule.table[rank])}
    if stuck:
        _check_local_order(schedule, where, needs)
        rows = zip(schedule.table, intervals, strict=True)
        done = {part for row, ran in rows for action in row[: len(ran)] for part in action.parts}
        waits = "; ".join(_waits(schedule, stuck, done, needs))
        raise _refusal(schedule, stuck, f"the table never ends: {waits}")


def _waits(schedule: Schedule, stuck: Mapping[Position, str], done: set[Action], needs: Needs) -> Iterator[str]:
    for rank, step in stuck:
        action = schedule.table[rank][step]
        missing = next(need for part in action.parts for need in needs[part] if need not in done)
        yield f"rank {rank} waits at {action} for {missing}"


def _missing(schedule: Schedule, action: Action, where: Where) -> ValueError:
    """The refusal of a schedule without an action, which the grid shows where that of the microbatch before stands."""
    rank = schedule.rank(action)
    row = schedule.table[rank]
    before = where.get(replace(action, microbatch=action.microbatch - 1))
    step = before[1] + 1 if before else len(row)
    table = [*schedule.table]
    table[rank] = (*row[:step], action, *row[step:])
    shown = grid(table, {(rank, step): f"no {action}"})
    return ValueError(f"schedule {schedule.name!r}: rank {rank}: {action} is missing\n{shown}")


def _refusal(schedule: Schedule, marks: Mapping[Position, str], fault: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {fault}\n{grid(schedule.table, marks)}")
