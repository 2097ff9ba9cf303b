"""Gated units and weight normalisation: one dim is treated as a whole, all else is pointwise."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Dims, Draft, Family, Product, Rule, ratio, wrap


def _halves(call: Call) -> tuple[Draft, Dims, Dims]:
    """The dims of a tensor whose dim `dim` is two halves, and of one half."""
    shape = call.shape("self")
    place = wrap(call.args["dim"], len(shape))
    half: Dim = ratio(shape[place], 2) or 0
    draft = Draft()
    part: Dims = draft.dims(tuple(half if i == place else size for i, size in enumerate(shape)))
    pair: Product = draft.new(2, blocked=True)
    whole = tuple(pair + dim if i == place else dim for i, dim in enumerate(part))
    return draft, whole, part


def _glu(call: Call) -> Rule:
    draft, whole, part = _halves(call)
    return draft.rule(call, {"self": whole}, [part])


def _glu_backward(call: Call) -> Rule:
    draft, whole, part = _halves(call)
    return draft.rule(call, {"grad_output": part, "self": whole}, [whole], linear=["grad_output"])


def _weight_norm(call: Call) -> Rule:
    """The norm is over every dim but `dim`, so those are blocked."""
    backward = call.has("saved_v")
    shape = call.shape("saved_v" if backward else "v")
    kept = wrap(call.args["dim"], len(shape))
    draft = Draft()
    whole = draft.dims(shape, blocked=[i for i in range(len(shape)) if i != kept])
    norm = tuple(dim if i == kept else () for i, dim in enumerate(whole))
    if backward:
        operands = {"grad_w": whole, "saved_v": whole, "saved_g": norm, "saved_norms": norm}
        return draft.rule(call, operands, [whole, norm], linear=["grad_w"])
    return draft.rule(call, {"v": whole, "g": norm}, [whole, norm])


RULES: Mapping[str, Family] = {
    "glu": _glu,
    "glu_backward": _glu_backward,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
}
