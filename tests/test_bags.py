"""Bags of rows: an `EmbeddingBag` of input ``[bags, length]`` on parts of a batch and of its table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.bags import BAG_MAX, BAG_MAX_BACKWARD, BAG_SCALE_BACKWARD, BAG_SUM, BAG_SUM_BACKWARD
from autopart.capture import capture, read
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.placement import Shard
from autopart.passes.normalise import normalise
from autopart.testing import assert_parity
from autopart.testing.rules import as_node
from tests.axis_models import NEAR
from tests.test_rule_strategies import run_all
from tests.zoo import integers

ROWS, WIDTH, BAG, SAMPLES = 11, 4, 3, 6
PADDING = 2


def ids(samples: int = SAMPLES) -> torch.Tensor:
    """Bags, of which one is nothing but padding, one has it twice, and one the same row twice."""
    torch.manual_seed(0)
    made = integers(ROWS, samples, BAG)
    made[0], made[1, :2], made[2, 1:] = PADDING, PADDING, 7
    return made


# ---- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("scaled", [False, True])
def test_sums_are_those_of_torch(padding: int | None, dtype: torch.dtype, scaled: bool) -> None:
    indices, none = ids().to(dtype), -1 if padding is None else padding
    weight = torch.randn(ROWS, WIDTH).double().requires_grad_()
    scale = torch.rand(SAMPLES, BAG).double().requires_grad_() if scaled else None
    made = F.embedding_bag(indices, weight, mode="sum", per_sample_weights=scale, padding_idx=padding)
    grad = torch.randn_like(made)
    of_table, *of_scale = torch.autograd.grad(made, [x for x in (weight, scale) if x is not None], grad)
    w, s = weight.detach(), None if scale is None else scale.detach()
    torch.testing.assert_close(BAG_SUM(w, indices, s, none), made.detach())
    torch.testing.assert_close(BAG_SUM_BACKWARD(grad, indices, s, ROWS, none), of_table)
    for expected in of_scale:
        torch.testing.assert_close(BAG_SCALE_BACKWARD(grad, w, indices, none), expected)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("equal", [False, True])
def test_maxima_are_those_of_torch(padding: int | None, equal: bool) -> None:
    """Of rows that are equal, the gradient goes to the one that torch gives it."""
    indices, none = ids(), -1 if padding is None else padding
    weight = (torch.zeros(ROWS, WIDTH) if equal else torch.randn(ROWS, WIDTH)).double().requires_grad_()
    made = F.embedding_bag(indices, weight, mode="max", padding_idx=padding)
    grad = torch.randn_like(made)
    (expected,) = torch.autograd.grad(made, [weight], grad)
    found, rows = BAG_MAX(weight.detach(), indices, none)
    assert torch.equal(found, made)
    torch.testing.assert_close(BAG_MAX_BACKWARD(grad, rows, ROWS), expected)


def test_shapes_without_data() -> None:
    weight, indices, scale = (torch.empty(*shape, device="meta") for shape in ((ROWS, WIDTH), (6, BAG), (6, BAG)))
    indices = indices.long()
    grad = BAG_SUM(weight, indices, scale, -1)
    found, rows = BAG_MAX(weight, indices, -1)
    assert grad.shape == found.shape == rows.shape == (6, WIDTH) and rows.dtype == torch.int64
    assert BAG_SUM_BACKWARD(grad, indices, scale, ROWS, -1).shape == weight.shape
    assert BAG_MAX_BACKWARD(grad, rows, ROWS).shape == weight.shape
    assert BAG_SCALE_BACKWARD(grad, weight, indices, -1).shape == scale.shape


@pytest.mark.parametrize("degree", [3, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("padding", [-1, PADDING])
@pytest.mark.parametrize("scaled", [False, True])
def test_places_that_have_some_rows_each_add_up(degree: int, padding: int, scaled: bool) -> None:
    weight, grad, indices = torch.randn(ROWS, WIDTH).double(), torch.randn(SAMPLES, WIDTH).double(), ids()
    scale = torch.rand(SAMPLES, BAG).double() if scaled else None
    for call in (
        (BAG_SUM, weight, indices, scale, padding),
        (BAG_SUM_BACKWARD, grad, indices, scale, ROWS, padding),
        (BAG_SCALE_BACKWARD, grad, weight, indices, padding),
    ):
        found = run_all(*as_node(call), degree)
        assert sum(strategy.spread for strategy in found) == 1
        assert sum(strategy.cut is not None and not strategy.spread for strategy in found) >= 2


# ---- models ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A bag a sample, and a head; with `own`, the bags' rows are multiplied by numbers that are learned."""

    def __init__(self, own: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag, self.head = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, 3)
        self.factor = nn.Parameter(torch.rand(BAG)) if own else None

    def scale(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.factor is None else self.factor.expand(x.shape)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.bag(x, per_sample_weights=self.scale(x))), y)


