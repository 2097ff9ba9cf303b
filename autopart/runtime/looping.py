"""The world of a loop whose steps overlap: one for the whole loop, with versions of the weights and the optimizer."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from autopart.draws import Draws
from autopart.errors import RankFailure
from autopart.ir.action import Kind
from autopart.ir.mesh import Mesh
from autopart.runtime.batch import Batch
from autopart.runtime.batches import Batches, Numbered
from autopart.runtime.measure import Store
from autopart.runtime.states import States
from autopart.runtime.transport import Pending, Transport
from autopart.runtime.updates import Updates
from autopart.runtime.versions import Versions
from autopart.runtime.world import World

T = TypeVar("T")

LOGGED = 65536
"""The actions that a rank's log goes back."""


@dataclass(frozen=True, slots=True)
class Used:
    """An action as it ran: the version of the weights that it used (that it made, for OPT), its times in seconds."""

    action: str
    version: int
    start: float
    end: float


class LoopWorld(World):
    """One rank's world for a whole loop, with `versions` of the weights of each of its stages.

    See `autopart.codegen.loop` and `filled` for the text that calls it.
    """

    def __init__(
        self,
        transport: Transport,
        mesh: Mesh,
        place: Sequence[int],
        states: States,
        buffers: Mapping[str, torch.Tensor],
        versions: Mapping[int, Versions],
        updates: Updates,
    ) -> None:
        none = Batch({}, {}, (0,), 0, 1, Draws(0, 0))  # batches come one after the other, copied, to `batches`
        super().__init__(transport, mesh, place, states, buffers, none)
        self.batches, self.versions, self.updates = Batches(), versions, updates
        self.used: deque[Used] = deque(maxlen=LOGGED)
        self._stores: dict[str, Store] = {}
        self._stage, self._version, self._delay = 0, 0, 0

    def enter(self, batch: Numbered, unfinished: int) -> None:
        """A batch comes; the last `unfinished` microbatches of those before are still needed."""
        self.batches.enter(batch, unfinished)
        self.memory.lent(self.batches.given())

    def store(self, name: str = "") -> Store:
        """The store of this name, the same in every step."""
        if name not in self._stores:
            self._stores[name] = super().store()
        return self._stores[name]

    def version(self, *, stage: int) -> int:
        """The newest version of the stage's weights."""
        return self.versions[stage].newest

    @contextlib.contextmanager
    def action(
        self, kind: str, *, stage: int, microbatch: int, version: int | None = None, delay: int = 0
    ) -> Iterator[None]:
        """A compute action on a version of the weights: the newest unless another is named.

        With `delay`, a forward sees the weights as they are predicted to be so many steps later.
        """
        self._stage, self._delay = stage, delay
        self._version = self.versions[stage].newest if version is None else version
        self.memory.transient(sum(versions.nbytes() for versions in self.versions.values()))
        with super().action(kind, stage=stage, microbatch=microbatch):
            yield
            if microbatch == 0 and kind == Kind.F:
                self._check_kept()
        name, start, end = self.log.entries.pop()
        self.used.append(Used(name, self._version, start, end))

    def _check_kept(self) -> None:
        """Refuse a forward that keeps a weight itself, which the optimizer would change under its backward."""
        live = {
            tensor.untyped_storage().data_ptr()
            for versions in self.versions.values()
            for name in versions.trained
            for tensor in versions.live[name]
        }
        if any(storage.data_ptr() in live for store in self.memory.stores for storage in store.storages()):
            raise RankFailure(
                f"rank {self.transport.rank}: the forward keeps a parameter itself for the backward, which would be "
                "another version by then; train without train_loop"
            )

    def parameters(self, unit: str) -> Sequence[torch.Tensor]:
        """The whole parameters of a unit, at the version of the action."""
        versions = self.versions[self._stage]
        found = versions.of(unit, self._version)
        if not self._delay or unit not in versions.trained:
            return found
        names = [parameter.target for parameter in self.states.units[unit].parameters]
        return self.updates.predicted(self._version, names, found, self._delay)

    def update(self, *, stage: int, step: int, keep: int, delay: int = 0) -> None:
        """Step number `step` of the optimizer on the stage's parameters, from the gradients accumulated.

        `keep` versions of the weights beside the one that it makes stay; `delay` is how many steps ago the forward was.
        """
        versions = self.versions[stage]
        units = [self.states.units[name] for name in sorted(versions.trained)]
        gradients = {
            parameter.target: grad
            for unit in units
            for parameter, grad in zip(unit.parameters, self.states.take(unit), strict=True)
            if grad is not None
        }
        start = time.perf_counter()
        versions.advance(step, keep, lambda: self.updates.step(step, gradients, delay))
        self.used.append(Used(f"{stage}{Kind.OPT}{step}", step + 1, start, time.perf_counter()))

    def begin_total(
        self, parts: Sequence[torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Pending[torch.Tensor]:
        """Begin to sum over microbatches and over the whole world; nobody waits for it yet."""
        return self.transport.begin_all_reduce(self._added(parts, shape, dtype), tuple(range(self.mesh.size)))

    def run(self, part: Callable[[LoopWorld, Batches], T]) -> T:
        """Call a function of the text, outside of the modes of the moment; a failure is told to the other ranks."""
        try:
            with torch.no_grad(), torch.autocast(self.transport.device.type, enabled=False):
                return part(self, self.batches)
        except BaseException as error:
            self.transport.fail(error)
            raise
