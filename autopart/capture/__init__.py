"""Capture: a module and a sample call become one graph that holds at every batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopart import _torch
from autopart.capture import direct, dynamo
from autopart.capture.call import Call, read_call
from autopart.capture.convert import convert
from autopart.capture.guard import fake_instead_of_meta, untouched
from autopart.capture.trace import Names, Trace, where
from autopart.errors import CaptureError
from autopart.ir.captured import Captured

ROUTES = {"compile": dynamo.trace, "direct": direct.trace}

NO_TARGET = object()


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
    if route not in ROUTES:
        raise ValueError(f"capture: unknown route {route!r}; one of {', '.join(ROUTES)}")
    small = max(call.batch, 2)
    with untouched(module):
        fake_instead_of_meta(module)
        names = Names.of(module)
        traces = [_trace(route, module, call, size, loss_fn, target, names) for size in (small, 2 * small)]
    if traces[0].training:
        for path, tensor in call.tensors:
            if tensor.requires_grad:
                raise CaptureError(
                    f"{path} requires grad, and gradients of inputs are not delivered yet; pass it detached"
                )
    return convert(traces[0], traces[1], call, names)


def _trace(
    route: str,
    module: torch.nn.Module,
    call: Call,
    batch: int,
    loss_fn: Callable[..., Any] | None,
    target: bool,
    names: Names,
) -> Trace:
    try:
        with untouched(module), _torch.quiet():
            return ROUTES[route](module, call.resized(batch), loss_fn, target, names)
    except Exception as error:
        known = isinstance(error, CaptureError)
        reason = str(error) if known else f"forward fails: {error!r}"
        if batch == call.batch and known:
            raise
        if batch == call.batch:
            raise CaptureError(f"{where(error, module)}: {reason}") from error
        raise CaptureError(
            f"{where(error, module)}: the call cannot be made with {batch} samples, which its {call.batch} samples "
            f"repeated must "
            f"allow ({reason}); name the batch dim of the inputs where it is not dim 0, None for those that hold no "
            f"samples, with "
            f"batch={{...}}. Inputs: {call.describe()}"
        ) from error
