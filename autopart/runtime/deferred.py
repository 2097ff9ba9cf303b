"""Outputs whose ``backward()`` runs the rest of a step: what a module without a loss returns in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopart.runtime.autograd import own, refuse_create_graph
from autopart.runtime.transport import Transport

Backward = Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]
"""From the gradients of the outputs (None for zero) to those of the leaves (None where there is none)."""


class _Deferred(torch.autograd.Function):
    """From leaves (parameters, inputs) to outputs that are computed already; `backward` makes the leaves' gradients."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[torch.Tensor], backward: Backward, *leaves: torch.Tensor) -> Any:
        ctx.rest = [backward]
        ctx.set_materialize_grads(False)
        # fresh objects: the suspended step holds the others, and the graph holds the step
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.rest:
            raise RuntimeError(
                "the backward of this call of the module ran in an earlier backward() and kept nothing "
                "(retain_graph=True has no effect on it); add the losses and call backward() once, or call the module "
                "again"
            )
        refuse_create_graph()
        seen: set[int] = set()
        made = ctx.rest.pop()(grads)
        return None, None, *(gradient if gradient is None else own(gradient, seen) for gradient in made)


def deferred(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], backward: Backward
) -> tuple[torch.Tensor, ...]:
    """The outputs as differentiable functions of the leaves; `backward` is called at most once."""
    with torch.enable_grad():
        made: tuple[torch.Tensor, ...] = _Deferred.apply(outputs, backward, *leaves)  # type: ignore[no-untyped-call]
    return made


class Unchanged:
    """Tensors that a backward reads again; `check` raises RuntimeError if one was changed in place since."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._versions = {name: (tensor, tensor._version) for name, tensor in tensors.items()}

    def check(self) -> None:
        """Compare the versions that torch counts."""
        for name, (tensor, version) in self._versions.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"{name} was changed in place between the call of the module and backward(), which needs it as it "
                    "was; call backward() before optimizer.step(), or change a copy"
                )


def agree(transport: Transport, tangents: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError on every rank unless all come with the same gradients of the outputs, but for rounding."""
    if transport.size == 1:
        return
    mine = {name: _sums(tangent) for name, tangent in tangents.items()}
    every = transport.all_gather_object(mine, tuple(range(transport.size)))
    for name, (total, size) in every[0].items():
        for rank, other in enumerate(every):
            same = math.isclose(other[name][0], total, rel_tol=0, abs_tol=1e-3 * size)
            if not (same or repr(other[name]) == repr((total, size))):
                raise ValueError(
                    f"the ranks compute different losses: rank {rank}'s gradient of the module's "
                    f"{name.removeprefix('d_')} is not rank 0's; every rank gets whole outputs and computes the same "
                    "loss of the whole batch"
                )


def _sums(tangent: torch.Tensor) -> tuple[float, float]:
    real = torch.view_as_real(tangent) if tangent.is_complex() else tangent
    return float(real.sum(dtype=torch.float64)), float(real.abs().sum(dtype=torch.float64))
