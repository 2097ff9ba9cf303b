"""tokens: Captured -> how every value depends on the tokens of the sequence, and how a slice computes every node.

    whole   no more than the inputs of all tokens enter it, or none do: every slice computes all of it
    cut     it has a part for every token, which depends on no later one: a slice computes those of its tokens
    part    a sum over the tokens: a slice computes what its tokens add

The tokens enter with the caller's inputs and are followed node by node through one loop of each factor rule, as the
samples are (`dependence`). A value becomes cut where parameters meet what holds the tokens; until then all of it is at
hand, so labels may be shifted. Only causal attention (`causal`) may read other tokens than its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import NoReturn

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Dim, Input, Node, Share, Value
from autopart.passes.masks import hides_later
from autopart.rules.dependence import refuse
from autopart.rules.factor import Call, Dims, Factor, Rule, bind, ratio
from autopart.rules.split import loop_at, product
from autopart.rules.table import rule_of

ADVICE = (
    "A schedule of token slices needs a model whose tokens meet in causal attention alone "
    "(F.scaled_dot_product_attention with is_causal=True, without a mask or dropout of its own); schedules of whole "
    "sequences, such as schedule='1f1b', take any."
)

CAUSAL = "_scaled_dot_product_flash_attention_for_cpu"
"""The kernel in which causal attention is recognised; its backward has ``_backward`` behind its name."""


_NOTHING = (
    "schedule: slices of the sequence are for causal attention over the tokens of an input, but there is none here; "
    f"tokens are dim 1 of the first input that has one. {ADVICE}"
)


class How(Enum):
    """How a value, or the node that makes it, depends on the tokens."""

    WHOLE = "whole"
    CUT = "cut"
    PART = "part"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where the tokens are in a value: the first `length` of them in dim `dim`, in a row for each of `outer` places."""

    dim: int
    length: Dim
    outer: Dim = 1

    @property
    def number(self) -> int:
        """The length of what does not move with the batch."""
        assert isinstance(self.length, int)
        return self.length


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of an operator over the first `length` tokens: factor number `factor`, as ``outer x length x rest``."""

    factor: int
    length: Dim
    outer: Dim = 1

    @property
    def number(self) -> int:
        """The length of what does not move with the batch."""
        assert isinstance(self.length, int)
        return self.length


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value.

    `tokens` is where the tokens are in one that is cut, or that is whole and has all of them; `free`: no parameter and
    no gradient enters it.
    """

    how: How
    tokens: Tokens | None = None
    free: bool = False


@dataclass(frozen=True, slots=True)
class Treatment:
    """How a slice computes a node: over its own tokens, in `loop`, where the node is cut; or as causal attention.

    `once` are the operands and numbers that are added to a sum over the tokens, which is to have them once. `part` says
    that the node takes the first tokens of a value, or puts tokens into a longer one, along that dim.
    """

    how: How
    loop: Loop | None = None
    causal: bool = False
    once: frozenset[str] = frozenset()
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Dependence:
    """The facts of all values by name, and the treatment of every node of the graph, in order.

    `length` is the number of tokens of what is cut: fewer than an input has of which the last ones are labels only.
    """

    length: int
    facts: Mapping[str, Fact]
    treatments: tuple[Treatment, ...]


def depend(captured: Captured) -> Dependence:
    """How a step depends on its tokens: dim 1 of the first input that has one, and of all inputs as long there.

    (Where the samples are not dim 0, the first dim beside theirs.) Raises CaptureError, naming operator, module and
    line, for what relates tokens otherwise than causal attention does, and where no input has tokens.
    """
    samples = dict(captured.batch_dims)
    inputs = [item for item in captured.of_kind("input") if item.target in samples and len(item.value.shape) > 1]
    dims = {item.value.name: 0 if samples[item.target] else 1 for item in inputs}
    sizes = {item.value.name: item.value.shape[dims[item.value.name]] for item in inputs}
    length = next((size for size in sizes.values() if isinstance(size, int)), 0)
    walk = _Walk(captured, {name: Tokens(dims[name], length) for name in dims if sizes[name] == length})
    treatments: list[Treatment] = []
    for node in captured.nodes:
        if node.backward and walk.tangents:
            walk.reach_tangents()
        treatments.append(walk.node(node))
    if not any(treatment.causal for treatment in treatments):
        raise CaptureError(_NOTHING)
    longest = max(fact.tokens.number for fact in walk.facts.values() if fact.how is How.CUT and fact.tokens)
    return Dependence(longest, walk.facts, tuple(treatments))


