"""Weights: how a step is judged that runs on each slice of the batch as it is, and what its losses weigh.

before: loss = mean(norm(x))                     of a slice
after:  loss_share = loss * b / B                which add up to the step's

The graph needs nothing but the weight of each slice's loss, its share of the whole reduction:

* a loss that is a plain sum over the samples has weight 1;
* one that divides such sums by counts of the inputs alone (valid targets) has weight 1 as well, and the counts of the
  whole batch, so a slice without valid targets contributes zero;
* any other has the slice's share of the samples, ``b / B``, on the loss and on the gradient that its backward starts
  from. A term with a count then takes that share of the whole batch's count, so it keeps the weight of its targets.

In a step without a loss every output is weighted so, on its own: the slices' mean, and what is equal on all slices,
hand each slice its share of their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.errors import CaptureError
from autopart.ir.graph import Input, Node, Output, Ref, Value
from autopart.ir.placement import Partial, PerSlice, Replicate, Shard
from autopart.passes.judge import Judgement, Site, takes_sizes
from autopart.passes.slices import Drawn, given, in_slice
from autopart.rules.dependence import batch_dims
from autopart.rules.fact import Fact
from autopart.rules.factor import slots
from autopart.rules.table import rule


def judge_slices(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Judgement:
    """Judge a joint graph that runs on each slice as it is.

    Raises CaptureError for a loss that adds a plain sum over the batch to what is none, and for an output that cannot
    be put together from the slices'.
    """
    weights = _Weights(inputs, nodes, outputs)
    by_samples, counted = weights.checked()
    values, facts = weights.values, weights.facts
    averaged = {
        index for index, out in enumerate(outputs) if out.kind == "output" and _averaged(out, values, facts, counted)
    }
    weighted = {outputs[index].target for index in averaged}  # a slice's share of these is that of its samples
    weighted |= {out.target for out in outputs if out.kind == "output" and isinstance(facts[out.name].place, Replicate)}
    weighted |= {"loss"} if by_samples else set()
    taking = {item.value.name for item in inputs if item.kind == "tangent" and item.target in weighted}
    bare = {index for index, out in enumerate(outputs) if out.kind in ("grad", "input_grad") and out.name in taking}
    lossy = {index for index, out in enumerate(outputs) if out.kind == "loss" and by_samples}
    taking |= counted if by_samples else set()
    places = {name: fact.place for name, fact in facts.items()} | dict.fromkeys(counted, Replicate())
    whole = {item.target for item in inputs if not batch_dims(item.value)}  # what all slices share has one gradient
    summed = [o for o in outputs if o.kind in ("loss", "grad") or (o.kind == "input_grad" and o.target in whole)]
    places |= {out.name: Partial() for out in summed}
    return Judgement(
        placements=places,
        shares=tuple(site for site in _reads(nodes) if _name(nodes, site) in taking),
        output_shares=tuple(sorted(averaged | bare | lossy)),
        whole=(),
        prologue=tuple(name for node in nodes for name in node.names() if name in counted),
    )


def judge_batch(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Judgement:
    """Judge a joint graph that runs on one slice, the batch: all that it computes is the batch's own."""
    values = {item.value.name: item.value for item in inputs}
    updated = {out.target for out in outputs if out.kind == "mutation"}
    facts = {item.value.name: given(item, item.target in updated) for item in inputs}
    for node in nodes:
        values |= {out.name: out for out in node.outs if out is not None}
        facts |= in_slice(node, values, facts)
    places = {name: fact.place for name, fact in facts.items()}
    for out in outputs:
        dims = batch_dims(values[out.name])
        added = out.kind in ("loss", "grad") or (out.kind == "input_grad" and not dims)
        places[out.name] = Partial() if added else Shard(dims[0]) if dims else Replicate()
    return Judgement(placements=places, shares=(), output_shares=(), whole=(), prologue=())


