"""boundary: Captured -> Captured. What a step hands out beside its loss: outputs on every rank, gradients of inputs.

The gradient of an input is made to be a value of its own, by a node of the backward.

before: d_x is the gradient of an output itself (y = x + bias), or also a parameter's gradient
after:  d_x = clone(...), made by the layer that first reads x
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Ref, Value
from autopart.ir.names import fresh


def with_everywhere(captured: Captured, outputs: str | None) -> Captured:
    """Say which outputs every rank gets: gradients of inputs always; the others unless the program trains on a loss, or
    with `outputs` = "all" then, too."""
    every = outputs == "all" or not captured.training or captured.deferred
    made = [
        replace(out, everywhere=out.kind == "input_grad" or (every and out.kind in ("loss", "output")))
        for out in captured.outputs
    ]
    return replace(captured, outputs=tuple(made))


def with_own_input_gradients(captured: Captured) -> Captured:
    """Name the gradient of an input after it; copy one that no node of the backward makes, or that is needed twice."""
    if all(out.kind != "input_grad" for out in captured.outputs):
        return captured
    made = {name for node in captured.nodes if node.backward for name in node.names()}
    uses = Counter(out.name for out in captured.outputs)
    values = {value.name: value for value in captured.values()}
    inputs = {item.target: item.value.name for item in captured.of_kind("input")}
    nodes, outputs, names = list(captured.nodes), [], dict[str, str]()
    for out in captured.outputs:
        if out.kind == "input_grad":
            name = fresh(f"d_{inputs[out.target]}", values)
            if out.name not in made or uses[out.name] > 1:
                reader = next(node for node in captured.nodes if inputs[out.target] in node.refs())
                nodes.append(_copied(values[out.name], name, reader))
            else:
                names[out.name] = name
            out = replace(out, name=name)
        outputs.append(out)
    return replace(captured, nodes=tuple(node.renamed(names) for node in nodes), outputs=tuple(outputs))


def _copied(value: Value, name: str, reader: Node) -> Node:
    """A copy in the backward of the layer that reads the input."""
    op, outs = torch.ops.aten.clone.default, (replace(value, name=name),)
    return replace(reader, op=op, args=(Ref(value.name),), kwargs=(), outs=outs, single=True, backward=True)


def check_detached(captured: Captured) -> None:
    """Raise CaptureError where a value is returned twice, with and without its gradient: the program has it once."""
    if not captured.deferred:
        return
    with_gradient = {item.target for item in captured.of_kind("tangent")}
    returned = [out for out in captured.outputs if out.kind == "output"]
    for out in returned:
        twins = [other.target for other in returned if other.name == out.name]
        if len({target in with_gradient for target in twins}) > 1:
            raise CaptureError(
                f"forward returns the same values with and without their gradient (items {' and '.join(twins)} of the "
                "flat result); return them once, and detach them outside"
            )
