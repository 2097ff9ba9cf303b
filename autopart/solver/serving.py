"""Plans of forward-only programs: the latency of a batch against the samples a second of a pipeline that is kept full.

With stages that take t(k) for a microbatch (parameters gathered before, where they lie in parts), messages that keep a
link busy for x and arrive after e, its latency included, and m microbatches a batch, a batch has passed, and the next
may come, after

    latency   sum of t(k)  +  (p - 1) e  +  (m - 1) max(x, t(k))
    period    m max(x, t(k))

Of a setting of the global choices the sum is the same for all splits, so that they differ in the slowest stage and in
the largest message only: for each bound on the latter, the split with the fastest slowest stage is found (`fastest`).
Of all these points, those are kept of which no other is better in one and as good in the other.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import Unpack

from autopart.ir.cost import SegmentCost
from autopart.ir.placement import Modes, Placement
from autopart.ir.plan import Plan, Prediction, Stage
from autopart.ir.plan_text import schedule
from autopart.ir.tensor_plan import TensorPlan
from autopart.ir.traffic import sent_bytes
from autopart.solver.axis import linked
from autopart.solver.columns import alike
from autopart.solver.infeasible import infeasible
from autopart.solver.joint import Progress
from autopart.solver.kinds import FEMTOSECONDS, Sums
from autopart.solver.memory import MemoryModel
from autopart.solver.question import Question, deadline, with_degrees
from autopart.solver.request import Pins, Request
from autopart.solver.setting import Setting
from autopart.solver.space import Space
from autopart.solver.variants import Costed, Degrees

KEPT = (Placement.ddp(), Placement.fsdp())
"""The placements in question: without optimizer and gradients, parameters are whole or in parts."""


TRAINING = ("recompute", "offload", "precision", "objective")
"""The arguments that say something of training only."""


@dataclass(frozen=True, slots=True)
class Served:
    """A plan's global choices, where its stages begin, and in femtoseconds what they make of a batch."""

    setting: Setting
    starts: tuple[int, ...]
    latency: int
    period: int


def serve(
    costs: Sequence[SegmentCost],
    *,
    n: int,
    batch: int,
    recomputed: Sequence[SegmentCost] | None = None,
    tensor: TensorPlan | None = None,
    others: Sequence[Costed] = (),
    degrees: Degrees = MappingProxyType({}),
    fingerprint: str = "",
    **pins: Unpack[Pins],
) -> tuple[Plan, ...]:
    """Up to `n` plans of the front of latency and throughput, the lowest latency first; arguments as of `choose`.

    Raises ValueError for pins that are for training, and for a schedule with several stages a rank; PlanInfeasible
    where nothing fits.
    """
    for pin in TRAINING:
        if pins.get(pin):
            raise ValueError(f"{pin}: a program that runs forwards alone has nothing of that; leave it out")
    began, progress = time.monotonic(), pins.get("progress", lambda done, count: None)
    until = deadline(began, pins.get("time_limit"))
    question = Question.of(
        costs,
        pins,
        batch=batch,
        recomputed=recomputed,
        optimizer_ratio=0.0,
        forwards_first=False,
        tensor=tensor,
        others=others,
        degrees=degrees,
    )
    request = question.request()
    if not Space(request).single:
        raise ValueError(
            f"schedule: {schedule(request.schedules[0])} is for training; forwards alone take one stage a pipeline rank"
        )
    space = Space(serving(with_degrees(request, until, progress)))
    points, complete = front(space, until, progress)
    if not points:

        def asked(kept: Collection[str]) -> Request:
            return serving(question.keeping(kept, request.devices))

        raise infeasible(space.request, question.given, asked)
    plans = (plan_of(space, point, complete=complete, fingerprint=fingerprint) for point in thinned(points, n))
    return tuple(replace(plan, took=time.monotonic() - began) for plan in plans)


