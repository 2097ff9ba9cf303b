"""The user's optimizer, as a program calls it: for the parameters of one stage at a time.

Step n goes by the options (learning rate and so on) that the optimizer's groups had when batch n was read, on every
stage, whenever that comes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopart.runtime.guards import scope

Named = Mapping[str, torch.Tensor]
"""Tensors by the name of a parameter."""

Group = dict[str, Any]


class Updates:
    """Steps of `optimizer` on some of the `parameters`, which are the module's by name.

    With `compensates`, steps and forwards make up for a delay (`compensated`, `predicted`); the optimizer is SGD then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Named, horizon: int, *, compensates: bool) -> None:
        """`horizon`: for how many batches the options that were read last are kept."""
        self.optimizer, self.parameters, self.horizon = optimizer, parameters, horizon
        self.compensates = compensates
        self._noted: dict[int, list[Group]] = {}

    def note(self, step: int) -> None:
        """Remember the options as they are now for step number `step`."""
        self._noted[step] = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self.optimizer.param_groups
        ]
        self._noted.pop(step - self.horizon, None)

    def step(self, number: int, gradients: Named, delay: int = 0) -> None:
        """Update the parameters that have a gradient, in place. Leaves every ``.grad`` as it was.

        Raises RuntimeError for an optimizer that keeps in its groups what steps change, or replaces a parameter's data.
        """
        if not gradients:
            return
        mine = {id(self.parameters[name]): (self.parameters[name], grad) for name, grad in gradients.items()}
        groups = [group | {"params": params} for group, params in self._groups(number, mine)]
        if delay and self.compensates:
            for group in groups:
                for parameter in group["params"]:
                    compensated(self.optimizer.state[parameter], group, parameter, mine[id(parameter)][1], delay)
            return
        before = [dict(group) for group in groups]
        places = [parameter.data_ptr() for parameter, _ in mine.values()]
        with self._lent(groups, mine.values()):
            self.optimizer.step()
        self._check(groups, before, in_place=places == [parameter.data_ptr() for parameter, _ in mine.values()])

    @contextlib.contextmanager
    def _lent(self, groups: list[Group], graded: Collection[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """The optimizer with these groups, and their parameters with these gradients, for a moment."""
        usual, grads = self.optimizer.param_groups, [parameter.grad for parameter, _ in graded]
        try:
            self.optimizer.param_groups = groups
            for parameter, mine in graded:
                parameter.grad = mine
            yield
        finally:
            self.optimizer.param_groups = usual
            for (parameter, _), theirs in zip(graded, grads, strict=True):
                parameter.grad = theirs

    def predicted(
        self, number: int, names: Sequence[str], weights: Sequence[torch.Tensor], delay: int
    ) -> list[torch.Tensor]:
        """The weights as linear prediction sees them `delay` steps later: ``w - lr * delay * v``, v the momentum."""
        if not self.compensates:
            return list(weights)
        mine = {id(self.parameters[name]): place for place, name in enumerate(names)}
        made = list(weights)
        for group, params in self._groups(number, mine):
            for parameter in params:
                velocity = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
                place = mine[id(parameter)]
                if velocity is not None:
                    made[place] = weights[place] - group["lr"] * delay * velocity
        return made

    def _groups(self, number: int, mine: Mapping[int, Any]) -> Iterator[tuple[Group, list[torch.Tensor]]]:
        """The options of step `number` by group, with the parameters of it that are among `mine`, by identity."""
        for group in self._noted[number]:
            if params := [parameter for parameter in group["params"] if id(parameter) in mine]:
                yield group, params

    def _check(self, groups: Sequence[Group], before: Sequence[Group], *, in_place: bool) -> None:
        name = type(self.optimizer).__name__
        for group, old in zip(groups, before, strict=True):
            if changed := [key for key in group if key != "params" and group[key] is not old.get(key)]:
                raise RuntimeError(
                    f"optimizer: {name} changes {changed[0]!r} of its groups when it steps, but here each stage steps "
                    "on its own; use an optimizer that keeps its state by parameter, such as SGD or AdamW"
                )
        if not in_place:
            raise RuntimeError(f"optimizer: {name} replaces the data of parameters; use one that updates them in place")


def compensated(state: dict[str, Any], group: Group, weight: torch.Tensor, grad: torch.Tensor, delay: int) -> None:
    """A step of SGD with momentum mu whose gradient is `delay` steps old, with spike compensation.

    ``v' = mu v + g; w -= lr (mu^D v' + (1 - mu^D) / (1 - mu) g)``: at once, what the gradient's spike would have moved
    in the D steps that it came too late (Kosson et al., Pipelined Backpropagation at Scale, arXiv 2003.11666).
    """
    mu, sign = group["momentum"], -1 if group["maximize"] else 1
    grad = sign * grad + group["weight_decay"] * weight
    known: torch.Tensor | None = state.get("momentum_buffer")
    velocity = grad.clone() if known is None else known.mul_(mu).add_(grad)
    state["momentum_buffer"] = velocity
    decay = mu**delay
    weight.add_(decay * velocity + (1 - decay) / (1 - mu) * grad, alpha=-group["lr"])


def check_steps(optimizer: torch.optim.Optimizer, *, compensates: bool) -> None:
    """Raise ValueError for an optimizer that cannot step on one stage at a time.

    With `compensates`, also for one that is not SGD with plain momentum, for which alone compensation is defined.
    """
    kind = type(optimizer).__name__
    if scope(optimizer) == "model":
        raise ValueError(
            f"optimizer: {kind} may look at all parameters together, but stages step on their own; use one that treats "
            f"each parameter alone, such as SGD or AdamW (or say that yours does: {kind}.autopart_scope = 'tensor')"
        )
    sgd = isinstance(optimizer, torch.optim.SGD)
    if compensates and not (sgd and all(map(_plain, optimizer.param_groups))):
        raise ValueError(
            "optimizer: spike compensation and weight prediction are defined for torch.optim.SGD with momentum (no "
            f"nesterov, no dampening), not for this {kind}; pass compensate=False to train without them"
        )


def _plain(group: Group) -> bool:
    return bool(0 < group["momentum"] < 1 and not group["nesterov"] and not group["dampening"])
