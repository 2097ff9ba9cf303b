"""What keeps the lines of a loop right on parts, or stops them: norms, loss scalers, and optimizer steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart import _torch
from autopart.runtime import clipping, holders, optimizers, scaling, unreduced
from autopart.runtime.residence import Residence, Spread

ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
"""Optimizers that treat every element alone, so that parts of tensors will do."""

TENSORWISE = frozenset({"Adafactor", "Muon", "SparseAdam", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP"})
"""Optimizers that look at one whole tensor at a time, by the name of their class."""

SCOPES = ("element", "tensor", "model")


def watch(holder: Residence | None = None) -> None:
    """See every norm, loss scaler and optimizer step of this process, on behalf of a model whose parameters are parts.

    An optimizer step that would be wrong raises ValueError before it changes anything. Without `holder`, for a model
    whose gradients may wait under `no_sync`.
    """
    if holder is not None:
        holders.register(holder)
    if _torch.intercept_loops(clip=clipping.clip, norm=clipping.total_norm, unscale=scaling.unscale):
        register_optimizer_step_pre_hook(before_step)


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


def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What comes before every step; raises ValueError for one that would be wrong on parts."""
    parameters = optimizers.parameters_of(optimizer)
    unreduced.check(parameters, f"{type(optimizer).__name__}.step")
    looks_at = scope(optimizer)
    if looks_at != "element":
        _check_whole(optimizer, looks_at, parameters)
    optimizers.settle(optimizer)


def _check_whole(optimizer: torch.optim.Optimizer, looks_at: str, parameters: Sequence[torch.Tensor]) -> None:
    """Refuse parts to an optimizer that looks at whole tensors; hide parameters that are not this rank's from it."""
    held = [(p, found) for p, found in zip(parameters, holders.holders_of(parameters), strict=True) if found]
    spread = [(parameter, name, residence.spread(name)) for parameter, (residence, name) in held]
    for _, name, how in spread:
        if how in (Spread.PARTS, Spread.PIECES) or (how is Spread.SOMEWHERE and looks_at == "model"):
            raise ValueError(_refusal(optimizer, looks_at, name, how))
    for parameter, _, how in spread:
        if how is Spread.SOMEWHERE and parameter.numel() == 0:
            parameter.grad = None  # there is nothing to look at


def _refusal(optimizer: torch.optim.Optimizer, looks_at: str, name: str, how: Spread) -> str:
    kind = type(optimizer).__name__
    known = kind == "LBFGS" or looks_at == "tensor" or hasattr(optimizer, "autopart_scope")
    whole = "needs whole tensors" if looks_at == "tensor" else "needs every tensor whole on every rank"
    way = "placement='ddp' on a dp axis alone" if looks_at == "model" else "placement='ddp'"
    if looks_at == "tensor" and how is Spread.PIECES:
        way += " on a mesh of pp and dp alone"
    needs = whole if known else f"may look at more than single elements, and so {whole}"
    return (
        f"optimizer: {kind} {needs}, but {how.value} {name}; use {way}, or an elementwise optimizer such as AdamW "
        "or SGD"
        + ("" if known else f" (if {kind} treats every element alone, say so: {kind}.autopart_scope = 'element')")
    )
