"""Pointwise operators: every loop is a dim of the result, operands broadcast to it, nothing is blocked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.ir.graph import Node
from autopart.rules.factor import Call, Draft, Family, Rule, align, broadcast, each


def pointwise(*linear: str) -> Family:
    """A pointwise operator, jointly linear in each set of operands (words in a string)."""

    def family(call: Call) -> Rule:
        shape = broadcast([operand.value.shape for operand in call.operands])
        draft = Draft()
        out = draft.dims(shape)
        operands = {operand.slot: align(operand.value.shape, out) for operand in call.operands}
        return draft.rule(call, operands, [out] * len(call.results), linear=linear)

    return family


NONLINEAR = pointwise()
ONE = pointwise("self")
EITHER = pointwise("self", "other")
BOTH = pointwise("self other")
GRADIENT = pointwise("grad_output")


def _div(call: Call) -> Rule:
    return (NONLINEAR if call.args.get("rounding_mode") else ONE)(call)


def _to_copy(call: Call) -> Rule:
    """A cast keeps a sum unless it rounds each part: to bool, or from floating point to integer."""
    source, target = call.operands[0].value.dtype, call.args.get("dtype")
    exact = target is None or _inexact(target) or (target != torch.bool and not _inexact(source))
    return (ONE if exact else NONLINEAR)(call)


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _view_as_complex(call: Call) -> Rule:
    draft = Draft()
    shape = call.shape("self")
    dims = draft.dims(shape, blocked=(len(shape) - 1,))
    return draft.rule(call, {"self": dims}, [dims[:-1]], linear=["self"])


def _view_as_real(call: Call) -> Rule:
    draft = Draft()
    dims = draft.dims(call.shape("self"))
    return draft.rule(call, {"self": dims}, [(*dims, draft.new(2, blocked=True))], linear=["self"])


def _like(call: Call) -> Rule:
    """A tensor made in the shape of another, whose content does not matter."""
    draft = Draft()
    dims = draft.dims(call.shape("self"))
    operands = {operand.slot: align(operand.value.shape, dims) for operand in call.operands}
    return draft.rule(call, operands, [dims], linear=["value"], shape_only=["self"])


def _copy(call: Call) -> Rule:
    draft = Draft()
    dims = draft.dims(call.shape("self"))
    operands = {"self": dims, "src": align(call.shape("src"), dims)}
    return draft.rule(call, operands, [dims], linear=["src"], shape_only=["self"])


_NONLINEAR = """
    __lshift__ __rshift__ __xor__ _prelu_kernel abs acos acosh asin asinh atan angle atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
    copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod float_power
    frac gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isfinite isinf
    isnan isneginf isposinf lcm le leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num
    native_dropout ne nextafter polygamma pow reciprocal relu relu6 remainder round
    rrelu_with_noise_functional rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
    special_entr special_erfcx special_i0 special_i0e special_i1 special_i1e special_log_ndtr special_ndtr
    special_ndtri special_zeta sqrt square tan tanh threshold trunc
"""

_GRADIENT = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward rrelu_with_noise_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward native_dropout_backward
    _prelu_kernel_backward
"""

RULES: Mapping[str, Family] = {
    **each(_NONLINEAR, NONLINEAR),
    **each(_GRADIENT, GRADIENT),
    **each("neg positive clone detach alias lift_fresh_copy real imag conj _conj conj_physical", ONE),
    **each("resolve_conj resolve_neg _conj_physical deg2rad rad2deg", ONE),
    **each("ldexp special_xlog1py xlogy", ONE),
    "complex": pointwise("real imag"),
    "polar": pointwise("abs"),
    "hardshrink_backward": pointwise("grad_out"),
    "mul": EITHER,
    "add": BOTH,
    "sub": BOTH,
    "rsub": BOTH,
    "div": _div,
    "_to_copy": _to_copy,
    **each("where.self where.ScalarOther where.ScalarSelf where.Scalar", BOTH),
    "masked_fill": pointwise("self value"),
    "addcmul": pointwise("self tensor1", "self tensor2"),
    "addcdiv": pointwise("self tensor1"),
    "lerp": pointwise("self end"),
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "fill": _like,
    "copy": _copy,
    **each("zeros_like ones_like full_like empty_like rand_like randn_like", _like),
}


def is_pointwise(node: Node) -> bool:
    """Whether a call is of a pointwise operator of aten with one result, which its operands decide."""
    if node.op.namespace != "aten" or not node.single:
        return False
    name = node.op.overloadpacket.__name__
    found = RULES.get(f"{name}.{node.op._overloadname}") or RULES.get(name)
    return found is not None and found is not _like
