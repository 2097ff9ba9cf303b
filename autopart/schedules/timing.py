"""When each action runs: every rank works through its row in order, and each action waits for what it needs.

The one sweep behind validation, lowering and simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopart.ir.action import Action

Interval = tuple[float, float]
"""Start and end, in the unit of the costs."""


def run_time(
    rows: Sequence[Sequence[Action]],
    needs: Mapping[Action, Sequence[Action]],
    *,
    cost: Callable[[Action], float],
    delay: Callable[[Action, Action], float],
) -> list[list[Interval]]:
    """The interval of every action, row by row; a row that gets stuck has fewer intervals than actions.

    An action starts when its rank is free and everything it `needs` has ended, `delay(need, action)` later. An action
    occurs once in the rows.
    """
    intervals: list[list[Interval]] = [[] for _ in rows]
    ends: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, done = rows[rank], intervals[rank]
        while len(done) < len(row):
            action = row[len(done)]
            missing = next((need for need in needs[action] if need not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            free = done[-1][1] if done else 0
            start = max((free, *(ends[need] + delay(need, action) for need in needs[action])))
            ends[action] = start + cost(action)
            done.append((start, ends[action]))
            runnable += waiting.pop(action, ())
    return intervals
