"""Ranks of several stages train as one device does: loops, Vs and waves of stages, by name and by a table."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart import schedules
from autopart.api.compiler import captured_step, lower, planned
from autopart.capture import read
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Stage
from autopart.ir.program import Program
from autopart.passes.schedule import forwards_first
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import assert_close
from tests.models import MLP, MODELS

V = """0F0,0F1,3F0,3B0,0F2,3F1,3B1,3F2,0B0,3B2,0B1,0B2
1F0,2F0,1F1,2F1,2B0,1F2,1B0,2F2,2B1,1B1,2B2,1B2"""
"""Two stages a rank on a V, as a table of one's own: 1F1B on each rank, both stages by turns."""


class Mixed(nn.Module):
    """Ten layers: tied ends, two long skips, dropout, a frozen layer; the loss counts valid targets only."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 6)
        self.h = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 5, bias=False)
        self.head.weight = self.wte.weight
        self.h[3].requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = first = self.wte(ids)
        for i, layer in enumerate(self.h):
            x = torch.tanh(layer(x))
            x = self.drop(x) if i % 3 == 0 else x
            x = x + first if i in (4, 7) else x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)


class Ends(nn.Module):
    """The first layer and the input's path are frozen, so early stages have no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        for layer in self.h[:3]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def sample(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module by name, and a batch of 7."""
    torch.manual_seed(0)
    if name == "mixed":
        ids = torch.randint(1, 5, (7, 3))
        return Mixed().double(), (ids, ids.flip(1) * (torch.rand(7, 3) > 0.3))
    if name == "ends":
        return Ends().double(), (torch.randn(7, 6).double(), torch.randn(7, 6).double())
    if name == "mlp":
        return MLP().double(), (torch.randn(7, 8).double(), torch.randn(7, 3).double())
    model, args, _ = MODELS[name]()
    return model, args


@cache
def captured(name: str) -> Captured:
    model, args = sample(name)
    return captured_step(model, read(model, args, {}), None, False, "direct")


ROWS = [
    ("mixed", {"pp": 2}, "ddp", "gpipe", 3),
    ("mixed", {"pp": 2}, "ddp", "interleaved", 4),
    ("mixed", {"pp": 4}, "ddp", "interleaved", 5),
    ("mixed", {"pp": 2}, "ddp", "bfs(chunks=4)", 3),
    ("mixed", {"pp": 4}, "ddp", "bfs", 3),
    ("mixed", {"pp": 4}, "ddp", "v1f1b", 5),
    ("mixed", {"pp": 2}, "ddp", "hanayo(waves=2)", 2),
    ("mixed", {"pp": 4}, "ddp", "hanayo", 4),
    ("mixed", {"pp": 2, "dp": 2}, "zero1", V, 3),
    ("mixed", {"pp": 2, "dp": 2}, "fsdp", "interleaved(chunks=3)", 2),
    ("mixed", {"pp": 1, "dp": 2}, "ddp", "bfs(chunks=4)", 2),
    ("ends", {"pp": 2}, "ddp", "v1f1b", 3),
    ("ends", {"pp": 2, "dp": 2}, "zero2", "interleaved", 3),
]
SOAK = [
    (name, mesh, placement, schedule, microbatches)
    for name in ("gpt", "mixed", "ends")
    for mesh, placement in (({"pp": 2}, "ddp"), ({"pp": 3}, "ddp"), ({"pp": 2, "dp": 2}, "zero2"))
    for schedule in ("interleaved", "bfs", "v1f1b", "hanayo")
    for microbatches in (1, 3)
]


def program(
    name: str, mesh: dict[str, int], placement: str, schedule: str, microbatches: int, **settings: Any
) -> Program:
    pins: dict[str, Any] = {"mesh": mesh, "devices": Mesh.of(mesh).size, "placement": placement}
    plan = planned(captured(name), schedule=schedule, microbatches=microbatches, **pins)
    return lower(segment(captured(name), cuts=plan.cuts), replace(plan, **settings))


@pytest.mark.parametrize(
    "row",
    [*ROWS, *(pytest.param(row, marks=pytest.mark.soak) for row in SOAK)],
    ids=lambda row: "-".join(map(str, row)).partition("\n")[0],
)
def test_trains_as_one_device(row: tuple[str, dict[str, int], str, str, int]) -> None:
    made = program(*row)
    places = made.plan.place
    assert len(set(places)) == row[1]["pp"] and (len(places) > row[1]["pp"] or row[3] == "gpipe")
    assert_parity(*sample(row[0]), plan=made, steps=2)


