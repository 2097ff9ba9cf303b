"""Softmax and its backward: the softmax dim is blocked."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Draft, Family, Rule, each, wrap


def _forward(call: Call) -> Rule:
    return _softmax(call, "self", linear="")


def _backward(call: Call) -> Rule:
    return _softmax(call, "output", linear="grad_output")


def _softmax(call: Call, shaped: str, linear: str) -> Rule:
    shape = call.shape(shaped)
    draft = Draft()
    dims = draft.dims(shape, blocked=(wrap(call.args["dim"], len(shape)),))
    return draft.rule(call, {operand.slot: dims for operand in call.operands}, [dims], linear=[linear])


RULES: Mapping[str, Family] = {
    **each("_softmax _log_softmax _safe_softmax", _forward),
    **each("_softmax_backward_data _log_softmax_backward_data", _backward),
}
