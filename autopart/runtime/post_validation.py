"""Zero bubble's post-validation: a rank steps on the norm that it knows, and redoes the step where that was wrong.

The norm of all gradients is known once the last pipeline rank has all of its own, and nobody would step before. So each
rank steps when its gradients are there (`step_ahead`), clipped by the norm of its own and those of the ranks before it,
which it tells the next one (`passed_on`). When the whole norm is known, a step that it does not bear out is undone from
copies, and done again or left out (`settle`). Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (2401.10241).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.runtime.autograd import Pairs
from autopart.runtime.optimizers import parameters_of
from autopart.runtime.world import World

_ROUNDING = 1e-6
"""What torch's ``clip_grad_norm_`` adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class Before:
    """What an optimizer's step changes, as it was: the parameters that have a gradient, their state, the groups."""

    optimizer: torch.optim.Optimizer
    values: Sequence[tuple[torch.Tensor, torch.Tensor]]
    state: Sequence[tuple[torch.Tensor, dict[str, Any] | None]]
    groups: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Before:
        """Copies of what is there now."""
        moving = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        return cls(
            optimizer,
            [(parameter, parameter.detach().clone()) for parameter in moving],
            [(parameter, copy.deepcopy(optimizer.state.get(parameter))) for parameter in moving],
            [
                {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
        )

    def restore(self) -> None:
        """Make everything as it was, parameters in place."""
        with torch.no_grad():
            for parameter, value in self.values:
                parameter.copy_(value)
        for parameter, state in self.state:
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = state
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(settings)


@dataclass(frozen=True, slots=True)
class Ahead:
    """The raw gradients of a step, the factor by which they were clipped, and how all was before; None for no step."""

    pairs: Pairs
    factor: torch.Tensor | None = None
    before: Before | None = None


def factor_of(norm: torch.Tensor, max_norm: float | None) -> torch.Tensor | None:
    """By what ``clip_grad_norm_`` multiplies gradients of a norm; None for one that is not finite: no step is taken."""
    if not bool(torch.isfinite(norm)):
        return None
    return torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + _ROUNDING), max=1.0)


def passed_on(norm: torch.Tensor, world: World) -> torch.Tensor:
    """The norm of the gradients of this pipeline rank and all before it, which the next one is told.

    `norm` is that of the rank alone, in float64.
    """
    transport, mesh, column = world.transport, world.mesh, world.here.get("pp", 0)
    known = norm.reshape(1).to(transport.device)
    if column > 0:
        before = transport.recv((1,), known.dtype, mesh.rank({**world.here, "pp": column - 1}))
        known = torch.linalg.vector_norm(torch.stack([before, known]), dim=0)
    if column + 1 < mesh.degree("pp"):
        transport.send(known, mesh.rank({**world.here, "pp": column + 1}))
    return known[0]


def step_ahead(optimizer: torch.optim.Optimizer, pairs: Pairs, norm: torch.Tensor, max_norm: float | None) -> Ahead:
    """Step on gradients, clipped as if their norm were all of it; what it takes to undo that."""
    factor = factor_of(norm, max_norm)
    if factor is None:
        return Ahead(pairs)
    _clipped(pairs, factor)
    before = Before.of(optimizer)
    try:
        optimizer.step()
    except BaseException:
        before.restore()
        raise
    return Ahead(pairs, factor, before)


def settle(optimizer: torch.optim.Optimizer, ahead: Ahead, norm: torch.Tensor, max_norm: float | None) -> bool:
    """Make the step that was taken, or not, the one that the whole norm asks for; whether one had to be undone."""
    right, taken = factor_of(norm, max_norm), ahead.factor
    if right is not None and taken is not None and float(right) == float(taken):
        return False
    if ahead.before is not None:
        ahead.before.restore()
    if right is not None:
        _clipped(ahead.pairs, right)
        optimizer.step()
    return ahead.before is not None


def _clipped(pairs: Pairs, factor: torch.Tensor) -> None:
    """Give parameters their gradients, multiplied by a number; the gradients themselves stay raw."""
    for parameter, gradient in pairs:
        parameter.grad = gradient.detach() * factor.to(gradient.device)
