"""Bags of rows: bags and columns are free; of the table's rows each place may sum up those that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopart.bags import BAG_SCALE_BACKWARD, BAG_SUM, BAG_SUM_BACKWARD
from autopart.ir.graph import Value
from autopart.rules.factor import Call, Family, Rule
from autopart.rules.loops import loops
from autopart.rules.writer import Spread, Writer, consecutive

aten = torch.ops.aten


def _sum(call: Call) -> Rule:
    """The places of a bag are few: they are not split, so pending sums of the table pass through."""
    return loops(call, "weight:ve indices:bk scale:bk -> be", blocked="vk", linear=["weight", "scale"])


def _sum_backward(call: Call) -> Rule:
    spec = "grad:be indices:bk scale:bk -> ve"
    return loops(call, spec, blocked="vk", linear=["grad", "scale"], sizes={"num_weights": "v"})


def _scale_backward(call: Call) -> Rule:
    return loops(call, "grad:be weight:ve indices:bk -> bk", blocked="v", linear=["grad", "weight"])


def _max(call: Call) -> Rule:
    return loops(call, "weight:ve indices:bk -> be, be", blocked="vk")


def _max_backward(call: Call) -> Rule:
    return loops(call, "grad:be rows:be -> ve", blocked="v", linear=["grad"], sizes={"num_weights": "v"})


RULES: Mapping[str, Family] = {
    "autopart.bag_sum": _sum,
    "autopart.bag_sum_backward": _sum_backward,
    "autopart.bag_scale_backward": _scale_backward,
    "autopart.bag_max": _max,
    "autopart.bag_max_backward": _max_backward,
}


def _rows(write: Callable[[Writer, Call], None], slot: str) -> Callable[[Call, Rule], Spread | None]:
    """The rows of a table may be split; they are dim 0 of an operand, or of the result where `slot` is ""."""

    def found(call: Call, rule: Rule) -> Spread | None:
        dims = dict(rule.operands)[slot] if slot else rule.results[0]
        return None if dims is None or len(dims[0]) != 1 else Spread(dims[0][0], write, consecutive)

    return found


def _own(w: Writer, call: Call) -> tuple[Value, Value]:
    """The rows that are of this place's part, counted in it, 0 for others and for padding; and which those are."""
    indices = w.refs["indices"]
    own, here = w.mine(indices)
    if call.args["padding_idx"] >= 0:
        used = w(aten.ne.Scalar, indices, call.args["padding_idx"], like=here)
        here = w(aten.logical_and.default, here, used, like=here)
    return w(aten.mul.Tensor, own, here, like=own), here


def _scale(w: Writer, here: Value, dtype: torch.dtype) -> Value:
    """The numbers that rows are multiplied by, zero for those that are not of this place's part."""
    like = Value("", here.shape, dtype)
    if "scale" in w.refs:
        return w(aten.mul.Tensor, w.refs["scale"], here, like=like)
    return w(aten._to_copy.default, here, like=like, dtype=dtype)


def _sum_own(w: Writer, call: Call) -> None:
    weight = w.refs["weight"]
    own, here = _own(w, call)
    w.last(BAG_SUM, weight, own, _scale(w, here, weight.dtype), -1)


def _sum_own_backward(w: Writer, call: Call) -> None:
    grad = w.refs["grad"]
    own, here = _own(w, call)
    w.last(BAG_SUM_BACKWARD, grad, own, _scale(w, here, grad.dtype), w.length, -1)


def _scale_own_backward(w: Writer, call: Call) -> None:
    own, here = _own(w, call)
    out = w.outs[0]
    assert out is not None  # dead calls are not placed
    found = w(BAG_SCALE_BACKWARD, w.refs["grad"], w.refs["weight"], own, -1, like=out)
    w.last(aten.where.ScalarOther, here, found, 0.0)


BAGS: Mapping[str, Callable[[Call, Rule], Spread | None]] = {
    "autopart.bag_sum": _rows(_sum_own, "weight"),
    "autopart.bag_sum_backward": _rows(_sum_own_backward, ""),
    "autopart.bag_scale_backward": _rows(_scale_own_backward, "weight"),
}
"""How the rows of a table are split, by the operator's name."""