class _Walk:
    """One pass over the nodes."""

    def __init__(self, captured: Captured, holders: Mapping[str, Tokens]) -> None:
        self.outputs = captured.outputs
        self.hides_later = cache(partial(hides_later, captured))
        self.values = {value.name: value for value in captured.values()}
        self.tangents: tuple[Input, ...] = captured.of_kind("tangent")
        self.facts: dict[str, Fact] = {}
        self.shortened: set[int] = set()  # sequence numbers of what takes the first tokens of what is cut
        for item in captured.inputs:
            bound = item.kind in ("parameter", "tangent") or item.requires_grad
            self.facts[item.value.name] = Fact(How.WHOLE, holders.get(item.value.name), not bound)

    def reach_tangents(self) -> None:
        """The gradient of an output has its tokens where the output has them."""
        made = {out.target: self.facts[out.name].tokens for out in self.outputs if out.kind == "output"}
        for item in self.tangents:
            self.facts[item.value.name] = Fact(How.WHOLE, made.get(item.target))
        self.tangents = ()

    def node(self, node: Node) -> Treatment:
        """The treatment of a node, whose results' facts are added."""
        treatment, found = _Step(node, self).taken()
        self.facts.update(found)
        return treatment


Taken = tuple[Treatment, dict[str, Fact]]
"""How a node is treated, and what is known of its results."""


class _Step:
    """One node with its rule and the facts of its operands."""

    def __init__(self, node: Node, walk: _Walk) -> None:
        self.node, self.walk = node, walk
        numbers = node.mapped(lambda arg: arg.factor if isinstance(arg, Share) else arg)
        self.call: Call = bind(numbers, walk.values)
        self.facts = {operand.slot: walk.facts[operand.value.name] for operand in self.call.operands}
        self.free = all(fact.free for fact in self.facts.values())
        self.outs = [(i, out) for i, out in enumerate(node.outs) if out is not None]

    def taken(self) -> Taken:
        """The treatment, and the facts of the results."""
        if all(fact.how is How.WHOLE and fact.tokens is None for fact in self.facts.values()):
            return self._whole()
        if self._is_causal():
            return Treatment(How.CUT, causal=True), self._all(self.facts["query"])
        if (part := self._part()) is not None:
            return part
        rule = self._rule()
        if rule is None:
            return self._whole()
        loop, exact = self._loop(rule)
        parts = frozenset(slot for slot, fact in self.facts.items() if fact.how is How.PART) - rule.shape_only
        if loop is not None and (exact or not self.free):
            return self._over(rule, loop, parts)
        if parts:
            return Treatment(How.PART, once=self._once(rule, parts)), self._all(Fact(How.PART))
        whole = {}
        for i, out in self.outs:
            tokens = tokens_of(rule.results[i] or (), rule.factors, loop) if loop else self._along(out)
            whole[out.name] = Fact(How.WHOLE, tokens, self.free)
        return Treatment(How.WHOLE), whole

    def _along(self, out: Value) -> Tokens | None:
        """Where tokens are that were shifted, padded or counted along their dim, all of them being at hand."""
        for operand in self.call.operands:
            tokens = self.facts[operand.slot].tokens
            if self.free and tokens is not None and tokens.outer == 1 and len(operand.value.shape) == len(out.shape):
                size = out.shape[tokens.dim]
                return Tokens(tokens.dim, size) if isinstance(size, int) and size > 1 else None
        return None

    def _whole(self) -> Taken:
        return Treatment(How.WHOLE), self._all(Fact(How.WHOLE, free=self.free))

    def _all(self, fact: Fact) -> dict[str, Fact]:
        return {out.name: fact for _, out in self.outs}

    def _rule(self) -> Rule | None:
        found = rule_of(self.node, self.call)
        if found is None and any(fact.how is not How.WHOLE for fact in self.facts.values()):
            self._refuse("has no factor rule, so how its result depends on the tokens is unknown")
        return found

    # ---- what knows tokens by their places ---------------------------------------------------------------------------

    def _is_causal(self) -> bool:
        """Whether this is causal attention of the tokens to each other; refuses what reaches later ones."""
        name = self.node.op.overloadpacket.__name__
        sides = [self.facts.get(slot) for slot in ("query", "key", "value")]
        places = {(fact.how, fact.tokens) if fact else None for fact in sides}
        if "attention" not in name or len(places) > 1 or not _in_rows(sides[0]):
            return False
        if not self._hides_later():
            self._refuse("lets tokens attend to later ones, or has a mask of which that is not known")
        if name.removesuffix("_backward") != CAUSAL:
            self._refuse("is causal attention by a kernel that cannot be given a mask for a slice's queries")
        return True

    def _hides_later(self) -> bool:
        """Whether no token attends to a later one, whatever the inputs are."""
        masks = [o.value.name for o in self.call.operands if o.slot in ("attn_mask", "attn_bias")]
        return all(map(self.walk.hides_later, masks)) if masks else bool(self.call.args.get("is_causal"))

    def _part(self) -> Taken | None:
        """The first tokens of what is cut, ``x[:, :-1]``; its backward, and that of what is longer than the sequence.

        None if this is no such node.
        """
        name = self.node.op.overloadpacket.__name__
        slot = {"slice": "self", "slice_backward": "grad_output"}.get(name)
        fact = self.facts[slot] if slot and self.outs else None
        if fact is None or fact.how is not How.CUT or fact.tokens is None or fact.tokens.outer != 1:
            return None
        (_, out), start, step = self.outs[0], self.call.args["start"], self.call.args["step"]
        dim, size = self.call.args["dim"] % len(out.shape), out.shape[fact.tokens.dim]
        if dim != fact.tokens.dim or step != 1 or not isinstance(size, int):
            return None
        if name == "slice_backward" and self.node.sequence not in self.walk.shortened:
            return Treatment(How.PART, part=dim), self._all(Fact(How.PART))
        if start not in (0, None):
            return None
        self.walk.shortened.add(self.node.sequence)
        return Treatment(How.CUT, part=dim), self._all(Fact(How.CUT, Tokens(dim, size)))

    # ---- the loop over tokens ----------------------------------------------------------------------------------------

    def _loop(self, rule: Rule) -> tuple[Loop | None, bool]:
        """The loop over the tokens, and whether some operand has only those of a slice; None: there is none."""
        exact: set[Loop] = set()
        marked: set[Loop | None] = set()
        dims = dict(rule.operands)
        for slot, fact in self.facts.items():
            if fact.tokens is None:
                continue
            found = loop_of(dims[slot], rule.factors, fact.tokens)
            blocked = found is not None and rule.factors[found.factor].blocked
            if fact.how is How.WHOLE:
                marked.add(None if blocked else found)
            elif slot not in rule.shape_only or (found is not None and not blocked):
                exact.add(self._free_loop(found, blocked))
        if len(exact) > 1:
            self._refuse("relates tokens to each other")
        if exact:
            return exact.pop(), True
        return (marked.pop() if len(marked) == 1 else None), False

    def _free_loop(self, found: Loop | None, blocked: bool) -> Loop:
        if found is None:
            self._refuse("regroups the tokens with another dim")
        if blocked:
            self._refuse("needs all tokens at once")
        return found

    def _over(self, rule: Rule, loop: Loop, parts: frozenset[str]) -> Taken:
        """A node that runs over the tokens of a slice."""
        found = {}
        for i, out in self.outs:
            tokens = tokens_of(rule.results[i] or (), rule.factors, loop)
            if tokens is not None:
                found[out.name] = Fact(How.CUT, tokens)
            elif rule.contracts(i, loop.factor):
                if rule.factors[loop.factor].reduction != "sum":
                    self._refuse(f"takes the {rule.factors[loop.factor].reduction} over the tokens")
                found[out.name] = Fact(How.PART)
            else:
                found[out.name] = Fact(How.WHOLE)
        added = rule.additive(loop.factor) if all(fact.how is How.PART for fact in found.values()) else frozenset()
        if parts - added:
            self._refuse(_NO_SUM)
        return Treatment(How.CUT, loop, once=self._not_zero(added - parts)), found

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _once(self, rule: Rule, parts: frozenset[str]) -> frozenset[str]:
        """What is added to parts of a sum; refuses sums over the tokens that are used as more than a sum."""
        fitting = [together for together in rule.linear if parts <= together]
        if not fitting:
            self._refuse(_NO_SUM)
        return self._not_zero(min(fitting, key=len) - parts)

    def _not_zero(self, slots: frozenset[str]) -> frozenset[str]:
        return frozenset(slot for slot in slots if self.call.has(slot) or self.call.args.get(slot) != 0)

    def _refuse(self, what: str) -> NoReturn:
        refuse(self.node, what, ADVICE)


