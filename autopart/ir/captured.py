"""What capture returns: one step of the user's model as a graph that holds at every batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from autopart.ir.graph import Input, Node, Output, Ref, Share, Size, Value, map_arg


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the traced code holds itself: neither parameter nor registered buffer nor input."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Captured:
    """One call of a module as a joint forward+backward graph (forward only where `training` is false).

    `batch` is the sample call's batch size; sizes that move with the batch are `Size`. `prologue` lists nodes to run
    once a step on the whole batch, before the rest; what they make are inputs of the rest, of kind prologue (there are
    none, and none of kind random, until `normalise`). `tree` rebuilds the user's return value
    from the leaves in `result`, each the name of an output value, or ``("literal", x)`` for what is not a tensor.
    `tied` maps each parameter name to the name under which its tensor is known here. `batch_dims` gives the split dim
    of each user input. `sliced` says that each slice (data rank and microbatch) computes as if it were the whole batch,
    because it couples samples; otherwise the slices add up to the whole batch's step. Under ``semantics="exact"`` there
    is then one slice, the batch, and `coupled` says what couples its samples; it is "" under ``"accumulate"``.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    training: bool
    batch: int
    batch_dims: tuple[tuple[str, int], ...]
    tree: Any
    result: tuple[str | tuple[str, Any], ...]
    tied: tuple[tuple[str, str], ...]
    modules: tuple[tuple[str, str], ...] = ()  # the further paths of a module that has several, with its first
    call: str = ""  # what of the call it holds for: shapes but for the batch, dtypes, other arguments
    constants: tuple[Constant, ...] = ()
    prologue: tuple[Node, ...] = ()
    sliced: bool = False
    coupled: str = ""

    def values(self) -> Iterator[Value]:
        """Every value: the inputs' first, then the nodes' in order."""
        made = chain.from_iterable(map(attrgetter("outs"), (*self.prologue, *self.nodes)))
        return chain([item.value for item in self.inputs], filter(None, made))

    def of_kind(self, *kinds: str) -> tuple[Input, ...]:
        """The inputs of the given kinds, in order."""
        return tuple(item for item in self.inputs if item.kind in kinds)

    def updates(self) -> tuple[Output, ...]:
        """The outputs that are new values of buffers, for the forwards that come after."""
        return tuple(out for out in self.outputs if out.kind == "mutation")

    @property
    def loss(self) -> str | None:
        """The name of the loss value, None in a graph without one."""
        return next((out.name for out in self.outputs if out.kind == "loss"), None)

    @property
    def deferred(self) -> bool:
        """Whether the backward waits for the gradients of the outputs: it is a training step without a loss."""
        return self.training and self.loss is None

    def at(self, batch: int) -> torch.fx.GraphModule:
        """The graph at one batch size as an FX GraphModule: inputs in order to a tuple of the outputs in order."""
        graph = torch.fx.Graph()
        env: dict[str, torch.fx.Node] = {}
        for item in self.inputs:
            if item.kind != "prologue":
                env[item.value.name] = graph.placeholder(item.value.name)

        def leaf(arg: Any) -> Any:
            match arg:
                case Ref(name):
                    return env[name]
                case Size():
                    return arg.at(batch)
                case Share(factor):
                    return factor
                case _:
                    return arg

        for node in (*self.prologue, *self.nodes):
            args = tuple(map_arg(a, leaf) for a in node.args)
            kwargs = {key: map_arg(a, leaf) for key, a in node.kwargs}
            call = graph.call_function(node.op, args, kwargs)
            for position, out in enumerate(node.outs):
                if out is not None:
                    env[out.name] = call if node.single else graph.call_function(_getitem, (call, position))
        graph.output(tuple(env[out.name] for out in self.outputs))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def __str__(self) -> str:
        """A line a node: ``name: dtype[shape] = op(args)  # module | source``."""
        lines = [f"{item.kind} {item.target}: {describe(item.value)}" for item in self.inputs]
        lines += [describe_node(node) for node in (*self.prologue, *self.nodes)]
        lines += [f"{out.kind} {out.target} = {out.name}" for out in self.outputs]
        return "\n".join(lines)


def dead_code_eliminated(captured: Captured) -> Captured:
    """The same graph without nodes, results and non-user inputs that no output needs.

    A draw that has no name yet stays: the names of later ones count it.
    """
    needed = {out.name for out in captured.outputs} | {name for node in captured.prologue for name in node.refs()}
    kept: list[Node] = []
    for node in reversed(captured.nodes):
        if needed.isdisjoint(node.names()) and not unnamed(node):
            continue
        if not needed.issuperset(node.names()) and not unnamed(node):
            outs = tuple(out if out is not None and out.name in needed else None for out in node.outs)
            node = replace(node, outs=outs)
        kept.append(node)
        needed.update(node.refs())
    inputs = tuple(item for item in captured.inputs if item.value.name in needed or item.kind in ("parameter", "input"))
    return replace(captured, nodes=tuple(reversed(kept)), inputs=inputs)


def unnamed(node: Node) -> bool:
    """Whether a node draws random numbers that are not named yet (`passes.draws`)."""
    return node.op.namespace == "autopart" and node.args[0] is None


def describe(value: Value) -> str:
    """``name: float32[2 * b, 384]``."""
    dims = ", ".join(dim.text("B" if dim.whole else "b") if isinstance(dim, Size) else str(dim) for dim in value.shape)
    return f"{value.name}: {str(value.dtype).removeprefix('torch.')}[{dims}]"


def describe_node(node: Node) -> str:
    """One line of text for a node."""

    def leaf(arg: Any) -> Any:
        return arg.name if isinstance(arg, Ref) else arg

    outs = ", ".join(describe(out) if out is not None else "_" for out in node.outs)
    args = ", ".join([str(map_arg(a, leaf)) for a in node.args] + [f"{k}={map_arg(a, leaf)}" for k, a in node.kwargs])
    return f"{outs} = {node.opname}({args})  # {node.module} | {node.source}"


def _getitem(items: Any, position: int) -> Any:
    return items[position]
