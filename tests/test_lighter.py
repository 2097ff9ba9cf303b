"""Lighter placements for some layers: against brute force, never worse, and plans of several placements that train."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart.cluster import Cluster
from autopart.errors import PlanInfeasible
from autopart.ir.placement import PRESETS, Placement
from autopart.ir.plan import Plan
from autopart.solver import choose
from autopart.testing import assert_parity
from tests.test_joint import PERCENT, Model, limit_of, models
from tests.test_unlike import Layers

MODES = {name: Placement.preset(name) for name in PRESETS}


def planned(model: Model, limit: int, **pins: Any) -> Plan | None:
    plain, again, cluster, batch = model
    try:
        return choose(plain, batch=batch, recomputed=again, cluster=cluster, memory=limit, schedule="1f1b", **pins)
    except PlanInfeasible:
        return None


@settings(max_examples=4, deadline=None, derandomize=True)
@given(models(), st.sampled_from([{"dp": 2}, {"dp": 4}, {"pp": 2, "dp": 2}]), PERCENT, st.sampled_from([1, 2]))
def test_equals_brute_force_for_its_split(model: Model, mesh: dict[str, int], percent: int, count: int) -> None:
    """Of all ways to place the layers, the stages being what they are; a pinned placement for all is no better."""
    plain, again, cluster, batch = model
    model, limit = (plain, again, cluster, max(batch, 4 * count)), limit_of(model, percent)
    if mesh.get("pp", 1) > len(plain):
        return
    pins: dict[str, Any] = {"mesh": mesh, "microbatches": count, "recompute": False}
    plan = planned(model, limit, placement="per-layer", **pins)
    if plan is None:
        return
    steps = []
    stages = [stage.segments[0] for stage in plan.stages[1:]]
    for way in product(PRESETS, repeat=len(plain)):
        placement = {**dict(zip((cost.name for cost in plain), way, strict=True)), "*": "ddp"}
        found = planned(model, limit, placement=placement, **{**pins, "stages": stages or None})
        if found is not None:
            steps.append(found.prediction.step_seconds)
    assert plan.prediction.step_seconds == pytest.approx(min(steps), rel=1e-9, abs=1e-12)
    for name in PRESETS:
        whole = planned(model, limit, placement=name, **pins)
        assert whole is None or plan.prediction.step_seconds <= whole.prediction.step_seconds * (1 + 1e-9)


SLOW = Cluster.uniform(2, 2**30, 1e9, 1e12, 1e6, 0.0)
"""Bytes between devices take long, so as little as can be is sent again and again."""


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    layers = Layers(*(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh()) for _ in range(6)))
    return layers.double(), (torch.randn(8, 1024).double(),)


def test_as_many_layers_as_fit_are_lighter_and_the_plan_trains() -> None:
    layers, args = model()
    pins: dict[str, Any] = {
        "mesh": {"dp": 2},
        "cluster": SLOW,
        "microbatches": 4,
        "recompute": False,
        "capture": "direct",
    }
    heavy, light = (autopart.plan(layers, args, placement=name, **pins) for name in ("fsdp", "zero1"))
    assert light.prediction.step_seconds < heavy.prediction.step_seconds
    assert light.prediction.peak > heavy.prediction.peak
    limit = (heavy.prediction.peak + light.prediction.peak) // 2
    plan = autopart.plan(layers, args, memory=limit, placement="per-layer", **pins)
    used = {placement for _, placement in plan.placements}
    assert len(used) > 1 and MODES["fsdp"] in used
    assert light.prediction.step_seconds < plan.prediction.step_seconds < heavy.prediction.step_seconds
    assert plan.prediction.peak <= limit
    assert "lighter than the others'" in plan.explain() and Plan.from_json(plan.to_json()) == plan
    assert_parity(layers, args, plan=plan, steps=1)


def test_parallelize_takes_it_too() -> None:
    x = torch.randn(8, 4)
    mine = autopart.parallelize(Layers(nn.Linear(4, 4), nn.Linear(4, 4)), mesh={"dp": 2}, placement="per-layer")
    mine(x).backward()
    assert mine.plan.placements == (("*", MODES["ddp"]),)


def test_what_is_pinned_stays() -> None:
    layers, args = model()
    pins: dict[str, Any] = {
        "mesh": {"dp": 2},
        "cluster": SLOW,
        "microbatches": 4,
        "recompute": False,
        "capture": "direct",
    }
    free = autopart.plan(layers, args, placement="fsdp", **pins)
    assert free.placements == (("*", MODES["fsdp"]),)
    limit = free.prediction.peak + 2**23
    plan = autopart.plan(layers, args, placement={"2": "fsdp", "3": "zero2", "*": "per-layer"}, memory=limit, **pins)
    assert plan.placements[:2] == (("2", MODES["fsdp"]), ("3", MODES["zero2"]))
