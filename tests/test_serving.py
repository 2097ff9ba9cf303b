"""Fronts of latency and throughput: equal to brute force over everything that may be chosen, compiled, and refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart.cluster import Cluster
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost, SegmentNumbers
from autopart.solver.serving import fastest, serve
from tests.oracle import every_split, stage_bytes
from tests.test_choose import MIB, B, gpt, layer

Point = tuple[float, float]
"""Latency of a batch, and time between batches."""


@st.composite
def models(draw: st.DrawFn) -> tuple[list[SegmentCost], Cluster, int]:
    """Segments of forwards alone, which have a part that does not depend on the samples, a cluster and a batch."""
    size = st.integers(0, 9)
    costs = [
        layer(
            f"s{i}",
            parameters=draw(st.integers(1, 30)) * 10,
            saved=0,
            work=draw(size) * 100,
            backward_flops=0,
            backward_bytes=0,
            forward_bytes=100 * draw(size) * B + draw(size) * 100,
            boundary_bytes=draw(size) * B,
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    link = draw(st.sampled_from([3e1, 1e3, 1e9]))
    return (
        costs,
        Cluster.uniform(4, 10**9, 1e4, 1e3, link, draw(st.sampled_from([0.0, 1e-2, 1.0]))),
        draw(st.integers(4, 7)),
    )


def through(stations: Sequence[float], lag: float, count: int) -> list[float]:
    """When each of `count` microbatches has passed stages and the links between them, each one at a time."""
    free, done = [0.0] * len(stations), []
    for _ in range(count):
        now = 0.0
        for at, takes in enumerate(stations):
            free[at] = max(free[at], now) + takes
            now = free[at] + lag * (at % 2)  # a link's latency keeps nothing busy
        done.append(now)
    return done


def every_point(
    costs: Sequence[SegmentCost], cluster: Cluster, batch: int, devices: int, limit: int
) -> Iterator[Point]:
    """All meshes, microbatches, placements and splits."""
    for pp in (pp for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(costs)):
        dp = devices // pp
        for count in {1, 2, 4, batch // dp} & set(range(1, batch // dp + 1)):
            numbers = [replace(cost, trainable_bytes=0).at(-(-batch // (dp * count))) for cost in costs]
            for preset in ("ddp", "fsdp") if dp > 1 else ("ddp",):
                for starts in every_split(len(costs), pp):
                    stages = [numbers[i:j] for i, j in zip(starts, [*starts[1:], len(costs)], strict=True)]
                    if max(stage_bytes(stage, preset, dp, 2, 0) for stage in stages) <= limit:
                        yield point(stages, preset, dp, cluster, count)


def point(stages: Sequence[Sequence[SegmentNumbers]], preset: str, dp: int, cluster: Cluster, count: int) -> Point:
    times = [sum(seconds(segment, preset, dp, cluster) for segment in stage) for stage in stages]
    message = max((stage[0].boundary_bytes for stage in stages[1:]), default=0) / cluster.link_bandwidth
    stations = [times[0], *(each for later in times[1:] for each in (message, later))]
    done = through(stations, cluster.link_latency, 3 * count)
    return done[count - 1], done[-1] - done[2 * count - 1]


def seconds(segment: SegmentNumbers, preset: str, dp: int, cluster: Cluster) -> float:
    computing = max(segment.forward_flops / cluster.flops, segment.forward_bytes / cluster.bandwidth)
    gathered = cluster.link_latency + (dp - 1) * segment.parameter_bytes // dp / cluster.link_bandwidth
    return computing + gathered * (preset == "fsdp")


def kept(points: Sequence[Point]) -> list[Point]:
    """Those of which none is better in one and as good in the other, to a tolerance."""
    found: list[Point] = []
    for latency, period in sorted(points):
        if not found or period < found[-1][1] * (1 - 1e-9) - 1e-12:
            if found and latency <= found[-1][0] * (1 + 1e-9) + 1e-12:
                found.pop()
            found.append((latency, period))
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models(), st.sampled_from([1, 2, 4]), st.integers(20, 130))
def test_the_front_equals_brute_force(
    model: tuple[list[SegmentCost], Cluster, int], devices: int, percent: int
) -> None:
    costs, cluster, batch = model
    limit = 1 + percent * sum(cost.parameter_bytes for cost in costs) // 100
    expected = kept(list(every_point(costs, cluster, batch, devices, limit)))
    try:
        plans = serve(costs, n=10**6, batch=batch, devices=devices, cluster=cluster, memory=limit)
    except PlanInfeasible:
        assert not expected
        return
    found = kept(
        [(p.prediction.step_seconds, batch / rate if (rate := p.prediction.samples_per_second) else 0.0) for p in plans]
    )
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-8, abs=1e-11)
    assert all(p.prediction.peak <= limit and "on the front" in p.optimality for p in plans)
    assert all(memory.optimizer == memory.gradients == 0 for p in plans for memory in p.prediction.memory)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(1, 5),
    st.sets(st.integers(1, 6), max_size=6),
    st.sets(st.integers(1, 6), max_size=2),
    st.integers(5, 40),
)
def test_the_fastest_slowest_stage_is_that_of_brute_force(
    segments: list[tuple[int, int]], stages: int, cuts: set[int], pins: set[int], limit: int
) -> None:
    """Stages begin at some of the cuts and at all the pinned ones, and hold no more than a limit."""
    count = len(segments)
    elapsed = list(accumulate((time for time, _ in segments), initial=0))
    held = list(accumulate((size for _, size in segments), initial=0))
    pins = {pin for pin in pins if pin < count}
    allowed = sorted({cut for cut in cuts if cut < count} | pins)

    def fits(start: int, stop: int, most: int) -> bool:
        return elapsed[stop] - elapsed[start] <= most and held[stop] - held[start] <= limit

    ways = [
        max(elapsed[j] - elapsed[i] for i, j in zip((0, *some), (*some, count), strict=True))
        for some in combinations(allowed, stages - 1)
        if pins <= set(some)
        and all(held[j] - held[i] <= limit for i, j in zip((0, *some), (*some, count), strict=True))
    ]
    found = fastest(elapsed, allowed, sorted(pins), stages, fits)
    assert (found is None) == (not ways)
    if found is not None:
        stops = [*found[1:], count]
        assert len(found) == stages and pins <= set(found) and set(found[1:]) <= set(allowed)
        assert all(held[j] - held[i] <= limit for i, j in zip(found, stops, strict=True))
        assert max(elapsed[j] - elapsed[i] for i, j in zip(found, stops, strict=True)) == min(ways)


CLUSTER = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6)


def slow_weights() -> list[SegmentCost]:
    """Layers whose weights take as long to read as sixteen samples take to multiply."""
    return [layer(f"h.{i}", saved=0, backward_flops=0, backward_bytes=0, forward_bytes=16 * 10**6) for i in range(8)]


def test_a_front_goes_from_data_ranks_to_a_pipeline() -> None:
    plans = serve(slow_weights(), n=20, batch=16, devices=4, cluster=CLUSTER)
    points = [(p.prediction.step_seconds, p.prediction.samples_per_second) for p in plans]
    assert len(points) > 1 and points == sorted(points)
    assert (plans[0].mesh.degree("pp"), plans[-1].mesh.degree("pp")) == (1, 4), (
        "a rank of a pipeline reads fewer weights"
    )
    few = serve(slow_weights(), n=2, batch=16, devices=4, cluster=CLUSTER)
    assert [p.mesh for p in few] == [plans[0].mesh, plans[-1].mesh] and few[0] == plans[0] and few[1] == plans[-1]
    assert serve(slow_weights(), n=1, batch=16, devices=4, cluster=CLUSTER) == plans[:1]
    late = serve(slow_weights(), n=20, batch=16, devices=4, cluster=CLUSTER, time_limit=1e-9)
    assert late and all("that there was time for" in plan.optimality for plan in late)


def test_pins_of_a_front_and_what_is_refused() -> None:
    pins: dict[str, Any] = {"n": 5, "batch": 16, "devices": 4, "cluster": CLUSTER}
    staged = serve(slow_weights(), stages=["h.1", "h.2", "h.3"], microbatches=2, **pins)
    assert [[len(stage.segments) for stage in plan.stages] for plan in staged] == [[1, 1, 1, 5]]
    for changed, message in (
        ({"recompute": True}, "recompute: a program that runs forwards alone has nothing of that"),
        ({"offload": True}, "offload: a program that runs forwards alone"),
        ({"schedule": "interleaved(chunks=2)"}, r"schedule: interleaved\(chunks=2\) is for training"),
        ({"time_limit": 0}, "time_limit: must be more than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            serve(slow_weights(), **{**pins, **changed})
    with pytest.raises(PlanInfeasible) as refusal:
        serve(gpt(), mesh={"dp": 4}, placement="ddp", memory="90MiB", **pins)
    assert refusal.value.core == ("mesh={'dp': 4}", "90.0 MiB per device")
    assert not any(way.startswith("schedule") for way in refusal.value.ways)
    assert " optimizer" not in str(refusal.value) and any(way.startswith("mesh=") for way in refusal.value.ways)


def test_public_fronts_of_forwards_are_compiled() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), torch.randn(8, 32)
    pins: dict[str, Any] = {"cluster": Cluster.preset("t4", per_node=4), "capture": "direct"}
    wanted = ("latency", "throughput")
    with pytest.raises(ValueError, match=r"objectives: .* this call is a training step; call model.eval\(\)"):
        autopart.pareto(model, (x,), loss_fn=torch.sum, objectives=wanted, **pins)
    plans = autopart.pareto(model.eval(), (x,), objectives=wanted, **pins)
    points = [(p.prediction.step_seconds, p.prediction.samples_per_second) for p in plans]
    assert len(points) > 1 and points == sorted(points)
    for plan in (plans[0], plans[-1]):
        program = autopart.compile(model, plan, (x,), capture="direct")
        assert len(program.ranks) == 4 and "samples/s with the pipeline full" in plan.summary()
        assert plan.prediction.memory[0].optimizer == plan.prediction.memory[0].gradients == 0
    assert autopart.Plan.from_json(plans[-1].to_json()) == plans[-1]
    assert "samples per second" in plans[0].diff(plans[-1])
    with pytest.raises(ValueError, match=r"objectives: .* cannot be weighed; either"):
        autopart.pareto(model, (x,), objectives=("latency", "memory"), **pins)
