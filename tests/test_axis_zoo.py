"""Ordinary models on the axes inside segments: they train as on one device, and what is known to be good is found.

Each model runs on each mesh of `MESHES` under `--soak`; without it a few rows do, and a fixed set in gloo processes.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch

import autopart
from autopart.cluster import Cluster
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.program import Program
from autopart.testing import assert_parity
from autopart.testing.parity import adamw, compare, train
from tests.axis_models import NEAR
from tests.axis_zoo import AXIS_ZOO, COUPLED, alexnet, dlrm, spatio_temporal
from tests.launch import launch
from tests.tensor_axis import CHEAP
from tests.zoo import Specimen

MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"mesh": {"tp": 2}},
    "tp4": {"mesh": {"tp": 4}},
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}, "placement": "zero1"},
    "pp2 tp2": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
    "pp2 dp2 tp2": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "placement": "fsdp", "microbatches": 2},
    "cp2": {"mesh": {"cp": 2}},
    "cp4": {"mesh": {"cp": 4}},
    "ep2": {"mesh": {"ep": 2}},
    "dp2 ep2": {"mesh": {"dp": 2, "ep": 2}, "placement": "fsdp"},
}
QUICK = {
    ("alexnet", "tp2"),
    ("clip", "tp2"),
    ("resnet", "pp2 dp2 tp2"),
    ("dlrm", "dp2 ep2"),
    ("dlrm-bags", "pp2 dp2 tp2"),
}
ROWS = [
    pytest.param(*row, id="-".join(row), marks=[] if row in QUICK else [pytest.mark.soak])
    for row in itertools.product(AXIS_ZOO, MESHES)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_trains_as_on_one_device(name: str, mesh: str) -> None:
    found, pins = AXIS_ZOO[name](), dict(MESHES[mesh])
    if name in COUPLED:
        pins["microbatches"] = 1
    kinds: dict[str, Any] = {"batch": found.batch, "capture": found.capture}
    cluster = NEAR if mesh in ("tp2", "ep2") else CHEAP  # of splits that are equally good near ones leave samples apart
    assert_parity(found.model, found.args, found.kwargs, cluster=cluster, tolerance=1e-9, **kinds, **pins)


GLOO = {
    "alexnet": {"tp": 2},
    "spatio-temporal": {"cp": 2},
    "dlrm": {"ep": 2},
    "clip": {"dp": 2},
    "batch-norm": {"dp": 2},
}
LATER = ["spatio-temporal", "clip", "batch-norm"]


def on_gloo(names: list[str]) -> int:
    """One rank's part of the comparisons, in its own process."""
    for name in names:
        mesh = GLOO[name]
        found = AXIS_ZOO[name]()
        mine = autopart.parallelize(copy.deepcopy(found.model), mesh=mesh, cluster=NEAR, capture="direct")
        batch = found.args, dict(found.kwargs)
        one, many = (train(m, lambda step, batch=batch: batch, 3, adamw, 0.5) for m in (found.model, mine))
        compare(many, one, 1e-9, name)
        assert mine.report().bytes_sent == mine.report().predicted_bytes
    return len(names)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("names", [["alexnet", "dlrm"], pytest.param(LATER, marks=pytest.mark.soak)])
def test_gloo_processes(names: list[str]) -> None:
    assert launch(on_gloo, 2, [names], timeout=180).values == (len(names),) * 2


# ---- what is found ---------------------------------------------------------------------------------------------------


def program(found: Specimen, mesh: dict[str, int], cluster: Cluster) -> Program:
    plan = autopart.plan(found.model, found.args, mesh=mesh, cluster=cluster, capture="direct")
    return autopart.compile(found.model, plan, found.args, capture="direct")


def parameters(found: Program) -> dict[str, TensorPlacement]:
    assert found.plan.tensor is not None
    return dict(found.plan.tensor.parameters)


def test_convolutions_by_samples_and_wide_layers_by_features() -> None:
    """The one weird trick of Krizhevsky (arXiv 1404.5997), on one axis."""
    made = program(alexnet(), {"tp": 2}, NEAR)
    how, text = parameters(made), made.ranks[1].source
    assert {how[f"features.{i}.{name}"] for i in (0, 3) for name in ("weight", "bias")} == {Replicate()}
    assert {how[f"wide.{i}.{name}"] for i in (0, 2) for name in ("weight", "bias")} == {Shard(0)}
    assert "images_part = aten.slice.Tensor(images, 0, b // 2, b)" in text
    assert "max_pool2d_with_indices: Shard(0) -> Replicate() on tp" in text
    assert re.search(r"dx: Partial\(sum\) -> Shard\(0\) on tp\n.*pieces=\[b // 2, b // 2\]", text)


