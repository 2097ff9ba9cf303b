"""Several stages a rank on the loop placement: interleaved 1F1B, its zero-bubble form, and breadth-first.

Closed forms at equal stages, v chunks a rank, F, I and W the times of a microbatch through all of a rank's chunks, B
their sum I + W: the bubble of interleaved 1F1B and breadth-first is (p-1)(F+B)/v, of interleaved zero bubble
(p-1)(F+I-W)/v, for m and the group of at least p.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family, check_count
from autopart.schedules.rows import Row, in_turn, loop, split


def interleaved(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """1F1B over chunks: at least `group` microbatches (default `ranks`) pass a chunk before the next chunk's turn.

    The groups are as even as they can be, larger ones first. Raises ValueError for a `group` smaller than both
    `ranks` and `microbatches`.
    """
    rows = (_row(rank, ranks, microbatches, chunks, group, 2 * (ranks - 1 - rank)) for rank in range(ranks))
    return Schedule("interleaved", microbatches, loop(ranks, chunks), tuple(rows))


def interleaved_zb(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B with half the extra warm-up, each W `rank` backwards after its I. One chunk makes it ZB-H1."""
    rows = (split(_row(rank, ranks, microbatches, chunks, group, ranks - 1 - rank), rank) for rank in range(ranks))
    return Schedule("interleaved-zb", microbatches, loop(ranks, chunks), tuple(rows))


def bfs(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Every chunk in turn does all microbatches: forwards from the first chunk on, then backwards from the last one.

    With one rank this is layered gradient accumulation; with one layer a chunk, the modular pipeline.
    """
    whole = [range(microbatches)]
    rows = (
        _passes(Kind.F, rank, ranks, chunks, whole) + _passes(Kind.B, rank, ranks, chunks, whole)
        for rank in range(ranks)
    )
    return Schedule("bfs", microbatches, loop(ranks, chunks), tuple(rows))


FAMILIES = (
    Family(
        "interleaved",
        "1F1B with several chunks a rank, which the microbatches pass in groups",
        "Narayanan et al., Megatron-LM, SC 2021 (arXiv 2104.04473)",
        "min(m, ((v - 1) g + 2(p - 1 - r) + 1) / v) microbatches on rank r, for m a multiple of the group g >= p",
        interleaved,
    ),
    Family(
        "bfs",
        "breadth-first: each chunk does all microbatches in turn",
        "Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv 2211.05953)",
        "m microbatches on every rank",
        bfs,
    ),
    Family(
        "interleaved-zb",
        "interleaved 1F1B whose weight gradients fill the idle time",
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241); as in PyTorch",
        "min(m, p) microbatches on every rank, for m a multiple of the group p",
        interleaved_zb,
    ),
)
"""The families of this file."""


def _row(rank: int, ranks: int, microbatches: int, chunks: int, group: int | None, extra: int) -> Row:
    """Forwards of all chunks but the last and `extra` more, then a forward and a backward in turn, then backwards."""
    groups = _groups(microbatches, _group(ranks, microbatches, group))
    forwards = _passes(Kind.F, rank, ranks, chunks, groups)
    backwards = _passes(Kind.B, rank, ranks, chunks, groups)
    return in_turn(forwards, backwards, (chunks - 1) * len(groups[0]) + extra)


def _group(ranks: int, microbatches: int, group: int | None) -> int:
    if group is None:
        return ranks
    check_count("group", group)
    if group < min(ranks, microbatches):
        # Smaller ones can deadlock: a chunk's turn would come before its first value can have arrived.
        raise ValueError(
            f"group must be at least {min(ranks, microbatches)}, the smaller of {ranks} ranks and {microbatches} "
            f"microbatches, not {group}"
        )
    return group


def _groups(microbatches: int, least: int) -> list[range]:
    """As many groups of at least `least` microbatches as there can be (at least one), larger ones first."""
    count = max(1, microbatches // least)
    size, larger = divmod(microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _passes(kind: Kind, rank: int, ranks: int, chunks: int, groups: Iterable[range]) -> Row:
    """Each group of microbatches through all chunks: first to last where `kind` is F, else last to first."""
    order = range(chunks) if kind is Kind.F else reversed(range(chunks))
    stages = [chunk * ranks + rank for chunk in order]
    return tuple(Action(kind, stage, microbatch) for group in groups for stage in stages for microbatch in group)
