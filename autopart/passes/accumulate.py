"""Regroup gradient accumulation: sum what one segment contributes before it leaves the segment.

before: d = (skip_from_h7 + residual_of_h1) + norm_of_h1      two gradients of h1 travel to h0
after:  d1 = residual_of_h1 + norm_of_h1; d = d1 + skip_from_h7   one does

Autograd adds the gradients of a value in the order in which they arrive. Only trees of additions whose leaves lie in
different segments change, and only by reassociation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain

from autopart.ir.graph import Node, Ref


@dataclass(frozen=True, slots=True)
class Tree:
    """A maximal tree of additions: the add nodes by result name, its root's name, its leaves in order."""

    adds: tuple[str, ...]
    root: str
    leaves: tuple[str, ...]


def is_sum(node: Node, made: Iterable[str]) -> bool:
    """Whether a backward node adds two gradients; `made` are the values that the backward makes."""
    if not node.backward or node.opname != "aten.add.Tensor" or node.kwargs:
        return False
    return len([arg for arg in node.args if isinstance(arg, Ref) and arg.name in made]) == 2


def trees(nodes: Iterable[Node], outputs: Iterable[str]) -> tuple[Tree, ...]:
    """The maximal trees of gradient additions. A sum that is used more than once, or is an output, is a root."""
    nodes, outputs = tuple(nodes), set(outputs)
    made = set(chain.from_iterable(node.names() for node in nodes if node.backward))
    sums = {node.names()[0]: node for node in nodes if is_sum(node, made)}
    uses = Counter(filter(sums.__contains__, chain.from_iterable(map(Node.refs, nodes))))
    inner = {
        name
        for node in sums.values()
        for name in node.refs()
        if name in sums and uses[name] == 1 and name not in outputs
    }

    def leaves(name: str) -> list[str]:
        return [leaf for ref in sums[name].refs() for leaf in (leaves(ref) if ref in inner else [ref])]

    def adds(name: str) -> list[str]:
        return [add for ref in sums[name].refs() if ref in inner for add in adds(ref)] + [name]

    return tuple(Tree(tuple(adds(name)), name, tuple(leaves(name))) for name in sums if name not in inner)


def regroup(
    nodes: tuple[Node, ...], outputs: Iterable[str], home: Mapping[str, int]
) -> tuple[tuple[Node, ...], dict[str, int]]:
    """The nodes with every cross-segment tree regrouped, and the segment of each of its new sums.

    `home` gives the segment of every value; that of a tree's root is the segment where the whole sum is used.
    """
    homes: dict[str, int] = {}
    removed: set[str] = set()
    after: dict[str, list[Node]] = {}
    at: dict[str, list[Node]] = {}
    crossing: list[Tree] = []
    for tree in trees(nodes, outputs):
        places = {home[leaf] for leaf in tree.leaves}
        if len(places) == 1:
            homes.update(dict.fromkeys(tree.adds, places.pop()))
        else:
            crossing.append(tree)
    if not crossing:
        return nodes, homes
    taken = {name for tree in crossing for name in (*tree.adds, *tree.leaves)}
    made_at = {name: i for i, node in enumerate(nodes) if not taken.isdisjoint(node.names()) for name in node.names()}
    for tree in crossing:
        groups: dict[int, list[str]] = {}
        for leaf in tree.leaves:
            groups.setdefault(home[leaf], []).append(leaf)
        removed.update(tree.adds)
        spare = [nodes[made_at[name]] for name in tree.adds]
        parts = []
        for group in sorted(groups, reverse=True):
            members = sorted(groups[group], key=made_at.__getitem__)
            made, total = _chain(members, spare)
            homes.update({name: group for node in made for name in node.names()})
            after.setdefault(members[-1], []).extend(made)
            parts.append(total)
        made, _ = _chain(parts, spare)
        homes.update({name: home[tree.root] for node in made for name in node.names()})
        at[tree.root] = made
    return tuple(_with_sums(nodes, removed, at, after)), homes


def _with_sums(
    nodes: Iterable[Node], removed: Set[str], at: Mapping[str, list[Node]], after: Mapping[str, list[Node]]
) -> Iterator[Node]:
    """The nodes without the sums that are `removed`, and with others: in the place of some, and after some values."""
    changed = {*removed, *after}
    for node in nodes:
        names = node.names()
        if changed.isdisjoint(names):
            yield node
        elif names[0] in removed:
            yield from at.get(names[0], ())
        else:
            yield node
            for name in names:
                yield from after.get(name, ())


def _chain(members: list[str], spare: list[Node]) -> tuple[list[Node], str]:
    """``((a + b) + c)`` out of nodes taken from the front of `spare`."""
    total, made = members[0], []
    for member in members[1:]:
        node = spare.pop(0)
        node = replace(node, args=(Ref(total), Ref(member)))
        made.append(node)
        total = node.names()[0]
    return made, total
