"""List scheduling: rows that arise as the ranks choose, each when it is free, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Protocol

from autopart.ir.action import Action, Kind
from autopart.schedules.rows import Row
from autopart.schedules.timing import Interval

Costs = Mapping[Kind, Sequence[float]]
"""The time of each kind of action at each stage."""


class Clock:
    """What is known while the ranks choose: when values arrive, and how much each rank holds."""

    def __init__(self, place: Sequence[int], costs: Costs, comm: float = 0.0) -> None:
        self.place = place
        self.costs = costs
        self.comm = comm
        self.held = [0] * (max(place) + 1)
        """The microbatches at stages that each rank holds: from F to the end of B or W."""
        self.spans: list[list[Interval]] = [[] for _ in self.held]
        """The start and end of each rank's actions so far."""
        self._forward: list[dict[int, float]] = [{} for _ in place]
        self._backward: list[dict[int, float]] = [{} for _ in place]

    def arrives(self, action: Action) -> float | None:
        """When all that an F, B or I needs is there; None while that is not known."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            return self._moved(self._forward, stage - 1, stage, microbatch) if stage else 0.0
        own = self._forward[stage].get(microbatch)
        if own is None or stage == len(self.place) - 1:
            return own
        gradient = self._moved(self._backward, stage + 1, stage, microbatch)
        return None if gradient is None else max(own, gradient)

    def start(self, action: Action, now: float) -> float:
        """Note that an action starts, and return when it ends."""
        end = now + self.costs[action.kind][action.stage]
        rank = self.place[action.stage]
        self.spans[rank].append((now, end))
        match action.kind:
            case Kind.F:
                self._forward[action.stage][action.microbatch] = end
                self.held[rank] += 1
            case Kind.B:
                self._backward[action.stage][action.microbatch] = end
                self.held[rank] -= 1
            case Kind.I:
                self._backward[action.stage][action.microbatch] = end
            case _:
                self.held[rank] -= 1
        return end

    def _moved(self, ends: list[dict[int, float]], source: int, target: int, microbatch: int) -> float | None:
        end = ends[source].get(microbatch)
        if end is None or self.place[source] == self.place[target]:
            return end
        return end + self.comm


class Player(Protocol):
    """One rank."""

    def choose(self, clock: Clock, now: float) -> Action | float | None:
        """What to start now; else when to ask again; else None: when a neighbour has finished something."""
        ...


def play(players: Sequence[Player], clock: Clock) -> tuple[Row, ...]:
    """The rows that the players, one a rank, make of a run; they end where nobody has anything to do."""
    rows: list[list[Action]] = [[] for _ in players]
    free = [0.0] * len(players)
    events = [(0.0, rank) for rank in range(len(players))]
    last = len(clock.place) - 1
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        chosen = players[rank].choose(clock, now)
        if isinstance(chosen, Action):
            free[rank] = clock.start(chosen, now)
            rows[rank].append(chosen)
            heappush(events, (free[rank], rank))
            for stage in (chosen.stage - 1, chosen.stage + 1):
                if 0 <= stage <= last and clock.place[stage] != rank and chosen.kind is not Kind.W:
                    heappush(events, (free[rank] + clock.comm, clock.place[stage]))
        elif chosen is not None:
            heappush(events, (chosen, rank))
    return tuple(map(tuple, rows))


def follow(rows: Sequence[Row], clock: Clock) -> tuple[Row, ...]:
    """Run rows as they are; what is returned ends early where they lock each other."""
    return play([_Follower(row) for row in rows], clock)


class _Follower:
    """One rank that keeps to its row."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.done = 0

    def choose(self, clock: Clock, now: float) -> Action | float | None:
        if self.done == len(self.row):
            return None
        action = self.row[self.done]
        due = now if action.kind is Kind.W else clock.arrives(action)
        if due is None or due > now:
            return due
        self.done += 1
        return action


def unit_costs(stages: int, chunks: int) -> Costs:
    """F = I = W = 1 and B = 2 a rank-share of `chunks` stages."""
    return {kind: (size / chunks,) * stages for kind, size in ((Kind.F, 1), (Kind.I, 1), (Kind.W, 1), (Kind.B, 2))}
