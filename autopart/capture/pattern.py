"""Patterns: what a trace at another length has in common with one that was made before, so that one trace will do.

Capture traces a call at a batch of b and of 2b samples, and what doubles in between belongs to the batch. When the same
module is called with another sequence length, the operations are the same but for their numbers, and those that doubled
before are those that double now. So only the trace at b is made; the other is written down from it. Nothing is taken
on trust: the graph so found must give the shapes that it says when it is run on shapes at yet another batch, and an
argument that doubles must have grown with the length as some size that it was computed from did (``b * length`` does,
``b + length - 9`` does not). Where any of this fails, or a number moved with the batch in another way than doubling,
the second trace is made after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from autopart.capture.trace import Trace
from autopart.ir.captured import Captured
from autopart.ir.graph import Ref, Size, map_arg

Form = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pair of traces without their tensors: for each node its form, and its numbers at the two batch sizes.

    A node's numbers are those among its arguments, then the sizes of its result; `sizes` are those of the tensors that
    it reads, and `lengths` those of the call's tensors, at the smaller batch.
    """

    forms: tuple[Form, ...]
    small: tuple[tuple[float, ...], ...]
    large: tuple[tuple[float, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    result: tuple[Any, ...]

    @classmethod
    def of(cls, small: Trace, large: Trace) -> Pattern:
        """The pattern of two traces, the second at twice the batch of the first."""
        one, two = list(small.graph.graph.nodes), list(large.graph.graph.nodes)
        return cls(
            _forms(one),
            tuple(_numbers(node) for node in one),
            tuple(_numbers(node) for node in two),
            tuple(_sizes(node) for node in one),
            _lengths(small),
            _result(small),
        )

    def doubled(self, trace: Trace) -> Trace | None:
        """`trace` as it would be at twice its batch; None where the pattern does not say."""
        nodes = list(trace.graph.graph.nodes)
        if _result(trace) != self.result or _forms(nodes) != self.forms:
            return None
        lengths = list(zip(_lengths(trace), self.lengths, strict=True))
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for position, node in enumerate(nodes):
            numbers = self._numbers_doubled(position, node, lengths)
            if numbers is None:
                return None
            given = iter(numbers)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].args = _put(copies[node].args, given)
            copies[node].kwargs = _put(copies[node].kwargs, given)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape = [int(size) for size in given]
                copies[node].meta = {**node.meta, "val": torch.empty(shape, dtype=value.dtype, device="meta")}
        return replace(trace, graph=torch.fx.GraphModule(trace.graph, graph), batch=2 * trace.batch)

    def _numbers_doubled(
        self, position: int, node: torch.fx.Node, lengths: list[tuple[int, int]]
    ) -> list[float] | None:
        """The numbers of a node at twice the batch; `lengths` are those of the call's tensors, with those before."""
        pairs = [(1, 1), *zip(_sizes(node), self.sizes[position], strict=True), *lengths]
        found: list[float] = []
        numbers = zip(_numbers(node), self.small[position], self.large[position], strict=True)
        arguments = sum(1 for _ in _inside((node.args, node.kwargs)))
        for place, (new, small, large) in enumerate(numbers):
            if small == large:
                found.append(new)
            elif place < arguments and not any(
                _close(new * old, small * now) or _close(new * now, small * old) for now, old in pairs
            ):
                return None
            elif large == 2 * small:
                found.append(2 * new)
            elif isinstance(new, float) and 2 * large == small:
                found.append(new / 2)
            else:
                return None
        return found


def agrees(captured: Captured, batch: int) -> bool:
    """Whether the graph, run on shapes at `batch` samples, gives the shapes and dtypes that it says."""
    known = {
        item.value.name: torch.empty(item.value.at(batch), dtype=item.value.dtype, device="meta")
        for item in captured.inputs
    }

    def leaf(arg: Any) -> Any:
        match arg:
            case Ref(name):
                return known[name]
            case Size():
                return arg.at(batch)
            case torch.device():
                return torch.device("meta")
            case _:
                return arg

    for node in captured.nodes:
        args, kwargs = map_arg(node.args, leaf), {key: map_arg(arg, leaf) for key, arg in node.kwargs}
        try:
            with torch.no_grad():
                result = node.op(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return False
        for out, made in zip(node.outs, [result] if node.single else result, strict=True):
            if out is not None:
                if (tuple(made.shape), made.dtype) != (out.at(batch), out.dtype):
                    return False
                known[out.name] = made
    return True


def _result(trace: Trace) -> tuple[Any, ...]:
    kinds = tuple((kind, target) for kind, target, _ in trace.inputs)
    return kinds, trace.outputs, trace.result, trace.training


def _forms(nodes: list[torch.fx.Node]) -> tuple[Form, ...]:
    places = {node: place for place, node in enumerate(nodes)}
    forms: list[Form] = []
    for node in nodes:
        value = node.meta.get("val")
        kind = (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)
        target = node.target if node.op == "call_function" else node.op
        forms.append((target, _form(node.args, places), _form(node.kwargs, places), kind))
    return tuple(forms)


def _form(arg: Any, places: Mapping[torch.fx.Node, int]) -> Any:
    """An argument with every number left out."""
    match arg:
        case torch.fx.Node():
            return "node", places[arg]
        case list() | tuple():
            return tuple(_form(item, places) for item in arg)
        case dict():
            return tuple((key, _form(item, places)) for key, item in arg.items())
        case bool():
            return arg
        case int() | float():
            return type(arg)
        case _:
            return arg


def _numbers(node: torch.fx.Node) -> tuple[float, ...]:
    value = node.meta.get("val")
    shape = tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()
    return (*_inside(node.args), *_inside(node.kwargs), *shape)


def _inside(arg: Any) -> Iterator[float]:
    match arg:
        case list() | tuple():
            for item in arg:
                yield from _inside(item)
        case dict():
            for item in arg.values():
                yield from _inside(item)
        case bool():
            return
        case int() | float():
            yield arg


def _put(arg: Any, numbers: Iterator[float]) -> Any:
    """An argument with its numbers replaced, in the order of `_inside`."""
    match arg:
        case list() | tuple():
            return type(arg)(_put(item, numbers) for item in arg)
        case dict():
            return {key: _put(item, numbers) for key, item in arg.items()}
        case bool():
            return arg
        case int() | float():
            return next(numbers)
        case _:
            return arg


def _sizes(node: torch.fx.Node) -> tuple[int, ...]:
    """The dims of the tensors that a node reads, and their numbers of elements."""
    read = (source.meta.get("val") for source in node.all_input_nodes)
    shapes = [tuple(map(int, value.shape)) for value in read if isinstance(value, torch.Tensor)]
    return tuple(size for shape in shapes for size in (*shape, prod(shape)))


def _lengths(trace: Trace) -> tuple[int, ...]:
    """The dims of the call's tensors."""
    return tuple(int(size) for kind, _, tensor in trace.inputs if kind == "input" for size in tensor.shape)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-12 * abs(b)
