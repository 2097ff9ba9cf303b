"""Capture: a module and a sample call become one graph that holds at every batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autopart import _torch
from autopart.capture import direct, dynamo
from autopart.capture.call import Call, read_call
from autopart.capture.convert import convert
from autopart.capture.guard import fake_instead_of_meta, uncollected, untouched
from autopart.capture.pattern import Pattern, agrees
from autopart.capture.repeat import repeated
from autopart.capture.trace import Names, Trace, Traced, where
from autopart.errors import CaptureError
from autopart.ir.captured import Captured

ROUTES = {"compile": dynamo.trace, "direct": direct.trace}

NO_TARGET = object()

Made = TypeVar("Made")

Patterns = tuple[Pattern, ...]
"""The patterns of what one call was traced by."""


def read(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: Mapping[str, int | None] | None = None,
    target: Any = NO_TARGET,
) -> Call:
    """The call as data: leaves, paths, batch dims.

    `target`, if given, is one more positional argument, for `loss_fn`.
    """
    positional = tuple(args) if target is NO_TARGET else (*args, target)
    return read_call(positional, kwargs or {}, batch, inspect.signature(module.forward))


def capture(
    module: torch.nn.Module,
    call: Call,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: bool = False,
    route: str = "compile",
) -> Captured:
    """The joint graph of one call.

    The call is traced at two batch sizes made from it: its own and twice that (2 and 4 for a single sample, since sizes
    of one broadcast). `route` is "compile" (through torch.compile) or "direct" (the module itself; for fake parameters
    and the largest models). With `target`, the call's last positional argument is handed to `loss_fn` after the output.

    Raises CaptureError for data-dependent control flow, with the user's file and line, and for computations that change
    with the batch size by more than sizes proportional to it.
    """
    return capture_again(module, call, (), loss_fn=loss_fn, target=target, route=route)[0]


def capture_again(
    module: torch.nn.Module,
    call: Call,
    patterns: Sequence[Patterns],
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: bool = False,
    route: str = "compile",
) -> tuple[Captured, Patterns]:
    """`capture`, in half the time where the call differs from one that gave one of `patterns` in its lengths alone.

    The patterns that are returned serve later calls.
    """
    if route not in ROUTES:
        raise ValueError(f"capture: unknown route {route!r}; one of {', '.join(ROUTES)}")
    batch = max(call.batch, 2)
    with uncollected(), untouched(module):
        fake_instead_of_meta(module, call.tensors[0][1].device if call.tensors else "cpu")
        names = Names.of(module)
        small = _trace(route, module, call, call.unfilled(batch), loss_fn, target, names)
        for known in patterns:
            doubled = _doubled(known, small)
            if doubled is not None:
                parts = [convert(one, two, call, names) for one, two in zip(small.traces, doubled, strict=True)]
                captured = _joined(parts, small.blocks)
                if captured is not None and all(agrees(part, 3 * batch) for part in parts):
                    return captured, known
        large = _trace(route, module, call, call.unfilled(2 * batch), loss_fn, target, names)
        if small.blocks == large.blocks:
            pairs = list(zip(small.traces, large.traces, strict=True))
            repeats = _joined([convert(one, two, call, names) for one, two in pairs], small.blocks)
            if repeats is not None:
                return repeats, tuple(Pattern.of(one, two) for one, two in pairs)
        one, two = (_guarded(module, call, size * batch, traced.whole) for size, traced in ((1, small), (2, large)))
    return convert(one, two, call, names), (Pattern.of(one, two),)


def _joined(parts: Sequence[Captured], blocks: Sequence[str]) -> Captured | None:
    """The step of its parts: itself, or one with three and one with four of many equal blocks; None if they are not."""
    return repeated(parts[0], parts[1], blocks) if blocks else parts[0]


def _doubled(patterns: Patterns, traced: Traced) -> tuple[Trace, ...] | None:
    """What was traced as it would be at twice its batch; None where the patterns do not say."""
    if len(patterns) != len(traced.traces):
        return None
    doubled = [pattern.doubled(trace) for pattern, trace in zip(patterns, traced.traces, strict=True)]
    found = tuple(trace for trace in doubled if trace is not None)
    return found if len(found) == len(doubled) else None


def _trace(
    route: str,
    module: torch.nn.Module,
    call: Call,
    sized: Call,
    loss_fn: Callable[..., Any] | None,
    target: bool,
    names: Names,
) -> Traced:
    """Trace `sized`, which is `call` at another batch size."""
    return _guarded(module, call, sized.batch, lambda: ROUTES[route](module, sized, loss_fn, target, names))


def _guarded(module: torch.nn.Module, call: Call, batch: int, made: Callable[[], Made]) -> Made:
    """What tracing `call` at a batch of `batch` makes. Raises CaptureError for whatever goes wrong in it."""
    try:
        with untouched(module), _torch.quiet(), _torch.masks_as_given():
            return made()
    except Exception as error:
        known = isinstance(error, CaptureError)
        if known and batch <= max(call.batch, 2):
            raise
        reason = str(error) if known else f"{where(error, module)}: forward fails: {error!r}"
        if batch != call.batch:
            reason = (
                f"{reason}. This happens with {batch} samples, made by repeating the call's {call.batch}: name "
                "the batch dim of each input where it is not dim 0, None for one without samples, with batch={...}. "
                f"Inputs: {call.describe()}"
            )
        raise CaptureError(reason) from error
