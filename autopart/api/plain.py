"""A parallelised module as the plain one that the user wrote, for the time that it is read or traced."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from autopart import _torch
from autopart.errors import CaptureError

MANY = 64
"""Containers with more entries than this are not looked into for constants."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

REDUNDANT = {("transformers", "make_inputs_require_grads"), ("peft", "make_inputs_require_grads")}
"""Hooks by (package, name) that compute nothing: these make gradients flow through eager's reentrant checkpoints, which
``gradient_checkpointing_enable()`` turns on. In a captured graph they flow anyway."""


@contextlib.contextmanager
def as_plain(model: torch.nn.Module, plain: type[torch.nn.Module]) -> Iterator[None]:
    """The module with its own class and without hooks, its own or those on all modules."""
    parallel = type(model)
    hooks = [(part, name, part.__dict__[name]) for part in model.modules() for name in HOOKS if part.__dict__.get(name)]
    try:
        model.__class__ = plain
        for part, name, _ in hooks:
            part.__dict__[name] = OrderedDict()
        with _torch.no_global_hooks():
            yield
    finally:
        model.__class__ = parallel
        for part, name, found in hooks:
            part.__dict__[name] = found


def constants(model: torch.nn.Module, *, shapes: bool = True) -> tuple[tuple[str, Any], ...]:
    """What a trace of the module takes for constant, by name: classes, attributes, shapes of parameters and buffers.

    Without `shapes` those of parameters and buffers are left out, where a rank has only its parts of them.

    A tensor or an object in an attribute stands for itself, whatever is in it. Hashable.
    """
    own = {*vars(torch.nn.Module()), "_autopart"}
    found: list[tuple[str, Any]] = []
    for path, part in model.named_modules():
        dot = f"{path}." if path else ""
        found.append((path, type(part)))
        found += [(dot + name, _constant(value)) for name, value in vars(part).items() if name not in own]
        held = (*part._parameters.items(), *part._buffers.items())
        found += [(dot + name, None if t is None or not shapes else (t.shape, t.dtype)) for name, t in held]
    return tuple(found)


def _constant(value: Any) -> Any:
    if isinstance(value, Enum | bool | int | float | complex | str | bytes | None):
        return type(value), value
    if isinstance(value, tuple | list) and len(value) <= MANY:
        return type(value), tuple(map(_constant, value))
    if isinstance(value, dict) and len(value) <= MANY:
        return type(value), tuple((_constant(k), _constant(v)) for k, v in value.items())
    return type(value), _Identity(id(value))


class _Identity(int):
    """Which object it is, in this process; as text the same in all."""

    def __repr__(self) -> str:
        return "an object"


def check_hooks(model: torch.nn.Module, policy: str) -> None:
    """Refuse hooks that would never run: on submodules, on all modules and on parameters, unless `policy` is "ignore".

    Hooks on the root run once a call, as for any module. Those by which ``torch.nn.utils`` computes a weight before
    each forward (`weight_norm`, `spectral_norm`, `prune`) are refused under every policy.
    """
    for name, part in model.named_modules():
        for hook in part._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                raise CaptureError(
                    f"{name or type(model).__name__}: {type(hook).__name__} computes a weight in a hook before each "
                    "forward, which would not run; use torch.nn.utils.parametrizations, or prune.remove"
                )
    if policy == "ignore":
        return
    for name, part in model.named_modules():
        hooks = [hook for kind in HOOKS for hook in part.__dict__.get(kind, {}).values()]
        if name and not all(_redundant(hook) for hook in hooks):
            raise CaptureError(
                f"{name} has hooks, which would not run: its operations run inside the generated program; "
                "remove them, or pass hooks='ignore' to parallelize"
            )
    if _torch.has_global_hooks():
        raise CaptureError(
            "there are hooks on all modules (torch.nn.modules.module.register_module_...), which would not run on "
            f"those inside of {type(model).__name__}; remove them, or pass hooks='ignore' to parallelize"
        )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name} has gradient hooks, which would not run; remove them, or pass hooks='ignore'"
            )


def _redundant(hook: Any) -> bool:
    return (str(getattr(hook, "__module__", "")).split(".")[0], getattr(hook, "__name__", "")) in REDUNDANT


def check_root_hooks(model: torch.nn.Module, policy: str) -> None:
    """Refuse hooks on the root for a call that is not ``model(...)``, unless `policy` is "ignore"."""
    if policy != "ignore" and any(model.__dict__.get(kind) for kind in HOOKS):
        raise CaptureError(
            f"{type(model).__name__} has hooks, which would not run in train_step: they are given what forward "
            "returns, not the loss; compute the loss in forward and call the module, or pass hooks='ignore'"
        )
