"""Collectives of one mesh axis as operators like any other, for the axes that are placed after it.

They pass every dim through but those that they cut or join. Such a dim is ``outer x split x rest``: where all places
have equally much, it is the loops ``outer x places x piece``, of which that of the places can be split no further. Else
only the runs, `outer`, can.

    all_gather       [outer x piece]          -> [outer x places x piece]
    reduce_scatter   [outer x places x piece] -> [outer x piece]
    all_to_all       the first of one dim, the second of another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Draft, Family, Product, Rule, ratio


def _all_reduce(call: Call) -> Rule:
    """Sums add up; the largest of some sums does not."""
    draft = Draft()
    dims = draft.dims(call.shape("x"))
    return draft.rule(call, {"x": dims}, [dims], linear=["x"] if call.args["how"] == "sum" else [])


def _moved(joins: Sequence[str], cuts: Sequence[str]) -> Family:
    """A collective that joins the dims of which the arguments with some prefixes speak, and cuts those of others."""

    def family(call: Call) -> Rule:
        shape, draft = call.shape("x"), Draft()
        made = shape if call.results[0] is None else call.results[0].shape
        prefixes = {int(call.args[f"{prefix}dim"]): prefix for prefix in (*joins, *cuts)}
        again = len(prefixes) < len(joins) + len(cuts)  # one dim, cut in another way
        before, after, sizes = list[Product](), list[Product](), dict[str, Product]()
        for i, (size, new) in enumerate(zip(shape, made, strict=True)):
            prefix = prefixes.get(i)
            if prefix is None:
                pair = (draft.new(size),) * 2
            elif again:
                pair = draft.new(size, blocked=True), draft.new(new, blocked=True)
            elif len(set(call.args[f"{prefix}pieces"])) > 1:
                outer = call.args[f"{prefix}outer"]
                runs, (one, other) = draft.new(outer), (ratio(length, outer) for length in (size, new))
                assert one is not None and other is not None  # a run of each is what is cut or joined
                pair = runs + draft.new(one, blocked=True), runs + draft.new(other, blocked=True)
                sizes |= {f"{prefix}outer": runs}
            else:
                own, whole, named = _loops(call, prefix, draft)
                pair = (own, whole) if prefix in joins else (whole, own)
                sizes |= named
            before.append(pair[0])
            after.append(pair[1])
        return draft.rule(call, {"x": tuple(before)}, [tuple(after)], linear=["x"], sizes=sizes)

    return family


def _loops(call: Call, prefix: str, draft: Draft) -> tuple[Product, Product, dict[str, Product]]:
    """The loops of a dim of which all places have equally much, at one and whole; the arguments that they make up."""
    pieces: tuple[Dim, ...] = tuple(call.args[f"{prefix}pieces"])
    runs = draft.new(call.args[f"{prefix}outer"])
    places, piece = draft.new(len(pieces), blocked=True), draft.new(pieces[0])
    named = {f"{prefix}outer": runs, **{f"{prefix}pieces.{i}": piece for i in range(len(pieces))}}
    return runs + piece, runs + places + piece, named


RULES: Mapping[str, Family] = {
    "autopart.all_reduce": _all_reduce,
    "autopart.all_gather": _moved(joins=[""], cuts=[]),
    "autopart.reduce_scatter": _moved(joins=[], cuts=[""]),
    "autopart.all_to_all": _moved(joins=["from_"], cuts=[""]),
}
