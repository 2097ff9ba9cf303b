"""Bodies on shapes: what a rank's functions return for tensors of given shapes, found on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from autopart import _torch
from autopart.codegen.coverage import Coverage
from autopart.codegen.exchange import Exchange, ExchangeWorld
from autopart.codegen.overwriting import Overwriting
from autopart.codegen.parsed import Body, Parsed, parse

Shape = tuple[int, ...]

META = torch.device("meta")


@dataclass(slots=True, unsafe_hash=True)  # not frozen: it is made by the thousand, which would take twice as long
class Spec:
    """A tensor's shape and dtype, standing for it.

    `microbatch` is the one that it belongs to, None for what all share; `source` the kind and target of the graph's
    input that it is (`ir.graph.Input`), or ``("edge", "0 1 0")`` for the first value that stage 0 hands to stage 1;
    `call` the number of the body's call that made it, `path` its place in what this returned; `parts` what was brought
    together in it. `whole` marks what has the samples of the whole batch, `own` what is computed from one data rank's
    samples where the whole batch is meant. None of these count when specs are compared.
    """

    shape: Shape
    dtype: torch.dtype
    microbatch: int | None = field(default=None, compare=False)
    source: tuple[str, str] = field(default=("", ""), compare=False)
    call: int = field(default=-1, compare=False)
    path: tuple[int, ...] = field(default=(), compare=False)
    parts: tuple[Spec, ...] = field(default=(), compare=False)
    whole: bool = field(default=False, compare=False)
    own: bool = field(default=False, compare=False)


class Samples(int):
    """The number of samples of a microbatch, and whatever is computed from it."""

    microbatch: int

    def __new__(cls, number: int, microbatch: int) -> Samples:
        made = super().__new__(cls, number)
        made.microbatch = microbatch
        return made

    def __mul__(self, other: int) -> Samples:
        return Samples(int(self) * other, self.microbatch)

    def __add__(self, other: int) -> Samples:
        return Samples(int(self) + other, self.microbatch)

    def __sub__(self, other: int) -> Samples:
        return Samples(int(self) - other, self.microbatch)

    def __floordiv__(self, other: int) -> Samples:
        return Samples(int(self) // other, self.microbatch)

    __rmul__, __radd__ = __mul__, __add__


class Bodies:
    """Calls of bodies on shapes, each distinct one run once, as are equal texts. Shared by a program's ranks."""

    def __init__(self) -> None:
        self.recordings: dict[Any, Any] = {}
        self._made: dict[Any, tuple[Any, tuple[Exchange, ...]]] = {}
        self._parsed: dict[tuple[str, str], Parsed] = {}
        self._known: dict[str, Body] = {}

    def parsed(self, source: str, name: str) -> Parsed:
        """`parse`, once a source."""
        key = (source, name)
        if key not in self._parsed:
            self._parsed[key] = parse(source, name, self._known)
        return self._parsed[key]

    def call(
        self, function: Callable[..., Any], body: Body, args: tuple[Any, ...], places: Mapping[str, int]
    ) -> tuple[Any, tuple[Exchange, ...]]:
        """What a body returns, as shapes, and its collectives at these `places` of axes.

        Equal texts share results, at all places too if their pieces are equal.
        """
        anywhere = (body.text, function.__name__, args if body.reads_whole else (*args[:1], *args[2:]))
        here = (*anywhere, tuple(places.items()))
        found = self._made.get(anywhere) or self._made.get(here)
        if found is None:
            made, noted = _on_shapes(function, body, args, places)
            found = _specs(made), noted
            self._made[anywhere if all(each.even for each in noted) else here] = found
        return found


def _on_shapes(
    function: Callable[..., Any], body: Body, args: tuple[Any, ...], places: Mapping[str, int]
) -> tuple[Any, tuple[Exchange, ...]]:
    """Call a body on meta tensors; on fake ones, ten times slower, where an op knows no meta tensors."""

    def called(device: torch.device) -> tuple[Any, tuple[Exchange, ...]]:
        code = function.__code__
        given = tuple(_empty(arg, device) for arg in args)
        overwriting = Overwriting(body, code, given)
        world = ExchangeWorld(places, dict(body.operands), code.co_filename, code.co_firstlineno, overwriting.lend)
        coverage = Coverage(code.co_filename, code.co_firstlineno, body.loops, given)
        with overwriting, coverage if body.loops else nullcontext():
            made = function(*((world,) if body.communicates else ()), *given)
        coverage.check()
        return made, tuple(world.noted)

    with torch.no_grad():
        try:
            return called(META)
        except NotImplementedError:
            function.__globals__["DEVICE"] = cpu = torch.device("cpu")
            try:
                with _torch.fake_mode():
                    return called(cpu)
            finally:
                function.__globals__["DEVICE"] = META


def _empty(arg: Any, device: torch.device) -> Any:
    match arg:
        case Spec():
            return torch.empty(arg.shape, dtype=arg.dtype, device=device)
        case Samples():
            return int(arg)
        case _:
            return arg


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    return tuple(_specs(item) for item in value) if isinstance(value, tuple | list) else value


def made_by(value: Any, microbatch: int | None, call: int, path: tuple[int, ...] = (), *, own: bool = False) -> Any:
    """A body's results as those of one call, which belong to a microbatch."""
    if isinstance(value, Spec):
        return Spec(value.shape, value.dtype, microbatch, ("", ""), call, path, (), False, own)
    if not isinstance(value, tuple):
        return value
    return tuple([made_by(item, microbatch, call, (*path, i), own=own) for i, item in enumerate(value)])


def joined(parts: Sequence[Spec], dim: int | None) -> Spec:
    """The parts concatenated along `dim`; the first with None. TypeError if other dims differ."""
    first = parts[0]
    if dim is None:
        return Spec(first.shape, first.dtype)
    for part in parts:
        if (*part.shape[:dim], *part.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise TypeError(f"parts of shapes {shown(parts)} are joined along dim {dim}")
    return Spec((*first.shape[:dim], sum(p.shape[dim] for p in parts), *first.shape[dim + 1 :]), first.dtype)


def shown(specs: Iterable[Spec | None]) -> str:
    """``float32[4, 8], None``."""
    texts = (f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}" if s is not None else "None" for s in specs)
    return ", ".join(texts)
