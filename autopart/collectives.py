"""Collectives as operators of the graph: what the ranks of one mesh axis do together, as nodes like any other.

``autopart::all_reduce(x, axis, how)`` is the sum or the maximum over the places of an axis. The others move pieces of a
dim, seen as ``outer x split x rest`` with `pieces` the lengths along the split part (times the rest) that the places
have, in order:

* ``all_gather(x, axis, dim, outer, pieces)``: this place's piece of the dim -> the whole;
* ``reduce_scatter(x, axis, dim, outer, pieces)``: a part of a sum -> this place's piece of the sum;
* ``all_to_all(x, axis, from_dim, from_outer, from_pieces, dim, outer, pieces)``: split one way -> split another way;
* ``shift(x, axis, hops, dim, outer, pieces)``: one step round the ring of places, each handing what it has to the
  next: the piece of the place ``hops - 1`` before -> that of the place `hops` before;
* ``dispatch(x, axis, dim, rows, pieces, ends)``: each place's own `rows` of a dim, group after group -> at each place
  all rows of its groups, of which each has as many as `pieces` says. `ends` are the ends of all groups in every place's
  rows, place after place. How many rows a place gets is known when it runs: what is static here takes them to be even;
* ``combine(x, axis, dim, rows, pieces, ends)``: back again, each row to where it came from.

They have schemas and no kernels: the text of a program calls its world for them (`runtime.values`).
"""

from __future__ import annotations

from typing import Any

import torch

_PIECE = "str axis, int dim, SymInt outer, SymInt[] pieces"
_FROM = "str axis, int from_dim, SymInt from_outer, SymInt[] from_pieces"
_ROWS = "Tensor x, str axis, int dim, SymInt rows, SymInt[] pieces, Tensor ends"
SCHEMAS = {
    "all_reduce": "Tensor x, str axis, str how",
    "all_gather": f"Tensor x, {_PIECE}",
    "reduce_scatter": f"Tensor x, {_PIECE}",
    "all_to_all": f"Tensor x, {_FROM}, int dim, SymInt outer, SymInt[] pieces",
    "shift": "Tensor x, str axis, int hops, int dim, SymInt outer, SymInt[] pieces",
    "dispatch": _ROWS,
    "combine": _ROWS,
}


def _register() -> Any:
    library: Any = torch.library.Library("autopart", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, arguments in SCHEMAS.items():
        library.define(f"{name}({arguments}) -> Tensor")
    return library


_LIBRARY = _register()


def operator(name: str) -> Any:
    """The operator of a collective, by its name in `SCHEMAS`."""
    return getattr(torch.ops.autopart, name).default


def collective_name(op: Any) -> str:
    """The name of a collective's operator."""
    return str(op.overloadpacket.__name__)


def is_collective(op: Any) -> bool:
    """Whether an operator is one of these."""
    return bool(op.namespace == "autopart" and op.overloadpacket.__name__ in SCHEMAS)