@pytest.mark.parametrize(
    "schedule", ["interleaved", V, schedules.build("v1f1b", ranks=2, microbatches=3)], ids=["name", "table", "built"]
)
def test_a_schedule_is_a_name_a_table_or_an_object(schedule: Any) -> None:
    """In one call all ranks share the module; bytes and peaks are as predicted; evaluation goes through all stages."""
    (plain, args), mesh = sample("mlp"), {"pp": 2, "dp": 2}
    model = autopart.parallelize(copy.deepcopy(plain), mesh=mesh, schedule=schedule, capture="direct", microbatches=3)
    for each in (model, plain):
        each(*args).backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    assert_close({name: p.grad for name, p in model.named_parameters()}, grads, 1e-9, "gradient of")
    for rank in model.report().ranks:
        assert rank.bytes_sent == rank.predicted_bytes
        # the plan is for the rank with the most samples and the largest parts
        assert rank.peak_activations <= rank.predicted_activations and rank.peak_memory <= rank.predicted_memory
    assert model.report().ranks[0].peak_activations == model.report().ranks[0].predicted_activations
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*args), plain(*args), rtol=1e-12, atol=0)
        torch.testing.assert_close(model(*(t[:2] for t in args)), plain(*(t[:2] for t in args)), rtol=1e-12, atol=0)


def test_a_plan_with_a_table_is_read_back(tmp_path: Path) -> None:
    model, args = sample("mlp")
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "capture": "direct"}
    plan = autopart.plan(model, args, schedule=V, **pins)
    assert plan.schedule == V and plan.microbatches == 3 and plan.place == (0, 1, 1, 0)
    plan.save(tmp_path / "plan.json")
    again = autopart.Plan.load(tmp_path / "plan.json")
    assert again == plan
    text = plan.summary()
    assert "schedule by a table of 2 rows, 3 microbatches" in text and "with stage 0" in text
    other = autopart.plan(model, args, schedule="interleaved(chunks=2)", microbatches=3, **pins)
    changes = plan.diff(other)
    assert "schedule: 0F0,0F1,3F0" in changes and "stage 2 ranks: 1 -> 0" in changes
    assert re.search(r"optimal: no plan has .* all splits of 5 segments under a table of 2 rows", plan.optimality)
    assert "ranks of stages" in plan.explain()
    made = autopart.compile(model, plan, args, capture="direct")
    assert autopart.simulate(made).peak_activations == (2.0, 2.0)
    assert autopart.Program.read(made.write(tmp_path / "made")).state == made.state
    assert [graphs.backward is not None for graphs in made.stages] == [True] * 4


class Net(nn.Module):
    """Norms over the batch and a count of the forwards; without targets it returns its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(4))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        for lin, norm in zip(self.lin, self.norm, strict=True):
            x = torch.tanh(norm(lin(x)))
        return x if y is None else (x - y).square().mean()


def net() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return Net().double(), (torch.randn(13, 4).double(), torch.randn(13, 4).double())


@pytest.mark.parametrize(("mesh", "schedule"), [({"pp": 2, "dp": 2}, "interleaved"), ({"pp": 1, "dp": 2}, "bfs")])
def test_updated_buffers(mesh: dict[str, int], schedule: str) -> None:
    model, args = net()
    pins: dict[str, Any] = {"mesh": mesh, "devices": 2 * mesh["pp"], "schedule": schedule, "microbatches": 3}
    assert_parity(model, args, steps=2, semantics="accumulate", **pins)


def test_without_a_loss() -> None:
    plain, args = sample("mlp")
    layers = nn.Sequential(*plain.layers, plain.out).double()  # type: ignore[arg-type,misc]
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 3, "capture": "direct", "schedule": "bfs"}
    model = autopart.parallelize(copy.deepcopy(layers), **pins)
    for each in (model, layers):
        F.mse_loss(each(args[0]), args[1]).backward()
    assert model.plan.place == (0, 1, 0, 1)
    grads = {name: p.grad for name, p in layers.named_parameters()}
    assert_close({name: p.grad for name, p in model.named_parameters()}, grads, 1e-9, "gradient of")


def test_a_plan_with_all_forwards_first() -> None:
    """Where a plan was made for steps with a loss, a step without one keeps its stages."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    step = captured_step(layers, read(layers, (torch.randn(6, 4),), {}), None, False, "direct")
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "microbatches": 3}
    plan = planned(step, schedule="bfs", **pins)
    assert forwards_first(plan) == plan
    stages = (Stage(stage.segments, (at,)) for stage, at in zip(plan.stages, (0, 1, 1, 0), strict=True))
    turned = replace(plan, stages=tuple(stages), schedule=V)
    assert verify(lower(segment(step, cuts=turned.cuts), forwards_first(turned), check=False))
    with pytest.raises(ValueError, match="begins backwards before all forwards are done"):
        lower(segment(step, cuts=turned.cuts), turned)


