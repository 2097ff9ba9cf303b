"""Stage graphs: the FX trace of a rank's text, with the bodies as shared modules and the world's calls as nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from autopart.codegen.bodies import SUFFIX
from autopart.codegen.parsed import body_names, load
from autopart.collectives import SCHEMAS
from autopart.ir.action import Kind
from autopart.ir.program import Program, StageGraphs
from autopart.ir.state import Units


def all_gather(world: Any, units: Units, axis: str, then: Units) -> Sequence[torch.Tensor]:
    """In a stage graph: gather whole parameters over an axis, and begin to gather those of the units `then`."""
    return world.all_gather(units, axis=axis, then=then)  # type: ignore[no-any-return]


def gathered(world: Any, unit: str) -> Sequence[torch.Tensor]:
    """In a stage graph: the whole parameters of one of several units that were gathered."""
    return world.gathered(unit)  # type: ignore[no-any-return]


def keep(world: Any, unit: str, grads: Any) -> None:
    """In a stage graph: keep gradients until those of other units are reduced with them."""
    world.keep(unit, grads)


def reduce_scatter(world: Any, units: Units, grads: Any, axis: str) -> None:
    """In a stage graph: sum gradients over an axis, each rank keeping its part."""
    world.reduce_scatter(units, grads, axis=axis)


def all_reduce(world: Any, units: Units, axis: str) -> None:
    """In a stage graph: sum accumulated gradients over an axis, on every rank."""
    world.all_reduce(units, axis=axis)


def accumulate(world: Any, unit: str, grads: Any) -> None:
    """In a stage graph: add gradients to a unit's."""
    world.accumulate(unit, grads)


def update_buffer(world: Any, name: str, value: torch.Tensor) -> None:
    """In a stage graph: give a buffer a new value."""
    world.update_buffer(name, value)


def exchange(world: Any, collective: str, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """In the graph of a body: a collective on values over an axis, such as ``all_reduce_values``."""
    result: torch.Tensor = getattr(world, collective)(x, **arguments)
    return result


class _TracedValues:
    """The world inside a body during a trace: its collectives on values are nodes, which read `world`."""

    def __init__(self, world: torch.fx.Proxy, tracer: torch.fx.proxy.TracerBase) -> None:
        self.world, self.tracer = world, tracer

    def __getattr__(self, name: str) -> Callable[..., torch.fx.Proxy]:
        if name.removesuffix("_values") not in SCHEMAS:
            raise AttributeError(f"a body calls world.{name}")
        return lambda x, **arguments: self.tracer.create_proxy(
            "call_function", exchange, (self.world, name, x), arguments
        )


class _TracedWorld:
    """The world during a trace: parameters and buffers are placeholders, collectives are nodes."""

    def __init__(
        self, graph: torch.fx.Graph, world: torch.fx.Proxy, tracer: torch.fx.proxy.TracerBase, program: Program
    ) -> None:
        self.graph, self.world, self.tracer, self.program = graph, world, tracer, program
        self.known: dict[str, Any] = {}

    def _given(self, name: str) -> Any:
        if name not in self.known:
            with self.graph.inserting_after(self.world.node):
                self.known[name] = torch.fx.Proxy(self.graph.placeholder(_identifier(name)), self.tracer)
        return self.known[name]

    def parameters(self, unit: str) -> tuple[Any, ...]:
        return tuple(self._given(parameter.target) for parameter in self.program.state.unit(unit).parameters)

    def buffer(self, name: str) -> Any:
        return self._given(name)

    def all_gather(self, units: Units, *, axis: str, then: Units = ()) -> tuple[Any, ...]:
        made: Any = self._call(all_gather, units, axis, then)
        return self._parameters(units, made) if isinstance(units, str) else ()

    def gathered(self, unit: str) -> tuple[Any, ...]:
        return self._parameters(unit, self._call(gathered, unit))

    def _parameters(self, unit: str, whole: Any) -> tuple[Any, ...]:
        return tuple(whole[i] for i in range(len(self.program.state.unit(unit).parameters)))

    def keep(self, unit: str, grads: Any) -> None:
        self._call(keep, unit, grads)

    def reduce_scatter(self, units: Units, grads: Any = None, *, axis: str) -> None:
        self._call(reduce_scatter, units, grads, axis)

    def all_reduce(self, units: Units, *, axis: str) -> None:
        self._call(all_reduce, units, axis)

    def accumulate(self, unit: str, grads: Any) -> None:
        self._call(accumulate, unit, grads)

    def update_buffer(self, name: str, value: Any) -> None:
        self._call(update_buffer, name, value)

    def _call(self, function: Callable[..., Any], *args: Any) -> torch.fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self.world, *args), {})


