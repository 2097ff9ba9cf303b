"""Independent ways to run what capture and the passes return, and the eager step to compare with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.capture.call import Call
from autopart.collectives import is_collective
from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Ref, Share, Size, map_arg
from autopart.ir.mesh import pieces
from autopart.ir.segmented import Function, Segmented

Values = dict[str, torch.Tensor]

Collective = tuple[str, torch.Tensor, tuple[Any, ...]]
"""What places do together: its name, what this place has, its other arguments."""


def bind(module: torch.nn.Module, captured: Captured, call: Call) -> Values:
    """Every graph input of a call by value name (not those of the prologue); the loss's own gradient is 1."""
    held = {
        "parameter": dict(module.named_parameters(remove_duplicate=False)),
        "buffer": dict(module.named_buffers(remove_duplicate=False)),
        "constant": {constant.name: constant.tensor for constant in captured.constants},
        "input": dict(call.tensors),
    }
    bound = {i.value.name: held[i.kind][i.target].detach() for i in captured.inputs if i.kind in held}
    return bound | {i.value.name: torch.ones((), dtype=i.value.dtype) for i in captured.of_kind("tangent")}


def execute(nodes: Sequence[Node], values: Mapping[str, torch.Tensor], batch: int, whole: int) -> Values:
    """Run nodes on a microbatch of `batch` samples out of `whole`; returns the given values and all results.

    Asserts that every result has the shape and dtype that its node declares, and that no place waits for others.
    """
    try:
        name, _, _ = next(steps(nodes, values, batch, whole))
    except StopIteration as ended:
        found: Values = ended.value
        return found
    raise AssertionError(f"{name} is for all places of an axis: tests.places runs these")


def steps(
    nodes: Sequence[Node], values: Mapping[str, torch.Tensor], batch: int, whole: int
) -> Generator[Collective, torch.Tensor, Values]:
    """The same, step by step: yields every collective and goes on with what it is sent for it."""
    env = dict(values)

    def leaf(arg: Any) -> Any:
        match arg:
            case Ref(name):
                return env[name]
            case Size():
                return arg.at(whole if arg.whole else batch)
            case Share(factor):
                return factor * batch / whole
            case _:
                return arg

    for node in nodes:
        args = tuple(map_arg(arg, leaf) for arg in node.args)
        result: Any
        if is_collective(node.op):
            result = yield node.op.overloadpacket.__name__, args[0], args[1:]
        else:
            with torch.no_grad():
                result = node.op(*args, **{key: map_arg(arg, leaf) for key, arg in node.kwargs})
        for out, value in zip(node.outs, (result,) if node.single else result, strict=True):
            if out is not None:
                assert (tuple(value.shape), value.dtype) == (out.at(batch), out.dtype), (node.opname, out, value.shape)
                env[out.name] = value
    return env


def whole_step(module: torch.nn.Module, captured: Captured, call: Call) -> tuple[dict[int, torch.Tensor], Values]:
    """Outputs by index and summed gradients by target of the graph on the whole batch, run as an FX GraphModule."""
    values = bind(module, captured, call)
    given = [values[i.value.name] for i in captured.inputs if i.kind != "prologue"]
    with torch.no_grad():
        found = captured.at(call.batch)(*given)
    return _collect(captured, [dict(zip((o.name for o in captured.outputs), found, strict=True))])


def microbatched_step(
    module: torch.nn.Module, captured: Captured, call: Call, microbatches: int
) -> tuple[dict[int, torch.Tensor], Values]:
    """The same, a microbatch at a time: sums added, split outputs concatenated, the prologue on the whole batch."""
    values = bind(module, captured, call)
    once = execute(captured.prologue, values, call.batch, call.batch)
    steps = []
    for part in microbatch_values(captured, call, values, microbatches):
        inner = part | {i.value.name: once[i.value.name] for i in captured.of_kind("prologue")}
        size = next(iter(part_sizes(captured, inner)))
        steps.append(execute(captured.nodes, inner, size, call.batch))
    return _collect(captured, steps)


