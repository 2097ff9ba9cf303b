"""Experts: whether a step multiplies somewhere with weights that are a batch of matrices, as experts are."""

from __future__ import annotations

from autopart.ir.captured import Captured
from autopart.rules.alias import roots


def has_experts(captured: Captured) -> bool:
    """Whether some product of a batch of matrices has a parameter, or a view of one, for an operand."""
    forward = [node for node in captured.nodes if not node.backward]
    weights = {item.value.name for item in captured.of_kind("parameter")}
    root = roots(forward)
    products = (node for node in forward if node.aten in ("bmm", "baddbmm"))
    return any(root.get(name, name) in weights for node in products for name in node.refs())
