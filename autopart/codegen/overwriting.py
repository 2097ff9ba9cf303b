"""Overwriting: what a body may write over, seen while it runs on shapes: its own memory, which nothing reads later.

A value whose memory gets another's result is gone under its old name, and so are all views of it. What a body was given
(values, what was saved, parameters, buffers, the caller's inputs) belongs to others, who may read it later or are
sending it; what it returns is read under its name. So neither is written over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from autopart import _torch
from autopart.codegen.parsed import Body
from autopart.rules.alias import views
from autopart.rules.memory import IN_PLACE_NAMES

FILLS = (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default)
"""What a loop over chunks does with its sums, and with what it puts together."""


class Overwriting(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode in which a body runs; a ValueError where it writes over what it must not.

    Not a TypeError: for one, Python would try `x = x + y` in place of ``x += y``.
    """

    def __init__(self, body: Body, code: CodeType, given: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.body, self.code = body, code
        self.formals = frozenset(code.co_varnames[: code.co_argcount])
        self.others = [arg for arg in given if isinstance(arg, torch.Tensor)]  # what belongs to others

    def lend(self, value: torch.Tensor) -> None:
        """A value is handed to a collective, which may be at it for longer than its call."""
        self.others.append(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, once it is known that it may write where it does."""
        kwargs = kwargs or {}
        if _torch.is_mutable(func):
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        frame = _frame(self.code.co_filename)
        if frame is None or frame.f_code is not self.code:
            raise ValueError(f"{func} writes over a value outside of a layer's function; let it make a new one")
        written, read = _operands(func, args, kwargs)
        for value in written:
            key = _torch.storage_key(value)
            here = {name for name, held in frame.f_locals.items() if key in map(_torch.storage_key, _tensors(held))}
            name = next((name for name in sorted(here) if frame.f_locals[name] is value), "a value")
            shared = self._shared(here)
            if shared & self.formals or key in map(_torch.storage_key, self.others):
                raise ValueError(f"{name} is written over, but is not this function's own; let {func} make a new value")
            if here and not (func in FILLS and self._in_loop(frame)):  # what has no name is an operator's own
                self._check_aligned(func, value, name, [other for other in read if _torch.storage_key(other) == key])
                self._check_unread(func, name, shared, frame)

    def _in_loop(self, frame: FrameType) -> bool:
        """Whether a line is in a loop, which adds up and fills what is made before it (see `coverage`)."""
        line = frame.f_lineno - self.code.co_firstlineno
        return any(first <= line <= last for first, last in self.body.loops)

    def _shared(self, names: set[str]) -> set[str]:
        """The names of what shares memory with values of these names, or does where strides are others than here."""
        links = [(s.operand, s.targets) for s in self.body.statements if s.operand and _may_view(s.function)]
        found: set[str] = set()
        while found != names:
            found = set(names)
            for operand, targets in links:
                if operand in names or not names.isdisjoint(targets):
                    names = names | targets | {operand}
        return found

    def _check_aligned(self, func: Any, value: torch.Tensor, name: str, read: Sequence[torch.Tensor]) -> None:
        """An operator that reads what it writes over reads each element before it is gone."""
        ordinary = func.overloadpacket.__name__.removesuffix("_") in IN_PLACE_NAMES
        if read and not (ordinary and all(_geometry(other) == _geometry(value) for other in read)):
            raise ValueError(f"{func} reads of {name} what it has written over; let it make a new value")

    def _check_unread(self, func: Any, name: str, shared: set[str], frame: FrameType) -> None:
        first = self.code.co_firstlineno
        line = frame.f_lineno - first
        statement = next((each for each in self.body.statements if each.first <= line <= each.last), None)
        if statement is None:
            raise ValueError(f"{name} is written over amid other things; give it a line of its own: name = {func}(...)")
        for other in sorted(shared - statement.targets):
            last = self.body.last_reads.get(other, -1)
            if last > statement.last:
                raise ValueError(
                    f"{name} is written over, but line {first + last} reads {other}, which lies there; write over a"
                    " value that is not read later"
                )


def _frame(file: str) -> FrameType | None:
    """The innermost frame that executes a file."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The tensors that a call writes, and all others that it reads."""
    written: list[Any] = []
    read: list[Any] = []
    for place, formal in enumerate(func._schema.arguments):
        given = kwargs.get(formal.name, args[place] if place < len(args) else None)
        writes = formal.alias_info is not None and formal.alias_info.is_write
        (written if writes else read).extend(_tensors(given))
    return written, read


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from _tensors(item)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _may_view(function: str) -> bool:
    """Whether what is called may return a view: an operator that does, or something that is not known here."""
    op: Any = torch.ops
    for name in function.removeprefix("torch.ops.").split("."):
        op = getattr(op, name, None)
    known = isinstance(op, _torch.OpOverload) and op.namespace in ("aten", "autopart")
    return not known or views(op)
