"""Causal attention in slices: the queries of one, and the keys and values of it and of all slices before it.

forward:   out[j] = attention(q[j], k[0..j], v[0..j], mask[j])
backward:  dq[j], dK, dV = the backward of that; dK += what the slices after j have found for the tokens up to j's end
           dk[j] is the last part of dK; the rest, for the tokens before slice j, goes on to slice j - 1

The mask lets query i of a slice see the keys up to its own place, ``start + i``. The kernel is that of the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopart.ir.graph import Node, Ref, Value
from autopart.passes.slice_nodes import DENSE, Slices
from autopart.passes.tokens import Tokens
from autopart.rules.factor import ArgPath, argument, slots, with_argument

aten = torch.ops.aten

DIM = 2
"""Of queries, keys and values, [samples, heads, tokens, width], the dim that has the tokens."""


def attention(slices: Slices, node: Node) -> None:
    """Write causal attention, or its backward, for the slice at hand."""
    made, tokens = node, slices.known.facts[argument(node, _query(node)).name].tokens
    assert tokens is not None  # it is cut
    _, reach = slices.span(tokens)
    for slot, path, arg in slots(node):
        if slot in ("key", "value"):
            made = with_argument(made, path, Ref(_so_far(slices, node, arg.name, reach)))
        elif slot == "is_causal":
            made = with_argument(made, path, arg and slices.slice == 0)
        elif slot == "attn_mask" and isinstance(arg, Ref):
            made = with_argument(made, path, Ref(_rows(slices, node, arg.name, reach)))
        elif isinstance(arg, Ref):
            made = with_argument(made, path, Ref(slices.piece(arg.name, tokens, node)))
    named = dict(made.kwargs)
    if slices.slice and not isinstance(named.get("attn_mask"), Ref):
        made = replace(made, kwargs=tuple({**named, "attn_mask": Ref(_mask(slices, node, reach))}.items()))
    outs = [out and replace(slices.shaped(out, tokens), name=slices.name(out.name)) for out in node.outs]
    if not node.backward:
        slices.add(replace(made, outs=tuple(outs)), slices.home(node))
        return
    queries, *sides = outs
    wholes = [out and _reaching(out, reach, slices.new(f"{out.name}_so_far")) for out in sides]
    slices.add(replace(made, outs=(queries, *wholes)), slices.home(node))
    for out, own, whole in zip(node.outs[1:], sides, wholes, strict=True):
        if out is not None and own is not None and whole is not None:
            _hand_back(slices, node, out.name, own, whole)


def _query(node: Node) -> ArgPath:
    return next(path for slot, path, _ in slots(node) if slot == "query")


def _so_far(slices: Slices, node: Node, name: str, reach: int) -> str:
    """The keys, or values, of this slice and of all before it."""
    if slices.slice == 0:
        return _kept(slices, node, name, 0)
    parts = tuple(Ref(_kept(slices, node, name, number)) for number in range(slices.slice + 1))
    out = _reaching(slices.values[name], reach, slices.new(f"{name}_so_far"))
    return slices.call(aten.cat.default, (parts, DIM), out, node)


def _kept(slices: Slices, node: Node, name: str, number: int) -> str:
    """The keys, or values, of a slice, as the layer that attends to them has them.

    It has a copy of those that another layer makes, which may be on another rank: slices of one layer alone, wherever
    it is, hand each other something.
    """
    if slices.homes[slices.name(name, number)] % slices.segments == slices.place[node.names()[0]]:
        return slices.name(name, number)
    known = slices.named(f"{name}_s{number}_here", "here", name, number, slices.place[node.names()[0]])
    if known not in slices.homes:
        assert number == slices.slice and not node.backward  # each slice's forward makes its own
        out = replace(slices.shaped(slices.values[name], slices.known.facts[name].tokens), name=known)
        slices.call(aten.clone.default, (Ref(slices.name(name)),), out, node)
    return known


def _mask(slices: Slices, node: Node, reach: int) -> str:
    """Minus infinity where a key comes after the query, else zero."""
    start = slices.starts[slices.slice]
    query = argument(node, _query(node))
    shape, dtype = (reach - start, reach), slices.values[query.name].dtype
    value = Value(slices.new("later"), shape, dtype)
    later = slices.call(
        aten.full.default,
        (shape, float("-inf")),
        value,
        node,
        dtype=dtype,
        device=torch.device("cpu"),
        pin_memory=False,
    )
    return slices.call(aten.triu.default, (Ref(later), start + 1), replace(value, name=slices.new("mask")), node)


def _rows(slices: Slices, node: Node, name: str, reach: int) -> str:
    """What a mask of the model says of this slice's queries and of the keys so far."""
    mask = slices.values[name]
    tokens = Tokens(len(mask.shape) - 2, int(mask.at(1)[-1]))
    rows = slices.piece(name, tokens, node)
    if reach == tokens.length:
        return rows
    shape = (*slices.shaped(mask, tokens).shape[:-1], reach)
    out = replace(mask, name=slices.new(f"{name}_so_far"), shape=shape)
    return slices.call(aten.slice.Tensor, (Ref(rows), tokens.dim + 1, 0, reach), out, node)


def _reaching(value: Value, reach: int, name: str) -> Value:
    """A value of so many tokens from the first on."""
    shape = tuple(reach if i == DIM else size for i, size in enumerate(value.shape))
    return replace(value, name=name, shape=shape)


def _hand_back(slices: Slices, node: Node, name: str, own: Value, whole: Value) -> None:
    """The gradient `own` of this slice's keys, or values, out of that of all so far; the rest is the slice before's."""
    reach = whole.at(1)[DIM]
    start = reach - own.at(1)[DIM]
    total = whole.name
    if slices.slice + 1 < len(slices.lengths):
        summed = replace(whole, name=slices.new(f"{name}_sum"))
        total = slices.call(aten.add.Tensor, (Ref(total), Ref(_rest(slices, name, slices.slice + 1))), summed, node)
    slices.call(aten.slice.Tensor, (Ref(total), DIM, start, reach), own, node)
    if slices.slice:
        before = _reaching(whole, start, slices.new(f"{name}_before"))
        slices.call(aten.slice.Tensor, (Ref(total), DIM, 0, start), before, node)
        rest = replace(before, name=_rest(slices, name, slices.slice))
        slices.call(aten.clone.default, (Ref(before.name),), rest, node, **dict(DENSE))


def _rest(slices: Slices, name: str, number: int) -> str:
    """What a slice found of the gradients `name` for the tokens before its own."""
    return slices.named(f"{name}_rest{number}", "rest", name, number)
