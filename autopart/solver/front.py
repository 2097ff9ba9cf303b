"""The split of a step whose frozen front fills idle time: the front is cut alone; the rest evenly, into its stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def front_split(seconds: Sequence[float], frozen: int, stages: int) -> tuple[int, ...]:
    """Where the stages behind the `frozen` segments begin, so that the slowest of them is fastest.

    Raises ValueError where there are no frozen segments, or fewer others than stages.
    """
    if not frozen:
        raise ValueError(
            "schedule: no layers in front of the model are frozen, so there is nothing to fill idle time with; freeze "
            "some (requires_grad_(False)), or train with an ordinary loop, which follows the same schedule"
        )
    count = len(seconds)
    if count - frozen < stages:
        raise ValueError(f"mesh: {count - frozen} layers that are trained cannot make the schedule's {stages} stages")
    return tuple(frozen + start for start in even_split(seconds[frozen:], stages))


def even_split(seconds: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Where so many pieces of some segments begin, so that the longest of them is shortest."""
    count, elapsed = len(seconds), list(accumulate(seconds, initial=0.0))

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The longest of so many pieces from a segment on, and where they begin."""
        if left == 1:
            return elapsed[count] - elapsed[start], (start,)
        found = []
        for stop in range(start + 1, count - left + 2):
            longest, later = best(stop, left - 1)
            found.append((max(elapsed[stop] - elapsed[start], longest), (start, *later)))
        return min(found)

    return best(0, pieces)[1]
