"""Ring attention: queries, keys and values are split along the sequence, and keys and values travel round the places.

    out, lse = attention(q, k, v)                at every place: its own queries and its own keys and values
    k', v' = those of the place before           as often as there are other places
    out', lse' = attention(q, k', v')
    out, lse = out + sigmoid(lse' - lse) * (out' - out), logaddexp(lse, lse')

The last line puts the softmax over two parts of the keys together, as flash attention does with its blocks (Liu et al.
2023, Ring Attention, arXiv 2310.01889; Dao et al. 2022, arXiv 2205.14135). The backward runs the kernel's own with the
out and lse of all keys, for which a block's weights are exp(scores - lse). Gradients of queries add up where they are;
those of keys and values travel on behind them, and come home with one step more.

Under a causal mask tokens are dealt out in turn: of n places, place r has the tokens r, n + r, 2n + r, ... (Brandon et
al. 2023, Striped Attention, arXiv 2311.09431). Its query i sees key j of place o where ``j n + o <= i n + r``: all j up
to i if o <= r, else all below i. So each block is a triangle, causal attention by itself (in the second case without
the first query and the last key), and all places have equally much to do. In consecutive pieces the last place would
have twice that.

Attention under a mask that is a tensor goes in no ring: where large finite numbers hide all keys from a query, as -1e9
does, lse has lost how many keys a block has, and what one device makes of such a query could not be put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.collectives import operator
from autopart.ir.graph import Dim, Node, Value
from autopart.ir.placed import Cut
from autopart.rules.factor import Call, Rule, slots, times
from autopart.rules.writer import Sent, Spread, Writer, anyhow

aten = torch.ops.aten

DIM = 2
"""Of queries, keys and values, [samples, heads, tokens, width], the dim of the tokens."""

SUMS = ("dk_sum", "dv_sum")
"""What the gradients of keys and of values are called on their way."""

NONE = float("-inf")
"""The logarithm of the sum over no keys."""


def dealt(size: Dim) -> Callable[[Cut, int], bool]:
    """Which cuts deal a loop out in turn, at least two to each place."""

    def fits(cut: Cut, degree: int) -> bool:
        return cut == deal(cut.factor, size, degree)

    return fits


def deal(factor: int, size: Dim, degree: int) -> Cut | None:
    """The cut that deals a loop out in turn; None where places would not all have equally many, or only one."""
    if not isinstance(size, int) or size % degree or size < 2 * degree:
        return None
    return Cut(factor, size // degree)


def in_turn(nodes: Iterable[Node], degree: int) -> frozenset[int]:
    """The numbers of tokens that causal attention among `nodes` may deal out in turn."""
    found = set()
    for node in nodes:
        if node.op.overloadpacket.__name__ in RINGS and any(s == "is_causal" and arg for s, _, arg in slots(node)):
            tokens = next((out.shape[DIM] for out in node.outs if out is not None), 0)
            if isinstance(tokens, int) and deal(0, tokens, degree) is not None:
                found.add(tokens)
    return frozenset(found)


def _ring(write: Callable[[Writer, Call], None], rounds: int) -> Callable[[Call, Rule], Spread | None]:
    """Attention without dropout and mask; `rounds` is how often things as large as keys and values go round."""

    def found(call: Call, rule: Rule) -> Spread | None:
        loops = dict(rule.operands)
        rows, columns = loops["query"][DIM], loops["key"][DIM]
        sizes = call.shape("query")[DIM], call.shape("key")[DIM]
        causal = call.args["is_causal"]
        if len(rows) != 1 or len(columns) != 1 or not all(isinstance(size, int) for size in sizes):
            return None
        if call.args["dropout_p"] or call.has("attn_mask") or (causal and sizes[0] != sizes[1]):
            return None
        sends = (Sent("shift", "key"), Sent("shift", "value")) * rounds
        return Spread(columns[0], write, dealt(sizes[1]) if causal else anyhow, sends, rows, turns=True)

    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """The keys and values that a place has in one turn, those of the place `hops` before it.

    `later`: under a causal mask, a query does not see the key in the same row.
    """

    hops: int
    key: Value
    value: Value
    later: bool


def _blocks(w: Writer, call: Call) -> Iterator[_Block]:
    """Every block in turn, each handed on by the place before."""
    key, value = w.refs["key"], w.refs["value"]
    for hops in range(w.degree):
        if hops:
            key, value = _shifted(w, key, hops, "key"), _shifted(w, value, hops, "value")
        home = (w.place - hops) % w.degree
        yield _Block(hops, key, value, bool(call.args["is_causal"]) and home > w.place)


def _shifted(w: Writer, x: Value, hops: int, name: str) -> Value:
    """What comes from the place before for what is handed on, which then is `hops` places from home."""
    own = times(w.cut.outer, w.pieces[(w.place - hops) % w.degree])
    assert own is not None  # tokens do not move with the batch
    args = (x, w.axis, hops, DIM, w.cut.outer, w.pieces)
    like = _rows(x, own)
    return w(operator("shift"), *args, like=like, name=w.unused(f"{name}_{hops}"))


def _rows(x: Value, count: Dim) -> Value:
    """The shape of `x` with so many tokens."""
    return Value("", (*x.shape[:DIM], count, *x.shape[DIM + 1 :]), x.dtype)


def _number(size: Dim) -> int:
    assert isinstance(size, int)  # tokens do not move with the batch
    return size


def _without(w: Writer, x: Value, *, first: bool) -> Value:
    """`x` without its first tokens, or its last."""
    count = _number(x.shape[DIM])
    return w(aten.slice.Tensor, x, DIM, int(first), count - (not first), like=_rows(x, count - 1))


def _padded(w: Writer, x: Value, *, first: bool, fill: float) -> Value:
    """`x` with a token more, in front or behind, where nothing was seen."""
    around = (0, 0) * (len(x.shape) - 1 - DIM) + (int(first), int(not first))
    return w(aten.constant_pad_nd.default, x, around, fill, like=_rows(x, _number(x.shape[DIM]) + 1))


def _seeing(w: Writer, block: _Block, rows: tuple[Value, ...]) -> tuple[tuple[Value, ...], Value, Value]:
    """What has a row a query, and keys and values: of these the tokens of which some see each other."""
    if not block.later:
        return rows, block.key, block.value
    key, value = (_without(w, x, first=False) for x in (block.key, block.value))
    return tuple(_without(w, x, first=True) for x in rows), key, value


def _scale(call: Call) -> dict[str, Any]:
    return {} if call.args["scale"] is None else {"scale": call.args["scale"]}


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward(w: Writer, call: Call) -> None:
    made, lse = w.outs[0], w.outs[1]
    assert made is not None  # dead calls are not placed
    total: tuple[Value, Value] | None = None
    for block in _blocks(w, call):
        found = _attended(w, call, block)
        total = found if total is None else _merged(w, total, found)
    assert total is not None  # there are two places or more
    w.named(made, total[0])
    if lse is not None:
        w.named(lse, total[1])


def _attended(w: Writer, call: Call, block: _Block) -> tuple[Value, Value]:
    """What the queries here make of a block, and the logarithm of the sum of its weights."""
    made = w.outs[0]
    assert made is not None  # dead calls are not placed
    (query,), key, value = _seeing(w, block, (w.refs["query"],))
    precise = made.dtype if made.dtype.itemsize >= torch.float32.itemsize else torch.float32
    out = Value(w.unused(f"out_{block.hops}"), (*query.shape[:-1], value.shape[-1]), made.dtype)
    lse = Value(w.unused(f"lse_{block.hops}"), query.shape[:-1], precise)
    args = (query, key, value, 0.0, call.args["is_causal"])
    w.put(w.node.op, args, (out, lse), _scale(call))
    if precise != out.dtype:
        out = w(aten._to_copy.default, out, like=Value("", out.shape, precise), dtype=precise)
    if block.later:
        out, lse = _padded(w, out, first=True, fill=0.0), _padded(w, lse, first=True, fill=NONE)
    return out, lse


def _merged(w: Writer, one: tuple[Value, Value], other: tuple[Value, Value]) -> tuple[Value, Value]:
    """Attention to the keys of both, from attention to those of each."""
    (out, lse), (out2, lse2) = one, other
    weight = w(aten.sigmoid.default, w(aten.sub.Tensor, lse2, lse, like=lse), like=lse)
    column = w(aten.unsqueeze.default, weight, -1, like=Value("", (*lse.shape, 1), lse.dtype))
    return w(aten.lerp.Tensor, out, out2, column, like=out), w(aten.logaddexp.default, lse, lse2, like=lse)


# ---- backward --------------------------------------------------------------------------------------------------------


def _backward(w: Writer, call: Call) -> None:
    rows = tuple(w.refs[slot] for slot in ("grad_out", "query", "out", "logsumexp"))
    summed: list[Value | None] = [None] * 3
    own: tuple[Value | None, ...] = ()
    for block in _blocks(w, call):
        if block.hops > 1:  # those of the first block stay at home
            summed[1:] = [x and _shifted(w, x, block.hops, name) for x, name in zip(summed[1:], SUMS, strict=True)]
        found = _gradients(w, call, block, rows)
        if block.hops == 0:
            own = found
            summed[0] = found[0]
        else:
            summed = [_added(w, x, y) for x, y in zip(summed, found, strict=True)]
    for number, out in enumerate(w.outs):
        total = summed[number]
        if out is not None and total is not None:
            if number:
                total = _added(w, _shifted(w, total, w.degree, SUMS[number - 1]), own[number])
            assert total is not None  # a sum of two
            w.named(out, total)


def _gradients(w: Writer, call: Call, block: _Block, rows: tuple[Value, ...]) -> tuple[Value | None, ...]:
    """The gradients of queries, keys and values that come of a block, as far as they are used."""
    (grad, query, out, lse), key, value = _seeing(w, block, rows)
    made = [
        None if out is None else Value(w.unused(f"{name}_{block.hops}"), like.shape, out.dtype)
        for out, like, name in zip(w.outs, (query, key, value), ("dq", "dk", "dv"), strict=True)
    ]
    args = (grad, query, key, value, out, lse, 0.0, call.args["is_causal"])
    w.put(w.node.op, args, made, _scale(call))
    if not block.later:
        return tuple(made)
    return tuple(x and _padded(w, x, first=number == 0, fill=0.0) for number, x in enumerate(made))


def _added(w: Writer, one: Value | None, other: Value | None) -> Value | None:
    """The sum of two gradients; the second alone where there is no first yet."""
    return other if one is None or other is None else w(aten.add.Tensor, one, other, like=one)


RINGS: Mapping[str, Callable[[Call, Rule], Spread | None]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _ring(_forward, 1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _ring(_backward, 2),
}
"""By the operator's name: those that return, and take, the logarithm of the sum of all weights of a query."""
