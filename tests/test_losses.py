"""Losses in every way that people write them, on batches that do not divide evenly: each equals one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.testing import assert_parity

CLASSES, LENGTH = 4, 3

Loss = Callable[[torch.Tensor], torch.Tensor]


class Tokens(nn.Module):
    """Two layers that give logits [batch, length, classes], and a loss of these with the given data."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.embed, self.head = nn.Embedding(9, 5), nn.Linear(5, CLASSES)

    def forward(self, ids: torch.Tensor, *data: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(torch.tanh(self.embed(ids))), *data)


def labels() -> torch.Tensor:
    """Classes, of which some are ignored; one sample has none."""
    found = torch.randint(0, CLASSES, (5, LENGTH))
    found[0], found[1, 1:] = -100, -100
    return found


def real() -> torch.Tensor:
    return torch.randn(5, LENGTH, CLASSES)


def positive() -> torch.Tensor:
    return torch.rand(5, LENGTH, CLASSES)


def weighted(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Weights a token, normalised by their sum."""
    each = F.cross_entropy(x.transpose(1, 2), y, reduction="none", ignore_index=-100)
    return (each * w).sum() / (w * (y != -100)).sum()


def focal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(x.transpose(1, 2), y.clamp(min=0), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def heads(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Two heads: classes that are counted, and a regression that is not."""
    return F.cross_entropy(x.flatten(0, 1), y.flatten()) + 0.3 * F.mse_loss(x, z) + 0.1 * x.logsumexp(-1).sum()


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum over valid tokens by a count that is at least one."""
    keep = y != -100
    return (x.square().sum(-1) * keep).sum() / keep.sum().clamp(min=1)


def smoothed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=x.dtype)
    return F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=weight, label_smoothing=0.2)


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], tuple[Callable[[], torch.Tensor], ...]]] = {
    "sum": (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"), (labels,)),
    "mean of samples": (
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none").sum(1).mean(), (labels,)
    ),
    "count": (counted, (labels,)),
    "weights a token": (weighted, (labels, lambda: torch.rand(5, LENGTH))),
    "label smoothing and class weights": (smoothed, (labels,)),
    "probabilities as targets": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1)), (lambda: positive().softmax(-1),)
    ),
    "focal": (focal, (labels,)),
    "kl batchmean": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"), (lambda: positive().softmax(-1),)
    ),
    "kl of logarithms": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="sum", log_target=True), (lambda: real().log_softmax(-1),)
    ),
    "bce with logits": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=torch.full((4,), 2.0, dtype=x.dtype)),
        (lambda: (real() > 0).double(), positive),
    ),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), (positive,)),
    "heads": (heads, (labels, real)),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.5), (real,)),
    "poisson": (lambda x, y: F.poisson_nll_loss(x, y), (positive,)),
    "cosine": (lambda x, y: F.cosine_embedding_loss(x[:, 0], y[:, 0], torch.ones(len(x))), (real,)),
    "margin ranking": (lambda x, y: F.margin_ranking_loss(x, y, (y > 0) * 2 - 1, margin=0.1), (real,)),
    "triplet": (lambda x, y, z: F.triplet_margin_loss(x[:, 0], y[:, 0], z[:, 0]), (real, real)),
    "hinge": (lambda x, y: F.hinge_embedding_loss(x, (y > 0) * 2 - 1), (real,)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_one_device(name: str) -> None:
    loss, data = LOSSES[name]
    args = (torch.randint(0, 9, (5, LENGTH)), *(make() for make in data))
    assert_parity(Tokens(loss), args, steps=1, mesh={"dp": 2}, microbatches=2)


COUPLED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "contrastive": (lambda x: F.cross_entropy(x[:, 0] @ x[:, 0].T, torch.arange(len(x))), "couples the samples"),
    "the square of a mean": (lambda x: x.mean() ** 2, "couples the samples"),
    "a norm over the batch": (lambda x: x.norm(), "couples the samples"),
    "the largest": (lambda x: x.max(), "couples the samples"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_of_the_whole_batch_or_refused(name: str) -> None:
    """With one microbatch it equals one device's; with several it is refused."""
    loss, message = COUPLED[name]
    assert_parity(Tokens(loss), (torch.randint(0, 9, (4, LENGTH)),), steps=1, mesh={"dp": 2})
    model = autopart.parallelize(Tokens(loss), mesh={"dp": 2}, microbatches=2, capture="direct")
    with pytest.raises(autopart.CaptureError, match=message) as refusal:
        model(torch.randint(0, 9, (4, LENGTH)))
    assert "test_losses.py" in str(refusal.value) and f"Inputs: ids [batch, {LENGTH}]" in str(refusal.value)


def ctc(x: torch.Tensor) -> torch.Tensor:
    """The kernel sizes its tables by the longest target, a value."""
    targets = torch.ones(len(x), 2, dtype=torch.long)
    return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), targets, targets[:, 0] * LENGTH, targets[:, 0])


def gaussian(x: torch.Tensor) -> torch.Tensor:
    """torch's own check for negative variances looks at them."""
    return F.gaussian_nll_loss(x, x.detach(), x.detach().exp())


@pytest.mark.parametrize("loss", [ctc, gaussian])
@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_a_loss_whose_code_looks_at_values_is_refused_with_its_line(loss: Loss, capture: str) -> None:
    model: Any = autopart.parallelize(Tokens(loss), mesh={"dp": 2}, microbatches=1, capture=capture)
    with pytest.raises(autopart.CaptureError, match=r"test_losses\.py:\d+"):
        model(torch.randint(0, 9, (4, LENGTH)))