def microbatch_values(captured: Captured, call: Call, values: Values, microbatches: int) -> list[Values]:
    """The graph inputs of each microbatch: the batch dims cut, everything else whole."""
    dims = {item.value.name: dict(captured.batch_dims).get(item.target) for item in captured.of_kind("input")}
    sizes = list(pieces(call.batch, microbatches))
    cut = {name: values[name].split(sizes, dim) for name, dim in dims.items() if dim is not None}
    return [values | {name: parts[k].contiguous() for name, parts in cut.items()} for k in range(microbatches)]


def part_sizes(captured: Captured, values: Values) -> list[int]:
    """The number of samples that each split input has."""
    dims = dict(captured.batch_dims)
    items = [item for item in captured.of_kind("input") if item.target in dims]
    return [values[item.value.name].shape[dims[item.target]] for item in items]


def _collect(captured: Captured, steps: list[Values]) -> tuple[dict[int, torch.Tensor], Values]:
    outputs: dict[int, torch.Tensor] = {}
    grads: Values = {}
    for index, out in enumerate(captured.outputs):
        found = [step[out.name] for step in steps]
        if out.kind == "grad":
            grads[out.target] = sum(found, grads.get(out.target, torch.zeros((), dtype=found[0].dtype)))
        elif out.dim is not None:
            outputs[index] = torch.cat(found, out.dim)
        elif out.partial:
            outputs[index] = torch.stack(found).sum(0).to(found[0].dtype)
        else:
            outputs[index] = found[0]
            assert all(torch.equal(found[0], other) for other in found)
    return outputs, grads


def rebuilt(captured: Captured, call: Call, outputs: Mapping[int, torch.Tensor]) -> Any:
    """The user's return value from the outputs by index."""
    by_name = {captured.outputs[index].name: value for index, value in outputs.items()}
    by_name |= {item.value.name: dict(call.tensors)[item.target] for item in captured.of_kind("input")}
    leaves = [by_name[item] if isinstance(item, str) else item[1] for item in captured.result]
    return pytree.tree_unflatten(leaves, captured.tree)


def eager(
    module: torch.nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None = None,
    target: bool = False,
    *,
    grad: bool = True,
) -> tuple[Any, Values]:
    """The return value and the gradients by name of the module itself, run on its own; nothing is left in `.grad`."""
    args, kwargs = call.unflatten()
    with torch.set_grad_enabled(grad):
        value = module(*(args[:-1] if target else args), **kwargs)
        if loss_fn is not None:
            value = (loss_fn(value, args[-1]) if target else loss_fn(value)), value
    loss = _loss(value)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if loss is None or not loss.requires_grad:
        return value, {}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return value, {name: g for name, g in zip(named, grads, strict=True) if g is not None}


def _loss(value: Any) -> torch.Tensor | None:
    if isinstance(value, dict):
        value = value.get("loss")
    elif isinstance(value, tuple):
        value = value[0]
    return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None


def assert_same(
    captured: Captured,
    call: Call,
    found: tuple[dict[int, torch.Tensor], Values],
    expected: tuple[Any, Values],
    tolerance: float,
) -> None:
    """Compare outputs by index and gradients by target with an eager return value and its gradients.

    Tied parameters count as one. The measure is that of DESIGN 6.1: the norm of the difference against the norm of the
    reference, or a thousandth of the largest gradient's.
    """
    outputs, grads = found
    value, wanted = expected
    made = rebuilt(captured, call, outputs)
    assert type(made) is type(value)
    for one, two in zip(_leaves(made), _leaves(value), strict=True):
        if isinstance(two, torch.Tensor):
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
            assert distance(one, two.detach()) <= tolerance, (one, two)
        else:
            assert one == two and type(one) is type(two)
    tied = dict(captured.tied)
    total: Values = {}
    for name, grad in wanted.items():
        total[tied[name]] = total[tied[name]] + grad if tied[name] in total else grad
    assert grads.keys() == total.keys()
    largest = max((float(g.norm()) for g in total.values()), default=0.0)
    for name, grad in grads.items():
        assert distance(grad, total[name], 1e-3 * largest) <= tolerance, name


