"""`reference_random`: a plain module draws, on one device, the random numbers that a parallelised one draws in parts.

Its forward is watched by hooks that are gone afterwards, so that every draw has the name that capture gives it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopart import _torch
from autopart.capture.randomness import IN_PLACE, RECIPES, opened
from autopart.draws import Draws, following
from autopart.passes.draws import without_dropout


@contextlib.contextmanager
def reference_random(seed: int | None = None, call: int | None = None) -> Iterator[None]:
    """Meanwhile, random operators inside a module's forward draw what a parallelised module draws.

    Each outermost module counts its own calls in training mode with grad enabled, from `call` (0) or from a change of
    the seed; other calls draw what the last of those did. The seed is torch's unless `seed` is given. No generator is
    read or moved. What is drawn outside of modules is left alone. Checkpointed modules that run again in the backward
    draw the same again.

    Raises NotImplementedError for a random operator that a parallelised module would refuse.
    """
    tracker = _Modules(seed, call or 0)
    before = register_module_forward_pre_hook(tracker.enter)
    after = register_module_forward_hook(tracker.leave, always_call=True)
    try:
        with opened(), _Drawing(tracker):
            yield
    finally:
        before.remove()
        after.remove()


@dataclass
class _Step:
    """One call of an outermost module: the names of its parts, what it draws from, and what was drawn so far."""

    names: dict[int, str]
    draws: Draws
    calls: Counter[str] = field(default_factory=Counter)  # of each part
    made: Counter[str] = field(default_factory=Counter)  # draws of each part
    again: Counter[str] = field(default_factory=Counter)  # likewise, in the part's forward that runs again


class _Modules:
    """Which module's forward is running, in which step."""

    def __init__(self, seed: int | None, call: int) -> None:
        self.seed, self.first = seed, call
        self.last: WeakKeyDictionary[torch.nn.Module, Draws] = WeakKeyDictionary()
        self.steps: WeakKeyDictionary[torch.nn.Module, _Step] = WeakKeyDictionary()  # by part
        self.running: list[tuple[_Step, str]] = []

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        """Before a module's forward."""
        again = _torch.in_backward()
        if self.running:
            step = self.running[-1][0]
        else:
            step = self.steps[module] if again and module in self.steps else self._step(module)
        path = step.names.get(id(module), self.running[-1][1] if self.running else "")
        if again:
            step.again[path] = 0
        else:
            step.calls[path] += 1
            self.steps[module] = step
        self.running.append((step, path))

    def leave(self, *_: Any) -> None:
        """After a module's forward, or where it raised."""
        self.running.pop()

    def draw(self, what: Any) -> torch.Tensor:
        """What the random operator at hand draws from, on the whole batch."""
        again = _torch.in_backward()
        if not self.running:
            raise NotImplementedError(
                f"{what} in the backward, outside of any module: a checkpointed function that draws random numbers "
                "cannot be followed; checkpoint a module"
            )
        step, path = self.running[-1]
        if again and step.calls[path] > 1:
            raise NotImplementedError(
                f"{what}: the module {path!r} was called {step.calls[path]} times and runs again in the backward, "
                "where its calls cannot be told apart"
            )
        made = step.again if again else step.made
        made[path] += 1
        return step.draws.of(f"{path}#{made[path] - 1}")

    def _step(self, module: torch.nn.Module) -> _Step:
        """A call of an outermost module."""
        seed = torch.initial_seed() if self.seed is None else self.seed
        last = self.last.get(module)
        draws = last or Draws(seed, self.first)
        if module.training and torch.is_grad_enabled():
            draws = self.last[module] = following(last, seed) if last else draws
        return _Step({id(part): name for name, part in module.named_modules()}, draws)


class _Drawing(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators by their recipes."""

    def __init__(self, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inside = self.modules.running or _torch.in_backward()
        if torch.Tag.nondeterministic_seeded not in func.tags or not inside or without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        recipe = RECIPES.get(IN_PLACE.get(func, func))
        if recipe is None or kwargs.pop("generator", None) is not None:
            raise NotImplementedError(f"{func} draws random numbers in a way that a parallelised module refuses")
        found = recipe(self.modules.draw(func), *args, **kwargs)
        if found is NotImplemented:
            raise NotImplementedError(f"{func} draws numbers of a dtype that a parallelised module refuses")
        return args[0].copy_(found) if func in IN_PLACE else found
