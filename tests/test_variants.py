"""Tensor degrees in the free search: against brute force over all that it may choose, and against its own pins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.cluster import Cluster
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Inner
from autopart.ir.plan import Plan
from autopart.ir.tensor_plan import TensorPlan
from autopart.solver import choose
from autopart.solver.pareto import front
from tests.test_choose import MIB, B, frugal, gpt, layer
from tests.test_joint import PERCENT, Model, Point, chosen, every_plan, limit_of, models

QUICK = settings(max_examples=12, deadline=None, derandomize=True)

CLUSTER = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6)

Placed = tuple[TensorPlan, list[SegmentCost], list[SegmentCost]]

Degrees = dict[Inner, Callable[[], list[Placed]]]


def inside(degree: int, samples: int = 1, axis: str = "tp") -> TensorPlan:
    return TensorPlan(axis, degree, (), (), (), (), (), CLUSTER, samples)


def halved(cost: SegmentCost, degree: int, exchange: int, whole: bool) -> SegmentCost:
    """A segment on some places: a part of its work, of what it saves and, unless they stay whole, of its parameters."""
    fields = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes", "saved_bytes", "recomputed_bytes")
    parameters = cost.parameter_bytes if whole else -(-cost.parameter_bytes // degree)
    tied = tuple(t if whole else replace(t, nbytes=-(-t.nbytes // degree)) for t in cost.tied)
    return replace(
        cost,
        **{field: getattr(cost, field) / degree for field in fields},
        parameter_bytes=parameters,
        trainable_bytes=parameters,
        tied=tied,
        forward_exchange=exchange * B + 10**9,
        backward_exchange=2 * exchange * B + 10**9,
    )


TP: tuple[Inner, ...] = ((("tp", 2),), (("tp", 4),))

EVERY: tuple[Inner, ...] = (*TP, (("cp", 2),), (("cp", 4),), (("cp", 2), ("tp", 2)), (("ep", 2), ("tp", 2)))


@st.composite
def wide(draw: st.DrawFn, inners: Sequence[Inner] = TP) -> tuple[Model, Degrees]:
    """A model, and one or two placements of its tensors on some axes inside segments."""
    plain, again, cluster, batch = draw(models())
    found: Degrees = {}
    for inner in inners:
        placed, places = [], prod(size for _, size in inner)
        for number in range(draw(st.integers(1, 2))):
            exchange, whole = 10 ** draw(st.integers(6, 12)), draw(st.booleans())
            parts = ([halved(cost, places, exchange, whole) for cost in costs] for costs in (plain, again))
            axes = (inside(size, 1 + number, axis) for axis, size in reversed(inner))  # tp is placed first
            placed.append((TensorPlan.nested(axes), *parts))
        found[inner] = partial(list, placed)
    return (plain, again, cluster, batch), found


def every_wide_plan(model: Model, degrees: Degrees, devices: int) -> Iterator[Point]:
    """All plans without and with axes inside segments."""
    plain, again, cluster, batch = model
    found = [(1, plain, again), *((t.places, p, a) for find in degrees.values() for t, p, a in find())]
    for degree, costs, recomputed in found:
        if devices % degree == 0:
            yield from every_plan((costs, recomputed, cluster, batch), devices // degree)


@QUICK
@given(wide(EVERY), st.sampled_from([2, 4]), PERCENT)
def test_equals_brute_force(drawn: tuple[Model, Degrees], devices: int, percent: int) -> None:
    model, degrees = drawn
    limit = limit_of(model, percent)
    fitting = [step for step, held in every_wide_plan(model, degrees, devices) if held <= limit]
    plan = chosen(model, devices, limit, degrees=degrees)
    assert (plan is None) == (not fitting)
    if plan is not None:
        assert plan.prediction.step_seconds == pytest.approx(min(fitting), rel=1e-9, abs=1e-12)
        assert plan.optimality.startswith("optimal: ") and ", tensor degree" in plan.optimality
        assert plan.mesh.inside == {each.axis: each.degree for each in (plan.tensor.axes if plan.tensor else ())}
        assert all(memory.total <= limit for memory in plan.prediction.memory)


@QUICK
@given(wide(), PERCENT, st.integers(1, 1000))
def test_no_pin_helps_and_more_memory_or_faster_links_never_hurt(
    drawn: tuple[Model, Degrees], percent: int, more: int
) -> None:
    (plain, again, cluster, batch), degrees = drawn
    model, devices, limit = (plain, again, cluster, max(batch, 4)), 4, limit_of(drawn[0], percent)

    def step(model: Model = model, limit: int = limit, **pins: Any) -> float:
        plan = chosen(model, devices, limit, degrees=degrees, **pins)
        return float("inf") if plan is None else plan.prediction.step_seconds

    free = step() * (1 + 1e-9)
    for degree, pp in product((1, 2, 4), (1, 2, 4)):
        dp, rest = divmod(devices, pp * degree)
        if rest or not dp or pp > len(plain):
            continue
        mesh = {"pp": pp, "dp": dp, "tp": degree}
        if degree == 1:
            assert step(mesh=mesh) * (1 + 2e-9) >= free
            continue
        (first, *others) = degrees[(("tp", degree),)]()
        tensor, costs, recomputed = first
        pins: dict[str, Any] = {"tensor": tensor, "recomputed": recomputed, "others": others, "mesh": mesh}
        assert step((costs, recomputed, cluster, model[3]), **pins) * (1 + 2e-9) >= free
    assert step(recompute=True) * (1 + 2e-9) >= free
    assert step(limit=limit + more) <= free
    link = cluster.groups[0].inside
    faster = Cluster.uniform(4, 10**9, 1e4, 1e3, 3 * link.bandwidth, link.latency / 2)
    assert step(cluster=faster) <= free


def degrees_of(work: int = 2, exchange: int = 0) -> Degrees:
    """Placements of `gpt` on 2 and on 4 places, where each place does 1/`work` of what one device does."""

    def found(degree: int) -> list[Placed]:
        parts = ([halved(cost, work * degree // 2, exchange, False) for cost in costs] for costs in (gpt(), frugal()))
        return [(inside(degree), *parts)]

    return {(("tp", degree),): partial(found, degree) for degree in (2, 4)}


PINS: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER, "recomputed": frugal()}


def test_degrees_are_looked_at_where_a_cluster_is_given() -> None:
    found = choose(gpt(), degrees=degrees_of(), **PINS)
    assert found.mesh.degree("tp") > 1 and found.tensor == inside(found.mesh.degree("tp"))
    assert "tensor degrees 1, 2 and 4 with 2 placements inside segments" in found.optimality
    for pins in ({"cluster": None}, {"mesh": {"pp": 2, "dp": 2}}):
        plan = choose(gpt(), degrees=degrees_of(), **{**PINS, **pins})
        assert plan.tensor is None and "tensor degree" not in plan.optimality
    several = choose(gpt(), degrees=degrees_of(), schedule="interleaved", **PINS)
    assert several.tensor is not None and "tensor degrees 1, 2 and 4" in several.optimality
    dear = choose(gpt(), degrees=degrees_of(exchange=10**12), **PINS)
    assert dear.tensor is None and "tensor degrees 1, 2 and 4" in dear.optimality


def test_the_runner_up_of_a_degree_is_what_pinning_its_meshes_gives() -> None:
    plan = choose(gpt(), degrees=degrees_of(), **PINS)
    other = {each.choice: each for each in plan.alternatives}
    told = other.get("tensor degree", other["mesh"])
    steps = []
    for degree, pp in product((1, 2, 4), (1, 2, 4)):
        if degree * pp > 4 or degree == plan.mesh.degree("tp"):
            continue
        mesh = {"pp": pp, "dp": 4 // (pp * degree), "tp": degree}
        if degree == 1:
            steps.append(choose(gpt(), **PINS, mesh=mesh).prediction.step_seconds)
            continue
        ((tensor, costs, again),) = degrees_of()[(("tp", degree),)]()
        pins = {**PINS, "recomputed": again, "tensor": tensor, "mesh": mesh}
        steps.append(choose(costs, **pins).prediction.step_seconds)
    assert told.step_seconds == pytest.approx(min(steps), rel=1e-9)
    assert f"- another {told.choice}: {told.option} would make the step" in plan.explain()


def alone(axes: dict[str, int], work: int = 1) -> Degrees:
    """A placement of `gpt` on each of some axes alone, where a place does 1 / (`work` x degree) of what there is."""

    def found(axis: str, degree: int) -> list[Placed]:
        parts = ([halved(cost, work * degree, 0, False) for cost in costs] for costs in (gpt(), frugal()))
        return [(inside(degree, axis=axis), *parts)]

    return {((axis, degree),): partial(found, axis, degree) for axis, degree in axes.items()}


def test_other_axes_of_as_many_places_are_a_runner_up_and_a_way_out() -> None:
    """An axis of four places for the sequence is something else than one of four for any tensors."""
    degrees = alone({"cp": 4}, work=2) | alone({"tp": 4})
    plan = choose(gpt(), degrees=degrees, **PINS)
    assert plan.mesh.inside == {"cp": 4} and "tensor degrees 1 and 4, on cp too" in plan.optimality
    others = {each.choice: each for each in plan.alternatives}
    told = others.get("tensor degree", others["mesh"])
    assert "tp=4" in told.option and "cp" not in told.option
    assert f"- another {told.choice}: {told.option} would make the step" in plan.explain()
    costs = [layer(f"h.{i}", parameters=12 * MIB, saved=0) for i in range(2)]
    parts = [halved(cost, 2, 0, False) for cost in costs]
    ways: Degrees = {(("cp", 2),): lambda: [(inside(2, axis="cp"), parts, parts)]}
    pins = {**PINS, "recompute": False, "memory": "40MiB", "placement": "ddp", "recomputed": costs}
    with pytest.raises(PlanInfeasible, match=r"mesh=\{[^}]*'cp': 2[^}]*\}"):
        choose(costs, degrees=ways, mesh={"pp": 2, "dp": 2}, **pins)


def test_objectives_and_fronts_look_at_degrees() -> None:
    points = list(every_wide_plan((gpt(2), gpt(2), CLUSTER, 4), degrees := small(), 4))
    pins = {**PINS, "batch": 4, "recomputed": gpt(2), "degrees": degrees}
    leanest = choose(gpt(2), objective="memory", **pins)
    assert leanest.prediction.peak == min(held for _, held in points) and leanest.mesh.degree("tp") > 1
    cheap = choose(gpt(2), objective="throughput_per_cost", **pins)
    counts = (1, 2, 4)
    spent = [n * step for n in counts for step, _ in every_wide_plan((gpt(2), gpt(2), CLUSTER, 4), degrees, n)]
    assert cheap.mesh.size * cheap.prediction.step_seconds == pytest.approx(min(spent), rel=1e-9)

    def best(objective: str, limit: int | None) -> Plan:
        return choose(gpt(2), objective=objective, memory=limit, **pins)

    for plan in front(best, 3):
        step, held = plan.prediction.step_seconds, plan.prediction.peak
        assert not [(s, h) for s, h in points if s < step * (1 - 1e-9) and h <= held]


def small() -> Degrees:
    def found(degree: int) -> list[Placed]:
        parts = [halved(cost, degree, 10**8, False) for cost in gpt(2)]
        return [(inside(degree), parts, parts)]

    return {(("tp", degree),): partial(found, degree) for degree in (2, 4)}


def test_a_tensor_degree_is_a_way_out() -> None:
    pins: dict[str, Any] = {**PINS, "recompute": False, "memory": "40MiB", "placement": "ddp"}
    costs = [layer(f"h.{i}", parameters=12 * MIB, saved=0) for i in range(2)]
    parts = [halved(cost, 2, 0, False) for cost in costs]
    degrees = {(("tp", 2),): lambda: [(inside(2), parts, parts)]}
    with pytest.raises(PlanInfeasible) as refusal:
        choose(costs, degrees=degrees, **{**pins, "recomputed": costs, "mesh": {"pp": 2, "dp": 2}})
    meshes = re.findall(r"mesh=(\{[^}]*\})", str(refusal.value).split("It fits with")[1])
    assert meshes == ["{'pp': 2, 'dp': 1, 'tp': 2}"]
    choose(parts, tensor=inside(2), **{**pins, "recomputed": parts, "mesh": eval(meshes[0])})


def test_fewer_samples_than_data_ranks_without_a_tensor_axis() -> None:
    costs = [layer("only")]
    pins: dict[str, Any] = {"batch": 1, "devices": 2, "cluster": CLUSTER}
    with pytest.raises(ValueError, match="batch: 1 samples are too few for dp=2"):
        choose(costs, **pins)
    parts = [halved(cost, 2, 0, False) for cost in costs]
    plan = choose(costs, degrees={(("tp", 2),): lambda: [(inside(2), parts, parts)]}, **pins)
    assert dict(plan.mesh.axes) == {"pp": 1, "dp": 1, "tp": 2}


def test_degrees_left_out_for_time_are_named() -> None:
    plan = choose(gpt(), degrees=degrees_of(), time_limit=1e-9, **PINS)
    assert plan.tensor is None and "tensor degree 1 (not tp=2 and tp=4, as the time was up)" in plan.optimality


def test_recomputation_is_pinned_in_every_variant() -> None:
    everything = choose(gpt(), degrees=degrees_of(), recompute=True, **PINS)
    layers = tuple(f"h.{i}" for i in range(8))
    assert everything.tensor is not None and everything.recompute == layers
    some = choose(gpt(), degrees=degrees_of(), recompute=["h.2", "head"], **PINS)
    assert some.tensor is not None and some.recompute == ("h.2", "head")
    none = choose(gpt(), degrees=degrees_of(), recompute=False, **PINS)
    assert none.prediction.step_seconds < some.prediction.step_seconds < everything.prediction.step_seconds
