"""Small models for a tensor axis, clusters on which splitting is worth it, and their programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api import parallelize
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from autopart.testing import reference_random
from examples.gpt import GPT, Config
from tests.models import MODELS as SMALL

LATE = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-4)
"""Products take long, and so does each message: worth splitting are rows and columns of weights, not norms."""

CHEAP = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-8)
"""Messages cost nothing: all that can be split is."""

SAMPLES, LENGTH, WIDTH = 7, 8, 24
"""As many samples as no axis here divides: it is dims of tensors that are split."""


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Grouped(nn.Module):
    """A layer as in Llama: root mean square norms, rotary places, four query heads on two of keys, a gated MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        batch, length, width = h.shape
        q, k, v = (p(h).view(batch, length, -1, width // 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Grouped(width) for _ in range(2))
        self.head = nn.Linear(width, 32, bias=False)
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.3])).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Dropping(nn.Module):
    """A hidden layer with dropout, which counts its calls; it returns its output too, or that alone."""

    def __init__(self, *, loss: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.loss = nn.Linear(8, 30), nn.Linear(30, 8), nn.Dropout(0.3), loss
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        self.calls.add_(1)
        h = self.down(self.drop(torch.relu(self.up(x))))
        return h if y is None else (F.mse_loss(h, y), h)


def gpt(layers: int = 2) -> tuple[nn.Module, tuple[Any, ...]]:
    config = Config(layers=layers, width=WIDTH, heads=6, context=LENGTH, vocabulary=40)
    ids = torch.randint(40, (SAMPLES, LENGTH))
    return GPT(config), (ids, ids.roll(-1, 1))


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.randint(32, (SAMPLES, 8))
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100
    return Llama(), (ids, labels)


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = SMALL["mlp"]()
    return model, tuple(tensor[:5] for tensor in args)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": gpt, "gpt of one layer": lambda: gpt(1), "llama": llama, "mlp": mlp,
}  # fmt: skip


@cache
def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    """A model in float64, its call, and its step in segments."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model = model.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, "direct"))


@cache
def program(name: str, mesh: tuple[tuple[str, int], ...], cluster: Cluster = LATE, **pins: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=cluster, **pins))


def axes(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


SPANS = (7, 11), (8, 18), (7, 11), (-9, -4)
"""Powers of ten among which FLOP/s, bytes/s of memory and of links, and seconds a message are drawn."""


def drawn_cluster(draw: Random) -> Cluster:
    """Eight devices, of any speeds."""
    return Cluster.uniform(8, 2**40, *(10 ** draw.uniform(*span) for span in SPANS))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def close_gradients(mine: nn.Module, loss: torch.Tensor, plain: nn.Module, expected: torch.Tensor) -> None:
    """One call has the loss and the gradients of the plain module's."""
    close(loss, expected)
    found = torch.autograd.grad(expected, list(plain.parameters()))
    loss.backward()
    for parameter, gradient in zip(mine.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    mine.zero_grad()


def close_calls(mine: Any, plain: nn.Module, *args: torch.Tensor) -> None:
    """One call has the loss and, brought together, the gradients of the plain module's."""
    loss, expected = mine(*args), plain(*args)
    loss.backward(), expected.backward()
    close(loss, expected)
    grads = mine.full_grads()
    for name, parameter in plain.named_parameters():
        close(grads[name], parameter.grad)
    mine.zero_grad(), plain.zero_grad()


def dropping_is_that_of_one_device(mesh: dict[str, int]) -> Any:
    """All of `Dropping`, beside the plain module: outputs, gradients of inputs, buffers, draws, bytes, evaluation."""
    torch.manual_seed(0)
    plain, x, y = Dropping().double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()
    model = parallelize(copy.deepcopy(plain), mesh=mesh, cluster=CHEAP, capture="direct", outputs="all")
    for call in range(2):
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        loss, out = model(mine, y)
        loss.backward()
        with reference_random(torch.initial_seed(), call):
            expected, whole = plain(theirs, y)
        expected.backward()
        close(loss, expected), close(out, whole), close(mine.grad, theirs.grad)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            close(found.grad, wanted.grad)
    assert float(model.calls) == 2 * model.plan.microbatches
    assert all(rank.bytes_sent == rank.predicted_bytes for rank in model.report().ranks)
    model.eval(), plain.eval()
    with torch.no_grad():
        close(model(x, y)[1], plain(x, y)[1])
    return model


def how(found: Program, target: str) -> Any:
    assert found.plan.tensor is not None
    return dict(found.plan.tensor.parameters)[target]


def solved(name: str, mesh: dict[str, int], placement: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=mesh, cluster=LATE, placement=placement))
