"""The question that `auto` answers: stages and what they cost, memory, and when the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.action import Boundary, Kind, stages_of
from autopart.schedules.family import check_count
from autopart.schedules.play import Clock, Costs, follow
from autopart.schedules.prices import by_stage
from autopart.schedules.rows import Row, loop, wave


@dataclass(frozen=True, slots=True)
class Problem:
    """Stages on ranks, what their actions cost, and what is to be short.

    `place[s]` is the rank of stage s. `limit` is the most microbatches at stages that a rank may hold, from F to the
    end of W (or B). `whole` says that backwards are not split: they cost B. `per_rank` says what is to be short: the
    longest time from a rank's first start to its last end, else the time until all ranks are done.
    """

    place: tuple[int, ...]
    microbatches: int
    costs: Costs
    comm: float
    limit: int
    whole: bool
    per_rank: bool

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.place) + 1

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, the first one first."""
        return tuple(stages_of(self.place, rank) for rank in range(self.ranks))

    @property
    def chunks(self) -> int:
        """The number of stages a rank."""
        return len(self.place) // self.ranks

    @property
    def saves(self) -> bool:
        """Whether a whole backward may be cheaper than its two parts."""
        costs = self.costs
        return not self.whole and any(
            b < i + w for b, i, w in zip(costs[Kind.B], costs[Kind.I], costs[Kind.W], strict=True)
        )

    def clock(self) -> Clock:
        """A clock at time 0."""
        return Clock(self.place, self.costs, self.comm)

    def hop(self, stage: int) -> float:
        """The latency between a stage and the next one."""
        return self.comm if self.place[stage] != self.place[stage + 1] else 0.0

    def head(self, stage: int) -> float:
        """When a stage can start: the forwards before it, and their way."""
        return sum(self.costs[Kind.F][before] + self.hop(before) for before in range(stage))

    def length(self, clock: Clock) -> float:
        """How long the run on a clock took: the number that is to be small."""
        return max(spans[-1][1] - (spans[0][0] if self.per_rank else 0.0) for spans in clock.spans)

    def measure(self, rows: Sequence[Row]) -> float:
        """How long rows take; infinity where they lock each other or hold too much."""
        clock = self.clock()
        complete = follow(rows, clock) == tuple(rows)
        return self.length(clock) if complete and self.fits(rows) else math.inf

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether no rank holds more than the limit."""
        for row in rows:
            held = 0
            for action in row:
                held += 1 if action.kind is Kind.F else 0 if action.kind is Kind.I else -1
                if held > self.limit:
                    return False
        return True


def problems(
    ranks: int,
    microbatches: int,
    costs: Mapping[str, float | Sequence[float]],
    comm: float,
    limit: float | None,
    optimizer: str,
) -> tuple[Problem, ...]:
    """The problem on each placement that the costs allow: one stage a rank, else the loop and the wave.

    Raises TypeError or ValueError that names a bad argument.
    """
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    if optimizer not in tuple(Boundary):
        raise ValueError(f"optimizer must be 'barrier' or 'per-rank', not {optimizer!r}")
    if not (math.isfinite(comm) and comm >= 0):
        raise ValueError(f"comm must be a latency of at least 0, not {comm}")
    whole, prices = _prices(ranks, costs)
    chunks = len(prices[Kind.F]) // ranks
    most = microbatches * chunks if limit is None else math.floor(limit * chunks + 1e-9)
    if most < chunks:
        raise ValueError(f"limit must be at least 1, a microbatch on a rank, not {limit}")
    places = dict.fromkeys((loop(ranks, chunks), wave(ranks, chunks)))
    return tuple(
        Problem(place, microbatches, prices, comm, most, whole, optimizer == Boundary.PER_RANK) for place in places
    )


def _prices(ranks: int, costs: Mapping[str, float | Sequence[float]]) -> tuple[bool, Costs]:
    """Whether backwards are whole, and the time of F, I, W and B at each stage."""
    unknown = sorted(set(costs) - {"F", "I", "W", "B"})
    if unknown:
        raise ValueError(f"costs: unknown kind {unknown[0]!r}; the kinds are F, I, W and B")
    split = "I" in costs and "W" in costs
    if "F" not in costs or not (split or "B" in costs) or ("I" in costs) != ("W" in costs):
        raise ValueError(f"costs must have F, and I and W or B, not {', '.join(costs) or 'nothing'}")
    lengths = {len(cost) for cost in costs.values() if isinstance(cost, Sequence)} or {ranks}
    stages = max(lengths)
    if len(lengths) > 1 or stages % ranks or not stages:
        raise ValueError(f"costs must have one number a stage, {ranks} or a multiple of it, not {sorted(lengths)}")
    place = loop(ranks, stages // ranks)
    given = {Kind(kind): tuple(by_stage(place, Kind(kind), cost)) for kind, cost in costs.items()}
    if not split:
        return True, {**given, Kind.I: given[Kind.B], Kind.W: (0.0,) * stages}
    sums = tuple(i + w for i, w in zip(given[Kind.I], given[Kind.W], strict=True))
    return False, {Kind.B: sums, **given}
