"""The record of one schedule family: its name and source, what it holds in memory, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autopart.ir.action import Schedule


@dataclass(frozen=True, slots=True)
class Family:
    """One family of schedules. In `memory`, p is the number of ranks, m of microbatches, v of chunks, r the rank.

    `make(ranks, microbatches, **options)` returns the schedule; its keyword parameters are the options of the family.
    It raises ValueError for numbers that the family cannot take, saying which it would.
    """

    name: str
    summary: str
    source: str
    memory: str
    make: Callable[..., Schedule] = field(repr=False)


def check_count(argument: str, value: object) -> None:
    """Raise TypeError or ValueError, which name the argument, unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, not {value}")
