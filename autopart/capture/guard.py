"""Capture runs the user's Python; this keeps it from leaving traces in the user's objects."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

from autopart import _torch
from autopart.errors import CaptureError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (bool, int, float, str, type(None))
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for garbage in cycles: compiling makes little of that, and the search takes a third longer."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Put back every submodule's attributes, plain containers in them, and every random generator afterwards.

    Hooks on modules are off meanwhile. Raises CaptureError if Python's or numpy's generator moved, as what the model
    drew would be frozen into the graph; and if the forward changed a number, a container or a buffer of a module, as
    its Python code runs once, not at every step. (A tensor that it merely leaves in an attribute is let pass.)
    """
    parts = [(part, dict(part.__dict__)) for part in module.modules()]
    contents = _contents([saved for _, saved in parts])
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    before = _drawn()
    try:
        with torch.random.fork_rng(devices):
            for part, _ in parts:
                part.__dict__.update({name: OrderedDict() for name in HOOKS})
            yield
        moved = repr(_drawn()) != repr(before)
        changed = _changed(module, parts, contents)
    finally:
        for part, saved in parts:
            part.__dict__.clear()
            part.__dict__.update(saved)
        for container, copy in contents:
            _refill(container, copy)
        _restore(before)
    if changed:
        raise changes(module, changed)
    if moved:
        raise CaptureError(
            f"{type(module).__name__}.forward draws random numbers from Python or numpy, which would be frozen into "
            "the program at their first values; draw them with torch, or pass them in as an argument"
        )


def reassigned_buffer(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> str:
    """The name of a buffer that is another tensor than `before`, "" if all are the same."""
    now = dict(module.named_buffers(remove_duplicate=False))
    return next((name for name in {**before, **now} if now.get(name) is not before.get(name)), "")


def changes(module: torch.nn.Module, what: str) -> CaptureError:
    """The refusal of a forward that changes the module's own state."""
    return CaptureError(
        f"{type(module).__name__}.forward changes {what}, which a program would not do at every step: its Python code "
        "runs once, when it is captured; do it in the loop, or pass the value in and return it"
    )


def _changed(
    module: torch.nn.Module, parts: list[tuple[torch.nn.Module, dict[str, Any]]], contents: list[tuple[Any, Any]]
) -> str:
    """The first plain value, container or buffer of a module that is no longer what it was, by name; "" if all are."""
    altered = {id(container) for container, copy in contents if not _same_items(container, copy)}
    names = {id(part): name for name, part in module.named_modules(remove_duplicate=False)}
    for part, saved in parts:
        for name, old in saved.items():
            new = part.__dict__.get(name)
            plain = isinstance(old, PLAIN) and isinstance(new, PLAIN)
            registry = name in (*HOOKS, "_parameters", "_modules", "_buffers", "training")
            if not registry and ((plain and old != new) or id(old) in altered):
                return f"{names.get(id(part), '')}.{name}".lstrip(".")
    return ""


def _same_items(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects as its copy."""
    if len(container) != len(copy):
        return False
    pairs = zip(container.items(), copy.items(), strict=True) if isinstance(container, dict) else ()
    if isinstance(container, dict):
        return all(a == b and x is y for (a, x), (b, y) in pairs)
    return isinstance(container, set) or all(x is y for x, y in zip(container, copy, strict=True))


def fake_instead_of_meta(module: torch.nn.Module, device: torch.device | str = "cpu") -> None:
    """Replace what is on the meta device by fake tensors on `device`, where the call's inputs are.

    For use under `untouched`, which puts it back.
    """
    mode = _torch.fake_mode()
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        kept = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if kept else empty

    for part in module.modules():
        for registry in (part._parameters, part._buffers):
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = fake(tensor)
                    registry[name] = made[id(tensor)]  # type: ignore[assignment]


def _contents(roots: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Every plain container within the roots, however deep, with a shallow copy of each."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [value for root in roots for value in root.values()]
    while waiting:
        value = waiting.pop()
        if type(value) is tuple:
            waiting.extend(value)
        elif type(value) in CONTAINERS and id(value) not in found:
            found[id(value)] = value, value.copy()
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(copy)
    else:
        container.update(copy)


def _drawn() -> tuple[Any, Any]:
    """The states of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _restore(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
