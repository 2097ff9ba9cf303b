"""One stage a rank, backwards split in I and W: ZB-H1, ZB-H2, what lies between, and 2BP.

Closed forms at equal stages, F, I and W the times of one microbatch: ZB-H1's bubble is (p-1)(F+I-W), ZB-H2's span
bubble (p-1)(F+I-2W) for m >= 2p-1, both where W <= min(F, I); that of 2BP is (p-1)(F+I).
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.action import Kind, Schedule
from autopart.schedules import flush
from autopart.schedules.family import Family, check_count
from autopart.schedules.fill import fill
from autopart.schedules.interleaved import interleaved_zb
from autopart.schedules.play import Clock, unit_costs
from autopart.schedules.rows import Row, loop, script, split, warmed


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


def zb_auto(ranks: int, microbatches: int, *, limit: int | None = None) -> Schedule:
    """As many forwards to warm up as `limit` microbatches of memory allow (default `ranks`), W where a rank would wait.

    The order is made for equal F, I and W; `auto` makes one for given costs.
    """
    room = ranks if limit is None else limit
    check_count("limit", room)
    room = min(room, 2 * ranks - 1)  # more is of no use
    counts = warmups(ranks, microbatches, max(0, room - ranks), room)
    rows = warmed(counts, microbatches, Kind.I)
    filled = fill(rows, Clock(loop(ranks, 1), unit_costs(ranks, 1)), room)
    return Schedule("zb-auto", microbatches, loop(ranks, 1), filled)


def warmups(ranks: int, microbatches: int, extra: int, limit: int) -> tuple[int, ...]:
    """1F1B's forwards to warm up, and `extra` more: at most as many as ZB-H2 has, and as memory has room for."""
    needed = (ranks - 1 - rank for rank in range(ranks))
    return tuple(min(microbatches, count + min(extra, count), limit - 1) for count in needed)


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
        "zb-auto",
        "as few waits as a limit of memory allows, between ZB-H1 and ZB-H2",
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241)",
        "at most min(m, limit, 2p - 1) microbatches on a rank; the limit is p unless given",
        zb_auto,
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