def _in_rows(fact: Fact | None) -> bool:
    """Whether queries, keys or values are cut in the dim that kernels have for it: [samples, heads, tokens, width]."""
    held = fact is not None and fact.how is How.CUT and fact.tokens
    return bool(held and (held.dim, held.outer) == (2, 1))


_NO_SUM = "makes more than a sum of what is a sum over the tokens"


def loop_of(dims: Dims, factors: Sequence[Factor], tokens: Tokens) -> Loop | None:
    """The loop of an operator that runs over the tokens of an operand or result with these dims; None: no single one.

    It has ``outer x length x rest`` elements.
    """
    dim = dims[tokens.dim]
    found = loop_at(dim, factors, tokens.outer)
    if found is None:
        return None
    at, outer = found
    fits = ratio(factors[dim[at]].size, product((outer, tokens.length))) is not None
    return Loop(dim[at], tokens.length, outer) if fits else None


def tokens_of(dims: Dims, factors: Sequence[Factor], loop: Loop) -> Tokens | None:
    """Where the tokens are in a tensor with these dims, if it has the loop that runs over them."""
    for i, dim in enumerate(dims):
        if loop.factor in dim:
            before = (factors[f].size for f in dim[: dim.index(loop.factor)])
            return Tokens(i, loop.length, product((*before, loop.outer)))
    return None


def rest_of(size: Dim, tokens: Tokens | Loop) -> Dim:
    """The elements of a loop or dim of ``outer x length x rest`` inside of each token."""
    found = ratio(size, product((tokens.outer, tokens.length)))
    assert found is not None  # as `loop_of` made sure
    return found
