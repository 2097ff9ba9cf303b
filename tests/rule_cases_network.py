"""Calls of the operators of neural networks in the rule table: norms, attention, convolution, pooling, losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.rule_cases import ELEMENTARY, Case, Sizes, along, aten
from tests.rule_cases_linear import LINEAR


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


def _pad(kind: str, rank: int) -> dict[str, Case]:
    op, backward = getattr(aten, f"{kind}_pad{rank}d"), getattr(aten, f"{kind}_pad{rank}d_backward")
    widths = [1] * (2 * rank)
    return {
        f"{kind}_pad{rank}d": _image(op.default, widths, rank=rank),
        f"{kind}_pad{rank}d_backward": _image_backward(backward.default, lambda x: op(x, widths), widths, rank=rank),
    }


def _grid(rank: int, backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        n, c, places = s.size(), s.size(), [3, 2, 4][:rank]
        image, grid = s.normal(n, c, *[4, 3, 2][:rank]), s.normal(n, *places, rank)
        if not backward:
            return getattr(aten, f"grid_sampler_{rank}d").default, image, grid, 0, s.size(0, 2), False
        op = getattr(aten, f"grid_sampler_{rank}d_backward").default
        return op, s.normal(n, c, *places), image, grid, 0, s.size(0, 2), False, [True, True]

    return case


def _unpool(s: Sizes) -> tuple[Any, ...]:
    made, indices = aten.max_pool2d_with_indices(s.normal(s.size(), s.size(), 6, 4), *MAX2)
    return aten.max_unpool2d.default, made, indices, [6, 4]


MAX2 = ([2, 2], [2, 2], [0, 0], [1, 1], False)
MAX3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
AVG2 = ([2, 2], [2, 2], [0, 0], False, True, None)
AVG3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)


RESAMPLED = (
    *((kind, rank) for kind in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    ("upsample_linear", 1), ("upsample_bilinear", 2), ("upsample_bicubic", 2), ("upsample_trilinear", 3),
)  # fmt: skip

NETWORK: Mapping[str, Case] = {
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
    "_softmax": along(aten._softmax.default, False),
    "_log_softmax": along(aten._log_softmax.default, False),
    "_safe_softmax": along(aten._safe_softmax.default),
    "_softmax_backward_data": _softmax_backward(aten._softmax_backward_data.default, aten._softmax),
    "_log_softmax_backward_data": _softmax_backward(aten._log_softmax_backward_data.default, aten._log_softmax),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(
        aten._scaled_dot_product_flash_attention_for_cpu.default, False
    ),
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
        aten.max_pool2d_with_indices_backward.default,
        lambda x: aten.max_pool2d_with_indices(x, *MAX2), *MAX2, last="indices",
    ),
    "max_pool3d_with_indices_backward": _image_backward(
        aten.max_pool3d_with_indices_backward.default,
        lambda x: aten.max_pool3d_with_indices(x, *MAX3), *MAX3, rank=3, last="indices",
    ),
    "adaptive_max_pool2d_backward": _image_backward(
        aten.adaptive_max_pool2d_backward.default, lambda x: aten.adaptive_max_pool2d(x, [3, 2]), last="indices"
    ),
    "adaptive_max_pool3d_backward": _image_backward(
        aten.adaptive_max_pool3d_backward.default,
        lambda x: aten.adaptive_max_pool3d(x, [3, 2, 2]), rank=3, last="indices",
    ),
    "avg_pool2d_backward": _image_backward(
        aten.avg_pool2d_backward.default, lambda x: aten.avg_pool2d(x, *AVG2), *AVG2
    ),
    "avg_pool3d_backward": _image_backward(
        aten.avg_pool3d_backward.default, lambda x: aten.avg_pool3d(x, *AVG3), *AVG3, rank=3
    ),
    "_adaptive_avg_pool2d_backward": _image_backward(
        aten._adaptive_avg_pool2d_backward.default, lambda x: aten._adaptive_avg_pool2d(x, [3, 2])
    ),
    "_adaptive_avg_pool3d_backward": _image_backward(
        aten._adaptive_avg_pool3d_backward.default, lambda x: aten._adaptive_avg_pool3d(x, [3, 2, 2]), rank=3
    ),
    **{name: case for rank in (1, 2, 3) for name, case in _pad("reflection", rank).items()},
    **{name: case for rank in (1, 2, 3) for name, case in _pad("replication", rank).items()},
    **{name: case for kind, rank in RESAMPLED for name, case in _upsample(f"{kind}{rank}d", rank).items()},
    **{name: case for kind in ("bilinear", "bicubic") for name, case in _upsample(f"_upsample_{kind}2d_aa", 2).items()},
    **{f"grid_sampler_{rank}d": _grid(rank, False) for rank in (2, 3)},
    **{f"grid_sampler_{rank}d_backward": _grid(rank, True) for rank in (2, 3)},
    "max_unpool2d": _unpool,
    "im2col": lambda s: (aten.im2col.default, s.normal(s.size(), s.size(), 4, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda s: (
        aten.col2im.default, s.normal(s.size(), 4 * s.size(), 6), [4, 3], [2, 2], [1, 1], [0, 0], [1, 1]
    ),
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
}  # fmt: skip

CASES: Mapping[str, Case] = {**ELEMENTARY, **NETWORK, **LINEAR}

UNEXECUTED = frozenset(
    [
        "_fused_rms_norm_backward",
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "empty",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "rand",
        "randn",
        "empty_like",
        "rand_like",
        "randn_like",
        "randperm",
        "autopart.uniform",
        "autopart.normal",
        "autopart.bernoulli",
        "autopart.all_gather",
        "autopart.all_reduce",
        "autopart.all_to_all",
        "autopart.reduce_scatter",
    ]
)
"""Kernels of other devices, operators whose result their arguments do not determine (test_draws has the draws), and
collectives of other axes, which take several ranks (test_several_axes)."""