def serving(request: Request) -> Request:
    """The request for forwards alone: nothing is trained, and no other schedule helps."""
    asked = tuple(rules for rules in request.placements if rules[-1][1] in KEPT) or request.placements
    variants = tuple(
        replace(
            variant,
            costs=tuple(
                replace(cost, trainable_bytes=0, tied=tuple(replace(tied, trainable=False) for tied in cost.tied))
                for cost in variant.costs
            ),
            again=(None,) * len(variant.costs),
        )
        for variant in request.variants
    )
    cluster = alike(request.cluster)
    return replace(request, cluster=cluster, placements=asked, variants=variants, free=False, forwards_first=True)


def front(space: Space, until: float, progress: Progress) -> tuple[list[Served], bool]:
    """The points of which none is better than another in both, the lowest latency first; whether all were looked at.

    Of equal points the one of the preferred setting is kept.
    """
    found: list[Served] = []
    settings = sorted(space.settings, key=lambda each: each.preference)
    for done, setting in enumerate(settings):
        progress(done, len(settings))
        if found and time.monotonic() > until:
            return _undominated(found), False
        found = _undominated([*found, *_points(space, setting)])
    return _undominated(found), True


def _undominated(points: Sequence[Served]) -> list[Served]:
    kept: list[Served] = []
    for each in sorted(points, key=lambda each: (each.latency, each.period, each.setting.preference)):
        if not kept or each.period < kept[-1].period:
            kept.append(each)
    return kept


def _points(space: Space, setting: Setting) -> Iterator[Served]:
    """The splits of a setting that come into question: the fastest slowest stage for each largest message."""
    pipe, elapsed = space.pipe(setting), _elapsed(space, setting)
    holding, limit = space.holding(setting), space.request.memory
    p, m, best = pipe.stages, pipe.microbatches, inf
    cuts = sorted({*pipe.allowed, *pipe.starts} - {0})

    def fits(start: int, stop: int, most: int) -> bool:
        return elapsed[stop] - elapsed[start] <= most and holding.resident(start, stop) <= limit

    for largest in sorted({pipe.transfer[0][cut] for cut in cuts}) if p > 1 else [0]:
        there = [cut for cut in cuts if pipe.transfer[0][cut] <= largest]
        if not {*pipe.starts} - {0} <= {*there}:
            continue
        found = fastest(elapsed, there, pipe.starts, p, fits)
        if found is not None and (slowest := _slowest(elapsed, found)) < best:
            best = slowest
            message = max((pipe.transfer[0][cut] for cut in found[1:]), default=0)
            busiest, passing = max(slowest, message), (p - 1) * (pipe.latency + message)
            yield Served(setting, found, elapsed[-1] + passing + (m - 1) * busiest, m * busiest)


def _elapsed(space: Space, setting: Setting) -> Sums:
    """The time of a microbatch's forward through the segments, summed from the first one on."""
    table, placed, dp = space.table(setting), space.placed(setting), setting.mesh.degree("dp")
    cluster = linked(space.request.cluster, setting.mesh, "dp")

    def passed(kind: int, mode: Modes) -> int:
        """The time of a segment, its parameters gathered before where they lie in parts."""
        seconds, nbytes = 0.0, table.numbers[kind].parameter_bytes
        if dp > 1 and mode.gathered and nbytes:
            seconds = cluster.link_latency + sent_bytes("all_gather", nbytes, dp) / cluster.link_bandwidth
        return table.times[kind][0] + round(seconds * FEMTOSECONDS)

    return placed.kinds.sums(list(map(passed, placed.plain, placed.modes)))


def _slowest(elapsed: Sequence[int], starts: Sequence[int]) -> int:
    return max(elapsed[j] - elapsed[i] for i, j in pairwise([*starts, len(elapsed) - 1]))


