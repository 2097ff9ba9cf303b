"""A parallelised module as the plain one that the user wrote, for the time that it is read or traced."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import torch

from autopart.errors import CaptureError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def as_plain(model: torch.nn.Module, plain: type[torch.nn.Module]) -> Iterator[None]:
    """The module with its own class and without hooks."""
    parallel = type(model)
    hooks = [(part, name, part.__dict__[name]) for part in model.modules() for name in HOOKS if part.__dict__.get(name)]
    try:
        model.__class__ = plain
        for part, name, _ in hooks:
            part.__dict__[name] = OrderedDict()
        yield
    finally:
        model.__class__ = parallel
        for part, name, found in hooks:
            part.__dict__[name] = found


def check_hooks(model: torch.nn.Module, policy: str) -> None:
    """Refuse hooks that would never run: on submodules and parameters, unless `policy` is "ignore".

    Hooks on the root run once a call, as for any module.
    """
    if policy == "ignore":
        return
    for name, part in model.named_modules():
        if name and any(part.__dict__.get(kind) for kind in HOOKS):
            raise CaptureError(
                f"{name} has hooks, which would not run: its operations run inside the generated program; "
                "remove them, or pass hooks='ignore' to parallelize"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name} has gradient hooks, which would not run; remove them, or pass hooks='ignore'"
            )
