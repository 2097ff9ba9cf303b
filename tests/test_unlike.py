"""Plans for clusters of unlike devices: equal to brute force over orders, meshes, splits and all; run as any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart import schedules
from autopart.cluster import Cluster, Device, Group, Joint, Link
from autopart.errors import PlanInfeasible
from autopart.ir.placement import PRESETS
from autopart.ir.plan import Plan
from autopart.solver import choose
from autopart.solver import dealt as dealt_search
from autopart.solver.choose import predict
from autopart.solver.columns import orders
from autopart.solver.space import Space
from autopart.testing import assert_parity
from tests import test_dealt
from tests.oracle import _exchange as exchange
from tests.oracle import every_split, stage_bytes, step_seconds
from tests.test_joint import Model, asked, limit_of, models, numbers_of

QUICK = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def unlike(draw: st.DrawFn, total: int) -> Cluster:
    """Groups of one or two devices each, of so many bytes in the mean, give or take half."""
    rate = st.sampled_from([0.5, 1.0, 2.0, 4.0])
    groups = []
    for number in range(draw(st.integers(2, 3))):
        size = int(total * draw(st.sampled_from([0.5, 1.0, 1.5])))
        link = Link(draw(st.sampled_from([1e2, 1e4])), draw(st.sampled_from([0.0, 1e-3])))
        device = Device(f"d{number}", size, 1e4 * draw(rate), 1e3 * draw(rate), 0.0)
        groups.append(Group(device, 1, draw(st.integers(1, 2)), link, link))
    joints = [
        Joint(a, b, Link(draw(st.sampled_from([1e2, 1e3])), draw(st.sampled_from([0.0, 1.0]))))
        for a, b in combinations(range(len(groups)), 2)
    ]
    return Cluster(tuple(groups), tuple(joints))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, int | None]:
    """A model on unlike devices, and a limit that is pinned, if any."""
    plain, again, _, batch = draw(models())
    limit = limit_of((plain, again, Cluster.preset("cpu"), batch), draw(st.integers(25, 120)))
    pin = draw(st.none() | st.just(limit))
    return (plain, again, draw(unlike(limit)), batch), pin


def column(cluster: Cluster, devices: list[int]) -> Cluster:
    """Equal devices as weak as the weakest of some, with the slowest link inside or between their groups."""
    every = [cluster.device(number) for number in devices]
    starts = [sum(group.devices for group in cluster.groups[:n]) for n in range(len(cluster.groups) + 1)]
    groups = {n for n in range(len(cluster.groups)) if {*range(starts[n], starts[n + 1])} & {*devices}}
    links = [cluster.groups[n].inside for n in groups]
    links += [joint.link for joint in cluster.joints if {joint.first, joint.second} <= groups]
    return Cluster.uniform(
        len(devices),
        min(device.memory for device in every),
        min(device.flops for device in every),
        min(device.bandwidth for device in every),
        min(link.bandwidth for link in links),
        max(link.latency for link in links),
    )


def every_step(model: Model, limit: int | None) -> Iterator[float]:
    """The steps of all plans that fit, of all orders of the groups, all ways to deal the batch to unlike data ranks."""
    groups, at = [], 0
    for group in model[2].groups:
        groups.append([*range(at, at + group.devices)])
        at += group.devices
    for order, pp in product(permutations(groups), range(1, min(at, len(model[0])) + 1)):
        devices, (dp, rest) = [*chain(*order)], divmod(at, pp)
        if rest or dp > model[3]:
            continue
        columns = [devices[k * dp : (k + 1) * dp] for k in range(pp)]
        for taken in dealt(model, columns):
            for count in numbers_of(min(taken)):
                yield from steps(model, limit, columns, taken, count)


def dealt(model: Model, columns: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """The samples of each data rank: as even as can be, or anyhow where some column has devices of two groups."""
    (*_, cluster, batch), dp = model, len(columns[0])
    yield tuple(batch // dp + (part < batch % dp) for part in range(dp))
    owners = [[cluster.group_of(number) for number in each] for each in columns]
    if any(len(set(each)) > 1 for each in owners):
        yield from (each for each in product(range(1, batch), repeat=dp) if sum(each) == batch)


def steps(
    model: Model, limit: int | None, columns: list[list[int]], taken: tuple[int, ...], count: int
) -> Iterator[float]:
    """The steps of all placements, splits and sets of recomputed segments that fit."""
    plain, again, cluster, _ = model
    pp, dp = len(columns), len(columns[0])
    on = [column(cluster, each) for each in columns]
    limits = [each.memory if limit is None else limit for each in on]
    crossed = [cluster.link(a, b) for k in range(pp - 1) for a, b in zip(columns[k], columns[k + 1], strict=True)]
    rates = [link.bandwidth for link in crossed], [link.latency for link in crossed]
    edge = Link(min(rates[0], default=1.0), max(rates[1], default=0.0))
    sizes = [-(-each // count) for each in taken]
    most = max(sizes)
    pairs = [(p.at(most).saved_bytes, a.at(most).saved_bytes) for p, a in zip(plain, again, strict=True)]
    kept = [i for i, (p, a) in enumerate(pairs) if a < p]
    alike = [[(most, each)] for each in on]
    apart = [[(n, column(cluster, [one])) for n, one in zip(sizes, each, strict=True)] for each in columns]
    even = taken == next(dealt(model, columns))
    for subset in chain.from_iterable(combinations(kept, n) for n in range(len(kept) + 1)):
        costs = [again[i] if i in subset else plain[i] for i in range(len(plain))]
        segments = [cost.at(most) for cost in costs]
        places = [[([cost.at(n) for cost in costs], one) for n, one in each] for each in (alike if even else apart)]
        for preset, starts in product(PRESETS if dp > 1 else PRESETS[:1], every_split(len(plain), pp)):
            runs = list(zip(starts, [*starts[1:], len(segments)], limits, strict=True))
            held = [stage_bytes(segments[i:j], preset, dp, 2, min(count, pp - k)) for k, (i, j, _) in enumerate(runs)]
            if all(need <= room for need, (_, _, room) in zip(held, runs, strict=True)):
                setting: dict[str, Any] = {"schedule": "1f1b", "microbatches": count, "preset": preset, "dp": dp}
                yield step_seconds(segments, starts, cluster=on, link=edge, places=places, **setting)


def chosen(model: Model, limit: int | None, **pins: Any) -> Plan | None:
    plain, again, cluster, batch = model
    pins = {"recomputed": again, "cluster": cluster, "schedule": "1f1b", **pins}
    try:
        return choose(plain, batch=batch, memory=limit, **pins)
    except PlanInfeasible:
        return None


@QUICK
@given(cases())
def test_equals_brute_force(case: tuple[Model, int | None]) -> None:
    model, limit = case
    if model[3] < model[2].devices:
        model = (*model[:3], model[2].devices)
    expected = min(every_step(model, limit), default=None)
    plan = chosen(model, limit)
    assert (plan is None) == (expected is None)
    if plan is not None:
        assert plan.prediction.step_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
        for stage, memory in zip(plan.stages, plan.prediction.memory, strict=True):
            room = [model[2].device(plan.devices[rank]).memory for rank in stage.ranks] if limit is None else [limit]
            assert memory.total <= min(room)


# ---- several stages a rank -------------------------------------------------------------------------------------------


@st.composite
def halves(draw: st.DrawFn, mesh: dict[str, int]) -> tuple[Model, str]:
    """A model on two unlike groups of as many devices as a pipeline of this mesh has in one half, and a schedule."""
    plain, again, _, batch = draw(test_dealt.models().filter(lambda model: len(model[0]) > 3))
    need = test_dealt.limit_of((plain, again, Cluster.preset("cpu"), batch), draw(st.integers(25, 90)))
    count, groups = mesh["pp"] * mesh["dp"] // 2, []
    for number in range(2):
        memory, rate = int(need * draw(st.sampled_from([0.5, 1.0, 1.5]))), draw(st.sampled_from([0.5, 1.0, 3.0]))
        link = Link(draw(st.sampled_from([1e2, 1e4])), 0.0)
        groups.append(Group(Device(f"d{number}", memory, 1e4 * rate, 1e9, 0.0), 1, count, link, link))
    joint = Joint(0, 1, Link(draw(st.sampled_from([1e2, 1e4])), draw(st.sampled_from([0.0, 1e-3]))))
    text = draw(st.sampled_from(["interleaved", "zb-v", "bfs", "interleaved(chunks=3)", "v1f1b"]))
    return (plain, again, Cluster(tuple(groups), (joint,)), batch), text


def every_step_of_several(model: Model, mesh: dict[str, int], text: str) -> Iterator[float]:
    """The steps of all plans that fit, each rank recomputing nothing or all that keeps less by it."""
    plain, again, cluster, batch = model
    pp, dp, half = mesh["pp"], mesh["dp"], cluster.groups[0].devices
    for devices, count in product(
        ([*range(2 * half)], [*range(half, 2 * half), *range(half)]), numbers_of(batch // dp)
    ):
        columns = [devices[k * dp : (k + 1) * dp] for k in range(pp)]
        on = [column(cluster, each) for each in columns]
        links = [cluster.link(a, b) for k in range(pp - 1) for a, b in zip(columns[k], columns[k + 1], strict=True)]
        edge = Link(min(link.bandwidth for link in links), max(link.latency for link in links))
        made = schedules.build(text, ranks=pp, microbatches=count)
        if made.stages > len(plain):
            continue
        split = any(action.kind == "I" for _, action in made.actions())
        pairs = [
            (p.at(-(-batch // (dp * count))), a.at(-(-batch // (dp * count))))
            for p, a in zip(plain, again, strict=True)
        ]
        kept = [tuple(max(n.saved_bytes, n.stash_bytes * split) for n in pair) for pair in pairs]
        for starts, choice in product(every_split(len(plain), made.stages), product((False, True), repeat=pp)):
            ends = [*starts[1:], len(plain)]
            owner = [r for r, i, j in zip(made.place, starts, ends, strict=True) for _ in range(i, j)]
            numbers = [
                pair[choice[r] and less < more] for pair, r, (more, less) in zip(pairs, owner, kept, strict=True)
            ]
            length = test_dealt.flush(made, numbers, starts, [each.flops for each in on], edge)
            for preset in PRESETS if dp > 1 else PRESETS[:1]:
                held = test_dealt.peaks(made, numbers, starts, preset, dp)
                if all(need <= each.memory for need, each in zip(held, on, strict=True)):
                    sent = [0.0] * pp
                    for n, rank in zip(numbers, owner, strict=True):
                        sent[rank] += exchange(n, preset, dp, count, on[rank])
                    yield length + max(sent)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 1}, {"pp": 2, "dp": 2}], ids=str)
@QUICK
@given(data=st.data())
def test_several_stages_a_rank_equal_brute_force(mesh: dict[str, int], data: st.DataObject) -> None:
    model, text = data.draw(halves(mesh))
    expected = min(every_step_of_several(model, mesh, text), default=None)
    try:
        plan = chosen(model, None, schedule=text, mesh={axis: size for axis, size in mesh.items() if size > 1})
    except ValueError:
        assert expected is None  # it has too many stages for these segments
        return
    assert (plan is None) == (expected is None)
    if plan is not None:
        assert plan.prediction.step_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)


@QUICK
@given(st.data())
def test_bounds_are_below_what_all_splits_take(data: st.DataObject) -> None:
    """Where splits are too many to look at all, the one that is found fits, and the bound is true."""
    (plain, again, cluster, batch), text = data.draw(halves({"pp": 2, "dp": 1}).filter(lambda case: "3" not in case[1]))
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "schedule": text, "cluster": cluster, "devices": 2}
    space = Space(asked(plain, batch=batch, recomputed=again, **pins))
    for setting in space.settings:
        exact = space.best(setting)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dealt_search, "SPLITS", 0)
            rough = Space(space.request).best(setting)
        if exact is None or exact.cut is None:
            assert rough is None or rough.cut is None
            continue
        assert space.bound(setting) <= exact.cut.step and rough is not None and rough.bound <= exact.cut.step
        if rough.cut is not None:
            assert exact.cut.step <= rough.cut.step
            predict(*space.solved(setting, rough.cut))  # which holds every rank to its own memory


@QUICK
@given(cases(), st.data())
def test_a_pinned_mesh_is_no_better_and_a_better_device_no_worse(case: Any, data: st.DataObject) -> None:
    (plain, again, cluster, batch), _ = case
    batch = max(batch, cluster.devices)
    model = plain, again, cluster, batch

    def step(model: Model, **pins: Any) -> float:
        plan = chosen(model, None, **pins)
        return float("inf") if plan is None else plan.prediction.step_seconds

    free = step(model) * (1 + 1e-9)
    for pp in (pp for pp in range(1, len(plain) + 1) if cluster.devices % pp == 0):
        assert step(model, mesh={"pp": pp, "dp": cluster.devices // pp}) * (1 + 2e-9) >= free
    which = data.draw(st.integers(0, len(cluster.groups) - 1))
    group = cluster.groups[which]
    better = replace(group.device, memory=2 * group.device.memory, flops=2 * group.device.flops)
    groups = (*cluster.groups[:which], replace(group, device=better), *cluster.groups[which + 1 :])
    assert step((plain, again, replace(cluster, groups=groups), batch)) <= free


FAST, SLOW = Device("fast", 2**30, 4e9, 1e12, 0.0), Device("slow", 2**30, 1e9, 1e12, 0.0)
NEAR = Link(1e12, 0.0)


def mixed(fast: int, slow: int) -> Cluster:
    groups = Group(SLOW, 1, slow, NEAR, NEAR), Group(FAST, 1, fast, NEAR, NEAR)
    return Cluster(groups, (Joint(0, 1, NEAR),))


class Layers(nn.Sequential):
    """Five equal layers, and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def layers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Layers(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)))
    return model.double(), (torch.randn(8, 16).double(),)


