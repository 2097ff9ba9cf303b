"""Schedules in the joint search: against brute force over all it may choose, and against its own pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart import schedules
from autopart.cluster import Cluster, Link
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost, SegmentNumbers
from autopart.ir.placement import PRESETS
from autopart.ir.plan import Plan
from autopart.solver import choose, dealt
from autopart.solver.chunks import ways
from autopart.solver.families import ANYWHERE, COMMON, PORTFOLIO
from autopart.solver.space import LONGEST, Space
from tests.oracle import _exchange, every_split, stage_bytes
from tests.test_choose import CLUSTER, MIB, B, layer
from tests.test_joint import asked, chosen, numbers_of
from tests.test_schedule import uneven

QUICK = settings(max_examples=10, deadline=None, derandomize=True)

Model = tuple[list[SegmentCost], list[SegmentCost], Cluster, int]

PERCENT = st.integers(25, 120)
"""Of what one device would need of memory for all of the model and the batch."""


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Segments whose backwards are of two unlike halves, what they cost recomputed, a cluster and a batch."""
    plain, again, size = [], [], st.integers(1, 9)
    for i in range(draw(st.integers(2, 5))):
        work, backward, kept = draw(size) * 100, draw(size) * 100, draw(size) * 4
        cost = layer(
            f"s{i}",
            parameters=draw(size) * 10,
            saved=kept,
            work=work,
            backward_flops=backward * B,
            input_flops=backward * draw(st.integers(0, 4)) // 4 * B,
            forward_bytes=0,
            backward_bytes=0,
            stash_bytes=kept * draw(st.integers(0, 2)) * B,
            boundary_bytes=draw(size) * B,
        )
        plain.append(cost)
        less = {"saved_bytes": draw(st.sampled_from([1, 3])) * B, "stash_bytes": 0, "recomputed_bytes": draw(size) * B}
        again.append(replace(cost, backward_flops=cost.backward_flops + cost.forward_flops, **less))
    link = draw(st.sampled_from([1e2, 1e4, 1e9]))
    cluster = Cluster.uniform(4, 10**9, 1e4, 1e9, link, draw(st.sampled_from([0.0, 1e-3])))
    return plain, again, cluster, draw(st.integers(4, 6))


def limit_of(model: Model, percent: int) -> int:
    plain, _, _, batch = model
    return 1 + percent * sum(4 * cost.parameter_bytes + cost.at(batch).saved_bytes for cost in plain) // 100


