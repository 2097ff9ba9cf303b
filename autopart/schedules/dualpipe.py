"""DualPipeV and DualPipe: a forward and a backward of two microbatches run as one, hiding each other's waits.

Closed forms at F = I = W, with P the time of a pair: the bubble of DualPipeV is (p-1)(P+B-3W)/2, of DualPipe, which has
two copies of the model that start at opposite ends, (p/2-1)(P+B-3W).
"""

from __future__ import annotations

from collections import deque

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.family import Family


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank along a V, numbered r and 2p-1-r: what goes down the V pairs with what comes back."""
    if microbatches < 2 * ranks:
        raise ValueError(f"{microbatches} microbatches are too few for {ranks} ranks; it takes at least {2 * ranks}")
    place = (*range(ranks), *reversed(range(ranks)))
    table = tuple(
        _Row((Action(Kind.F, rank, 0), Action(Kind.F, 2 * ranks - 1 - rank, 0))).fill(rank, ranks, microbatches)
        for rank in range(ranks)
    )
    return Schedule("dualpipev", microbatches, place, table)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Each rank does what its place in the V of half as many ranks would: two half pipelines, joined end to end.

    The first half of the microbatches travels pipe 0, from rank 0, the other half pipe 1, from the last rank.
    """
    if ranks % 2:
        raise ValueError(
            f"{ranks} ranks; it takes an even number of them, such as {ranks + 1}, since the two "
            "copies of the model meet in the middle"
        )
    if microbatches < 2 * ranks or microbatches % 2:
        least = max(2 * ranks, microbatches + microbatches % 2)
        raise ValueError(
            f"{microbatches} microbatches on {ranks} ranks; it takes an even number of at least "
            f"{2 * ranks}, such as {least}"
        )
    half = microbatches // 2
    table = []
    for rank in range(ranks):
        ends = (Action(Kind.F, rank, 0), Action(Kind.F, ranks - 1 - rank, half, pipe=1))
        ends = ends if rank < ranks // 2 else ends[::-1]
        table.append(_Row(ends).fill(min(rank, ranks - 1 - rank), ranks // 2, half))
    place = tuple(range(ranks))
    return Schedule("dualpipe", microbatches, place, tuple(table), mirrors=(place[::-1],))


FAMILIES = (
    Family(
        "dualpipe",
        "two copies of the model from opposite ends, a forward and a backward at a time",
        "DeepSeek-AI, DualPipe (arXiv 2412.19437)",
        "p + 1 microbatches on every rank, and two stages' parameters",
        dualpipe,
    ),
    Family(
        "dualpipev",
        "two stages a rank along a V, a forward and a backward at a time",
        "DeepSeek-AI and Sea AI Lab, DualPipeV, 2025",
        "p + 1/2 microbatches on every rank",
        dualpipev,
    ),
)
"""The training families of this file."""


class _Row:
    """A row as it is written: the next forward and backward of each of the rank's two chunks, and the W still due.

    `firsts` has the first forward of chunk 0, at which microbatches come in, and of chunk 1, at which they turn back.
    """

    def __init__(self, firsts: tuple[Action, Action]) -> None:
        self.firsts = firsts
        self.counts = {(kind, chunk): 0 for kind in (Kind.F, Kind.B) for chunk in (0, 1)}
        self.actions: list[Action] = []
        self.due: deque[Action] = deque()

    def fill(self, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
        """The row of a rank of the V, in its eight phases."""
        after = ranks - 1 - rank
        self._forwards(0, 2 * after)
        for _ in range(rank + 1):
            self._forwards(0)
            self._forwards(1)
        for _ in range(after):
            self._split(1)
            self._weights()
            self._forwards(1)
        for turn in range(microbatches - 2 * ranks + rank + 1):
            self._pair(0, apart=turn == 0 and after == 0)
            self._pair(1)
        for _ in range(after):
            self._backward(1)
            self._pair(1)
        # From here on no forward is left to pair with: in the middle of this phase backwards begin to be split, so that
        # what other ranks wait for comes first.
        for number in range(2 * (rank + 1)):
            (self._split if number > rank else self._backward)(1 - number % 2)
        for _ in range(after):
            self._weights()
            self._split(0)
        for _ in range(rank + 1):
            self._weights()
        return tuple(self.actions)

    def _next(self, kind: Kind, chunk: int) -> Action:
        first, number = self.firsts[chunk], self.counts[kind, chunk]
        self.counts[kind, chunk] += 1
        return Action(kind, first.stage, first.microbatch + number, pipe=first.pipe)

    def _forwards(self, chunk: int, times: int = 1) -> None:
        self.actions += (self._next(Kind.F, chunk) for _ in range(times))

    def _backward(self, chunk: int) -> None:
        self.actions.append(self._next(Kind.B, chunk))

    def _split(self, chunk: int) -> None:
        whole = self._next(Kind.B, chunk)
        where = (whole.stage, whole.microbatch, whole.slice, whole.pipe)
        self.actions.append(Action(Kind.I, *where))
        self.due.append(Action(Kind.W, *where))

    def _weights(self) -> None:
        self.actions.append(self.due.popleft())

    def _pair(self, chunk: int, *, apart: bool = False) -> None:
        """A forward of one chunk with a backward of the other."""
        both = (self._next(Kind.F, chunk), self._next(Kind.B, 1 - chunk))
        self.actions += both if apart else (Action.pair(*both),)
