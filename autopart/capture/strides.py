"""Which views become reshapes: those that rely on strides that a program does not keep.

A value that goes to another rank arrives contiguous, whatever strides it had in the trace. Where such a value may have
come by, a view (which needs fitting strides) is taken as a reshape (which copies where they do not fit).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from autopart._torch import OpOverload
from autopart.rules.memory import FRESH

CONTIGUOUS, AS_TRACED, UNKNOWN = 0, 1, 2
"""What is known of a value's strides: row-major; those of the trace, or row-major if it was sent; nothing."""

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def reshapes(nodes: Iterable[torch.fx.Node]) -> frozenset[str]:
    """The names of the views in a trace that must be reshapes in a program."""
    known: dict[torch.fx.Node, int] = {}
    found = set()
    for node in nodes:
        known[node] = _strides(node, known)
        if node.target in _VIEWS and known[node.all_input_nodes[0]] == UNKNOWN:
            found.add(node.name)
    return frozenset(found)


def _strides(node: torch.fx.Node, known: dict[torch.fx.Node, int]) -> int:
    if _fresh(node):
        return CONTIGUOUS
    if node.target is operator.getitem and _fresh(node.all_input_nodes[0]):
        return CONTIGUOUS
    result = node.meta.get("val")
    if any(known[source] != CONTIGUOUS for source in node.all_input_nodes):
        return UNKNOWN
    tensors = result if isinstance(result, list | tuple) else (result,)
    contiguous = all(tensor.is_contiguous() for tensor in tensors if isinstance(tensor, torch.Tensor))
    # the results of one call are looked at one by one, behind their getitem
    return CONTIGUOUS if contiguous or len(tensors) > 1 else AS_TRACED


def _fresh(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__
    return name in FRESH or (name == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format)
