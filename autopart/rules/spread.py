"""Operators that need all of a loop at once, and how the places of an axis run them with that loop split.

A softmax over a split dim gathers one number a place, the logarithm of its sum; a lookup in a split table finds what
its place has, and zero elsewhere. So a vocabulary stays split from the embedding to the loss.

    log_softmax(x)         x - logsumexp(all_gather(logsumexp(x)))
    embedding(w, i)        rows of this place's part of w; zero for other rows. The places' results add up
    cumsum(x)              cumsum(x) + the sum of all_gather(sum(x)) over the places before (from the end: after)
    bag_sum(w, i)          the sum of this place's rows in each bag. The places' results add up
    nll_loss(x, t)         the loss of the targets of this place's classes, all others ignored. These add up, too

The functions here write those nodes for one place; attention is in `ring`, a batch norm's samples in `batch_norm`,
bags of rows in `bags`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopart.collectives import operator
from autopart.ir.graph import Arg, Value
from autopart.rules.bags import BAGS
from autopart.rules.batch_norm import NORMS
from autopart.rules.factor import Call, Rule, wrap
from autopart.rules.ring import RINGS
from autopart.rules.writer import Sent, Spread, Writer, anyhow, consecutive
from autopart.scans import FROM_END

aten = torch.ops.aten

SUM = 2
"""The number of the reduction "sum" in the arguments of losses."""


def spread(call: Call, rule: Rule) -> Spread | None:
    """How an operator's blocked loop may be split, if it may."""
    name = call.op.overloadpacket.__name__
    found = SPREADS.get(name if call.op.namespace == "aten" else f"{call.op.namespace}.{name}")
    return None if found is None else found(call, rule)


def _loop(rule: Rule, slot: str, dim: int) -> int | None:
    """The blocked factor that a dim of an operand is, alone."""
    product = dict(rule.operands)[slot][dim]
    return product[0] if len(product) == 1 and rule.factors[product[0]].blocked else None


def _dim(call: Call, slot: str) -> int:
    return wrap(call.args["dim"], call.ndim(slot))


def _softmax_like(write: Callable[[Writer, Call], None], slot: str) -> Callable[..., Spread | None]:
    def found(call: Call, rule: Rule) -> Spread | None:
        dim = _dim(call, slot)
        factor = _loop(rule, slot, dim)
        if factor is None or call.args.get("half_to_float", False):
            return None
        return Spread(factor, write, anyhow, (Sent("all_reduce", slot, dim),))

    return found


def _logarithm(w: Writer, dim: int) -> Value:
    """The logarithm of the sum of the exponentials over all places, of which each brings that of its own sum."""
    x = w.refs["self"]
    thin = Value("", tuple(1 if i == dim else n for i, n in enumerate(x.shape)), x.dtype)
    each = Value("", tuple(w.degree if i == dim else n for i, n in enumerate(x.shape)), x.dtype)
    part = w(aten.logsumexp.default, x, (dim,), True, like=thin)
    every = w(operator("all_gather"), part, w.axis, dim, 1, (1,) * w.degree, like=each)
    return w(aten.logsumexp.default, every, (dim,), True, like=thin)


def _log_softmax(w: Writer, call: Call) -> None:
    w.last(aten.sub.Tensor, w.refs["self"], _logarithm(w, _dim(call, "self")))


def _softmax(w: Writer, call: Call) -> None:
    x = w.refs["self"]
    w.last(aten.exp.default, w(aten.sub.Tensor, x, _logarithm(w, _dim(call, "self")), like=x))


def _log_softmax_backward(w: Writer, call: Call) -> None:
    gradient, output = w.refs["grad_output"], w.refs["output"]
    total = w.reduced(aten.sum.dim_IntList, gradient, _dim(call, "output"), "sum")
    scaled = w(aten.mul.Tensor, w(aten.exp.default, output, like=output), total, like=output)
    _cast(w, w(aten.sub.Tensor, gradient, scaled, like=output))


def _softmax_backward(w: Writer, call: Call) -> None:
    gradient, output = w.refs["grad_output"], w.refs["output"]
    both = w(aten.mul.Tensor, gradient, output, like=output)
    total = w.reduced(aten.sum.dim_IntList, both, _dim(call, "output"), "sum")
    _cast(w, w(aten.sub.Tensor, both, w(aten.mul.Tensor, output, total, like=output), like=output))


def _cast(w: Writer, value: Value) -> None:
    out = w.outs[0]
    assert out is not None  # dead calls are not placed
    w.last(aten._to_copy.default, value, dtype=out.dtype)


