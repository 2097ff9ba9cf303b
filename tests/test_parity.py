"""Training under a plan equals training on one device: losses, raw gradients, norms, parameters after three steps.

The local world takes a seeded sample of all combinations (`--soak`: all of them); a fixed set runs on gloo processes.
"""

from __future__ import annotations

import copy
import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch

from autopart.api import parallelize
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.ir.mesh import Mesh
from autopart.ir.placement import PRESETS
from autopart.ir.program import Program
from autopart.passes.segment import segment
from autopart.testing import assert_parity
from autopart.testing.parity import compare, train
from tests.launch import launch
from tests.models import MODELS
from tests.test_several_stages import V

MESHES = ({"pp": 2}, {"pp": 3}, {"pp": 4}, {"dp": 2}, {"dp": 3}, {"dp": 4}, {"pp": 2, "dp": 2})
SCHEDULES = ("gpipe", "1f1b")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
# Without a dp axis every placement is the same program.
ROWS = [
    row
    for row in itertools.product(MODELS, MESHES, PRESETS, SCHEDULES, OPTIMIZERS)
    if "dp" in row[1] or row[2] == "ddp"
]
SAMPLE = set(random.Random(7).sample(range(len(ROWS)), 40))


def row_id(row: tuple[Any, ...]) -> str:
    model, mesh, placement, schedule, optimizer = row
    return "-".join([model, "x".join(f"{k}{v}" for k, v in mesh.items()), placement, schedule, optimizer])


@cache
def segmented_model(name: str, stages: int) -> Any:
    model, args, kwargs = MODELS[name]()
    captured = captured_step(model, read(model, args, kwargs), None, False, "direct")
    # A model of few layers needs its blocks opened up to make four stages.
    return segment(captured), captured.batch


def program_for(name: str, mesh: dict[str, int], placement: str, schedule: str) -> Program:
    segmented, batch = segmented_model(name, mesh.get("pp", 1))
    microbatches = min(3, batch // mesh.get("dp", 1))
    plan = solve(
        segmented,
        devices=Mesh.of(mesh).size,
        mesh=mesh,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
    )
    return lower(segmented, plan)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row_id(row), marks=[] if i in SAMPLE else [pytest.mark.soak]) for i, row in enumerate(ROWS)],
)
def test_local_world(row: tuple[Any, ...]) -> None:
    name, mesh, placement, schedule, optimizer = row
    model, args, kwargs = MODELS[name]()
    program = program_for(name, mesh, placement, schedule)
    assert_parity(model, args, kwargs, plan=program, optimizer=OPTIMIZERS[optimizer])


def trains_alike(name: str, pins: dict[str, Any], optimizer: str, capture: str) -> None:
    """On one process of a group: train parallelised and plain, and compare."""
    model, args, kwargs = MODELS[name]()
    plain = copy.deepcopy(model)
    expected = train(plain, lambda step: (args, kwargs), 3, OPTIMIZERS[optimizer], 0.5)
    parallel = parallelize(model, capture=capture, **pins)
    found = train(parallel, lambda step: (args, kwargs), 3, OPTIMIZERS[optimizer], 0.5)
    tolerance = 1e-6 if name in ("gpt2", "llama") else 1e-9
    compare(found, expected, tolerance, f"{name} {pins}")
    report = parallel.report()
    assert report.bytes_sent == report.predicted_bytes, (name, pins, report.bytes_sent, report.predicted_bytes)
    parallel.eval(), plain.eval()
    with torch.no_grad():
        outputs = [model(*args, **kwargs) for model in (parallel, plain)]
    losses = [out if isinstance(out, torch.Tensor) else out["loss"] for out in outputs]
    assert torch.allclose(losses[0], losses[1], rtol=tolerance)


def gloo_cases(cases: list[tuple[Any, ...]]) -> int:
    torch.set_num_threads(1)
    for case in cases:
        trains_alike(*case)
    return len(cases)


TWO = [
    ("mlp", {"mesh": {"pp": 2}, "schedule": "gpipe", "microbatches": 3}, "adamw", "compile"),
    ("gpt", {"mesh": {"pp": 2}, "schedule": V}, "adamw", "direct"),
    ("gpt", {"mesh": {"dp": 2}, "placement": "zero1", "microbatches": 2}, "sgd", "direct"),
    ("half_frozen", {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 2}, "adamw", "compile"),
    ("mlp", {"mesh": {"dp": 2}, "placement": "zero2"}, "adamw", "direct"),
]
FOUR = [
    ("gpt", {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}, "adamw", "direct"),
    ("mlp", {"mesh": {"pp": 4}, "schedule": "zb-h1", "microbatches": 5}, "adamw", "direct"),
]
SOAK_TWO = [
    ("mlp", {"mesh": {"pp": 2}, "schedule": "zb-h1", "microbatches": 4}, "sgd", "direct"),
    ("gpt2", {"mesh": {"dp": 2}, "placement": "zero2"}, "adamw", "direct"),
    ("llama", {"mesh": {"pp": 2}, "microbatches": 2}, "sgd", "direct"),
]
SOAK_FOUR = [
    ("gpt", {"mesh": {"pp": 4}, "microbatches": 5}, "sgd", "direct"),
    ("half_frozen", {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1", "microbatches": 3}, "adamw", "direct"),
    ("llama", {"mesh": {"dp": 4}, "placement": "ddp"}, "adamw", "direct"),
    ("gpt", {"mesh": {"pp": 4}, "schedule": "zb-v", "microbatches": 4}, "sgd", "direct"),
]


@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, TWO), (4, FOUR), *(pytest.param(*row, marks=pytest.mark.soak) for row in ((2, SOAK_TWO), (4, SOAK_FOUR)))],
    ids=["2 ranks", "4 ranks", "2 ranks, more", "4 ranks, more"],
)
@pytest.mark.timeout(400)
def test_gloo_processes(count: int, cases: list[tuple[Any, ...]]) -> None:
    result = launch(gloo_cases, count, args=(cases,), timeout=360, fresh=True)
    assert result.values == (len(cases),) * count
