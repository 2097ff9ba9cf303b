"""The one rule for counting communication: payload bytes that a rank really sends.

Used by the plan's predictions and by the runtime's counters, so the two can be compared to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Those of which every count has an entry; an all-to-all and a shift have one where there is any."""

KNOWN = (*COLLECTIVES, "all_to_all", "shift")
"""Those that the runtime performs, and counts."""


def counted(kind: str) -> str:
    """What a collective on values is counted as: rows to their groups and back are all-to-alls."""
    return "all_to_all" if kind in ("dispatch", "combine") else kind


Split = tuple[int, int, tuple[int, ...]]
"""How a tensor is split: the dim, its runs of equal length, and the length of each place's part of a run, in order."""


def wire(collective: str, shape: Sequence[int], itemsize: int, what: Sequence[Any]) -> int:
    """The payload of a collective on values, as `sent_bytes` takes it: the whole of `shape`, padded for unequal places.

    `what` are its arguments as `autopart.collectives` has them after the axis.
    """
    elements = prod(shape)
    if collective in ("all_reduce", "dispatch", "combine") or not elements:
        return elements * itemsize
    dim, outer, pieces = int(what[-3]), int(what[-2]), tuple(map(int, what[-1]))
    if collective != "all_to_all":
        return len(pieces) * outer * max(pieces) * (elements // shape[dim]) * itemsize
    before, after = (what[0], what[1], tuple(what[2])), (dim, outer, pieces)
    return len(pieces) ** 2 * chunk(tuple(shape), before, after) * itemsize


@lru_cache(maxsize=256)
def chunk(shape: tuple[int, ...], before: Split, after: Split) -> int:
    """The most elements that a place has for another in an all-to-all of a tensor split `before` one way."""
    elements = prod(shape)
    if before[0] != after[0]:
        rest = elements // (shape[before[0]] * shape[after[0]])
        return before[1] * max(before[2]) * after[1] * max(after[2]) * rest
    size = shape[before[0]]
    both = [[len(one & other) for other in map(set, owned(size, after))] for one in map(set, owned(size, before))]
    return max(map(max, both)) * (elements // size)


@lru_cache(maxsize=256)
def owned(size: int, split: Split) -> tuple[tuple[int, ...], ...]:
    """The indices along a split dim of `size` that each place has."""
    _, outer, pieces = split
    run = size // outer
    starts = [sum(pieces[:place]) for place in range(len(pieces))]
    return tuple(
        tuple(at * run + start + i for at in range(outer) for i in range(length))
        for start, length in zip(starts, pieces, strict=True)
    )


def sent_bytes(collective: str, payload: int, ranks: int) -> int:
    """Bytes that each of `ranks` ranks sends for one collective over a buffer of `payload` bytes (ring algorithms).

    The payload is the whole buffer: what is reduced, or what is there after the gather. all-reduce 2 (N-1)/N M;
    all-gather and reduce-scatter (N-1)/N M (ZeRO, arXiv 1910.02054, section 7.1); broadcast counts (N-1)/N M, the
    average over the ranks of a pipelined chain; all-to-all, of which each rank holds the Nth part, (N-1)/N of that;
    a shift sends the Nth part that each rank has. Rounded down to whole bytes.
    """
    if collective not in KNOWN:
        raise ValueError(f"unknown collective {collective!r}; one of {', '.join(KNOWN)}")
    if collective == "shift":
        return payload // ranks if ranks > 1 else 0
    factor = 2 if collective == "all_reduce" else 1
    return factor * (ranks - 1) * payload // (ranks**2 if collective == "all_to_all" else ranks)
