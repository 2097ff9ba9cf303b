"""Two traces of one call, at two batch sizes, become one graph whose sizes are affine in the batch."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopart import _torch
from autopart.capture.call import Call
from autopart.capture.trace import Names, Trace, is_user_file
from autopart.errors import CaptureError
from autopart.ir.captured import Captured, Constant, dead_code_eliminated
from autopart.ir.graph import Arg, Dim, Input, Node, Output, Ref, Size, Value, rename

_ALIASES = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default")
"""Ops that hand their input on: without autograd and without in-place ops they are the value itself."""


def convert(small: Trace, large: Trace, call: Call, names: Names) -> Captured:
    """The one graph behind two traces. Raises CaptureError where the traces differ in more than sizes affine in the batch."""
    merge = _Merge(small, large)
    if small.outputs != large.outputs or small.result != large.result:
        raise CaptureError("the module returns another structure at another batch size; what it returns must not depend on it")
    inputs = merge.inputs()
    nodes = merge.nodes()
    outputs = merge.outputs()
    by_index = {out.target: out.name for out in outputs if out.kind in ("loss", "output", "unused")}
    by_path = {item.target: item.value.name for item in inputs if item.kind == "input"}
    result: list[str | tuple[str, Any]] = []
    for kind, what in small.result:
        if kind == "literal":
            result.append(("literal", what))
        else:
            result.append(by_index[str(what)] if kind == "output" else by_path[what])
    used = {name for name in result if isinstance(name, str)}
    kept = tuple(out for out in outputs if out.kind not in ("output", "unused") or out.name in used)
    captured = Captured(
        inputs=inputs,
        nodes=nodes,
        outputs=kept,
        training=small.training,
        batch=call.batch,
        batch_dims=tuple((p, d) for p, d in zip(call.paths, call.dims, strict=True) if d is not None),
        tree=small.tree,
        result=tuple(result),
        tied=names.tied,
        constants=merge.constants(),
    )
    return _renamed(dead_code_eliminated(captured), call)


def _renamed(captured: Captured, call: Call) -> Captured:
    """Inputs and outputs under names that a person would give: a parameter's path, the argument's name, ``loss``."""
    taken: set[str] = {name for node in captured.nodes for name in node.names()}
    names: dict[str, str] = {}
    labels = dict(zip(call.paths, call.labels, strict=True))
    for item in captured.inputs:
        wish = re.sub(r"\W+", "_", labels.get(item.target, "tangent" if item.kind == "tangent" else item.target))
        wish = wish.strip("_") if not wish.strip("_")[:1].isdigit() else f"p{wish}"
        while wish in taken:
            wish += "_"
        taken.add(wish)
        names[item.value.name] = wish
    for out in captured.outputs:
        if out.kind in ("loss", "output") and out.name not in names:
            wish = "loss" if out.kind == "loss" else f"output_{out.target}"
            names[out.name] = wish if wish not in taken else f"{wish}_"
    inputs = tuple(
        replace(item, value=replace(item.value, name=names[item.value.name])) for item in captured.inputs
    )
    nodes = tuple(
        replace(
            node,
            args=rename(node.args, names),
            kwargs=tuple((key, rename(arg, names)) for key, arg in node.kwargs),
            outs=tuple(o if o is None else replace(o, name=names.get(o.name, o.name)) for o in node.outs),
        )
        for node in captured.nodes
    )
    outputs = tuple(replace(out, name=names.get(out.name, out.name)) for out in captured.outputs)
    result = tuple(names.get(item, item) if isinstance(item, str) else item for item in captured.result)
    return replace(captured, inputs=inputs, nodes=nodes, outputs=outputs, result=result)


class _Merge:
    """Walks two graphs in step. `alias` maps an FX node's name to the value that stands for it."""

    def __init__(self, small: Trace, large: Trace) -> None:
        self.small, self.large = small, large
        self.alias: dict[str, Arg] = {}
        self.held: list[Constant] = []
        self.pairs = self._pairs()
        self.primals = [n for n, _ in self.pairs if n.op == "placeholder" and not n.name.startswith("tangents")]
        self.targets = dict(zip((n.name for n in self.primals), small.inputs, strict=True))

    def _pairs(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        one, two = list(self.small.graph.graph.nodes), list(self.large.graph.graph.nodes)
        for a, b in zip(one, two, strict=False):
            if a.op != b.op or (a.op == "call_function" and a.target != b.target):
                raise CaptureError(
                    f"{source(a) or a.name}: the module does another computation at another batch size ({a.target} at batch "
                    f"{self.small.batch}, {b.target} at {self.large.batch}); if an input's batch is not dim 0, say so with batch="
                )
        if len(one) != len(two):
            raise CaptureError(
                f"the module does {len(one)} operations at batch {self.small.batch} but {len(two)} at {self.large.batch}; "
                "a loop over the batch cannot be split, and an input whose batch is not dim 0 needs batch="
            )
        return list(zip(one, two, strict=True))

    def inputs(self) -> tuple[Input, ...]:
        made: list[Input] = []
        tangents = 0
        for a, b in self.pairs:
            if a.op == "placeholder":
                value = self.value(a.name, a.meta["val"], b.meta["val"], a)
                if a.name in self.targets:
                    kind, target, tensor = self.targets[a.name]
                    first = next((m for m in made if (m.kind, m.target) == (kind, target)), None)
                    if first is not None:  # a tied parameter arrives once a name; its gradients are summed as partials
                        self.alias[a.name] = Ref(first.value.name)
                        continue
                    made.append(Input(value, kind, target, kind == "parameter" and tensor.requires_grad))
                    if kind == "constant":
                        self.held.append(Constant(target, tensor))
                else:
                    made.append(Input(value, "tangent", str(tangents)))
                    tangents += 1
            elif a.op == "get_attr":
                tensor = getattr(self.small.graph, str(a.target))
                made.append(Input(self.value(a.name, tensor, tensor, a), "constant", a.name))
                self.held.append(Constant(a.name, tensor))
        return tuple(made)

    def constants(self) -> tuple[Constant, ...]:
        return tuple(self.held)

    def nodes(self) -> tuple[Node, ...]:
        getitems: dict[str, dict[int, torch.fx.Node]] = {}
        for a, _ in self.pairs:
            if a.target is operator.getitem:
                getitems.setdefault(a.args[0].name, {})[a.args[1]] = a  # type: ignore[union-attr, index]
        backward: set[str] = {n.name for n, _ in self.pairs if n.name.startswith("tangents")}
        twins = dict(self.pairs)
        made = []
        for a, b in self.pairs:
            if a.op != "call_function" or a.target is operator.getitem:
                if a.target is operator.getitem and a.args[0].name in backward:  # type: ignore[union-attr]
                    backward.add(a.name)
                continue
            if a.meta.get("partitioner_tag") == "is_backward" or any(i.name in backward for i in a.all_input_nodes):
                backward.add(a.name)
            opname = str(a.target)
            if opname in _ALIASES:
                self.alias[a.name] = self.argument(a.args[0], b.args[0], a)
            elif opname != "aten._assert_tensor_metadata.default":
                made.append(self.node(a, b, getitems.get(a.name, {}), twins, a.name in backward))
        return tuple(made)

    def node(
        self,
        a: torch.fx.Node,
        b: torch.fx.Node,
        items: Mapping[int, torch.fx.Node],
        twins: Mapping[torch.fx.Node, torch.fx.Node],
        backward: bool,
    ) -> Node:
        single = isinstance(a.meta["val"], torch.Tensor)
        outs: tuple[Value | None, ...]
        if single:
            outs = (self.value(a.name, a.meta["val"], b.meta["val"], a),)
        else:
            found = (items.get(i) for i in range(len(a.meta["val"])))
            outs = tuple(
                self.value(n.name, n.meta["val"], twins[n].meta["val"], n) if n is not None else None for n in found
            )
        kwargs = tuple((key, self.argument(a.kwargs[key], b.kwargs[key], a)) for key in a.kwargs)
        return Node(
            op=a.target,  # type: ignore[arg-type]
            args=tuple(self.argument(x, y, a) for x, y in zip(a.args, b.args, strict=True)),
            kwargs=kwargs,
            outs=outs,
            single=single,
            backward=backward,
            module=module_path(a),
            source=source(a),
            sequence=int(a.meta.get("seq_nr", -1)),
        )

    def outputs(self) -> tuple[Output, ...]:
        node = self.small.graph.graph.output_node()
        flat = list(node.args[0])  # type: ignore[arg-type]
        descriptors = list(node.meta["desc"])
        made: list[Output] = []
        position = 0
        for item, desc in zip(flat, descriptors, strict=True):
            kind = type(desc).__name__
            if kind == "PlainAOTOutput":
                what, target = self.small.outputs[position]
                made.append(Output(self.name(item), what, target))
                position += 1
            elif kind == "GradAOTOutput" and item is not None:
                primal = self.primal(desc.grad_of)
                if self.targets[primal][0] == "parameter":
                    made.append(Output(self.name(item), "grad", self.targets[primal][1]))
            elif kind == "InputMutationAOTOutput":
                primal = self.primal(desc.mutated_input)
                made.append(Output(self.name(item), "mutation", self.targets[primal][1]))
        return tuple(made)

    def primal(self, descriptor: Any) -> str:
        return next(n.name for n in self.primals if n.meta["desc"] == descriptor)

    def name(self, node: torch.fx.Node) -> str:
        found = self.argument(node, node, node)
        assert isinstance(found, Ref)
        return found.name

    def value(self, name: str, one: torch.Tensor, two: torch.Tensor, at: torch.fx.Node) -> Value:
        shape = tuple(self.dim(int(x), int(y), at) for x, y in zip(one.shape, two.shape, strict=True))
        return Value(name, shape, one.dtype)

    def dim(self, one: int, two: int, at: torch.fx.Node) -> Dim:
        if one == two:
            return one
        step, rest = divmod(two - one, self.large.batch - self.small.batch)
        size = Size(step, one - step * self.small.batch)
        # A quadratic size has a large negative constant: two sizes fit any line, so keep to lines that go near the origin.
        if rest or abs(size.constant) >= max(self.small.batch, 2):
            raise CaptureError(
                f"{source(at) or at.name}: the size {one} at batch {self.small.batch} becomes {two} at batch "
                f"{self.large.batch}, which is no multiple of the batch; name inputs whose batch is not dim 0 with batch="
            )
        return size

    def argument(self, one: Any, two: Any, at: torch.fx.Node) -> Arg:
        match one:
            case torch.fx.Node():
                return self.alias.get(one.name, Ref(one.name))
            case list() | tuple():
                return tuple(self.argument(x, y, at) for x, y in zip(one, two, strict=True))
            case bool() | None | str():
                pass
            case int() if one != two:
                return self.dim(one, two, at)
            case float() if one != two:
                return self.number(one, two, at)
        if one != two and not (isinstance(one, float) and one != one and two != two):
            raise CaptureError(
                f"{source(at) or at.name}: the constant {one!r} at batch {self.small.batch} becomes {two!r} at "
                f"{self.large.batch}; what is computed must not depend on the batch size"
            )
        return one

    def number(self, one: float, two: float, at: torch.fx.Node) -> Size:
        for size in (Size(one * self.small.batch, inverse=True, whole=True), Size(one / self.small.batch, whole=True)):
            if abs(size.at(self.large.batch) - two) <= 1e-12 * abs(two):
                return size
        raise CaptureError(
            f"{source(at) or at.name}: the number {one} at batch {self.small.batch} becomes {two} at {self.large.batch}, "
            "neither proportional nor inversely proportional to the batch"
        )


def module_path(node: torch.fx.Node) -> str:
    """The dotted path of the user's module that made a node, forward or backward; "" at the root or when unknown."""
    custom = node.meta.get("custom") or {}
    if "module" in custom:
        return str(custom["module"])
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return path.removeprefix("L['module']").removeprefix(".")


def source(node: torch.fx.Node) -> str:
    """``file.py:12  code`` of the user's innermost frame, "" when unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    user = [frame for frame in frames if is_user_file(frame[0])]
    if not user:
        return ""
    file, line, code = user[-1]
    return f"{os.path.basename(file)}:{line}  {code.strip()}"
