"""Idle windows of a loop that flushes, and the frozen forwards that go there: which rank performs which, and when.

windows    where ranks wait in a steady loop of the trained layers alone
greedy     in the order of time, each window takes the forwards that fit: whole microbatches first, or at once the
           next piece of the front for the microbatch that its rank has begun; all its pieces stay on one rank
the rest   what fits into no window goes to the end of the batch on the rank where that ends soonest, or where it
           makes a rank least late
choose     the shortest simulated step, by all ranks that may or by the home alone; of equals the fewest ranks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules.filling import Filled
from autopart.schedules.prices import Comm
from autopart.schedules.simulate import Timeline, simulate

LONG = 6
"""The batches of which a steady one is looked at."""

CLOSE = 1e-9
"""Times that differ by less, in parts of a batch, are equal."""

Seconds = Sequence[Mapping[str, float]]
"""The time of a forward (F), a backward (B) and its halves (I, W), stage by stage."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A batch of a loop under way: how much later it ends than the one before, and the part that ranks wait of it."""

    seconds: float
    bubble: float


@dataclass(frozen=True, slots=True)
class _Window:
    """Idle time of a rank before action `gap` of its row."""

    start: float
    rank: int
    gap: int
    length: float


@dataclass
class _Filling:
    """A filling under way. `waiting` are microbatches that no rank has begun; `begun` says how many pieces are done."""

    frozen: Sequence[float]
    fills: list[list[list[Action]]]
    left: dict[tuple[int, int], float]  # of each gap
    waiting: list[int]
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: the microbatch, and how many pieces

    def next_on(self, rank: int) -> tuple[int, int] | None:
        """The microbatch and the piece that a rank would perform next, None if all are taken."""
        return self.begun.get(rank) or ((self.waiting[0], 0) if self.waiting else None)

    def put(self, rank: int, gap: int) -> None:
        """Perform the next piece on a rank in a gap."""
        found = self.next_on(rank)
        assert found is not None, "something is left"
        k, piece = found
        if piece == 0:
            self.waiting.remove(k)
        self.fills[rank][gap].append(Action(Kind.F, piece, k))
        self.left[rank, gap] -= self.frozen[piece]
        self.begun.pop(rank, None)
        if piece + 1 < len(self.frozen):
            self.begun[rank] = (k, piece + 1)

    def microbatch(self, rank: int, gap: int) -> None:
        """Perform all pieces of the next microbatch in a gap of a rank that has begun none."""
        for _ in self.frozen:
            self.put(rank, gap)


def fill_idle(
    trained: Schedule,
    seconds: Seconds,
    frozen: Sequence[float],
    *,
    ranks: Collection[int] | None = None,
    comm: Comm = 0.0,
) -> Filled:
    """The loop with the shortest predicted step in which ranks that wait perform the front, for the batch after.

    `trained` is the schedule of the trained layers, whose stages take `seconds`; a microbatch of each piece of the
    front takes so many seconds of `frozen`. Only these `ranks` (by default all) and the home of the front fill; `comm`
    is the latency of an edge between ranks.
    """
    home = trained.place[0]
    allowed = sorted({home, *(range(trained.ranks) if ranks is None else ranks)})
    windows, seen = _windows(trained, seconds, comm), set[object]()
    best: tuple[tuple[float, int], Filled] | None = None
    for among in (allowed, [home]):
        for whole, spread in product((True, False), (False, True)):
            made = _filled(trained, windows, frozen, among, whole=whole, spread=spread)
            if made.fills in seen:
                continue
            seen.add(made.fills)
            length = steady(made, seconds, frozen, comm).seconds
            rank = float(f"{length:.9e}"), len(made.helpers)
            if best is None or rank < best[0]:
                best = rank, made
    assert best is not None
    return best[1]


