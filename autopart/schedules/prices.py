"""What the actions of a schedule and the messages between its ranks take, from costs of kinds, stages and edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.timing import FREE, Link

Cost = float | Sequence[float] | Mapping[int, float] | Callable[[Action], float]
"""One number a rank-share (a microbatch through all of a rank's stages), one for each stage, or a time an action."""

Comm = float | Link | Mapping[tuple[int, int], float | Link] | Callable[[int, int], float | Link]
"""The link of every edge, or of each (source stage, target stage); a number is a latency."""

Price = Callable[[Action], float]

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.PAIR, Kind.S, Kind.T, Kind.E, Kind.D, Kind.OPT)


def prices(schedule: Schedule, costs: Mapping[str, Cost]) -> Price:
    """The time of every action of a schedule.

    A number is the time of a microbatch on a rank-share, which the stages that the rank has in the pipe divide equally;
    a sequence or mapping has the time of each stage itself. Either is of a whole microbatch, which its slices divide
    equally (an OPT belongs to none). A function is asked for the time of the very action. Where not given, B takes what
    I and W do, a PAIR what its members do, S, T, E, D and OPT nothing; S without T is the time of both, half of it
    each. Raises ValueError for costs that are unknown, missing, negative or not one a stage, TypeError for what is no
    mapping.
    """
    if not isinstance(costs, Mapping):
        raise TypeError(f"costs: expected a time of each kind such as {{'F': 1, 'I': 1, 'W': 1}}, not {costs!r}")
    unknown = sorted(set(costs) - set(KINDS))
    if unknown:
        raise ValueError(f"costs: unknown kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    known: dict[Kind, Price] = {Kind(kind): _price(schedule, Kind(kind), cost) for kind, cost in costs.items()}
    if Kind.B not in known and Kind.I in known and Kind.W in known:
        inputs, weights = known[Kind.I], known[Kind.W]
        known[Kind.B] = lambda action: inputs(action) + weights(action)
    known.setdefault(Kind.PAIR, lambda action: sum(known[part.kind](part) for part in action.members))
    if Kind.S in known and Kind.T not in known:
        both = known[Kind.S]
        known[Kind.S] = known[Kind.T] = lambda action: both(action) / 2
    for kind in (Kind.S, Kind.T, Kind.E, Kind.D, Kind.OPT):
        known.setdefault(kind, lambda action: 0.0)
    for kind in sorted({action.kind for action in schedule.parts()}):
        if kind not in known:
            raise ValueError(
                f"costs: schedule {schedule.name!r} needs the cost of {kind}" + (", or of I and W" * (kind is Kind.B))
            )
    return lambda action: known[action.kind](action)


def links(schedule: Schedule, comm: Comm) -> Callable[[Action, Action], Link]:
    """The link over which one action's values come to another one on another rank.

    A message of a slice holds it for that slice's share of the transfer. Barriers of the optimizer are free. Raises
    ValueError for times below 0 and, when asked, for an edge that a mapping lacks.
    """
    found: dict[tuple[int, int, int], Link] = {}
    if isinstance(comm, float | int | Link):
        _link(comm, schedule.slices)

    def between(need: Action, action: Action) -> Link:
        if action.kind is Kind.OPT:
            return FREE
        edge = (need.stage, action.stage)
        if (*edge, need.slice) not in found:
            found[*edge, need.slice] = _link(_of_edge(comm, edge), _slices_like(schedule, need.slice))
        return found[*edge, need.slice]

    return between


def _of_edge(comm: Comm, edge: tuple[int, int]) -> float | Link:
    if isinstance(comm, Mapping):
        if edge not in comm:
            raise ValueError(f"comm: there is no link from stage {edge[0]} to stage {edge[1]} among {sorted(comm)}")
        return comm[edge]
    return comm(*edge) if callable(comm) else comm


def _slices_like(schedule: Schedule, piece: int) -> float:
    """How many slices like one of a schedule's would make up the sequence."""
    return sum(schedule.portions) / schedule.portions[piece]


def _link(given: float | Link, slices: float) -> Link:
    link = given if isinstance(given, Link) else Link(given)
    if not all(math.isfinite(time) and time >= 0 for time in (link.latency, link.transfer)):
        raise ValueError(f"comm must be a latency of at least 0, or a Link of such times, not {given}")
    return Link(link.latency, link.transfer / slices)


def _price(schedule: Schedule, kind: Kind, cost: Cost) -> Price:
    if callable(cost):
        return lambda action: _time(kind, cost(action), cost)
    times = [by_stage(place, kind, cost) for place in schedule.places]
    shares = [1.0 if kind is Kind.OPT else _slices_like(schedule, piece) for piece in range(schedule.slices)]
    return lambda action: times[action.pipe][action.stage] / shares[action.slice]


def by_stage(place: Sequence[int], kind: Kind, cost: float | Sequence[float] | Mapping[int, float]) -> list[float]:
    """The time of each stage of a pipe."""
    stages = range(len(place))
    if isinstance(cost, Mapping):
        complete, times = set(cost) == set(stages), list(cost.values())
        times = [cost[stage] for stage in stages] if complete else times
    elif isinstance(cost, Sequence):
        complete, times = len(cost) == len(stages), list(cost)
    else:
        complete, times = True, [cost / place.count(rank) for rank in place]
    if not complete:
        raise ValueError(f"costs: {str(kind)!r} must have a number for each of the {len(stages)} stages, not {cost!r}")
    return [_time(kind, time, cost) for time in times]


def _time(kind: Kind, time: float, cost: Cost) -> float:
    if not (math.isfinite(time) and time >= 0):
        raise ValueError(f"costs: {str(kind)!r} must be times of at least 0, not {time if callable(cost) else cost!r}")
    return time
