"""Schedules of whole units of microbatches: GIS, ZeroPP, Hanayo.

GIS and ZeroPP lie on the loop placement, Hanayo on a wave of 2w stages a rank.
"""

from __future__ import annotations

from math import ceil, gcd

from autopart.ir.action import Action, Kind, Schedule, stages_of
from autopart.schedules.family import Family, check_count
from autopart.schedules.fill import fill
from autopart.schedules.play import Clock, play, unit_costs
from autopart.schedules.rows import Row, loop, wave


def gis(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Groups of `group` microbatches (default half the ranks), each action in a slot of its own; less memory than 1F1B.

    Raises ValueError for a group larger than `ranks`.
    """
    size = ceil(ranks / 2) if group is None else group
    check_count("group", size)
    if size > ranks:
        raise ValueError(f"group must be at most {ranks}, the number of ranks, not {group}")
    rows = (_gis_row(rank, ranks, microbatches, chunks, size) for rank in range(ranks))
    return Schedule("gis", microbatches, loop(ranks, chunks), tuple(rows))


def zeropp(ranks: int, microbatches: int, *, chunks: int = 2, unit: int | None = None) -> Schedule:
    """Units of `unit` microbatches (default `ranks`), breadth-first within: few switches of chunk.

    Raises ValueError for a unit smaller than both `ranks` and `microbatches`.
    """
    size = ranks if unit is None else unit
    check_count("unit", size)
    if size < min(ranks, microbatches):
        raise ValueError(
            f"unit must be at least {min(ranks, microbatches)}, the smaller of {ranks} ranks and {microbatches} "
            f"microbatches, not {unit}"
        )
    place = loop(ranks, chunks)
    rows = [_zeropp_row(rank, ranks, microbatches, chunks, size) for rank in range(ranks)]
    filled = fill(rows, Clock(place, unit_costs(len(place), chunks)), size * chunks, ahead="eager")
    return Schedule("zeropp", microbatches, place, filled)


def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Schedule:
    """`waves` waves over the ranks; each rank does a backward that is ready, else the forward of its deepest stage."""
    check_count("waves", waves)
    place = wave(ranks, 2 * waves)
    players = [_Wave(rank, place, microbatches) for rank in range(ranks)]
    rows = play(players, Clock(place, unit_costs(len(place), 2 * waves)))
    return Schedule("hanayo", microbatches, place, rows)


FAMILIES = (
    Family(
        "hanayo",
        "stages on a wave over the ranks, backwards as soon as they are ready; meant for m = p",
        "Liu et al., Hanayo, SC 2023 (arXiv 2308.15762)",
        "at most min(m, p) microbatches on a rank",
        hanayo,
    ),
    Family(
        "zeropp",
        "breadth-first within units of microbatches: few switches of chunk, for parameters that are gathered",
        "Tang et al., ZeroPP, 2024 (arXiv 2402.03791)",
        "at most min(m, u) microbatches of a unit of u >= p on a rank",
        zeropp,
    ),
    Family(
        "gis",
        "interleaved in groups of half the ranks, for three quarters of 1F1B's memory at two chunks",
        "Wan et al., PipeOffload, ICML 2025 (arXiv 2503.01328)",
        "p (v + 1) / (2v) microbatches on rank 0 for a group of p / 2, fewer on later ranks",
        gis,
    ),
)
"""The families of this file."""


def _gis_row(rank: int, ranks: int, microbatches: int, chunks: int, group: int) -> Row:
    """The actions of one rank in the order of their slots, which are three a microbatch and chunk."""
    spread = ceil(ceil(ranks / 2) / group)
    offset = [3 * spread * group * c + 3 * group * (c * gcd(chunks, spread) // chunks) for c in range(chunks)]
    turn = offset[-1] + rank + 3 * (ranks - 1 - rank) + 1
    placed = []
    for microbatch in range(microbatches):
        start = 3 * (microbatch % group) + 3 * group * chunks * (microbatch // group)
        for chunk in range(chunks):
            first, second = chunk * ranks + rank, (chunks - 1 - chunk) * ranks + rank
            begin = start + offset[chunk]
            placed += [
                (begin + rank, Action(Kind.F, first, microbatch)),
                (begin + turn, Action(Kind.I, second, microbatch)),
                (begin + turn + 1, Action(Kind.W, second, microbatch)),
            ]
    return tuple(action for _, action in sorted(placed, key=lambda each: each[0]))


def _zeropp_row(rank: int, ranks: int, microbatches: int, chunks: int, unit: int) -> Row:
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    row: list[Action] = []
    for first in range(0, microbatches, unit):
        inside = range(first, min(first + unit, microbatches))
        row += [Action(Kind.F, stage, microbatch) for stage in stages for microbatch in inside]
        row += [Action(Kind.I, stage, microbatch) for stage in reversed(stages) for microbatch in inside]
    return tuple(row)


class _Wave:
    """One rank of Hanayo: what is next at each of its stages, which take microbatches in order."""

    def __init__(self, rank: int, place: tuple[int, ...], microbatches: int) -> None:
        self.rank = rank
        self.stages = stages_of(place, rank)
        self.microbatches = microbatches
        self.limit = len(self.stages) * (max(place) + 1)
        self.forward = dict.fromkeys(self.stages, 0)
        self.backward = dict.fromkeys(self.stages, 0)

    def choose(self, clock: Clock, now: float) -> Action | float | None:
        backwards = self._ready(Kind.B, self.backward, clock, now)
        if backwards:
            return self._take(self.backward, min(backwards, key=lambda action: (action.microbatch, -action.stage)))
        forwards = [action for action in self._ready(Kind.F, self.forward, clock, now) if self._fits(action, clock)]
        if forwards:
            return self._take(self.forward, max(forwards, key=lambda action: action.stage))
        return None

    def _fits(self, action: Action, clock: Clock) -> bool:
        """Whether the oldest microbatch can still pass all stages afterwards: so the ranks never lock each other."""
        oldest = self.backward[self.stages[0]]
        ahead = sum(self.forward[stage] <= oldest for stage in self.stages)
        reserved = ahead if action.microbatch > oldest else 0
        return clock.held[self.rank] + reserved < self.limit

    def _ready(self, kind: Kind, done: dict[int, int], clock: Clock, now: float) -> list[Action]:
        following = [Action(kind, stage, done[stage]) for stage in self.stages if done[stage] < self.microbatches]
        return [action for action in following if (due := clock.arrives(action)) is not None and due <= now]

    def _take(self, done: dict[int, int], action: Action) -> Action:
        done[action.stage] += 1
        return action
