"""decompose: nodes -> nodes. Operators written so that they mean the same at every batch size.

before:  ``m = mean(x)``                        x: [batch, 8]
after:   ``m_sum = sum(x);  m = m_sum / (8 * batch)``

The divisor is a `Size` of the whole batch, so the sums of all microbatches, each divided by it, add up to the mean.

before:  ``y = squeeze(x)``                     x: [batch, 1, 8]
after:   ``y = squeeze(x, [1])``                a batch of one sample keeps its dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from autopart._torch import OpOverload
from autopart.ir.graph import Dim, Input, Node, Ref, Size, Value
from autopart.ir.names import fresh
from autopart.rules.factor import Call, bind, is_batch, times, wrap
from autopart.rules.reduce import reduced_dims

aten = torch.ops.aten


def decompose_means(inputs: Sequence[Input], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with every ``mean`` over a dim that moves with the batch written as a sum and a division."""
    values = {entry.value.name: entry.value for entry in inputs}
    values |= {out.name: out for node in nodes for out in node.outs if out is not None}
    return tuple(piece for node in nodes for piece in _decompose(node, values))


def explicit_squeezes(inputs: Sequence[Input], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with every ``squeeze`` naming just the dims of size 1, so that it never drops the batch's."""
    values = {entry.value.name: entry.value for entry in inputs}
    values |= {out.name: out for node in nodes for out in node.outs if out is not None}
    return tuple(_squeeze(node, values) if node.op.overloadpacket is aten.squeeze else node for node in nodes)


def _squeeze(node: Node, values: dict[str, Value]) -> Node:
    call = bind(node, values)
    shape = call.shape("self")
    asked = call.args.get("dim", range(len(shape)))
    dims = {wrap(dim, len(shape)) for dim in ((asked,) if isinstance(asked, int) else asked)}
    ones = tuple(sorted(dim for dim in dims if shape[dim] == 1))
    return replace(node, op=aten.squeeze.dims, args=(node.args[0], ones), kwargs=())


def _decompose(node: Node, values: dict[str, Value]) -> Iterator[Node]:
    if node.op.overloadpacket is not aten.mean or node.outs[0] is None:
        yield node
        return
    call = bind(node, values)
    dims = sorted(reduced_dims(call))
    if not any(is_batch(call.shape("self")[dim]) for dim in dims):
        yield node
        return
    yield from _sum_and_divide(node, call, dims, values)


def _sum_and_divide(node: Node, call: Call, dims: list[int], values: dict[str, Value]) -> Iterator[Node]:
    """The sum is in float32 or wider, since one in half precision may overflow where its mean does not."""
    result = node.outs[0]
    assert result is not None  # asked before
    wide = torch.promote_types(result.dtype, torch.float32)
    divisor: Dim | None = 1
    for dim in dims:
        divisor = None if divisor is None else times(divisor, call.shape("self")[dim])
    if not isinstance(divisor, Size):
        yield node  # two batch dims: the judgement refuses the value itself
        return
    total = Value(fresh(f"{result.name}_sum", values), result.shape, wide)
    quotient = result if wide == result.dtype else Value(fresh(f"{result.name}_mean", values), result.shape, wide)
    count = Size(divisor.per_sample, divisor.constant, whole=True)
    keep = bool(call.args.get("keepdim", False))
    summed = (node.args[0], tuple(dims), keep)
    yield _like(node, aten.sum.dim_IntList, summed, (("dtype", wide),), total)
    yield _like(node, aten.div.Tensor, (Ref(total.name), count), (), quotient)
    if quotient is not result:
        yield _like(node, aten._to_copy.default, (Ref(quotient.name),), (("dtype", result.dtype),), result)


def _like(
    node: Node, op: OpOverload, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...], out: Value
) -> Node:
    return replace(node, op=op, args=args, kwargs=kwargs, outs=(out,), single=True)
