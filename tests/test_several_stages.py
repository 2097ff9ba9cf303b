"""Ranks of several stages train as one device does: loops, Vs and waves of stages, by name and by hand-written tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopart
from autopart import schedules
from autopart.ir.action import Schedule
from autopart.testing import assert_parity
from tests.models import MODELS
from tests.random_models import RANDOM_MODELS
from tests.tables import listed, zigzag

V = listed(zigzag(2, 2), 4, 3)
WAVE = listed(zigzag(2, 4), 2, 2)

ROWS = [
    ("gpt", {"pp": 2}, "ddp", "interleaved", 4),
    ("gpt", {"pp": 4}, "ddp", "interleaved", 5),
    ("gpt", {"pp": 2, "dp": 2}, "fsdp", "interleaved(chunks=3)", 2),
    ("gpt", {"pp": 2}, "ddp", "bfs", 3),
    ("gpt", {"pp": 2, "dp": 2}, "zero1", V, 4),
    ("gpt", {"pp": 4}, "ddp", listed(zigzag(4, 2), 4, 4), 4),
    ("gpt", {"pp": 2}, "ddp", WAVE, 2),
    ("half_frozen", {"pp": 2}, "ddp", "interleaved", 3),
    ("half_frozen", {"pp": 2}, "ddp", listed(zigzag(2, 2), 4, 3), 4),
    ("mlp", {"pp": 2}, "ddp", "bfs", 4),
    ("mlp", {"dp": 2}, "zero2", "bfs(chunks=3)", 2),
    ("dropping", {"pp": 2}, "ddp", V, 4),
    ("checkpointed", {"pp": 2}, "ddp", "interleaved", 3),
]


def sample(name: str) -> tuple[Any, Any, Any]:
    return MODELS[name]() if name in MODELS else (*RANDOM_MODELS[name](), {})


@pytest.mark.parametrize(("name", "mesh", "placement", "schedule", "microbatches"), ROWS, ids=lambda x: getattr(x, "name", str(x)))
def test_trains_as_one_device(
    name: str, mesh: dict[str, int], placement: str, schedule: str | Schedule, microbatches: int
) -> None:
    model, args, kwargs = sample(name)
    pins = {"mesh": mesh, "devices": 4 if len(mesh) > 1 else next(iter(mesh.values())), "placement": placement}
    capture = "compile" if name == "checkpointed" else "direct"
    assert_parity(model, args, kwargs, schedule=schedule, microbatches=microbatches, capture=capture, **pins)
