"""Coverage: do the chunks of a loop make up all of what they are cut from? Asked of a text, while it runs on shapes."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopart import _torch
from autopart.codegen.parsed import executing

aten = torch.ops.aten


class Coverage(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parts the loops of a function take of what is there before them, and which they fill."""

    def __init__(self, file: str, first: int, loops: Sequence[tuple[int, int]], given: Iterable[Any]) -> None:
        """`file` and `first` are where the function begins; `loops` the first and last lines of each, from there on."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.file, self.first, self.loops = file, first, loops
        self.there = {id(each): each for each in given if isinstance(each, torch.Tensor)}
        self.parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.lengths: dict[tuple[int, int], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; note it where it takes a part."""
        result, line = func(*args, **(kwargs or {})), executing(self.file) - self.first
        inside = any(first <= line <= last for first, last in self.loops)
        known = bool(args) and id(args[0]) in self.there
        if not inside or (known and func is aten.view.default):
            made = result if isinstance(result, tuple | list) else (result,)
            self.there |= {id(each): each for each in made if isinstance(each, torch.Tensor)}
        elif known and func is aten.slice.Tensor:
            whole, dim, start, stop = args[:4]
            key = line, dim % whole.dim()
            self.lengths[key] = size = whole.shape[dim]
            self.parts.setdefault(key, []).append((min(start, size), min(stop, size)))
        return result

    def check(self) -> None:
        """Raise ValueError, with the line, where parts leave something out, or have it twice."""
        for (line, dim), parts in self.parts.items():
            at, length = 0, self.lengths[line, dim]
            for start, stop in (*sorted(parts), (length, length)):
                if start != at:
                    what = f"leave out {at} to {start}" if start > at else f"have {start} to {at} twice"
                    text = linecache.getline(self.file, self.first + line).strip()
                    raise ValueError(
                        f"the chunks of line {self.first + line}, `{text}`, {what} of the {length} in dim {dim}"
                    )
                at = stop
