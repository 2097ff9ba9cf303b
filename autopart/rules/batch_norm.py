"""Batch norm in training, with the samples split: its statistics are those of all places together.

Every place gathers the means and variances of all; equally many samples have equal weights in them (Chan, Golub and
LeVeque 1979). Backward, two sums over the samples are all there is to tell.

    forward     mean = E_i[mean_i]    var = E_i[var_i] + Var_i[mean_i]    y = (x - mean) * invstd * weight + bias
    backward    s = sum(dy)    t = sum(dy * (x - mean))    dw = t * invstd    db = s, of each place's samples a part
                dx = (dy - s / n - (x - mean) * invstd**2 * t / n) * invstd * weight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopart.collectives import operator
from autopart.ir.graph import Dim, Ref, Value
from autopart.ir.placed import Cut
from autopart.rules.factor import Call, Rule, plus, times
from autopart.rules.split import is_even
from autopart.rules.writer import Sent, Spread, Writer

aten = torch.ops.aten


def _spread(write: Callable[[Writer, Call], None], flag: str, results: tuple[int, ...]) -> Callable[..., Spread | None]:
    """The samples of a norm in training (its argument `flag`) may be split; all places know `results` whole."""

    def found(call: Call, rule: Rule) -> Spread | None:
        samples = dict(rule.operands)["input"][0]
        if not call.args[flag] or len(samples) != 1 or not rule.factors[samples[0]].blocked:
            return None
        if write is _forward and call.has("running_mean") and len(call.results) == 3:
            return None  # it changes the running statistics in place
        size = rule.factors[samples[0]].size

        def even(cut: Cut, degree: int) -> bool:
            return is_even(size, cut.outer, cut.unit, degree)

        slot = next((name for name in ("save_mean", "weight", "running_mean") if call.has(name)), None)
        sends = () if slot is None else (Sent("all_reduce", slot),) * 2
        return Spread(samples[0], write, even, sends, whole=results)

    return found


class _Norm:
    """The values of one norm at one place: all in at least 32 bits, channels in vectors, or as wide as the input."""

    def __init__(self, w: Writer) -> None:
        self.w, self.given = w, w.refs["input"]
        self.dtype = torch.promote_types(self.given.dtype, torch.float32)
        self.dims = tuple(i for i in range(len(self.given.shape)) if i != 1)
        self.vector = Value("", (self.given.shape[1],), self.dtype)
        self.like = Value("", self.given.shape, self.dtype)
        self.x = self.cast(self.given)

    @property
    def count(self) -> Dim:
        """The elements of a channel at all places together."""
        total: Dim | None = self.w.degree
        for dim in self.dims:
            total = None if total is None else times(total, self.given.shape[dim])
        assert total is not None  # a dim has the batch once
        return total

    def cast(self, value: Value) -> Value:
        """A value in the dtype of the computation."""
        if value.dtype == self.dtype:
            return value
        return self.w(aten._to_copy.default, value, like=Value("", value.shape, self.dtype), dtype=self.dtype)

    def wide(self, vector: Value) -> Value:
        """A vector of channels as wide as the input."""
        shape = tuple(size if i == 1 else 1 for i, size in enumerate(self.given.shape))
        return self.w(aten.view.default, self.cast(vector), shape, like=Value("", shape, self.dtype))

    def both(self, one: Value, two: Value) -> Value:
        """Two vectors as one value."""
        pair = Value("", (2, *self.vector.shape), self.dtype)
        return self.w(aten.stack.default, (Ref(one.name), Ref(two.name)), like=pair)

    def at(self, pair: Value, number: int) -> Value:
        """One of two vectors."""
        return self.w(aten.select.int, pair, 0, number, like=self.vector)

    def factor(self, scale: Value) -> Value:
        """What the centred input is multiplied by, of each channel."""
        refs = self.w.refs
        return self.w(aten.mul.Tensor, self.cast(refs["weight"]), scale, like=scale) if "weight" in refs else scale

    def put(self, number: int, made: Value) -> None:
        """Let a value be result `number` of the call, if anything uses that."""
        out = self.w.outs[number] if number < len(self.w.outs) else None
        if out is not None:
            self.w.named(out, made)


def _forward(w: Writer, call: Call) -> None:
    n, args = _Norm(w), call.args
    variance, mean = (Value(w.unused(name), n.vector.shape, n.dtype) for name in ("var", "mean"))
    w.put(aten.var_mean.correction, (n.x, n.dims), (variance, mean), {"correction": 0})
    own = n.both(mean, variance)
    rows = Value("", (2 * w.degree, *n.vector.shape), n.dtype)
    gathered = w(operator("all_gather"), own, w.axis, 0, 1, (2,) * w.degree, like=rows)
    shape = (w.degree, 2, *n.vector.shape)
    every = w(aten.view.default, gathered, shape, like=Value("", shape, n.dtype))
    means = w(aten.mean.dim, every, (0,), like=own)
    between = w(aten.var.correction, every, (0,), like=own, correction=0)
    mean = n.at(means, 0)
    variance = w(aten.add.Tensor, n.at(means, 1), n.at(between, 0), like=n.vector)
    shifted = w(aten.add.Tensor, variance, args["eps"], like=n.vector)
    scale = w(aten.rsqrt.default, shifted, like=n.vector)
    centred = w(aten.sub.Tensor, n.x, n.wide(mean), like=n.like)
    y = w(aten.mul.Tensor, centred, n.wide(n.factor(scale)), like=n.like)
    if "bias" in w.refs:
        y = w(aten.add.Tensor, y, n.wide(w.refs["bias"]), like=n.like)
    if "running_mean" in w.refs:
        _running(n, call, mean, variance)
    for number, made in enumerate((y, mean, scale)):
        n.put(number, made)


def _running(n: _Norm, call: Call, mean: Value, variance: Value) -> None:
    """The statistics that evaluation uses, moved towards those of the batch; of the variance, the unbiased one."""
    w, momentum = n.w, call.args["momentum"]
    scaled = w(aten.mul.Tensor, variance, n.count, like=n.vector)
    unbiased = w(aten.div.Tensor, scaled, plus((n.count, -1)), like=n.vector)
    for number, slot, new in ((3, "running_mean", mean), (4, "running_var", unbiased)):
        kept = w(aten.mul.Tensor, n.cast(w.refs[slot]), 1 - momentum, like=n.vector)
        moved = w(aten.mul.Tensor, new, momentum, like=n.vector)
        n.put(number, w(aten.add.Tensor, kept, moved, like=n.vector))


def _backward(w: Writer, call: Call) -> None:
    n = _Norm(w)
    dy, scale = n.cast(w.refs["grad_out"]), n.cast(w.refs["save_invstd"])
    centred = w(aten.sub.Tensor, n.x, n.wide(w.refs["save_mean"]), like=n.like)
    product = w(aten.mul.Tensor, dy, centred, like=n.like)
    plain, moment = (w(aten.sum.dim_IntList, x, n.dims, like=n.vector) for x in (dy, product))
    if w.outs[0] is not None:
        own = n.both(plain, moment)
        sums = w(operator("all_reduce"), own, w.axis, "sum", like=own)
        means = w(aten.div.Tensor, sums, n.count, like=own)
        slope = w(aten.mul.Tensor, n.at(means, 1), w(aten.mul.Tensor, scale, scale, like=n.vector), like=n.vector)
        dx = w(aten.sub.Tensor, dy, n.wide(n.at(means, 0)), like=n.like)
        dx = w(aten.sub.Tensor, dx, w(aten.mul.Tensor, centred, n.wide(slope), like=n.like), like=n.like)
        n.put(0, w(aten.mul.Tensor, dx, n.wide(n.factor(scale)), like=n.like))
    n.put(1, w(aten.mul.Tensor, moment, scale, like=n.vector))
    n.put(2, plain)


NORMS: Mapping[str, Callable[[Call, Rule], Spread | None]] = {
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        _spread(_forward, "training", (1, 2, 3, 4)),
    ),
    "native_batch_norm_backward": _spread(_backward, "train", ()),
}
"""By the operator's name."""
