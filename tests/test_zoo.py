"""Ordinary models train under a plan as on one device: losses, raw gradients, norms, parameters.

Each model runs in one world of `MESHES`, in turn, and of the variants with dropout or BatchNorm a seeded sample does;
`--soak` has all of them.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import autopart
from autopart.testing import assert_parity
from autopart.testing.parity import compare, train
from tests.launch import launch
from tests.zoo import SAMPLES, VARIANTS, ZOO, Specimen

MESHES: dict[str, dict[str, Any]] = {
    "pp2 ragged": {"mesh": {"pp": 2}, "microbatches": 4},
    "dp2 fsdp": {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 2},
    "pp2 dp2 zero1": {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1", "microbatches": 3},
}
TURNS = {name: list(MESHES)[i % len(MESHES)] for i, name in enumerate(ZOO)}
del TURNS["transformer"]  # its turn is the test of F022
ROWS = [
    pytest.param(name, mesh, id=f"{name}-{mesh}", marks=[] if TURNS.get(name) == mesh else [pytest.mark.soak])
    for name, mesh in itertools.product(ZOO, MESHES)
]
SAMPLED = set(random.Random(242).sample(list(itertools.product(VARIANTS, MESHES)), 2))
ROWS += [
    pytest.param(*row, id="-".join(row), marks=[] if row in SAMPLED else [pytest.mark.soak])
    for row in itertools.product(VARIANTS, MESHES)
]
# Hugging Face's losses, norms and rotary tables are float32 whatever the parameters are.
NARROW = {"bert", "gpt2", "lora", "t5", "vit"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_trains_as_on_one_device(name: str, mesh: str) -> None:
    found = {**ZOO, **VARIANTS}[name]()
    assert SAMPLES % MESHES[mesh]["microbatches"] or "ragged" not in mesh
    assert_parity(
        found.model,
        found.args,
        found.kwargs,
        batch=found.batch,
        semantics=found.semantics,
        capture=found.capture,
        steps=2,
        tolerance=1e-6 if name.split("-")[0] in NARROW else 1e-9,
        **MESHES[mesh],
    )


@pytest.mark.filterwarnings("ignore")
def test_f022_encoder_and_decoder_on_four_stages() -> None:
    """The encoder's output goes to every stage that has a layer of the decoder; sources are longer than targets."""
    found = ZOO["transformer"]()
    assert_parity(found.model, found.args, batch=found.batch, steps=1, mesh={"pp": 4}, microbatches=2)


def on_gloo(names: list[str], pins: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    for name in names:
        one, two = ZOO[name](), ZOO[name]()
        parallel = autopart.parallelize(two.model.double(), capture="direct", batch=two.batch, **pins)
        compare(_trained(parallel, two), _trained(one.model.double(), one), 1e-9, name)
    return len(names)


def _trained(model: Any, found: Specimen) -> Any:
    args = tuple(a.double() if a.is_floating_point() else a for a in found.args)
    return train(model, lambda step: (args, {}), 2, lambda p: torch.optim.AdamW(p, lr=1e-2), 0.5)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_gloo_processes() -> None:
    names = ["unet-transposed", "transformer-padded"]
    pins = {"mesh": {"pp": 2}, "microbatches": 2}
    assert launch(on_gloo, 2, args=(names, pins), timeout=280).values == (2, 2)
