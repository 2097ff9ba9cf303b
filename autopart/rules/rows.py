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

from autopart.ir.graph import Size, Value
from autopart.ir.placement import Shard
from autopart.rules.fact import Fact, Groups, Of, Picks
from autopart.rules.factor import Call, ratio

Facts = Mapping[str, Fact]
"""What is known of a call's operands, by slot."""

VIEWS = frozenset({"unsqueeze", "squeeze", "view", "_unsafe_view", "expand", "permute", "transpose", "clone", "alias"})
_SAME = VIEWS | {"_to_copy", "detach"}
"""Operators whose results are the same numbers."""

SORTS = ("sort", "argsort")
"""Operators by which rows get an order of their own."""

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
    order = indices or keys
    if order is None:
        return {}
    rows, ascending = call.shape("self")[0], not call.args.get("descending", False)
    if given.picks is not None:
        if given.picks != Picks(rows) or not ascending:
            return None
        first, second = Fact(Shard(0), free, picks=Picks(rows, own=True)), Picks(rows, given.order)
        return _named(keys, first) | _named(indices, Fact(Shard(0), free, picks=second))
    if given.order:
        return None
    whole = not call.operands[0].value.dtype.is_floating_point
    groups = Groups(Of.KEYS, order.name) if ascending and whole else None
    first = Fact(Shard(0), free, order=order.name, groups=groups)
    return _named(keys, first) | _named(indices, Fact(Shard(0), free, picks=Picks(rows), order=order.name))


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
    fewer = ratio(picks.rows, by) if isinstance(by, int) and by > 0 and not picks.order else None
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
    """What a result has to do with groups of rows: their keys, how many rows they have, and where these end."""
    given = facts.get("self")
    if given is None or given.groups is None:
        return None
    of, order = given.groups.of, given.groups.order
    if name in _SAME:
        out = call.results[0]
        kept = out is not None and (out.dtype.is_floating_point or out.dtype.itemsize >= 4)  # else they may wrap around
        return given.groups if kept else None
    if name == "histc" and of is Of.KEYS and call.args["min"] == 0 < call.args["max"]:
        return Groups(Of.COUNTS, order)  # keys of no group are behind all others: none is below 0
    return Groups(Of.ENDS, order) if name == "cumsum" and of is Of.COUNTS else None
