"""bags: nodes -> nodes. Bags of one length are operators that need not know how many bags are before theirs.

before: ids = view(x, [-1]);  at = arange(0, 3 * b, 3);  y, ... = _embedding_bag(table, ids, at)       x: [batch, 3]
after:  y = bag_sum(table, x)

This is what an `EmbeddingBag` does of input ``[bags, length]``. A mean is a sum and a division; the backward is written
in the same way. Bags whose offsets are an input are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart.bags import (
    BAG_MAX,
    BAG_MAX_BACKWARD,
    BAG_SCALE_BACKWARD,
    BAG_SUM,
    BAG_SUM_BACKWARD,
    MAX_MODE,
    MEAN_MODE,
)  # fmt: skip
from autopart.ir.graph import Arg, Dim, Input, Node, Ref, Value
from autopart.ir.names import fresh
from autopart.rules.factor import Call, bind, ratio

aten = torch.ops.aten

FORWARDS = ("_embedding_bag", "_embedding_bag_forward_only")
BACKWARD, SCALE_BACKWARD = "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward"
SAME_ORDER = ("view", "_unsafe_view", "clone", "reshape")
"""Operators whose result has all elements of their operand, in order."""


@dataclass(frozen=True, slots=True)
class _Bags:
    """What the backward of bags reads: indices and scale, ``[bags, length]``, and what a mean was divided by, or the
    rows that maxima are from.
    """

    mode: int
    indices: Arg
    scale: Arg
    divisor: Arg = None
    rows: Arg = None


def with_bags(inputs: Sequence[Input], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with all bags of one length, and their backwards, written so."""
    if not any(node.aten in FORWARDS for node in nodes):
        return tuple(nodes)
    return _Writer(inputs, nodes).written()


