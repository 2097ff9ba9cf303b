"""Delivery: the planned backward has run; ``loss.backward()`` scales its gradients and hands them to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, gradient of the loss with respect to what the parameter holds here), likewise for inputs."""

Later = Callable[[torch.Tensor], Pairs]
"""Pairs that are known when the incoming gradient is, and are scaled by it."""


class _Deliver(torch.autograd.Function):
    """The identity on the loss; its backward adds ``incoming * gradient`` to each parameter's ``.grad``, and hands that
    of the call's inputs on to whatever made them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        box: list[Pairs | Later],
        grads: list[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.box, ctx.grads = box, grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.box:
            raise RuntimeError(
                "the gradients of this loss were delivered by an earlier backward(); call the model again"
            )
        refuse_create_graph()
        incoming, pairs = grads[0], ctx.box.pop()
        if callable(pairs):
            pairs, factor = pairs(incoming), torch.ones((), dtype=incoming.dtype)
        else:
            factor = incoming
        exactly_one = factor.device.type == "cpu" and factor.item() == 1.0
        seen: set[int] = set()
        for parameter, gradient in pairs:
            gradient = own(gradient, seen)
            # detached, for a view of a flat buffer would keep its dtype when module.double() replaces its data
            scaled = gradient.detach() if exactly_one else gradient * factor.to(gradient.dtype)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None, None, *(gradient * incoming.to(gradient.dtype) for gradient in ctx.grads)


def refuse_create_graph() -> None:
    """Raise RuntimeError within a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the backward of a parallelised module is a program, which cannot be differentiated "
            "again; compute what needs second derivatives (a gradient penalty) with a module that is not parallelised"
        )


def own(gradient: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """The gradient as a tensor that may be changed in place: two parameters may have been given one and the same."""
    shared = gradient.data_ptr() in seen and gradient.numel() > 0
    seen.add(gradient.data_ptr())
    return gradient.clone() if shared or not _dense(gradient) else gradient


def _dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory (an expanded tensor's do)."""
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def delivering(loss: torch.Tensor, pairs: Pairs | Later, inputs: Pairs = ()) -> torch.Tensor:
    """The loss as a tensor whose ``backward()`` delivers `pairs`, once, and the gradients of `inputs`."""
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    with torch.enable_grad():
        made: torch.Tensor = _Deliver.apply(  # type: ignore[no-untyped-call]
            anchor, loss, [pairs], [gradient for _, gradient in inputs], *(tensor for tensor, _ in inputs)
        )
    return made
