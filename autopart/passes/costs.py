"""costs: Segmented -> a SegmentCost a segment. What each computes, reads, writes and keeps, in the microbatch size.

FLOPs are those of `rules.flops`. Bytes are those of every tensor that an operator reads or writes, views left out: an
upper bound that fused kernels stay below. Those of operators that do not contract, which are next to nothing but bytes,
are told apart: a device does not move them while it multiplies matrices. Repeated segments share their expressions, so
the time goes with the number of distinct bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from math import lcm
from operator import mul
from typing import Any

from autopart.codegen.chunks import in_chunks, on_their_own
from autopart.codegen.exchange import exchanges
from autopart.ir.captured import Captured
from autopart.ir.cost import SegmentCost, Tied, batch_symbol
from autopart.ir.graph import Node, Size, Value
from autopart.ir.segmented import Body, Function, Halves, Segment, Segmented, defined
from autopart.passes.split_backward import halves
from autopart.rules.alias import roots, viewed
from autopart.rules.flops import GATHERS, contracts, count, flops

Expression = Any
"""A sympy expression in `batch_symbol()`."""


Exchanged = Callable[[str, str, int], int]
"""The picoseconds of a collective inside a segment, by its axis, its kind and its payload in bytes."""


def costs(segmented: Segmented, exchanged: Exchanged | None = None) -> tuple[SegmentCost, ...]:
    """The cost of every segment, in order; `exchanged` is asked where places exchange values inside segments.

    `saved_bytes` counts every storage that the segment keeps for its backward once, however many views of it are kept,
    and so does the next segment if it keeps the same; the caller's batch, parameters and buffers are not counted.
    `boundary_bytes` are the values that come from other segments, the caller's inputs left out. The halves of a whole
    backward are as if all gradients that it hands on left the stage; what W runs again of I (views, pointwise
    operators) is not counted. Nor are parameters that the graph does not have: the parts of an output layer's.
    """
    parameters, pieces = {item.target: item for item in segmented.captured.of_kind("parameter")}, segmented.pieces()
    users = Counter(target for segment in segmented.segments for target in segment.parameters)
    copied, samples = copied_inputs(segmented.captured), segmented.captured.batch * _parts(segmented)
    shared: dict[object, SegmentCost] = {}

    def size(target: str) -> int:
        value = parameters[target].value
        return (replace(value, shape=pieces[target][-1].local) if target in pieces else value).nbytes(1)

    def cost(segment: Segment) -> SegmentCost:
        origins = tuple(copied.get(name) for name in segment.values)
        mine = [target for target in segment.parameters if target in parameters]
        trained = tuple([parameters[target].requires_grad for target in mine])
        key = segment.body, origins, trained  # the parameters of a body are of the same sizes in every segment
        if key not in shared:
            sizes = list(map(size, mine))
            made = _without_parameters(segmented.bodies[segment.body], segment, origins, samples, exchanged)
            shared[key] = replace(made, parameter_bytes=sum(sizes), trainable_bytes=sum(map(mul, sizes, trained)))
        several = [target for target in mine if users[target] > 1]
        tied = tuple(Tied(target, size(target), parameters[target].requires_grad) for target in several)
        return replace(shared[key], name=segment.name, tied=tied)

    return tuple(map(cost, segmented.segments))


def copied_inputs(captured: Captured) -> dict[str, bool]:
    """For each of the caller's inputs and gradients of outputs, by value name: whether a microbatch's slice is a copy.

    A slice along the outermost dim is a view of the caller's (contiguous) tensor; one along another dim is copied.
    """
    shapes = {item.value.name: item.value.shape for item in captured.of_kind("input", "tangent")}
    dims = {name: next((i for i, size in enumerate(s) if isinstance(size, Size)), 0) for name, s in shapes.items()}
    return {name: any(size != 1 for size in shape[: dims[name]]) for name, shape in shapes.items()}


def _without_parameters(
    body: Body, segment: Segment, origins: tuple[bool | None, ...], samples: int, exchanged: Exchanged | None
) -> SegmentCost:
    """The cost of a segment but for its parameters: what it shares with others of this body.

    `origins` has what `copied_inputs` says of every value that comes in; stashes are the smallest at `samples`.
    """
    backward = body.backward or Function((), (), ())
    cut = halves(body, segment, samples=samples)
    inputs = (cut and cut.input) or Function((), (), ())
    incoming = body.forward.inputs[: len(origins)]
    held = {value.name for value in body.forward.inputs[len(origins) :]}  # buffers and parameters
    held |= {value.name for value, copied in zip(incoming, origins, strict=True) if copied is False}
    values, root = defined(body.forward), roots(on_their_own(body.forward))
    kept = dict.fromkeys(root.get(name, name) for name in body.saved)
    return SegmentCost(
        name=segment.name,
        parameter_bytes=0,
        trainable_bytes=0,
        forward_flops=_flops(body.forward),
        backward_flops=_flops(backward),
        forward_bytes=_moved(body.forward),
        backward_bytes=_moved(backward),
        saved_bytes=_total(_bytes(values[name]) for name in kept if name not in held),
        boundary_bytes=_total(_bytes(v) for v, copied in zip(incoming, origins, strict=True) if copied is None),
        recomputed_bytes=_total(_bytes(value) for value in recomputed(body)),
        input_flops=_flops(inputs),
        input_bytes=_moved(inputs),
        stash_bytes=_stash(body, cut, held),
        forward_exchange=_exchange(body.forward, samples, exchanged),
        backward_exchange=_exchange(backward, samples, exchanged),
        input_exchange=_exchange(inputs, samples, exchanged),
        forward_swept=_moved(body.forward, swept=True),
        backward_swept=_moved(backward, swept=True),
        input_swept=_moved(inputs, swept=True),
    )


def _exchange(function: Function, samples: int, exchanged: Exchanged | None) -> Expression:
    """The picoseconds of the collectives of a function: a polynomial in the batch, found from as many batches.

    It is of degree one, but where the samples of a batch meet each other.
    """
    import sympy

    if exchanged is None:
        return 0
    sizes = [sum(isinstance(n, Size) for n in out.shape) for node in function.nodes for out in node.outs if out]
    step = samples * lcm(*(loop.count for loop in function.loops))  # of which there are as many chunks as can be
    at = [step * (i + 1) for i in range(max([1, *sizes]) + 1)]
    taken = [sum(exchanged(e.axis, e.counted, e.payload) for e in exchanges(function, n)) for n in at]
    return sympy.interpolate(list(zip(at, taken, strict=True)), batch_symbol())


def _parts(segmented: Segmented) -> int:
    """How many parts the samples of a microbatch are in at a place of an axis, 1 where they are not split."""
    functions = [f for body in segmented.bodies for f in (body.forward, body.backward) if f is not None]
    shapes = (value.shape for function in functions for value in defined(function).values())
    return lcm(*(size.over for shape in shapes for size in shape if isinstance(size, Size)))


def _stash(body: Body, cut: Halves | None, held: Set[str]) -> Expression:
    """The bytes that W is handed, a storage once, those `held` anyway left out."""
    if cut is None or cut.input is None:
        return 0
    values, root = {**defined(body.forward), **defined(cut.input)}, roots(body.forward.nodes)
    kept = dict.fromkeys(root.get(name, name) for name in cut.stash)
    return _total(_bytes(values[name]) for name in kept if name not in held)


def recomputed(body: Body) -> tuple[Value, ...]:
    """What a backward makes again of its forward and then reads, a value a storage: it lives within the backward.

    Of what it makes in chunks there is one at a time, counted as the longest.
    """
    if body.backward is None:
        return ()
    nodes = (*in_chunks(body.backward),)
    values, root = defined(replace(body.backward, nodes=nodes)), roots(nodes)
    again = {name for node in nodes if not node.backward for name in node.names()}
    read = (name for node in nodes if node.backward for name in node.refs() if name in again)
    return tuple(values[name] for name in dict.fromkeys(root.get(name, name) for name in read) if name in again)


def _flops(function: Function) -> Expression:
    values = defined(function)
    return _total(flops(node, values) for node in function.nodes)


def _moved(function: Function, *, swept: bool = False) -> Expression:
    """The bytes that a function's operators read and write; with `swept` those of its sweeps alone."""
    values = defined(function)
    moving = (node for node in function.nodes if viewed(node) is None and not (swept and contracts(node)))
    return _total(term for node in moving for term in _traffic(node, values))


def _traffic(node: Node, values: Mapping[str, Value]) -> Iterable[Expression]:
    """The bytes that a call reads, a term a tensor, and those it writes."""
    written = [_bytes(out) for out in node.outs if out is not None]
    read = list(dict.fromkeys(node.refs()))
    if node.aten in GATHERS:
        return (*written, *written, *(_bytes(values[name]) for name in read[1:]))
    return (*written, *(_bytes(values[name]) for name in read))


def _bytes(value: Value) -> Expression:
    return count(value.shape) * value.dtype.itemsize


def _total(terms: Iterable[Expression]) -> Expression:
    import sympy

    return sympy.expand(sympy.Add(*terms))