def test_a_fast_device_has_more_layers_and_the_plan_says_where() -> None:
    model, args = layers()
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "capture": "direct", "microbatches": 4}
    plan = autopart.plan(model, args, cluster=mixed(1, 1), **pins)
    shares = {plan.devices[stage.ranks[0]]: len(stage.segments) for stage in plan.stages}
    assert shares[0] == 1 and shares[1] >= 4, "four times as fast, four times as many"
    assert "on devices 1" in plan.summary() and "devices: stage 0 on" in plan.explain()
    assert any(each.choice == "order of devices" for each in plan.alternatives)
    assert "2 orders of devices" in plan.optimality
    assert Plan.from_json(plan.to_json()) == plan
    same = autopart.plan(model, args, cluster=Cluster.uniform(2, 2**30, 1e9, 1e12, 1e12, 0.0), **pins)
    assert not same.devices and plan.prediction.step_seconds < same.prediction.step_seconds
    assert_parity(model, args, plan=plan)


def test_so_it_has_with_several_stages_a_rank() -> None:
    model, args = layers()
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "capture": "direct", "microbatches": 4, "cluster": mixed(1, 1)}
    plan = autopart.plan(model, args, schedule="zb-v", **pins)
    layered = [
        (at, name) for s, at in zip(plan.stages, plan.place, strict=True) for name in s.segments if name != "output"
    ]
    held = [sum(at == rank for at, _ in layered) for rank in (0, 1)]
    assert len(plan.stages) == 4 and held[plan.devices.index(1)] > held[plan.devices.index(0)]
    assert_parity(model, args, plan=plan)
    auto = autopart.plan(model, args, schedule="auto", **pins)
    assert auto.prediction.step_seconds <= plan.prediction.step_seconds and auto.devices