class _Writer:
    """Writes the nodes anew, one after the other."""

    def __init__(self, inputs: Sequence[Input], nodes: Sequence[Node]) -> None:
        self.values = {entry.value.name: entry.value for entry in inputs}
        self.values |= {out.name: out for node in nodes for out in node.outs if out is not None}
        self.made: Mapping[str, Node] = {name: node for node in nodes for name in node.names()}
        self.given = tuple(nodes)
        self.nodes: list[Node] = []
        self.bags: dict[str, _Bags] = {}  # by every name that a forward has made

    def written(self) -> tuple[Node, ...]:
        for node in self.given:
            bags = next(self._known(node), None) if node.aten in (BACKWARD, SCALE_BACKWARD) else None
            if bags is not None:
                write = self._backward if node.aten == BACKWARD else self._scale_backward
                write(node, bags, bind(node, self.values))
            elif node.aten not in FORWARDS or not self._forward(node):
                self.nodes.append(node)
        return tuple(self.nodes)

    def _known(self, node: Node) -> Iterator[_Bags]:
        return (self.bags[name] for name in node.refs() if name in self.bags)

    def _forward(self, node: Node) -> bool:
        """Write the bags, if they are of one length; else False, and nothing is written."""
        call = bind(node, self.values)
        shape, (out, *_) = self._shape(call), node.outs
        if shape is None or out is None or call.args["scale_grad_by_freq"]:
            return False
        table, padding = call.args["weight"], call.args["padding_idx"]
        indices = self._shaped(node, call.args["indices"], shape)
        scale = self._shaped(node, call.args["per_sample_weights"], shape)
        bags = _Bags(call.args["mode"], indices, scale)
        if bags.mode == MAX_MODE:
            rows = self._new(f"{out.name}_rows", out.shape, self.values[indices.name].dtype)
            self.nodes.append(replace(node, op=BAG_MAX, args=(table, indices, padding), kwargs=(), outs=(out, rows)))
            bags = replace(bags, rows=Ref(rows.name))
        elif bags.mode == MEAN_MODE:
            total = self._new(f"{out.name}_sum", out.shape, out.dtype)
            self._put(node, BAG_SUM, (table, indices, None, padding), total)
            bags = replace(bags, divisor=self._count(node, indices, shape, padding, out.name))
            self._put(node, aten.div.Tensor, (Ref(total.name), bags.divisor), out)
        else:
            self._put(node, BAG_SUM, (table, indices, scale, padding), out)
        self.bags.update(dict.fromkeys(node.names(), bags))
        return True

    def _shape(self, call: Call) -> tuple[Dim, Dim] | None:
        """The number of bags and their length, where the offsets say that all have one."""
        offsets, out = self.made.get(call.args["offsets"].name), call.results[0]
        if offsets is None or offsets.aten != "arange" or call.args["include_last_offset"] or out is None:
            return None
        steps = bind(offsets, self.values).args
        length, bags = steps.get("step", 1), out.shape[0]
        whole = steps.get("start", 0) == 0 and isinstance(length, int)
        return (bags, length) if whole and ratio(call.shape("indices")[0], length) == bags else None

    def _count(self, node: Node, indices: Ref, shape: tuple[Dim, Dim], padding: int, name: str) -> Arg:
        """How many rows each bag is the mean of: its length, but for padding, and 1 of nothing but that."""
        if padding < 0:
            return shape[1]
        used = self._new(f"{name}_used", shape, torch.bool)
        self._put(node, aten.ne.Scalar, (indices, padding), used)
        count = self._new(f"{name}_count", (shape[0], 1), torch.int64)
        self._put(node, aten.sum.dim_IntList, (Ref(used.name), (1,), True), count)
        divisor = self._new(f"{name}_divisor", (shape[0], 1), torch.int64)
        self._put(node, aten.clamp.default, (Ref(count.name), 1), divisor)
        return Ref(divisor.name)

    def _backward(self, node: Node, bags: _Bags, call: Call) -> None:
        grad, rows, (out,) = call.args["grad"], call.args["num_weights"], node.outs
        assert out is not None  # nothing is dead yet
        if bags.mode == MAX_MODE:
            self._put(node, BAG_MAX_BACKWARD, (grad, bags.rows, rows), out)
            return
        if bags.mode == MEAN_MODE:
            each = self._new(f"{out.name}_each", self.values[grad.name].shape, out.dtype)
            self._put(node, aten.div.Tensor, (grad, bags.divisor), each)
            grad = Ref(each.name)
        self._put(node, BAG_SUM_BACKWARD, (grad, bags.indices, bags.scale, rows, call.args["padding_idx"]), out)

    def _scale_backward(self, node: Node, bags: _Bags, call: Call) -> None:
        (out,) = node.outs
        assert out is not None  # nothing is dead yet
        of_bags = self._new(f"{out.name}_bags", self.values[bags.indices.name].shape, out.dtype)
        args = (call.args["grad"], call.args["weight"], bags.indices, call.args["padding_idx"])
        self._put(node, BAG_SCALE_BACKWARD, args, of_bags)
        self._put(node, aten.view.default, (Ref(of_bags.name), out.shape), out)

    def _shaped(self, node: Node, flat: Any, shape: tuple[Dim, Dim]) -> Any:
        """A flat operand in the shape of the bags: the first value that it is made from, if that has it."""
        if flat is None:
            return None
        found, best = flat, None
        while isinstance(found, Ref) and self.values[found.name].dtype == self.values[flat.name].dtype:
            best = found if self.values[found.name].shape == shape else best
            made = self.made.get(found.name)
            found = made.args[0] if made is not None and made.aten in SAME_ORDER else None
        if best is not None:
            return best
        view = self._new(f"{flat.name}_bags", shape, self.values[flat.name].dtype)
        self._put(node, aten.view.default, (flat, shape), view)
        return Ref(view.name)

    def _new(self, name: str, shape: tuple[Dim, ...], dtype: torch.dtype) -> Value:
        value = Value(fresh(name, self.values), shape, dtype)
        self.values[value.name] = value
        return value

    def _put(self, node: Node, op: Any, args: tuple[Arg, ...], out: Value) -> None:
        self.nodes.append(replace(node, op=op, args=args, kwargs=(), outs=(out,), single=True))
