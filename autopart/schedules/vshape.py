"""Two stages a rank on the V placement: stage r and stage 2p-1-r are on rank r, so the loss is on rank 0.

ZB-V has no span bubble at F = I = W and m >= 2p-1, with the memory of 1F1B's first rank everywhere. The others repeat a
building block every six slots, a slot being the time of one of the four passes F, F, I, I (or of a W): the block says
in which slot each pass of a microbatch lies, and its length how much memory it takes. Bubbles at F = I = W: V-Half
1.5p - 3.5 for even p, else 1.5p - 2; V-Min at most 2p - 2.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family
from autopart.schedules.fill import Ahead, fill
from autopart.schedules.play import Clock, unit_costs
from autopart.schedules.rows import Row, script, wave
from autopart.schedules.simulate import simulate

PERIOD = 6
"""The slots of a rank for one microbatch: two forwards, two I and two W."""

Block = Sequence[tuple[int, int, int, int]]
"""For each rank, the slots of microbatch 0: F of its first and second stage, I (or B) of its second and first."""


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble on a V: each stage of a rank fills the waits of the other."""
    rows = (_zb_v_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zb-v", microbatches, wave(ranks, 2), tuple(rows))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """The least memory that leaves no waits in the steady state."""
    p, d = ranks, 2 if ranks % 3 == 0 else 0
    block = [(i, 2 * p - 1 - i, 2 * p + d + i, 4 * p + d - 1 - i) for i in range(p)]

    def made(count: int, ahead: Ahead) -> Schedule:
        return _repeated("vmin", block, count, (p + 4) // 3, ahead)

    # Forwards ahead of their turn help some numbers of ranks and hold up others, with few microbatches as with many.
    few = min(microbatches, 2 * p)
    orders: tuple[Ahead, ...] = ("never", "idle")
    return made(microbatches, min(orders, key=lambda ahead: simulate(made(few, ahead)).makespan))


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B."""
    p, d = ranks, 0 if ranks % 2 else 3
    block = [(2 * i, 3 * p - 2 - i, 3 * p - 1 + d + 2 * i, 6 * p - 2 + d - i) for i in range(p)]
    return _repeated("vhalf", block, microbatches, (p + 2) // 2, "idle")


def v_zb(ranks: int, microbatches: int) -> Schedule:
    """The memory of 1F1B, and no span bubble but for few microbatches."""
    p = ranks
    block = [(5 * i, 6 * p - 5 - i, 6 * p - 4 + 5 * i, 12 * p - 9 - i) for i in range(p)]
    return _repeated("vzb", block, microbatches, p, "idle")


def v_1f1b(ranks: int, microbatches: int) -> Schedule:
    """Whole backwards: V-Min's forwards, each B in the first two slots that are free."""
    rows = tuple(_order(block, rank, ranks, microbatches, Kind.B) for rank, block in enumerate(_whole_block(ranks)))
    return Schedule("v1f1b", microbatches, wave(ranks, 2), rows)


ZERO_BUBBLE = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241)"
CONTROLLABLE = "Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362)"

FAMILIES = (
    Family(
        "zb-v",
        "no idle time within a rank's span at equal F, I and W, with the memory of 1F1B",
        ZERO_BUBBLE,
        "min(m, p) microbatches on every rank",
        zb_v,
    ),
    Family(
        "vmin",
        "a third of 1F1B's memory, for a longer fill and drain",
        CONTROLLABLE,
        "at most floor((p + 4) / 3) microbatches on a rank",
        v_min,
    ),
    Family(
        "vhalf",
        "half of 1F1B's memory, with a bubble of half as much",
        CONTROLLABLE,
        "at most floor((p + 2) / 2) microbatches on a rank",
        v_half,
    ),
    Family(
        "vzb",
        "the memory of 1F1B and nearly no idle time within a rank's span",
        CONTROLLABLE,
        "at most p microbatches on a rank",
        v_zb,
    ),
    Family(
        "v1f1b",
        "whole backwards on a V: two thirds of 1F1B's memory at about its bubble",
        CONTROLLABLE,
        "at most floor(2p / 3) + 1 microbatches on a rank",
        v_1f1b,
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


def _order(slots: Sequence[int], rank: int, ranks: int, microbatches: int, backward: Kind) -> Row:
    """One rank's passes of all microbatches in the order of their slots."""
    first, second = rank, 2 * ranks - 1 - rank
    passes = ((Kind.F, first), (Kind.F, second), (backward, second), (backward, first))
    placed = [
        (slot + PERIOD * microbatch, Action(kind, stage, microbatch))
        for slot, (kind, stage) in zip(slots, passes, strict=True)
        for microbatch in range(microbatches)
    ]
    return tuple(action for _, action in sorted(placed, key=lambda each: each[0]))


def _repeated(name: str, block: Block, microbatches: int, peak: int, ahead: Ahead) -> Schedule:
    """The block repeated, with its W filled in, and forwards `ahead` of their turn."""
    ranks = len(block)
    rows = [_order(slots, rank, ranks, microbatches, Kind.I) for rank, slots in enumerate(block)]
    filled = fill(rows, Clock(wave(ranks, 2), unit_costs(2 * ranks, 2)), 2 * peak, ahead=ahead)
    return Schedule(name, microbatches, wave(ranks, 2), filled)


def _whole_block(ranks: int) -> Block:
    """Forwards one slot a rank down and up; then each B, of two slots, as early as both chains of them fit."""
    free = [set(range(PERIOD)) - {rank % PERIOD, (2 * ranks - 1 - rank) % PERIOD} for rank in range(ranks)]
    time = 2 * ranks
    second: list[int] = []
    for rank in range(ranks):
        time = next(t for t in count(time) if _pair(t) <= free[rank] and _has_pair(free[rank] - _pair(t)))
        free[rank] -= _pair(time)
        second.append(time)
        time += 2
    first = [0] * ranks
    for rank in reversed(range(ranks)):
        time = first[rank] = next(t for t in count(time) if _pair(t) <= free[rank])
        time += 2
    return [(rank, 2 * ranks - 1 - rank, second[rank], first[rank]) for rank in range(ranks)]


def _pair(time: int) -> set[int]:
    return {time % PERIOD, (time + 1) % PERIOD}


def _has_pair(free: set[int]) -> bool:
    return any(_pair(slot) <= free for slot in free)