def _running_sum(op: Any, *, from_end: bool) -> Callable[..., Spread | None]:
    """A cumulative sum of each place's own elements, and the sums of the places before, or after."""

    def found(call: Call, rule: Rule) -> Spread | None:
        dim = _dim(call, "self")
        factor = _loop(rule, "self", dim)
        return None if factor is None else Spread(factor, write, consecutive, (Sent("all_gather", "self", dim),))

    def write(w: Writer, call: Call) -> None:
        x, out, dim = w.refs["self"], w.outs[0], _dim(call, "self")
        assert out is not None  # dead calls are not placed

        def like(count: int) -> Value:
            return Value("", tuple(count if i == dim else n for i, n in enumerate(x.shape)), out.dtype)

        if x.dtype != out.dtype:
            x = w(aten._to_copy.default, x, like=Value("", x.shape, out.dtype), dtype=out.dtype)
        total = w(aten.sum.dim_IntList, x, (dim,), True, like=like(1), name=w.unused("total"))
        ones = (1,) * w.degree
        totals = w(operator("all_gather"), total, w.axis, dim, 1, ones, like=like(w.degree), name=w.unused("totals"))
        first, last = (w.place + 1, w.degree) if from_end else (0, w.place)
        others = w(aten.slice.Tensor, totals, dim, first, last, like=like(last - first), name=w.unused("others"))
        rest = w(aten.sum.dim_IntList, others, (dim,), True, like=like(1), name=w.unused("rest"))
        w.last(aten.add.Tensor, w(op, x, dim, like=x, name=w.unused("own")), rest)

    return found


def _embedding(call: Call, rule: Rule) -> Spread | None:
    factor = _loop(rule, "weight", 0)
    return None if factor is None else Spread(factor, _look_up, consecutive)


def _look_up(w: Writer, call: Call) -> None:
    own, here = w.mine(w.refs["indices"])
    out = w.outs[0]
    assert out is not None  # dead calls are not placed
    rows = w(aten.embedding.default, w.refs["weight"], w(aten.mul.Tensor, own, here, like=own), like=out)
    column = w(aten.unsqueeze.default, here, -1, like=Value("", (*here.shape, 1), here.dtype))
    w.last(aten.where.ScalarOther, column, rows, 0.0)


def _embedding_backward(call: Call, rule: Rule) -> Spread | None:
    dims = rule.results[0]
    if dims is None or len(dims[0]) != 1 or call.args["scale_grad_by_freq"]:
        return None
    return Spread(dims[0][0], _scatter_rows, consecutive)


def _scatter_rows(w: Writer, call: Call) -> None:
    """Gradients of other places' rows, and of the padding, go to one row more, which is dropped."""
    indices, out = w.refs["indices"], w.outs[0]
    assert out is not None and isinstance(w.length, int)  # dead calls are not placed; a table has a number of rows
    own, here = w.mine(indices)
    if call.args["padding_idx"] >= 0:
        used = w(aten.ne.Scalar, indices, call.args["padding_idx"], like=here)
        here = w(aten.logical_and.default, here, used, like=here)
    row = w(aten.where.ScalarOther, here, own, w.length, like=own)
    longer = Value("", (w.length + 1, *out.shape[1:]), out.dtype)
    grown = w(aten.embedding_dense_backward.default, w.refs["grad_output"], row, w.length + 1, -1, False, like=longer)
    w.last(aten.slice.Tensor, grown, 0, 0, w.length)


def _nll(write: Callable[[Writer, Call], None]) -> Callable[..., Spread | None]:
    """A mean divides by what one place cannot know, and weights are a table of their own: neither is split."""

    def found(call: Call, rule: Rule) -> Spread | None:
        if call.args["reduction"] not in (0, SUM) or call.has("weight") or call.ndim("self") != 2:
            return None
        if len(call.results) > 1 and call.results[1] is not None:
            return None
        factor = _loop(rule, "self", 1)
        return None if factor is None else Spread(factor, write, consecutive)

    return found


NOWHERE = -100
"""A target that no class has."""


def _own_targets(w: Writer, call: Call) -> Value:
    target = w.refs["target"]
    own, here = w.mine(target)
    valid = w(aten.ne.Scalar, target, call.args["ignore_index"], like=here)
    both = w(aten.logical_and.default, here, valid, like=here)
    return w(aten.where.ScalarOther, both, own, NOWHERE, like=target)


def _nll_forward(w: Writer, call: Call) -> None:
    args = (w.refs["self"], _own_targets(w, call), None, call.args["reduction"], NOWHERE)
    w.put(aten.nll_loss_forward.default, args, w.outs)


def _nll_backward(w: Writer, call: Call) -> None:
    refs, how = w.refs, call.args["reduction"]
    total: Arg = refs["total_weight"]
    w.last(
        aten.nll_loss_backward.default,
        refs["grad_output"],
        refs["self"],
        _own_targets(w, call),
        None,
        how,
        NOWHERE,
        total,
    )


SPREADS: Mapping[str, Callable[[Call, Rule], Spread | None]] = {
    "_softmax": _softmax_like(_softmax, "self"),
    "_log_softmax": _softmax_like(_log_softmax, "self"),
    "_softmax_backward_data": _softmax_like(_softmax_backward, "output"),
    "_log_softmax_backward_data": _softmax_like(_log_softmax_backward, "output"),
    "cumsum": _running_sum(aten.cumsum.default, from_end=False),
    "autopart.cumsum_from_end": _running_sum(FROM_END, from_end=True),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll(_nll_forward),
    "nll_loss_backward": _nll(_nll_backward),
    **BAGS,
    **NORMS,
    **RINGS,
}
"""By the operator's name."""
