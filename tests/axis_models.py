"""Small models for an axis of a sequence and one of experts, clusters on which splitting pays, and their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from examples.gpt import GPT, Config

NEAR = Cluster.uniform(8, 2**40, 1e9, 1e11, 1e9, 1e-8)
"""Products take long, and so does each byte that is sent; messages as such do not."""

SAMPLES, LONG, SHORT, WIDTH, EXPERTS = 2, 96, 16, 16, 4


class Experts(nn.Module):
    """Experts as batched weights, the best two of which each token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 3 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 3 * WIDTH, WIDTH) / 7)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of each expert a token takes, and which are its two."""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mask = F.one_hot(chosen, EXPERTS).to(x.dtype)
        return (weights.unsqueeze(-1) * mask).sum(-2), mask.sum(-2)


class Dense(Experts):
    """Every expert sees every token, and counts where its gate is open."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        gates, _ = self.gates(h)
        hidden = F.gelu(torch.einsum("bsd,edf->ebsf", h, self.up))
        made = torch.einsum("ebsf,efd->ebsd", hidden, self.down)
        return x + torch.einsum("ebsd,bse->bsd", made, gates)


class Capacity(Experts):
    """Each of four groups of a sequence has so many places at each expert; tokens that find none are dropped."""

    groups, places = 4, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = self.norm(x).unflatten(1, (self.groups, -1))
        gates, mask = self.gates(grouped)
        turn = mask.cumsum(2) * mask
        slots = torch.arange(1, self.places + 1, device=x.device)
        dispatch = (turn.unsqueeze(-1) == slots).to(x.dtype)
        sent = torch.einsum("bgsec,bgsd->ebgcd", dispatch, grouped)
        hidden = F.gelu(torch.einsum("ebgcd,edf->ebgcf", sent, self.up))
        made = torch.einsum("ebgcf,efd->ebgcd", hidden, self.down)
        back = torch.einsum("ebgcd,bgsec,bgse->bgsd", made, dispatch, gates)
        return x + back.flatten(1, 2)


class Routed(nn.Module):
    """Causal attention, then experts of a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Capacity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.experts(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Mixture(nn.Module):
    """Layers between an embedding and a loss over the vocabulary."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(Config(layers=2, width=WIDTH, heads=4, context=LONG, vocabulary=24)),
    "dense": lambda: Mixture(Dense),
    "capacity": lambda: Mixture(Capacity),
    "routed": lambda: Mixture(Routed),
}


@cache
def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    """A model in float64, its call, and its step in segments."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    ids = torch.randint(24, (SAMPLES, LONG if name == "gpt" else SHORT))
    args = ids, ids.roll(-1, 1)
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, "direct"))


@cache
def program(name: str, mesh: tuple[tuple[str, int], ...], cluster: Cluster = NEAR, **pins: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=cluster, **pins))