def steady(filled: Filled, seconds: Seconds, frozen: Sequence[float], comm: Comm = 0.0) -> Steady:
    """A batch of the loop under way, each rank stepping alone; the times are those of `fill_idle`."""
    line = filled_timeline(filled.table(LONG), seconds, frozen, comm)
    ends = [0.0] * LONG
    for span in line.spans:
        if span.action.kind is Kind.OPT:
            ends[span.action.microbatch] = max(ends[span.action.microbatch], span.end)
    length = (ends[LONG - 2] - ends[1]) / (LONG - 3)  # the last batch has no next one
    work = [0.0] * filled.trained.ranks
    batch = range(filled.batch, 2 * filled.batch)
    for span in line.spans:
        if span.action.kind is not Kind.OPT and span.action.microbatch in batch:
            work[span.rank] += span.end - span.start
    return Steady(length, max(0.0, 1 - max(work) / length) if length else 0.0)


def filled_timeline(table: Schedule, seconds: Seconds, frozen: Sequence[float], comm: Comm = 0.0) -> Timeline:
    """The simulated table of a loop, its front included."""
    stages = [*({"F": each} for each in frozen), *seconds]
    return simulate(table, _by_kind(stages), comm)


def _by_kind(seconds: Seconds) -> dict[str, tuple[float, ...]]:
    """The times of all stages, by the kind of the action."""
    return {kind: tuple(each.get(kind, 0.0) for each in seconds) for kind in "FBIW"}


def _windows(trained: Schedule, seconds: Seconds, comm: Comm) -> list[_Window]:
    """Where ranks wait in one of the last batches of a loop of the trained layers alone, in the order of time."""
    line = simulate(trained, _by_kind(seconds), comm, optimizer="per-rank", iterations=LONG)
    rows: list[list[tuple[Kind, float, float]]] = [[] for _ in trained.table]
    for span in line.spans:
        rows[span.rank].append((span.action.kind, span.start, span.end))
    found = []
    for rank, row in enumerate(rows):
        each = len(row) // LONG
        begin = (LONG - 2) * each
        for gap, (kind, start, _) in enumerate(row[begin : begin + each]):
            before = row[begin + gap - 1][2]
            if kind is not Kind.OPT and start - before > CLOSE * line.period:
                found.append(_Window(before, rank, gap, start - before))
    return sorted(found, key=lambda window: (window.start, window.rank))


def _filled(
    trained: Schedule,
    windows: Sequence[_Window],
    frozen: Sequence[float],
    ranks: Sequence[int],
    *,
    whole: bool,
    spread: bool,
) -> Filled:
    """The windows of some ranks filled, with `whole` microbatches first; the rest `spread` over gaps, or at the end."""
    ends = {rank: len(trained.table[rank]) for rank in ranks}
    mine = [window for window in windows if window.rank in ranks]
    made = _Filling(
        frozen,
        [[[] for _ in range(len(row) + 1)] for row in trained.table],
        {
            **{(rank, end): 0.0 for rank, end in ends.items()},
            **{(window.rank, window.gap): window.length for window in mine},
        },
        [*range(trained.microbatches)],
    )
    close = CLOSE * sum(window.length for window in windows)
    for window in mine if whole else ():
        while made.waiting and sum(frozen) <= made.left[window.rank, window.gap] + close:
            made.microbatch(window.rank, window.gap)
    for window in mine:
        while (found := made.next_on(window.rank)) is not None:
            if frozen[found[1]] > made.left[window.rank, window.gap] + close:
                break
            made.put(window.rank, window.gap)
    for rank in sorted(made.begun):
        while rank in made.begun:
            made.put(rank, ends[rank])
    # A rank that ends early waits before the first action of its next batch.
    room = {rank: made.left[rank, end] + made.left.get((rank, 0), 0.0) for rank, end in ends.items()}
    while made.waiting:
        rank = max(ranks, key=lambda each: room[each])
        gap = ends[rank]
        if spread:
            rank, gap = max(made.left, key=lambda where: made.left[where])
        room[rank] -= sum(frozen)
        made.microbatch(rank, gap)
    fills = tuple(tuple(tuple(gap) for gap in gaps) for gaps in made.fills)
    return Filled(trained, fills, len(frozen))