def stage_graphs(program: Program) -> tuple[StageGraphs, ...]:
    """The graphs of every stage (for every slice of the sequence), at the size of the batch's first microbatch.

    After them come those of the parts of an output layer, S for a forward, T for a backward, and of an input embedding.
    """
    plan, staged, size = program.plan, program.staged, program.plan.largest
    modules: dict[tuple[str, str], torch.fx.GraphModule] = {}
    stages = []
    parts = range(len(staged.stages) - staged.parts - staged.lookups, len(staged.stages))
    for number in (*range(staged.depth), *parts):
        source = program.ranks[plan.stages[number % staged.width].ranks[0]].source
        kinds = (Kind.S, Kind.T) if staged.is_part(number) else (Kind.F, Kind.B, Kind.I, Kind.W)
        first, *names = (f"stage{number}_{SUFFIX[kind]}" for kind in kinds)
        found = (_trace(program, source, n, size, modules) if f"def {n}(" in source else None for n in names)
        stages.append(StageGraphs(_trace(program, source, first, size, modules), *found))
    return tuple(stages)


def _trace(
    program: Program, source: str, name: str, size: int, modules: dict[tuple[str, str], torch.fx.GraphModule]
) -> torch.fx.GraphModule:
    namespace = load(source, name)
    graph, root = torch.fx.Graph(), torch.nn.Module()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)

    def placeholder(label: str) -> torch.fx.Proxy:
        return torch.fx.Proxy(graph.placeholder(_identifier(label)), tracer)

    world = _TracedWorld(graph, placeholder("world"), tracer, program)
    for body in body_names(source):
        namespace[body] = _called(body, namespace[body], root, tracer, source, modules)
    inputs = SimpleNamespace(
        sizes={0: size},
        size=program.plan.batch,
        input=lambda label, k: world._given(label),
        random=lambda label, k: world._given(label),
        whole=placeholder,
        cut=lambda tangent, k, dim: tangent,  # the graph is of one microbatch, and is given what belongs to it
    )
    function = namespace[name]
    formals = function.__code__.co_varnames[3 : function.__code__.co_argcount]
    # What was kept is a list: one placeholder, indexed from the end that it is taken from.
    args = [_Popped(placeholder(label)) if label in ("saved", "stash") else placeholder(label) for label in formals]
    with torch.no_grad():
        result = function(world, inputs, 0, *args)
    graph.output(_plain(result))
    graph.lint()
    return torch.fx.GraphModule(root, graph, class_name=name)


class _Popped:
    """A traced list of saved tuples: every `pop` is the next one from its end, or from its beginning."""

    def __init__(self, proxy: Any) -> None:
        self.proxy, self.count = proxy, 0

    def pop(self, place: int = -1) -> Any:
        self.count += 1
        return _Unpacked(self.proxy[self.count - 1 if place == 0 else -self.count])


class _Unpacked:
    """``*saved.pop()`` or ``*stash.pop(0)``: as many values as the body called with it takes; resolved at the call."""

    def __init__(self, proxy: Any) -> None:
        self.proxy = proxy

    def __iter__(self) -> Any:
        return iter((self,))


def _called(
    name: str,
    function: Callable[..., Any],
    root: torch.nn.Module,
    tracer: torch.fx.proxy.TracerBase,
    source: str,
    modules: dict[tuple[str, str], torch.fx.GraphModule],
) -> Callable[..., Any]:
    """The body as a call of a module, traced at its first call and shared by all stages."""
    communicates = function.__code__.co_varnames[:1] == ("world",)

    def call(*args: Any) -> Any:
        flat: list[Any] = [args[0].world] if communicates else []
        b, B, *given = args[communicates:]
        count = function.__code__.co_argcount - 2 - communicates
        for arg in given:
            missing = count - len(given) + 1
            flat += [arg.proxy[i] for i in range(missing)] if isinstance(arg, _Unpacked) else [arg]
        key = (name, source[source.index(f"def {name}(") :].split("\n\n\n", 1)[0])
        if key not in modules:
            modules[key] = _body(function, b, B, count, communicates)
        setattr(root, name, modules[key])
        results = tracer.create_proxy("call_module", name, tuple(flat), {})
        shape = modules[key].returns
        return _unflattened(results, shape)

    return call


def _body(function: Callable[..., Any], b: int, B: int, count: int, communicates: bool) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    before = [_TracedValues(torch.fx.Proxy(graph.placeholder("world"), tracer), tracer)] if communicates else []
    names = function.__code__.co_varnames[len(before) + 2 :][:count]
    result = function(*before, b, B, *(torch.fx.Proxy(graph.placeholder(name), tracer) for name in names))
    graph.output(_plain(result))
    module = torch.fx.GraphModule(torch.nn.Module(), graph, class_name=function.__name__)
    module.returns = _shape(result)
    return module


def _shape(value: Any) -> Any:
    return tuple(_shape(item) for item in value) if isinstance(value, tuple) else None


def _unflattened(proxy: Any, shape: Any) -> Any:
    """The results of a call one by one; a tuple among them (what is saved, a unit's gradients) stays whole."""
    return proxy if shape is None else tuple(proxy[i] for i in range(len(shape)))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.fx.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return value


def _identifier(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label).strip("_")
