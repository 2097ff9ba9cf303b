"""Draws of random numbers: any loop may be split, since a piece is told where it lies in the whole (`autopart.draws`).

    bernoulli(draw, 0.9, [b, 8], 0)    at place 1 of 2, by columns:    bernoulli(draw, 0.9, [b, 4], 0, [1, 4, 4, 8])

So each place draws its own elements of the unsplit tensor, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopart.ir.graph import Dim, Node
from autopart.rules.factor import Call, Draft, Family, Rule, each


def is_draw(node: Node) -> bool:
    """Whether a node is a draw."""
    return node.op.namespace == "autopart" and torch.Tag.nondeterministic_seeded in node.op.tags


def located(node: Node, dim: int, start: Dim, length: Dim, whole: Dim) -> Node:
    """A draw, made smaller already, of `length` elements from `start` on of each run of `whole` elements of a dim."""
    at = [argument.name for argument in node.op._schema.arguments].index("part")
    before = node.args[at] if len(node.args) > at else ()
    return replace(node, args=(*node.args[:at], (*before, dim, start, length, whole)))


def _drawn(call: Call) -> Rule:
    draft = Draft()
    dims = draft.dims(tuple(call.args["size"]))
    operands = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    return draft.rule(call, operands, [dims], sizes={f"size.{i}": factors for i, factors in enumerate(dims)})


RULES: Mapping[str, Family] = each("autopart.uniform autopart.normal autopart.bernoulli", _drawn)
