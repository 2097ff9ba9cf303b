"""BitPipe: two copies of the model, each along a V of two stages a rank, which start at opposite ends.

Closed form at F=1, B=2 with M microbatches: the bubble is (p-2)(1 + (M/p-1)/2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family


def bitpipe(ranks: int, microbatches: int) -> Schedule:
    """Units of p microbatches, of which each pipe takes half; the next unit's forwards fill the gaps of one's end."""
    if ranks % 2:
        raise ValueError(
            f"{ranks} ranks; it takes an even number of them, such as {ranks + 1}, since the two "
            "copies of the model meet in the middle"
        )
    if microbatches % ranks:
        raise ValueError(
            f"{microbatches} microbatches on {ranks} ranks; it takes a multiple of the ranks, such "
            f"as {microbatches + -microbatches % ranks}"
        )
    down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
    table = tuple(tuple(_row(rank, ranks, microbatches // ranks)) for rank in range(ranks))
    return Schedule("bitpipe", microbatches, down + up, table, mirrors=(up + down,))


FAMILIES = (
    Family(
        "bitpipe",
        "two copies of the model along opposite Vs, one forward and one backward in turn",
        "Wu et al., BitPipe (arXiv 2410.19367)",
        "at most p microbatches on a rank, and four stages' parameters",
        bitpipe,
    ),
)
"""The training families of this file."""

Chunk = tuple[int, int]
"""Pipe, and 0 or 1: the rank's stage on the way down the V, or on the way back."""


def _row(rank: int, ranks: int, units: int) -> Iterator[Action]:
    half = ranks // 2
    near = half - rank if rank < half else rank - half + 1
    own = 0 if rank < half else 1
    forwards = [_actions(Kind.F, rank, ranks, unit, _order(own, near, half)) for unit in range(units)]
    # Backwards meet the chunks as forwards do, with the way down and the way back exchanged.
    turned = [(pipe, 1 - chunk) for pipe, chunk in _order(own, near, half)]
    backwards = [_actions(Kind.B, rank, ranks, unit, turned) for unit in range(units)]
    ahead = iter([action for unit in forwards for action in unit])
    behind = iter([action for unit in backwards for action in unit])
    warmup = ranks + half + min(rank, ranks - 1 - rank)
    left = 2 * ranks - warmup
    yield from _take(warmup, ahead)
    for unit in range(units):
        yield from _take(left, ahead, behind)
        if unit + 1 < units:
            yield from _take(warmup - left + 1, behind)
            yield from _take(left - 1, ahead, behind)
            yield from _take(warmup - left + 1, ahead)
    yield from behind


def _take(times: int, *sources: Iterator[Action]) -> Iterator[Action]:
    """So many actions of each source, in turn."""
    return (next(source) for _ in range(times) for source in sources)


def _order(own: int, near: int, half: int) -> list[Chunk]:
    """The chunks that the forwards of a unit meet; `own` is the pipe that starts in the rank's half."""
    other, far = 1 - own, half - near
    return [
        *[(own, 0)] * near,
        *[(other, 0), (own, 0)] * far,
        *[(other, 0), (other, 1)] * near,
        *[(own, 1), (other, 1)] * far,
        *[(own, 1)] * near,
    ]


def _actions(kind: Kind, rank: int, ranks: int, unit: int, order: Sequence[Chunk]) -> list[Action]:
    """The actions of a unit on the rank: the microbatches of each chunk in order."""
    start = {0: rank, 1: ranks - 1 - rank}
    counts = dict.fromkeys(order, 0)
    made = []
    for pipe, chunk in order:
        stage = 2 * ranks - 1 - start[pipe] if chunk else start[pipe]
        microbatch = unit * ranks + pipe * (ranks // 2) + counts[pipe, chunk]
        counts[pipe, chunk] += 1
        made.append(Action(kind, stage, microbatch, pipe=pipe))
    return made
