"""Vocabulary parallelism: 1F1B with the output layer, which would burden the last stage, split over all ranks.

When the last stage has a microbatch's forward, every rank computes its part of the logits (S) and, once the statistics
of all parts are known, the rest (T). Where that rest is for weights alone, one exchange between the ranks must be over
before the last stage's backward begins, and T can wait; where it also makes the gradients that the backward begins
with, there are two exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family

FORWARD, BACKWARD = 1, 2
"""The relative times of a forward and a backward by which rows choose the order of their steady state."""


def vocab(ranks: int, microbatches: int, barriers: int = 1) -> Schedule:
    """1F1B that warms up with one forward more a barrier; between a forward and a backward each row does an S."""
    if barriers not in (1, 2):
        raise ValueError(f"barriers must be 1 or 2, not {barriers!r}")
    rows = [
        tuple(_row(rank, ranks, microbatches, barriers, early, turn))
        for rank, (early, turn) in enumerate(_turns(ranks))
    ]
    return Schedule("vocab", microbatches, tuple(range(ranks)), tuple(rows), barriers=barriers)


FAMILIES = (
    Family(
        "vocab",
        "1f1b with the output layer split over all ranks, which compute their parts together",
        "Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, MLSys 2025 (arXiv 2411.05288)",
        "min(m, p - r + barriers) microbatches on rank r",
        vocab,
    ),
)
"""The training families of this file."""


def _turns(ranks: int) -> list[tuple[int, str]]:
    """How many S a rank does early, and the order of its steady state.

    Going up from the last rank, each is a forward further from it: BSF keeps in step until that adds up to a backward.
    """
    turns, skew = ["BSF"] * ranks, 0
    rank = ranks - 1
    while rank >= 0:
        if skew - FORWARD >= -BACKWARD:
            skew -= FORWARD
        else:
            turns[rank] = "BFS"
            rank -= 1
            skew += BACKWARD - FORWARD
        rank -= 1
    early = [0] * ranks
    for rank in reversed(range(ranks - 1)):
        early[rank] = early[rank + 1] + (not (turns[rank + 1] == "BFS" and turns[rank] == "BSF"))
    return list(zip(early, turns, strict=True))


def _row(rank: int, ranks: int, microbatches: int, barriers: int, early: int, turn: str) -> Iterator[Action]:
    order = "F" * (ranks - rank) + "SF" * barriers + "S" * early + turn * microbatches + "FSB" * ranks
    done = dict.fromkeys((Kind.F, Kind.S, Kind.T, Kind.B), 0)

    def up_to(kind: Kind, count: int) -> Iterator[Action]:
        for number in range(done[kind], min(count, microbatches)):
            yield Action(kind, rank, number)
            done[kind] += 1

    for kind in map(Kind, order):
        yield from up_to(kind, done[kind] + 1)
        # T follows the S of the next microbatch; the last one, which has none to follow, waits for no other rank's S
        # but where the backward does.
        last = done[Kind.S] == microbatches and (kind is Kind.B or barriers == 2)
        yield from up_to(Kind.T, done[Kind.S] - (not last))
