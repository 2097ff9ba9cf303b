"""The gate that every schedule passes: placement, completeness, local order, termination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

from autopart.ir.action import LOOKUPS, SHARED, Action, Kind, Schedule, Weights
from autopart.schedules.dependencies import Columns, Needs, dependencies
from autopart.schedules.text import grid
from autopart.schedules.timing import Interval, run_time

UNIT = {
    **{Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.PAIR: 3},
    **{Kind.S: 1, Kind.T: 1, Kind.E: 0, Kind.D: 0, Kind.OPT: 0},
}
"""What a schedule's table may hold, and what `unit_cost` says of it."""

Position = tuple[int, int]
"""Rank and step."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What `validate` found on its way, action by action in the order of `Schedule.parts()` but for the intervals.

    `positions` says where each stands (the members of a PAIR stand where it does), `columns` its number; `intervals`
    when each row's actions run at unit costs.
    """

    parts: Sequence[Action]
    positions: Sequence[Position]
    columns: Columns
    needs: Needs
    intervals: Sequence[Sequence[Interval]]


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that is not one: ValueError, its message showing the table with the fault in brackets.

    Every stage of every pipe sits on one of the ranks and every rank has a stage; every microbatch travels one pipe;
    each (stage, microbatch, slice) has exactly one F and exactly one of B or the pair I, W, on the rank of its stage
    (no backward anywhere is a forward-only schedule), an S and a T where the output layer is split, and an E and, with
    a backward, a D where the input embedding is; where weights change inside the table every stage has the same number
    of OPTs, each after an equal share of the microbatches; stages that may be anywhere have an F a microbatch, on some
    rank, and nothing else; an action comes after what it needs on the same rank; and the table as a whole terminates
    under the chain of stages. A schedule that passes also terminates under any other set of edges between stages, since
    the chain orders all of them.
    """
    examine(schedule)


def examine(schedule: Schedule) -> Examined:
    """The schedule seen through; raises what `validate` raises."""
    _check_settings(schedule)
    positions = [
        (rank, step) for rank, row in enumerate(schedule.table) for step, action in enumerate(row) for _ in action.parts
    ]
    known, pipes = _columns(schedule, positions)
    _check_complete(schedule, positions, known, pipes)
    needs = dependencies(schedule, known=known)
    intervals = run_time(schedule.table, needs, cost=unit_cost)
    found = Examined(tuple(schedule.parts()), positions, known, needs, intervals)
    _check_ends(schedule, found)
    return found


def unit_cost(action: Action) -> float:
    """The time of an action if all stages were alike: 1 for F, I, W, S and T; a lookup takes none."""
    return UNIT[action.kind]


def _check_settings(schedule: Schedule) -> None:
    """The placement of every pipe, and what the settings ask of each other."""
    name, ranks = schedule.name, range(schedule.ranks)
    for count, value in (("microbatches", schedule.microbatches), ("slices", schedule.slices)):
        if value < 1:
            raise ValueError(f"schedule {name!r}: {count} must be at least 1, not {value}")
    if schedule.lengths and (len(schedule.lengths) != schedule.slices or min(schedule.lengths) < 1):
        raise ValueError(
            f"schedule {name!r}: lengths must be a token or more for each of {schedule.slices} slices, not "
            f"{schedule.lengths}"
        )
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
    plain = not schedule.mirrors and not schedule.barriers and schedule.slices == 1
    if schedule.anywhere and not (plain and 0 < schedule.anywhere < schedule.stages):
        raise ValueError(
            f"schedule {name!r}: anywhere must be fewer than all {schedule.stages} stages, and 0 beside several pipes, "
            f"slices or barriers, not {schedule.anywhere}"
        )


def _columns(schedule: Schedule, positions: Sequence[Position]) -> tuple[Columns, dict[int, Action]]:
    """The numbers of all actions, the first of each microbatch; refuses what is foreign, misplaced or there twice."""
    known: Columns = {}
    pipes: dict[int, Action] = {}
    microbatches, number = range(schedule.microbatches), 0
    for rank, row in enumerate(schedule.table):
        fits: Columns = {}  # what this row has shown to be of this rank
        for step, action in enumerate(row):
            for part in action.parts:
                key = part.kind, part.stage, part.slice, part.pipe
                column = fits.get(key)
                plain = part.microbatch in microbatches and part.peer == -1 and not (part.unit or action.members)
                fault = "" if column is not None and plain else _fault(schedule, rank, part) or _pair_fault(action)
                first = part if part.kind is Kind.OPT else pipes.setdefault(part.microbatch, part)
                if not fault and first.pipe != part.pipe:
                    fault = f"travels pipe {part.pipe}, but {first} of the same microbatch pipe {first.pipe}"
                if fault:
                    raise _refusal(schedule, {(rank, step): ""}, f"rank {rank}, step {step}: {part} {fault}")
                if column is None:
                    column = fits[key] = known.setdefault(key, {})
                if (before := column.setdefault(part.microbatch, number)) != number:
                    marks = {positions[before]: "", (rank, step): ""}
                    raise _refusal(schedule, marks, f"rank {rank}, step {step}: {part} is there twice")
                number += 1
    return known, pipes


def _fault(schedule: Schedule, rank: int, action: Action) -> str:
    """What is wrong with an action by itself, or nothing."""
    if action.kind not in UNIT or action.peer != -1 or action.unit or action.members:
        return "is not one of F, B, I, W, S, T, E, D and OPT, or a PAIR of an F and a B"
    if not 0 <= action.stage < schedule.stages:
        return f"names stage {action.stage}, but stages are 0 to {schedule.stages - 1}"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"names microbatch {action.microbatch}, but microbatches are 0 to {schedule.microbatches - 1}"
    if not 0 <= action.slice < schedule.slices:
        return f"names slice {action.slice}, but slices are 0 to {schedule.slices - 1}"
    if not 0 <= action.pipe < len(schedule.places):
        return f"names pipe {action.pipe}, but pipes are 0 to {len(schedule.places) - 1}"
    if action.stage < schedule.anywhere:
        return "" if action.kind is Kind.F else "is of a stage that trains nothing, and has forwards alone"
    if schedule.rank(action) != rank:
        return f"is misplaced: stage {action.stage} belongs to rank {schedule.rank(action)}"
    if action.kind in SHARED and not schedule.barriers:
        return "is of an output layer split over the ranks, which this schedule does not have (barriers: 0)"
    if action.kind in LOOKUPS and not schedule.barriers:
        return "is of an input embedding split over the ranks, as only the output layer's is too (barriers: 1 or 2)"
    if action.kind is Kind.OPT and schedule.weights is Weights.SYNC:
        return "changes the weights inside the table, which needs one of the weights stash, double and current"
    return ""


def _pair_fault(action: Action) -> str:
    wrong = action.members and tuple(member.kind for member in action.members) != (Kind.F, Kind.B)
    return "is in a PAIR that is not of an F and a B" if wrong else ""


def _check_complete(
    schedule: Schedule, positions: Sequence[Position], known: Columns, pipes: Mapping[int, Action]
) -> None:
    """Each stage, microbatch and slice has what it must have, and each stage its share of the OPTs."""
    travellers: list[set[int]] = [set() for _ in schedule.places]
    for microbatch in range(schedule.microbatches):
        travellers[pipes[microbatch].pipe if microbatch in pipes else 0].add(microbatch)
    found = min(_gaps(schedule, known, travellers), default=None)
    if found is not None:
        stage, microbatch, piece, _, kind, pipe = found
        unit = (stage, microbatch, piece, pipe)
        there = {each: known.get((each, stage, piece, pipe), {}) for each in UNIT}
        at = {each: column[microbatch] for each, column in there.items() if microbatch in column}
        if kind not in at:
            raise _missing(schedule, Action(kind, *unit), positions, known)
        other = Kind.I if Kind.I in at else Kind.W
        marks = {positions[at[kind]]: "", positions[at[other]]: ""}
        both = f"both {Action(kind, *unit)} and {Action(other, *unit)}"
        raise _refusal(schedule, marks, f"rank {positions[at[kind]][0]}: {both}; B is I and W in one")
    if not all(schedule.table):
        idle = [bool(row) for row in schedule.table].index(False)
        raise ValueError(f"schedule {schedule.name!r}: rank {idle} has nothing to do: no microbatch travels its pipe")
    if schedule.weights is not Weights.SYNC:
        _check_updates(schedule, positions, known)


def _gaps(
    schedule: Schedule, known: Columns, travellers: Sequence[Set[int]]
) -> Iterator[tuple[int, int, int, int, Kind, int]]:
    """The stage, microbatch, slice and kind of what is missing, or of a B beside I or W; and its pipe.

    The number before the kind puts those of one microbatch in order.
    """
    kinds = {kind for kind, *_ in known}
    trains = not kinds <= {Kind.F, Kind.E, *SHARED}
    looked = [Kind.E, *[Kind.D] * trains] if kinds & LOOKUPS else []
    for stage, piece, (pipe, everything) in product(
        range(schedule.stages), range(schedule.slices), enumerate(travellers)
    ):
        has = {kind: known.get((kind, stage, piece, pipe), {}).keys() for kind in UNIT}
        split = has[Kind.I] | has[Kind.W]
        wrong: list[tuple[Kind, Set[int]]] = [
            (Kind.B, has[Kind.B] & split),
            (Kind.F, everything - has[Kind.F]),
            (Kind.I, split - has[Kind.I]),
            (Kind.W, split - has[Kind.W]),
        ]
        wrong += [(Kind.B, everything - split - has[Kind.B])] if trains and stage >= schedule.anywhere else []
        wrong += [(kind, everything - has[kind]) for kind in (Kind.S, Kind.T)] if schedule.barriers else []
        wrong += [(kind, everything - has[kind]) for kind in looked]
        for order, (kind, microbatches) in enumerate(wrong):
            for microbatch in microbatches:
                yield stage, microbatch, piece, order, kind, pipe


def _check_updates(schedule: Schedule, positions: Sequence[Position], known: Columns) -> None:
    """Every stage has OPTs 0 to n - 1, and n divides the number of microbatches."""
    updates = 1 + max((n for (kind, *_), column in known.items() if kind is Kind.OPT for n in column), default=0)
    for stage, number in product(range(schedule.anywhere, schedule.stages), range(updates)):
        if number not in known.get((Kind.OPT, stage, 0, 0), ()):
            raise _missing(schedule, Action(Kind.OPT, stage, number), positions, known)
    if schedule.microbatches % updates:
        raise ValueError(
            f"schedule {schedule.name!r}: {updates} OPTs a stage, which do not divide {schedule.microbatches} "
            "microbatches into batches of one size"
        )


def _check_local_order(schedule: Schedule, found: Examined) -> None:
    for number, wanted in enumerate(found.needs):
        rank, step = found.positions[number]
        for need in wanted:
            peer, other = found.positions[need]
            if peer == rank and other >= step:
                how = "comes before" if other > step else "is in one PAIR with"
                raise _refusal(
                    schedule,
                    {(rank, step): "", found.positions[need]: ""},
                    f"rank {rank}, step {step}: {found.parts[number]} {how} {found.parts[need]}, which it needs",
                )


def _check_ends(schedule: Schedule, found: Examined) -> None:
    """Every row ends; of one that does not, because of an order on one rank if there is such a fault."""
    ended = [len(done) for done in found.intervals]
    stuck = {(rank, done): "" for rank, done in enumerate(ended) if done < len(schedule.table[rank])}
    if stuck:
        _check_local_order(schedule, found)
        waits = "; ".join(_waits(schedule, stuck, ended, found))
        raise _refusal(schedule, stuck, f"the table never ends: {waits}")


def _waits(schedule: Schedule, stuck: Mapping[Position, str], ended: Sequence[int], found: Examined) -> Iterator[str]:
    for rank, step in stuck:
        members = (number for number, position in enumerate(found.positions) if position == (rank, step))
        needs = (need for number in members for need in found.needs[number])
        missing = next(need for need in needs if found.positions[need][1] >= ended[found.positions[need][0]])
        yield f"rank {rank} waits at {schedule.table[rank][step]} for {found.parts[missing]}"


def _missing(schedule: Schedule, action: Action, positions: Sequence[Position], known: Columns) -> ValueError:
    """The refusal of a schedule without an action, which the grid shows where that of the microbatch before stands."""
    rank = schedule.rank(action)
    row = schedule.table[rank]
    same = known.get((action.kind, action.stage, action.slice, action.pipe), {})
    before = same.get(action.microbatch - 1)
    step = len(row) if before is None else positions[before][1] + 1
    table = [*schedule.table]
    table[rank] = (*row[:step], action, *row[step:])
    shown = grid(table, {(rank, step): f"no {action}"})
    return ValueError(f"schedule {schedule.name!r}: rank {rank}: {action} is missing\n{shown}")


def _refusal(schedule: Schedule, marks: Mapping[Position, str], fault: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {fault}\n{grid(schedule.table, marks)}")