def test_data_axes_lie_among_like_devices() -> None:
    model, args = layers()
    plan = autopart.plan(model, args, cluster=mixed(2, 2), mesh={"pp": 2, "dp": 2}, capture="direct")
    groups = [{plan.devices[rank] // 2 for rank in stage.ranks} for stage in plan.stages]
    assert all(len(each) == 1 for each in groups)


def test_a_fast_data_rank_takes_more_of_the_batch() -> None:
    torch.manual_seed(0)
    model, args = Layers(nn.Linear(16, 16)).double(), (torch.randn(10, 16).double(),)
    plan = autopart.plan(model, args, cluster=mixed(1, 1), placement="ddp", capture="direct")
    taken = dict(zip(plan.devices, plan.mesh.dealt(10), strict=True))
    assert plan.mesh.degree("dp") == 2 and taken == {1: 8, 0: 2}
    assert "dp=4:1" in plan.summary() or "dp=1:4" in plan.summary()
    many = autopart.plan(model, (args[0].repeat(20, 1),), cluster=mixed(1, 2), placement="ddp", capture="direct")
    taken = dict(zip(many.devices, many.mesh.dealt(200), strict=True))
    assert many.mesh.degree("dp") == 3 and taken[2] > 3.5 * taken[0]
    assert_parity(model, args, plan=plan)


def test_equal_orders_are_looked_at_once() -> None:
    near, far = Link(1e9), Link(1e6)
    one = Group(FAST, 1, 2, near, near)
    assert orders(Cluster((one,)), 2) == ((),)
    assert orders(Cluster((one, one), (Joint(0, 1, far),)), 4) == ((0, 1),)
    assert len(orders(mixed(2, 2), 4)) == 2 and len(orders(mixed(1, 3), 2)) == 2
