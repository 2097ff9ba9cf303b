"""Schedules of whole forwards and backwards, one stage a rank, flushed before the optimizer steps: GPipe and 1F1B.

Closed forms at equal stages, with F and B the times of one forward and one backward: the bubble of both is (p-1)(F+B).
Also the forward-only order that programs without a backward use.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.action import Kind, Schedule
from autopart.schedules.family import Family
from autopart.schedules.rows import Row, loop, run, warmed


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order."""
    return _schedule("gpipe", microbatches, warmed([microbatches] * ranks, microbatches, Kind.B))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """p-1-r forwards to warm up, then a forward and a backward in turn, then the backwards that are left."""
    return _schedule("1f1b", microbatches, warmed(range(ranks)[::-1], microbatches, Kind.B))


def forward(ranks: int, microbatches: int) -> Schedule:
    """Forwards only, in microbatch order."""
    return _schedule("forward", microbatches, [run(Kind.F, rank, range(microbatches)) for rank in range(ranks)])


FAMILIES = (
    Family(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965)",
        "m microbatches on every rank",
        gpipe,
    ),
    Family(
        "1f1b",
        "a few forwards to warm up, then one forward and one backward in turn",
        "Narayanan et al., PipeDream-Flush, ICML 2021 (arXiv 2006.09503); Fan et al., DAPPLE (arXiv 2007.01045)",
        "min(m, p - r) microbatches on rank r",
        one_f_one_b,
    ),
)
"""The training families of this file."""

FORWARD = Family("forward", "forwards only, for evaluation", "", "nothing is kept for a backward", forward)
"""What programs without a backward use."""


def _schedule(name: str, microbatches: int, rows: Sequence[Row]) -> Schedule:
    return Schedule(name, microbatches, loop(len(rows), 1), tuple(rows))
