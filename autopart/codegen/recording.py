"""A world that records: run a rank's text on shapes alone, and see every action that it would perform.

Bodies are called once a distinct set of shapes, on fake tensors; everything else about the text is executed as it stands.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopart import _torch
from autopart.ir.action import Action, Kind
from autopart.ir.state import State

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's shape and dtype, standing for it."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Event:
    """An action with what it moves: `what` is the shapes sent or expected; `axis` and `stages` say who takes part."""

    action: Action
    what: tuple[Spec, ...] = ()
    axis: str = ""
    stages: tuple[int, ...] = ()


@dataclass
class RecordingBatch:
    """A batch of shapes: `sizes` of this data rank's microbatches, `size` of the whole batch."""

    inputs: Mapping[str, Callable[[int], Spec]]
    sizes: tuple[int, ...]
    size: int

    def input(self, name: str, k: int) -> Spec:
        """The piece of an input for microbatch k."""
        return self.inputs[name](self.sizes[k])

    def whole(self, name: str) -> Spec:
        """The whole input."""
        return self.inputs[name](self.size)


@dataclass
class RecordingWorld:
    """Takes the place of a rank's world; `events` is what it saw."""

    state: State
    parts: int
    part: int
    buffers: Mapping[str, Spec]
    events: list[Event] = field(default_factory=list)
    accumulated: list[str] = field(default_factory=list)
    here: Action | None = None

    def store(self) -> dict[Any, Any]:
        """A place for values that outlive the action that made them."""
        return {}

    @contextlib.contextmanager
    def action(self, kind: str, *, stage: int, microbatch: int) -> Iterator[None]:
        """A compute action; the collectives recorded inside belong to it."""
        self.here = Action(Kind(kind), stage, microbatch)
        self.events.append(Event(self.here))
        yield
        self.here = None

    def parameters(self, unit: str) -> tuple[Spec, ...]:
        """The whole parameters of a unit."""
        return tuple(Spec(p.shape, p.dtype) for p in self.state.unit(unit).parameters)

    def all_gather(self, unit: str, *, axis: str) -> tuple[Spec, ...]:
        """Gather a unit's parameters for one use."""
        self._collective(Kind.GATHER, unit, axis)
        return self.parameters(unit)

    def regather(self, unit: str, *, axis: str) -> None:
        """Make a unit whole again after an optimizer step on parts."""
        self._collective(Kind.GATHER, unit, axis)

    def accumulate(self, unit: str, grads: Sequence[Spec | None]) -> None:
        """Add gradients to the unit's."""
        self._check(unit, grads)
        self.accumulated.append(unit)

    def reduce_scatter(self, unit: str, grads: Sequence[Spec | None] | None = None, *, axis: str) -> None:
        """Reduce gradients to parts."""
        if grads is not None:
            self._check(unit, grads)
            self.accumulated.append(unit)
        self._collective(Kind.REDUCE, unit, axis)

    def all_reduce(self, unit: str, *, axis: str, stages: tuple[int, ...] = ()) -> None:
        """Reduce gradients, whole on every rank."""
        self._collective(Kind.REDUCE, unit, axis, stages)

    def buffer(self, name: str) -> Spec:
        """A buffer or constant."""
        return self.buffers[name]

    def send(self, values: Sequence[Spec], *, stage: int, to: int, microbatch: int) -> None:
        """Send an edge's values."""
        self.events.append(Event(Action(Kind.SEND, stage, microbatch, peer=to), tuple(values)))

    def recv(self, like: Sequence[tuple[Shape, torch.dtype]], *, stage: int, source: int, microbatch: int) -> tuple[Spec, ...]:
        """Receive an edge's values."""
        specs = tuple(Spec(tuple(shape), dtype) for shape, dtype in like)
        self.events.append(Event(Action(Kind.RECV, stage, microbatch, peer=source), specs))
        return specs

    def total(self, parts: Sequence[Spec], *, shape: Shape, dtype: torch.dtype) -> Spec:
        """A sum over microbatches and ranks."""
        return Spec(shape, dtype)

    def joined(self, parts: Mapping[int, Spec], *, dim: int | None) -> Any:
        """Microbatches joined."""
        return parts

    def everywhere(self, parts: Any, *, stage: int, dim: int | None, like: Callable[[int], Any]) -> Any:
        """An output brought to every rank."""
        return parts

    def _collective(self, kind: Kind, unit: str, axis: str, stages: tuple[int, ...] = ()) -> None:
        stage, microbatch = (self.here.stage, self.here.microbatch) if self.here is not None else (-1, -1)
        self.events.append(Event(Action(kind, stage, microbatch, unit=unit), (), axis, stages))

    def _check(self, unit: str, grads: Sequence[Spec | None]) -> None:
        whole = self.parameters(unit)
        if len(grads) != len(whole) or any(g is not None and g != p for g, p in zip(grads, whole, strict=True)):
            raise TypeError(f"gradients of {unit} have shapes {grads}, its parameters {whole}")


def load(source: str, name: str, device: torch.device | None = None) -> dict[str, Any]:
    """The namespace of a rank's source, compiled under the file name `name` so that errors show its lines."""
    import linecache

    namespace: dict[str, Any] = {"__name__": name}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
    if device is not None:
        namespace["DEVICE"] = device
    return namespace


def body_names(source: str) -> tuple[str, ...]:
    """The functions of a rank's source that compute: those that take ``b`` and ``B``, and the prologue."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return tuple(
        node.name
        for node in functions
        if [a.arg for a in node.args.args][:2] == ["b", "B"] or node.name == "prologue"
    )


class Bodies:
    """Calls of bodies on shapes, each distinct one run once on fake tensors. Shared by the ranks of one program."""

    def __init__(self) -> None:
        self.mode = _torch.FakeTensorMode()
        self.known: dict[Any, Any] = {}

    def wrap(self, function: Callable[..., Any], text: str) -> Callable[..., Any]:
        """The body as a function of specs; `text` is its source, equal sources share results."""

        def body(*args: Any) -> Any:
            key = (text, args)
            if key not in self.known:
                with self.mode, torch.no_grad():
                    self.known[key] = _specs(function(*(_fake(arg) for arg in args)))
            return self.known[key]

        return body


def record(source: str, name: str, world: RecordingWorld, batch: RecordingBatch, bodies: Bodies) -> tuple[Event, ...]:
    """Everything that a rank's text does, in order."""
    namespace = load(source, name)
    for function, text in _body_texts(source).items():
        namespace[function] = bodies.wrap(namespace[function], text)
    namespace["torch"] = _Torch()
    namespace["step"](world, batch)
    return tuple(world.events)


class _Torch:
    """The few names of torch that stage functions and steps use, on shapes; bodies keep the real torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def ones(shape: Shape, *, dtype: torch.dtype, device: Any) -> Spec:
        return Spec(tuple(shape), dtype)


def _body_texts(source: str) -> dict[str, str]:
    names = set(body_names(source))
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    }


def _fake(arg: Any) -> Any:
    return torch.empty(arg.shape, dtype=arg.dtype) if isinstance(arg, Spec) else arg


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    return tuple(_specs(item) for item in value) if isinstance(value, tuple | list) else value
