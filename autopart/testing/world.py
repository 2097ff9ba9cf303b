"""The local world for tests: several ranks in one process, deterministic, deadlocks detected at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopart.runtime.local import run_ranks
from autopart.runtime.transport import Transport


class LocalWorld:
    """`n` ranks inside this process.

    In `run`, each rank is as a process under torchrun is: it builds its own model and its own optimizer, and
    `autopart.parallelize` called there finds the world.
    """

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"n: the number of ranks must be a whole number of at least 1, not {n!r}")
        self.n = n

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The results, in rank order, of ``fn(rank, *args)`` run once on every rank.

        Raises RankFailure when a rank fails or the ranks deadlock.
        """

        def body(transport: Transport) -> Any:
            return fn(transport.rank, *args)

        return run_ranks(self.n, body)
