"""Delivery: the planned backward has run; ``loss.backward()`` scales its gradients and hands them to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, gradient of the loss with respect to what the parameter holds here)."""


class _Deliver(torch.autograd.Function):
    """The identity on the loss; its backward adds ``incoming * gradient`` to each parameter's ``.grad``."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, box: list[Pairs]) -> torch.Tensor:
        ctx.box = box
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.box:
            raise RuntimeError(
                "the gradients of this loss were delivered by an earlier backward(); call the model again"
            )
        incoming = grads[0]
        exactly_one = incoming.device.type == "cpu" and incoming.item() == 1.0
        for parameter, gradient in ctx.box.pop():
            # detached, for a view of a flat buffer would keep its dtype when module.double() replaces its data
            scaled = gradient.detach() if exactly_one else gradient * incoming.to(gradient.dtype)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None


def delivering(loss: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """The loss as a tensor whose ``backward()`` delivers `pairs`, once."""
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    with torch.enable_grad():
        made: torch.Tensor = _Deliver.apply(anchor, loss, [pairs])  # type: ignore[no-untyped-call]
    return made
