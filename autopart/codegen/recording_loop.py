"""What the text of a loop whose steps overlap is given to run on shapes: a world with versions, and several batches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopart.codegen.recording_world import RecordingBatch, RecordingStore, RecordingWorld
from autopart.codegen.shapes import Shape, Spec
from autopart.ir.action import Action, Kind


class RecordingBatches(RecordingBatch):
    """Several batches of one size after each other; microbatches are counted over all of them."""

    def __init__(
        self,
        inputs: Mapping[str, Callable[[int], Spec]],
        sizes: Sequence[int],
        size: int,
        draws: Mapping[str, Spec] | None = None,
        *,
        batches: int,
    ) -> None:
        super().__init__(inputs, tuple(sizes) * batches, size, draws)
        self.samples, self.batches, self.each = sum(sizes), batches, len(sizes)
        self.entering, self.count = range(0), 0

    def of(self, k: int) -> RecordingBatches:
        """The batch of microbatch k, which must have come."""
        if not 0 <= k < self.count:
            raise TypeError(f"microbatch {k} is of a batch that has not come")
        return self

    def once(self, function: Callable[..., Any], *args: Any) -> Any:
        """What depends on a whole batch."""
        return function(*args)

    def left(self, ahead: int) -> range:
        """The ticks after the last batch."""
        return range(self.count, self.count + ahead)

    def through(self, names: Mapping[str, Any], world: RecordingWorld) -> tuple[Any, ...]:
        """Run the functions of a text for all batches, and then to the end; what they return, but for nothing."""
        if not callable(names.get("drain")):
            raise TypeError("the text defines no function drain(world, batches)")
        made = []
        for _ in range(self.batches):
            self.entering = range(self.count, self.count + self.each)
            self.count += self.each
            made.append(names["step"](world, self))
        made.append(names["drain"](world, self))
        return tuple(found for found in made if found)


@dataclass
class RecordingLoop(RecordingWorld):
    """Takes the place of the world of a loop; by stage, the `newest` version of the weights, and the `oldest` kept."""

    named: dict[str, RecordingStore] = field(default_factory=dict)
    newest: Counter[int] = field(default_factory=Counter)
    oldest: Counter[int] = field(default_factory=Counter)

    def store(self, name: str = "") -> RecordingStore:
        """The store of a name, the same in every step."""
        if name not in self.named:
            self.named[name] = super().store()
        return self.named[name]

    def version(self, *, stage: int) -> int:
        """The newest version of the weights."""
        return self.newest[stage]

    @contextlib.contextmanager
    def action(
        self, kind: str, *, stage: int, microbatch: int, version: int | None = None, delay: int = 0
    ) -> Iterator[None]:
        """A compute action on a version of the weights, the newest unless another is named."""
        oldest, newest = self.oldest[stage], self.newest[stage]
        used = newest if version is None else version
        if not oldest <= used <= newest:
            raise TypeError(f"version {used} of the weights is not kept; there are {oldest} to {newest}")
        with super().action(kind, stage=stage, microbatch=microbatch):
            self._add("version", version=used, delay=delay)
            yield

    def update(self, *, stage: int, step: int, keep: int, delay: int = 0) -> None:
        """A step of the optimizer, which makes a version; `keep` of those before stay."""
        if self.here is not None:
            raise TypeError(f"the optimizer steps inside {self.here}")
        self.newest[stage] += 1
        self.oldest[stage] = max(self.oldest[stage], self.newest[stage] - keep)
        self._add("update", Action(Kind.OPT, stage, step), version=self.newest[stage], delay=delay)

    def begin_total(self, parts: Sequence[Spec], *, shape: Shape, dtype: torch.dtype) -> Spec:
        """A sum over microbatches and ranks, which is there some steps later."""
        return self.total(parts, shape=shape, dtype=dtype)
