"""Training under ``semantics="accumulate"``: what couples samples sees one slice; buffers that forwards update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api import parallelize
from autopart.errors import CaptureError
from autopart.testing import assert_parity
from autopart.testing.parity import Sliced, assert_close, train
from tests.launch import launch


class Residual(nn.Module):
    """Two convolutions with their norms, and the way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm_one(self.one(x)))
        return F.relu(x + self.norm_two(self.two(h)))


class ResNet(nn.Module):
    """A residual CNN with BatchNorm, and a count of its forwards; without labels it returns the logits."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(Residual(4) for _ in range(3))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.reduction = reduction

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h.mean((2, 3)))
        return logits if y is None else F.cross_entropy(logits, y, reduction=self.reduction, ignore_index=-1)


def images(count: int = 11, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded images with labels, of which the first `ignored` are to be ignored."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(count, 2, 4, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    y[:ignored] = -1
    return x, y


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    return make().double()


def targets(args: tuple[Any, ...], kwargs: Any) -> float:
    """The number of valid targets of a call of `ResNet`."""
    return int((args[1] != -1).sum())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


ROWS = [
    ({"mesh": {"dp": 2}, "microbatches": 2}, "mean", 4),  # the first slice has no valid target
    ({"mesh": {"dp": 2}, "microbatches": 2, "placement": "zero1"}, "sum", 0),
    ({"mesh": {"pp": 2}, "microbatches": 3}, "mean", 0),
    ({"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "placement": "fsdp"}, "mean", 6),  # nor the first data rank
]


@pytest.mark.parametrize(("pins", "reduction", "ignored"), ROWS)
def test_residual_network_with_batch_norm(pins: dict[str, Any], reduction: str, ignored: int) -> None:
    weight = targets if reduction == "mean" else lambda args, kwargs: 1
    model = seeded(lambda: ResNet(reduction))
    assert_parity(model, images(11, ignored), steps=2, semantics="accumulate", weight=weight, **pins)


class Two(nn.Module):
    """Three linear layers and some buffers, for the forwards below."""

    forwards: Any

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.randn(3, 6))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.two(self.one(x).tanh())
        return hidden


def contrastive(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    queries, keys = F.normalize(self.hidden(x), dim=1), F.normalize(self.hidden(x.flip(1)), dim=1)
    return F.cross_entropy(queries @ keys.T / 0.1, torch.arange(len(x)))


def statistics_by_hand(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.one(x)
    h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    return ((self.out(self.two(h).tanh()) - y) ** 2).sum() / (3 * len(x))


def statistics_of_inputs(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((self.out(self.hidden(x - x.mean(0))) - y) ** 2).mean()


def softmax_over_the_batch(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.hidden(x)
    return (self.out(h.softmax(0) * h) - y).pow(2).mean() + torch.logsumexp(h, 0).mean()


def router(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.one(x).tanh()
    probabilities = self.out(h).softmax(-1)
    share = F.one_hot(probabilities.argmax(-1), 3).to(h.dtype).mean(0)
    balance = 3 * (share * probabilities.mean(0)).sum()
    h = self.two(h) * probabilities.amax(-1, keepdim=True)
    return (self.out(h) - y).pow(2).mean() + 0.01 * balance + 1e-3 * (self.two.weight**2).sum()


def masked(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h, mask = self.one(x), y[:, 0] > 0
    squared = ((self.out(self.two(h - h.mean(0))) - y) ** 2).sum(-1)
    return (squared * mask).sum() / mask.sum()


def scaled_before_the_sum(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.one(x)
    return ((self.out(self.two(h - h.mean(0))) - y) ** 2 / (3 * len(x))).sum()


def masked_before_the_sum(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h, mask = self.one(x), (y[:, 0] > 0).to(x.dtype)
    return (((self.out(self.two(h - h.mean(0))) - y) ** 2).sum(-1) * mask / mask.sum()).sum()


def moving_average(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    h = self.hidden(x)
    before = h * self.mean.clone()  # by the value that it had before this forward, whose backward reads it later
    with torch.no_grad():
        self.mean.lerp_(h.mean(0), 0.1)
    return ((self.out(before + h - self.mean) - y) ** 2).mean() * (self.steps / 10).clamp(max=1.0)


def codebook(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.hidden(x)
    nearest = (h[:, None] - self.codes).pow(2).sum(-1).argmin(1)
    code = self.codes[nearest]
    loss = (self.out(h + (code - h).detach()) - y).pow(2).mean() + 0.25 * (h - code).pow(2).mean()
    with torch.no_grad():
        self.codes.mul_(0.9).add_(F.one_hot(nearest, 3).to(h.dtype).T @ h, alpha=0.1)
    return loss


def nothing_coupled(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((self.out(self.hidden(x)) - y) ** 2).mean()


def model_of(forward: Callable[..., Any]) -> Any:
    return seeded(type("Model", (Two,), {"forward": forward}))


def vectors(count: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 3, generator=generator)


FORWARDS = [
    contrastive,
    statistics_by_hand,
    statistics_of_inputs,
    softmax_over_the_batch,
    router,
    masked,
    scaled_before_the_sum,
    masked_before_the_sum,
    moving_average,
    codebook,
    nothing_coupled,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_each_slice_computes_as_if_it_were_the_whole_batch(forward: Callable[..., Any]) -> None:
    weight = (
        (lambda args, kwargs: int((args[1][:, 0] > 0).sum())) if forward in (masked, masked_before_the_sum) else None
    )
    split = {"dp": 2} if forward in (moving_average, codebook) else {"pp": 2, "dp": 2}
    pins = {"mesh": split, "microbatches": 2}
    assert_parity(model_of(forward), vectors(), steps=2, semantics="accumulate", weight=weight, **pins)


def test_what_couples_nothing_equals_the_whole_batch() -> None:
    """Term by term: a mean, a sum and two counts, each whole, as on one device."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, one, two = self.out(self.hidden(x)), y[:, 0] > 0, y[:, 1] > 0.5
        counted = (out[:, 0] * one).sum() / one.sum() + (out[:, 1] * two).sum() / two.sum()
        return out.pow(2).mean() + 0.1 * out.sum() + counted

    model, (x, y) = model_of(forward), tuple(t.double() for t in vectors())
    plain = copy.deepcopy(model)
    parallel = parallelize(model, mesh={"dp": 2}, microbatches=2, semantics="accumulate", capture="direct")
    loss, expected = parallel(x, y), plain(x, y)
    loss.backward(), expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert_close(parallel.full_grads(), {n: p.grad for n, p in plain.named_parameters()}, 1e-9, "gradient of")


