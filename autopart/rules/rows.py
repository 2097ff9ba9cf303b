"""Rows of the batch that are sorted, computed group after group, and brought back, as those of a mixture of experts.

    keys, order = sort(expert of each row)
    ends = cumsum(histc(keys))                 where the rows of each expert end
    y = grouped_mm(x[order // k], w, ends)     each token's row, k times, by the matrix of its expert
    out = y[inverse of order]

Each row is computed by itself, wherever it lies. So a microbatch may sort its own rows: what it computes is its part of
what the whole batch does, as long as nothing but the rows' groups is made of where they lie. That is what facts follow:
the order of a value's rows, numbers that pick rows, and what counts the rows of groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.ir.graph import Size, Value
from autopart.ir.placement import Shard
from autopart.rules.fact import Fact, Groups, Of, Order, Picks
from autopart.rules.factor import Call, ratio

Facts = Mapping[str, Fact]
"""What is known of a call's operands, by slot."""

VIEWS = frozenset({"unsqueeze", "squeeze", "view", "_unsafe_view", "expand", "permute", "transpose", "clone", "alias"})
_SAME = VIEWS | {"_to_copy", "detach"}
"""Operators whose results are the same numbers."""

SORTS = ("sort", "argsort")
"""Operators by which rows get an order of their own."""

ORDERLY = frozenset({"unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "clone", "alias", "_to_copy", "detach"})
"""Those of them whose results have each number once, in the same order."""

READS = frozenset({"index", "_unsafe_index", "index_select", "gather"})
WRITES = frozenset({"index_put", "_unsafe_index_put", "index_add", "scatter_add"})
"""Operators that pick rows."""

_RANGE = (("end", 0), ("start", 0), ("step", 1))


def sorted_facts(name: str, call: Call, facts: Facts, free: bool) -> dict[str, Fact] | None:
    """The results of sorting one number a row, a key or, which undoes a sort, the indices that it gave."""
    given = facts.get("self")
    if name not in SORTS or given is None or given.place != Shard(0) or call.ndim("self") != 1:
        return None
    keys, indices = (None, *call.results) if name == "argsort" else call.results
    made = indices or keys
    if made is None:
        return {}
    rows, ascending = call.shape("self")[0], not call.args.get("descending", False)
    if given.picks is not None:
        if given.picks != Picks(rows) or not ascending:
            return None
        first, second = Fact(Shard(0), free, picks=Picks(rows, own=True)), Picks(rows, given.order)
        return _named(keys, first) | _named(indices, Fact(Shard(0), free, picks=second))
    if given.order is not None:
        return None
    by = whole_numbers(call.operands[0].value, given) if ascending else ""
    order = Order(made.name, by)
    first = Fact(Shard(0), free, order=order, groups=Groups(Of.KEYS, by) if by else None)
    return _named(keys, first) | _named(indices, Fact(Shard(0), free, picks=Picks(rows), order=order))


def whole_numbers(value: Value, fact: Fact) -> str:
    """The value whose whole numbers a value has, itself if it is one of such; "" for others."""
    return fact.whole or ("" if value.dtype.is_floating_point or value.dtype == torch.bool else value.name)


def same_numbers(name: str, call: Call, facts: Facts) -> str:
    """The value whose whole numbers, one a row and in the order of the batch, a result has; "" if there is none."""
    given = facts.get("self")
    if name not in ORDERLY or given is None or given.order is not None or given.picks is not None:
        return ""
    return whole_numbers(call.operands[0].value, given) if _kept(call) else ""


def _kept(call: Call) -> bool:
    """Whether a result has room for the whole numbers of an operand, which may wrap around in a small type."""
    out = call.results[0]
    return out is not None and (out.dtype.is_floating_point or out.dtype.itemsize >= 4)


def _named(value: Value | None, fact: Fact) -> dict[str, Fact]:
    return {} if value is None else {value.name: fact}


def picks_of(name: str, call: Call, facts: Facts) -> Picks | None:
    """Which rows a result picks: ``arange(batch)``, numbers that pick rows seen through views of them, or divided."""
    if name == "arange":
        end, start, step = (call.args.get(each, default) for each, default in _RANGE)
        counts = start == 0 and step == 1 and isinstance(end, Size) and end.constant == 0
        return Picks(end, own=True) if counts else None
    given = facts.get("self")
    if name.removeprefix("_unsafe_") == "index_put":
        return _inverse(call, facts)
    if given is None or given.picks is None:
        return None
    if name in _SAME:
        out = call.results[0]
        return None if out is None or out.dtype.is_floating_point else given.picks
    return _divided(name, call, given.picks)


def _divided(name: str, call: Call, picks: Picks) -> Picks | None:
    """Where each of so many rows has `by` in a row, the numbers of these say which one, divided by that."""
    by = call.args.get("other")
    if name != "floor_divide" and call.args.get("rounding_mode") not in ("floor", "trunc"):
        return None
    fewer = ratio(picks.rows, by) if isinstance(by, int) and by > 0 and picks.order is None else None
    return None if fewer is None else Picks(fewer, once=False)


def _inverse(call: Call, facts: Facts) -> Picks | None:
    """``inverse[order] = arange(rows)``: of each row where it went."""
    index, values = facts.get("indices.0"), facts.get("values")
    if index is None or values is None or index.picks is None or values.picks is None:
        return None
    rows = index.picks.rows
    all_of_it = index.picks == Picks(rows) and values.picks == Picks(rows, own=True) and call.shape("self") == (rows,)
    return Picks(rows, index.order) if all_of_it else None


def picked(name: str, call: Call, facts: Facts, picking: Mapping[str, Picks]) -> Picks | None:
    """The rows that a call picks, in a microbatch as in the whole batch, to read them or to write to them.

    As in ``x[order]`` or ``x[arange(batch), labels]``, where `picking` are the operands that are numbers of rows. What
    is written to rows adds up, or goes to each once.
    """
    given = facts.get("self")
    place = None if given is None else given.place
    if given is None or not isinstance(place, Shard) or place.outer != 1 or name not in READS | WRITES:
        return None
    dim = call.args.get("dim", place.dim)
    slot = f"indices.{place.dim}" if call.has(f"indices.{place.dim}") else "index"
    picks = picking.get(slot)
    if picks is None or dim not in (place.dim, place.dim - call.ndim("self")):
        return None
    if name in WRITES:
        adds = "add" in name or bool(call.args.get("accumulate", False))
        kept = picks.order == given.order or given.zero or given.uniform
        right = kept and (picks.once or adds)
        others = {"values"} if picking.get("values", picks).own else set()
    else:
        right, others = picks.order == given.order, set()
    right &= picks.rows == call.shape("self")[place.dim]
    return picks if right and picking.keys() <= {slot, *others} else None


def groups_of(name: str, call: Call, facts: Facts) -> Groups | None:
    """What a result has to do with groups of rows: their keys, how many rows they have, and where these end.

    It is as well to count keys before they are sorted.
    """
    given = facts.get("self")
    if given is None:
        return None
    if name == "histc" and call.args["min"] == 0 < call.args["max"]:  # keys of no group are behind all others
        sorted_keys = given.groups is not None and given.groups.of is Of.KEYS
        whole = "" if given.order is not None else whole_numbers(call.operands[0].value, given)
        keys = given.groups.keys if given.groups is not None and sorted_keys else whole
        return Groups(Of.COUNTS, keys) if keys else None
    if given.groups is None:
        return None
    if name in _SAME:
        return given.groups if _kept(call) else None
    counts = name == "cumsum" and given.groups.of is Of.COUNTS
    return Groups(Of.ENDS, given.groups.keys) if counts else None