def test_a_checkpoint_goes_to_other_stages(tmp_path: Path) -> None:
    def trained(rank: int, schedule: str, first: int, last: int) -> Any:
        model, args = sample("mlp")
        pins: dict[str, Any] = {"mesh": {"pp": 2}, "schedule": schedule, "microbatches": 3, "capture": "direct"}
        model = autopart.parallelize(model, **pins)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if first:
            autopart.load(tmp_path, model, optimizer)
        for _ in range(first, last):
            optimizer.zero_grad()
            model(*args).backward()
            optimizer.step()
        if not first:
            autopart.save(tmp_path, model, optimizer)
        return model.full_state_dict()

    straight = LocalWorld(2).run(trained, "1f1b", 0, 4)[0]
    LocalWorld(2).run(trained, "v1f1b", 0, 2)
    for found in LocalWorld(2).run(trained, "interleaved", 2, 4):
        assert_close(found, straight, 1e-9, "parameter")


BAD = [
    ({"schedule": "1f2b"}, ValueError, "schedule: '1f2b' is not known, did you mean '1f1b'. one of gpipe, 1f1b, "),
    ({"schedule": "bfs(waves=2)"}, ValueError, "schedule: 'bfs' has no option 'waves'; its options are chunks"),
    ({"schedule": 3}, TypeError, "schedule: expected a name such as '1f1b', a Schedule .* or a CSV of actions, not 3"),
    ({"schedule": V, "microbatches": 4}, ValueError, "microbatches: 4 contradict the schedule, which is for 3"),
    ({"schedule": V, "mesh": {"pp": 1}, "devices": 1}, ValueError, "schedule: it is for 2 pipeline ranks, .* pp=1"),
    ({"schedule": V.replace("3B0,", "")}, ValueError, "schedule 'custom': rank 0: 3B0 is missing"),
    ({"schedule": V.replace("3B0", "3X0")}, ValueError, "schedule: line 1, cell 4: not an action: '3X0'"),
    (
        {"stages": 3},
        ValueError,
        r"stages: 3 stages contradict the mesh of pp=2 \(pp=2\), on which the schedule has 4; pin 4",
    ),
    ({"stages": 4, "schedule": None}, ValueError, r"the schedule has 2; pin 2, .* such as 'interleaved\(chunks=2\)'"),
    ({"stages": 3, "mesh": None}, ValueError, "stages: interleaved on 2 devices has 2 or 4 stages, not 3"),
    ({"schedule": "bfs(chunks=3)"}, ValueError, "schedule: 6 stages need 6 segments, .* has 5: .* fewer .* than bfs"),
    ({"schedule": "hanayo(waves=0)"}, ValueError, "schedule 'hanayo': waves must be at least 1, not 0"),
]


@pytest.mark.parametrize(("pins", "error", "message"), BAD)
def test_what_cannot_be_is_refused(pins: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "schedule": "interleaved", **pins}
    with pytest.raises(error, match=message):
        planned(captured("mlp"), **given)


def test_a_table_that_ends_backwards_early_is_refused_without_a_loss() -> None:
    model, args = sample("mlp")
    layers = autopart.parallelize(nn.Sequential(*model.layers), mesh={"pp": 2}, schedule=V, capture="direct")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="begins backwards before all forwards are done"):
        layers(args[0])
    layers = autopart.parallelize(
        nn.Sequential(*model.layers), mesh={"pp": 2}, schedule="gis(group=6)", capture="direct"
    )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule 'gis': group must be at most 2, the number of ranks, not 6"):
        layers(args[0])


def test_pinned_cuts_and_memory() -> None:
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "schedule": "interleaved", "microbatches": 4}
    cuts = ("h.0", "h.5", "head")
    plan = planned(captured("mixed"), stages=cuts, **pins)
    assert plan.cuts == cuts and plan.place == (0, 1, 0, 1)
    free = planned(captured("mixed"), **pins)
    with pytest.raises(autopart.PlanInfeasible, match=r"the rank of stages \d and \d \(.*\) needs at .*fits with"):
        planned(captured("mixed"), memory=free.prediction.memory[1].total // 2, recompute=False, **pins)
