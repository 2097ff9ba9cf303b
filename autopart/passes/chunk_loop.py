"""chunk_loop: nodes -> the loop over which they can be run chunk after chunk, as the factor rules say.

The loop runs over the tokens, or over samples where a value has nothing else beside what each of them holds. It is
followed from one value through all nodes, forwards and backwards: what an operator makes over its own tokens alone is
cut, what it adds up over them is a sum, in which each chunk has its part. What needs no token is computed before the
loop, what needs such sums after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopart.collectives import is_collective
from autopart.errors import CaptureError
from autopart.ir.graph import Node, Ref, Size, Value
from autopart.passes.tokens import Loop, Tokens, loop_of, tokens_of
from autopart.rules.dependence import is_random, refuse
from autopart.rules.factor import Rule, slots
from autopart.rules.table import rule

ADVICE = (
    "chunks are for modules whose tokens do not meet (MLPs, norms, the output layer with its loss): name the modules "
    "inside that are such, as in chunks={'h.*.mlp': 4}, or leave this one out. For losses of the next token, shift the "
    "labels (with ignore_index for the last), not the logits."
)


@dataclass(frozen=True, slots=True)
class Found:
    """Which of the nodes run in the loop, by place, over which of their loops, and where the tokens are in values.

    `summed` is what is added up.
    """

    inside: Mapping[int, Loop]
    tokens: Mapping[str, Tokens]
    summed: frozenset[str]


def first_loop(nodes: Sequence[Node], values: Mapping[str, Value], outside: Sequence[str]) -> Found:
    """The loop of nodes that read the values `outside`, the first of which has the tokens; else the largest made have.

    These are in the first dim beside the samples that is not the last; in what has but one, rows are what is cut.
    Raises CaptureError for what cannot be run so, naming operator, module and line.
    """
    refused: list[CaptureError] = []
    for name, start in (*_starts([values[outside[0]]]), *_starts([out for out, _ in _largest(nodes)])):
        try:
            found = loop(nodes, values, {name: start})
            _check_widest(nodes, found)
            return found
        except CaptureError as error:
            refused.append(error)
    if not refused:
        refuse(nodes[0], f"cannot be run in chunks: {outside[0]} has no dim for tokens", ADVICE)
    raise refused[0]


def _starts(found: Sequence[Value]) -> list[tuple[str, Tokens]]:
    """What may be the tokens of values, beside their names, the likeliest first."""
    sizes = [
        (value.name, dim, size)
        for value in found
        for dim, size in enumerate(value.shape[: len(value.shape) - value.dtype.is_floating_point])
    ]
    likely = [(name, Tokens(dim, size)) for name, dim, size in sizes if isinstance(size, int) and size > 1]
    return likely or [(name, Tokens(dim, size)) for name, dim, size in sizes if isinstance(size, Size)]


def _largest(nodes: Sequence[Node]) -> list[tuple[Value, Node]]:
    """The largest values that nodes make, and what makes them."""
    made = [(out, node) for node in nodes for out in node.outs if out is not None]
    most = max(out.nbytes(64) for out, _ in made)
    return [(out, node) for out, node in made if out.nbytes(64) == most]


def _check_widest(nodes: Sequence[Node], found: Found) -> None:
    """Refuse a loop outside of which the largest value would be."""
    out, node = _largest(nodes)[0]
    if out.name not in found.tokens:
        refuse(node, "makes what has no part for each token", ADVICE)


def loop(nodes: Sequence[Node], values: Mapping[str, Value], given: Mapping[str, Tokens]) -> Found:
    """The loop of nodes over the tokens, which are in the values `given`.

    Raises CaptureError as `first_loop` does.
    """
    walk = _Walk(nodes, values, dict(given))
    walk.follow()
    return walk.sorted()


@dataclass(slots=True)
class _Walk:
    """The nodes, and what is known of where the tokens are in each value."""

    nodes: Sequence[Node]
    values: Mapping[str, Value]
    tokens: dict[str, Tokens]
    rules: dict[int, Rule | None] = field(default_factory=dict)

    def rule(self, number: int) -> Rule | None:
        """The rule of a node; None where it has none, or draws numbers, which it does by their places in the whole."""
        if number not in self.rules:
            node = self.nodes[number]
            self.rules[number] = None if _is_draw(node) else rule(node, self.values)
        return self.rules[number]

    def follow(self) -> None:
        """Find the tokens in what nodes read and make, from those in what they make and read."""
        known = -1
        while known != len(self.tokens):
            known = len(self.tokens)
            for number, node in enumerate(self.nodes):
                found, _ = self.loop(number)
                own = self.rule(number)
                if found is None or own is None:
                    continue
                dims = dict(own.operands)
                for slot, _, arg in slots(node):
                    if isinstance(arg, Ref):
                        self._learn(arg.name, tokens_of(dims[slot], own.factors, found))
                for out, result in zip(node.outs, own.results, strict=True):
                    if out is not None:
                        self._learn(out.name, tokens_of(result or (), own.factors, found))

    def _learn(self, name: str, tokens: Tokens | None) -> None:
        if tokens is not None:
            self.tokens.setdefault(name, tokens)

    def loop(self, number: int) -> tuple[Loop | None, str]:
        """The loop of a node over the tokens; None: why there is not one such."""
        node, own = self.nodes[number], self.rule(number)
        if own is None:
            why = "draws numbers by their places" if _is_draw(node) else "has no factor rule"
            return None, f"{why}, so it cannot be run in chunks"
        dims = dict(own.operands)
        read = [
            (dims[slot], arg.name)
            for slot, _, arg in slots(node)
            if isinstance(arg, Ref) and slot not in own.shape_only
        ]
        made = [(result or (), out.name) for result, out in zip(own.results, node.outs, strict=True) if out is not None]
        found = {loop_of(each, own.factors, self.tokens[name]) for each, name in (*read, *made) if name in self.tokens}
        if None in found:
            return None, "regroups the tokens with another dim"
        loops = {each for each in found if each is not None}
        if len(loops) > 1:
            return None, "relates tokens to each other"
        if any(own.factors[each.factor].blocked for each in loops):
            return None, "needs all tokens at once"
        return next(iter(loops), None), ""

    # ---- what runs where ---------------------------------------------------------------------------------------------

    def sorted(self) -> Found:
        """What runs in the loop."""
        inside: dict[int, Loop] = {}
        cut: set[str] = set()
        after: set[str] = set()
        summed: set[str] = set()
        for number, node in enumerate(self.nodes):
            read, (found, why) = {*node.refs()}, self.loop(number)
            if read & after or self._needs(number) & summed:
                if read & cut:
                    refuse(node, "needs a sum over all tokens before it can go on with each of them", ADVICE)
                after |= {*node.names()}
                continue
            if found is None:
                if read & cut and _moves(node):  # it waits for all chunks
                    after |= {*node.names()}
                    continue
                if read & cut:
                    refuse(node, why or "reads the tokens, but none of its dims has them", ADVICE)
                after |= {*node.names()} if read & summed else set()
                continue
            inside[number] = found
            for i, out in enumerate(node.outs):
                if out is not None and out.name in self.tokens:
                    cut.add(out.name)
                elif out is not None:
                    self._check_sum(number, i, found)
                    summed.add(out.name)
        if not inside:
            refuse(self.nodes[0], "begins what cannot be run in chunks", ADVICE)
        return Found(inside, self.tokens, frozenset(summed))

    def _needs(self, number: int) -> set[str]:
        """What a node reads, and not only for its shape."""
        node, own = self.nodes[number], self.rule(number)
        unread = own.shape_only if own is not None else frozenset()
        return {arg.name for slot, _, arg in slots(node) if isinstance(arg, Ref) and slot not in unread}

    def _check_sum(self, number: int, result: int, found: Loop) -> None:
        """Refuse a result that is no sum of what it is for the chunks."""
        node, own = self.nodes[number], self.rule(number)
        assert own is not None  # it has a loop
        if not own.contracts(result, found.factor):
            refuse(node, "makes the same for every chunk, beside what it makes for each", ADVICE)
        how = own.factors[found.factor].reduction
        if how != "sum":
            refuse(node, f"takes the {how} over the tokens", ADVICE)
        if any(self._counts(node, slot) for slot in own.additive(found.factor)):
            refuse(node, "adds to a sum over the tokens what would be added for every chunk", ADVICE)

    def _counts(self, node: Node, slot: str) -> bool:
        return any(each == slot and arg != 0 for each, _, arg in slots(node))


def _moves(node: Node) -> bool:
    """Whether a node only changes how a value is placed on an axis (`passes.localise`)."""
    return is_collective(node.op) or (node.sequence < 0 and node.aten in ("slice", "clone", "reshape", "view"))


def _is_draw(node: Node) -> bool:
    return is_random(node) and node.op.namespace == "autopart"


def only_for(nodes: Sequence[Node], taken: Sequence[int], free: frozenset[str]) -> tuple[int, ...]:
    """The nodes beside those `taken` whose results only these read, and which are made of values `free` alone."""
    chosen = set(taken)
    within = set(free)
    for node in nodes:
        if all(name in within for name in node.refs()):
            within |= {*node.names()}
    for number in reversed(range(len(nodes))):
        names = {*nodes[number].names()}
        readers = [i for i, node in enumerate(nodes) if not names.isdisjoint(node.refs())]
        if number not in chosen and names <= within and readers and chosen.issuperset(readers):
            chosen.add(number)
    return tuple(sorted(chosen))
