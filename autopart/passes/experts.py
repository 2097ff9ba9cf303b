"""Experts: whether a step multiplies somewhere with weights that are a batch of matrices, as experts are."""

from __future__ import annotations

from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Ref
from autopart.rules.alias import viewed

COPIES = ("clone", "_to_copy")
"""What a weight may go through: another dtype under autocast, another order of its dims in an einsum."""


def has_experts(captured: Captured) -> bool:
    """Whether some product of several matrices has a parameter, or a view or copy of one, for an operand."""
    forward = [node for node in captured.nodes if not node.backward]
    products = [node for node in forward if node.aten in ("bmm", "baddbmm") and _several(node)]
    if not products:
        return False
    weights = {item.value.name for item in captured.of_kind("parameter")}
    for node in forward:
        if _source(node) in weights:
            weights.update(node.names())
    return any(not weights.isdisjoint(node.refs()) for node in products)


def _source(node: Node) -> str | None:
    """The value that a node is a view or a copy of, if it is one."""
    source = node.args[0] if node.args and node.aten in COPIES else None
    return source.name if isinstance(source, Ref) else viewed(node)


def _several(node: Node) -> bool:
    """Whether a product is of more than one matrix, as that of an einsum without a batch is not."""
    made = node.outs[0]
    return made is not None and made.at(1)[0] > 1
