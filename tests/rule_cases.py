"""Calls of every elementary operator in the rule table, small enough to run, with sizes drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from autopart.bags import BAG_MAX, BAG_MAX_BACKWARD, BAG_SCALE_BACKWARD, BAG_SUM, BAG_SUM_BACKWARD
from autopart.scans import FROM_END

aten = torch.ops.aten

Case = Callable[["Sizes"], tuple[Any, ...]]
"""From drawn sizes to (op, *args) or (op, args, kwargs) with tensors among the arguments."""


class Sizes:
    """Draws sizes and tensors; the data come from a seeded generator, so a failing example replays."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw
        self._generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def size(self, low: int = 1, high: int = 4) -> int:
        return self._draw(st.integers(low, high))

    def flag(self) -> bool:
        return bool(self._draw(st.integers(0, 1)))

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.size(low, high)))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> torch.Tensor:
        """Numbers in (0.1, 0.9), where every elementary function is defined."""
        return 0.1 + 0.8 * torch.rand(shape, generator=self._generator, dtype=torch.float64)

    def index(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape) > 0


def _unary(op: Any, *rest: Any) -> Case:
    return lambda s: (op, s.positive(*s.shape()), *rest)


def _binary(op: Any, kind: str = "positive") -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(1)
        other = shape[s.size(0, 1) :] if s.flag() else tuple(1 if s.flag() else n for n in shape)
        made = {"positive": s.positive, "int": lambda *shape: s.index(7, *shape) + 1, "bool": s.mask}[kind]
        return (op, made(*shape), made(*other))

    return case


def _same(op: Any, count: int, *rest: Any) -> Case:
    """An operator of `count` tensors of one shape."""

    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(1)
        return (op, *(s.positive(*shape) for _ in range(count)), *rest)

    return case


def along(op: Any, *rest: Any, low: int = 1) -> Case:
    """An operator of one tensor and a dim, positive or negative."""

    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(low)
        return (op, s.positive(*shape), s.size(-len(shape), len(shape) - 1), *rest)

    return case


UNARY = """
abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad rad2deg digamma erf erfc erfinv exp exp2 expm1 floor frac
gelu hardsigmoid hardswish hardtanh isfinite isinf isnan lgamma log log10 log1p log2 logit mish nan_to_num reciprocal
relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus special_entr special_erfcx special_i0
special_i1 special_log_ndtr special_ndtr special_ndtri sqrt square tan tanh trunc celu elu hardshrink leaky_relu
softshrink neg positive clone detach alias lift_fresh_copy conj conj_physical resolve_conj resolve_neg logical_not
log_sigmoid_forward real _conj_physical angle i0 isneginf isposinf special_i0e special_i1e
"""
BINARY = """
atan2 copysign eq floor_divide fmax fmin fmod ge gt heaviside hypot le logaddexp logaddexp2 lt maximum minimum ne pow
remainder special_xlog1py xlogy polar mul add sub div logical_and logical_or logical_xor rsub complex float_power igamma
igammac ldexp nextafter special_zeta
"""
INTEGER = """
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm __lshift__ __rshift__ __xor__
"""
GRADIENTS: Mapping[str, tuple[Any, ...]] = {
    "gelu_backward": (), "hardshrink_backward": (0.5,),
    "hardsigmoid_backward": (), "hardswish_backward": (), "hardtanh_backward": (0.2, 0.7),
    "leaky_relu_backward": (0.1, False), "logit_backward": (), "mish_backward": (), "sigmoid_backward": (),
    "silu_backward": (), "softplus_backward": (1.0, 20.0), "softshrink_backward": (0.5,), "tanh_backward": (),
    "threshold_backward": (0.5,),
}  # fmt: skip


def _overload(name: str) -> Any:
    packet = getattr(aten, name)
    return packet.default if "default" in packet.overloads() else packet.Tensor


def _binary_op(name: str) -> Any:
    packet = getattr(aten, name)
    return next(getattr(packet, o) for o in ("Tensor_Tensor", "Tensor", "default", "self") if o in packet.overloads())


def _addcmul(op: Any) -> Case:
    return lambda s: (op, *(s.positive(*shape) for shape in [(3, 2), (3, 1), (2,)]))


