"""Steps that couple the samples of the batch, on data ranks: exactly those of one device on the whole batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.api.compiler import captured_step, solve
from autopart.capture import read
from autopart.errors import CaptureError, VerificationError
from autopart.ir.mesh import Mesh
from autopart.ir.placed import Move
from autopart.ir.placement import Partial, Replicate
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.consistent import faults
from autopart.passes.segment import segment
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import adamw, assert_close, compare, train
from tests.axis_models import NEAR
from tests.axis_zoo import clip
from tests.tensor_axis import CHEAP
from tests.test_accumulate_semantics import (
    FORWARDS,
    ResNet,
    contrastive,
    images,
    model_of,
    seeded,
    sgd,
    softmax_over_the_batch,
    vectors,
)

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "contrastive": lambda: (clip().model, clip().args),
    "batch norm": lambda: (seeded(ResNet), images(8, 2)),
}
PINS: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp": 2}},
    "pp2 dp2": {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1"},
    "dp2 fsdp": {"mesh": {"dp": 2}, "placement": "fsdp"},
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}},
    "dp2 ep2": {"mesh": {"dp": 2, "ep": 2}, "placement": "zero2"},
    "cp2 dp2": {"mesh": {"cp": 2, "dp": 2}},
    "pp2 dp2 tp2": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "placement": "fsdp", "recompute": True},
}
QUICK = {("contrastive", "dp2 tp2"), ("batch norm", "pp2 dp2")}
ROWS = [
    pytest.param(*row, id="-".join(row), marks=[] if row in QUICK else [pytest.mark.soak])
    for row in ((model, pins) for model in MODELS for pins in PINS)
]


@pytest.mark.parametrize(("name", "pins"), ROWS)
def test_trains_as_one_device_on_the_whole_batch(name: str, pins: str) -> None:
    """Losses, raw gradients, parameters, and the running statistics of norms."""
    model, args = MODELS[name]()
    assert_parity(model, args, cluster=NEAR, tolerance=1e-9, **PINS[pins])


@pytest.mark.parametrize(
    "forward",
    [pytest.param(f, marks=[] if f is softmax_over_the_batch else [pytest.mark.soak]) for f in FORWARDS],
    ids=lambda f: f.__name__,
)
def test_whatever_couples_samples(forward: Callable[..., Any]) -> None:
    """Buffers that the forward updates from all samples, and computes with, too."""
    assert_parity(model_of(forward), vectors(12), steps=2, mesh={"dp": 2})


@pytest.mark.soak
def test_more_ranks_and_no_loss_and_random_numbers() -> None:
    def dropped(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.normalize(F.dropout(self.hidden(x), 0.3), dim=1)
        return F.cross_entropy(F.dropout(h @ h.T, 0.2), torch.arange(len(x)))

    def outputs(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.hidden(x)
        return self.out((h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()), h.max()

    assert_parity(model_of(contrastive), vectors(12), mesh={"dp": 4}, placement="zero1")
    assert_parity(model_of(dropped), vectors(8), mesh={"pp": 2, "dp": 2})

    def loss(made: Any) -> torch.Tensor:
        return made[0].pow(2).sum() + made[1]

    assert_parity(model_of(outputs), vectors(8)[:1], mesh={"dp": 2}, placement="fsdp", loss=loss, optimizer=sgd)


def same(found: Any, plain: nn.Module) -> None:
    """Gradients and buffers are those of one device; both sides' gradients are then forgotten."""
    grads = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(found.full_grads(), grads, 1e-9, "gradient of")
    assert_close(dict(found.named_buffers()), dict(plain.named_buffers()), 1e-9, "buffer")
    found.zero_grad(), plain.zero_grad()


def test_evaluation_first_and_batches_of_any_size() -> None:
    """A plan that an evaluation made is made anew for training; a batch that dp does not divide is whole everywhere."""
    plain, (x, y) = seeded(ResNet), images(11)
    x = x.double()
    found = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, capture="direct")

    def evaluated(count: int) -> None:
        found.eval(), plain.eval()
        with torch.no_grad():
            assert torch.allclose(found(x[:count]), plain(x[:count]), rtol=1e-9)
        found.train(), plain.train()

    evaluated(5)
    assert not found.plan.mesh.coupled
    for count in (8, 7, 2):
        found(x[:count], y[:count]).backward(), plain(x[:count], y[:count]).backward()
        same(found, plain)
        report = found.report()
        assert report.bytes_sent == report.predicted_bytes
        assert (report.bytes_sent["all_gather"] > 0) == (count % 2 == 0)  # of the norms' statistics
    evaluated(3)
    assert found.plan.mesh == Mesh((("dp", 2),), coupled=True)


@pytest.mark.soak
def test_norms_that_are_frozen_later_and_gradients_that_wait() -> None:
    plain, (x, y) = seeded(ResNet), images(8)
    x = x.double()
    found = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, placement="zero1")
    for frozen in (False, True):
        for side in (found, plain):
            for module in side.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.train(not frozen)
        with found.no_sync():
            found(x, y).backward()
        found(x[:5], y[:5]).backward()
        plain(x, y).backward(), plain(x[:5], y[:5]).backward()
        same(found, plain)


