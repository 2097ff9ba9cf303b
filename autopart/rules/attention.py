"""Fused attention: batch and heads are free, query positions too unless a causal mask counts them; the rest is blocked.

Loops: b batch, h key/value head, r query heads that share one (grouped-query attention), l query position, s key
position, e and v the widths of a head. Statistics that a kernel pads (p) and the states of its random numbers (x, y, z)
are blocked.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Family, Rule
from autopart.rules.loops import loops

_QKV = "query:b(hr)le key:bhse value:bhsv attn_mask:b(hr)ls attn_bias:b(hr)ls"
_OPAQUE = "cum_seq_q:x cum_seq_k:y philox_seed:z philox_offset:z"


def _fused(spec: str, *linear: str, blocked: str = "") -> Family:
    """An attention kernel; a backward is linear in the incoming gradient, and contracts l in the gradients of keys."""

    def family(call: Call) -> Rule:
        causal = "l" if call.args.get("is_causal") else ""
        return loops(call, spec, blocked=f"sevpxyz{causal}{blocked}", linear=linear)

    return family


def _math(call: Call) -> Rule:
    """The math form also takes any leading dims in place of batch and heads."""
    if call.args["enable_gqa"]:
        return _fused(f"{_QKV} dropout_mask:b(hr)ls -> b(hr)lv, b(hr)ls")(call)
    return _fused("query:*le key:*se value:*sv attn_mask:*ls dropout_mask:*ls -> *lv, *ls")(call)


def _backward(gradient: str, statistics: str) -> str:
    operands = f"{gradient}:b(hr)lv {_QKV} out:b(hr)lv logsumexp:{statistics} {_OPAQUE}"
    return f"{operands} -> b(hr)le, bhse, bhsv, b(hr)ls"


RULES: Mapping[str, Family] = {
    "_scaled_dot_product_flash_attention_for_cpu": _fused(f"{_QKV} -> b(hr)lv, b(hr)l"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _fused(_backward("grad_out", "b(hr)l"), "grad_out"),
    "_scaled_dot_product_flash_attention.default": _fused(f"{_QKV} -> b(hr)lv, b(hr)l, x, y, _, _, z, _, _"),
    "_scaled_dot_product_flash_attention_backward": _fused(_backward("grad_out", "b(hr)l"), "grad_out"),
    "_scaled_dot_product_efficient_attention": _fused(f"{_QKV} -> b(hr)lv, b(hr)p, z, z", blocked="l"),
    "_scaled_dot_product_efficient_attention_backward": _fused(
        _backward("grad_out_", "b(hr)p"), "grad_out_", blocked="l"
    ),
    "_scaled_dot_product_cudnn_attention": _fused(f"{_QKV} -> b(hr)lv, b(hr)l1, x, y, _, _, z, z, _"),
    "_scaled_dot_product_cudnn_attention_backward": _fused(_backward("grad_out", "b(hr)l1"), "grad_out"),
    "_scaled_dot_product_attention_math": _math,
}
