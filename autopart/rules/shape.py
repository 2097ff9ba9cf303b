"""Operators that take tensors apart and put them together: slices, concatenation, padding, what mixes along a dim."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Dims, Draft, Family, Rule, each, plus, ratio, times, wrap

SELF = ("self",)


def _whole(call: Call, size: Dim) -> bool:
    """Whether a slice takes all of a dim."""
    start, end = call.args.get("start") or 0, call.args.get("end")
    reaches = end is None or end == size or (isinstance(end, int) and isinstance(size, int) and end >= size)
    return start == 0 and (reaches or end == 2**63 - 1) and call.args.get("step", 1) == 1


def _slice(call: Call) -> Rule:
    """A slice; also ``narrow``-like parts: the sliced dim is blocked unless all of it is taken."""
    shape = call.shape("self")
    place = wrap(call.args.get("dim", 0), len(shape))
    draft = Draft()
    if _whole(call, shape[place]):
        own = draft.dims(shape)
        return draft.rule(call, {"self": own}, [own], linear=SELF)
    own = draft.dims(shape, blocked=(place,))
    size = 1 if call.results[0] is None else call.results[0].shape[place]
    out = (*own[:place], draft.new(size, blocked=True), *own[place + 1 :])
    return draft.rule(call, {"self": own}, [out], linear=SELF)


def _select(call: Call) -> Rule:
    shape = call.shape("self")
    place = wrap(call.args["dim"], len(shape))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,))
    out = (*own[:place], *own[place + 1 :])
    return draft.rule(call, {"self": own}, [out] * len(call.results), linear=SELF)


def _grown(call: Call, *, keeps_dim: bool) -> Rule:
    """The backward of slice and select: a part put into zeros of `input_sizes`."""
    shape, sizes = call.shape("grad_output"), call.args["input_sizes"]
    place = wrap(call.args["dim"], len(sizes))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,) if keeps_dim else ())
    rest = own[place + 1 :] if keeps_dim else own[place:]
    out = (*own[:place], draft.new(sizes[place], blocked=True), *rest)
    named = {f"input_sizes.{i}": dim for i, dim in enumerate(out)}
    return draft.rule(call, {"grad_output": own}, [out], linear=["grad_output"], sizes=named)


def _scattered(call: Call, *, keeps_dim: bool) -> Rule:
    """A part written over a slice or a selected place of `self`."""
    shape = call.shape("self")
    place = wrap(call.args.get("dim", 0), len(shape))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,))
    part = (draft.new(call.shape("src")[place], blocked=True),) if keeps_dim else ()
    operands = {"self": own, "src": (*own[:place], *part, *own[place + 1 :])}
    return draft.rule(call, operands, [own], linear=["self src"])


def _parts(call: Call) -> Rule:
    """``split`` into parts: equal ones share a factor under an outer, blocked one that counts them."""
    shape = call.shape("self")
    place = wrap(call.args.get("dim", 0), len(shape))
    name = "split_size" if "split_size" in call.args else "split_sizes"
    given = call.args[name]
    draft = Draft()
    own = (*draft.dims(shape[:place]), (), *draft.dims(shape[place + 1 :]))
    counted = isinstance(given, tuple | list)
    size = given[0] if counted else given
    count = len(call.results)
    if (not counted or set(given) == {size}) and times(size, count) == shape[place]:
        part = draft.new(size)
        whole = draft.new(count, blocked=True) + part
        named = {f"{name}.{i}" if counted else name: part for i in range(count)}
        outs: list[Dims | None] = [(*own[:place], part, *own[place + 1 :])] * count
    else:
        whole, named = draft.new(shape[place], blocked=True), {}
        outs = [
            None if out is None else (*own[:place], draft.new(out.shape[place], blocked=True), *own[place + 1 :])
            for out in call.results
        ]
    return draft.rule(call, {"self": (*own[:place], whole, *own[place + 1 :])}, outs, linear=SELF, sizes=named)


def _cat(call: Call) -> Rule:
    """``cat``, with the same law as `_parts`; tensors of shape [0], which it ignores, are left out."""
    parts = [operand for operand in call.operands if operand.value.shape != (0,)] or list(call.operands)
    first = parts[0].value.shape
    place = wrap(call.args.get("dim", 0), len(first))
    draft = Draft()
    lead, tail = draft.dims(first[:place]), draft.dims(first[place + 1 :])
    lengths = [operand.value.shape[place] for operand in parts]
    if all(length == lengths[0] for length in lengths):
        shared = draft.new(lengths[0])
        dims = [shared] * len(parts)
        merged = draft.new(len(parts), blocked=True) + shared
    else:
        dims = [draft.new(length, blocked=True) for length in lengths]
        merged = draft.new(plus(lengths), blocked=True)
    operands: dict[str, Dims] = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    operands |= {operand.slot: (*lead, dim, *tail) for operand, dim in zip(parts, dims, strict=True)}
    return draft.rule(call, operands, [(*lead, merged, *tail)], linear=["tensors*"])


def _stack(call: Call) -> Rule:
    shape = call.operands[0].value.shape
    place = wrap(call.args.get("dim", 0), len(shape) + 1)
    draft = Draft()
    own = draft.dims(shape)
    out = (*own[:place], draft.new(len(call.operands), blocked=True), *own[place:])
    return draft.rule(call, {operand.slot: own for operand in call.operands}, [out], linear=["tensors*"])


def _blocking(argument: str, *linear: str) -> Family:
    """An operator of unchanged shape that mixes along the dims named by an argument."""

    def family(call: Call) -> Rule:
        shape = call.shape("self")
        given = call.args.get(argument)
        asked = (given,) if isinstance(given, int) else (given or range(len(shape)))
        draft = Draft()
        own = draft.dims(shape, blocked=[wrap(dim, len(shape)) for dim in asked])
        return draft.rule(call, {"self": own}, [own] * len(call.results), linear=linear)

    return family


def _triangle(call: Call) -> Rule:
    shape = call.shape("self")
    draft = Draft()
    own = draft.dims(shape, blocked=(len(shape) - 2, len(shape) - 1))
    return draft.rule(call, {"self": own}, [own], linear=SELF)


def _pad(call: Call) -> Rule:
    """``constant_pad_nd``: pads are given in pairs from the last dim on; a dim with a pad is blocked."""
    shape, pad = call.shape("self"), call.args["pad"]
    padded = [len(shape) - 1 - i // 2 for i, width in enumerate(pad) if width != 0]
    draft = Draft()
    own = draft.dims(shape, blocked=padded)
    result = call.results[0]
    out = tuple(
        draft.new(result.shape[i], blocked=True) if i in padded and result is not None else dim
        for i, dim in enumerate(own)
    )
    return draft.rule(call, {"self": own}, [out], linear=["self value"])


def _diagonal(call: Call) -> Rule:
    shape = call.shape("self")
    pair = {wrap(call.args.get("dim1", 0), len(shape)), wrap(call.args.get("dim2", 1), len(shape))}
    draft = Draft()
    own = draft.dims(shape, blocked=sorted(pair))
    result = call.results[0]
    last = () if result is None else draft.new(result.shape[-1], blocked=True)
    return draft.rule(call, {"self": own}, [(*(d for i, d in enumerate(own) if i not in pair), last)], linear=SELF)


def _diag_embed(call: Call) -> Rule:
    """The last dim becomes the diagonal of two new dims."""
    shape, result = call.shape("self"), call.results[0]
    pair = {wrap(call.args.get(name, default), len(shape) + 1) for name, default in (("dim1", -2), ("dim2", -1))}
    draft = Draft()
    own = draft.dims(shape, blocked=(len(shape) - 1,))
    rest = iter(own[:-1])
    size = 1 if result is None else result.shape[min(pair)]
    out = tuple(draft.new(size, blocked=True) if i in pair else next(rest) for i in range(len(shape) + 1))
    return draft.rule(call, {"self": own}, [out], linear=SELF)


def _windows(call: Call, slot: str, place: int, length: Dim, count: Dim) -> tuple[Draft, Dims, Dims]:
    """The dims of a tensor whose dim `place` has `length` elements, and of `count` windows on it (the last dim)."""
    draft = Draft()
    shape = call.shape(slot)[:-1] if slot == "grad_in" else call.shape(slot)
    lead, tail = draft.dims(shape[:place]), draft.dims(shape[place + 1 :])
    whole = (*lead, draft.new(length, blocked=True), *tail)
    spread = (*lead, draft.new(count, blocked=True), *tail, draft.new(call.args["size"], blocked=True))
    return draft, whole, spread


def _unfold(call: Call) -> Rule:
    """Windows along a dim, which is blocked."""
    shape, result = call.shape("self"), call.results[0]
    place = wrap(call.args["dimension"], len(shape))
    draft, whole, spread = _windows(call, "self", place, shape[place], 1 if result is None else result.shape[place])
    return draft.rule(call, {"self": whole}, [spread], linear=SELF)


def _unfold_backward(call: Call) -> Rule:
    asked = call.args["input_sizes"]
    place = wrap(call.args["dim"], len(asked))
    count = call.shape("grad_in")[place]
    draft, whole, spread = _windows(call, "grad_in", place, asked[place], count)
    sizes = {f"input_sizes.{i}": dim for i, dim in enumerate(whole)}
    return draft.rule(call, {"grad_in": spread}, [whole], linear=["grad_in"], sizes=sizes)


def _shuffle(call: Call) -> Rule:
    """``pixel_shuffle``: [.., c r r, h, w] to [.., c, h r, w r]; ``pixel_unshuffle`` is its inverse."""
    inverse = call.op.overloadpacket.__name__ == "pixel_unshuffle"
    factor = call.args["downscale_factor" if inverse else "upscale_factor"]
    shape = call.shape("self")
    channels, height, width = shape[-3:] if not inverse else _unshuffled(shape, factor)
    draft = Draft()
    lead = draft.dims(shape[:-3])
    c, h, w = draft.new(ratio(channels, factor * factor) or 0), draft.new(height), draft.new(width)
    down, across = draft.new(factor, blocked=True), draft.new(factor, blocked=True)
    deep: Dims = (*lead, c + down + across, h, w)
    flat: Dims = (*lead, c, h + down, w + across)
    return draft.rule(call, {"self": flat if inverse else deep}, [deep if inverse else flat], linear=SELF)


def _unshuffled(shape: tuple[Dim, ...], factor: int) -> tuple[Dim, Dim, Dim]:
    return times(shape[-3], factor * factor) or 0, ratio(shape[-2], factor) or 0, ratio(shape[-1], factor) or 0


def _slice_backward(call: Call) -> Rule:
    return _grown(call, keeps_dim=True)


def _select_backward(call: Call) -> Rule:
    return _grown(call, keeps_dim=False)


def _slice_scatter(call: Call) -> Rule:
    return _scattered(call, keeps_dim=True)


def _select_scatter(call: Call) -> Rule:
    return _scattered(call, keeps_dim=False)


RULES: Mapping[str, Family] = {
    **each("split split_with_sizes unsafe_split unsafe_split_with_sizes", _parts),
    **each("select unbind", _select),
    **each("triu tril", _triangle),
    **each("pixel_shuffle pixel_unshuffle", _shuffle),
    "slice": _slice,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "cat": _cat,
    "stack": _stack,
    "flip": _blocking("dims", "self"),
    "roll": _blocking("dims", "self"),
    "cumsum": _blocking("dim", "self"),
    "autopart.cumsum_from_end": _blocking("dim", "self"),
    "cumprod": _blocking("dim"),
    "logcumsumexp": _blocking("dim"),
    "sort": _blocking("dim"),
    "argsort": _blocking("dim"),
    "constant_pad_nd": _pad,
    "diagonal": _diagonal,
    "diag_embed": _diag_embed,
    "unfold": _unfold,
    "unfold_backward": _unfold_backward,
    **each("cummax cummin", _blocking("dim")),
}