def fastest(
    elapsed: Sequence[int],
    cuts: Sequence[int],
    pinned: Sequence[int],
    stages: int,
    fits: Callable[[int, int, int], bool],
) -> tuple[int, ...] | None:
    """Where so many stages begin, at some of the `cuts` and at all `pinned` ones, so that the slowest is fastest.

    ``fits(start, stop, most)`` says whether those segments may be a stage of at most that time; what fits does so in
    parts. None if there is no way.
    """
    low, high, found = 0, elapsed[-1], _within(elapsed, cuts, pinned, stages, fits, elapsed[-1])
    while found is not None and low < high:
        middle = (low + high) // 2
        better = _within(elapsed, cuts, pinned, stages, fits, middle)
        if better is None:
            low = middle + 1
        else:
            found, high = better, _slowest(elapsed, better)
    return found


def _within(
    elapsed: Sequence[int],
    cuts: Sequence[int],
    pinned: Sequence[int],
    stages: int,
    fits: Callable[[int, int, int], bool],
    most: int,
) -> tuple[int, ...] | None:
    """Stages of at most so much time, each as long as can be: any shorter one leaves more to those behind it."""
    ends, starts = [*cuts, len(elapsed) - 1], [0]
    if len(ends) < stages:
        return None
    for left in range(stages - 1, -1, -1):
        stop = next((pin for pin in pinned if pin > starts[-1]), ends[-1])
        last = min(len(ends) - left, bisect_right(ends, stop))  # a cut for each stage that is left
        first = bisect_right(ends, starts[-1])
        far = bisect_left(ends, True, first, max(first, last), key=lambda end: not fits(starts[-1], end, most))
        if far == first or (left == 0 and ends[far - 1] != ends[-1]):
            return None
        starts.append(ends[far - 1])
    return tuple(starts[:-1])


def thinned(points: Sequence[Served], n: int) -> list[Served]:
    """At most `n` of the points, evenly from the first to the last."""
    if len(points) <= n:
        return list(points)
    return [points[k * (len(points) - 1) // max(1, n - 1)] for k in range(n)]


def plan_of(space: Space, point: Served, *, complete: bool, fingerprint: str) -> Plan:
    """A point as a plan. Its step is the latency of a batch."""
    setting, request = point.setting, space.request
    elapsed, placed = _elapsed(space, setting), space.placed(setting)
    numbers = placed.numbers(space.table(setting))
    modes = tuple(placed.modes[kind] for kind in placed.kinds.of)
    model = MemoryModel(
        tuple(numbers[kind] for kind in placed.kinds.of), modes, setting.mesh.degree("dp"), request.optimizer_ratio
    )
    runs = list(pairwise([*point.starts, len(request.costs)]))
    seconds = tuple((elapsed[j] - elapsed[i]) / FEMTOSECONDS for i, j in runs)
    busy = setting.microbatches * sum(seconds) / len(seconds)
    latency = point.latency / FEMTOSECONDS
    whole = "" if complete else " that there was time for"
    return Plan(
        mesh=setting.mesh,
        stages=tuple(Stage(request.names[i:j], setting.mesh.column(column)) for column, (i, j) in enumerate(runs)),
        placements=setting.placements,
        schedule=setting.text,
        microbatches=setting.microbatches,
        recompute=request.recompute,
        batch=request.batch,
        prediction=Prediction(
            step_seconds=latency,
            bubble=max(0.0, 1 - busy / latency) if latency else 0.0,
            stage_seconds=seconds,
            memory=tuple(model.stage(i, j) for i, j in runs),
            samples_per_second=request.batch * FEMTOSECONDS / point.period if point.period else 0.0,
        ),
        optimality="on the front: no plan is better in latency or throughput and as good in the other, of"
        f" {len(space.settings)} settings of mesh, placement and microbatches and all their splits{whole}",
        notes=("forwards alone: the step is the latency of a batch, and nothing is held for training",),
        fingerprint=fingerprint,
        tensor=request.at(setting.variant).tensor,
    )