class ByHand(Net):
    """Offsets that the model makes itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, x.numel(), BAG)
        return F.cross_entropy(self.head(self.bag(x.flatten(), offsets)), y)


class Fields(Net):
    """Two bags a sample, of one table."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = self.bag(torch.stack((x, x.flip(1) + 1), 1).flatten(0, 1)).unflatten(0, (-1, 2))
        return F.cross_entropy(self.head(both.amax(1)), y)


class Ragged(Net):
    """Offsets that the model makes itself, of a last bag that is longer than the others."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, x.numel() - BAG, BAG)
        return F.cross_entropy(self.head(self.bag(x.flatten(), offsets)), y[1:])


class OffsetsGiven(Net):
    """Bags of any length, one behind the other."""

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.bag(x, offsets)), y)


KINDS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "sum-padded": {"mode": "sum", "padding_idx": PADDING},
    "weighted": {"mode": "sum", "padding_idx": PADDING, "own": True},
    "mean": {"mode": "mean"},
    "mean-padded": {"mode": "mean", "padding_idx": PADDING},
    "max": {"mode": "max"},
    "max-padded": {"mode": "max", "padding_idx": PADDING},
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return ids(), integers(3, SAMPLES)


def step(model: nn.Module, args: tuple[Any, ...] = ()) -> Captured:
    return normalise(capture(model, read(model, args or batch()), route="direct"), together=True)


@pytest.mark.parametrize(
    ("name", "model"), [*((name, Net) for name in KINDS), *((name, ByHand) for name in ("sum", "mean-padded", "max"))]
)
def test_bags_of_one_length_read_no_offsets(name: str, model: type[Net]) -> None:
    found = step(model(**KINDS[name]).double())
    names = [node.opname for node in found.nodes]
    assert not found.coupled and not any("embedding_bag" in n or "arange" in n for n in names)
    kind = "max" if name.startswith("max") else "sum"
    assert names.count(f"autopart.bag_{kind}.default") == names.count(f"autopart.bag_{kind}_backward.default") == 1


MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp": 2}, "placement": "ddp", "microbatches": 2},
    "zero1": {"mesh": {"dp": 2}, "placement": "zero1"},
    "fsdp": {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 3},
    "pp": {"mesh": {"pp": 2}, "microbatches": 2},
    "uneven": {"mesh": {"dp": 1}, "microbatches": 4},
}


def rows(quick: Any, *columns: Iterable[Any]) -> list[Any]:
    """All combinations, of which those in `quick` run always."""
    every = itertools.product(*columns)
    return [pytest.param(*row, marks=[] if row in quick else [pytest.mark.soak]) for row in every]


TRAINED = {
    ("weighted", "pp"),
    ("mean-padded", "ddp"),
    ("max-padded", "fsdp"),
    ("sum-padded", "zero1"),
    ("mean", "uneven"),
}


@pytest.mark.parametrize(("name", "mesh"), rows(TRAINED, KINDS, MESHES))
def test_trains_as_on_one_device(name: str, mesh: str) -> None:
    model = Net(**KINDS[name]).double()
    assert_parity(model, batch(), tolerance=1e-9, capture="direct", **MESHES[mesh])


PARTS = {("weighted", 0, "tp"), ("mean-padded", 0, "ep"), ("weighted", 1, "ep"), ("max-padded", 1, "tp")}
SPLIT = [
    row for row in rows(PARTS, KINDS, (0, 1), ("tp", "ep")) if row.values[1] or not row.values[0].startswith("max")
]


@pytest.mark.parametrize("route", ["compile", "direct"])
def test_several_bags_a_sample(route: str) -> None:
    model = Fields(mode="mean", padding_idx=PADDING).double()
    args = ids() % (ROWS - 1), batch()[1]
    assert_parity(model, args, tolerance=1e-9, capture=route, mesh={"pp": 2}, microbatches=3)


def test_a_frozen_table() -> None:
    model = Net(mode="mean").double()
    model.bag.weight.requires_grad_(False)
    assert_parity(model, batch(), tolerance=1e-9, capture="direct", mesh={"dp": 2}, microbatches=2)


@pytest.mark.parametrize(("name", "dim", "axis"), SPLIT)
def test_a_table_in_parts(name: str, dim: int, axis: str) -> None:
    """By rows, on three places, or by columns; of maxima, the rows stay together."""
    model = Net(**KINDS[name]).double()
    pins: dict[str, Any] = {"mesh": {axis: 3 if dim == 0 else 2}, "placement": {"bag.weight": {axis: Shard(dim)}}}
    plan = autopart.plan(model, batch(), cluster=NEAR, capture="direct", microbatches=2, **pins)
    assert plan.tensor is not None and dict(plan.tensor.parameters)["bag.weight"] == Shard(dim)
    assert_parity(model, batch(), tolerance=1e-9, capture="direct", plan=plan)


def test_rows_of_maxima_are_not_split() -> None:
    model = Net(mode="max").double()
    with pytest.raises(ValueError, match=r"bag\.weight"):
        autopart.plan(model, batch(), mesh={"tp": 2}, placement={"bag.weight": {"tp": Shard(0)}}, capture="direct")


def test_evaluation_and_a_last_batch_of_other_size() -> None:
    model = Net(mode="mean", padding_idx=PADDING).double()
    mine = autopart.parallelize(Net(mode="mean", padding_idx=PADDING).double(), mesh={"pp": 2}, microbatches=2)
    for samples in (6, 4):
        x, y = ids()[:samples], batch()[1][:samples]
        with torch.no_grad():
            torch.testing.assert_close(mine(x, y), model(x, y), rtol=1e-12, atol=0)


# ---- bags of any length ----------------------------------------------------------------------------------------------


def flat() -> tuple[torch.Tensor, ...]:
    x, y = batch()
    return x.flatten(), torch.tensor([0, 2, 2, 9, 11, 15]), y


WHOLE = {"x": None}


def test_offsets_that_are_given_take_one_microbatch() -> None:
    model = OffsetsGiven(mode="mean").double()
    for pins in ({"mesh": {"dp": 2}}, {"mesh": {"pp": 2}, "microbatches": 1}):
        assert_parity(model, flat(), tolerance=1e-9, capture="direct", batch=WHOLE, **pins)


def test_offsets_that_are_given_are_refused_with_several() -> None:
    model = OffsetsGiven(mode="sum").double()
    with pytest.raises(CaptureError) as caught:
        autopart.plan(model, flat(), mesh={"pp": 2}, microbatches=2, batch=WHOLE)
    text = str(caught.value)
    assert re.search(r"aten._embedding_bag.default in module 'bag' has no factor rule", text)
    assert "test_bags.py:" in text and "self.bag(x, offsets)" in text
    assert "input as [batch, bag length]" in text and "microbatches=1" in text


def test_a_last_bag_that_is_longer_stays_as_it_is() -> None:
    found = step(Ragged(mode="sum").double())
    assert found.coupled and any(node.aten == "_embedding_bag" for node in found.nodes)


def test_counts_of_equal_rows_take_one_microbatch() -> None:
    model = Net(mode="sum", scale_grad_by_freq=True).double()
    assert step(model).coupled
    assert_parity(model, batch(), tolerance=1e-9, capture="direct", mesh={"dp": 2})
