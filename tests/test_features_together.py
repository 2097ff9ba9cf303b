"""Features that meet in one step: random draws, recomputation, updated buffers, no loss, batch dims, written texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart import Program
from autopart.api.compiler import built, sampled
from autopart.draws import Draws, bernoulli
from autopart.testing import assert_parity
from autopart.testing.parity import Sliced, assert_close

PINS: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}


class Block(nn.Module):
    """A layer that drops and counts its forwards, all but the count within a checkpoint if asked."""

    seen: Any

    def __init__(self, region: bool) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)
        self.region = region
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((6,), 1.1))

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.drop(torch.tanh(self.up(h) * self.scale)))
        return out

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return h + (checkpoint(self.inner, h, use_reentrant=False) if self.region else self.inner(h))


class Net(nn.Module):
    """Blocks between two layers; with labels a loss over those that count, without them the logits."""

    def __init__(self, region: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.h = nn.ModuleList(Block(region) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.first(x)
        for block in self.h:
            h = block(h)
        logits: torch.Tensor = self.last(h)
        return logits if y is None else F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=-1)


def net(region: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(region)


def data(*, labels: bool, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Five samples along `dim`, the first without a valid label."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 7, 6, generator=generator), torch.randint(0, 4, (5, 7), generator=generator)
    y[0] = -1
    return tuple(t.transpose(0, dim).contiguous() for t in ((x, y) if labels else (x,)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize(
    ("labels", "dim", "pins"),
    [
        pytest.param(False, 0, {"recompute": True, "placement": "fsdp"}, id="no loss, recomputed"),
        pytest.param(False, 1, {"recompute": True, "placement": "zero1"}, id="no loss, recomputed, dim 1"),
        pytest.param(True, 1, {"recompute": True, "placement": "fsdp"}, id="recomputed, dim 1"),
        pytest.param(True, 1, {"capture": "compile", "placement": "zero2"}, id="checkpoint, dim 1"),
    ],
)
def test_draws_are_those_of_one_device(labels: bool, dim: int, pins: dict[str, Any]) -> None:
    named = {"x": dim, "y": dim} if labels else {"x": dim}
    model, loss = net(region=pins.get("capture") == "compile"), None if labels else squares
    assert_parity(model, data(labels=labels, dim=dim), steps=2, batch=named, loss=loss, **{**PINS, **pins})


class Normed(nn.Module):
    """A batch norm and then a mask, which is drawn by a dropout or given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.drop, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.norm(self.one(x))
        h = self.drop(h) if mask is None else h * mask * 2
        return F.cross_entropy(self.two(h), y)


@pytest.mark.parametrize("recompute", [False, True])
def test_slices_draw_their_part_of_the_whole_batch(recompute: bool) -> None:
    """Under "accumulate" too: REF-mb is fed the pieces of the mask that one device draws for the whole batch."""
    torch.manual_seed(0)
    plain = Normed().double()
    x, y = torch.randn(11, 6).double(), torch.randint(0, 4, (11,))
    model = autopart.parallelize(
        copy.deepcopy(plain), semantics="accumulate", capture="direct", placement="fsdp", recompute=recompute, **PINS
    )
    model(x, y).backward()
    draw = Draws(torch.initial_seed(), 0).of("drop#0", 0, 11, 11)
    mask = bernoulli(draw, 0.5, (11, 8), 0, device=torch.device("cpu")).double()
    Sliced(plain, 2, 2)(x, y, mask).backward()
    assert_close(model.full_grads(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}, 1e-9, "")
    assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), 1e-9, "")


