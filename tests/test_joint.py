"""The joint search against brute force over everything it may choose, and against itself: pins, memory, links."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
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
from autopart.ir.placement import PRESETS
from autopart.ir.plan import Plan
from autopart.ir.tensor_plan import TensorPlan
from autopart.solver import choose
from autopart.solver.cut import Search
from autopart.solver.flush import Flush
from autopart.solver.pareto import front
from autopart.solver.request import Request
from autopart.solver.resolve import resolve
from autopart.solver.space import Space
from autopart.solver.stages import Way
from tests.oracle import every_split, stage_bytes, step_seconds
from tests.test_choose import MIB, B, frugal, gpt, layer
from tests.test_schedule import uneven

QUICK = settings(max_examples=25, deadline=None, derandomize=True)

Model = tuple[list[SegmentCost], list[SegmentCost], Cluster, int]

PERCENT = st.integers(25, 120)
"""Of what one device would need of memory for all of the model and the batch."""


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Segments, what they cost recomputed, a cluster and a batch."""
    count = draw(st.integers(1, 4))
    size, plain, again = st.integers(0, 9), [], []
    for i in range(count):
        fixed = draw(st.integers(0, 3)) * 10
        cost = layer(
            f"s{i}",
            parameters=draw(st.integers(1, 30)) * 10,
            saved=draw(size) * 4,
            work=draw(size) * 100,
            forward_bytes=100 * draw(size) * B + fixed,
            boundary_bytes=draw(size) * B,
        )
        plain.append(cost)
        kept = draw(st.sampled_from([0, 1, 2])) * B
        more = {"saved_bytes": kept, "recomputed_bytes": draw(size) * B}
        again.append(replace(cost, backward_flops=cost.backward_flops + cost.forward_flops, **more))
    link = draw(st.sampled_from([1e2, 1e4, 1e9]))
    cluster = Cluster.uniform(4, 10**9, 1e4, 1e3, link, draw(st.sampled_from([0.0, 1e-3, 1.0])))
    return plain, again, cluster, draw(st.integers(1, 6))


def limit_of(model: Model, percent: int) -> int:
    plain, _, _, batch = model
    return 1 + percent * sum(4 * cost.parameter_bytes + cost.at(batch).saved_bytes for cost in plain) // 100


def numbers_of(batch: int) -> list[int]:
    """The numbers of microbatches of a data rank's batch that are tried, by the stated rule, for up to 4 stages."""
    return sorted({1, 2, 4, batch} & set(range(1, batch + 1)))


Point = tuple[float, int]
"""The step and the bytes of the fullest rank of a plan."""


