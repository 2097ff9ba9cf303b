"""The models whose parameters are parts on a rank of this process, found by the tensors that they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from autopart.runtime.residence import Residence

# torch's functions and optimizers belong to the process, and so does the list of models that they must be right for.
_HOLDERS: weakref.WeakSet[Residence] = weakref.WeakSet()


def register(holder: Residence) -> None:
    """Know a model from now on, as long as it lives."""
    _HOLDERS.add(holder)


def count() -> int:
    """How many models are known."""
    return len(_HOLDERS)


def holders_of(tensors: Iterable[torch.Tensor]) -> list[tuple[Residence, str] | None]:
    """The model and the first name of the parameter that each tensor is, or is the gradient of; None for others."""
    known: dict[Any, tuple[Residence, str]] = {}
    for holder in list(_HOLDERS):
        for name, parameter in holder.named().items():
            known |= dict.fromkeys(_keys(parameter), (holder, name))
            if parameter.grad is not None:
                known |= dict.fromkeys(_keys(parameter.grad), (holder, name))
    return [next((known[key] for key in _keys(tensor) if key in known), None) for tensor in tensors]


def _keys(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is found by: the object, and the memory, so that ``p.grad.detach()`` is found too."""
    memory = ((tensor.data_ptr(), tuple(tensor.shape)),) if tensor.numel() and tensor.layout is torch.strided else ()
    return (id(tensor), *memory)
