"""The one rule for counting communication: payload bytes that a rank really sends.

Used by the plan's predictions and by the runtime's counters, so the two can be compared to the byte.
"""

from __future__ import annotations

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Those that the runtime performs, and counts."""

KNOWN = (*COLLECTIVES, "all_to_all")


def sent_bytes(collective: str, payload: int, ranks: int) -> int:
    """Bytes that each of `ranks` ranks sends for one collective over a buffer of `payload` bytes (ring algorithms).

    The payload is the whole buffer: what is reduced, or what is there after the gather. all-reduce 2 (N-1)/N M;
    all-gather and reduce-scatter (N-1)/N M (ZeRO, arXiv 1910.02054, section 7.1); broadcast counts (N-1)/N M, the
    average over the ranks of a pipelined chain; all-to-all, of which each rank holds the Nth part, (N-1)/N of that.
    Rounded down to whole bytes.
    """
    if collective not in KNOWN:
        raise ValueError(f"unknown collective {collective!r}; one of {', '.join(KNOWN)}")
    factor = 2 if collective == "all_reduce" else 1
    return factor * (ranks - 1) * payload // (ranks**2 if collective == "all_to_all" else ranks)