def every_plan(model: Model, devices: int, names: tuple[str, ...] = COMMON) -> Iterator[tuple[float, int, str]]:
    """Step, bytes of the fullest rank and schedule of all meshes, microbatches, placements, schedules and splits."""
    plain, _, cluster, batch = model
    for pp in (pp for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(plain)):
        dp = devices // pp
        for count, text in product(numbers_of(batch // dp), names if pp > 1 else names[:1]):
            made = schedules.build(text, ranks=pp, microbatches=count)
            numbers = [cost.at(-(-batch // (dp * count))) for cost in plain]
            for starts in every_split(len(plain), made.stages):
                length = flush(made, numbers, starts, [cluster.flops] * pp, cluster.groups[0].inside)
                for preset in PRESETS if dp > 1 else PRESETS[:1]:
                    sent = max(
                        sum(_exchange(n, preset, dp, count, cluster) for s in held for n in of(numbers, starts, s))
                        for held in ranks(made)
                    )
                    yield length + sent, max(peaks(made, numbers, starts, preset, dp)), text


def ranks(made: schedules.Schedule) -> list[list[int]]:
    return [[s for s, rank in enumerate(made.place) if rank == r] for r in range(made.ranks)]


def of(numbers: list[SegmentNumbers], starts: tuple[int, ...], stage: int) -> list[SegmentNumbers]:
    return numbers[starts[stage] : (*starts, len(numbers))[stage + 1]]


def flush(
    made: schedules.Schedule, numbers: list[SegmentNumbers], starts: tuple[int, ...], flops: list[float], link: Link
) -> float:
    """The simulated flush on ranks of so many FLOPs, which alone bind in these models."""
    stages = [of(numbers, starts, s) for s in range(made.stages)]
    forward, backward, inputs = (
        [sum(getattr(n, field) for n in stage) / flops[rank] for stage, rank in zip(stages, made.place, strict=True)]
        for field in ("forward_flops", "backward_flops", "input_flops")
    )
    inputs[0] = 0.0
    weights = [b - i for b, i in zip(backward, inputs, strict=True)]
    crossing = max((numbers[i].boundary_bytes for i in starts[1:]), default=0)
    edge = link.latency + crossing / link.bandwidth
    return schedules.simulate(made, {"F": forward, "B": backward, "I": inputs, "W": weights}, edge).makespan


def peaks(
    made: schedules.Schedule, numbers: list[SegmentNumbers], starts: tuple[int, ...], preset: str, dp: int
) -> Iterator[int]:
    """The bytes of each rank at most, counted along its row."""
    split = any(action.kind == "I" for _, action in made.actions())
    for held, row in zip(ranks(made), made.table, strict=True):
        saved = {s: sum(max(n.saved_bytes, n.stash_bytes * split) for n in of(numbers, starts, s)) for s in held}
        kept = accumulate(saved[a.stage] * {"F": 1, "I": 0, "B": -1, "W": -1}[a.kind] for a in row)
        yield max(kept) + sum(stage_bytes(of(numbers, starts, s), preset, dp, 2, 0) for s in held)


def planned(model: Model, devices: int, limit: int, **pins: Any) -> Plan | None:
    return chosen(model, devices, limit, families=True, **pins)


@QUICK
@given(models(), st.sampled_from([2, 4]), PERCENT)
def test_equals_brute_force(model: Model, devices: int, percent: int) -> None:
    limit = limit_of(model, percent)
    fitting = [each for each in every_plan(model, devices) if each[1] <= limit]
    plan = planned(model, devices, limit, recompute=False)
    assert (plan is None) == (not fitting)
    if plan is None:
        return
    assert plan.prediction.step_seconds == pytest.approx(min(fitting)[0], rel=1e-9, abs=1e-12)
    assert plan.optimality.startswith("optimal: ") and plan.prediction.peak <= limit
    told = next((each for each in plan.alternatives if each.choice == "schedule"), None)
    if told is not None and told.step_seconds is not None:
        same = planned(model, devices, limit, recompute=False, mesh=plan.mesh, schedule=told.option)
        assert same is not None and same.prediction.step_seconds <= told.step_seconds * (1 + 1e-9)


@QUICK
@given(models(), st.sampled_from([2, 4]), PERCENT, st.integers(1, 1000))
def test_a_pinned_schedule_never_helps_and_more_memory_never_hurts(
    model: Model, devices: int, percent: int, more: int
) -> None:
    """With recomputation: of a stage where a rank has one, else of all stages of a rank."""
    limit = limit_of(model, percent)

    def step(limit: int = limit, **pins: Any) -> float:
        plan = planned(model, devices, limit, **pins)
        return float("inf") if plan is None else plan.prediction.step_seconds

    free = step()
    assert step(limit + more) <= free * (1 + 1e-9)
    for name in COMMON:
        try:
            assert step(schedule=name) * (1 + 1e-9) >= free
        except ValueError:  # it has too many stages for these segments
            continue


@QUICK
@given(models(), PERCENT, st.sampled_from(["interleaved", "zb-v", "bfs"]))
def test_bounds_are_below_what_all_splits_take(model: Model, percent: int, name: str) -> None:
    """Where splits are too many to look at all, the one that is found is one of them, and the bound is true."""
    plain, again, cluster, batch = model
    if len(plain) < 4:
        return
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "schedule": name, "memory": limit_of(model, percent)}
    request = asked(plain, batch=batch, cluster=cluster, devices=2, recomputed=again, **pins)
    for setting in Space(request).settings:
        exact = Space(request).best(setting)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dealt, "SPLITS", 0)
            space = Space(request)
            rough = space.best(setting)
        if exact is None or exact.cut is None:
            assert rough is None or rough.cut is None
            continue
        assert space.bound(setting) <= exact.cut.step and rough is not None and rough.bound <= exact.cut.step
        if rough.cut is not None:
            assert exact.cut.step <= rough.cut.step and space.peak(setting, rough.cut) <= request.memory


def test_a_rank_recomputes_all_of_its_stages_or_nothing() -> None:
    plain = [layer(f"h.{i}", parameters=MIB, saved=4 * MIB) for i in range(8)]
    again = [replace(c, saved_bytes=MIB * B, backward_flops=3 * 10**6 * B, recomputed_bytes=0) for c in plain]
    pins: dict[str, Any] = {"batch": 8, "mesh": {"pp": 2}, "cluster": CLUSTER, "schedule": "interleaved"}
    pins |= {"microbatches": 8, "stages": ["h.2", "h.4", "h.6"]}
    free = choose(plain, recomputed=again, **pins)
    everything = choose(plain, recomputed=again, recompute=True, **pins)
    assert free.recompute == () and len(everything.recompute) == 8
    some = choose(plain, recomputed=again, memory=free.prediction.peak - 1, **pins)
    assert 0 < len(some.recompute) < 8 and some.prediction.peak < free.prediction.peak
    ranked = {name: rank for stage, rank in zip(some.stages, some.place, strict=True) for name in stage.segments}
    assert {name for name in ranked if ranked[name] == ranked[some.recompute[0]]} == {*some.recompute}
    assert "all segments of a rank recomputed or none" in some.optimality
    least = everything.prediction.peak
    assert choose(plain, recomputed=again, memory=least, **pins).prediction.peak <= least
    with pytest.raises(PlanInfeasible, match=r"the rank of stages 0 and 2 .* needs at least"):
        choose(plain, recomputed=again, memory=least // 2, **pins)


def test_many_layers_are_dealt_at_least_as_well_as_by_the_busiest_rank() -> None:
    costs = uneven(3, 26)
    pins: dict[str, Any] = {"batch": 16, "mesh": {"pp": 4}, "microbatches": 16, "cluster": CLUSTER, "recompute": False}
    pins |= {"schedule": "interleaved(chunks=3)"}
    plan = choose(costs, **pins)
    assert plan.optimality.startswith("at most ") and "under interleaved(chunks=3)" in plan.optimality
    space = Space(asked(costs, devices=4, **pins))
    (setting,) = space.settings
    stages = space.stages(setting, space.request.memory)
    held = space.held(setting, stages)
    search = dealt.Dealt(stages, space.pipe(setting), held, float("inf"))
    found = [search._run(split.starts) for split in ways(held.plain)]
    assert plan.prediction.step_seconds * 1e15 <= min(cut.step for cut in found if cut is not None) + 1


@pytest.mark.parametrize("name", sorted(ANYWHERE))
def test_shapes_are_those_for_any_number_of_microbatches(name: str) -> None:
    """The place of stages and whether backwards are in two, which the search reads off a small schedule."""
    small = schedules.executable(schedules.build(name, ranks=3, microbatches=2))
    for ranks_, count in ((3, 1), (3, 7), (3, 12), (2, 5), (5, 8)):
        made = schedules.executable(schedules.build(name, ranks=ranks_, microbatches=count))
        assert made.stages // ranks_ == small.stages // 3
        assert ranks_ != 3 or made.place == small.place
        split = [any(action.kind == "I" for _, action in each.actions()) for each in (small, made)]
        assert split[0] == split[1]


def test_several_schedules_are_looked_at_where_a_cluster_is_given_and_the_mesh_is_free() -> None:
    costs = [layer(f"h.{i}", saved=MIB) for i in range(8)]
    pins: dict[str, Any] = {"batch": 8, "devices": 4, "families": True}
    plan = choose(costs, cluster=CLUSTER, **pins)
    assert f"under 9 schedules of up to {LONGEST} actions ({', '.join(COMMON)})" in plan.optimality
    assert f"- schedule {plan.schedule}: of all that fit" in plan.explain() and "- another schedule: " in plan.explain()
    assert choose(costs, cluster=CLUSTER, mesh=plan.mesh, **pins).schedule == "1f1b"
    assert choose(costs, **pins).schedule == "1f1b"
    auto = choose(costs, cluster=CLUSTER, schedule="auto", batch=8, devices=4)
    assert auto.prediction.step_seconds <= plan.prediction.step_seconds * (1 + 1e-9)
    assert f"under {len(PORTFOLIO)} schedules of up to {LONGEST} actions" in auto.optimality


def test_stages_begin_with_parameters_where_few_segments_have_some() -> None:
    """Of the 9 places that there are for 7 cuts, as many are left for the stages that come later."""
    bare = {2, 6, 10}
    costs = [layer(f"h.{i}", parameters=0 if i in bare else MIB, saved=MIB) for i in range(13)]
    plan = choose(costs, batch=10, mesh={"pp": 4}, microbatches=5, schedule="interleaved", cluster=CLUSTER)
    assert len(plan.stages) == 8 and not {f"h.{i}" for i in bare} & {*plan.cuts}
