"""A free mesh from module to steps: when tensor degrees are looked at, that no pinned mesh is better, and parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.api import compiler, tensor
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster, Link
from autopart.errors import PlanInfeasible
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Shard
from autopart.ir.plan import Plan
from autopart.passes.experts import has_experts
from autopart.passes.segment import segment
from autopart.solver.axis import linked
from autopart.testing import assert_parity
from examples.gpt import GPT, Config
from tests import axis_models
from tests.tensor_axis import CHEAP, LATE, made, soak

FAR = Cluster.uniform(4, 2**40, 1e8, 1e18, 1e7, 1e-9)
"""Bytes between devices take long: those of gradients and parameters are more than those of activations."""


NEAR = Cluster.uniform(4, 2**40, 1e10, 1e10, 1e9, 1e-7)
"""Bytes held, moved and sent all take about as long as products."""


def meshes(devices: int) -> list[dict[str, int]]:
    return [
        {"pp": pp, "dp": devices // (pp * tp), **({"tp": tp} if tp > 1 else {})}
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        if pp * tp <= devices
    ]


@pytest.mark.parametrize(
    ("name", "devices", "cluster"),
    [("mlp", 2, FAR), *(soak(name, 4, cluster) for name in ("gpt", "llama") for cluster in (CHEAP, LATE, FAR))],
)
def test_no_pinned_mesh_is_better(name: str, devices: int, cluster: Cluster) -> None:
    segmented = made(name)[2]
    free = solve(segmented, devices=devices, cluster=cluster, schedule="1f1b")
    pinned = {
        tuple(mesh.items()): solve(segmented, mesh=mesh, cluster=cluster).prediction.step_seconds
        for mesh in meshes(devices)
    }
    assert free.prediction.step_seconds == pytest.approx(min(pinned.values()), rel=1e-9)
    assert pinned[free.mesh.axes] == pytest.approx(free.prediction.step_seconds, rel=1e-9)
    assert ", tensor degrees 1" in free.optimality
    assert "another mesh: " in free.explain()


def test_the_tensor_axis_is_found_and_trains_as_one_device() -> None:
    """Not without a cluster: what predictions leave out, to start operators, is most of what a toy takes on CPUs."""
    model, args, segmented = made("gpt")
    pins: dict[str, Any] = {"devices": 2, "microbatches": 1}
    plan = solve(segmented, cluster=FAR, **pins)
    assert dict(plan.mesh.axes) == {"pp": 1, "dp": 1, "tp": 2} and plan.tensor is not None
    assert Plan.from_json(plan.to_json()) == plan
    assert_parity(model, args, plan=lower(segmented, plan), capture="direct", steps=2)
    plain = solve(segmented, **pins)
    assert plain.tensor is None and "tensor degree" not in plain.optimality
    with pytest.raises(ValueError, match="pin a mesh such as"):
        solve(segmented, cluster=FAR, placement={"*.up.weight": {"tp": Shard(0)}}, **pins)


def test_a_tensor_degree_is_named_where_nothing_fits() -> None:
    segmented = made("mlp")[2]
    pins: dict[str, Any] = {"devices": 2, "recompute": False, "placement": "ddp", "microbatches": 1}
    least = solve(segmented, mesh={"tp": 2}, objective="memory", **pins).prediction.peak
    tight = {**pins, "memory": least * 3 // 2}
    with pytest.raises(PlanInfeasible, match=r"It fits with: .*mesh=\{'pp': 1, 'dp': 1, 'tp': 2\}"):
        solve(segmented, mesh={"dp": 2}, **tight)
    assert solve(segmented, mesh={"pp": 1, "dp": 1, "tp": 2}, **tight).tensor is not None


def test_a_front_finds_the_placements_of_a_degree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = made("mlp")
    asked: list[int] = []
    placements = tensor.placements

    def counted(segmented: Any, insides: Any, **more: Any) -> Any:
        asked.extend(inside.degree for inside in insides)
        return placements(segmented, insides, **more)

    monkeypatch.setattr(tensor, "placements", counted)
    plans = autopart.pareto(model, args, n=3, devices=2, cluster=CHEAP, capture="direct")
    assert asked == [2] and any(plan.mesh.degree("tp") > 1 for plan in plans)


def test_degrees_stay_inside_a_node() -> None:
    segmented = made("gpt")[2]
    for nodes, per_node, devices, wanted in (
        (2, 4, 8, [2, 4]),
        (2, 6, 12, [2, 3, 6]),
        (4, 1, 4, []),
        (1, 8, 4, [2, 4]),
    ):
        cluster = Cluster.preset("a100-80", nodes=nodes, per_node=per_node)
        found = tensor.degrees(segmented, 16, {"cluster": cluster, "devices": devices})
        assert list(found) == [(("tp", degree),) for degree in wanted]
    mixed = Cluster.preset("a100-80", per_node=8).joined(Cluster.preset("t4", per_node=4), Link(1e9))
    assert list(tensor.degrees(segmented, 16, {"cluster": mixed})) == [(("tp", 2),), (("tp", 4),)]
    with pytest.raises(TypeError, match="devices: expected a whole number"):
        compiler.solve(segmented, devices="2")  # type: ignore[arg-type]


def test_links_of_an_axis_are_those_between_its_ranks() -> None:
    """Counted out: the ranks of each group that share a node."""
    cluster = Cluster.preset("h100-80", nodes=4, per_node=8)
    group = cluster.groups[0]
    for sizes in ({"pp": 2, "dp": 16}, {"dp": 4, "tp": 8}, {"pp": 4, "dp": 4, "tp": 2}, {"dp": 8, "pp": 4}, {"dp": 32}):
        mesh = Mesh.of(sizes)
        for axis, size in sizes.items():
            groups = {mesh.group(rank, axis) for rank in range(mesh.size)}
            nodes = [[rank // 8 for rank in ranks] for ranks in groups]
            found = linked(cluster, mesh, axis).link_bandwidth
            if all(len(set(each)) == 1 for each in nodes):
                assert found == group.inside.bandwidth
            else:
                abreast = min(each.count(node) for each in nodes for node in set(each))
                assert size > 1 and found == min(group.inside.bandwidth, abreast * group.between.bandwidth)


@pytest.mark.soak
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
def test_every_placement_that_comes_into_question_trains_as_one_device(name: str, degree: int) -> None:
    model, args, segmented = made(name)
    find = tensor.degrees(segmented, segmented.captured.batch, {"cluster": NEAR, "devices": 4})[("tp", degree),]
    plan = solve(segmented, mesh={"dp": 4 // degree, "tp": degree}, cluster=NEAR, microbatches=1)
    found = [placed for placed, _, _ in find()]
    assert len(found) > 1
    for placed in found:
        assert_parity(model, args, plan=lower(segmented, replace(plan, tensor=placed)), capture="direct", steps=2)


def test_experts_and_long_sequences_have_axes_of_their_own() -> None:
    """Experts beside tp; the sequence where there are fewer samples than devices."""
    cluster = Cluster.preset("a100-80", per_node=4)
    dense, mixture = made("gpt")[2], axis_models.made("dense")[2]
    tp = [(("tp", 2),), (("tp", 4),)]
    both = (("ep", 2), ("tp", 2))
    assert list(tensor.degrees(dense, 16, {"cluster": cluster})) == tp
    assert list(tensor.degrees(mixture, 16, {"cluster": cluster})) == [*tp, both]
    cp = [(("cp", 2),), (("cp", 4),), (("cp", 2), ("tp", 2))]
    assert list(tensor.degrees(dense, 2, {"cluster": cluster})) == [*tp, *cp]


class Product(nn.Module):
    """An expert's product and nothing else; without experts it is one with a matrix."""

    def __init__(self, experts: int, equation: str) -> None:
        super().__init__()
        shape = (experts, 6, 4) if experts else (6, 4)
        self.weight, self.equation = nn.Parameter(torch.randn(shape)), equation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, x, self.weight).square().mean()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("experts", "equation", "wanted"),
    [(0, "bsd,df->bsf", False), (3, "bsed,edf->ebsf", True), (3, "bsed,edf->fbse", True)],
)
def test_experts_are_found_through_copies_and_a_matrix_is_none(
    experts: int, equation: str, wanted: bool, autocast: bool
) -> None:
    model = Product(experts, equation)
    x = torch.randn(2, 5, experts, 6) if experts else torch.randn(2, 5, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        captured = captured_step(model, read(model, (x,), {}), None, False, "direct")
    assert has_experts(captured) == wanted


@pytest.mark.parametrize(("name", "samples"), [("gpt", 1), pytest.param("dense", 4, marks=pytest.mark.soak)])
def test_a_free_mesh_is_no_worse_than_any_with_cp_or_ep(name: str, samples: int) -> None:
    """And what is chosen trains as one device does."""
    model, args, _ = axis_models.made(name)
    args = tuple(each[:1].expand(samples, -1).contiguous() for each in args)
    found = segment(captured_step(model, read(model, args, {}), None, False, "direct"))
    pins: dict[str, Any] = {"cluster": CHEAP, "devices": 4, "schedule": "1f1b"}
    free = solve(found, **pins)
    for mesh in ({"cp": 4}, {"cp": 2, "tp": 2}, {"tp": 4}) if samples < 4 else ({"ep": 2, "tp": 2}, {"tp": 4}):
        assert free.prediction.step_seconds <= solve(found, mesh=mesh, **pins).prediction.step_seconds * (1 + 1e-9)
    assert_parity(model, args, plan=free)


DEAR = Cluster.uniform(4, 2**40, 1e9, 1e12, 1e8, 1e-9)
"""Products take long, and each byte that is sent takes longer still: what counts is what each axis has to exchange."""


def long_sequence() -> nn.Module:
    """Two heads for four places, and a sequence that is long beside the width."""
    return GPT(Config(layers=1, width=8, heads=2, context=64, vocabulary=24))


def few_experts(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Two experts for four places."""
    monkeypatch.setattr(axis_models, "EXPERTS", 2)
    return axis_models.Mixture(axis_models.Dense)


@pytest.mark.soak
@pytest.mark.parametrize(("axis", "length"), [("cp", 64), ("ep", 16)])
def test_a_free_mesh_has_cp_or_ep_beside_tp_where_that_is_fastest(
    axis: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One axis cuts each tensor along one dim; heads and experts are too few for all places, so two axes do better."""
    torch.manual_seed(0)
    model = (long_sequence() if axis == "cp" else few_experts(monkeypatch)).double()
    ids = torch.randint(24, (1, length))
    args = ids, ids.roll(-1, 1)
    found = segment(captured_step(model, read(model, args, {}), None, False, "direct"))
    pins: dict[str, Any] = {"cluster": DEAR, "devices": 4, "schedule": "1f1b"}
    free = solve(found, **pins)
    assert (
        free.mesh.inside == {"tp": 2, axis: 2} and f"on {'cp' if axis == 'cp' else 'cp and ep'} too" in free.optimality
    )
    told = {each.choice: each for each in free.alternatives}["mesh"]
    assert told.option.startswith("pp=1 x dp=1 x tp=4 ") and told.step_seconds is not None
    every = [{"pp": 1, "dp": 1, axis: 2, "tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}]
    steps = [solve(found, mesh=mesh, **pins).prediction.step_seconds for mesh in every]
    assert free.prediction.step_seconds <= min(steps) * (1 + 1e-9)
    assert told.step_seconds <= steps[1] * (1 + 1e-9)
    assert_parity(model, args, plan=free)