def test_outputs_beside_the_loss() -> None:
    """A sum over the samples is that of the batch, a statistic the mean of the slices', the rest is joined."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.one(x)
        out = self.out(self.two(h - h.mean(0)))
        return {"loss": (out - y).pow(2).mean(), "spread": h.std(), "near": (out > y).sum(), "out": out}

    model, (x, y) = model_of(forward), tuple(t.double() for t in vectors())
    pieces = list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
    found = [copy.deepcopy(model)(*piece) for piece in pieces]
    made = parallelize(model, mesh={"pp": 2}, microbatches=3, semantics="accumulate", capture="direct")(x, y)
    assert torch.allclose(made["out"], torch.cat([each["out"] for each in found]), rtol=1e-12)
    assert int(made["near"]) == sum(int(each["near"]) for each in found)
    spread = sum(float(each["spread"].detach()) * len(xs) / len(x) for each, (xs, _) in zip(found, pieces, strict=True))
    assert float(made["spread"]) == pytest.approx(spread, rel=1e-12)


# What is refused


def test_exact_refuses_what_couples_and_names_the_way_out() -> None:
    model = parallelize(seeded(ResNet), devices=1, microbatches=2, capture="direct")
    x, y = images()
    with pytest.raises(CaptureError, match=r"(?s)blocks.0.norm_one.*test_accumulate_sem.*semantics=\"accumulate\""):
        model(x.double(), y)


def test_a_buffer_updated_and_read_on_two_stages_is_refused_by_name() -> None:
    model = parallelize(model_of(codebook), mesh={"pp": 2}, semantics="accumulate", capture="direct")
    with pytest.raises(CaptureError, match=r"the buffer codes is updated in .* on stage 1"):
        model(*(t.double() for t in vectors()))
    assert torch.equal(model.codes, model_of(codebook).codes)


def test_a_norm_needs_two_values() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.out(self.norm(self.hidden(x))) - y).pow(2).mean()

    model = model_of(forward)
    model.norm = nn.BatchNorm1d(6).double()
    model = parallelize(model, mesh={"dp": 2}, microbatches=2, semantics="accumulate", capture="direct")
    with pytest.raises(ValueError, match="7 samples cannot be cut into 4 pieces of 2 samples"):
        model(*(t.double() for t in vectors(7)))
    model(*(t.double() for t in vectors(8))).backward()


# Buffers


def test_f007_counters_count_microbatches_and_nothing_else_touches_them() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return ((self.out(self.hidden(x)) - y) ** 2).mean()

    model, (x, y) = model_of(forward), tuple(t.double() for t in vectors())
    parallel = parallelize(model, mesh={"pp": 2, "dp": 2}, microbatches=3)
    counter = parallel.steps
    for done in range(1, 4):
        loss = parallel(x, y)
        assert int(counter) == 3 * done and all(p.grad is None for p in parallel.parameters())
        if done == 3:
            loss.backward()
    assert parallel.steps is counter and int(parallel.full_state_dict()["steps"]) == 9
    assert parallel.training and parallel.out.training


def test_f009_two_calls_before_one_backward() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(x)).relu()).mean()

    model = model_of(forward)
    model.norm = nn.BatchNorm1d(6).double()
    plain = Sliced(copy.deepcopy(model), 2, 1)
    parallel = parallelize(model, mesh={"dp": 2}, microbatches=1, semantics="accumulate", capture="direct")
    fake, real = vectors(8)[0].double(), vectors(8)[0].flip(0).double() + 1
    for side in (plain, parallel):
        (side(fake) - side(real)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(parallel.full_grads(), expected, 1e-9, "gradient of")
    assert_close(dict(parallel.named_buffers()), dict(plain.named_buffers()), 1e-9, "buffer")


def test_f071_training_and_evaluation_keep_their_modes() -> None:
    model, (x, y) = seeded(ResNet), images(8)
    x = x.double()
    plain = Sliced(copy.deepcopy(model), 1, 2)
    parallel = parallelize(model, mesh={"pp": 2}, microbatches=2, semantics="accumulate")
    start = {name: buffer.clone() for name, buffer in parallel.named_buffers()}
    for side in (plain, parallel):
        train(side, lambda step: ((x, y), {}), 2, sgd, 1.0)
    parallel.eval(), plain.module.eval()
    moved = {name: buffer.clone() for name, buffer in parallel.named_buffers()}
    with torch.no_grad():
        assert torch.allclose(parallel(x), plain.module(x), rtol=1e-9)
        assert torch.equal(parallel(x), parallel(x))
        # On one sample too, which training could not cut.
        assert torch.allclose(parallel(x[:1]), plain.module(x[:1]), rtol=1e-9)
    assert all(torch.equal(buffer, moved[name]) for name, buffer in parallel.named_buffers())
    parallel.train(), plain.module.train()
    assert torch.allclose(parallel(x, y), plain(x, y), rtol=1e-9)
    assert_close(dict(parallel.named_buffers()), dict(plain.named_buffers()), 1e-9, "buffer")
    assert all(not torch.equal(buffer, start[name]) for name, buffer in parallel.named_buffers())


def test_f042_a_part_without_valid_targets_contributes_zero() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.hidden(x)), y)

    for ignored in ([2, 3], [0, 1, 2, 3]):  # microbatch 1 of the first data rank; all of that rank
        labels = torch.arange(8) % 3
        labels[ignored] = -100
        for semantics in ("exact", "accumulate"):
            pins = {"mesh": {"dp": 2}, "microbatches": 2, "semantics": semantics, "capture": "direct"}
            model, x = model_of(forward), vectors(8)[0].double()
            plain = copy.deepcopy(model)
            parallel = parallelize(model, **pins)
            loss, expected = parallel(x, labels), plain(x, labels)
            loss.backward(), expected.backward()
            assert torch.allclose(loss, expected, rtol=1e-12)
            grads = {name: p.grad for name, p in plain.named_parameters()}
            assert_close(parallel.full_grads(), grads, 1e-9, "gradient of")


# Processes


def trains_in_processes(pins: dict[str, Any], ranks: int) -> float:
    """On one process of a group: train, compare with the slices fed one by one, and count the bytes."""
    torch.set_num_threads(1)
    model, (x, y) = seeded(ResNet), images(11, 3)
    plain = Sliced(copy.deepcopy(model), ranks, pins["microbatches"], targets)
    parallel = parallelize(model, semantics="accumulate", capture="direct", **pins)
    found, expected = (train(side, lambda step: ((x.double(), y), {}), 2, sgd, 1.0) for side in (parallel, plain))
    assert_close(found.gradients[1], expected.gradients[1], 1e-9, "gradient of")
    assert_close(found.parameters, expected.parameters, 1e-9, "parameter")
    assert_close(found.buffers, expected.buffers, 1e-9, "buffer")
    report = parallel.report()
    assert report.bytes_sent == report.predicted_bytes, (report.bytes_sent, report.predicted_bytes)
    return found.losses[-1]


@pytest.mark.timeout(300)
def test_gloo_processes() -> None:
    pins = {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}
    assert len(set(launch(trains_in_processes, 4, args=(pins, 2), timeout=240).values)) == 1
