"""Which elements of every parameter lie on this rank, and where: the common ground of all that fills or saves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from autopart.capture.trace import Names
from autopart.ir.elements import Elements
from autopart.runtime.transport import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slot:
    """Some elements of the tensor `name`, and the memory that has them, which they fill."""

    name: str
    elements: Elements
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Slot:
        """All of a tensor."""
        return cls(name, Elements.all(tuple(tensor.shape)), tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.elements.shape

    def fill(self, whole: torch.Tensor) -> None:
        """Write the elements of a whole tensor here."""
        for mine, theirs in self.elements.shared(Elements.all(self.shape)):
            self.tensor[mine].copy_(whole[theirs])

    def put(self, whole: torch.Tensor) -> None:
        """Write what is here into a whole tensor."""
        for mine, theirs in self.elements.shared(Elements.all(self.shape)):
            whole[theirs].copy_(self.tensor[mine])


class Holder(Protocol):
    """What a rank holds of a module's parameters, each by its first name. `tied` maps every name to the first one."""

    tied: dict[str, str]

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The user's Parameters."""

    def slot(self, name: str) -> Slot:
        """What the user's Parameter has here."""

    def slots(self) -> list[Slot]:
        """Where values of parameters belong on this rank: whole ones where it keeps them, parts elsewhere."""

    def here(self, name: str) -> bool:
        """Whether this rank uses a parameter, though it may hold no element of it."""

    def counts(self, name: str) -> bool:
        """Whether this rank is the one whose elements stand for themselves in the world: in a checkpoint, in a norm."""


class Whole:
    """The `Holder` of a module whose parameters are whole here; rank 0 stands for all ranks."""

    def __init__(self, model: torch.nn.Module, transport: Transport | None) -> None:
        self.tied = dict(Names.of(model).tied)
        self._named = {self.tied[name]: p for name, p in model.named_parameters(remove_duplicate=False)}
        self._first = transport is None or transport.rank == 0

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The module's own."""
        return self._named

    def slot(self, name: str) -> Slot:
        """All of it."""
        return Slot.whole(name, self._named[name].data)

    def slots(self) -> list[Slot]:
        """Every parameter, once."""
        return [self.slot(name) for name in self._named]

    def here(self, name: str) -> bool:
        """Every parameter is."""
        return True

    def counts(self, name: str) -> bool:
        """Whether this is rank 0."""
        return self._first


def gathered(transport: Transport | None, item: Any) -> list[Any]:
    """Every rank's `item`, in rank order."""
    return [item] if transport is None else transport.all_gather_object(item, tuple(range(transport.size)))


def agreed(transport: Transport | None, fn: Callable[[], T]) -> T:
    """The result of ``fn()``; if it raises on any rank, every rank raises the first such rank's error. Collective."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(fn())
    except Exception as raised:
        error = raised
    found = gathered(transport, None if error is None else (type(error).__name__, str(error)))
    first = next((rank for rank, each in enumerate(found) if each is not None), None)
    if first is None:
        return result[0]
    name, message = found[first]
    known: dict[str, type[Exception]] = {
        kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, FileNotFoundError)
    }
    raise known.get(name, RuntimeError)(message if name in known else f"rank {first}: {name}: {message}") from error
