"""Batches read ahead of their turn, so that all ranks agree on each before it runs, and none waits for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from autopart.runtime.transport import Pending, Transport

T = TypeVar("T")

END = 0
"""What stands for the end of the batches."""


class Lookahead(Generic[T]):
    """Batches from `read`, which returns one with a number that says what is in it, or None at the end.

    With a transport, what the ranks read is compared `ahead` batches before its turn.
    """

    def __init__(self, read: Callable[[], tuple[T, int] | None], transport: Transport | None, ahead: int) -> None:
        self._read, self._transport = read, transport if transport is not None and transport.size > 1 else None
        self._ahead = ahead if self._transport is not None else 0
        self._waiting: deque[tuple[T | None, Pending[torch.Tensor] | None]] = deque()
        self._ended, self._number = False, 1  # the first batch comes before these

    def take(self) -> T | None:
        """The next batch, None at the end. Raises ValueError on every rank where the ranks have read different ones."""
        # All ranks begin as many comparisons, also those whose batches have ended.
        while len(self._waiting) <= self._ahead:
            found = None if self._ended else self._read()
            self._ended = found is None
            item, number = (None, END) if found is None else found
            self._waiting.append((item, self._gathered(number)))
        item, gathered = self._waiting.popleft()
        if gathered is not None:
            self._check([int(number) for number in gathered.wait()])
        self._number += 1
        return item

    def _gathered(self, number: int) -> Pending[torch.Tensor] | None:
        if self._transport is None:
            return None
        mine = torch.tensor([number], device=self._transport.device)
        return self._transport.begin_all_gather(mine, tuple(range(self._transport.size)))

    def _check(self, found: list[int]) -> None:
        odd = next((rank for rank, number in enumerate(found) if number != found[0]), None)
        if odd is None:
            return
        few = [rank for rank in (odd, 0) if found[rank] == END]
        what = (
            f"rank {few[0]} has no batch {self._number}"
            if few
            else f"batch {self._number} of rank {odd} is not rank 0's"
        )
        raise different(what)


def different(what: str) -> ValueError:
    """The error for ranks that do not pass the same batches."""
    return ValueError(
        f"batches: {what}; every rank passes the same batches to train_loop: seed the loader alike on every rank, "
        "without a distributed sampler"
    )
