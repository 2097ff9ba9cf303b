"""Losses that were not decomposed: pointwise and then reduced by their `reduction` argument."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Dims, Draft, Family, Rule, align, broadcast, each

_NONE, _MEAN, _SUM = 0, 1, 2


def _pointwise_loss(call: Call) -> Rule:
    shape = broadcast([operand.value.shape for operand in call.operands])
    how = call.args["reduction"]
    draft = Draft()
    dims = draft.dims(shape, reduction="mean" if how == _MEAN else "sum")
    operands = {operand.slot: align(operand.value.shape, dims) for operand in call.operands}
    return draft.rule(call, operands, [dims if how == _NONE else ()])


def _pointwise_loss_backward(call: Call) -> Rule:
    """The gradient; that of a mean divides by the number of elements at hand, so nothing may be split."""
    shape = broadcast([call.shape("self"), call.shape("target")])
    draft = Draft()
    dims = draft.fixed(shape) if call.args["reduction"] == _MEAN else draft.dims(shape)
    operands: dict[str, Dims] = {operand.slot: align(operand.value.shape, dims) for operand in call.operands}
    return draft.rule(call, operands, [dims], linear=["grad_output"])


def _nll(call: Call) -> Rule:
    """``nll_loss_forward``: a mean divides by the weight of the valid targets at hand, so it cannot be split."""
    how = call.args["reduction"]
    shape = call.shape("self")
    draft = Draft()
    samples = draft.dims(shape[:-1], blocked=range(len(shape) - 1) if how == _MEAN else ())
    classes = draft.new(shape[-1], blocked=True)
    operands: dict[str, Dims] = {"self": (*samples, classes), "target": samples, "weight": (classes,)}
    operands = {slot: dims for slot, dims in operands.items() if call.has(slot)}
    # without a reduction the total weight is zero or undefined: nothing may read it
    return draft.rule(call, operands, [samples if how == _NONE else (), ()])


def _nll_backward(call: Call) -> Rule:
    how = call.args["reduction"]
    shape = call.shape("self")
    draft = Draft()
    samples = draft.dims(shape[:-1], blocked=range(len(shape) - 1) if how == _MEAN else ())
    classes = draft.new(shape[-1], blocked=True)
    operands: dict[str, Dims] = {
        "grad_output": samples if how == _NONE else (),
        "self": (*samples, classes),
        "target": samples,
        "weight": (classes,),
        "total_weight": (),
    }
    operands = {slot: dims for slot, dims in operands.items() if call.has(slot)}
    unread = [] if how == _MEAN else ["total_weight"]
    return draft.rule(call, operands, [(*samples, classes)], linear=["grad_output"], shape_only=unread)


_POINTWISE = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"

RULES: Mapping[str, Family] = {
    **each(_POINTWISE, _pointwise_loss),
    **{f"{name}_backward": _pointwise_loss_backward for name in _POINTWISE.split() if "logits" not in name},
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
}
