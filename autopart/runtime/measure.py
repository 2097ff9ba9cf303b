"""What a rank measures while it runs: live bytes at the end of every action, and when each action ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autopart.runtime.states import States
from autopart.runtime.transport import Arriving


class Log:
    """(action, start, end) of every compute action, in seconds of the process's performance counter."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, float, float]] = []

    def add(self, action: str, start: float, end: float) -> None:
        """Append one action."""
        self.entries.append((action, start, end))


class Store(dict[Any, Any]):
    """Values that outlive the action that made them, by microbatch."""

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The storages of every tensor inside."""
        for value in self.values():
            yield from _storages(value)

    def awaited(self) -> int:
        """The bytes of those that are still on their way here."""
        return sum(v.nbytes for v in self.values() if isinstance(v, Arriving) and not v.arrived)


class Memory:
    """Bytes alive on a rank, sampled after every action.

    `activations` is the largest total of distinct storages in the stores, without those of parameters and of the
    caller's tensors (`given`: buffers, and the batch, of which microbatches are slices); `peak` that of everything:
    parameters, gradients, activations, and the transient buffers of the action.
    """

    def __init__(self, states: States, given: Iterable[torch.Tensor] = ()) -> None:
        self.states = states
        self.stores: list[Store] = []
        self.activations = 0
        self.gradients = 0
        self.peak = 0
        self._transient = 0
        tensors = [t for held in states.whole.values() for t in held] + list(states.parts.values()) + list(given)
        self._elsewhere: set[int] = set()
        self._lent: set[int] = set()
        self.given(tensors)

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out what belongs to the caller."""
        self._elsewhere.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def lent(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave these out, too, until the next call of this."""
        self._lent = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def store(self) -> Store:
        """A new store, counted from now on."""
        self.stores.append(Store())
        return self.stores[-1]

    def transient(self, nbytes: int) -> None:
        """Note a buffer that lives only within an action."""
        self._transient = max(self._transient, nbytes)

    def sample(self, reducing: int = 0) -> None:
        """Count what is alive now; `reducing` are bytes of the step's gradients that are on their way to be reduced."""
        seen: dict[int, int] = {}
        for store in self.stores:
            for storage in store.storages():
                if storage.data_ptr() not in self._elsewhere and storage.data_ptr() not in self._lent:
                    seen[storage.data_ptr()] = storage.nbytes()
        alive = sum(seen.values()) + sum(store.awaited() for store in self.stores)
        resident = self.states.resident_bytes()
        resident["gradients"] += reducing
        self.activations = max(self.activations, alive)
        self.gradients = max(self.gradients, resident["gradients"])
        self.peak = max(self.peak, alive + sum(resident.values()) + self._transient)
        self._transient = 0


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, tuple | list) or (isinstance(value, Arriving) and value.arrived):
        for item in value:
            yield from _storages(item)
