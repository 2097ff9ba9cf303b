"""Lookups and scatters: the looked-up dim is blocked; the loops of indices are free, or contracted where values add."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.graph import Ref
from autopart.rules.factor import Call, Dims, Draft, Family, Rule, align, broadcast, each, wrap
from autopart.rules.loops import loops


def _embedding(call: Call) -> Rule:
    return loops(call, "weight:ve indices:* -> *e", blocked="v", linear=["weight"])


def _embedding_backward(call: Call) -> Rule:
    """The gradient of the table: a sum over the positions, unless counts of equal indices scale it."""
    blocked = "v*" if call.args["scale_grad_by_freq"] else "v"
    spec = "grad_output:*e indices:* -> ve"
    return loops(call, spec, blocked=blocked, linear=["grad_output"], sizes={"num_weights": "v"})


def _along(call: Call, draft: Draft, *, blocked: bool) -> tuple[Dims, Dims]:
    """The dims of `self` and `index` of gather and scatter: equal but for `dim`, where `self` is blocked.

    A dim in which `index` is shorter than `self` is blocked on both sides, one in which it is shorter than `src` too.
    """
    own_shape, index_shape = call.shape("self"), call.shape("index")
    source_shape = call.shape("src") if call.has("src") else index_shape
    place = wrap(call.args["dim"], len(own_shape))
    shorter = {i for i, n in enumerate(index_shape) if source_shape[i] != n or (i != place and own_shape[i] != n)}
    own = draft.dims(own_shape, blocked=sorted(shorter | {place}))
    index = tuple(
        draft.new(size, blocked=blocked or i in shorter) if i in shorter | {place} else own[i]
        for i, size in enumerate(index_shape)
    )
    return own, index


def _gather(call: Call) -> Rule:
    draft = Draft()
    own, index = _along(call, draft, blocked=False)
    return draft.rule(call, {"self": own, "index": index}, [index], linear=["self"])


def _scatter(call: Call, *, blocked: bool, linear: tuple[str, ...]) -> Rule:
    draft = Draft()
    own, index = _along(call, draft, blocked=blocked)
    operands = {"self": own, "index": index}
    if call.has("src"):
        longer = zip(index, call.shape("src"), call.shape("index"), strict=True)
        operands["src"] = tuple(dim if size == n else draft.new(size, blocked=True) for dim, size, n in longer)
    return draft.rule(call, operands, [own], linear=linear)


def _scatter_write(call: Call) -> Rule:
    """Written over: two pieces of the indices could write to one place, so their loop is blocked."""
    return _scatter(call, blocked=True, linear=("self src" if call.has("src") else "self value",))


def _scatter_combine(call: Call) -> Rule:
    return _scatter(call, blocked=True, linear=())


def _scatter_add(call: Call) -> Rule:
    return _scatter(call, blocked=False, linear=("self src",))


def _index_select(call: Call) -> Rule:
    shape = call.shape("self")
    place = wrap(call.args["dim"], len(shape))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,))
    index = draft.dims(call.shape("index"))
    out = (*own[:place], index[0] if index else (), *own[place + 1 :])
    return draft.rule(call, {"self": own, "index": index}, [out], linear=["self"])


def _index_write(call: Call, *, adds: bool) -> Rule:
    shape = call.shape("self")
    place = wrap(call.args["dim"], len(shape))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,))
    index = draft.dims(call.shape("index"), blocked=() if adds else (0,))
    source = (*own[:place], index[0] if index else (), *own[place + 1 :])[: call.ndim("source")]
    return draft.rule(call, {"self": own, "index": index, "source": source}, [own], linear=["self source"])


def _index_add(call: Call) -> Rule:
    return _index_write(call, adds=True)


def _index_copy(call: Call) -> Rule:
    return _index_write(call, adds=False)


def _indexed(call: Call, draft: Draft, *, blocked: bool) -> tuple[Dims, dict[str, Dims], Dims]:
    """The dims of `self`, of each index, and of ``self[indices]``.

    The indices broadcast to one block of dims. It takes the place of the indexed dims if they are adjacent, else it is
    first.
    """
    shape, given = call.shape("self"), call.args["indices"]
    places = [i for i, index in enumerate(given) if isinstance(index, Ref)]
    own = draft.dims(shape, blocked=places)
    shapes = {f"indices.{i}": call.shape(f"indices.{i}") for i in places}
    full = broadcast(list(shapes.values()))
    block = draft.dims(full, blocked=range(len(full)) if blocked else ())
    indices = {slot: align(size, block) for slot, size in shapes.items()}
    adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if adjacent else 0
    rest = [dim for i, dim in enumerate(own) if i not in places]
    return own, indices, (*rest[:start], *block, *rest[start:])


def _index(call: Call) -> Rule:
    draft = Draft()
    own, indices, out = _indexed(call, draft, blocked=False)
    return draft.rule(call, {"self": own, **indices}, [out], linear=["self"])


def _index_put(call: Call) -> Rule:
    """The indices' loops are contracted if values accumulate, else blocked: two pieces could write to one place."""
    draft = Draft()
    own, indices, out = _indexed(call, draft, blocked=not call.args.get("accumulate", False))
    operands = {"self": own, **indices, "values": align(call.shape("values"), out)}
    return draft.rule(call, operands, [own], linear=["self values"])


def _buckets(call: Call) -> Rule:
    """``bucketize``: every element by itself, among all of the boundaries."""
    draft = Draft()
    own = draft.dims(call.shape("self")) if call.has("self") else ()
    operands = {
        operand.slot: own if operand.slot == "self" else draft.fixed(operand.value.shape) for operand in call.operands
    }
    return draft.rule(call, operands, [own])


def _sorted_places(call: Call) -> Rule:
    """``searchsorted``: rows of their own sorted sequences, or one sequence for all."""
    if call.ndim("sorted_sequence") == 1:
        return loops(call, "sorted_sequence:s sorter:s self:* -> *", blocked="s")
    return loops(call, "sorted_sequence:*s sorter:*s self:*k -> *k", blocked="s")


def _index_fill(call: Call) -> Rule:
    shape = call.shape("self")
    draft = Draft()
    own = draft.dims(shape, blocked=(wrap(call.args["dim"], len(shape)),))
    operands: dict[str, Dims] = {operand.slot: draft.fixed(operand.value.shape) for operand in call.operands}
    return draft.rule(call, {**operands, "self": own}, [own], linear=["self value"])


RULES: Mapping[str, Family] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    **each("scatter.src scatter.value", _scatter_write),
    **each("scatter.reduce scatter.value_reduce scatter_reduce", _scatter_combine),
    "scatter_add": _scatter_add,
    "index_select": _index_select,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "bucketize": _buckets,
    "searchsorted": _sorted_places,
    **each("index _unsafe_index", _index),
    **each("index_put _unsafe_index_put", _index_put),
}
