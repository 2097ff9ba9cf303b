"""The table of factor rules, by operator."""

from __future__ import annotations

from collections.abc import Mapping

from autopart._torch import OpOverload
from autopart.ir.graph import Node, Value
from autopart.rules import (
    attention,
    contract,
    conv,
    create,
    fourier,
    gated,
    index,
    linalg,
    loss,
    norm,
    pointwise,
    reduce,
    shape,
    softmax,
    view,
)
from autopart.rules.factor import Family, Rule, bind

FAMILIES: tuple[Mapping[str, Family], ...] = tuple(
    module.RULES
    for module in (
        attention,
        contract,
        conv,
        create,
        fourier,
        gated,
        index,
        linalg,
        loss,
        norm,
        pointwise,
        reduce,
        shape,
        softmax,
        view,
    )
)
"""Every family's rules: by the operator's name, or ``name.overload`` where its overloads differ."""

TABLE: Mapping[str, Family] = {name: family for rules in FAMILIES for name, family in rules.items()}


def family(op: OpOverload) -> Family | None:
    """The table's entry for an operator, None if it has none. Only operators of aten and of autopart have one."""
    if op.namespace not in ("aten", "autopart"):
        return None
    name = op.overloadpacket.__name__ if op.namespace == "aten" else f"autopart.{op.overloadpacket.__name__}"
    return TABLE.get(f"{name}.{op._overloadname}") or TABLE.get(name)


def rule(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """The factor rule of one call; None if the table has no entry. `values` holds the tensors that the node reads."""
    found = family(node.op)
    return None if found is None else found(bind(node, values))
