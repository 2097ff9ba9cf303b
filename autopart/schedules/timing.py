"""When each action runs: every rank works through its row in order, and each action waits for what it needs.

The one sweep behind validation, lowering and simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopart.ir.action import Action

Interval = tuple[float, float]
"""Start and end, in the unit of the costs."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a message from one rank to another takes; it keeps neither rank from computing.

    `transfer`, its bytes over the bandwidth, is the time for which it holds the link, which messages from the one rank
    to the other use one after the other; it arrives `latency` after that.
    """

    latency: float = 0.0
    transfer: float = 0.0


FREE = Link()
"""A message that arrives at once."""


def run_time(
    rows: Sequence[Sequence[Action]],
    needs: Sequence[Sequence[int]],
    *,
    cost: Callable[[Action], float],
    link: Callable[[Action, Action], Link] = lambda need, action: FREE,
) -> list[list[Interval]]:
    """The interval of every action, row by row; a row that gets stuck has fewer intervals than actions.

    An action starts when its rank is free and what it, or a member of it, `needs` (`dependencies`) has ended and has
    come over the link from there. `link` is asked for pairs of actions (or members) of different ranks.
    """
    parts = [part for row in rows for action in row for part in action.parts]
    home = [rank for rank, row in enumerate(rows) for action in row for _ in action.parts]
    missing, wanted = _awaited(rows, needs)
    ready = [0.0] * len(parts)
    held: dict[tuple[int, int], float] = {}
    intervals: list[list[Interval]] = [[] for _ in rows]
    next_part = [0, *accumulate(sum(len(action.parts) for action in row) for row in rows)]
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, done, first = rows[rank], intervals[rank], next_part[rank]
        end = done[-1][1] if done else 0
        while len(done) < len(row):
            action = row[len(done)]
            last = first + len(action.parts)
            if any(missing[first:last]):
                break
            start = max(end, *ready[first:last])
            end = start + cost(action)
            done.append((start, end))
            for member in range(first, last):
                for after in wanted.get(member, ()):
                    peer, arrival = home[after], end
                    over = link(parts[member], parts[after])
                    if over.transfer:
                        arrival = max(end, held.get((rank, peer), 0)) + over.transfer
                        held[rank, peer] = arrival
                    arrival += over.latency
                    missing[after] -= 1
                    if arrival > ready[after]:
                        ready[after] = arrival
                    if not missing[after]:
                        runnable.append(peer)
            first = last
        next_part[rank] = first
    return intervals


def _awaited(
    rows: Sequence[Sequence[Action]], needs: Sequence[Sequence[int]]
) -> tuple[list[int], dict[int, list[int]]]:
    """How much each action (or member) waits for, and the actions that wait for each.

    What comes before it on its own rank is left out, as that has ended by then; what comes later is not, and never has.
    """
    missing, wanted = [0] * len(needs), dict[int, list[int]]()
    number = 0
    for row in rows:
        begin = number
        for action in row:
            first = number
            for _ in action.parts:
                for need in needs[number]:
                    if not begin <= need < first:
                        missing[number] += 1
                        wanted.setdefault(need, []).append(number)
                number += 1
    return missing, wanted
