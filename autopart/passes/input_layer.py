"""input_layer: the lookup of the batch's tokens in the input embedding, alone, as the first segment of a step.

before: wte: x = embedding(table, ids); h = x + p        wte: dh, d_table = embedding_dense_backward(dh, ids)
after:  wte.lookup: looked = embedding(table, ids)       wte.lookup: d_table = embedding_dense_backward(d_looked, ids)
        wte: x = alias(looked); h = x + p                wte: dh, d_looked = alias(dh)

So `passes.split_input` can split it over the pipeline ranks: each has its part of the table, and what it looks up there
goes to the first stage. Nothing is taken out where the table is also used otherwise than as the weight of the output
layer, or tokens depend on more than what the caller passes: then it stays whole, on the rank of its stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from autopart.ir.captured import Captured
from autopart.ir.graph import Input, Node, Ref, Value, ancestors
from autopart.ir.names import fresh

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in a table: its node, the nodes that make its indices, and the one that makes the table's gradient."""

    node: Node
    table: Input
    indices: tuple[Node, ...]
    gradient: Node | None


def take_out(
    captured: Captured, names: list[str], home: Mapping[str, int]
) -> tuple[Captured, list[str], dict[str, int]]:
    """The step whose first segment is the lookup alone, the segments' names, and the segment of every value.

    All is as it was where there is none that can be split: then there are as many names as before.
    """
    found = lookup(captured, home)
    if found is None:
        return captured, names, dict(home)
    at = home[found.node.names()[0]]
    name = fresh(f"{names[at]}.lookup", names)
    writer = _Writer(captured, found, at + 1)
    nodes = writer.nodes()
    moved = {value: number + 1 for value, number in home.items()} | writer.homes
    return replace(captured, nodes=nodes), [name, *names], moved


def lookup(captured: Captured, home: Mapping[str, int]) -> Lookup | None:
    """That in the largest table, of those that can be split and come before what else parameters are used for."""
    forward = [node for node in captured.nodes if not node.backward]
    parameters = {item.value.name for item in captured.of_kind("parameter")}
    reads = [node for node in forward if not parameters.isdisjoint(node.refs())]
    front = min((home[node.names()[0]] for node in reads if node.aten != "embedding"), default=0)
    embeddings = (node for node in reads if node.aten == "embedding" and home[node.names()[0]] <= front)
    found = [each for node in embeddings if (each := _lookup(captured, node, home)) is not None]
    return max(found, key=lambda each: each.table.value.nbytes(1), default=None)


def _lookup(captured: Captured, node: Node, home: Mapping[str, int]) -> Lookup | None:
    """The lookup that a node is, if each rank can have a part of its table and find its tokens by itself."""
    inputs = {item.value.name: item for item in captured.inputs}
    table, forward = inputs.get(node.refs()[0]), [n for n in captured.nodes if not n.backward]
    if table is None or table.kind != "parameter":
        return None
    indices, read = ancestors(forward, node.refs()[1:])
    made = {name for each in indices for name in each.names()}
    given = [inputs[name] for name in read - made]
    updated = {out.target for out in captured.updates()}
    if not any(item.kind == "input" for item in given):
        return None  # positions, say
    if any(item.kind not in ("input", "buffer", "constant") or item.target in updated for item in given):
        return None
    last = max(home.values())
    users = [n for n in captured.nodes if table.value.name in n.refs() and n is not node]
    if last == 0 or any(home[n.names()[0]] != last or n.aten == "embedding" for n in users):
        return None
    if not captured.training or not table.requires_grad:
        return Lookup(node, table, indices, None)
    graded = {out.name for out in captured.outputs if (out.kind, out.target) == ("grad", table.target)}
    gradients = [n for n in captured.nodes if n.backward and graded & {*n.names()} and home[n.names()[0]] != last]
    plain = [n for n in gradients if n.aten == "embedding_dense_backward" and n.refs()[1:] == node.refs()[1:]]
    if len(gradients) != 1 or plain != gradients or plain[0].args[4]:
        return None
    return Lookup(node, table, indices, plain[0])


class _Writer:
    """Writes the step's nodes with a lookup apart; `homes` has the segments of what is new, or elsewhere now.

    `user` is the segment that the lookup was in, and that goes on with what it makes.
    """

    def __init__(self, captured: Captured, found: Lookup, user: int) -> None:
        self.captured, self.found, self.user = captured, found, user
        self.values = {value.name: value for value in captured.values()}
        self.used = {*self.values}
        self.homes: dict[str, int] = {}
        self.copies = {name: self._fresh(name, 0) for each in found.indices for name in each.names()}

    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in an order in which they can run; those that made the indices only are gone."""
        made: list[Node] = []
        for node in self.captured.nodes:
            if node is self.found.node:
                made += self._looked_up(node)
            elif node is self.found.gradient:
                made += self._graded(node)
            else:
                made.append(node)
        wanted, dead = {out.name for out in self.captured.outputs}, {id(node) for node in self.found.indices}
        kept: list[Node] = []
        for node in reversed(made):
            if id(node) not in dead or not wanted.isdisjoint(node.names()):
                kept.append(node)
                wanted.update(node.refs())
        return tuple(reversed(kept))

    def _looked_up(self, node: Node) -> Iterable[Node]:
        (out,) = node.names()
        looked = replace(self.values[out], name=self._fresh("looked_up", 0))
        yield from (each.renamed(self.copies) for each in self.found.indices)
        yield replace(node, outs=(looked,)).renamed(self.copies)
        yield self._alias(node, looked.name, self.values[out])
        self.homes[out] = self.user

    def _graded(self, node: Node) -> Iterable[Node]:
        given = node.refs()[0]
        out = replace(self.values[given], name=self._fresh("d_looked_up", self.user))
        yield self._alias(node, given, out)
        yield replace(node, args=(Ref(out.name), *node.args[1:])).renamed(self.copies)
        self.homes[node.names()[0]] = 0

    def _alias(self, like: Node, source: str, out: Value) -> Node:
        return replace(like, op=aten.alias.default, args=(Ref(source),), kwargs=(), outs=(out,), single=True)

    def _fresh(self, wish: str, segment: int) -> str:
        name = fresh(wish, self.used)
        self.used.add(name)
        self.homes[name] = segment
        return name