def _where(s: Sizes) -> tuple[Any, ...]:
    shape = s.shape(1)
    return aten.where.self, s.mask(*shape), s.normal(*shape), s.normal(*shape[1:])


def _view(s: Sizes) -> tuple[Any, ...]:
    factors = [s.size(1, 4) for _ in range(4)]

    def grouped() -> list[int]:
        shape: list[int] = []
        for size in factors:
            if shape and s.flag():
                shape[-1] *= size
            else:
                shape += [1] * s.size(0, 1) + [size]
        return shape

    target = grouped()
    if s.flag():
        target[s.size(0, len(target) - 1)] = -1
    return aten.view.default, s.normal(*grouped()), target


def _odd_view(s: Sizes) -> tuple[Any, ...]:
    return aten.view.default, s.normal(3, 6, 4, 2), [3, 4, 6, 2]


def _expand(s: Sizes) -> tuple[Any, ...]:
    shape = s.shape(1)
    target = [s.size() for _ in range(s.size(0, 1))] + [n if n > 1 else s.size() for n in shape]
    if s.flag():
        target[-1] = -1
    return aten.expand.default, s.normal(*shape), target


def _repeat(s: Sizes) -> tuple[Any, ...]:
    return aten.repeat.default, s.normal(3, s.size()), [s.size(), s.size(), s.size()]


def _squeeze(s: Sizes) -> tuple[Any, ...]:
    return aten.squeeze.dim, s.normal(s.size(1, 2), 3, s.size(1, 2)), s.size(0, 2)


def _slice(s: Sizes) -> tuple[Any, ...]:
    ends = (2**63 - 1, 3, 4, 9, None)
    return aten.slice.Tensor, s.normal(3, 4), 1, s.size(0, 1), ends[s.size(0, 4)], s.size(1, 2)


def _split(s: Sizes) -> tuple[Any, ...]:
    return aten.split.Tensor, s.normal(3, 6, 2), 2 + s.size(0, 2), 1


def _split_with_sizes(s: Sizes) -> tuple[Any, ...]:
    sizes = [2, 2, 2] if s.flag() else [1, 2, 4]
    return aten.split_with_sizes.default, s.normal(3, sum(sizes), 2), sizes, -2


def _two_dims(s: Sizes) -> tuple[int, int]:
    """Two dims of four, in any order."""
    first = s.size(0, 3)
    return first, (first + s.size(1, 3)) % 4


def _unfold_backward(s: Sizes) -> tuple[Any, ...]:
    length, step = s.size(4, 6), s.size(1, 2)
    windows = (length - 3) // step + 1
    return aten.unfold_backward.default, s.normal(2, windows, 3, 3), [2, length, 3], 1, 3, step


def _searchsorted(s: Sizes) -> tuple[Any, ...]:
    if s.flag():
        return aten.searchsorted.Tensor, s.positive(5).sort().values, s.positive(*s.shape(1))
    rows = s.size()
    return aten.searchsorted.Tensor, s.positive(rows, 5).sort(-1).values, s.positive(rows, s.size())


def _cat(s: Sizes) -> tuple[Any, ...]:
    n, even = s.size(), s.flag()
    return aten.cat.default, [s.normal(3, n, 2), s.normal(3, n if even else n + 1, 2)], 1 - 3 * s.size(0, 1)


def _pad(s: Sizes) -> tuple[Any, ...]:
    return aten.constant_pad_nd.default, s.normal(2, 3, 4), [1, 0, 0, 0] if s.flag() else [0, 2, -1, 1], 1.5


