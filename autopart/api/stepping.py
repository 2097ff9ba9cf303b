"""`post_validated`: an optimizer that is handed to the program, whose ranks step alone and are put right afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopart.api.module import Parallel
from autopart.api.step import Step, gradients
from autopart.capture import NO_TARGET
from autopart.capture.call import Call
from autopart.ir.program import Program
from autopart.runtime import clipping, guards
from autopart.runtime.optimizers import parameters_of
from autopart.runtime.post_validation import Ahead, factor_of, passed_on, settle, step_ahead
from autopart.runtime.residence import Residence
from autopart.runtime.world import World


class PostValidated:
    """A training step of a module that ends with the optimizer's. See `post_validated`.

    `norm` is the norm of the last call's gradients over the whole model, before clipping; `stepped` whether that call
    took a step; `undone` whether this rank had to undo one that it took before the norm was known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: Parallel, max_norm: float | None) -> None:
        self.optimizer, self.model, self.max_norm = optimizer, model, max_norm
        self.norm: torch.Tensor | None = None
        self.stepped = self.undone = False
        self._ahead: Ahead | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``model(*args, **kwargs)`` returns, its loss without a gradient: the step has been taken."""
        return self._taken(lambda: self.model(*args, **kwargs))

    def train_step(self, args: Any, kwargs: Mapping[str, Any] | None = None, *, target: Any = NO_TARGET) -> Any:
        """Likewise for a module that returns outputs: the loss of ``model.train_step``."""
        return self._taken(lambda: self.model.train_step(args, kwargs, target=target))

    def _taken(self, call: Callable[[], Any]) -> Any:
        session = self.model._autopart
        if session.stepping is not None:
            raise RuntimeError("post_validated: a step of this model is being taken already")
        self._check_gradients()
        session.stepping = self
        try:
            return call()
        finally:
            session.stepping = None
            self._forget()

    def _check_gradients(self) -> None:
        """Refuse gradients of other calls: the program steps on those that it makes."""
        named = [*self.model.named_parameters(), *(("the optimizer", p) for p in parameters_of(self.optimizer))]
        left = next((name for name, parameter in named if parameter.grad is not None), "")
        if left or self.model._autopart.delivery.holds:
            raise ValueError(
                f"post_validated: {left or 'the model'} has a gradient of an earlier call, and the program steps on "
                "those of one call; optimizer.step() and optimizer.zero_grad() first, or train with backward()"
            )

    def _forget(self) -> None:
        """Let go of the gradients; of a call that failed, undo the step too."""
        if self._ahead is not None:
            if self._ahead.before is not None:
                self._ahead.before.restore()
            self._ahead = None
        self.optimizer.zero_grad()
        self.model.zero_grad()

    # What the session calls

    def check(self, program: Program, call: Call) -> None:
        """Raise ValueError for a call that makes no gradients, or hands some of them on."""
        captured = program.captured
        if not captured.training or captured.deferred:
            raise ValueError(
                "post_validated: the program steps on the gradients of a loss, but this call "
                + ("returns none; return it, or give parallelize(loss_fn=...)" if captured.training else _UNTRAINED)
            )
        asking = next((path for path, tensor in call.tensors if tensor.requires_grad), None)
        if asking is not None:
            raise ValueError(
                f"post_validated: input {asking} requires grad, but gradients go to parameters alone here; detach() "
                "it, or train with backward()"
            )

    def begin(self, program: Program, residence: Residence | None) -> Callable[[World], None] | None:
        """What a rank does when it has its gradients; None where all ranks are in this process, and share parameters.

        Raises ValueError for an optimizer that cannot step on what a rank holds.
        """
        guards.before_step(self.optimizer)
        if residence is None:
            return None

        def ended(world: World) -> None:
            pairs = gradients(self.model, program, residence, [world.states])
            known = passed_on(clipping.norm_here(pairs), world)
            self._ahead = step_ahead(self.optimizer, pairs, known, self.max_norm)

        return ended

    def settle(self, step: Step) -> None:
        """Make the steps of all ranks what the norm of all gradients asks for. Collective."""
        ahead = self._ahead or Ahead(step.gradients())
        self.norm = clipping.norm_of(ahead.pairs)
        self._ahead = None  # from here on a failure is that of the one step
        self.stepped = factor_of(self.norm, self.max_norm) is not None
        self.undone = settle(self.optimizer, ahead, self.norm, self.max_norm)


_UNTRAINED = "trains nothing: call model.train(), with grad enabled and parameters that require it"


def post_validated(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, max_norm: float | None = None
) -> PostValidated:
    """Hand an optimizer to the program of a parallelised module: each pipeline rank steps once its gradients are there.

    ::

        step = autopart.post_validated(optimizer, model, max_norm=1.0)
        for x, y in loader:
            loss = step(x, y)  # in place of model(x, y), backward(), clip_grad_norm_(), step() and zero_grad()

    The numbers are those of ``norm = clip_grad_norm_(model.parameters(), max_norm)``, and ``optimizer.step()`` if the
    norm is finite: gradients that are not finite make no step, on any rank. Without `max_norm` nothing is clipped. A
    rank steps before the norm is known, on that of the ranks before it and its own, and passes that on; where the
    whole norm says otherwise, it puts parameters and the optimizer's state back as they were and steps again, or not at
    all. Meanwhile it keeps a copy of both, and of its gradients; hooks of the optimizer run at each of the two steps.
    Where all ranks live in this process their parameters are whole, and one step is taken when the norm is known.

    Raises TypeError or ValueError for bad arguments; the call raises ValueError where a gradient of an earlier one is
    left, where it makes no loss or gradients for its inputs, and for an optimizer that needs more than a rank holds.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if not isinstance(model, Parallel):
        raise TypeError(f"model: expected a module that autopart.parallelize made, not {type(model).__name__}")
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise ValueError(f"max_norm must be a number above 0, or None, not {max_norm!r}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure that calls the model again, which a program "
            "cannot do while it runs; use model and backward() with it"
        )
    return PostValidated(optimizer, model, max_norm)
