"""Norms over gradients of which a rank holds parts: every gradient counted once over the whole world."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from autopart import _torch


class Holder(Protocol):
    """A parallelised model whose parameters are parts on this rank."""

    def owned(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients among `parameters`' that this rank counts for the world."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of the model's parameters, or one's gradient."""

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter that `tensor` is, or is the gradient of."""

    def sum_over_world(self, number: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """The sum (or the largest) of a number over all ranks."""


# torch's functions are shared by the whole process, and so is the list of models whose gradients they must see whole.
_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(holder: Holder) -> None:
    """Make torch's norm functions give global answers for a model's gradients."""
    _HOLDERS.add(holder)
    _torch.intercept_norms(_clip, _norm)


def total_norm(holder: Holder, parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all gradients of `parameters` over the whole world, the same on every rank."""
    parameters = list(parameters)
    grads = holder.owned(parameters)
    dtype = (grads or parameters or [torch.zeros(())])[0].dtype
    norm_type = float(norm_type)
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    if norm_type == float("inf"):
        local = torch.stack(norms).max() if norms else torch.zeros(())
        return holder.sum_over_world(local, largest=True).to(dtype)
    if norm_type == float("-inf") or norm_type == 0:
        raise ValueError(f"norm_type: {norm_type} is not supported on gradients that are spread over ranks")
    local = torch.stack([norm.pow(norm_type) for norm in norms]).sum() if norms else torch.zeros((), dtype=dtype)
    return holder.sum_over_world(local).pow(1.0 / norm_type).to(dtype)


def clip(holder: Holder, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; returns the norm before."""
    parameters = list(parameters)
    norm = total_norm(holder, parameters, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _clip(original: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **more: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if all(_holder(parameter) is None for parameter in parameters):
        return original(parameters, max_norm, norm_type, *rest, **more)
    norm = _over_all(parameters, norm_type)
    _raise_nonfinite(norm, norm_type, rest[0] if rest else more.get("error_if_nonfinite", False))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(original: Any, tensors: Any, norm_type: float = 2.0, *rest: Any, **more: Any) -> Any:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    holders = {id(tensor): _holder(tensor) for tensor in tensors}
    if all(holder is None for holder in holders.values()):
        return original(tensors, norm_type, *rest, **more)
    plain = [tensor for tensor in tensors if holders[id(tensor)] is None]
    held = [holder.parameter_of(t) for t in tensors if (holder := holders[id(t)]) is not None]
    norms = [_over_all(held, norm_type), *(torch.linalg.vector_norm(tensor, float(norm_type)) for tensor in plain)]
    norm = norms[0] if not plain else torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    _raise_nonfinite(norm, norm_type, rest[0] if rest else more.get("error_if_nonfinite", False))
    return norm


def _over_all(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm over the parameters of several parallelised modules, and of plain ones, which every rank has whole."""
    norms = []
    waiting = list(parameters)
    while waiting:  # in the order of the parameters, which is the same on every rank
        holder = _holder(waiting[0])
        mine = [p for p in waiting if _holder(p) is holder]
        waiting = [p for p in waiting if _holder(p) is not holder]
        if holder is not None:
            norms.append(total_norm(holder, mine, norm_type))
        else:
            norms += [torch.linalg.vector_norm(p.grad, float(norm_type)) for p in mine if p.grad is not None]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), float(norm_type))


def _holder(tensor: torch.Tensor) -> Holder | None:
    return next((holder for holder in list(_HOLDERS) if holder.holds(tensor)), None)


def _raise_nonfinite(norm: torch.Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is not finite, so it cannot be clipped"
        )
