"""Offload in plans: against brute force, against the closed forms, and refused where it would have to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart.api.compiler import sampled, solve
from autopart.capture import NO_TARGET
from autopart.cluster import Cluster
from autopart.errors import PlanInfeasible
from autopart.ir.calculus import HOST
from autopart.ir.cost import SegmentNumbers
from autopart.ir.placement import PRESETS, Mode, Modes, Placement, offloading
from autopart.ir.plan import Plan
from autopart.passes.segment import segment
from autopart.solver import choose
from autopart.solver.memory import MemoryModel, exchanges, hosted
from tests.oracle import every_split, stage_bytes, step_seconds
from tests.test_choose import MIB, gpt, small_models
from tests.test_joint import numbers_of

CLUSTER = Cluster.uniform(4, 10**9, 1e7, 1e6, 1e4, 1e-6, host=1e5)

AWAY: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in PRESETS},
    "optimizer": ("zero1", ("optimizer",)),
    "optimizer, gradients in parts": ("zero2", ("optimizer",)),
    "optimizer and gradients": ("zero2", ("optimizer", "gradients")),
    "all in parts, optimizer": ("fsdp", ("optimizer",)),
    "all in parts, optimizer and gradients": ("fsdp", ("optimizer", "gradients")),
}
"""What may be on the host: the preset that parts states as they are parted then, and which of them are away."""


def held(segments: Sequence[SegmentNumbers], how: str, dp: int, flight: int) -> tuple[int, int]:
    """Bytes of a stage on its device, and on its host."""
    preset, away = AWAY[how]
    sizes = {"optimizer": 2, "gradients": 1}
    host = sum(ceil(sizes[state] * segment.trainable_bytes / dp) for segment in segments for state in away)
    staged = sorted(segment.trainable_bytes for segment in segments)[-2:] if "gradients" in away and dp == 1 else []
    return stage_bytes(segments, preset, dp, 2, flight) - host + sum(staged), host


def step(segments: Sequence[SegmentNumbers], starts: Sequence[int], how: str, dp: int, count: int) -> float:
    """The step of a split: as without the host, and what the rank that is longest at it exchanges with its host."""
    preset, away = AWAY[how]
    setting: dict[str, Any] = {"schedule": "1f1b", "microbatches": count, "dp": dp, "cluster": CLUSTER}
    ends = [*starts[1:], len(segments)]
    alone = step_seconds(segments, starts, preset=preset, **{**setting, "dp": 1})
    longest = 0.0
    for i, j in zip(starts, ends, strict=True):
        stage = segments[i:j]
        times = count + 1 if "gradients" in away else 2
        moved = times * sum(ceil(s.trainable_bytes / dp) for s in stage) if away else 0
        both = step_seconds(stage, [0], preset=preset, **setting) - step_seconds(
            stage, [0], preset=preset, **{**setting, "dp": 1}
        )
        longest = max(longest, both + moved / CLUSTER.host)
    return alone + longest


@settings(max_examples=25, deadline=None, derandomize=True)
@given(small_models(), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(10, 110), st.booleans())
def test_equals_brute_force(costs: list[Any], devices: int, batch: int, percent: int, offload: bool) -> None:
    costs, batch = costs[:4], max(batch, devices)
    limit = 1 + percent * sum(4 * c.parameter_bytes + c.at(batch).saved_bytes for c in costs) // 100
    steps = []
    for pp in (pp for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(costs)):
        dp = devices // pp
        for count, how in product(numbers_of(batch // dp), AWAY if offload else PRESETS):
            numbers = [cost.at(-(-batch // (dp * count))) for cost in costs]
            for starts in every_split(len(costs), pp):
                runs = list(zip(starts, (*starts[1:], len(costs)), strict=True))
                bytes_ = [held(numbers[i:j], how, dp, min(count, pp - k))[0] for k, (i, j) in enumerate(runs)]
                if max(bytes_) <= limit:
                    steps.append(step(numbers, starts, how, dp, count))
    pins: dict[str, Any] = {"batch": batch, "devices": devices, "cluster": CLUSTER, "memory": limit}
    try:
        plan = choose(costs, offload=offload, **pins)
    except PlanInfeasible as refusal:
        assert not steps
        found = any(way.startswith("offload=True") for way in refusal.ways)
        assert not (found and offload)
        if not offload and found:
            assert choose(costs, offload=True, **pins)
        return
    assert plan.prediction.step_seconds == pytest.approx(min(steps), rel=1e-9, abs=1e-12)
    assert plan.prediction.peak <= limit
    assert any(memory.host for memory in plan.prediction.memory) == any(p.on("dp").on_host for _, p in plan.placements)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(small_models(), st.sampled_from([1, 2, 4]), st.integers(20, 90))
def test_the_host_and_a_faster_link_to_it_are_never_worse(costs: list[Any], devices: int, percent: int) -> None:
    limit = 1 + percent * sum(4 * c.parameter_bytes + c.at(4).saved_bytes for c in costs) // 100

    def step(host: float, *, offload: bool) -> float:
        cluster = Cluster.uniform(4, 10**9, 1e7, 1e6, 1e4, 1e-6, host=host)
        try:
            plan = choose(costs, batch=4, devices=devices, cluster=cluster, memory=limit, offload=offload)
        except PlanInfeasible:
            return float("inf")
        return plan.prediction.step_seconds

    slow, fast = step(1e5, offload=True), step(3e5, offload=True)
    assert fast <= slow * (1 + 1e-9) and slow <= step(1e5, offload=False) * (1 + 1e-9)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_held_and_sent_is_that_of_the_closed_form(name: str, degree: int) -> None:
    """One segment of 6 parameters of two bytes, moments of two bytes, four microbatches."""
    segment = gpt(1)[1].at(1)
    segment = replace(segment, parameter_bytes=12, trainable_bytes=12, saved_bytes=0)
    for placement in (Placement.preset(name), *offloading(Placement.preset(name))):
        modes = placement.on("dp")
        closed = placement.costs(parameters=6, devices=degree, precision="bf16", microbatches=4, largest_unit=6)
        moved = list(hosted(segment, modes, degree, 4))
        assert sum(size * times for _, size, times in moved) == closed.by_axis.get(HOST, 0)
        model = MemoryModel((segment,), (modes,), degree, 2.0)
        made = model.stage(0, 1)
        assert (made.host, made.total - made.transient) == (closed.host, closed.resident)
        if "gradients" in modes.on_host and (degree > 1 or not modes.gathered):  # one rank gathers nothing
            assert made.transient == closed.peak - closed.resident
        over_dp = [call for call, _, times in exchanges(segment, modes, 4) for _ in range(times)] if degree > 1 else []
        known = {e.collective: e.times for e in closed.exchanges if e.axis == "dp" and e.nbytes}
        assert {call: over_dp.count(call) for call in over_dp} == known


def test_pins_with_and_without_the_host() -> None:
    cluster = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6, host=1e9)
    pins: dict[str, Any] = {"batch": 16, "mesh": {"pp": 2}, "cluster": cluster, "memory": "200MiB"}
    with pytest.raises(PlanInfeasible, match=r"fits with: .*offload=True \(to plan with; programs do not do it yet\)"):
        choose(gpt(), **pins)
    with pytest.raises(PlanInfeasible, match=r"fits with: .*offload=True"):
        choose(gpt(), placement="ddp", **pins)
    plan = choose(gpt(), offload=True, **pins)
    assert str(plan.placements[-1][1]) == "zero1 with optimizer on the host"
    assert plan.prediction.memory[0].host == 2 * plan.prediction.memory[0].parameters
    assert "on the host optimizer: up to 184.0 MiB for each rank; programs do not do that yet" in plan.summary()
    assert "each device has up to 184.0 MiB on its host, where the optimizer steps" in plan.explain()
    assert choose(gpt(), placement="ddp", offload=True, **pins) == plan
    some = choose(gpt(), placement={"head": "offload", "embed": "offload", "*": "ddp"}, **{**pins, "memory": "500MiB"})
    trained = [40 * MIB, 44 * MIB]
    assert [memory.host for memory in some.prediction.memory] == [3 * trained[1], 3 * trained[0]]
    roomy = choose(gpt(), offload=True, **{**pins, "memory": "900MiB"})
    assert str(roomy.placements[-1][1]) == "ddp", "it takes time, so not where memory does not ask for it"
    for changed, message in (
        ({"offload": 1}, "offload: expected True or False"),
        ({"offload": True, "cluster": None}, "offload: the hosts of the cpu cluster have no memory apart"),
        ({"placement": "offload", "cluster": None}, "placement: the hosts of the cpu cluster have no memory apart"),
        ({"placement": Placement((("dp", Modes(activations=Mode.OFFLOADED)),))}, "is not planned yet"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            choose(gpt(), **{**pins, **changed})


def stack() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), torch.randn(8, 32)


def every_way() -> dict[Placement, None]:
    return dict.fromkeys(each for name in ("zero1", "zero2", "fsdp") for each in offloading(Placement.preset(name)))


def test_public_plans_are_counted_on_the_graph_and_refused_where_they_would_run(tmp_path: Path) -> None:
    model, x = stack()
    cluster = Cluster.preset("t4", per_node=2)
    pins: dict[str, Any] = {"loss_fn": torch.sum, "capture": "direct", "cluster": cluster}
    weights = 4 * 4 * (32 * 32 + 32)
    segmented = segment(sampled(model, (x,), None, torch.sum, NO_TARGET, None, "exact", "direct"))
    for mesh, placement in (*(({"dp": 2}, each) for each in every_way()), ({"pp": 2}, Placement.offload())):
        plan = solve(segmented, mesh=mesh, microbatches=2, placement=placement, cluster=cluster)
        away = placement.on("dp").on_host
        for rank, memory in enumerate(plan.prediction.memory):
            assert memory.host == weights // 2 * (3 if "gradients" in away else 2)
            sent = plan.prediction.sent_by(rank)
            assert (sent["to_host"], sent["from_host"]) == (
                weights // 2 * (2 if "gradients" in away else 1),
                weights // 2,
            )
            assert memory.optimizer == 0 and bool(memory.gradients) == ("gradients" not in away)
    tight = autopart.plan(model, (x,), mesh={"pp": 2}, memory="30KB", offload=True, **pins)
    assert "on the host" in str(tight.placements[-1][1]) and "programs do not do that yet" in tight.summary()
    tight.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == tight
    message = "placement: .* keeps .*optimizer.* on the host, which programs do not do yet: autopart.plan says"
    with pytest.raises(ValueError, match=message):
        autopart.compile(model, tight, (x,), loss_fn=torch.sum, capture="direct")
    for changed in ({"plan": tight}, {"placement": "offload"}, {"placement": {"0": Placement.offload()}}):
        with pytest.raises(ValueError, match=message.replace(".*optimizer.*", ".*")):
            autopart.parallelize(model, **changed)
    with pytest.raises(ValueError, match=r"offload: programs do not keep states on the host yet; autopart.plan"):
        autopart.parallelize(model, offload=True)
