"""The world that the text of a loop whose steps overlap is given to run on shapes: one with versions of the weights."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from autopart.codegen.recording_world import RecordingStore, RecordingWorld
from autopart.codegen.shapes import Shape, Spec
from autopart.ir.action import Action, Kind


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
