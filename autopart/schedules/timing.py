"""When each action runs: every rank works through its row in order, and each action waits for what it needs.

The one sweep behind validation, lowering and simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    needs: Mapping[Action, Sequence[Action]],
    *,
    cost: Callable[[Action], float],
    link: Callable[[Action, Action], Link] = lambda need, action: FREE,
) -> list[list[Interval]]:
    """The interval of every action, row by row; a row that gets stuck has fewer intervals than actions.

    An action starts when its rank is free and what it, or a member of it, `needs` has ended and has come over the link
    from there. `link` is asked for pairs of actions (or members) of different ranks. An action occurs once in the rows.
    """
    parts = [part for row in rows for action in row for part in action.parts]
    home = [rank for rank, row in enumerate(rows) for action in row for _ in action.parts]
    number = {part: place for place, part in enumerate(parts)}
    wanted: list[list[int]] = [[] for _ in parts]
    missing = []
    for place, part in enumerate(parts):
        needed = needs[part]
        missing.append(len(needed))
        for need in needed:
            maker = number.get(need)
            if maker is not None:
                wanted[maker].append(place)
    ready = [0.0] * len(parts)
    held: dict[tuple[int, int], float] = {}
    intervals: list[list[Interval]] = [[] for _ in rows]
    next_part = [0, *accumulate(sum(len(action.parts) for action in row) for row in rows)]
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, done = rows[rank], intervals[rank]
        while len(done) < len(row):
            action, first = row[len(done)], next_part[rank]
            last = first + len(action.parts)
            if any(missing[first:last]):
                break
            start = max(done[-1][1] if done else 0, *ready[first:last])
            end = start + cost(action)
            done.append((start, end))
            next_part[rank] = last
            for member in range(first, last):
                for after in wanted[member]:
                    peer, arrival = home[after], end
                    if peer != rank:
                        over = link(parts[member], parts[after])
                        if over.transfer:
                            arrival = max(end, held.get((rank, peer), 0)) + over.transfer
                            held[rank, peer] = arrival
                        arrival += over.latency
                    missing[after] -= 1
                    if arrival > ready[after]:
                        ready[after] = arrival
                    if peer != rank and not missing[after]:
                        runnable.append(peer)
    return intervals