def counts(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> frozenset[str]:
    """The values by which the loss divides sums over the samples, and that the inputs alone decide."""
    return frozenset(_Weights(inputs, nodes, outputs).counts)


def _reads(nodes: Sequence[Node]) -> Iterator[Site]:
    for index, node in enumerate(nodes):
        yield from (Site(index, path) for _, path, arg in slots(node) if isinstance(arg, Ref))


def _name(nodes: Sequence[Node], site: Site) -> str:
    return next(str(arg.name) for _, path, arg in slots(nodes[site.node]) if path == site.path)


def _averaged(out: Output, values: Mapping[str, Value], facts: Mapping[str, Fact], counts: frozenset[str]) -> bool:
    """Whether an output beside the loss is the slices' mean, each with its share of the samples."""
    if out.name in counts or not isinstance(facts[out.name].place, PerSlice):
        return False
    if not values[out.name].dtype.is_floating_point:
        raise CaptureError(
            f"the output {out.name} is a whole number of each microbatch, and no sum over its samples, so there is "
            "none for the batch; return it with a batch dim, or as a sum over the samples"
        )
    return True


_PASSING = frozenset({"neg", "_to_copy", "view", "_unsafe_view", "expand", "squeeze", "unsqueeze", "alias", "clone"})
"""Operators through which a sum passes: their first operand is the only one."""


class _Weights:
    """The terms that a loss is the sum of, each followed down to where the batch is reduced."""

    def __init__(self, inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> None:
        updated = {out.target for out in outputs if out.kind == "mutation"}
        self.values = {item.value.name: item.value for item in inputs}
        self.facts = {item.value.name: given(item, item.target in updated) for item in inputs}
        self.scales: dict[str, frozenset[str]] = {}
        self.scaled_sums: set[str] = set()
        self.divisors: dict[str, str] = {}  # by the quotient of samples
        drawn = Drawn()
        for node in nodes:
            self.values.update({out.name: out for out in node.outs if out is not None})
            drawn.node(node, self.values, self.facts)
            self.facts.update(in_slice(node, self.values, self.facts))
            if not node.backward:
                self._scale(node)
        self.made = {name: node for node in nodes if not node.backward for name in node.names()}
        self.counts: set[str] = set()
        self.quotients: set[str] = set()  # where the loss is divided by them
        self.sums: list[Node] = []
        self.others: list[Node] = []
        for out in outputs:
            if out.kind == "loss":
                self._follow(out.name)

    def _scale(self, node: Node) -> None:
        """Note what a node's results are scaled by: quotients by counts, "" for what else only the slice knows.

        A sum of samples that the slice scaled is a mean of its own, not a sum. What is not linear in them starts anew.
        """
        scale = frozenset({""}) if takes_sizes(node) else self._scale_of(node)
        for name in node.names() if scale else ():
            self.scales[name] = scale
            if isinstance(self.facts[name].place, Partial):
                self.facts[name] = replace(self.facts[name], place=PerSlice())
                self.scaled_sums.add(name)

    def _scale_of(self, node: Node) -> frozenset[str]:
        packet = node.aten
        refs = {slot: arg.name for slot, _, arg in slots(node) if isinstance(arg, Ref)}
        if packet not in ("mul", "div") and self.scales.keys().isdisjoint(refs.values()):
            return frozenset()
        linear = frozenset(refs)
        if packet not in ("mul", "div") and (ruled := rule(node, self.values)) is not None:
            linear = frozenset[str]().union(*ruled.linear)
        samples = any(batch_dims(self.values[name]) for name in refs.values())
        found: set[str] = set()
        for slot, name in refs.items():
            if packet in ("mul", "div") and samples and not batch_dims(self.values[name]) and self._moves(name):
                count = packet == "div" and slot == "other" and self.facts[name].free and not self.values[name].shape
                quotient = node.names()[0] if count and node.names() else ""
                self.divisors[quotient] = name
                found.add(quotient)
            elif slot in linear:
                found |= self.scales.get(name, frozenset())
        return frozenset(found)

    def checked(self) -> tuple[bool, frozenset[str]]:
        """Whether the loss has the weight of its samples, and the counts to be taken of the whole batch."""
        if self.sums and self.others:
            one, two = self.sums[0], self.others[0]
            raise CaptureError(
                f"the loss adds a sum over the batch ({_at(one)}) to what is no sum over it ({_at(two)}), so a "
                "microbatch has no one weight in it; divide the sum by the batch size, x.sum() / len(x)"
            )
        by_samples = bool(self.others)
        for count in sorted(self.counts):
            self._check(count, by_samples)
        return by_samples, frozenset(self.counts)

    def _follow(self, name: str) -> None:
        place, node = self.facts[name].place, self.made.get(name)
        if node is None:
            return
        packet = node.aten
        refs = [arg.name for _, _, arg in slots(node) if isinstance(arg, Ref)]
        inner = [name for name in refs if not batch_dims(self.values[name])]
        if isinstance(place, Partial):
            self.sums.append(node)
        elif name in self.scaled_sums and len(inner) < len(refs) and "" not in self.scales[name]:
            for quotient in self.scales[name]:
                self._divided(quotient, self.divisors[quotient])
        elif isinstance(place, Replicate) or len(inner) < len(refs) or takes_sizes(node):
            self.others.append(node)
        elif packet == "div" and len(refs) == 2 and self._counts(refs[0], refs[1]):
            self._divided(name, refs[1])
        elif packet in ("add", "sub", "stack", "cat", "sum", "mean") or packet in _PASSING:
            self._follow_all(node, refs)
        elif packet in ("mul", "div") and sum(self._moves(ref) for ref in refs) == 1 and self._moves(refs[0]):
            self._follow(refs[0])
        elif packet == "mul" and sum(self._moves(ref) for ref in refs) == 1:
            self._follow(refs[1])
        else:
            self.others.append(node)

    def _follow_all(self, node: Node, refs: Sequence[str]) -> None:
        """Every operand is a term; a number beside them is one too, and counts once for the batch."""
        known = node.aten in ("add", "sub")
        if (known and len(refs) == 1) or any(ref not in self.made for ref in refs):
            self.others.append(node)
        for ref in refs:
            self._follow(ref)

    def _divided(self, quotient: str, count: str) -> None:
        self.counts.add(count)
        self.quotients.add(quotient)

    def _moves(self, name: str) -> bool:
        return not isinstance(self.facts[name].place, Replicate)

    def _counts(self, numerator: str, divisor: str) -> bool:
        """Whether this is a sum over the samples divided by a number that the inputs alone decide."""
        return isinstance(self.facts[numerator].place, Partial) and self._moves(divisor) and self.facts[divisor].free

    def _check(self, count: str, by_samples: bool) -> None:
        node = self.made[count]
        users = [user for user in self.made.values() if count in user.refs()]
        other = next((user for user in users if self.quotients.isdisjoint(user.names())), None)
        if other is not None:
            raise CaptureError(
                f"{_at(node)}: this number divides the loss, where it is that of the whole batch, and is used at "
                f"{_at(other)} too, where it is that of a microbatch; compute it twice"
            )
        if by_samples and not self.values[count].dtype.is_floating_point:
            raise CaptureError(
                f"{_at(node)}: this whole number divides a term of the loss, of which a microbatch takes its share; "
                "make it a floating one, count.to(loss.dtype)"
            )


def _at(node: Node) -> str:
    return node.source or node.module or node.opname
