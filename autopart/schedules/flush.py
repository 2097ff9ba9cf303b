"""Schedules of whole forwards and backwards, one stage a rank, flushed before the optimizer steps: GPipe and 1F1B.

Closed forms at equal stages, with F and B the times of one forward and one backward: the bubble of both is (p-1)(F+B).
Also the forward-only order that programs without a backward use.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order."""
    everything = range(microbatches)
    return _schedule(
        "gpipe", microbatches, ((*_run("F", r, everything), *_run("B", r, everything)) for r in range(ranks))
    )


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """p-1-r forwards to warm up, then a forward and a backward in turn, then the backwards that are left."""
    return _schedule("1f1b", microbatches, (_one_f_one_b_row(r, ranks, microbatches) for r in range(ranks)))


def forward(ranks: int, microbatches: int) -> Schedule:
    """Forwards only, in microbatch order."""
    return _schedule("forward", microbatches, (_run("F", r, range(microbatches)) for r in range(ranks)))


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


def _one_f_one_b_row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    warmup = min(microbatches, ranks - 1 - rank)
    steady = microbatches - warmup
    pairs = zip(_run("F", rank, range(warmup, microbatches)), _run("B", rank, range(steady)), strict=True)
    return (
        *_run("F", rank, range(warmup)),
        *(action for pair in pairs for action in pair),
        *_run("B", rank, range(steady, microbatches)),
    )


def _run(kind: str, stage: int, microbatches: Iterable[int]) -> tuple[Action, ...]:
    return tuple(Action(Kind(kind), stage, microbatch) for microbatch in microbatches)


def _schedule(name: str, microbatches: int, rows: Iterable[tuple[Action, ...]]) -> Schedule:
    table = tuple(rows)
    return Schedule(name, microbatches, tuple(range(len(table))), table)
