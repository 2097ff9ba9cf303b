"""Decompositions that make a loss's divisor visible: every mean over the batch becomes a sum and a division.

The count of valid targets inside ``nll_loss`` is invisible in the raw graph. Here the fused kernel is kept with
``reduction="sum"``, and the count becomes nodes of its own that depend on the targets only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopart import _torch
from autopart.capture import randomness

MEAN, SUM = 1, 2


def table() -> dict[Any, Callable[..., Any]]:
    """The decomposition table to trace with."""
    aten = torch.ops.aten
    ready = _torch.decompositions(
        [
            aten.mse_loss,
            aten.mse_loss_backward,
            aten.smooth_l1_loss,
            aten.smooth_l1_loss_backward,
            aten.huber_loss,
            aten.huber_loss_backward,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.soft_margin_loss_backward,
            aten.nll_loss2d_forward,
            aten.nll_loss2d_backward,
        ]
    )
    own: dict[Any, Callable[..., Any]] = {
        aten.nll_loss_forward.default: _nll_loss_forward,
        aten.nll_loss_backward.default: _nll_loss_backward,
    }
    return {**ready, **own, **randomness.decompositions()}


def _nll_loss_forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    total, _ = torch.ops.aten.nll_loss_forward(logits, target, weight, SUM, ignore_index)
    valid = target != ignore_index
    if weight is None:
        count = valid.sum().to(logits.dtype)
    else:
        picked = weight.index_select(0, torch.where(valid, target, 0).flatten())
        count = torch.where(valid.flatten(), picked, 0).sum()
    return total / count, count


def _nll_loss_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    return torch.ops.aten.nll_loss_backward(
        grad / total_weight, logits, target, weight, SUM, ignore_index, total_weight
    )
