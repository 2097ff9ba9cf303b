"""Layers of experts whose rows are sorted, in the forms of `test_rows`, with experts that are worth dealing out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.test_rows import CHOSEN, EXPERTS, WIDTH, Experts, Mixture

SAMPLES, LENGTH, HIDDEN = 6, 3, 96


class Layer(Mixture):
    """A mixture with a residual. `bias` is added to what tokens give experts: a large one sends all rows to some.

    Tokens may choose `spare` experts more than there are, which compute nothing.
    """

    def __init__(self, experts: Experts, seed: int, bias: tuple[float, ...] = (0.0,) * EXPERTS, spare: int = 0) -> None:
        super().__init__(experts)
        self.gate = nn.Linear(WIDTH, EXPERTS + spare)
        draw = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, generator=draw) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw) / 10)
        self.gate.weight.data = torch.randn(self.gate.weight.shape, generator=draw)
        self.gate.bias.data = torch.tensor([*bias, *[0.0] * spare])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
        return (tokens + self.experts(self, tokens, ids, weights)).view_as(x)


class Layers(nn.Module):
    """Two such layers, and a loss."""

    def __init__(self, experts: Experts, bias: tuple[float, ...] = (0.0,) * EXPERTS, spare: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts, seed, bias, spare) for seed in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tokens(samples: int = SAMPLES) -> Tensor:
    """Samples of `LENGTH` tokens."""
    return torch.randn(samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
