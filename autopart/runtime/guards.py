"""What stops a loop line that would be wrong on parts: an optimizer that does not treat every element alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart.runtime.residence import Residence

TENSORWISE = frozenset({"Adafactor", "Muon", "SparseAdam", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP"})
"""Optimizers that look at a tensor as a whole: parts of it will not do."""

MODELWISE = frozenset({"LBFGS"})
"""Optimizers that look at all tensors together: the rank must have every one whole."""

# Optimizers belong to the process, and so does the hook that sees all their steps: the modules that it must know of.
_WATCHED: weakref.WeakSet[Residence] = weakref.WeakSet()


def watch(residence: Residence) -> None:
    """See every optimizer step of this process, and refuse one that would be wrong on a module's parts.

    The step raises ValueError before it changes anything.
    """
    if not _WATCHED:
        register_optimizer_step_pre_hook(_check)
    _WATCHED.add(residence)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if not kinds & (TENSORWISE | MODELWISE):
        return
    missing = {key: found for residence in _WATCHED for key, found in residence.not_whole().items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, part = missing.get(id(parameter), ("", False))
            if name and (part or kinds & MODELWISE):
                what = "has a part of" if part else "does not have"
                raise ValueError(
                    f"optimizer: {type(optimizer).__name__} needs whole tensors, but this rank {what} {name}; use "
                    "placement='ddp' on a dp axis alone, or an elementwise optimizer such as AdamW or SGD"
                )