@pytest.mark.soak
def test_parameters_that_an_evaluation_has_cut_stay_where_they_are() -> None:
    plain, (x, y) = seeded(ResNet), images(8)
    batch = (x.double(), y), {}

    def rank_main(rank: int) -> Any:
        mesh = {"dp": 2, "tp": 2}
        mine = autopart.parallelize(copy.deepcopy(plain), mesh=mesh, placement="fsdp", cluster=CHEAP, capture="direct")
        mine.eval()
        with torch.no_grad():
            mine(batch[0][0])
        return train(mine.train(), lambda step: batch, 2, adamw, 0.5)

    found = LocalWorld(4).run(rank_main)
    expected = train(copy.deepcopy(plain), lambda step: batch, 2, adamw, 0.5)
    for rank, each in enumerate(found):
        compare(each, expected, 1e-9, f"rank {rank}")


# ---- programs --------------------------------------------------------------------------------------------------------


@cache
def program() -> Program:
    model, args = MODELS["batch norm"]()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    plan = autopart.plan(model, args, mesh={"dp": 2}, capture="direct")
    return autopart.compile(model, plan, args, capture="direct")


def test_what_a_plan_and_a_text_say() -> None:
    """Samples are split wherever they can be; gradients are summed a layer at a time, as on any data axis."""
    made = program()
    plan, text = made.plan, made.ranks[1].source
    assert Plan.from_json(plan.to_json()) == plan
    why, where = plan.notes[2], plan.notes[-1]
    assert why.startswith("microbatches 1: aten._native_batch_norm") and "couples the samples of a batch" in why
    assert where == "dp splits samples inside layers: they compute together"
    assert "every rank is given all, and dp splits them inside layers" in text
    assert "aten.slice.Tensor(x, 0, b // 2, b)" in text
    assert 'world.all_gather_values(stack, axis="dp", dim=0, pieces=[2, 2])' in text
    units = '("head", *(f"blocks.{i}" for i in reversed(range(3))), "stem")'
    assert re.findall(r"world\.all_reduce\(.*\)", text) == [f'world.all_reduce({units}, axis="dp")']
    autopart.verify(made)


def test_statistics_of_some_samples_are_no_fault_that_gets_through() -> None:
    """A text without the exchange in a norm, on every rank: its shapes are right, its numbers would not be."""
    made = program()
    line = 'world.all_gather_values(stack, axis="dp", dim=0, pieces=[2, 2])'
    assert all(line in rank.source for rank in made.ranks)
    texts = (replace(rank, source=rank.source.replace(line, "torch.cat((stack, stack))")) for rank in made.ranks)
    with pytest.raises(VerificationError, match=r"rule values: rank 0, stage 0.*all_gather"):
        autopart.verify(replace(made, ranks=tuple(texts)))


def test_a_gradient_that_is_no_part_of_a_sum_is_refused() -> None:
    """The state adds up the gradients of dp: one that is whole on each rank would count twice."""
    model, args = MODELS["contrastive"]()
    segmented = segment(captured_step(model, read(model, args), None, False, "direct", together=True))
    plan = solve(segmented, mesh={"dp": 2})
    placed = plan.tensor.step(segmented) if plan.tensor is not None else None
    assert placed is not None
    body, layer = placed.bodies[0], segmented.segments[0]
    assert faults(body, layer) == () and body.backward is not None
    sums = [Move(name, Partial(), Replicate()) for name in body.backward.function.outputs]
    whole = replace(body.backward, outputs=(Replicate(),) * len(sums), moves=(*body.backward.moves, *sums))
    found = faults(replace(body, backward=whole), layer)
    told = "the gradient of image.0.weight is Replicate(), where Partial(sum) is wanted for one that is Replicate()"
    assert told in found and len(found) == len(sums)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused_and_the_way_out() -> None:
    model, args = MODELS["contrastive"]()
    kinds: dict[str, Any] = {"capture": "direct"}
    for pins in ({"mesh": {"dp": 2}, "microbatches": 3}, {"mesh": {"pp": 2}, "microbatches": 2}):
        with pytest.raises(CaptureError, match="have one microbatch, microbatches=1, whose samples compute together"):
            autopart.plan(model, args, **kinds, **pins)
    with pytest.raises(ValueError, match=r"couples its 6 samples, of which dp=4 is to have equal parts.* a batch of 4"):
        autopart.plan(model, args, mesh={"dp": 4}, **kinds)
    with pytest.raises(ValueError, match="takes an even number") as refused:
        autopart.plan(model, args, mesh={"pp": 2}, schedule="dualpipe", **kinds)
    assert "There is one microbatch, as " in refused.value.__notes__[0]
    other = autopart.plan(model, args, mesh={"dp": 2}, semantics="accumulate", microbatches=1, **kinds)
    with pytest.raises(ValueError, match="cuts the batch into 2 pieces, and this call couples its samples"):
        autopart.compile(model, other, args, **kinds)


def test_each_rank_with_its_own_samples_is_refused() -> None:
    model, args = MODELS["contrastive"]()

    def rank_main(rank: int) -> str:
        mine = autopart.parallelize(copy.deepcopy(model), mesh={"dp": 2}, inputs="local", capture="direct")
        with pytest.raises(ValueError, match="inputs='global'") as refused:
            mine(*(a[3 * rank : 3 * rank + 3] for a in args))
        return str(refused.value)

    assert len(set(LocalWorld(2).run(rank_main))) == 1
