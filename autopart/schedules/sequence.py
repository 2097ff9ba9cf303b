"""Schedules of pieces of the sequence: a microbatch's tokens are cut into k slices that travel one behind the other.

A slice attends to those before it, so forwards go up the slices, keys and values kept, and backwards down, where the
gradients of keys and values add up. Closed form at slices that take equal times, with F and B those of a whole
microbatch: the bubble of both families is (p-1)(F+B)/k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family, check_count
from autopart.schedules.rows import in_turn

SLICES = 4
"""How many slices there are if nothing says otherwise."""


def terapipe(ranks: int, microbatches: int, slices: int = SLICES, lengths: Sequence[int] = ()) -> Schedule:
    """All forwards in the order of microbatches and slices, then all backwards, the slices of each in reverse.

    `lengths` are the tokens of each slice (`slice_lengths` finds the best); without them they are as even as can be.
    """
    slices = _counted(slices, lengths)
    return _schedule("terapipe", ranks, microbatches, lengths, slices, [ranks * microbatches * slices] * ranks)


def seq1f1b(ranks: int, microbatches: int, slices: int = SLICES, lengths: Sequence[int] = ()) -> Schedule:
    """1F1B of slices: p-1-r + k-1 of them to warm up, so that the first microbatch's last slice has its forward.

    `lengths` as in `terapipe`.
    """
    slices = _counted(slices, lengths)
    warmups = [ranks - 1 - rank + slices - 1 for rank in range(ranks)]
    return _schedule("seq1f1b", ranks, microbatches, lengths, slices, warmups)


def _counted(slices: int, lengths: Sequence[int]) -> int:
    """The number of slices, that of `lengths` if there are any."""
    check_count("slices", slices)
    if not isinstance(lengths, tuple | list):
        raise TypeError(f"lengths must be the tokens of each slice, such as (5, 3), not {lengths!r}")
    for length in lengths:
        check_count("lengths", length)
    if lengths and slices not in (SLICES, len(lengths)):
        raise ValueError(f"slices={slices} contradicts lengths={tuple(lengths)}, which are of {len(lengths)} slices")
    return len(lengths) or slices


FAMILIES = (
    Family(
        "terapipe",
        "slices of the sequence: all forwards, then all backwards",
        "Li et al., TeraPipe, ICML 2021 (arXiv 2102.07988)",
        "m microbatches on every rank",
        terapipe,
    ),
    Family(
        "seq1f1b",
        "slices of the sequence: a few forwards to warm up, then one forward and one backward in turn",
        "Sun et al., Seq1F1B, NAACL 2025 (arXiv 2406.03488)",
        "(p - 1 - r + k) / k microbatches on rank r, k the number of slices, at most m",
        seq1f1b,
    ),
)
"""The training families of this file."""


def _schedule(
    name: str, ranks: int, microbatches: int, lengths: Sequence[int], slices: int, warmups: list[int]
) -> Schedule:
    """Forwards ahead of the backwards by a number of slices, rank by rank; then both in turn."""
    table = []
    for rank, ahead in enumerate(warmups):
        pieces = range(slices)
        forwards = tuple(Action(Kind.F, rank, *unit) for unit in product(range(microbatches), pieces))
        backwards = tuple(Action(Kind.B, rank, *unit) for unit in product(range(microbatches), reversed(pieces)))
        table.append(in_turn(forwards, backwards, ahead))
    place = tuple(range(ranks))
    return Schedule(name, microbatches, place, tuple(table), slices=slices, lengths=tuple(lengths))
