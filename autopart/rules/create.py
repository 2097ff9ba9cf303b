"""Tensors made from sizes: every dim is a free loop, all of whose pieces look alike.

A count along a dim is blocked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Draft, Family, Product, Rule, each, times


def _filled(call: Call) -> Rule:
    draft = Draft()
    dims = draft.dims(tuple(call.args["size"]))
    operands = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    sizes = {f"size.{i}": dim for i, dim in enumerate(dims)}
    return draft.rule(call, operands, [dims], sizes=sizes, shape_only=tuple(operands), linear=["fill_value"])


def _strided(call: Call) -> Rule:
    """Row-major tensors without content, whose strides are products of the later sizes; others cannot be split."""
    size, stride = tuple(call.args["size"]), tuple(call.args["stride"])
    draft = Draft()
    dims = draft.dims(size)
    operands = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    sizes = {f"size.{i}": dim for i, dim in enumerate(dims)}
    elements: Dim | None = 1
    inner: Product = ()
    for i in reversed(range(len(size))):
        if size[i] != 1 and stride[i] != elements:
            return _counted(call)
        sizes[f"stride.{i}"] = inner
        elements, inner = None if elements is None else times(elements, size[i]), dims[i] + inner
    return draft.rule(call, operands, [dims], sizes=sizes, shape_only=tuple(operands))


def _counted(call: Call) -> Rule:
    result = call.results[0]
    draft = Draft()
    operands = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    dims = None if result is None else draft.fixed(result.shape)
    return draft.rule(call, operands, [dims], shape_only=tuple(operands))


def _range(call: Call) -> Rule:
    """Numbers counted from 0, of which a piece of so many may be counted alone: each place's, of its own rows."""
    rule = _counted(call)
    counts = call.args.get("start", 0) == 0 and call.args.get("step", 1) == 1
    return replace(rule, sizes=(("end", (0,)),)) if counts and rule.factors else rule


def _scalar(call: Call) -> Rule:
    return Draft().rule(call, {}, [()], linear=["s"])


RULES: Mapping[str, Family] = {
    **each("full zeros ones empty rand randn new_full new_zeros new_ones new_empty", _filled),
    "arange": _range,
    **each("linspace eye randperm", _counted),
    **each("empty_strided new_empty_strided", _strided),
    "scalar_tensor": _scalar,
}
