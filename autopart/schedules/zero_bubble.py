"""One stage a rank, backwards split in I and W: ZB-H1, ZB-H2 and 2BP.

Closed forms at equal stages, F, I and W the times of one microbatch: ZB-H1's bubble is (p-1)(F+I-W), ZB-H2's span
bubble (p-1)(F+I-2W) for m >= 2p-1, both where W <= min(F, I); that of 2BP is (p-1)(F+I).
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.action import Schedule
from autopart.schedules import flush
from autopart.schedules.family import Family
from autopart.schedules.interleaved import interleaved_zb
from autopart.schedules.rows import Row, loop, script, split


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with each W `rank` backwards after its I, where the rank would idle: no rank holds more than p of them."""
    return replace(interleaved_zb(ranks, microbatches, chunks=1), name="zb-h1")


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Warm-up forwards until the first I arrives, paid for with memory; ranks start and end at different times."""
    rows = (_zb_h2_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zb-h2", microbatches, loop(ranks, 1), tuple(rows))


def two_bp_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with all W after the last I."""
    return _two_bp(flush.one_f_one_b(ranks, microbatches))


def two_bp_gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe with all W after the last I."""
    return _two_bp(flush.gpipe(ranks, microbatches))


FAMILIES = (
    Family(
        "zb-h1",
        "1F1B whose weight gradients fill a third of the idle time, at no more memory",
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241)",
        "min(m, p) microbatches on every rank",
        zb_h1,
    ),
    Family(
        "zb-h2",
        "no idle time within a rank's span, for nearly twice the memory; pays where ranks step alone",
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241)",
        "min(m, 2p - 1) microbatches on every rank",
        zb_h2,
    ),
    Family(
        "2bp-1f1b",
        "1F1B with all weight gradients at the end",
        "Rae et al., 2BP: 2-Stage Backpropagation, 2024 (arXiv 2405.18047)",
        "m microbatches on every rank",
        two_bp_1f1b,
    ),
    Family(
        "2bp-gpipe",
        "GPipe with all weight gradients at the end",
        "Rae et al., 2BP: 2-Stage Backpropagation, 2024 (arXiv 2405.18047)",
        "m microbatches on every rank",
        two_bp_gpipe,
    ),
)
"""The families of this file."""


def _zb_h2_row(rank: int, ranks: int, microbatches: int) -> Row:
    warmup = min(microbatches, 2 * (ranks - rank) - 1)
    steady = microbatches - warmup
    # The last 2 * rank rounds leave their W for the end, where the rank would wait for gradients.
    full = max(0, steady - 2 * rank)
    return script(
        {"s": rank},
        (warmup, "Fs"),
        (full, "Is Ws Fs"),
        (steady - full, "Is Fs"),
        (warmup, "Is Ws"),
        (steady - full, "Ws"),
    )


def _two_bp(base: Schedule) -> Schedule:
    rows = tuple(split(row, base.microbatches) for row in base.table)
    return replace(base, name=f"2bp-{base.name}", table=rows)
