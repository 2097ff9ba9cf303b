"""What keeps the lines of a loop right on parts, or stops them: norms, loss scalers, and optimizer steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart import _torch
from autopart.runtime import clipping, holders, scaling, unreduced
from autopart.runtime.holders import Holder

ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
"""Optimizers that treat every element alone, so that parts of tensors will do."""

TENSORWISE = frozenset({"Adafactor", "Muon", "SparseAdam", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP"})
"""Optimizers that look at one whole tensor at a time, by the name of their class."""

SCOPES = ("element", "tensor", "model")


def watch(holder: Holder | None = None) -> None:
    """See every norm, loss scaler and optimizer step of this process, on behalf of a model whose parameters are parts.

    An optimizer step that would be wrong raises ValueError before it changes anything. Without `holder`, for a model
    whose gradients may wait under `no_sync`.
    """
    if holder is not None:
        holders.register(holder)
    if _torch.intercept_loops(clip=clipping.clip, norm=clipping.total_norm, unscale=scaling.unscale):
        register_optimizer_step_pre_hook(_check)


def scope(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer looks at together: "element", "tensor" or "model" (all of its parameters).

    Its attribute (or its class's) `autopart_scope` says so. Without that, torch's own are known, and those of
    `TENSORWISE`; any other, and one that overrides the `step` of a known one, may look at everything. Raises
    ValueError for another value of the attribute.
    """
    declared = getattr(optimizer, "autopart_scope", None)
    if declared is not None:
        if declared not in SCOPES:
            raise ValueError(f"autopart_scope: {declared!r} is not known; one of {', '.join(SCOPES)}")
        return str(declared)
    kind = type(optimizer)
    step = inspect.unwrap(kind.step)
    if any(issubclass(kind, known) and step is inspect.unwrap(known.step) for known in ELEMENTWISE):
        return "element"
    return "tensor" if TENSORWISE & {base.__name__ for base in kind.__mro__} else "model"


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unreduced.check(parameters, f"{type(optimizer).__name__}.step")
    looks_at = scope(optimizer)
    missing = {key: found for holder in holders.every() for key, found in holder.not_whole().items()}
    if looks_at == "element":
        _cut_state(optimizer, [parameter for parameter in parameters if id(parameter) in missing])
        return
    for parameter in parameters:
        name, is_cut = missing.get(id(parameter), ("", False))
        if name and (is_cut or looks_at == "model"):
            raise ValueError(_refusal(optimizer, looks_at, name, is_cut))
    for parameter in parameters:
        if id(parameter) in missing and parameter.numel() == 0:
            parameter.grad = None  # not this rank's: there is nothing to look at


def _cut_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """State that was made (or loaded) when the parameters were whole becomes this rank's part."""
    with_state = [parameter for parameter in parameters if parameter in optimizer.state]
    for parameter, held in zip(with_state, holders.holders_of(with_state), strict=True):
        state = optimizer.state[parameter]
        for key, value in state.items():
            if held is not None and isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                state[key] = held[0].part_of(held[1], value)


def _refusal(optimizer: torch.optim.Optimizer, looks_at: str, name: str, is_cut: bool) -> str:
    kind = type(optimizer).__name__
    known = kind == "LBFGS" or looks_at == "tensor" or hasattr(optimizer, "autopart_scope")
    needs = "needs whole tensors" if looks_at == "tensor" else "needs every tensor whole on every rank"
    what = "each rank has a part of" if is_cut else "not every rank has"
    way = "placement='ddp' on a dp axis alone" if looks_at == "model" else "placement='ddp'"
    return (
        f"optimizer: {kind} {needs if known else f'may look at more than single elements, and so {needs}'}, but {what} "
        f"{name}; use {way}, or an elementwise optimizer such as AdamW or SGD"
        + ("" if known else f" (if {kind} treats every element alone, say so: {kind}.autopart_scope = 'element')")
    )
