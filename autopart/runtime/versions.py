"""Versions of the weights of one stage: the newest, in the parameters themselves, and copies of some before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Weights = Mapping[str, Sequence[torch.Tensor]]
"""Whole parameters by unit."""


class Versions:
    """`newest` counts the optimizer's steps; `live` are the weights after them, `trained` the units that these change.

    Ranks of one process that share a stage's weights share this too.
    """

    def __init__(self, live: Weights, trained: frozenset[str]) -> None:
        self.live, self.trained = live, trained
        self.newest = 0
        self.kept: dict[int, Weights] = {}

    def of(self, unit: str, version: int) -> Sequence[torch.Tensor]:
        """The parameters of a unit at a version. Raises RuntimeError for one that is not kept."""
        if version == self.newest or unit not in self.trained:
            return self.live[unit]
        if version not in self.kept:
            there = ", ".join(map(str, [*self.kept, self.newest]))
            raise RuntimeError(f"version {version} of the weights is not kept; there are {there}")
        return self.kept[version][unit]

    def advance(self, step: int, keep: int, change: Callable[[], None]) -> None:
        """Make version ``step + 1`` by `change`, which alters the parameters; keep so many versions before it.

        Nothing is done where another rank that shares these weights has done it.
        """
        if step < self.newest:
            return
        if keep:
            self.kept[self.newest] = {name: [t.clone() for t in self.live[name]] for name in sorted(self.trained)}
        change()
        self.newest += 1
        for version in [version for version in self.kept if version < self.newest - keep]:
            del self.kept[version]

    def nbytes(self) -> int:
        """The bytes of the versions that are kept."""
        return sum(tensor.nbytes for held in self.kept.values() for unit in held.values() for tensor in unit)
