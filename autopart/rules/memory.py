"""What operators do with memory: whose results have new memory, row-major, and which may be written over an operand."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from autopart.ir.graph import Node, Ref, Value
from autopart.rules.alias import viewed
from autopart.rules.pointwise import is_pointwise

_FRESH = """
    mm addmm bmm baddbmm mv addmv dot embedding full zeros ones native_layer_norm native_layer_norm_backward
    nll_loss_backward _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
"""
FRESH = frozenset(_FRESH.split())
"""Operators of aten whose results are new and row-major whatever the strides of their operands."""

DRAWS = ("uniform", "normal", "bernoulli")
"""Those of autopart."""

MAYBE_SAME = ("conj_physical", "_conj_physical")
"""Pointwise operators that hand back the operand itself where there is nothing to do."""

WHOLE = frozenset(("view", "_unsafe_view", "reshape", "alias", "detach", "unsqueeze", "squeeze"))
"""Views of all elements in their order."""

_UNARY = "abs cos erf exp gelu hardswish leaky_relu log neg reciprocal rsqrt sigmoid silu sin sqrt tanh"
_GRADIENT = "gelu hardtanh leaky_relu sigmoid silu tanh threshold"

IN_PLACE: Mapping[str, tuple[str, str]] = {
    **{f"{name}.Tensor": (f"{name}.out", "out") for name in ("add", "sub", "mul", "div")},
    **{f"{name}.default": (f"{name}.out", "out") for name in _UNARY.split()},
    **{f"{name}_backward.default": (f"{name}_backward.grad_input", "grad_input") for name in _GRADIENT.split()},
    "pow.Tensor_Scalar": ("pow.Tensor_Scalar_out", "out"),
    "where.self": ("where.self_out", "out"),
    "relu.default": ("relu_.default", ""),
    "masked_fill.Scalar": ("masked_fill_.Scalar", ""),
    "masked_fill.Tensor": ("masked_fill_.Tensor", ""),
    "_softmax.default": ("_softmax.out", "out"),
    "_log_softmax.default": ("_log_softmax.out", "out"),
    "_softmax_backward_data.default": ("_softmax_backward_data.out", "grad_input"),
    "_log_softmax_backward_data.default": ("_log_softmax_backward_data.out", "out"),
}
"""For operators of aten that may write over an operand, since they read no element after they have written it (or of
a row of a softmax): the overload that writes where it is told to, and the argument that tells; "" for its first.

None that is there for the name's sake alone, and computes elsewhere and copies; nor that rounds otherwise, as `mul_` of
a number does in 16 bits.
"""

IN_PLACE_NAMES = frozenset(path.partition(".")[0].removesuffix("_") for path, _ in IN_PLACE.values())
"""The names of those operators."""


def makes(node: Node) -> bool:
    """Whether the results of a node are known to be in new memory, which nothing else shares."""
    if node.op.namespace == "autopart":
        return node.op.overloadpacket.__name__ in DRAWS
    pointwise = is_pointwise(node) and viewed(node) is None and node.aten not in MAYBE_SAME
    return node.aten in FRESH or pointwise


def row_major(node: Node, known: Set[str], values: Mapping[str, Value]) -> bool:
    """Whether the results of a node are row-major, as `known` ones among the `values` that it reads are."""
    layout = dict(node.kwargs).get("memory_format")
    if layout not in (None, torch.preserve_format):
        return bool(makes(node) and layout == torch.contiguous_format)
    if node.aten in WHOLE:
        return node.refs()[0] in known
    if node.aten in FRESH or not makes(node):
        return makes(node)
    return all(name in known or _decides_nothing(values[name]) for name in node.refs())


def _decides_nothing(operand: Value) -> bool:
    """Whether an operand has at most one dim that is longer than 1, so that no order of dims is visible in it."""
    return sum(size != 1 for size in operand.shape) <= 1


def overwriting(node: Node, operand: str) -> Node | None:
    """The node with its result in the memory of an operand, which must be row-major as it is; None if it cannot be."""
    found = IN_PLACE.get(node.opname.removeprefix("aten.")) if node.op.namespace == "aten" else None
    if found is None:
        return None
    path, told = found
    if not told and node.args[0] != Ref(operand):
        return None
    packet, _, overload = path.partition(".")
    kwargs = (*node.kwargs, (told, Ref(operand))) if told else node.kwargs
    return replace(node, op=getattr(getattr(torch.ops.aten, packet), overload), kwargs=kwargs)
