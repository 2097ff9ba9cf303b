"""A call of every operator in the rule table, small enough to run, with sizes drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

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


def _dim(op: Any, *rest: Any, low: int = 1) -> Case:
    """An operator of one tensor and a dim, positive or negative."""

    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(low)
        return (op, s.positive(*shape), s.size(-len(shape), len(shape) - 1), *rest)

    return case


UNARY = """abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad rad2deg digamma erf erfc erfinv exp exp2 expm1 floor frac
gelu hardsigmoid hardswish hardtanh isfinite isinf isnan lgamma log log10 log1p log2 logit mish nan_to_num reciprocal relu
relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus special_entr special_erfcx special_i0 special_i1
special_log_ndtr special_ndtr special_ndtri sqrt square tan tanh trunc celu elu hardshrink leaky_relu softshrink
neg positive clone detach alias lift_fresh_copy conj conj_physical resolve_conj resolve_neg logical_not log_sigmoid_forward
real _conj_physical""".split()
BINARY = """atan2 copysign eq floor_divide fmax fmin fmod ge gt heaviside hypot le logaddexp logaddexp2 lt maximum minimum ne
pow remainder special_xlog1py xlogy polar mul add sub div logical_and logical_or logical_xor rsub""".split()
INTEGER = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift".split()
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


def _cat(s: Sizes) -> tuple[Any, ...]:
    n, even = s.size(), s.flag()
    return aten.cat.default, [s.normal(3, n, 2), s.normal(3, n if even else n + 1, 2)], 1 - 3 * s.size(0, 1)


def _pad(s: Sizes) -> tuple[Any, ...]:
    return aten.constant_pad_nd.default, s.normal(2, 3, 4), [1, 0, 0, 0] if s.flag() else [0, 2, -1, 1], 1.5


def _norm(op: Any, backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        lead, inner = s.shape(1, 2), s.shape(1, 2)
        x, w, b = s.normal(*lead, *inner), s.normal(*inner), s.normal(*inner)
        _, mean, rstd = aten.native_layer_norm(x, inner, w, b, 1e-5)
        if not backward:
            return op, x, list(inner), w, b, 1e-5
        return op, s.normal(*x.shape), x, list(inner), mean, rstd, w, b, [True] * 3

    return case


def _rms_norm(s: Sizes) -> tuple[Any, ...]:
    lead, inner = s.shape(1, 2), s.shape(1, 2)
    return aten._fused_rms_norm.default, s.normal(*lead, *inner), list(inner), s.normal(*inner), 1e-5


def _group(backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        n, g, c, y, x = s.size(), s.size(1, 3), s.size(1, 2), s.size(), s.size(2, 3)
        data, w = s.normal(n, g * c, y, x), s.normal(g * c)
        if not backward:
            return aten.native_group_norm.default, data, w, s.normal(g * c), n, g * c, y * x, g, 1e-5
        _, mean, rstd = aten.native_group_norm(data, w, None, n, g * c, y * x, g, 1e-5)
        grad = s.normal(*data.shape)
        return aten.native_group_norm_backward.default, grad, data, mean, rstd, w, n, g * c, y * x, g, [True] * 3

    return case


def _batch_norm(op: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        c = s.size()
        x, w, b, m, v = s.normal(s.size(2), c, 3), s.normal(c), s.normal(c), s.normal(c), s.positive(c)
        if "no_training" in str(op):
            return op, x, w, b, m, v, 0.1, 1e-5
        return op, x, w, b, m, v, s.flag(), 0.1, 1e-5

    return case


def _batch_norm_backward(s: Sizes) -> tuple[Any, ...]:
    c, train = s.size(), s.flag()
    x, w, m, v = s.normal(s.size(2), c, 3), s.normal(c), s.normal(c), s.positive(c)
    _, mean, rstd = aten.native_batch_norm(x, w, None, m, v, train, 0.1, 1e-5)
    return aten.native_batch_norm_backward.default, s.normal(*x.shape), x, w, m, v, mean, rstd, train, 1e-5, [True] * 3


def _softmax_backward(op: Any, forward: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(1)
        dim = s.size(-len(shape), len(shape) - 1)
        return op, s.normal(*shape), forward(s.normal(*shape), dim, False), dim, torch.float64

    return case


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


def _attention(op: Any, backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        b, h, r, q, k = s.size(), s.size(), s.size(1, 2), s.size(), s.size()
        query, key, value = s.normal(b, h * r, q, 8), s.normal(b, h, k, 8), s.normal(b, h, k, 8)
        causal = s.flag()
        mask = (
            {}
            if causal
            else {"attn_mask": s.normal(*[(q, k), (1, 1, q, k), (b, 1, q, k), (b, h * r, q, k)][s.size(0, 3)])}
        )
        if op is aten._scaled_dot_product_attention_math.default:
            return op, (query, key, value), {**mask, "is_causal": causal, "enable_gqa": True}
        args = (query, key, value, 0.0, causal)
        if not backward:
            return op, args, mask
        out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(*args, **mask)
        return op, (s.normal(*out.shape), query, key, value, out, statistics, 0.0, causal), mask

    return case


def _conv(backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        n, g, i, o, transposed = s.size(), s.size(1, 3), s.size(1, 2), s.size(1, 2), s.flag()
        x = s.normal(n, g * i, 5, 4)
        w = s.normal(g * i, o, 3, 2) if transposed else s.normal(g * o, i, 3, 2)
        rest = ([1, 1], [1, 0], [1, 1], transposed, [0, 0], g)
        b = s.normal(g * o)
        if not backward:
            return aten.convolution.default, x, w, b, *rest
        grad = s.normal(*aten.convolution(x, w, b, *rest).shape)
        return aten.convolution_backward.default, grad, x, w, [g * o], *rest, [True] * 3

    return case


def _image(op: Any, *rest: Any, rank: int = 2) -> Case:
    return lambda s: (op, s.normal(s.size(), s.size(), *[6, 4, 4][:rank]), *rest)


def _image_backward(op: Any, forward: Any, *rest: Any, rank: int = 2, last: str = "") -> Case:
    """A backward of (gradient, input, *rest), with the indices that the forward returns last if asked."""

    def case(s: Sizes) -> tuple[Any, ...]:
        x = s.normal(s.size(), s.size(), *[6, 4, 4][:rank])
        made = forward(x)
        out = made[0] if isinstance(made, tuple) else made
        return op, s.normal(*out.shape), x, *rest, *([made[1]] if last else [])

    return case


def _upsample(name: str, rank: int) -> dict[str, Case]:
    align = () if "nearest" in name else (False,)
    scales = (None,) * rank
    small, large = [3, 2, 2][:rank], [6, 4, 4][:rank]

    def backward(s: Sizes) -> tuple[Any, ...]:
        n, c = s.size(), s.size()
        op = getattr(aten, f"{name}_backward").default
        return op, s.normal(n, c, *large), large, [n, c, *small], *align, *scales

    def forward(s: Sizes) -> tuple[Any, ...]:
        return getattr(aten, name).default, s.normal(s.size(), s.size(), *small), large, *align, *scales

    def vector(s: Sizes) -> tuple[Any, ...]:
        return getattr(aten, name).vec, s.normal(s.size(), s.size(), *small), large, *align, None

    return {f"{name}.default": forward, f"{name}.vec": vector, f"{name}_backward.default": backward}


def _loss(op: Any, *rest: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        shape = s.shape(1)
        more = (None,) * ("entropy" in str(op)) + (None,) * ("logits" in str(op))
        extra = rest if not more else ()
        return op, s.positive(*shape), s.positive(*shape), *more, s.size(0, 2), *extra

    return case


def _loss_backward(op: Any, *rest: Any) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        shape, how = s.shape(1), s.size(0, 2)
        more = (None,) if "entropy" in str(op) else ()
        return op, s.normal(*(shape if how == 0 else ())), s.positive(*shape), s.positive(*shape), *more, how, *rest

    return case


def _nll(backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        n, c, how = s.size(), s.size(2, 4), s.size(0, 2)
        x, target, weight = s.normal(n, c), s.index(c, n), s.positive(c)
        target[0] = -100 if n > 1 else target[0]
        out, total = aten.nll_loss_forward(x, target, weight, how, -100)
        if not backward:
            return aten.nll_loss_forward.default, x, target, weight, how, -100
        return aten.nll_loss_backward.default, s.normal(*out.shape), x, target, weight, how, -100, total

    return case


def _weight_norm(backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        dim = s.size(0, 1) * 2  # the kernel takes the first or the last dim
        v = s.normal(s.size(2), s.size(), s.size(2))
        shape = [n if i == dim else 1 for i, n in enumerate(v.shape)]
        g = s.normal(*shape)
        if not backward:
            return aten._weight_norm_interface.default, v, g, dim
        norms = aten._weight_norm_interface(v, g, dim)[1]
        return aten._weight_norm_interface_backward.default, s.normal(*v.shape), v, g, norms, dim

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


MAX2 = ([2, 2], [2, 2], [0, 0], [1, 1], False)
MAX3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
AVG2 = ([2, 2], [2, 2], [0, 0], False, True, None)
AVG3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)

CASES: Mapping[str, Case] = {
    **{name: _unary(_overload(name)) for name in UNARY},
    **{name: _binary(_binary_op(name)) for name in BINARY},
    **{name: _binary(_binary_op(name), "int") for name in INTEGER},
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
    "log_sigmoid_backward": lambda s: (aten.log_sigmoid_backward.default, s.normal(3, 2), s.normal(3, 2), s.positive(3, 2)),
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
    "unbind": _dim(aten.unbind.int),
    "cat": _cat,
    "cat with an empty": lambda s: (aten.cat.default, [s.normal(0), s.normal(2, 3)], 1),
    "stack": lambda s: (aten.stack.default, [s.normal(3, 2)] * s.size(1, 3), s.size(-3, 2)),
    "flip": lambda s: (aten.flip.default, s.normal(3, s.size(), 2), [s.size(-3, 2)]),
    "roll": lambda s: (aten.roll.default, s.normal(3, s.size(), 2), [1], [s.size(0, 2)] if s.flag() else []),
    "cumsum": _dim(aten.cumsum.default),
    "cumprod": _dim(aten.cumprod.default),
    "logcumsumexp": _dim(aten.logcumsumexp.default),
    "sort": _dim(aten.sort.default),
    "argsort": _dim(aten.argsort.default),
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
    **{name: _dim(getattr(aten, name).dim) for name in ("median",)},
    "max.dim": _dim(aten.max.dim),
    "min.dim": _dim(aten.min.dim),
    "mode": _dim(aten.mode.default),
    "argmax": _dim(aten.argmax.default),
    "argmin": _dim(aten.argmin.default),
    "kthvalue": lambda s: (aten.kthvalue.default, s.normal(3, s.size(2)), 1, s.size(0, 1) - 2),
    "std": _statistic(aten.std.correction),
    "var": _statistic(aten.var.correction),
    "std_mean": _statistic(aten.std_mean.correction),
    "var_mean": _statistic(aten.var_mean.correction),
    "logsumexp": _reduce(aten.logsumexp.default, True),
    "linalg_vector_norm": lambda s: (aten.linalg_vector_norm.default, s.normal(3, 2), 2, [s.size(0, 1)], s.flag()),
    "norm": lambda s: (aten.norm.ScalarOpt_dim, s.normal(3, 2), 2, [s.size(0, 1)], s.flag()),
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
    "native_layer_norm": _norm(aten.native_layer_norm.default, False),
    "native_layer_norm_backward": _norm(aten.native_layer_norm_backward.default, True),
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group(False),
    "native_group_norm_backward": _group(True),
    "native_batch_norm": _batch_norm(aten.native_batch_norm.default),
    "_native_batch_norm_legit": _batch_norm(aten._native_batch_norm_legit.default),
    "_native_batch_norm_legit_functional": _batch_norm(aten._native_batch_norm_legit_functional.default),
    "_native_batch_norm_legit_no_training": _batch_norm(aten._native_batch_norm_legit_no_training.default),
    "native_batch_norm_backward": _batch_norm_backward,
    "_softmax": _dim(aten._softmax.default, False),
    "_log_softmax": _dim(aten._log_softmax.default, False),
    "_safe_softmax": _dim(aten._safe_softmax.default),
    "_softmax_backward_data": _softmax_backward(aten._softmax_backward_data.default, aten._softmax),
    "_log_softmax_backward_data": _softmax_backward(aten._log_softmax_backward_data.default, aten._log_softmax),
    "embedding": lambda s: (aten.embedding.default, s.normal(5, s.size()), s.index(5, *s.shape())),
    "embedding_dense_backward": lambda s: (
        aten.embedding_dense_backward.default, s.normal(2, 3, 4), s.index(5, 2, 3), 5, -1, s.flag()
    ),
    "gather": _gather,
    "scatter.src": _scatter(aten.scatter.src, "src"),
    "scatter.value": _scatter(aten.scatter.value, "value"),
    "scatter.reduce": lambda s: (aten.scatter.reduce, _scatter(None, "src")(s)[1:], {"reduce": "add"}),
    "scatter.value_reduce": lambda s: (aten.scatter.value_reduce, _scatter(None, "value")(s)[1:], {"reduce": "add"}),
    "scatter_reduce": _scatter(aten.scatter_reduce.two, "amax"),
    "scatter_add": lambda s: (aten.scatter_add.default, s.normal(3, 4), 1, s.index(4, 3, 3), s.normal(3, 3 + s.size(0, 1))),
    "index_select": lambda s: (aten.index_select.default, s.normal(3, 4, 2), 1, s.index(4, s.size())),
    "index_add": lambda s: (aten.index_add.default, s.normal(3, 4, 2), 1, s.index(4, 3), s.normal(3, 3, 2)),
    "index_copy": lambda s: (aten.index_copy.default, s.normal(3, 4, 2), 1, torch.tensor([2, 0]), s.normal(3, 2, 2)),
    "index": _index(aten.index.Tensor),
    "_unsafe_index": _index(aten._unsafe_index.Tensor),
    "index_put": _index_put(aten.index_put.default),
    "_unsafe_index_put": _index_put(aten._unsafe_index_put.default),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(aten._scaled_dot_product_flash_attention_for_cpu.default, False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, True
    ),
    "_scaled_dot_product_attention_math": _attention(aten._scaled_dot_product_attention_math.default, False),
    "convolution": _conv(False),
    "convolution_backward": _conv(True),
    "max_pool2d_with_indices": _image(aten.max_pool2d_with_indices.default, *MAX2),
    "max_pool3d_with_indices": _image(aten.max_pool3d_with_indices.default, *MAX3, rank=3),
    "avg_pool2d": _image(aten.avg_pool2d.default, *AVG2),
    "avg_pool3d": _image(aten.avg_pool3d.default, *AVG3, rank=3),
    "_adaptive_avg_pool2d": _image(aten._adaptive_avg_pool2d.default, [3, 2]),
    "_adaptive_avg_pool3d": _image(aten._adaptive_avg_pool3d.default, [3, 2, 2], rank=3),
    "adaptive_max_pool2d": _image(aten.adaptive_max_pool2d.default, [3, 2]),
    "adaptive_max_pool3d": _image(aten.adaptive_max_pool3d.default, [3, 2, 2], rank=3),
    "max_pool2d_with_indices_backward": _image_backward(
        aten.max_pool2d_with_indices_backward.default, lambda x: aten.max_pool2d_with_indices(x, *MAX2), *MAX2, last="indices"
    ),
    "max_pool3d_with_indices_backward": _image_backward(
        aten.max_pool3d_with_indices_backward.default,
        lambda x: aten.max_pool3d_with_indices(x, *MAX3), *MAX3, rank=3, last="indices",
    ),
    "adaptive_max_pool2d_backward": _image_backward(
        aten.adaptive_max_pool2d_backward.default, lambda x: aten.adaptive_max_pool2d(x, [3, 2]), last="indices"
    ),
    "adaptive_max_pool3d_backward": _image_backward(
        aten.adaptive_max_pool3d_backward.default, lambda x: aten.adaptive_max_pool3d(x, [3, 2, 2]), rank=3, last="indices"
    ),
    "avg_pool2d_backward": _image_backward(aten.avg_pool2d_backward.default, lambda x: aten.avg_pool2d(x, *AVG2), *AVG2),
    "avg_pool3d_backward": _image_backward(
        aten.avg_pool3d_backward.default, lambda x: aten.avg_pool3d(x, *AVG3), *AVG3, rank=3
    ),
    "_adaptive_avg_pool2d_backward": _image_backward(
        aten._adaptive_avg_pool2d_backward.default, lambda x: aten._adaptive_avg_pool2d(x, [3, 2])
    ),
    "_adaptive_avg_pool3d_backward": _image_backward(
        aten._adaptive_avg_pool3d_backward.default, lambda x: aten._adaptive_avg_pool3d(x, [3, 2, 2]), rank=3
    ),
    **{
        f"{kind}_pad{rank}d": _image(getattr(aten, f"{kind}_pad{rank}d").default, [1] * (2 * rank), rank=rank)
        for kind in ("reflection", "replication") for rank in (1, 2, 3)
    },
    **{
        f"{kind}_pad{rank}d_backward": _image_backward(
            getattr(aten, f"{kind}_pad{rank}d_backward").default,
            lambda x, op=getattr(aten, f"{kind}_pad{rank}d"), rank=rank: op(x, [1] * (2 * rank)), [1] * (2 * rank), rank=rank,
        )
        for kind in ("reflection", "replication") for rank in (1, 2, 3)
    },
    **{
        key: case for name, rank in [
            ("upsample_nearest1d", 1), ("upsample_nearest2d", 2), ("upsample_nearest3d", 3), ("_upsample_nearest_exact1d", 1),
            ("_upsample_nearest_exact2d", 2), ("_upsample_nearest_exact3d", 3), ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2), ("upsample_bicubic2d", 2), ("upsample_trilinear3d", 3),
        ] for key, case in _upsample(name, rank).items()
    },
    "im2col": lambda s: (aten.im2col.default, s.normal(s.size(), s.size(), 4, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda s: (aten.col2im.default, s.normal(s.size(), 4 * s.size(), 6), [4, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
    "glu": lambda s: (aten.glu.default, s.normal(3, 2 * s.size(), 2), -2),
    "glu_backward": lambda s: (aten.glu_backward.default, s.normal(3, 2), s.normal(3, 4), 1),
    "_weight_norm_interface": _weight_norm(False),
    "_weight_norm_interface_backward": _weight_norm(True),
    "mse_loss": _loss(aten.mse_loss.default),
    "smooth_l1_loss": _loss(aten.smooth_l1_loss.default, 1.0),
    "huber_loss": _loss(aten.huber_loss.default, 1.0),
    "soft_margin_loss": _loss(aten.soft_margin_loss.default),
    "binary_cross_entropy": _loss(aten.binary_cross_entropy.default),
    "binary_cross_entropy_with_logits": _loss(aten.binary_cross_entropy_with_logits.default),
    "mse_loss_backward": _loss_backward(aten.mse_loss_backward.default),
    "smooth_l1_loss_backward": _loss_backward(aten.smooth_l1_loss_backward.default, 1.0),
    "huber_loss_backward": _loss_backward(aten.huber_loss_backward.default, 1.0),
    "soft_margin_loss_backward": _loss_backward(aten.soft_margin_loss_backward.default),
    "binary_cross_entropy_backward": _loss_backward(aten.binary_cross_entropy_backward.default),
    "nll_loss_forward": _nll(False),
    "nll_loss_backward": _nll(True),
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

UNEXECUTED = frozenset(
    """_fused_rms_norm_backward _scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    empty new_empty rand randn empty_like rand_like randn_like randperm""".split()
)
"""Kernels of other devices, and operators whose result is not determined by their arguments."""
