"""Gradients of calls under ``no_sync()``: kept as every rank made them, and reduced once, after a call outside of it.

The text of the program is the same in either case. A world that holds its reductions notes those that the text calls;
they are performed, in the text's order, when the gradients of the first call outside are delivered.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.ir.program import Program
from autopart.runtime.world import World

# Optimizers and norm functions belong to the process: what they must not be called on yet.
_WAITING: weakref.WeakSet[Any] = weakref.WeakSet()


def check(tensors: Iterable[torch.Tensor], caller: str) -> None:
    """Raise RuntimeError if gradients of one of the parameters (or of the gradients' parameters) wait."""
    if not _WAITING:
        return
    asked = {id(tensor) for tensor in tensors}
    for waiting in list(_WAITING):
        for name, mark in waiting.intact().items():
            if asked & {id(waiting.parameters[name]), id(mark.grad)}:
                raise RuntimeError(
                    f"{caller}: gradients of {name} made under no_sync() are not reduced yet, so .grad lacks them; "
                    "make the last call of an accumulation outside of no_sync(), and its backward() before this line"
                )


@dataclass(frozen=True, slots=True)
class Mark:
    """A parameter's ``.grad`` while gradients wait, and its version: changing it cannot reach those that wait."""

    grad: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Share:
    """What the calls that are reduced alike have added up: the worlds of this process's ranks, and their program."""

    program: Program
    worlds: tuple[World, ...]

    @property
    def graded(self) -> tuple[str, ...]:
        """The parameters that get a gradient, in the module's order."""
        return tuple(out.target for out in self.program.captured.outputs if out.kind == "grad")

    def fits(self, other: Share) -> bool:
        """Whether both are reduced by the same calls."""
        mine, theirs = ([world.held for world in share.worlds] for share in (self, other))
        return self.graded == other.graded and mine == theirs and self.program.state == other.program.state


class Unreduced:
    """The gradients of one model that wait for their reduction. `parameters` are the user's, by name."""

    def __init__(self) -> None:
        self.parameters: Mapping[str, torch.Tensor] = {}
        self.marks: dict[str, Mark] = {}
        self.shares: list[Share] = []

    def intact(self) -> dict[str, Mark]:
        """The marks of parameters whose gradients wait: ``zero_grad()``, which sets ``.grad`` to None, drops them."""
        return {name: mark for name, mark in self.marks.items() if self.parameters[name].grad is not None}

    def waits(self) -> bool:
        """Whether any gradient waits."""
        return bool(self.intact())

    def forget(self) -> None:
        """Let go of what ``zero_grad()`` dropped, before ``.grad`` is made anew."""
        for name in self.marks.keys() - self.intact().keys():
            del self.marks[name]
            for share in self.shares:
                for world in share.worlds:
                    world.states.drop(name)
        if not self.marks:
            self.shares = []

    def add(self, share: Share, factor: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add `factor` times what a call left on each rank; every parameter with a gradient gets a ``.grad`` to mark.

        Raises RuntimeError where a ``.grad`` was changed while gradients wait.
        """
        self.forget()
        self._unchanged()
        self.parameters = parameters
        for world in share.worlds:
            world.states.scale(factor)
        known = next((found for found in self.shares if found.fits(share)), None)
        if known is None:
            self.shares.append(share)
        else:
            for mine, theirs in zip(known.worlds, share.worlds, strict=True):
                for unit, grads in theirs.states.gradients.items():
                    mine.states.add(unit, grads)
        for name in share.graded:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.data)
            self.marks[name] = Mark(parameter.grad, parameter.grad._version)
        _WAITING.add(self)

    def take(self) -> list[Share]:
        """Everything that waits, to be reduced now; nothing waits then."""
        shares, self.shares, self.marks = self.shares, [], {}
        _WAITING.discard(self)
        return shares

    def _unchanged(self) -> None:
        """Refuse a change of ``.grad`` since it was marked."""
        for name, mark in self.intact().items():
            grad = self.parameters[name].grad
            if grad is not mark.grad or grad._version != mark.version:
                raise RuntimeError(
                    f"the gradient of {name} was changed while gradients made under no_sync() wait to be reduced, "
                    "which does not change those; change it after the backward() of the first call outside of it, or "
                    "drop everything with zero_grad(set_to_none=True)"
                )
