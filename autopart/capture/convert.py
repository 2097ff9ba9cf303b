"""Two traces of one call, at two batch sizes, become one graph whose sizes are affine in the batch."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from autopart.capture.annotate import is_user_file
from autopart.capture.call import Call
from autopart.capture.strides import reshapes
from autopart.capture.trace import Names, Trace, identity
from autopart.errors import CaptureError
from autopart.ir.captured import Captured, Constant, dead_code_eliminated
from autopart.ir.graph import Arg, Dim, Input, Node, Output, Ref, Size, Value
from autopart.ir.names import fresh, identifier

_ALIASES = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default")
"""Ops that hand their input on: without autograd and without in-place ops they are the value itself."""


def convert(small: Trace, large: Trace, call: Call, names: Names) -> Captured:
    """The one graph behind two traces. Raises CaptureError where the traces differ in more than sizes affine in the
    batch.

    Inputs come in the module's and the call's order, whether the graph reads them or not, so that the two capture
    routes agree: parameters, buffers, the call's tensors, constants, tangents.
    """
    if small.outputs != large.outputs or small.result != large.result:
        raise CaptureError(
            "the module returns another structure at another batch size; what it returns must not depend on it"
        )
    merge = _Merge(small, large, call, names)
    nodes = merge.nodes()
    captured = Captured(
        inputs=merge.inputs(),
        nodes=nodes,
        outputs=merge.outputs(),
        training=small.training,
        batch=call.batch,
        call=call.text,
        batch_dims=tuple((p, d) for p, d in zip(call.paths, call.dims, strict=True) if d is not None),
        tree=small.tree,
        result=merge.result(),
        tied=names.tied,
        modules=tuple(names.modules.items()),
        constants=tuple(merge.constants),
    )
    if captured.training and not any(out.kind in ("grad", "input_grad") for out in captured.outputs):
        what = "an output" if captured.deferred else "the loss"
        raise CaptureError(f"{what} requires grad, but no parameter gets a gradient from it, nor does an input")
    return dead_code_eliminated(captured)


class _Merge:
    """Walks two graphs in step.

    `alias` maps an FX node's name to the value that stands for it, `named` to its new name.
    """

    def __init__(self, small: Trace, large: Trace, call: Call, names: Names) -> None:
        self.small, self.large, self.call, self.owned = small, large, call, names
        self.deferred = small.training and "loss" not in small.outputs
        self.pairs = self._pairs()
        self.alias: dict[str, Arg] = {}
        self.constants: list[Constant] = []
        self.tangents: list[Input] = []
        self.taken = {node.name for node, _ in self.pairs}
        self.output = small.graph.graph.output_node()
        self.position = _positions(small.result)
        self.named = self._output_names()
        self.held: dict[tuple[str, str], Input] = {}
        self.primals: dict[Any, tuple[str, str]] = {}  # by descriptor
        self.regions: dict[Any, int] = {}  # by torch's number of the checkpoint call
        self.region_of: dict[int, int] = {}  # by autograd's sequence number
        self._bind_inputs()

    def _pairs(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        one, two = list(self.small.graph.graph.nodes), list(self.large.graph.graph.nodes)
        for a, b in zip(one, two, strict=False):
            if a.op != b.op or (a.op == "call_function" and a.target != b.target):
                raise CaptureError(
                    f"{_at(a)}: the module does another computation at another batch size ({a.target} at batch "
                    f"{self.small.batch}, {b.target} at {self.large.batch}); if an input's batch is not dim 0, say so "
                    f"with batch={{name: dim or None}}. Inputs: {self.call.describe()}"
                )
        if len(one) != len(two):
            raise CaptureError(
                f"the module does {len(one)} operations at batch {self.small.batch} but {len(two)} at "
                f"{self.large.batch}; "
                "a loop over the batch cannot be split, and an input whose batch is not dim 0 needs "
                f"batch={{name: dim or None}}. Inputs: {self.call.describe()}"
            )
        return list(zip(one, two, strict=True))

    # Inputs

    def _bind_inputs(self) -> None:
        """An Input for everything that the graph may read, and an alias to it for every placeholder."""
        for name, parameter in self.owned.tensors.items():
            self._hold("parameter", name, name, tuple(parameter.shape), parameter)
        for path, dim, label in zip(self.call.paths, self.call.dims, self.call.labels, strict=True):
            tensor = dict(self.call.tensors).get(path)
            if tensor is not None:
                shape = tuple(Size(1) if i == dim else int(size) for i, size in enumerate(tensor.shape))
                self._hold("input", path, label, shape, tensor)
        given = iter(self.small.inputs)
        for node, twin in self.pairs:
            if node.op == "get_attr":
                _refuse_generator(node, getattr(self.small.graph, str(node.target)))
                self._constant(node, getattr(self.small.graph, str(node.target)))
            elif node.op == "placeholder" and node.name.startswith("tangents"):
                self.tangents.append(self._tangent(node, twin))
                self.alias[node.name] = Ref(self.tangents[-1].value.name)
            elif node.op == "placeholder":
                kind, target, tensor = next(given, ("", "", None))
                if tensor is None:
                    raise CaptureError(
                        f"the graph reads {node.name}, which is neither a parameter, a buffer nor an input; "
                        "make it one of them, or try capture='direct'"
                    )
                self.primals[node.meta["desc"]] = (kind, target)
                if kind == "constant":
                    self._constant(node, tensor)
                    continue
                if (kind, target) not in self.held:
                    self._hold(kind, target, target, tuple(tensor.shape), tensor)
                self.alias[node.name] = Ref(self.held[kind, target].value.name)

    def _tangent(self, node: torch.fx.Node, twin: torch.fx.Node) -> Input:
        """The gradient of the loss, of an output by its place in the flat result, or of a tensor changed in place."""
        index = getattr(node.meta["desc"].output, "idx", None)
        if index is None:
            target = "mutation"
        else:
            target = "loss" if self.small.outputs[index] == "loss" else str(self.position[index])
        name = self._fresh(f"d_output_{target}" if target.isdigit() else "tangent")
        return Input(replace(self.value(node, twin), name=name), "tangent", target)

    def _hold(self, kind: str, target: str, label: str, shape: tuple[Dim, ...], tensor: torch.Tensor) -> None:
        value = Value(self._fresh(label), shape, tensor.dtype)
        self.held[kind, target] = Input(value, kind, target, kind == "parameter" and tensor.requires_grad)

    def _constant(self, node: torch.fx.Node, tensor: torch.Tensor) -> None:
        """One constant a tensor, however many names the trace has for it."""
        same = (c.name for c in self.constants if identity(c.tensor) == identity(tensor))
        name = next(same, f"constant{len(self.constants)}")
        if ("constant", name) not in self.held:
            self.constants.append(Constant(name, tensor))
            self._hold("constant", name, name, tuple(tensor.shape), tensor)
        self.alias[node.name] = Ref(self.held["constant", name].value.name)

    def inputs(self) -> tuple[Input, ...]:
        buffers = {name: i for i, name in enumerate(self.owned.buffers.values())}
        kinds = ("parameter", "buffer", "input", "constant")
        held = sorted(self.held.values(), key=lambda i: (kinds.index(i.kind), buffers.get(i.target, 0)))
        return (*held, *self.tangents)

    def _fresh(self, wish: str) -> str:
        """A name that a person would give, not yet taken: a parameter's path, the argument's name."""
        name = fresh(identifier(wish), self.taken)
        self.taken.add(name)
        return name

    # Nodes

    def nodes(self) -> tuple[Node, ...]:
        items: dict[str, dict[int, torch.fx.Node]] = {}
        for a, _ in self.pairs:
            if a.target is operator.getitem:
                items.setdefault(a.args[0].name, {})[a.args[1]] = a  # type: ignore[union-attr, index, arg-type]
        twins = dict(self.pairs)
        copying = reshapes(a for a, _ in self.pairs if a.op != "output")
        made, backward = [], False
        for a, b in self.pairs:
            if a.op != "call_function" or a.target is operator.getitem:
                continue
            # The joint trace runs the whole forward first: what comes after the first use of a tangent is backward.
            backward = backward or a.meta.get("partitioner_tag") == "is_backward"
            backward = backward or any(i.name.startswith("tangents") for i in a.all_input_nodes)
            opname = str(a.target)
            if opname in _ALIASES:
                self.alias[a.name] = self.argument(a.args[0], b.args[0], a)
            elif not opname.startswith("aten._assert"):
                node = self.node(a, b, items.get(a.name, {}), twins, backward)
                made.append(replace(node, op=torch.ops.aten.reshape.default) if a.name in copying else node)
        return tuple(made)

    def node(
        self,
        a: torch.fx.Node,
        b: torch.fx.Node,
        items: Mapping[int, torch.fx.Node],
        twins: Mapping[torch.fx.Node, torch.fx.Node],
        backward: bool,
    ) -> Node:
        result = a.meta.get("val")
        outs: tuple[Value | None, ...]
        if isinstance(result, torch.Tensor):
            outs = (self.value(a, b),)
        elif isinstance(result, list | tuple):
            found = (items.get(i) for i in range(len(result)))
            outs = tuple(self.value(n, twins[n]) if n is not None else None for n in found)
        else:
            raise CaptureError(
                f"{_at(a)}: {a.target} has an effect other than its result, which a program of parts cannot keep"
            )
        return Node(
            op=a.target,  # type: ignore[arg-type]
            args=tuple(self.argument(x, y, a) for x, y in zip(a.args, b.args, strict=True)),
            kwargs=tuple((key, self.argument(a.kwargs[key], b.kwargs[key], a)) for key in a.kwargs),
            outs=outs,
            single=isinstance(result, torch.Tensor),
            backward=backward,
            module=module_path(a),
            source=source(a),
            sequence=int(a.meta.get("seq_nr", -1)),
            region=self.region(a, backward),
        )

    def region(self, node: torch.fx.Node, backward: bool) -> int:
        """The user's checkpoint call, numbered from 0; the first node of a sequence number is the one autograd saw."""
        sequence = int(node.meta.get("seq_nr", -1))
        if backward:
            return self.region_of.get(sequence, -1)
        found = -1
        if node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
            found = self.regions.setdefault(node.meta.get("ac_graph_id"), len(self.regions))
        self.region_of.setdefault(sequence, found)
        return found

    def value(self, a: torch.fx.Node, b: torch.fx.Node) -> Value:
        one, two = a.meta["val"], b.meta["val"]
        shape = tuple(self.dim(int(x), int(y), a) for x, y in zip(one.shape, two.shape, strict=True))
        return Value(self.named.get(a.name, a.name), shape, one.dtype)

    def dim(self, one: int, two: int, at: torch.fx.Node) -> Dim:
        if one == two:
            return one
        step, rest = divmod(two - one, self.large.batch - self.small.batch)
        size = Size(step, one - step * self.small.batch)
        # A quadratic size has a large negative constant: two sizes fit any line, so keep to lines that go near the
        # origin.
        if rest or abs(size.constant) >= max(self.small.batch, 2):
            raise CaptureError(
                f"{_at(at)}: the size {one} at batch {self.small.batch} becomes {two} at batch {self.large.batch}, "
                "which is no multiple of the batch; name inputs whose batch is not dim 0 with "
                f"batch={{name: dim or None}}. Inputs: {self.call.describe()}"
            )
        return size

    def argument(self, one: Any, two: Any, at: torch.fx.Node) -> Arg:
        match one:
            case torch.fx.Node():
                return self.alias.get(one.name, Ref(self.named.get(one.name, one.name)))
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
                f"{_at(at)}: the constant {one!r} at batch {self.small.batch} becomes {two!r} at "
                f"{self.large.batch}; what is computed must not depend on the batch size"
            )
        return one

    def number(self, one: float, two: float, at: torch.fx.Node) -> Size:
        for size in (Size(one * self.small.batch, inverse=True, whole=True), Size(one / self.small.batch, whole=True)):
            if abs(size.at(self.large.batch) - two) <= 1e-12 * abs(two):
                return size
        raise CaptureError(
            f"{_at(at)}: the number {one} at batch {self.small.batch} becomes {two} at {self.large.batch}, "
            "neither proportional nor inversely proportional to the batch"
        )

    # Outputs

    def _output_names(self) -> dict[str, str]:
        """Names for the nodes that make outputs: ``loss``, ``output_2`` (the place in the flat result)."""
        names: dict[str, str] = {}
        for index, item in enumerate(self._plain_outputs()):
            item = self._behind(item)
            if index in self.position and item.op == "call_function" and item.name not in names:
                loss = self.small.outputs[index] == "loss"
                names[item.name] = self._fresh("loss" if loss else f"output_{self.position[index]}")
        return names

    def _behind(self, item: Any) -> Any:
        """The node that makes an output: copies at the end are of no use in a graph without in-place ops."""
        while str(item.target) in _ALIASES or (
            self.deferred and str(item.target) == "aten.clone.default" and item.args[0].op == "call_function"
        ):
            item = item.args[0]
        return item

    def _plain_outputs(self) -> list[Any]:
        return [item for item, kind, _ in self._described_outputs() if kind == "PlainAOTOutput"]

    def _described_outputs(self) -> Iterable[tuple[Any, str, Any]]:
        for item, desc in zip(self.output.args[0], self.output.meta["desc"], strict=True):  # type: ignore[arg-type]
            yield item, type(desc).__name__, desc

    def outputs(self) -> tuple[Output, ...]:
        """The outputs in the order of the flat result, then gradients (of parameters, of inputs), then mutations."""
        plain = self._plain_outputs()
        made = [
            Output(self.name(self._behind(plain[index])), self.small.outputs[index], str(place))
            for index, place in self.position.items()
        ]
        grads, mutations = [], []
        kinds = {"parameter": "grad", "input": "input_grad"}
        for item, kind, desc in self._described_outputs():
            if kind == "GradAOTOutput" and item is not None and self.primals[desc.grad_of][0] in kinds:
                of, target = self.primals[desc.grad_of]
                if item.meta["val"].layout is not torch.strided:
                    raise CaptureError(
                        f"{_at(item)}: the gradient of {of} {target} is sparse, which cannot be reduced over "
                        "ranks; pass sparse=False to its embedding, and use an optimizer for dense gradients"
                    )
                grads.append(Output(self.name(item), kinds[of], target))
            elif kind == "InputMutationAOTOutput":
                mutations.append(Output(self.name(item), "mutation", self.primals[desc.mutated_input][1]))
        order = {name: i for i, name in enumerate((*self.owned.tensors, *self.call.paths))}
        grads.sort(key=lambda out: order[out.target])
        return (*made, *grads, *sorted(mutations, key=lambda out: out.target))

    def result(self) -> tuple[str | tuple[str, Any], ...]:
        plain = self._plain_outputs()
        made: list[str | tuple[str, Any]] = []
        for kind, what in self.small.result:
            if kind == "output":
                made.append(self.name(self._behind(plain[what])))
            else:
                made.append(("literal", what) if kind == "literal" else self.held["input", what].value.name)
        return tuple(made)

    def name(self, node: torch.fx.Node) -> str:
        found = self.argument(node, node, node)
        assert isinstance(found, Ref)
        return found.name


def _positions(result: tuple[tuple[str, Any], ...]) -> dict[int, int]:
    """Where in the flat result each output comes first."""
    places: dict[int, int] = {}
    for place, (kind, what) in enumerate(result):
        if kind == "output":
            places.setdefault(what, place)
    return places


def module_path(node: torch.fx.Node) -> str:
    """The dotted path of the user's module that made a node, forward or backward; "" at the root or when unknown."""
    custom = node.meta.get("custom") or {}
    if "module" in custom:
        return str(custom["module"])
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path: str = list(stack.values())[-1][0]
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


def _refuse_generator(node: torch.fx.Node, held: object) -> None:
    if isinstance(held, torch.Generator):
        raise CaptureError(
            f"{_at(next(iter(node.users), node))}: draws random numbers from a generator of its own, whose place no "
            "other rank knows; leave generator= out"
        )


def _at(node: torch.fx.Node) -> str:
    return source(node) or module_path(node) or node.name
