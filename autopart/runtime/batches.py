"""The batches of a loop whose steps overlap: those of which some backward is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopart.runtime.batch import Batch


class Numbered(Batch):
    """One batch of a loop: its microbatches are counted over the whole loop."""

    _made: tuple[Any, ...] = ()

    def once(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the prologue makes of the whole batch, computed the first time that it is asked for."""
        if not self._made:
            self._made = (function(*args),)
        return self._made[0]


class Batches:
    """The batches on their way on one rank. `entering` are the microbatches of the last one, `count` all so far."""

    def __init__(self) -> None:
        self.entering, self.count = range(0), 0
        self._held: list[Numbered] = []

    def enter(self, batch: Numbered, unfinished: int) -> None:
        """The next batch comes; of those before, the last `unfinished` microbatches are still needed."""
        self._held = [held for held in self._held if max(held.sizes) >= self.count - unfinished] + [batch]
        self.entering = range(self.count, self.count + len(batch.sizes))
        self.count += len(batch.sizes)

    def given(self) -> Iterator[torch.Tensor]:
        """The tensors of the batches that are still needed."""
        for batch in self._held:
            yield from batch.given()

    def of(self, k: int) -> Numbered:
        """The batch of microbatch k."""
        return next(batch for batch in self._held if k in batch.sizes)

    def left(self, ahead: int) -> range:
        """The ticks after the last batch, by which a rank that is so far ahead has done all backwards."""
        return range(self.count, self.count + ahead)
