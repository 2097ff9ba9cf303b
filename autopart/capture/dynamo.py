"""Capture through torch.compile: the default route.

Dynamo reads the user's Python and hands over one graph with the user's file and line on every node, module names,
hand-written ``autograd.Function`` backwards, and refuses a data-dependent branch with its line.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopart import _torch
from autopart.capture.blocks import find_run, shortened
from autopart.capture.call import Call
from autopart.capture.guard import changes, reassigned_buffer
from autopart.capture.trace import (
    Names,
    Trace,
    Traced,
    copied,
    find_loss,
    flatten_result,
    held_tensor,
    joint,
    keeps_gradients,
    plain_leaf,
    where,
)
from autopart.errors import CaptureError


def trace(
    module: torch.nn.Module, call: Call, loss_fn: Callable[..., Any] | None, target: bool, names: Names
) -> Traced:
    """Trace one call. With `target`, the call's last positional argument goes to `loss_fn`, not to the module."""
    seen: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen["graph"] = graph
        seen["inputs"] = [n.meta["grapharg"].example for n in graph.graph.nodes if n.op == "placeholder"]
        outputs = [n.meta["example_value"] for n in _outputs(graph)]
        seen["requires_grad"] = [bool(v.requires_grad) for v in outputs]
        seen["metas"] = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in outputs]
        return lambda *_: tuple(seen["metas"])

    args, kwargs = call.unflatten()
    # Dynamo keeps what it compiled with the code object: a fresh one leaves nothing behind and is never "recompiled".
    fresh = types.FunctionType(_run.__code__.replace(), _run.__globals__)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    try:
        value = _torch.dynamo_graph(fresh, (module, loss_fn, target, args, kwargs), {}, backend)
    except _torch.dynamo_refusals() as error:
        raise _refusal(error, module) from error
    other = reassigned_buffer(module, buffers)
    if "graph" not in seen:
        raise CaptureError(f"{type(module).__name__}.forward does no tensor operation, so there is nothing to place")
    made = _finish(module, call, value, seen, names)
    # A buffer changed in place looks reassigned too; its change is in the graph, and `normalise` knows the line of it.
    if other and not any(
        type(d).__name__ == "InputMutationAOTOutput" for d in made.traces[0].graph.graph.output_node().meta["desc"]
    ):
        raise changes(module, f"the buffer {other}")
    return made


def _run(module: Any, loss_fn: Any, target: bool, args: Any, kwargs: Any) -> Any:
    if loss_fn is None:
        return module(*args, **kwargs)
    if target:
        output = module(*args[:-1], **kwargs)
        return loss_fn(output, args[-1]), output
    output = module(*args, **kwargs)
    return loss_fn(output), output


def _outputs(graph: torch.fx.GraphModule) -> tuple[torch.fx.Node, ...]:
    return tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]


def _finish(module: torch.nn.Module, call: Call, value: Any, seen: dict[str, Any], names: Names) -> Traced:
    metas = {id(meta): i for i, meta in enumerate(seen["metas"])}
    given = {id(tensor): path for path, tensor in call.tensors}
    loss = find_loss(value, lambda x: id(x) in metas and seen["requires_grad"][metas[id(x)]])
    loss_index = metas.get(id(loss)) if loss is not None else None
    starts = loss_index is not None and seen["requires_grad"][loss_index] and torch.is_grad_enabled()
    leaves, tree = flatten_result(value, loss)
    result: list[tuple[str, Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            result.append(plain_leaf(leaf))
        elif id(leaf) in metas:
            result.append(("output", metas[id(leaf)]))
        elif id(leaf) in given:
            result.append(("input", given[id(leaf)]))
        else:
            raise held_tensor()
    graph: torch.fx.GraphModule = seen["graph"]
    returned = {what for kind, what in result if kind == "output" and seen["requires_grad"][what]}
    deferred = not starts and bool(returned) and keeps_gradients(module, call)
    if deferred:
        _with_outputs(graph, lambda i: copied if i in returned else torch.detach)
    else:
        _with_outputs(graph, lambda i: None if starts and i == loss_index else torch.detach)
    outputs = tuple("loss" if i == loss_index and not deferred else "output" for i in range(len(metas)))
    inputs = tuple(_name(tensor, given, names, i) for i, tensor in enumerate(seen["inputs"]))

    def traced(graph: torch.fx.GraphModule, places: Sequence[int]) -> Trace:
        joined = joint(graph, tuple(seen["inputs"][i] for i in places), module)
        mine = tuple(inputs[i] for i in places)
        return Trace(joined, call.batch, mine, outputs, tuple(result), tree, starts or deferred)

    def whole() -> Trace:
        return traced(graph, range(len(inputs)))

    placeholders = (node for node in graph.graph.nodes if node.op == "placeholder")
    run = find_run(graph.graph, {node: item[:2] for node, item in zip(placeholders, inputs, strict=True)})
    if run is None:
        return Traced.of(whole())
    return Traced(tuple(traced(*shortened(graph, run, count)) for count in (3, 4)), run.paths, whole)


def _with_outputs(graph: torch.fx.GraphModule, function: Callable[[int], Callable[..., Any] | None]) -> None:
    """Put a function behind every output: the joint graph has no backward of those that are detached."""
    node = graph.graph.output_node()
    with graph.graph.inserting_before(node):
        outputs = [
            out if (end := function(i)) is None else graph.graph.call_function(end, (out,))
            for i, out in enumerate(_outputs(graph))
        ]
    node.args = (tuple(outputs),)
    graph.recompile()


def _name(tensor: torch.Tensor, given: dict[int, str], names: Names, index: int) -> tuple[str, str, torch.Tensor]:
    if id(tensor) in names.parameters:
        return "parameter", names.parameters[id(tensor)], tensor
    if id(tensor) in names.buffers:
        return "buffer", names.buffers[id(tensor)], tensor
    if id(tensor) in given:
        return "input", given[id(tensor)], tensor
    return "constant", f"constant{index}", tensor


def _refusal(error: Exception, module: torch.nn.Module) -> CaptureError:
    """Dynamo's refusal in one line: the user's line, and what it cannot do with it."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    raised = re.search(r"raised exception (.*)|got ([A-Z]\w*\(.*\))", text)
    if raised:
        return CaptureError(f"{where(error, module)}: forward fails: {raised[1] or raised[2]}")
    context = re.search(r"Developer debug context: (.{1,120})", text)
    reason += f" ({context[1].strip()})" if context else ""
    advice = (
        "use torch.where or masking instead of a branch on a tensor's value, or move the decision out of forward"
        if "branch" in reason.lower() or "data" in reason.lower()
        else "rewrite the line in plain tensor operations, or try capture='direct'"
    )
    return CaptureError(f"{where(error, module)}: cannot be captured in one graph: {reason}; {advice}")
