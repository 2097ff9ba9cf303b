"""The record of one schedule family: its name and source, what it holds in memory, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autopart.ir.action import Schedule


@dataclass(frozen=True, slots=True)
class Family:
    """One family of schedules. In `memory`, p is the number of ranks, m of microbatches, r the rank.

    `make(ranks, microbatches, **options)` returns the schedule; its keyword parameters are the options of the family.
    """

    name: str
    summary: str
    source: str
    memory: str
    make: Callable[..., Schedule] = field(repr=False)
