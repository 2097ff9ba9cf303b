"""Normalisations: the dims that are normalised together are blocked."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Family, Rule, each
from autopart.rules.loops import loops

SPATIAL = "xyz"


def _layer_norm(call: Call, backward: bool) -> Rule:
    """Layer and RMS norm over the last dims; the gradients of their parameters contract the leading dims."""
    inner = "ijklpq"[: len(call.args["normalized_shape"])]
    kept = "*" + "1" * len(inner)
    rms = "rms" in call.op.overloadpacket.__name__
    sizes = {f"normalized_shape.{n}": letter for n, letter in enumerate(inner)}
    statistics = f"rstd:{kept}" if rms else f"mean:{kept} rstd:{kept}"
    if backward:
        spec = (
            f"grad_out:*{inner} input:*{inner} {statistics} weight:{inner} bias:{inner} -> *{inner}, {inner}, {inner}"
        )
        return loops(call, spec, blocked=inner, linear=["grad_out"], sizes=sizes)
    spec = f"input:*{inner} weight:{inner} bias:{inner} -> *{inner}, {kept}, {kept}"
    return loops(call, spec, blocked=inner, sizes=sizes)


def _forward(call: Call) -> Rule:
    return _layer_norm(call, backward=False)


def _backward(call: Call) -> Rule:
    return _layer_norm(call, backward=True)


_GROUP_SIZES = {"N": "n", "C": "gc", "group": "g"}


def _group_norm(call: Call) -> Rule:
    space = SPATIAL[: call.ndim("input") - 2]
    spec = f"input:n(gc){space} weight:(gc) bias:(gc) -> n(gc){space}, ng, ng"
    return loops(call, spec, blocked=f"c{space}", known={"g": call.args["group"]}, sizes=_GROUP_SIZES)


def _group_norm_backward(call: Call) -> Rule:
    space = SPATIAL[: call.ndim("input") - 2]
    spec = f"grad_out:n(gc){space} input:n(gc){space} mean:ng rstd:ng weight:(gc) -> n(gc){space}, (gc), (gc)"
    known = {"g": call.args["group"]}
    return loops(call, spec, blocked=f"c{space}", linear=["grad_out"], known=known, sizes=_GROUP_SIZES)


def _batch_norm(call: Call) -> Rule:
    """Batch norm: in training its statistics couple the batch and the spatial dims; in evaluation all is pointwise."""
    name = call.op.overloadpacket.__name__
    training = call.args.get("training", "no_training" not in name)
    space = SPATIAL[: call.ndim("input") - 2]
    saved = "c, c" if training else "0, 0"
    spec = f"input:nc{space} weight:c bias:c running_mean:c running_var:c -> nc{space}, {saved}, c, c"
    if training:
        return loops(call, spec, blocked=f"n{space}")
    # in evaluation the saved statistics are empty, and the functional form hands the running ones on
    return loops(call, spec, blocked="0", unread=[(result, "input") for result in (1, 2, 3, 4)])


def _batch_norm_backward(call: Call) -> Rule:
    training = call.args["train"]
    space = SPATIAL[: call.ndim("input") - 2]
    saved = "save_mean:c save_invstd:c" if training else "save_mean:0 save_invstd:0"
    parameters = "weight:c running_mean:c running_var:c"
    spec = f"grad_out:nc{space} input:nc{space} {parameters} {saved} -> nc{space}, c, c"
    return loops(call, spec, blocked=f"n{space}0" if training else "0", linear=["grad_out"])


RULES: Mapping[str, Family] = {
    **each("native_layer_norm _fused_rms_norm", _forward),
    **each("native_layer_norm_backward _fused_rms_norm_backward", _backward),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **each(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"
        " _native_batch_norm_legit_no_training",
        _batch_norm,
    ),
    "native_batch_norm_backward": _batch_norm_backward,
}
