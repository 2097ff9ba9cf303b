"""simplify: nodes -> nodes. Peepholes that make the graph what a person would have written; values stay bit for bit.

before: t = aten.t(w); t_1 = aten.t(t); y = aten.mm(x, t_1)      after: y = aten.mm(x, w)
before: g = aten.flip(aten.cumsum(aten.flip(x, [1]), 1), [1])                after: g = autopart.cumsum_from_end(x, 1)
before: k = aten.cat([empty, k_new], -2)   (a new key/value cache)  after: k is k_new, or a contiguous copy of it
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch

from autopart.ir.graph import Node, Ref, Value
from autopart.scans import FROM_END

CAT = "aten.cat.default"
TRANSPOSE = "aten.t.default"
CUMSUM, FLIP = "aten.cumsum.default", "aten.flip.default"


def simplify(nodes: Iterable[Node], inputs: Iterable[Value]) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The simplified nodes, and for each value that vanished the name of the one that stands for it."""
    known = {value.name: value for value in inputs}
    transposed: dict[str, Node] = {}
    alias: dict[str, str] = {}

    nodes = _with_sums_from_the_end(tuple(nodes))
    joined = {name for node in nodes if node.opname == CAT for name in node.names()}
    readers: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes if joined else ():
        for name in joined.intersection(node.refs()):
            readers[name].add(node.opname)

    kept = []
    for node in nodes:
        node = node.renamed(alias)
        same = _same(node, transposed, known)
        if same is not None and (node.opname != CAT or all(map(_any_layout, readers[node.names()[0]]))):
            alias[node.names()[0]] = same
            continue
        if same is not None:  # whoever reads it may count on the layout that `cat` gives it
            layout = (("memory_format", torch.contiguous_format),)
            node = replace(node, op=torch.ops.aten.clone.default, args=(Ref(same),), kwargs=layout)
        kept.append(node)
        if joined:
            known.update({out.name: out for out in node.outs if out is not None})
        if node.opname == TRANSPOSE:
            transposed.update(dict.fromkeys(node.names(), node))
    return tuple(kept), alias


def _with_sums_from_the_end(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes with every ``flip(cumsum(flip(x)))`` along one dim as the one operator that it is."""
    if not any(node.opname == CUMSUM for node in nodes):
        return nodes
    made = {name: node for node in nodes for name in node.names()}
    readers = Counter(name for node in nodes for name in node.refs())

    def source(node: Node) -> Node | None:
        """The first flip, where a node is the last."""
        chain = [node]
        for opname in (CUMSUM, FLIP):
            before = made.get(chain[-1].args[0].name)
            if before is None or before.opname != opname or readers[before.names()[0]] != 1:
                return None
            chain.append(before)
        last, summed, first = chain
        if last.args[1] != first.args[1] or len(first.args[1]) != 1:
            return None
        (out,), (value,) = first.outs, summed.outs
        ndim = len(out.shape) if out is not None else 0
        alike = out is not None and value is not None and out.dtype == value.dtype
        return first if alike and (summed.args[1] - first.args[1][0]) % max(ndim, 1) == 0 else None

    found = {node.names(): source(node) for node in nodes if node.opname == FLIP and node.names()}
    kept = []
    for node in nodes:
        first = found.get(node.names())
        if first is not None:
            (dim,) = first.args[1]
            node = replace(node, op=FROM_END, args=(first.args[0], dim), kwargs=())
        kept.append(node)
    return tuple(kept)


def _any_layout(opname: str) -> bool:
    """Whether an operator takes its operands in any layout, and makes of them what it always makes."""
    return "attention" in opname or opname == CAT


def _same(node: Node, transposed: dict[str, Node], known: dict[str, Value]) -> str | None:
    """The name of an earlier value that a node's result equals, if the rules here know one."""
    if node.opname == TRANSPOSE:
        source = transposed.get(node.args[0].name)
        return source.args[0].name if source is not None else None
    if node.opname == CAT:
        real = [ref.name for ref in node.args[0] if known[ref.name].shape != (0,)]
        return real[0] if len(real) == 1 and len(node.args[0]) > 1 else None
    return None
