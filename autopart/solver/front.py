"""The split of a step whose frozen front fills idle time: the front is a stage; the rest is cut evenly, one a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def front_split(seconds: Sequence[float], frozen: int, ranks: int) -> tuple[int, ...]:
    """Where stages begin, but for the first: after the `frozen` segments, and then so that the slowest is fastest.

    Raises ValueError where there are no frozen segments, or fewer others than ranks.
    """
    if not frozen:
        raise ValueError(
            "schedule: no layers in front of the model are frozen, so there is nothing to fill idle time with; freeze "
            "some (requires_grad_(False)), or train with an ordinary loop, which follows the same schedule"
        )
    count = len(seconds)
    if count - frozen < ranks:
        raise ValueError(f"mesh: {count - frozen} layers that are trained cannot be on {ranks} pipeline ranks each")
    elapsed = list(accumulate(seconds, initial=0.0))

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The slowest of so many stages from a segment on, and where they begin."""
        if stages == 1:
            return elapsed[count] - elapsed[start], (start,)
        found = []
        for stop in range(start + 1, count - stages + 2):
            slowest, later = best(stop, stages - 1)
            found.append((max(elapsed[stop] - elapsed[start], slowest), (start, *later)))
        return min(found)

    return best(frozen, ranks)[1]
