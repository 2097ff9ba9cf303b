"""The buffers of a step: as the module has them, as its forwards update them, and made alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from autopart.runtime.flat import flat, unflat
from autopart.runtime.transport import Transport


class Buffers:
    """Buffers (and constants) by name. The caller's own tensors are never written: updates are new tensors.

    Every rank has a tensor of each name, if an old one, so what travels has the same shape everywhere.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.given = given
        self.updated: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.updated[name] if name in self.updated else self.given[name]

    def average(self, names: Sequence[str], transport: Transport, group: tuple[int, ...]) -> None:
        """Their average over the ranks of a group."""
        for together, joined in self._by_dtype(names):
            transport.all_reduce(joined, group)
            self._update(together, joined / len(group))

    def maximum(self, names: Sequence[str], transport: Transport, group: tuple[int, ...]) -> None:
        """The largest over the ranks of a group, element by element."""
        for together, joined in self._by_dtype(names):
            every = transport.all_gather(joined, group)
            self._update(together, every.view(len(group), joined.numel()).amax(0))

    def broadcast(self, names: Sequence[str], transport: Transport, source: int, group: tuple[int, ...]) -> None:
        """Those of rank `source`, on every rank of a group."""
        for together, joined in self._by_dtype(names):
            transport.broadcast(joined, source, group)
            self._update(together, joined)

    def _by_dtype(self, names: Sequence[str]) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Buffers that travel together, with a flat tensor of them."""
        for dtype in dict.fromkeys(self.given[name].dtype for name in names):
            together = [name for name in names if self.given[name].dtype == dtype]
            yield together, flat(self[name] for name in together)

    def _update(self, names: Sequence[str], joined: torch.Tensor) -> None:
        pieces = unflat(joined, [self.given[name].shape for name in names])
        self.updated.update(zip(names, pieces, strict=True))
