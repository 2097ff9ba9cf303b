"""Features that meet: updated buffers, dropout, recomputation, modules without a loss, own samples, copies, scalers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.testing import LocalWorld, assert_parity, reference_random
from autopart.testing.parity import Sliced, assert_close

DATA = {"mesh": {"dp": 2}, "microbatches": 2, "placement": "zero1"}
BOTH = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "placement": "fsdp"}


class Net(nn.Module):
    """Norms over the batch, dropout, and a count of the forwards; without targets it returns its outputs."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.then, self.drop = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Dropout(drop)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        h = self.drop(torch.tanh(self.norm(self.up(x))))
        h = self.drop(torch.tanh(self.then(self.mid(h))))
        out = self.down(h)
        return out if y is None else (out - y).square().mean()


def net(drop: float = 0.0) -> Net:
    torch.manual_seed(2)
    return Net(drop).double()


def batch(step: int, count: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 4, generator=generator).double(), torch.randn(count, 3, generator=generator).double()


class Outputs(Sliced):
    """The plain module fed in slices, of which the outputs are put together."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        ended = []
        for part in torch.tensor_split(x, self.ranks):
            buffers = dict(self.module.named_buffers())
            for piece in torch.tensor_split(part, self.microbatches):
                buffers = {name: buffer.clone() for name, buffer in buffers.items()}
                made.append(torch.func.functional_call(self.module, buffers, (piece,)))
            ended.append(buffers)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                every = torch.stack([buffers[name] for buffers in ended])
                buffer.copy_(every.mean(0) if buffer.is_floating_point() else every.amax(0))
        return torch.cat(made)


def parallel(pins: dict[str, Any], drop: float = 0.0, **more: Any) -> Any:
    return autopart.parallelize(net(drop), capture="direct", semantics="accumulate", **pins, **more)


def grads(model: Any) -> dict[str, torch.Tensor]:
    if hasattr(model, "full_grads"):
        return dict(model.full_grads())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model: Any) -> dict[str, torch.Tensor]:
    found = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: tensor.clone() for name, tensor in found.items()}


Loop = Callable[[Any], list[dict[str, torch.Tensor]]]


def compare(loop: Loop, plain: Any, pins: dict[str, Any], ranks: int) -> None:
    """A loop on separate ranks, on ranks in one call, and on the plain side."""
    expected = loop(plain)
    for found in [*LocalWorld(ranks).run(lambda rank: loop(parallel(pins))), loop(parallel(pins))]:
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, 1e-9, "")


def unsynced(model: Any, inside: bool) -> Any:
    return model.no_sync() if inside and hasattr(model, "no_sync") else contextlib.nullcontext()


@pytest.mark.parametrize("pins", [DATA, BOTH])
def test_norms_over_slices_without_a_loss(pins: dict[str, Any]) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256)
        seen = []
        for step in range(4):
            for each in range(2):
                x, y = batch(2 * step + each)
                with unsynced(model, each == 0):
                    loss = (model(x) - y).pow(2).mean() * (float("inf") if step == 1 else 1)
                    scaler.scale(loss).backward()
            seen += [] if step == 1 else [grads(model)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(state(model))
        return [*seen, {"scale": torch.tensor(scaler.get_scale())}]

    compare(loop, Outputs(net(), 2, 2), pins, 4 if pins is BOTH else 2)


class Several(nn.Module):
    """Outputs of every sort: of the samples, means over a slice, a sum, and what is equal on all slices."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), norm(6), nn.Linear(6, 3)
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.norm(self.up(x)))
        means = h.square().mean(), h.exp().mean(0)
        return self.down(h) * self.scale, *means, h.sum(), self.down.weight.square().sum(), self.shift.clone()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])  # with the latter, slices are the whole batch
