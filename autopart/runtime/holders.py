"""The parallelised models whose parameters are parts on a rank of this process, found by the tensors that they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch


class Holder(Protocol):
    """A parallelised model of which this rank holds parts."""

    def names(self) -> Mapping[Any, str]:
        """The parameter that a tensor is, or is the gradient of, by each of the tensor's `keys`."""

    def counts(self, name: str) -> bool:
        """Whether this rank is the one that counts its part of a parameter (or its gradient) for the world."""

    def not_whole(self) -> Mapping[int, tuple[str, bool]]:
        """(name, whether it is cut) of every parameter that some rank does not hold whole, by identity."""

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that goes with a parameter; any other tensor as it is."""

    def sum_over_world(self, number: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """The sum (or the largest) of a number over all ranks."""


# torch's functions and optimizers belong to the process, and so does the list of models that they must be right for.
_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(holder: Holder) -> None:
    """Know a model from now on, as long as it lives."""
    _HOLDERS.add(holder)


def every() -> list[Holder]:
    """The models that are known."""
    return list(_HOLDERS)


def keys(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is found by: the object, and the memory, so that ``p.grad.detach()`` is found too."""
    memory = ((tensor.data_ptr(), tuple(tensor.shape)),) if tensor.numel() and tensor.layout is torch.strided else ()
    return (id(tensor), *memory)


def holders_of(tensors: Iterable[torch.Tensor]) -> list[tuple[Holder, str] | None]:
    """The model and the parameter that each tensor is, or is the gradient of; None for tensors of no known model."""
    known = {key: (holder, name) for holder in every() for key, name in holder.names().items()}
    return [next((known[key] for key in keys(tensor) if key in known), None) for tensor in tensors]
