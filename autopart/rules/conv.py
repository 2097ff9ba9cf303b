"""Convolution, pooling and resampling: batch and channels are free or contracted, spatial dims are blocked."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Dims, Draft, Family, Rule
from autopart.rules.loops import loops

# spatial letters of what goes in, of what comes out, and of the kernel
_IN, _OUT, _KERNEL = "xyz", "pqr", "uvw"
_SPATIAL = _IN + _OUT + _KERNEL


def _convolution(call: Call) -> Rule:
    """Output channels ``(group, o)``, input channels ``(group, i)``, of which i is contracted."""
    rank = call.ndim("input") - 2
    kernel = f"(gi)o{_KERNEL[:rank]}" if call.args["transposed"] else f"(go)i{_KERNEL[:rank]}"
    spec = f"input:n(gi){_IN[:rank]} weight:{kernel} bias:(go) -> n(go){_OUT[:rank]}"
    groups = call.args["groups"]
    # the number of groups is an argument of its own, so groups move as one with what they merge into
    return loops(
        call, spec, blocked=_SPATIAL, linear=["input bias", "weight bias"], known={"g": groups}, sizes={"groups": "g"}
    )


def _convolution_backward(call: Call) -> Rule:
    rank = call.ndim("input") - 2
    kernel = f"(gi)o{_KERNEL[:rank]}" if call.args["transposed"] else f"(go)i{_KERNEL[:rank]}"
    operands = f"grad_output:n(go){_OUT[:rank]} input:n(gi){_IN[:rank]} weight:{kernel}"
    return loops(
        call,
        f"{operands} -> n(gi){_IN[:rank]}, {kernel}, (go)",
        blocked=_SPATIAL,
        linear=["grad_output"],
        known={"g": call.args["groups"]},
        sizes={"groups": "g", "bias_sizes.0": "go"},
        unread=[(0, "input"), (1, "weight"), (2, "input"), (2, "weight")],
    )


def spatial(rank: int, shaped: str, *linear: str) -> Family:
    """An operator over the last `rank` dims: they are blocked in every tensor, those before are shared by all.

    `shaped` is the operand that has the result's leading dims; tensors of other spatial sizes get factors of their own.
    """

    def family(call: Call) -> Rule:
        draft = Draft()
        lead = draft.dims(call.shape(shaped)[:-rank])
        operands: dict[str, Dims] = {o.slot: (*lead, *draft.fixed(o.value.shape[-rank:])) for o in call.operands}
        results = [None if out is None else (*lead, *draft.fixed(out.shape[-rank:])) for out in call.results]
        sizes = {f"input_size.{i}": dim for i, dim in enumerate(lead)} if "input_size" in call.args else None
        return draft.rule(call, operands, results, linear=linear, sizes=sizes)

    return family


def _resample(kind: str, rank: int) -> dict[str, Family]:
    name = kind if kind.endswith("aa") else f"{kind}{rank}d"
    return {
        f"{name}.default": spatial(rank, "self", "self"),
        f"{name}.vec": spatial(rank, "input", "input"),
        f"{name}_backward.default": spatial(rank, "grad_output", "grad_output"),
    }


def _pools(rank: int) -> dict[str, Family]:
    forward, average = spatial(rank, "self"), spatial(rank, "self", "self")
    backward = spatial(rank, "grad_output", "grad_output")
    return {
        f"max_pool{rank}d_with_indices": forward,
        f"adaptive_max_pool{rank}d": forward,
        f"avg_pool{rank}d": average,
        f"_adaptive_avg_pool{rank}d": average,
        f"max_pool{rank}d_with_indices_backward": backward,
        f"adaptive_max_pool{rank}d_backward": backward,
        f"avg_pool{rank}d_backward": backward,
        f"_adaptive_avg_pool{rank}d_backward": backward,
    }


def _pads(rank: int) -> dict[str, Family]:
    forward, backward = spatial(rank, "self", "self"), spatial(rank, "grad_output", "grad_output")
    return {
        f"{kind}_pad{rank}d{end}": f
        for kind in ("reflection", "replication")
        for end, f in (("", forward), ("_backward", backward))
    }


def _im2col(call: Call) -> Rule:
    """``im2col`` and ``col2im``: channels are the outer part of a column; with three dims or fewer nothing is known."""
    columns = "n(ck)l -> ncxy" if call.op.overloadpacket.__name__ == "col2im" else "ncxy -> n(ck)l"
    height, width = call.args["kernel_size"]
    return loops(call, f"self:{columns}", blocked="klxy", linear=["self"], known={"k": height * width})


def _grid(rank: int, backward: bool) -> Family:
    """``grid_sampler``: channels are free in the image, and summed over in the gradient of the places."""
    image, places = _IN[:rank], _OUT[:rank]
    spec = f"input:nc{image} grid:n{places}k -> nc{places}"
    if backward:
        spec = f"grad_output:nc{places} input:nc{image} grid:n{places}k -> nc{image}, n{places}k"

    def family(call: Call) -> Rule:
        return loops(call, spec, blocked=f"{_SPATIAL}k", linear=["grad_output" if backward else "input"], unread=unread)

    unread = [(0, "input")] if backward else []
    return family


RULES: Mapping[str, Family] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **{name: f for rank in (2, 3) for name, f in _pools(rank).items()},
    **{name: f for rank in (1, 2, 3) for name, f in _pads(rank).items()},
    **{name: f for rank in (1, 2, 3) for name, f in _resample("upsample_nearest", rank).items()},
    **{name: f for rank in (1, 2, 3) for name, f in _resample("_upsample_nearest_exact", rank).items()},
    **_resample("upsample_linear", 1),
    **_resample("upsample_bilinear", 2),
    **_resample("upsample_bicubic", 2),
    **_resample("_upsample_bilinear2d_aa", 2),
    **_resample("_upsample_bicubic2d_aa", 2),
    **_resample("upsample_trilinear", 3),
    **{f"grid_sampler_{rank}d": _grid(rank, False) for rank in (2, 3)},
    **{f"grid_sampler_{rank}d_backward": _grid(rank, True) for rank in (2, 3)},
    "max_unpool2d": spatial(2, "self", "self"),
    "im2col": _im2col,
    "col2im": _im2col,
}
