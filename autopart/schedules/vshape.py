"""Two stages a rank on the V placement: stage r and stage 2p-1-r are on rank r, so the loss is on rank 0.

ZB-V has no span bubble at F = I = W and m >= 2p-1, with the memory of 1F1B's first rank everywhere.
"""

from __future__ import annotations

from autopart.ir.action import Schedule
from autopart.schedules.family import Family
from autopart.schedules.rows import Row, script, wave


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble on a V: each stage of a rank fills the waits of the other."""
    rows = (_zb_v_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zb-v", microbatches, wave(ranks, 2), tuple(rows))


FAMILIES = (
    Family(
        "zb-v",
        "no idle time within a rank's span at equal F, I and W, with the memory of 1F1B",
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241)",
        "min(m, p) microbatches on every rank",
        zb_v,
    ),
)
"""The families of this file."""


def _zb_v_row(rank: int, ranks: int, microbatches: int) -> Row:
    # The order is that of at least 2p-1 microbatches, with those that are not there left out.
    most = max(microbatches, 2 * ranks - 1)
    below = ranks - rank
    row = script(
        {"a": rank, "z": 2 * ranks - 1 - rank},
        (2 * below - 1, "Fa"),
        (rank, "Fz Fa"),
        (below, "Fz Iz Wz"),
        (most - 2 * ranks + 1 + rank, "Fa Ia Wa Fz Iz Wz"),
        (below - 1, "Ia Wa Fz Iz Wz"),
        (rank, "Ia Iz"),
        (below, "Ia Wa"),
        (rank, "Wz"),
        (rank, "Wa"),
    )
    return tuple(action for action in row if action.microbatch < microbatches)
