"""Slice nodes: the nodes of a step, written out for one slice of the sequence after another.

What is cut runs over the tokens of its slice, with the sizes that go with them. A whole value that is used so is cut
as early as its own operators allow: of position embeddings only those of the slice are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from autopart.ir.graph import Arg, Dim, Node, Ref, Value
from autopart.ir.names import fresh
from autopart.ir.segmented import Segmented
from autopart.passes.dependence import is_random
from autopart.passes.tokens import Dependence, How, Loop, Tokens, Treatment, loop_of, rest_of, tokens_of
from autopart.rules.factor import ArgPath, Rule, slots, with_arguments
from autopart.rules.split import product
from autopart.rules.table import rule

aten = torch.ops.aten

DENSE: tuple[tuple[str, Arg], ...] = (("memory_format", torch.contiguous_format),)


class Slices:
    """The nodes of all slices, being written; `slice` is the one at hand, `homes` has the segment of each new value.

    Segments are numbered through: of n segments, number i in slice j is j n + i.
    """

    def __init__(self, segmented: Segmented, known: Dependence, lengths: Sequence[int]) -> None:
        captured, homes = segmented.captured, segmented.homes
        self.known, self.lengths, self.starts = known, lengths, (0, *accumulate(lengths))
        self.values = {value.name: value for value in captured.values()}
        self.made = {name: node for node in captured.nodes for name in node.names()}
        self.place = {name: home for node, home in zip(captured.nodes, homes, strict=True) for name in node.names()}
        self.segments = len(segmented.segments)
        self.nodes: list[Node] = []
        self.homes: dict[str, int] = {}
        self.slice = 0
        self._names: dict[tuple[object, ...], str] = {}
        self._taken = set(self.values)
        self._rules: dict[tuple[str, ...], Rule | None] = {}

    # ---- names -------------------------------------------------------------------------------------------------------

    def name(self, name: str, number: int | None = None) -> str:
        """What a value is called in a slice (that at hand); the inputs of the step are called the same in all."""
        at = self.slice if number is None else number
        return self.named(f"{name}_s{at}", name, at) if name in self.made else name

    def named(self, wish: str, *key: object) -> str:
        """The name of what `key` says, the same one whenever it is asked for."""
        if key not in self._names:
            self._names[key] = self.new(wish)
        return self._names[key]

    def new(self, wish: str) -> str:
        """A name that no value has yet."""
        name = fresh(wish, self._taken)
        self._taken.add(name)
        return name

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def home(self, node: Node) -> int:
        """The segment of one of the step's nodes, in this slice."""
        return self.slice * self.segments + self.place[node.names()[0]]

    def add(self, node: Node, home: int) -> None:
        """Append a node that belongs to a segment."""
        self.nodes.append(node)
        self.homes.update(dict.fromkeys(node.names(), home))

    def call(self, op: Any, args: tuple[Arg, ...], out: Value, like: Node, **keywords: Arg) -> str:
        """Append a call that belongs where `like`, one of the step's nodes, does in this slice; its result's name."""
        made = replace(like, op=op, args=args, kwargs=tuple(keywords.items()), outs=(out,), single=True)
        self.add(made, self.home(like))
        return out.name

    def write(self, node: Node, treatment: Treatment) -> None:
        """One of the step's nodes on this slice's values, over the tokens of the slice where it is cut."""
        names = {name: self.name(name) for name in node.names()}
        if treatment.part is not None:
            self._part(node, treatment.part)
        elif treatment.loop is not None:
            self._over(node, treatment.loop, names, treatment.once)
        else:
            made = self._once(node, treatment.once)
            names |= {name: self.name(name) for name in node.refs()}
            self.add(made.renamed(names), self.home(node))

    def _over(self, node: Node, loop: Loop, names: Mapping[str, str], once: frozenset[str] = frozenset()) -> None:
        rule = self._rule(node)
        assert rule is not None  # it has loops
        dims, made = dict(rule.operands), self._once(node, once)
        new: dict[ArgPath, Arg] = {}
        sizes = [factor.size for factor in rule.factors]
        sizes[loop.factor] = self._local(sizes[loop.factor], loop)
        smaller = {slot: product(sizes[f] for f in loops) for slot, loops in rule.sizes if loop.factor in loops}
        for slot, path, arg in slots(made):
            if isinstance(arg, Ref):
                tokens = tokens_of(dims[slot], rule.factors, loop)
                new[path] = Ref(self.piece(arg.name, tokens, node))
            elif slot in smaller:
                new[path] = smaller[slot]
        outs = [
            out and replace(self.shaped(out, tokens_of(loops or (), rule.factors, loop)), name=names[out.name])
            for out, loops in zip(node.outs, rule.results, strict=True)
        ]
        self.add(with_arguments(replace(made, outs=tuple(outs)), new), self.home(node))

    def _once(self, node: Node, once: frozenset[str]) -> Node:
        """The node with zero for what is added to a sum over the tokens, but in the first slice."""
        new: dict[ArgPath, Arg] = {}
        for slot, path, arg in slots(node) if self.slice and once else ():
            if slot in once and isinstance(arg, Ref):
                value = replace(self.values[arg.name], name=self.new(f"{arg.name}_zero"))
                nothing = self.call(aten.zeros_like.default, (Ref(self.name(arg.name)),), value, node)
                new[path] = Ref(nothing)
            elif slot in once:
                new[path] = 0
        return with_arguments(node, new) if new else node

    def _part(self, node: Node, dim: int) -> None:
        """The first tokens of a value, or the backward of that: as many of this slice's as there are among them."""
        tokens, out = self.known.facts[node.refs()[0]].tokens, node.outs[0]
        assert tokens is not None and out is not None
        start, end = self.span(tokens)
        fact = self.known.facts[out.name]
        made = replace(self.shaped(out, fact.tokens), name=self.name(out.name))
        source = Ref(self.name(node.refs()[0]))
        if node.op is aten.slice.Tensor:
            self.call(node.op, (source, dim, 0, made.shape[dim]), made, node)
            return
        first = node.args[3] + start if fact.how is How.PART else 0
        self.call(node.op, (source, made.shape, dim, first, first + end - start, 1), made, node)

    def _rule(self, node: Node) -> Rule | None:
        key = node.names()
        if key not in self._rules:
            self._rules[key] = rule(node, self.values)
        return self._rules[key]

    def span(self, tokens: Tokens | Loop) -> tuple[int, int]:
        """This slice's tokens among the first so many: their places."""
        start, end = (min(at, tokens.number) for at in self.starts[self.slice : self.slice + 2])
        return start, end

    def _local(self, size: Dim, tokens: Tokens | Loop) -> Dim:
        """What this slice has of a loop or dim with the tokens."""
        start, end = self.span(tokens)
        return product((tokens.outer, end - start, rest_of(size, tokens)))

    def shaped(self, value: Value, tokens: Tokens | None) -> Value:
        """The value with the shape that it has in this slice."""
        if tokens is None:
            return value
        own = self._local(value.shape[tokens.dim], tokens)
        return replace(value, shape=tuple(own if i == tokens.dim else size for i, size in enumerate(value.shape)))

    # ---- pieces ------------------------------------------------------------------------------------------------------

    def piece(self, name: str, tokens: Tokens | None, reader: Node) -> str:
        """What `reader` reads of a value in this slice: its tokens where `tokens` says that they are in it, else all.

        Those of a whole value are made by its own operators, if they can.
        """
        if tokens is None or self.known.facts[name].how is How.CUT:
            return self.name(name)
        node = self.made.get(name)
        key = name, tokens, self.slice, self.home(node or reader)
        if key in self._names:
            return self._names[key]
        made = self.named(f"{name}_s{self.slice}", *key)
        loop = None if node is None else self._loop(node, tokens)
        if node is None or loop is None:
            self._sliced(name, tokens, node or reader, made)
        else:
            self._over(node, loop, {name: made})
        return made

    def _loop(self, node: Node, tokens: Tokens) -> Loop | None:
        """The loop over the tokens of a whole value in the node that makes it alone, if that can run over some."""
        rule = self._rule(node)
        if rule is None or len(node.names()) > 1 or is_random(node):  # a draw knows the places of samples alone
            return None
        dims = next(dims for out, dims in zip(node.outs, rule.results, strict=True) if out is not None)
        loop = loop_of(dims or (), rule.factors, tokens)
        return None if loop is None or rule.factors[loop.factor].blocked else loop

    def _sliced(self, name: str, tokens: Tokens, like: Node, made: str) -> None:
        """This slice's tokens, cut out of the whole value. Dense, as others are."""
        value, source, dim = self.values[name], self.name(name), tokens.dim
        width = rest_of(value.shape[dim], tokens)
        shape, own = list(value.shape), replace(self.shaped(value, tokens), name=made)
        if tokens.outer != 1:  # the dim is taken apart for it
            shape[dim : dim + 1] = [tokens.outer, product((tokens.length, width))]
            apart = replace(value, name=self.new(f"{name}_apart"), shape=tuple(shape))
            source = self.call(aten.reshape.default, (Ref(source), tuple(shape)), apart, like)
            dim += 1
        first, last = self.span(tokens)
        start, end = product((first, width)), product((last, width))
        shape[dim] = product((last - first, width))
        part = replace(value, name=self.new(f"{name}_part"), shape=tuple(shape))
        source = self.call(aten.slice.Tensor, (Ref(source), dim, start, end), part, like)
        if tokens.outer != 1:
            self.call(aten.reshape.default, (Ref(source), own.shape), own, like)
        else:
            self.call(aten.clone.default, (Ref(source),), own, like, **dict(DENSE))
