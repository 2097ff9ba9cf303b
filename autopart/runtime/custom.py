"""Operators that are not torch's, as a program calls them: their results have the shapes that it was made for.

A program is made on shapes, which for such an operator its fake implementation tells. One that tells others than the
kernel returns would go on with wrong sizes, unnoticed where they broadcast, so every call is held to it.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from autopart import _torch
from autopart._torch import OpOverload

_FOREIGN = re.compile(r"\btorch\.ops\.(?!aten\b|autopart\b)")

Metadata = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
"""Shape and dtype of every result, None for one that is no tensor."""


def hold_operators(namespace: dict[str, Any], source: str) -> None:
    """In the namespace of a text, hold the operators of other libraries to their fake implementations."""
    if _FOREIGN.search(source):
        namespace["torch"] = _Torch()


def told(op: OpOverload, args: Any, kwargs: Any) -> Metadata:
    """What an operator's fake implementation says of its results."""
    with _torch.without_modes(), _torch.fake_mode() as fake:
        given = _torch.pytree.tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
        return metadata(op(*given[0], **given[1]))


def metadata(found: Any) -> Metadata:
    """What an operator returned, without its content."""
    results = found if isinstance(found, list | tuple) else (found,)
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in results)


def hold(op: OpOverload, found: Any, wanted: Metadata) -> None:
    """Raise RuntimeError unless an operator returned what its fake implementation says."""
    made = metadata(found)
    if made != wanted:
        raise RuntimeError(
            f"{op} returned {_text(made)}, and its fake implementation says {_text(wanted)}, by which this program was "
            "made: mend what register_fake was given, or the operator"
        )


def _text(results: Metadata) -> str:
    return ", ".join(
        "no tensor" if result is None else f"{str(result[1]).removeprefix('torch.')}{list(result[0])}"
        for result in results
    )


class _Torch:
    """torch, with the operators of other libraries held to their word."""

    def __init__(self) -> None:
        self.ops = _Operators(torch.ops, ("aten", "autopart"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Operators:
    """``torch.ops`` or what is below it, up to the operators, each found once; the names in `plain` are as they are."""

    def __init__(self, below: Any, plain: tuple[str, ...] = ()) -> None:
        self._below, self._plain = below, plain

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._below, name)
        if name not in self._plain:
            found = _Held(found) if isinstance(found, OpOverload) else _Operators(found)
        setattr(self, name, found)
        return found


class _Held:
    """An operator whose every result is held to its fake implementation, which is asked once for alike arguments."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.known: dict[str, Metadata] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.op(*args, **kwargs)
        alike = _torch.pytree.tree_map_only(torch.Tensor, lambda x: (tuple(x.shape), x.dtype), (args, kwargs))
        key = repr(alike)
        if key not in self.known:
            self.known[key] = told(self.op, args, kwargs)
        hold(self.op, found, self.known[key])
        return found