def test_gradients_of_outputs_that_are_not_split(norm: type[nn.Module]) -> None:
    torch.manual_seed(4)
    plain, (x, y) = Several(norm).double(), batch(0)
    semantics = "accumulate" if norm is nn.BatchNorm1d else "exact"

    def loss(out: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return (out * y).sum().square() + sum((k + 1) * each.exp().sum() for k, each in enumerate(rest))

    def body(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pins: dict[str, Any] = {**BOTH, "semantics": semantics, "capture": "direct"}
        model, mine = autopart.parallelize(copy.deepcopy(plain), **pins), x.clone().requires_grad_()
        made = loss(*model(mine))
        made.backward()
        return made.detach(), {**grads(model), "the input": mine.grad}

    found = LocalWorld(4).run(body)
    leaf = x.clone().requires_grad_()
    pieces = [piece for part in torch.tensor_split(leaf, 2) for piece in torch.tensor_split(part, 2)]
    columns = list(zip(*(plain(piece) for piece in pieces), strict=True))
    share = [len(piece) / len(x) for piece in pieces]
    means = [sum(a * b for a, b in zip(columns[k], share, strict=True)) for k in (1, 2)]
    expected = loss(torch.cat(columns[0]), *means, sum(columns[3]), columns[4][0], columns[5][0])
    expected.backward()
    for value, gradients in found:
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
        assert_close(gradients, {**grads(plain), "the input": leaf.grad}, 1e-9, "gradient of")


@pytest.mark.parametrize("early", [True, False])
def test_averages_and_copies_of_a_model_with_updated_buffers(early: bool) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        module = model.module if isinstance(model, Sliced) else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[dict[str, torch.Tensor]] = []
        average: Any = None
        for step in range(4):
            if step == (0 if early else 1):
                average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
            if average is not None:
                average.update_parameters(module)
        twin = copy.deepcopy(model)
        twin(*batch(7)).backward()
        seen += [state(model), grads(model), state(twin), grads(twin), state(average.module)]
        average.eval()
        with torch.no_grad():
            return [*seen, {"evaluated": average(batch(9)[0])}]

    compare(loop, Sliced(net(), 2, 2), DATA, 2)


def test_one_device_updates_buffers() -> None:
    plain, model = Sliced(net(), 1, 3), parallel({"devices": 1, "microbatches": 3})
    for side in (plain, model):
        for step in range(2):
            side(*batch(step)).backward()
    assert_close(grads(model), grads(plain), 1e-9, "gradient of")
    assert_close(state(model), state(plain), 1e-9, "")


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 1}])
def test_recomputation_with_dropout_and_updated_buffers(mesh: dict[str, int]) -> None:
    # One slice is the whole batch, of which the plain module draws the same.
    pins = {"mesh": mesh, "microbatches": 1, "recompute": True}
    assert_parity(net(0.4), batch(0), steps=2, semantics="accumulate", **pins)


def test_recomputation_changes_no_slice() -> None:
    def body(rank: int, recompute: bool) -> tuple[Any, Any, Any]:
        model = parallel(BOTH, 0.4, recompute=recompute)
        for step in range(2):
            loss = model(*batch(step))
            loss.backward()
        return loss.detach(), grads(model), state(model)

    (loss, made, left), (again, kept, after) = (LocalWorld(4).run(body, on)[0] for on in (True, False))
    assert torch.equal(loss, again)
    assert_close(made, kept, 1e-12, "gradient of")
    assert_close(left, after, 1e-12, "")


class Shown(nn.Module):
    """A loss, and what dropout left of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = self.drop(x)
        return {"loss": (self.up(kept) - y).square().mean(), "kept": kept, "total": kept.sum(), "again": x}


@pytest.mark.parametrize("shares", [(7, 4), (2, 9)])
def test_own_samples_with_dropout_and_all_outputs(shares: tuple[int, int]) -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return Shown().double()

    plain = made()
    expected = []
    with reference_random():
        for step in range(2):
            expected.append(plain(*batch(step)))
            expected[-1]["loss"].backward()

    def body(rank: int) -> Any:
        model = autopart.parallelize(made(), mesh={"dp": 2}, microbatches=2, inputs="local", outputs="all")
        found = []
        for step in range(2):
            found.append(model(*(t.split(shares)[rank] for t in batch(step))))
            found[-1]["loss"].backward()
        return found, grads(model)

    for rank, (found, gradients) in enumerate(LocalWorld(2).run(body)):
        assert_close(gradients, grads(plain), 1e-9, "gradient of")
        for one, whole in zip(found, expected, strict=True):
            for name in ("loss", "total"):
                torch.testing.assert_close(one[name], whole[name], rtol=1e-12, atol=1e-12)
            for name in ("kept", "again"):
                assert torch.equal(one[name], whole[name].split(shares)[rank]), name


def test_a_checkpoint_has_updated_buffers(tmp_path: Path) -> None:
    def steps(model: Any, optimizer: torch.optim.Optimizer, some: range) -> Any:
        for step in some:
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        return state(model)

    def adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def saved(rank: int) -> Any:
        model = parallel(BOTH, 0.3)
        optimizer = adam(model)
        steps(model, optimizer, range(2))
        autopart.save(tmp_path, model, optimizer)
        return steps(model, optimizer, range(2, 4))

    def resumed(rank: int, called: bool) -> Any:
        model = parallel(BOTH, 0.3)
        optimizer = adam(model)
        if called:
            steps(model, optimizer, range(5, 6))
        autopart.load(tmp_path, model, optimizer)
        return steps(model, optimizer, range(2, 4))

    (expected, *_) = LocalWorld(4).run(saved)
    for called in (False, True):
        for found in LocalWorld(4).run(resumed, called):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), called
