"""Small models whose attention is cheapest in a ring: few heads for the places, long sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.placed import Cut, Strategy
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from autopart.rules.strategies import Ruled, strategies

NEAR = Cluster.uniform(8, 2**40, 1e9, 1e18, 1e9, 0.0)
"""Products take long, and so does each byte that is sent; nothing else does."""

SAMPLES, WIDTH, CLASSES = 2, 12, 20


class Layer(nn.Module):
    """Attention of some heads, which share those of keys and values, and an MLP."""

    def __init__(self, heads: int, shared: int, *, causal: bool, again: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.again = heads, causal, again
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // heads * shared) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        apart = (h.size(0), h.size(1), -1, WIDTH // self.heads)
        query, key, value = (part(h).view(apart).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=key.size(1) != self.heads, scale=0.4
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Linear(nn.Module):
    """Linear attention, its right product first: a state of keys and values, the same for all queries (LASP)."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        parts = (part(h).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        state, total = key.transpose(-1, -2) @ value, key.sum(-2, keepdim=True).transpose(-1, -2)
        mixed = (query @ state) / (query @ total)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers between an embedding and a loss."""

    def __init__(self, length: int, heads: int, shared: int, *, causal: bool, again: bool, linear: bool) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(CLASSES, WIDTH), nn.Embedding(length, WIDTH)
        layer = Linear if linear else partial(Layer, heads, shared, causal=causal, again=again)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


CASES: Mapping[str, dict[str, Any]] = {
    "all": {"length": 24},
    "uneven": {"length": 23},
    "causal": {"length": 24, "causal": True},
    "grouped": {"length": 24, "heads": 4, "shared": 1, "causal": True},
    "pairs": {"length": 23, "heads": 4, "shared": 2},
    "again": {"length": 24, "causal": True, "again": True},
    "heads": {"length": 24, "heads": 4, "shared": 4, "causal": True},
    "linear": {"length": 192, "linear": True},
    "linear, half as long": {"length": 96, "linear": True},
}
"""What each model is; of one head where nothing is said."""


@cache
def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    """A model in float64, its call, and its step in segments."""
    torch.manual_seed(0)
    usual = {"heads": 1, "shared": 1, "causal": False, "again": False, "linear": False}
    model = Model(**{**usual, **CASES[name]}).double()
    ids = torch.randint(CLASSES, (SAMPLES, CASES[name]["length"]))
    args = ids, ids.roll(-1, 1)
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, route(name)))


def route(name: str) -> str:
    """How a model is captured: checkpoint regions are seen by one route alone."""
    return "compile" if CASES[name].get("again") else "direct"


@cache
def program(name: str, mesh: tuple[tuple[str, int], ...], cluster: Cluster = NEAR, **pins: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=cluster, **pins))


def only_rings(ruled: Ruled, cuts: Iterable[Cut], degree: int, **kinds: bool) -> tuple[Strategy, ...]:
    """The strategies of a node; of attention only those in a ring, where there are such."""
    found = strategies(ruled, cuts, degree, **kinds)
    return tuple(strategy for strategy in found if strategy.ring) or found


@cache
def forced(name: str, mesh: tuple[tuple[str, int], ...], cluster: Cluster = NEAR, **pins: Any) -> Program:
    """The program in which attention goes in a ring, whatever is cheapest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autopart.solver.tensor.strategies", only_rings)
        return program.__wrapped__(name, mesh, cluster, **pins)
