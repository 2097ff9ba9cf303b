"""The ranks of this process: its own rank in a world of processes, or all of them inside one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autopart import _torch
from autopart.api.options import Options
from autopart.runtime import distributed
from autopart.runtime.host_memory import keep_freed_memory
from autopart.runtime.local import Standing, current_transport, run_ranks
from autopart.runtime.transport import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A world of `size` ranks; `transport` is this rank's, None where all ranks live in this process."""

    size: int
    transport: Transport | None

    @classmethod
    def join(cls, options: Options) -> Ranks:
        """Find the world: a local rank's, a process group or torchrun's, else all ranks in this process.

        Raises ValueError where the options ask for another one.
        """
        transport = current_transport()
        if transport is None and distributed.launched():
            transport = distributed.join()
        size = options.world_size(transport.size if transport is not None else None)
        options.check_inputs(size, separate=transport is not None)
        keep_freed_memory()
        return cls(size, transport)

    @property
    def here(self) -> range:
        """The ranks that run in this process."""
        return range(self.size) if self.transport is None else range(self.transport.rank, self.transport.rank + 1)

    def moved(self, values: Any) -> Any:
        """Tensors in `values` on the device of this rank; as they are where all ranks share the caller's."""
        if self.transport is None:
            return values
        device = self.transport.device
        return _torch.pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)

    def each(
        self, fn: Callable[[Transport], T], device: torch.device, *, standing: Standing | None = None
    ) -> tuple[T, ...]:
        """The results of ``fn(transport)`` on every rank here.

        `device` is that of ranks which live in this process, `standing` the world of theirs that goes on, if any.
        """
        if self.transport is not None:
            return (fn(self.transport),)
        return tuple(run_ranks(self.size, fn, device=device, standing=standing))