class Mixed(nn.Module):
    """A dropout where the samples are inside of a dim, or after it where they are not, before a loss of a slice."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.norm, self.drop, self.early = nn.BatchNorm1d(6), nn.Dropout(0.5), early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(x) if self.early else x
        h = self.norm(h.transpose(0, 1).reshape(-1, 6))
        return (h if self.early else self.drop(h)).square().mean()


def test_a_slice_that_does_not_know_its_part_of_a_draw_is_refused() -> None:
    args, meaning = data(labels=False), {"semantics": "accumulate", "capture": "direct", "mesh": {"dp": 2}}
    autopart.plan(Mixed(early=True), args, **meaning)
    with pytest.raises(autopart.CaptureError, match=r"in module 'drop': .*draws random numbers for samples"):
        autopart.plan(Mixed(early=False), args, **meaning)


def test_parity_of_draws_under_accumulate_is_not_claimed() -> None:
    with pytest.raises(ValueError, match=r"semantics: .* random operations"):
        assert_parity(net(), data(labels=True), semantics="accumulate", **PINS)


@pytest.mark.parametrize(
    ("labels", "pins"),
    [
        pytest.param(True, {"recompute": True, "placement": "fsdp"}, id="recomputed"),
        pytest.param(False, {"recompute": True, "placement": "zero1"}, id="no loss, recomputed"),
        pytest.param(True, {"inputs": "local", "placement": "zero2"}, id="local"),
        pytest.param(True, {"semantics": "accumulate", "placement": "ddp"}, id="accumulate"),
        pytest.param(True, {"capture": "compile", "placement": "ddp"}, id="checkpoint"),
    ],
)
def test_written_programs_and_stage_graphs(labels: bool, pins: dict[str, Any], tmp_path: Path) -> None:
    args, meaning = data(labels=labels), {"capture": "direct", "semantics": "exact"}
    meaning |= {key: pins[key] for key in meaning if key in pins}
    model, again = net(region=meaning["capture"] == "compile"), "recompute" in pins or meaning["capture"] == "compile"
    rest = {key: pin for key, pin in pins.items() if key not in meaning}
    made = built(sampled(model, args, None, **meaning), **PINS, **rest)
    read = Program.read(made.write(tmp_path / "program"))
    assert (read.ranks, read.plan, read.state) == (made.ranks, made.plan, made.state)
    for name in ("inputs", "nodes", "outputs", "prologue"):
        assert getattr(read.captured, name) == getattr(made.captured, name)
    assert str(read.staged) == str(made.staged) and str(autopart.verify(read)) == str(autopart.verify(made))
    for one, two in zip(read.stages, made.stages, strict=True):
        assert one.backward is not None and two.backward is not None
        assert (one.forward.code, one.backward.code) == (two.forward.code, two.backward.code)
        assert "drop_0" in one.forward.code and ("drop_0" in one.backward.code) == again


class Pairs(nn.Module):
    """A batch norm and a contrastive loss of a slice's pairs; without temperature the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
        z = F.normalize(self.two(torch.tanh(self.norm(self.one(x)))), dim=1)
        return z if temperature is None else F.cross_entropy(z @ z.T / temperature, torch.arange(len(z)))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_inputs_of_slices(recompute: bool) -> None:
    """Those of samples and of a number that all slices share, with a loss and without one."""
    torch.manual_seed(0)
    plain, x, t = Pairs().double(), torch.randn(11, 6).double(), torch.full((), 0.5).double()
    model = autopart.parallelize(
        copy.deepcopy(plain), semantics="accumulate", capture="direct", placement="zero2", recompute=recompute, **PINS
    )
    ours, theirs = [[x.clone().requires_grad_(), t.clone().requires_grad_()] for _ in range(2)]
    model(*ours).backward()
    Sliced(plain, 2, 2)(*theirs).backward()
    found, expected = ({str(i): leaf.grad for i, leaf in enumerate(leaves)} for leaves in (ours, theirs))
    assert_close(found, expected, 1e-9, "input")
    assert_close(model.full_grads(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}, 1e-9, "")
    ours, theirs = [[x.clone().requires_grad_()] for _ in range(2)]
    weights = torch.randn(11, 4).double()
    (model(*ours) * weights).sum().backward()
    pieces = [half for part in torch.tensor_split(theirs[0], 2) for half in torch.tensor_split(part, 2)]
    (torch.cat([plain(piece) for piece in pieces]) * weights).sum().backward()
    assert_close({"x": ours[0].grad}, {"x": theirs[0].grad}, 1e-9, "input")
