"""The table of factor rules, by operator."""

from __future__ import annotations

from collections.abc import Mapping

from autopart._torch import OpOverload
from autopart.errors import CaptureError
from autopart.ir.graph import Node, Value
from autopart.rules import (
    attention,
    bags,
    contract,
    conv,
    create,
    drawn,
    exchange,
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
from autopart.rules.factor import Call, Family, Rule, bind
from autopart.rules.libraries import library_rule
from autopart.rules.own import Misfit, OwnRule, own_rule

FAMILIES: tuple[Mapping[str, Family], ...] = tuple(
    module.RULES
    for module in (
        attention,
        bags,
        contract,
        conv,
        create,
        drawn,
        exchange,
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
    """The table's entry for an operator of aten or of autopart; of any other, the rule that it is registered with."""
    if op.namespace in ("aten", "autopart"):
        name = op.overloadpacket.__name__ if op.namespace == "aten" else f"autopart.{op.overloadpacket.__name__}"
        found = TABLE.get(f"{name}.{op._overloadname}") or TABLE.get(name)
        if found is not None:
            return found
    return own_rule(op) or library_rule(op)


def rule(node: Node, values: Mapping[str, Value]) -> Rule | None:
    """The factor rule of one call; None if its operator has none. `values` holds the tensors that the node reads."""
    return rule_of(node, bind(node, values))


def rule_of(node: Node, call: Call) -> Rule | None:
    """The factor rule of a node whose call is bound.

    Raises CaptureError, naming the user's line, where the rule that an operator is registered with does not fit.
    """
    found = family(node.op)
    try:
        return None if found is None else found(call)
    except Misfit as error:
        text = found.text if isinstance(found, OwnRule) else ""
        raise CaptureError(
            f"{node.place()}{node.opname} is registered with the sharding rule {text!r}, which does not fit this call: "
            f"{error}"
        ) from None
