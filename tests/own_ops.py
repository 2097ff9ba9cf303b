"""Operators as users make them, with the rules that they register for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import autopart
from autopart import _torch
from autopart.rules.own import forget


@torch.library.custom_op("autopart_tests::fused", mutates_args=())
def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A product after a tanh."""
    return torch.tanh(x) @ weight.t() + bias


@fused.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("autopart_tests::fused_backward", mutates_args=())
def fused_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, of the weight and of the bias."""
    y = torch.tanh(x)
    return (grad @ weight) * (1 - y * y), torch.einsum("bsk,bsh->kh", grad, y), grad.sum((0, 1))


@fused_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


fused.register_autograd(lambda ctx, grad: fused_backward(grad, *ctx.saved_tensors), setup_context=_save)


@torch.library.custom_op("autopart_tests::share", mutates_args=())
def share(x: torch.Tensor) -> torch.Tensor:
    """A softmax along the last dim."""
    return x.softmax(-1)


@share.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopart_tests::stretch", mutates_args=())
def stretch(x: torch.Tensor, count: int) -> torch.Tensor:
    """Every row `count` times, [b, h] -> [b, count, h]."""
    return x.unsqueeze(1).repeat(1, count, 1)


@stretch.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], count, x.shape[1])


@torch.library.custom_op("autopart_tests::total", mutates_args=())
def total(xs: list[torch.Tensor], scale: torch.Tensor | None) -> torch.Tensor:
    """The sum of tensors, times a row of factors."""
    made = torch.stack(xs).sum(0)
    return made if scale is None else made * scale


@total.register_fake
def _(xs: list[torch.Tensor], scale: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(xs[0])


@torch.library.custom_op("autopart_tests::liar", mutates_args=())
def liar(x: torch.Tensor) -> torch.Tensor:
    """Returns one column, and says that it returns them all."""
    return x.sum(-1, keepdim=True)


@liar.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopart_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Another result each time."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


FUSED = (fused, "b s h, k h, k -> b s k", {"linear": ("weight bias",)})
FUSED_BACKWARD = (
    fused_backward, "b s k, b s h, k h -> b s h, k h, k", {"linear": ("grad",), "reads": {2: "grad"}}
)  # fmt: skip


@contextlib.contextmanager
def registered(*rules: tuple[Any, ...]) -> Iterator[None]:
    """Operators with their rules, each as (op, text) or (op, text, options), for as long as a test takes."""
    done = []
    try:
        for op, text, *options in rules:
            autopart.register_sharding_rule(op, text, **(options[0] if options else {}))
            done.append(_torch.operator(op))
        yield
    finally:
        for found in done:
            forget(found)


def sample_fused() -> tuple[torch.Tensor, ...]:
    """Arguments of `fused`, no two sizes alike."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(shape, generator=generator).double() for shape in ((6, 3, 4), (5, 4), (5,)))
