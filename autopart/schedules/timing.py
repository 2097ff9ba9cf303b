"""When each action runs: every rank works through its row in order, and each action waits for what it needs.

The one sweep behind validation, lowering and simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    home = {part: rank for rank, row in enumerate(rows) for action in row for part in action.parts}
    wanted: dict[Action, list[Action]] = defaultdict(list)
    for part in home:
        for need in needs[part]:
            wanted[need].append(part)
    missing = {part: len(needs[part]) for part in home}
    ready = dict.fromkeys(home, 0.0)
    held: dict[tuple[int, int], float] = {}
    intervals: list[list[Interval]] = [[] for _ in rows]
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, done = rows[rank], intervals[rank]
        while len(done) < len(row):
            action = row[len(done)]
            if any(missing[part] for part in action.parts):
                break
            start = max(done[-1][1] if done else 0, *(ready[part] for part in action.parts))
            end = start + cost(action)
            done.append((start, end))
            for part in action.parts:
                for after in wanted[part]:
                    peer, arrival = home[after], end
                    if peer != rank:
                        over = link(part, after)
                        if over.transfer:
                            arrival = max(end, held.get((rank, peer), 0)) + over.transfer
                            held[rank, peer] = arrival
                        arrival += over.latency
                        runnable.append(peer)
                    missing[after] -= 1
                    ready[after] = max(ready[after], arrival)
    return intervals