def every_plan(model: Model, devices: int) -> Iterator[Point]:
    """All meshes, microbatches, placements, splits and sets of recomputed segments."""
    plain, again, cluster, batch = model
    for pp in range(1, min(devices, len(plain)) + 1):
        dp, rest = divmod(devices, pp)
        if rest or dp > batch:
            continue
        for count in numbers_of(batch // dp):
            size = -(-batch // (dp * count))
            pairs = [(p.at(size), a.at(size)) for p, a in zip(plain, again, strict=True)]
            places = [i for i, (p, a) in enumerate(pairs) if a.saved_bytes < p.saved_bytes]
            chosen = [
                [pair[i in subset] for i, pair in enumerate(pairs)]
                for subset in chain.from_iterable(combinations(places, n) for n in range(len(places) + 1))
            ]
            for preset in PRESETS if dp > 1 else PRESETS[:1]:
                setting = {"schedule": "1f1b", "microbatches": count, "preset": preset, "dp": dp, "cluster": cluster}
                for starts in every_split(len(plain), pp):
                    for segments in chosen:
                        yield step_seconds(segments, starts, **setting), peak(segments, starts, preset, dp, count)


def peak(segments: list[SegmentNumbers], starts: tuple[int, ...], preset: str, dp: int, count: int) -> int:
    stages = [segments[i:j] for i, j in zip(starts, [*starts[1:], len(segments)], strict=True)]
    return max(stage_bytes(stage, preset, dp, 2, min(count, len(stages) - k)) for k, stage in enumerate(stages))


def chosen(model: Model, devices: int, limit: int, **pins: Any) -> Plan | None:
    plain, again, cluster, batch = model
    pins = {"cluster": cluster, "recomputed": again, **pins}
    try:
        return choose(plain, batch=batch, devices=devices, memory=limit, **pins)
    except PlanInfeasible:
        return None


def asked(costs: list[SegmentCost], **pins: Any) -> Request:
    """The request of these pins, and of no others."""
    names = ("stages", "placement", "schedule", "microbatches", "memory", "recompute", "recomputed")
    return resolve(costs, **{**dict.fromkeys(names), "optimizer_ratio": 2.0, "forwards_first": False, **pins})


@QUICK
@given(models(), st.sampled_from([1, 2, 3, 4]), PERCENT)
def test_equals_brute_force(model: Model, devices: int, percent: int) -> None:
    limit = limit_of(model, percent)
    if model[3] < devices and devices > len(model[0]):
        devices = 1
    fitting = [step for step, held in every_plan(model, devices) if held <= limit]
    plan = chosen(model, devices, limit)
    assert (plan is None) == (not fitting)
    if plan is not None:
        expected = min(fitting)
        assert plan.prediction.step_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert plan.optimality.startswith("optimal: ")
        assert all(memory.total <= limit for memory in plan.prediction.memory)


@QUICK
@given(models(), st.sampled_from([1, 2, 4]), PERCENT, st.integers(1, 1000))
def test_pins_more_memory_and_faster_links(model: Model, devices: int, percent: int, more: int) -> None:
    """A pin never helps; more memory or faster links never hurt."""
    limit = limit_of(model, percent)
    plain, again, cluster, batch = model
    model = plain, again, cluster, max(batch, devices)

    def step(limit: int = limit, **pins: Any) -> float:
        plan = chosen(model, devices, limit, **pins)
        return float("inf") if plan is None else plan.prediction.step_seconds

    free = step() * (1 + 1e-9)
    for pp in (pp for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(plain)):
        assert step(mesh={"pp": pp, "dp": devices // pp}) * (1 + 2e-9) >= free
    assert step(placement="zero1") * (1 + 2e-9) >= free and step(recompute=False) * (1 + 2e-9) >= free
    assert step(limit + more) <= free
    link = cluster.groups[0].inside
    faster = Cluster.uniform(4, 10**9, 1e4, 1e3, 3 * link.bandwidth, link.latency / 2)
    assert step(cluster=faster) <= free


@settings(max_examples=15, deadline=None, derandomize=True)
@given(models(), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_a_front_has_no_plan_that_another_dominates(model: Model, devices: int, n: int) -> None:
    plain, again, cluster, batch = model
    batch = max(batch, devices)
    pins: dict[str, Any] = {"recomputed": again, "batch": batch, "devices": devices, "cluster": cluster}

    def best(objective: str, limit: int | None) -> Plan:
        return choose(plain, objective=objective, memory=limit, **pins)

    plans = front(best, n)
    points = list(every_plan((plain, again, cluster, batch), devices))
    found = [(plan.prediction.step_seconds, max(m.total for m in plan.prediction.memory)) for plan in plans]
    for step, held in found:
        assert not [(s, h) for s, h in points if s < step * (1 - 1e-9) and h <= held]
        assert not [(s, h) for s, h in points if s <= step * (1 + 1e-9) and h < held]
    assert found == sorted(set(found)) and 1 <= len(plans) <= n
    assert found[0][0] == pytest.approx(min(step for step, _ in points), rel=1e-9, abs=1e-12)
    if n > 1:
        assert found[-1][1] == min(held for _, held in points), "the last one is the leanest"
    leanest = best("memory", None).prediction
    least = min(held for _, held in points)
    assert max(memory.total for memory in leanest.memory) == least
    fastest = min(step for step, held in points if held == least)
    assert leanest.step_seconds == pytest.approx(fastest, rel=1e-9, abs=1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(models(), st.sampled_from([1, 2]))
def test_a_long_front_is_that_of_brute_force(model: Model, devices: int) -> None:
    plain, again, cluster, batch = model
    pins: dict[str, Any] = {"recomputed": again, "batch": max(batch, devices), "devices": devices, "cluster": cluster}
    plans = front(lambda objective, limit: choose(plain, objective=objective, memory=limit, **pins), 30)
    expected: list[Point] = []
    for step, held in sorted(every_plan((plain, again, cluster, pins["batch"]), devices)):
        if not expected or held < expected[-1][1]:
            if expected and step <= expected[-1][0] * (1 + 1e-9):
                expected.pop()
            expected.append((step, held))
    assert len(expected) < 30 and [plan.prediction.peak for plan in plans] == [held for _, held in expected]
    for plan, (step, _) in zip(plans, expected, strict=True):
        assert plan.prediction.step_seconds == pytest.approx(step, rel=1e-9, abs=1e-12)


def test_a_public_front_and_what_it_refuses() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), torch.randn(8, 32)
    pins: dict[str, Any] = {"loss_fn": torch.sum, "devices": 2, "capture": "direct"}
    plans = autopart.pareto(model, (x,), n=4, **pins)
    found = [(plan.prediction.step_seconds, max(m.total for m in plan.prediction.memory)) for plan in plans]
    assert (
        len(plans) > 1
        and found == sorted(found)
        and [held for _, held in found] == sorted((held for _, held in found), reverse=True)
    )
    assert plans[0].prediction.step_seconds == autopart.plan(model, (x,), **pins).prediction.step_seconds
    with pytest.raises(ValueError, match="n: must be at least 1"):
        autopart.pareto(model, (x,), n=0, **pins)
    with pytest.raises(ValueError, match="objectives: latency and throughput are those of forwards alone"):
        autopart.pareto(model, (x,), objectives=("latency", "throughput"), **pins)
    with pytest.raises(ValueError, match="objective: a front has two"):
        autopart.pareto(model, (x,), objective="time", **pins)
    with pytest.raises(ValueError, match=r"placement: no parameter or module is called '9\.\*'"):
        autopart.pareto(model, (x,), placement={"9.*": "zero3", "*": "ddp"}, **pins)


CLUSTER = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6)


def test_fewer_devices_where_they_cost_less() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 8, "cluster": CLUSTER, "objective": "throughput_per_cost"}
    cheap = choose(gpt(), **pins)
    costs = {}
    for devices in (1, 2, 4, 8):
        plan = choose(gpt(), **{**pins, "devices": devices, "objective": "time"})
        costs[devices] = devices * plan.prediction.step_seconds
    assert cheap.mesh.size * cheap.prediction.step_seconds == pytest.approx(min(costs.values()), rel=1e-9)
    tight = choose(gpt(), memory="220MiB", **pins)
    assert tight.mesh.size > cheap.mesh.size, "one device does not do then"


def test_tensor_degrees_are_searched_where_their_costs_are_given() -> None:
    fields = ("forward_flops", "backward_flops", "saved_bytes")
    halves = [replace(c, **{field: getattr(c, field) / 2 for field in fields}) for c in gpt()]
    dear = [replace(c, forward_flops=4 * c.forward_flops) for c in gpt()]
    inside = TensorPlan("tp", 2, (), (), (), (), (), CLUSTER, 1)
    pins: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER}
    with_tp = choose(gpt(), degrees={(("tp", 2),): lambda: [(inside, halves, halves)]}, **pins)
    assert with_tp.mesh.degree("tp") == 2 and with_tp.mesh.size == 4 and with_tp.tensor == inside
    assert with_tp.prediction.step_seconds < choose(gpt(), **pins).prediction.step_seconds
    without = choose(gpt(), degrees={(("tp", 2),): lambda: [(inside, dear, dear)]}, **pins)
    assert without.mesh.degree("tp") == 1 and without.tensor is None
    pinned = choose(halves, tensor=inside, mesh={"pp": 2, "tp": 2}, **pins)
    assert pinned.stages[0].ranks == (0, 1) and pinned.tensor == inside
    with pytest.raises(ValueError, match=r"mesh: tp=4 splits tensors inside segments"):
        choose(gpt(), degrees={(("tp", 2),): lambda: [(inside, dear, dear)]}, mesh={"tp": 4}, **pins)


def test_no_stage_begins_behind_the_last_module() -> None:
    """A loss that `loss_fn` computes is not there in evaluation; if each segment is a stage, it has to be one."""
    costs = [layer("a", work=10), layer("b", work=10), layer("output", parameters=0, work=10**6)]
    pins: dict[str, Any] = {"batch": 4, "cluster": CLUSTER}
    assert choose(costs, mesh={"pp": 2}, **pins).cuts == ("b",)
    assert choose([*costs[:2], layer("c", work=10**6)], mesh={"pp": 2}, **pins).cuts == ("c",)
    assert choose(costs, mesh={"pp": 3}, **pins).cuts == ("b", "output")
    dropouts = [layer(f"h.{i}", parameters=i % 2 * MIB) for i in range(8)]
    middle = choose(dropouts, mesh={"pp": 2}, **pins).cuts
    assert middle in (("h.3",), ("h.5",)), "h.4 has no parameters, and may not be there in evaluation"
    assert len(choose(dropouts, mesh={"pp": 6}, **pins).stages) == 6, "unless there is too little else"
    many = [*(layer(f"h.{i}") for i in range(70)), layer("output", parameters=0, work=10**7)]
    plan = choose(many, mesh={"pp": 6}, microbatches=4, **pins)
    assert len(plan.stages[-1].segments) > 1 and "at most" in plan.optimality


def test_many_layers_are_split_well_and_the_gap_is_proven() -> None:
    """Of 64 layers and unequal ends no split is tried out; the bound is true, as brute force says of fewer stages."""
    costs = gpt(62)
    pins: dict[str, Any] = {"batch": 32, "cluster": CLUSTER, "microbatches": 32}
    many = choose(costs, mesh={"pp": 8}, **pins)
    gap = re.match(r"at most ([\d.]+)% above the best possible: ", many.optimality)
    assert gap is not None and float(gap[1]) < 8
    two = choose(costs, mesh={"pp": 2}, memory="3GiB", **pins)
    numbers = [cost.at(1) for cost in costs]
    setting = {"schedule": "1f1b", "microbatches": 32, "preset": "ddp", "dp": 1, "cluster": CLUSTER}
    steps = [step_seconds(numbers, starts, **setting) for starts in every_split(64, 2)]
    assert two.prediction.step_seconds == pytest.approx(min(steps), rel=1e-9) and "optimal: " in two.optimality


def test_bounds_of_many_splits_are_below_all_of_them() -> None:
    """The bound that large problems rest on, of small ones."""
    for seed in range(12):
        costs, stages = uneven(seed, 7), 2 + seed % 3
        space = Space(
            asked(
                costs,
                batch=6,
                cluster=CLUSTER,
                devices=stages,
                mesh={"pp": stages},
                schedule=("1f1b", "gpipe", "zb-h1")[seed % 3],
                microbatches=6,
            )
        )
        (setting,) = space.settings
        search = Search(space.stages(setting, None), space.pipe(setting), float("inf"))
        found = space.best(setting)
        assert found is not None and found.cut is not None
        assert max(space.bound(setting), search.bound(search.slowest(), 0)) <= found.cut.step
        assert found.bound == found.cut.step, "all splits were looked at"
        even = search.step(search.even(search.slowest()), (Way((), 0),) * stages)
        assert even.slowest == search.slowest()


@QUICK
@given(models(), st.sampled_from([2, 3, 4]), PERCENT)
def test_bounds_hold_where_memory_asks_for_recomputation(model: Model, devices: int, percent: int) -> None:
    plain, again, cluster, batch = model
    request = asked(
        plain,
        batch=max(batch, devices),
        cluster=cluster,
        devices=devices,
        mesh=None,
        memory=limit_of(model, percent),
        recomputed=again,
    )
    space = Space(request)
    for setting in space.settings:
        found, stages = space.best(setting), space.stages(setting, request.memory)
        if found is None or found.cut is None:
            assert space.least(setting) > request.memory
            continue
        search = Search(stages, space.pipe(setting), float("inf"))
        slowest = search.slowest()
        assert slowest <= found.cut.slowest and space.peak(setting, found.cut) <= request.memory
        longest = found.cut.step / setting.microbatches
        assert search.bound(slowest, 0) <= search.bound(slowest, search.more(longest)) <= found.cut.step


def two_stages(plain: list[SegmentCost], again: list[SegmentCost], *, batch: int, memory: int) -> Space:
    """What is searched for a pipeline of two stages, whose microbatches are of one sample."""
    cluster = Cluster.uniform(4, 10**9, 1e4, 1e9, 1e9, 0.0)
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": batch, "memory": memory, "recomputed": again}
    return Space(asked(plain, batch=batch, cluster=cluster, devices=2, **pins))


def test_the_bound_holds_where_another_split_needs_less_recomputation() -> None:
    """Its slowest stage is slower than that of the most even split, as it recomputes more there."""
    segments = [(106, 300, 19), (9, 300, 5), (99, 300, 20)]  # work, bytes saved, and work more where recomputed
    plain = [
        layer(f"s{i}", parameters=1, saved=saved, backward_flops=100 * work * B, work=100 * work, boundary_bytes=0)
        for i, (work, saved, _) in enumerate(segments)
    ]
    again = [
        replace(cost, backward_flops=cost.backward_flops + 100 * more * B, saved_bytes=0)
        for cost, (_, _, more) in zip(plain, segments, strict=True)
    ]
    space = two_stages(plain, again, batch=2, memory=550)
    (setting,) = space.settings
    found = space.best(setting)
    assert found is not None and found.cut is not None
    search = Search(space.stages(setting, space.request.memory), space.pipe(setting), float("inf"))
    slowest = search.slowest()
    assert slowest < found.cut.slowest
    assert search.bound(slowest, search.more(found.cut.step / 2)) <= found.cut.step


def test_the_bound_holds_where_ways_to_recompute_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage with many unlike segments not all ways are looked at; then what it takes is no bound."""
    tired = 0
    for seed in range(40):
        chance = random.Random(seed)
        plain, again = [], []
        for i in range(8):
            work, more = chance.randint(8, 110), chance.randint(1, 90)
            cost = layer(
                f"s{i}", parameters=1, saved=chance.randint(1, 40) * 10, backward_flops=100 * work * B, work=100 * work
            )
            plain.append(cost)
            again.append(replace(cost, backward_flops=100 * (work + more) * B, saved_bytes=0))
        space = two_stages(plain, again, batch=32, memory=chance.randint(300, 1200))
        (setting,) = space.settings
        exact = space.best(setting)
        if exact is None or exact.cut is None:
            continue
        with monkeypatch.context() as patch:
            patch.setattr("autopart.solver.stages.PATIENCE", 9)
            for known in (float("inf"), exact.cut.step):
                found = space.best(setting, known)
                assert found is not None and found.bound <= exact.cut.step
                tired += found.bound < exact.cut.step
    assert tired, "some search was cut short"


def test_a_time_limit_gives_the_best_so_far_and_its_gap() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 8, "cluster": CLUSTER}
    done: list[tuple[int, int]] = []
    plan = choose(gpt(), time_limit=1e-9, progress=lambda *told: done.append(told), **pins)
    assert plan.alternatives == () and done and all(0 <= now < of for now, of in done)
    best = choose(gpt(), **pins)
    assert plan.prediction.step_seconds >= best.prediction.step_seconds
    if plan.prediction.step_seconds > best.prediction.step_seconds:
        assert re.match(r"at most [\d.]+% above the best possible, as the time was up", plan.optimality)
    with pytest.raises(ValueError, match="time_limit: must be more than 0"):
        choose(gpt(), time_limit=0, **pins)
    with pytest.raises(ValueError, match="objective: 'speed' is not known; one of time, memory"):
        choose(gpt(), objective="speed", **pins)


def test_the_same_plan_every_time_whatever_the_search_took() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER, "recomputed": frugal(), "memory": "200MiB"}
    one, other = (choose(gpt(), **pins) for _ in range(2))
    assert one == other and one.to_json() == other.to_json() and one.took > 0
    read = Plan.from_json(one.to_json())
    assert read == one and read.took == 0


def test_runners_up_are_what_pinning_them_gives() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER, "recomputed": frugal()}
    plan = choose(gpt(), **pins)
    others = {each.choice: each for each in plan.alternatives}
    assert set(others) == {"mesh", "microbatches", "schedule", "split", "recompute"}, "one data rank: no placement"
    meshes = [{"pp": pp, "dp": 4 // pp} for pp in (1, 2, 4) if pp != plan.mesh.degree("pp")]
    steps = [choose(gpt(), mesh=mesh, **pins).prediction.step_seconds for mesh in meshes]
    assert others["mesh"].step_seconds == pytest.approx(min(steps), rel=1e-9)
    mesh = {"mesh": plan.mesh}
    steps = [
        choose(gpt(), microbatches=count, **mesh, **pins).prediction.step_seconds
        for count in (1, 2, 4, 8, 16)
        if count != plan.microbatches
    ]
    assert others["microbatches"].step_seconds == pytest.approx(min(steps), rel=1e-9)
    gpipe = choose(gpt(), schedule="gpipe", microbatches=plan.microbatches, stages=list(plan.cuts), **mesh, **pins)
    best = choose(gpt(), schedule="gpipe", microbatches=plan.microbatches, **mesh, **pins)
    assert others["schedule"].step_seconds == pytest.approx(best.prediction.step_seconds, rel=1e-9)
    assert best.prediction.step_seconds <= gpipe.prediction.step_seconds
    everything = choose(gpt(), recompute=True, microbatches=plan.microbatches, **mesh, **pins)
    assert others["recompute"].step_seconds == pytest.approx(everything.prediction.step_seconds, rel=1e-9)
    text = plan.explain()
    for each in plan.alternatives:
        assert each.step_seconds is not None and each.step_seconds >= plan.prediction.step_seconds * (1 - 1e-9)
        assert f"- another {each.choice}: {each.option} would make the step" in text
    tight = choose(gpt(), memory="200MiB", **pins)
    nothing = next(each for each in tight.alternatives if each.choice == "recompute")
    assert tight.recompute and nothing.step_seconds is None and nothing.peak > 200 * MIB
    assert "- another recompute: nothing does not fit, as the fullest rank would need at least" in tight.explain()
    assert "recompute" in plan.diff(tight) and "runner-up mesh: " in plan.diff(tight) and plan.diff(plan) == ""


def test_one_segment_is_explained() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER, "recomputed": frugal(), "memory": "200MiB"}
    plan = choose(gpt(), **pins)
    again, kept = plan.recompute[0], next(f"h.{i}" for i in range(8) if f"h.{i}" not in plan.recompute)
    size = plan.largest
    text = plan.explain(f"{again}.mlp")
    stage = next(k for k, stage in enumerate(plan.stages) if again in stage.segments)
    assert text.startswith(f"{again}: in stage {stage} (")
    assert f"recomputed: keeps {size * 128:.1f} KiB a microbatch instead of {size:.1f} MiB" in text
    assert "12.0 MiB of parameters" in text and f"{size * 1.0:.2f} ms forward" in text
    assert f"not recomputed: that would keep {size * 128:.1f} KiB" in plan.explain(kept)
    assert "recomputing would keep no less" in plan.explain("head")
    assert plan.explain("h").count(": in stage") == 8
    with pytest.raises(ValueError, match=r"explain: no segment is called 'h\.77'; there are h\."):
        plan.explain("h.77")


def test_a_search_that_counts_otherwise_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pins: dict[str, Any] = {"batch": 16, "mesh": {"pp": 4}, "cluster": CLUSTER}
    length = Flush.length
    monkeypatch.setattr(Flush, "length", lambda *args: length(*args) - 10**9)
    with pytest.raises(AssertionError, match=r"internal error: a step of .* was searched for, but .* are predicted"):
        choose(gpt(), **pins)


def test_pins_that_contradict_each_other_are_named() -> None:
    pins: dict[str, Any] = {"batch": 16, "cluster": CLUSTER, "mesh": {"dp": 4}, "memory": "500MiB"}
    choose(gpt(), placement="ddp", **{**pins, "mesh": None, "devices": 4})
    choose(gpt(), **pins)
    with pytest.raises(PlanInfeasible) as refusal:
        choose(gpt(), placement="ddp", **pins)
    assert "mesh={'dp': 4} and placement='ddp' are each fine alone, but not together." in str(refusal.value)
    assert refusal.value.core == ("mesh={'dp': 4}", "placement='ddp'", "500.0 MiB per device")
    free = {**pins, "mesh": None, "devices": 4, "memory": "58MiB", "recompute": False}
    layers = [layer(f"h.{i}", parameters=4 * MIB) for i in range(16)]
    with pytest.raises(PlanInfeasible, match=r"It fits with: .*devices=\d;") as refusal:
        choose(layers, **free)
    assert "memory=" in str(refusal.value)
    count = next(int(way[-1]) for way in refusal.value.ways if way.startswith("devices="))
    assert choose(layers, **{**free, "devices": count})
    with pytest.raises(PlanInfeasible):
        choose(layers, **{**free, "devices": count - 1})