def distance(one: torch.Tensor, two: torch.Tensor, least: float = 0.0) -> float:
    """``||one - two|| / max(||two||, least)``, 0 for equal tensors."""
    one, two = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (one, two))
    difference = float((one - two).abs().norm())
    return difference / max(float(two.abs().norm()), least, 1e-300) if difference else 0.0


def _leaves(value: Any) -> list[Any]:
    """The leaves of a return value, caches and the like dropped, as capture leaves them out."""
    leaves = pytree.tree_flatten(value, is_leaf=lambda x: not isinstance(x, list | tuple | dict))[0]
    return [x for x in leaves if isinstance(x, torch.Tensor | bool | int | float | str)]


def segmentwise_step(
    module: torch.nn.Module, segmented: Segmented, call: Call, microbatches: int
) -> tuple[dict[int, torch.Tensor], Values]:
    """Every segment's forward in order, then every backward in reverse, by the bodies and their formals alone."""
    captured = segmented.captured
    values = bind(module, captured, call)
    once = execute(captured.prologue, values, call.batch, call.batch)
    fixed = {i.value.name for i in captured.of_kind("buffer", "constant", "prologue")}
    parameters = {item.target: values[item.value.name] for item in captured.of_kind("parameter")}
    steps, grads = [], {}
    for part in microbatch_values(captured, call, values, microbatches):
        size = part_sizes(captured, part)[0]
        held = {name: {**part, **once}[name] for name in fixed}
        flow = {item.value.name: part[item.value.name] for item in captured.of_kind("input", "tangent")}
        flow, found = _one_microbatch(segmented, flow, held, parameters, size, call.batch)
        steps.append(flow)
        for target, value in found:
            grads[target] = grads[target] + value if target in grads else value
    return _collect(replace(captured, outputs=tuple(o for o in captured.outputs if o.kind != "grad")), steps)[0], grads


def _one_microbatch(
    segmented: Segmented, flow: Values, held: Values, parameters: Values, size: int, whole: int
) -> tuple[Values, list[tuple[str, torch.Tensor]]]:
    """The values that flowed forward, and every (parameter, gradient) that a segment's backward returned."""
    saved = []
    for segment in segmented.segments:
        body = segmented.bodies[segment.body]
        given = [flow[n] for n in segment.values] + [held[n] for n in segment.forward_fixed]
        env = run_function(body.forward, [*given, *(parameters[t] for t in segment.forward_parameters)], size, whole)
        saved.append([env[name] for name in body.saved])
        flow.update(zip(segment.outputs, (env[name] for name in body.forward.outputs), strict=True))
    gradients = {i.value.name: flow[i.value.name] for i in segmented.captured.of_kind("tangent")}
    returned = []
    for segment, kept in zip(reversed(segmented.segments), reversed(saved), strict=True):
        backward = segmented.bodies[segment.body].backward
        if backward is None:
            continue
        given = [gradients[n] for n in segment.backward_inputs] + kept + [held[n] for n in segment.backward_fixed]
        env = run_function(backward, [*given, *(parameters[t] for t in segment.backward_parameters)], size, whole)
        made = [env[name] for name in backward.outputs]
        gradients.update(zip(segment.backward_outputs, made, strict=False))
        returned += zip(segment.gradients, made[len(segment.backward_outputs) :], strict=True)
    return flow, returned


def run_function(function: Function, given: Sequence[torch.Tensor], batch: int, whole: int) -> Values:
    """The environment after a function; asserts that its arguments are as declared."""
    return execute(function.nodes, formals(function, given, batch), batch, whole)


def formals(function: Function, given: Sequence[torch.Tensor], batch: int) -> Values:
    """The arguments of a function by name; asserts that they are as declared."""
    for formal, value in zip(function.inputs, given, strict=True):
        assert (tuple(value.shape), value.dtype) == (formal.at(batch), formal.dtype), (formal, value.shape)
    return {formal.name: value for formal, value in zip(function.inputs, given, strict=True)}
