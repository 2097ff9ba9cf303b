"""The registry of schedule families: build one by name, list them all."""

from __future__ import annotations

import inspect

from autopart.ir.action import Schedule
from autopart.schedules import bitpipe, dualpipe, flush, sequence, stale, vocabulary
from autopart.schedules.family import Family

FAMILIES = (
    *flush.FAMILIES,
    *sequence.FAMILIES,
    *bitpipe.FAMILIES,
    *dualpipe.FAMILIES,
    *vocabulary.FAMILIES,
    *stale.FAMILIES,
)
"""Every training family, in the order in which they are listed."""


def names() -> tuple[Family, ...]:
    """The training families that `build` knows: name, one line on each, its source and its memory law."""
    return FAMILIES


def build(name: str, *, ranks: int, microbatches: int, **options: object) -> Schedule:
    """The schedule `name` for `ranks` pipeline ranks and `microbatches` microbatches.

    `name` is one of `names()`, or ``"forward"`` for a program without a backward. Raises ValueError for an unknown name
    or a count below 1, TypeError for a count that is no whole number or an option that the family does not have.
    """
    family = {each.name: each for each in (*FAMILIES, flush.FORWARD)}.get(name)
    if family is None:
        raise ValueError(
            f"schedule: unknown name {name!r}; the schedules are {', '.join(each.name for each in FAMILIES)}"
        )
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    known = list(inspect.signature(family.make).parameters)[2:]
    for option in options:
        if option not in known:
            takes = f"its options are {', '.join(known)}" if known else "it has no options"
            raise TypeError(f"schedule {name!r} has no option {option!r}; {takes}")
    return family.make(ranks, microbatches, **options)


def _check_count(argument: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, not {value}")