def _bags(s: Sizes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices of four bags, and numbers to multiply the rows by."""
    indices = s.index(5, 4, s.size())
    return indices, s.normal(*indices.shape) if s.flag() else None


def _gather(s: Sizes) -> tuple[Any, ...]:
    rows, columns = s.size(2), s.size(2)
    return aten.gather.default, s.normal(rows, columns), 1, s.index(columns, rows - s.size(0, 1), s.size())


def _scatter(op: Any, src: str, **kwargs: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        rows, columns, picks = s.size(2), s.size(3, 5), s.size(1, 3)
        # each row writes to places of its own, so that what is written does not depend on the order
        index = torch.stack([torch.randperm(columns)[:picks] for _ in range(rows)])
        last = 2.5 if src == "value" else s.normal(rows, picks)
        how = (src,) if src in ("sum", "amax") else ()
        return op, s.normal(rows, columns), 1, index, last, *how

    return case


def _index(op: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        form = s.size(0, 2)
        one, two = s.index(4, s.size(), s.size()), s.index(4, s.size(1, 1), 1)
        return op, s.normal(4, 4, 4), [[None, one], [one, two], [one, None, two]][form]

    return case


def _index_put(op: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        one = s.index(4, s.size(1, 6))
        indices = [None, one] if s.flag() else [one]
        values = s.normal(4, len(one), 4) if len(indices) == 2 else s.normal(len(one), 1, 4)
        accumulate = s.flag()
        if not accumulate:
            indices[-1] = torch.randperm(4)[: len(one)]
            values = values.narrow(len(indices) - 1, 0, len(indices[-1]))
        return op, s.normal(4, 4, 4), indices, values, accumulate

    return case


def _matrices(op: Any, *specs: str) -> Case:
    """Operands by the letters of their dims."""

    def case(s: Sizes) -> tuple[Any, ...]:
        sizes = {letter: s.size() for letter in sorted(set("".join(specs)))}
        return op, *(s.normal(*(sizes[letter] for letter in spec)) for spec in specs)

    return case


def _reduce(op: Any, dims: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(1)
        x = s.mask(*shape) if op in (aten.any.dims, aten.all.dims) else s.normal(*shape)
        place = s.size(-len(shape), len(shape) - 1)
        return op, x, [place] if dims else place, s.flag()

    return case


def _statistic(op: Any) -> Case:
    return lambda s: (op, (s.normal(3, s.size(2), 2), [s.size(0, 2)]), {"correction": 0, "keepdim": s.flag()})


def _filled(op: Any, *rest: Any) -> Case:
    return lambda s: (op, [s.size(), s.size()], *rest)


def _new(op: Any, *rest: Any) -> Case:
    return lambda s: (op, s.normal(2), [s.size(), s.size()], *rest)


ELEMENTARY: Mapping[str, Case] = {
    **{name: _unary(_overload(name)) for name in UNARY.split()},
    **{name: _binary(_binary_op(name)) for name in BINARY.split()},
    **{name: _binary(_binary_op(name), "int") for name in INTEGER.split()},
    **{name: _same(_overload(name), 2, *rest) for name, rest in GRADIENTS.items()},
    "elu_backward": lambda s: (aten.elu_backward.default, s.normal(3, 2), 1.0, 1.0, 1.0, False, s.normal(3, 2)),
    "bitwise_not": lambda s: (aten.bitwise_not.default, s.index(9, *s.shape())),
    "clamp": _unary(aten.clamp.default, 0.3, 0.6),
    "clamp_max": _unary(aten.clamp_max.default, 0.6),
    "clamp_min": _unary(aten.clamp_min.default, 0.3),
    "threshold": _unary(aten.threshold.default, 0.5, 0.1),
    "polygamma": lambda s: (aten.polygamma.default, 2, s.positive(*s.shape())),
    "_conj": lambda s: (aten._conj.default, torch.complex(s.normal(3, 2), s.normal(3, 2))),
    "imag": lambda s: (aten.imag.default, torch.complex(s.normal(3, 2), s.normal(3, 2))),
    "rrelu_with_noise_functional": _same(aten.rrelu_with_noise_functional.default, 2, 0.1, 0.3, False),
    "rrelu_with_noise_backward": _same(aten.rrelu_with_noise_backward.default, 3, 0.1, 0.3, True, False),
    "log_sigmoid_backward": _same(aten.log_sigmoid_backward.default, 3),
    "native_dropout": _unary(aten.native_dropout.default, 0.0, True),
    "native_dropout_backward": lambda s: (aten.native_dropout_backward.default, s.normal(3, 2), s.mask(3, 2), 2.0),
    "_prelu_kernel": _binary(aten._prelu_kernel.default),
    "_prelu_kernel_backward": _same(aten._prelu_kernel_backward.default, 3),
    "add scaled": lambda s: (aten.add.Tensor, (s.normal(3, 2), s.normal(2)), {"alpha": 3}),
    "rsub number": _unary(aten.rsub.Scalar, 2.5),
    "add number": _unary(aten.add.Tensor, 2.5),
    "div rounded": lambda s: (aten.div.Tensor_mode, (s.normal(3, 2), s.positive(2)), {"rounding_mode": "floor"}),
    "_to_copy": lambda s: (aten._to_copy.default, (s.normal(*s.shape()),), {"dtype": torch.float32}),
    "_to_copy to int": lambda s: (aten._to_copy.default, (s.normal(3),), {"dtype": torch.int64}),
    "_to_copy of int": lambda s: (aten._to_copy.default, (s.index(9, 3),), {"dtype": torch.float64}),
    "where.self": _where,
    "where.ScalarOther": lambda s: (aten.where.ScalarOther, s.mask(3, 2), s.normal(3, 2), 1.5),
    "where.ScalarSelf": lambda s: (aten.where.ScalarSelf, s.mask(3, 2), 1.5, s.normal(2)),
    "where.Scalar": lambda s: (aten.where.Scalar, s.mask(3, 2), 1.5, 2.0),
    "masked_fill": lambda s: (aten.masked_fill.Scalar, s.normal(3, 2), s.mask(3, 1), 1.5),
    "addcmul": _addcmul(aten.addcmul.default),
    "addcdiv": _addcmul(aten.addcdiv.default),
    "lerp": lambda s: (aten.lerp.Tensor, s.normal(3, 2), s.normal(3, 2), s.normal(3, 1)),
    "view_as_complex": lambda s: (aten.view_as_complex.default, s.normal(*s.shape(1), 2)),
    "view_as_real": lambda s: (aten.view_as_real.default, torch.complex(s.normal(3, 2), s.normal(3, 2))),
    "fill": lambda s: (aten.fill.Tensor, s.normal(*s.shape()), s.normal()),
    "copy": lambda s: (aten.copy.default, s.normal(3, 2), s.normal(2)),
    "zeros_like": _unary(aten.zeros_like.default),
    "ones_like": _unary(aten.ones_like.default),
    "full_like": _unary(aten.full_like.default, 2.5),
    "view.default": _view,
    "view of a group": _odd_view,
    "_unsafe_view": lambda s: (aten._unsafe_view.default, *_view(s)[1:]),
    "reshape": lambda s: (aten.reshape.default, *_view(s)[1:]),
    "_reshape_copy": lambda s: (aten._reshape_copy.default, *_view(s)[1:]),
    "expand": _expand,
    "repeat": _repeat,
    "permute": lambda s: (aten.permute.default, s.normal(2, s.size(), 3), [2, -3, 1]),
    "t": lambda s: (aten.t.default, s.normal(*s.shape(0, 2))),
    "transpose": lambda s: (aten.transpose.int, s.normal(2, s.size(), 3), s.size(-3, 2), s.size(0, 2)),
    "unsqueeze": lambda s: (aten.unsqueeze.default, s.normal(2, 3), s.size(-3, 2)),
    "squeeze": _squeeze,
    "squeeze all": lambda s: (aten.squeeze.default, s.normal(1, s.size(), 3)),
    "slice": _slice,
    "slice_backward": lambda s: (aten.slice_backward.default, s.normal(3, 2, 2), [3, 5, 2], 1, 1, 4, 2),
    "slice_scatter": lambda s: (aten.slice_scatter.default, s.normal(3, 5), s.normal(3, 2), 1, 1, 3),
    "select": lambda s: (aten.select.int, s.normal(3, 4), s.size(-2, 1), s.size(-3, 2)),
    "select_backward": lambda s: (aten.select_backward.default, s.normal(3, 2), [3, 4, 2], 1, 2),
    "select_scatter": lambda s: (aten.select_scatter.default, s.normal(3, 4), s.normal(3), 1, 2),
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "unsafe_split": lambda s: (aten.unsafe_split.Tensor, *_split(s)[1:]),
    "unsafe_split_with_sizes": lambda s: (aten.unsafe_split_with_sizes.default, *_split_with_sizes(s)[1:]),
    "diag_embed": lambda s: (aten.diag_embed.default, s.normal(2, s.size(), 3), s.size(0, 2) - 1, *_two_dims(s)),
    "unfold": lambda s: (aten.unfold.default, s.normal(2, s.size(4, 6), 3), s.size(0, 1) * 3 - 2, 3, s.size(1, 2)),
    "unfold_backward": _unfold_backward,
    "unbind": along(aten.unbind.int),
    "cat": _cat,
    "cat with an empty": lambda s: (aten.cat.default, [s.normal(0), s.normal(2, 3)], 1),
    "stack": lambda s: (aten.stack.default, [s.normal(3, 2)] * s.size(1, 3), s.size(-3, 2)),
    "flip": lambda s: (aten.flip.default, s.normal(3, s.size(), 2), [s.size(-3, 2)]),
    "roll": lambda s: (aten.roll.default, s.normal(3, s.size(), 2), [1], [s.size(0, 2)] if s.flag() else []),
    "cumsum": along(aten.cumsum.default),
    "autopart.cumsum_from_end": along(FROM_END),
    "cumprod": along(aten.cumprod.default),
    "logcumsumexp": along(aten.logcumsumexp.default),
    "cummax": along(aten.cummax.default),
    "cummin": along(aten.cummin.default),
    "sort": along(aten.sort.default),
    "argsort": along(aten.argsort.default),
    "triu": lambda s: (aten.triu.default, s.normal(s.size(), 3, 4), 1),
    "tril": lambda s: (aten.tril.default, s.normal(s.size(), 3, 4)),
    "constant_pad_nd": _pad,
    "diagonal": lambda s: (aten.diagonal.default, s.normal(3, 4, s.size()), 1, 0, s.size(1, 2)),
    "pixel_shuffle": lambda s: (aten.pixel_shuffle.default, s.normal(s.size(), 4 * s.size(1, 2), 2, s.size()), 2),
    "pixel_unshuffle": lambda s: (aten.pixel_unshuffle.default, s.normal(s.size(), s.size(), 4, 2), 2),
    "sum": _reduce(aten.sum.dim_IntList, True),
    "sum of all": _unary(aten.sum.default),
    "nansum": lambda s: (aten.nansum.default, s.normal(*s.shape())),
    "count_nonzero": lambda s: (aten.count_nonzero.default, s.index(3, 3, s.size())),
    "mean": _reduce(aten.mean.dim, True),
    "mean of all": _unary(aten.mean.default),
    "prod": _reduce(aten.prod.dim_int, False),
    "amax": _reduce(aten.amax.default, True),
    "amin": _reduce(aten.amin.default, True),
    "any": _reduce(aten.any.dims, True),
    "all": _reduce(aten.all.dims, True),
    "max.default": _unary(aten.max.default),
    "min.default": _unary(aten.min.default),
    **{name: along(getattr(aten, name).dim) for name in ("median",)},
    "max.dim": along(aten.max.dim),
    "min.dim": along(aten.min.dim),
    "mode": along(aten.mode.default),
    "argmax": along(aten.argmax.default),
    "argmin": along(aten.argmin.default),
    "kthvalue": lambda s: (aten.kthvalue.default, s.normal(3, s.size(2)), 1, s.size(0, 1) - 2),
    "std": _statistic(aten.std.correction),
    "var": _statistic(aten.var.correction),
    "std_mean": _statistic(aten.std_mean.correction),
    "var_mean": _statistic(aten.var_mean.correction),
    "logsumexp": _reduce(aten.logsumexp.default, True),
    "linalg_vector_norm": lambda s: (aten.linalg_vector_norm.default, s.normal(3, 2), 2, [s.size(0, 1)], s.flag()),
    "norm": lambda s: (aten.norm.ScalarOpt_dim, s.normal(3, 2), 2, [s.size(0, 1)], s.flag()),
    "histc": lambda s: (aten.histc.default, s.positive(*s.shape(1)), 3, *((0.2, 0.7) if s.flag() else ())),
    "topk": lambda s: (aten.topk.default, s.normal(3, s.size(3)), 2, s.size(0, 1) - 2 if s.flag() else -1),
    "mm": _matrices(aten.mm.default, "mk", "kn"),
    "bmm": _matrices(aten.bmm.default, "bmk", "bkn"),
    "mv": _matrices(aten.mv.default, "mk", "k"),
    "dot": _matrices(aten.dot.default, "k", "k"),
    "vdot": _matrices(aten.vdot.default, "k", "k"),
    "addmm": _matrices(aten.addmm.default, "n", "mk", "kn"),
    "addmv": _matrices(aten.addmv.default, "m", "mk", "k"),
    "addr": _matrices(aten.addr.default, "mn", "m", "n"),
    "addbmm": _matrices(aten.addbmm.default, "mn", "bmk", "bkn"),
    "baddbmm": _matrices(aten.baddbmm.default, "bmn", "bmk", "bkn"),
    "linear": _matrices(aten.linear.default, "abk", "nk", "n"),
    "embedding": lambda s: (aten.embedding.default, s.normal(5, s.size()), s.index(5, *s.shape())),
    "embedding_dense_backward": lambda s: (
        aten.embedding_dense_backward.default, s.normal(2, 3, 4), s.index(5, 2, 3), 5, -1, s.flag()
    ),
    "autopart.bag_sum": lambda s: (
        BAG_SUM, s.normal(5, s.size()), *_bags(s), s.index(5, 1).item() if s.flag() else -1
    ),
    "autopart.bag_sum_backward": lambda s: (
        BAG_SUM_BACKWARD, s.normal(4, s.size()), *_bags(s), 5, s.index(5, 1).item() if s.flag() else -1
    ),
    "autopart.bag_scale_backward": lambda s: (
        BAG_SCALE_BACKWARD, s.normal(4, 3), s.normal(5, 3), s.index(5, 4, s.size()), 2 if s.flag() else -1
    ),
    "autopart.bag_max": lambda s: (BAG_MAX, s.normal(5, s.size()), s.index(5, 4, s.size()), 2 if s.flag() else -1),
    "autopart.bag_max_backward": lambda s: (BAG_MAX_BACKWARD, s.normal(4, 3), s.index(6, 4, 3) - 1, 5),
    "gather": _gather,
    "scatter.src": _scatter(aten.scatter.src, "src"),
    "scatter.value": _scatter(aten.scatter.value, "value"),
    "scatter.reduce": lambda s: (aten.scatter.reduce, _scatter(None, "src")(s)[1:], {"reduce": "add"}),
    "scatter.value_reduce": lambda s: (aten.scatter.value_reduce, _scatter(None, "value")(s)[1:], {"reduce": "add"}),
    "scatter_reduce": _scatter(aten.scatter_reduce.two, "amax"),
    "scatter_add": lambda s: (
        aten.scatter_add.default, s.normal(3, 4), 1, s.index(4, 3, 3), s.normal(3, 3 + s.size(0, 1))
    ),
    "index_select": lambda s: (aten.index_select.default, s.normal(3, 4, 2), 1, s.index(4, s.size())),
    "index_add": lambda s: (aten.index_add.default, s.normal(3, 4, 2), 1, s.index(4, 3), s.normal(3, 3, 2)),
    "index_copy": lambda s: (aten.index_copy.default, s.normal(3, 4, 2), 1, torch.tensor([2, 0]), s.normal(3, 2, 2)),
    "index_fill": lambda s: (aten.index_fill.int_Scalar, s.normal(3, 4, 2), s.size(0, 1) * 3 - 2, s.index(4, 2), 1.5),
    "bucketize": lambda s: (aten.bucketize.Tensor, s.positive(*s.shape()), s.positive(4).sort().values),
    "searchsorted": _searchsorted,
    "index": _index(aten.index.Tensor),
    "_unsafe_index": _index(aten._unsafe_index.Tensor),
    "index_put": _index_put(aten.index_put.default),
    "_unsafe_index_put": _index_put(aten._unsafe_index_put.default),
    "full": _filled(aten.full.default, 2.5),
    "zeros": _filled(aten.zeros.default),
    "ones": _filled(aten.ones.default),
    "new_full": _new(aten.new_full.default, 2.5),
    "new_zeros": _new(aten.new_zeros.default),
    "new_ones": _new(aten.new_ones.default),
    "arange": lambda s: (aten.arange.start_step, 1, 1 + s.size(2), 1),
    "linspace": lambda s: (aten.linspace.default, 0.0, 1.0, s.size(2)),
    "eye": lambda s: (aten.eye.default, s.size(2)),
    "scalar_tensor": lambda s: (aten.scalar_tensor.default, 2.5),
}  # fmt: skip
