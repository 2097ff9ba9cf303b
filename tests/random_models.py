"""Small models that draw random numbers, each with a sample batch, as in `tests.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Sample = tuple[nn.Module, tuple[Any, ...]]


class Layer(nn.Module):
    """A layer that drops by a module, and by a function while it trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)


class Dropping(nn.Module):
    """Equal layers, of which `checkpointed` ones run again in the backward."""

    def __init__(self, layers: int = 4, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.h = nn.ModuleList(Layer(8) for _ in range(layers))
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return F.mse_loss(self.out(x), y)


class Noise(nn.Module):
    """One of every kind of draw; those of `weight`'s shape are equal for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.5)
        self.alpha, self.out = nn.AlphaDropout(0.2), nn.Linear(36, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.alpha(F.selu(self.channels(self.conv(x)))).flatten(1)
        h = h + torch.rand_like(h) * h + torch.randn(h.shape, dtype=h.dtype) * 0.1 + torch.randint_like(h, 3)
        h = h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.normal(torch.zeros_like(h), 0.1)
        weight = self.out.weight * (1 + 0.1 * torch.randn_like(self.out.weight))
        return F.mse_loss(F.gumbel_softmax(F.linear(h, weight, self.out.bias), tau=0.7), y)


class Encoder(nn.Module):
    """torch's own transformer layer, whose attention drops its weights, and a two-layer LSTM with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.lstm, self.out = nn.LSTM(8, 2, 2, dropout=0.3, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.lstm(self.encoder(x))[0][:, -1]), y)


class Attention(nn.Module):
    """Attention with dropout, causal and with few key/value heads, and its masks as a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop, self.out = nn.Linear(8, 24), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.view(len(x), -1, 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, 2))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True).transpose(1, 2).flatten(2)
        return F.mse_loss(self.out(self.drop(h)[:, 0]), y), self.drop(torch.ones_like(x))


def _sample(model: nn.Module, *shape: int, classes: int = 3) -> Sample:
    return model.double(), (torch.randn(*shape).double(), torch.randn(shape[0], classes).double())


def _made(build: Callable[[], Sample]) -> Callable[[], Sample]:
    def make() -> Sample:
        torch.manual_seed(0)
        return build()

    return make


RANDOM_MODELS: dict[str, Callable[[], Sample]] = {
    "dropping": _made(lambda: _sample(Dropping(), 7, 8)),
    "checkpointed": _made(lambda: _sample(Dropping(checkpointed=True), 7, 8)),
    "noise": _made(lambda: _sample(Noise(), 7, 2, 3, 3, classes=4)),
    "encoder": _made(lambda: _sample(Encoder(), 7, 2, 8)),
    "attention": _made(lambda: _sample(Attention(), 7, 5, 8)),
}
"""By name; every batch is of 7 samples, which no number of parts divides."""
