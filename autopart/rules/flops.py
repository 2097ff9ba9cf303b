"""FLOPs of an operator call, by a table; a multiplication and an addition are two.

Contractions have formulas of their own, which are those of torch.utils.flop_counter for what it knows: nothing is taken
off for causal masks, and the backward of fused attention makes its scores again. Reductions count an operation an
element read, everything else an operation an element written; views and tensors made from nothing count none. What the
user registered counts its loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from autopart.ir.cost import batch_symbol
from autopart.ir.graph import Dim, Node, Size, Value
from autopart.rules.alias import viewed
from autopart.rules.factor import Call, Rule, bind
from autopart.rules.table import rule

GATHERS = ("embedding", "index", "index_select", "gather")
"""Operators that read as many elements of their first tensor as they write, however large it is."""

Expression = Any
"""A sympy expression in `batch_symbol()`, or a plain number."""

Formula = Callable[[Call], Expression]


def flops(node: Node, values: Mapping[str, Value]) -> Expression:
    """The FLOPs of one call, in `batch_symbol()`; `values` holds the tensors that the node reads."""
    if viewed(node) is not None:
        return 0
    known = {"aten": FORMULAS, "autopart": BAGS}.get(node.op.namespace, {})
    formula = known.get(node.op.overloadpacket.__name__)
    if formula is not None:
        return formula(bind(node, values))
    if node.op.namespace not in ("aten", "autopart") and (own := rule(node, values)) is not None:
        return _nest(own)
    return sum(count(out.shape) for out in node.outs if out is not None)


def contracts(node: Node) -> bool:
    """Whether an operator has a product in it, as matmuls, convolutions and attention do: more than a sweep of memory.

    So is an operator of the user's own taken to be.
    """
    if node.op.namespace not in ("aten", "autopart"):
        return True
    return node.op.namespace == "aten" and node.op.overloadpacket.__name__ in CONTRACTIONS


def _nest(rule: Rule) -> Expression:
    """An operation an iteration of the loops of every result; two where they are summed over one."""
    total: Expression = 0
    for result, dims in enumerate(rule.results):
        if dims is not None:
            own = {factor for dim in dims for factor in dim}
            summed = {
                factor
                for factor, about in enumerate(rule.factors)
                if not about.blocked and rule.contracts(result, factor)
            }
            total += (2 if summed else 1) * count(rule.factors[factor].size for factor in own | summed)
    return total


def count(shape: Iterable[Dim]) -> Expression:
    """The number of elements of a shape, in `batch_symbol()`."""
    shape = tuple(shape)
    moving = [size for size in shape if isinstance(size, Size)]
    fixed = prod(size for size in shape if not isinstance(size, Size))
    if not moving or not fixed:
        return fixed
    return fixed * prod(size.per_sample * batch_symbol() + size.constant for size in moving)


def _product(left: str, right: str) -> Formula:
    """``[..., n, k] @ [..., k, m]``: 2 n k m a matrix."""

    def formula(call: Call) -> Expression:
        columns = call.shape(right)[-1:] if call.ndim(right) > 1 else ()
        return 2 * count((*call.shape(left), *columns))

    return formula


def _grouped(call: Call) -> Expression:
    """Every row, column or inner index that the groups share out is in one product; stacks make one a matrix."""
    left, right = call.shape("self"), call.shape("mat2")
    return 2 * count((*left[-2:], right[-1]) if len(left) > len(right) else (*left, right[-1]))


def _convolved(call: Call, outer: Iterable[Dim]) -> Expression:
    """Every weight is used once a sample and position of `outer`: the result, or a transposed one's input."""
    batch, _, *positions = outer
    return 2 * count((batch, *positions, *call.shape("weight")))


def _convolution(call: Call) -> Expression:
    result = call.results[0]
    assert result is not None
    return _convolved(call, call.shape("input") if call.args["transposed"] else result.shape)


def _convolution_backward(call: Call) -> Expression:
    """The gradients of input and weight cost as much as the forward each; that of the bias is a sum."""
    outer = call.shape("input" if call.args["transposed"] else "grad_output")
    to_input, to_weight, to_bias = call.args["output_mask"]
    return (int(to_input) + int(to_weight)) * _convolved(call, outer) + int(to_bias) * count(call.shape("grad_output"))


def _attention(scores: int, weighted: int) -> Formula:
    """`scores` products as large as query times key, and `weighted` as large as weights times value."""

    def formula(call: Call) -> Expression:
        query, positions = call.shape("query"), call.shape("key")[-2]
        pairs = 2 * count((*query[:-1], positions))
        return pairs * (scores * count(query[-1:]) + weighted * count(call.shape("value")[-1:]))

    return formula


def _read(call: Call) -> Expression:
    """One operation an element of the first tensor."""
    return count(call.operands[0].value.shape)


def _looked_up(call: Call) -> Expression:
    """One operation an element of the rows that bags name."""
    return count(call.shape("indices")) * count(call.shape("grad" if call.has("grad") else "weight")[1:])


def _nothing(call: Call) -> Expression:
    return 0


def _each(names: str, formula: Formula) -> dict[str, Formula]:
    return dict.fromkeys(names.split(), formula)


_KERNELS = """
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
"""
_REDUCTIONS = """
sum mean prod amax amin max min aminmax argmax argmin any all var var_mean std std_mean norm linalg_vector_norm
logsumexp count_nonzero nll_loss_forward nll_loss2d_forward mse_loss l1_loss huber_loss smooth_l1_loss
binary_cross_entropy binary_cross_entropy_with_logits embedding_dense_backward
"""
_CREATIONS = """
zeros ones full empty zeros_like ones_like full_like empty_like empty_strided new_zeros new_ones new_full new_empty
new_empty_strided arange eye scalar_tensor
"""

CONTRACTIONS: Mapping[str, Formula] = {
    "mm": _product("self", "mat2"),
    "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "addmv": _product("mat", "vec"),
    "baddbmm": _product("batch1", "batch2"),
    "_grouped_mm": _grouped,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **_each(_KERNELS, _attention(1, 1)),
    "_scaled_dot_product_attention_math": _attention(1, 1),
    # Scores again, gradients of query and key; gradients of weights and value.
    **{f"{name}_backward": _attention(3, 2) for name in _KERNELS.split()},
}

FORMULAS: Mapping[str, Formula] = {**_each(_CREATIONS, _nothing), **_each(_REDUCTIONS, _read), **CONTRACTIONS}
"""By the operator's name. What is not here counts an operation an element written."""

BAGS: Mapping[str, Formula] = _each("bag_sum bag_sum_backward bag_scale_backward bag_max", _looked_up)
"""The same for operators of autopart."""
