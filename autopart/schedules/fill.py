"""Weight gradients where a rank would wait: rows of F and I become rows of F, I and W, under a limit of memory.

A rank does the first action of its row as soon as what it needs is there. Where it would wait it does the oldest W; and
where there is none either, a later action that can go ahead. Memory that is full has its W done first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Literal

from autopart.ir.action import Action, Kind
from autopart.schedules.play import Clock, play
from autopart.schedules.rows import Row

Ahead = Literal["never", "idle", "eager"]
"""When an F may go ahead of its turn: never; where the rank has no W to do; also where it has one."""


def fill(
    rows: Sequence[Row], clock: Clock, limit: int, *, ahead: Ahead = "never", patience: float = 0.0
) -> tuple[Row, ...]:
    """The rows, which have F and I (or B), with a W for each I and in an order that wastes less of the clock's time.

    `limit` is the most microbatches at stages that a rank may hold, from F to the end of W (or B). A forward goes
    `ahead` of others only if those still have room. Rather than begin a W, a rank waits for what is due within
    `patience` times its length. With a limit that is too low the rows end early.
    """
    return play([_Filler(rank, row, limit, ahead, patience) for rank, row in enumerate(rows)], clock)


class _Filler:
    """One rank: what is left of its row, and the W that are due."""

    def __init__(self, rank: int, row: Row, limit: int, ahead: Ahead, patience: float) -> None:
        self.rank = rank
        self.row = list(row)
        self.limit = limit
        self.ahead = ahead
        self.patience = patience
        self.passes = len({(action.kind, action.stage) for action in row})
        self.weights: deque[Action] = deque()

    def choose(self, clock: Clock, now: float) -> Action | float | None:
        due = self._due(clock, self.row[0]) if self.row else None
        if due is not None and due <= now:
            return self._take(0)
        if self.ahead == "eager" or not self.weights:
            index = self._first_ready(clock, now)
            if index is not None:
                return self._take(index)
        if self.weights:
            weight = self.weights[0]
            if due is None or due - now > self.patience * clock.costs[Kind.W][weight.stage]:
                return self.weights.popleft()
        return due

    def _due(self, clock: Clock, action: Action) -> float | None:
        """When an action that stands first can start; None while that is not known, or memory is full."""
        if action.kind is Kind.F and clock.held[self.rank] >= self.limit:
            return None
        return clock.arrives(action)

    def _first_ready(self, clock: Clock, now: float) -> int | None:
        """The place of a later action that can start now: an I or B, or an F that leaves room for all before it."""
        opened = most = clock.held[self.rank] - len(self.weights)
        seen: set[tuple[Kind, int]] = set()
        for index, action in enumerate(islice(self.row, 2 * self.limit)):
            forward = action.kind is Kind.F
            if (action.kind, action.stage) not in seen:  # of a stage, later microbatches are ready later
                seen.add((action.kind, action.stage))
                if index and (not forward or (self.ahead != "never" and most < self.limit)):
                    due = self._due(clock, action)
                    if due is not None and due <= now:
                        return index
                if len(seen) == self.passes:
                    return None
            opened += 1 if forward else -1
            if opened > most:
                most = opened
        return None

    def _take(self, index: int) -> Action:
        action = self.row.pop(index)
        if action.kind is Kind.I:
            self.weights.append(Action(Kind.W, action.stage, action.microbatch))
        return action