def test_whole_tables_on_different_ranks_and_the_rest_by_samples() -> None:
    """What each rank looked up goes to the ranks of the samples in an all-to-all, and its gradient back."""
    made = program(dlrm(width=6, samples=256), {"tp": 4}, NEAR)
    how, text = parameters(made), made.ranks[0].source
    assert how.pop("tables.weight") == Shard(0)
    assert set(how.values()) == {Replicate()}
    assert re.findall(r"world\.(?!all_reduce)(\w+)_values", text) == ["all_to_all"] * 2
    assert text.count("Shard(1) -> Shard(0) on tp") == 2
    shapes = [p.shape for unit in made.state_on(3).units for p in unit.parameters if p.target == "tables.weight"]
    assert shapes == [(1, 64, 6)]


def test_the_split_dim_changes_between_space_and_time() -> None:
    """Frames are on different ranks while patches attend to each other, then patches, with an all-to-all between."""
    found = spatio_temporal(layers=1)
    made = program(found, {"cp": 2}, CHEAP)
    text = made.ranks[0].source
    assert re.findall(r"world\.(?!all_reduce)(\w+)_values", text) == ["all_to_all"] * 2
    changes = re.findall(r": (Shard\(\d\) -> Shard\(\d\)) on cp", text)
    assert len(changes) == 2 and set(changes) <= {"Shard(1) -> Shard(2)", "Shard(2) -> Shard(1)"}
    assert_parity(found.model, found.args, plan=made)


LAYERED = [
    "llama",
    *(pytest.param(n, marks=pytest.mark.soak) for n in ("gpt2", "bert", "t5", "vit", "mixtral")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERED)
def test_layers_as_libraries_write_them_are_not_too_entangled_to_be_split(name: str) -> None:
    """On four places, which do not divide the samples: most operators of every layer run on parts of what they read."""
    found = AXIS_ZOO[name]()
    kinds: dict[str, Any] = {"cluster": CHEAP, "capture": "direct"}
    plan = autopart.plan(found.model, (), found.kwargs, mesh={"tp": 4}, **kinds)
    assert plan.tensor is not None
    layers = [choice.forward.strategies for choice in plan.tensor.choices if len(choice.forward.strategies) > 30]
    assert layers
    for strategies in layers:
        assert sum(strategy.cut is not None for strategy in strategies) > len(strategies) / 2
    if name == "mixtral":
        how = dict(plan.tensor.parameters)["model.model.layers.0.mlp.experts.gate_up_proj"]
        assert how == Shard(1, 2)
    assert_parity(found.model, (), found.kwargs, plan=plan, tolerance=1e-9, steps=2)


# ---- samples that do not divide --------------------------------------------------------------------------------------


def test_a_call_whose_samples_the_axis_does_not_divide_has_a_program_of_its_own() -> None:
    """In training and in evaluation, around the parameters as they lie; and back again."""
    found = alexnet()
    images, labels = found.args
    plain = found.model
    mine = autopart.parallelize(copy.deepcopy(plain), mesh={"tp": 2}, cluster=NEAR, capture="direct")
    for samples in (6, 5, 4, 1):
        mine(images[:samples], labels[:samples]).backward()
        expected = torch.autograd.grad(plain(images[:samples], labels[:samples]), list(plain.parameters()))
        for parameter, gradient in zip(mine.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
        mine.zero_grad()
        with torch.no_grad():
            assert torch.allclose(mine(images[:samples], labels[:samples]), plain(images[:samples], labels[:samples]))
    assert mine.plan.tensor.multiple == 2
    assert len(mine._autopart.programs) == 4  # with and without samples split, in training and in evaluation


def test_a_sequence_axis_and_batches_of_unknown_size_leave_samples_together() -> None:
    found = alexnet()
    for pins in ({"mesh": {"cp": 2}}, {"mesh": {"tp": 4}}, {"mesh": {"dp": 2, "tp": 2}}):
        plan = autopart.plan(found.model, found.args, cluster=NEAR, capture="direct", **pins)
        assert plan.tensor is not None and plan.tensor.multiple == 1
