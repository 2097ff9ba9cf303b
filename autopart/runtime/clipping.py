"""Norms over gradients of which a rank holds parts: every gradient counted once over the whole world."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from autopart.runtime import unreduced
from autopart.runtime.autograd import Pairs
from autopart.runtime.holders import holders_of
from autopart.runtime.residence import Residence


def clip(
    original: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **more: Any
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` on parameters of which some may be parts; `original` is torch's own.

    Returns the global norm before. Raises ValueError for orders 0 and -inf on parts, RuntimeError with
    `error_if_nonfinite` for a norm that is not finite, and while gradients wait under `no_sync`.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    unreduced.check(parameters, "clip_grad_norm_")
    held = holders_of(parameters)
    if not any(held):
        result: torch.Tensor = original(parameters, max_norm, norm_type, *rest, **more)
        return result
    pairs = [(p.grad, found) for p, found in zip(parameters, held, strict=True) if p.grad is not None]
    norm = _total(pairs, parameters, norm_type)
    _raise_nonfinite(norm, norm_type, rest[0] if rest else more.get("error_if_nonfinite", False))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def total_norm(original: Any, tensors: Any, norm_type: float = 2.0, *rest: Any, **more: Any) -> torch.Tensor:
    """``torch.nn.utils.get_total_norm`` of parameters or gradients of which some may be parts; else as `clip`."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    unreduced.check(tensors, "get_total_norm")
    held = holders_of(tensors)
    if not any(held):
        result: torch.Tensor = original(tensors, norm_type, *rest, **more)
        return result
    norm = _total(list(zip(tensors, held, strict=True)), tensors, norm_type)
    _raise_nonfinite(norm, norm_type, rest[0] if rest else more.get("error_if_nonfinite", False))
    return norm


def norm_of(pairs: Pairs) -> torch.Tensor:
    """The 2-norm of the gradients of (parameter, gradient) pairs over the whole world, as `clip` finds it. Collective
    where some are parts.
    """
    parameters = [parameter for parameter, _ in pairs]
    gradients = [gradient for _, gradient in pairs]
    return _total(list(zip(gradients, holders_of(parameters), strict=True)), parameters, 2.0)


def norm_here(pairs: Pairs) -> torch.Tensor:
    """What this rank contributes to that norm, in float64."""
    held = holders_of(parameter for parameter, _ in pairs)
    mine = zip(pairs, held, strict=True)
    return _norm((gradient for (_, gradient), found in mine if found is None or found[0].counts(found[1])), 2.0)


def _total(
    pairs: Sequence[tuple[torch.Tensor, tuple[Residence, str] | None]], like: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of all tensors over the whole world, the same on every rank; plain tensors are whole on every rank."""
    order = float(norm_type)
    if order == float("-inf") or order == 0:
        raise ValueError(f"norm_type: {norm_type} is not supported on gradients that are spread over ranks")
    # Every rank has the same parameters, if not the same parts of them, so all round alike.
    dtype = functools.reduce(torch.promote_types, (t.dtype for t, _ in pairs), (pairs or [(like[0], None)])[0][0].dtype)
    holders = list(dict.fromkeys(found[0] for _, found in pairs if found is not None))
    norms = [_norm((t for t, found in pairs if found is None), order)]
    for holder in holders:  # in the order of the parameters, which is the same on every rank
        mine = _norm((t for t, f in pairs if f is not None and f[0] is holder and holder.counts(f[1])), order)
        if order == float("inf"):
            norms.append(holder.sum_over_world(mine, largest=True))
        else:
            norms.append(holder.sum_over_world(mine.pow(order)).pow(1.0 / order))
    device = like[0].device
    joined = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), order)
    return cast(torch.Tensor, joined.to(dtype))


def _norm(tensors: Iterable[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of this rank's tensors, in float64 (a part may be empty, of which some norms have none)."""
    norms = [torch.linalg.vector_norm(tensor, order).double() for tensor in tensors if tensor.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return cast(torch.Tensor, torch.linalg.vector_norm(torch.stack(norms), order))


def _raise_nonfinite(norm: torch.Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is not finite, so it cannot be clipped"
        )
