"""How every value depends on the batch: equal on all microbatches, split over them, or a sum over them.

The batch is one factor of the factor rules. It enters with the inputs that hold samples and is followed node by node:
an operator that carries it into its result splits the result, one that contracts it leaves a sum of which each
microbatch has a part, and through that sum only linear operators may pass. What is used otherwise must be known whole
before: a value that no parameter enters (a count of valid targets) is lifted into a prologue over the whole batch;
anything else couples the samples of a batch and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Input, Node, Output, Ref, Size, Value
from autopart.rules.factor import ArgPath, Call, Dims, Factor, Rule, bind, is_batch, slots
from autopart.rules.table import family


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every microbatch."""


@dataclass(frozen=True, slots=True)
class Split:
    """The dim `dim` holds the batch, as the inner part of ``outer x batch x rest`` where a view merged dims."""

    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """The sum over the microbatches is the true value."""


BatchPlacement = Replicated | Split | Partial


@dataclass(frozen=True, slots=True)
class Site:
    """An argument of a node: the node's index, and the path of the argument in it."""

    node: int
    path: ArgPath


@dataclass(frozen=True, slots=True)
class Judgement:
    """How the values of a graph depend on the batch, and what must change for its microbatches to add up to the whole.

    `shares`: arguments (tensors, or plain numbers that are added) to be multiplied by the microbatch's share of the
    batch; `output_shares`: indices of outputs likewise. `whole`: arguments that are a `Size` in the arithmetic, to be
    taken of the whole batch. `prologue`: values to be computed over the whole batch first; they count as Replicated.
    """

    placements: Mapping[str, BatchPlacement]
    shares: tuple[Site, ...]
    output_shares: tuple[int, ...]
    whole: tuple[Site, ...]
    prologue: tuple[str, ...]


def judge(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Judgement:
    """Judge a joint graph, whose means over the batch are decomposed (`decompose_means`).

    Raises `CaptureError`, naming the operator, its module and its source line, for what couples the samples of a batch,
    and for an operator without a rule that reads samples.
    """
    lifted: frozenset[str] = frozenset()
    while True:
        scan = _Scan(inputs, outputs, lifted)
        try:
            for index, node in enumerate(nodes):
                scan.node(index, node)
            output_shares = tuple(i for i, output in enumerate(outputs) if scan.output(output))
        except _Lift as found:
            lifted |= found.names
            continue
        prologue = tuple(name for node in nodes for name in node.names() if name in lifted)
        placements = {name: fact.place for name, fact in scan.facts.items()}
        return Judgement(placements, tuple(scan.shares), output_shares, whole_sizes(nodes), prologue)


def whole_sizes(nodes: Sequence[Node]) -> tuple[Site, ...]:
    """The arguments that are a `Size` used as a number, not as the size or place of a dim."""
    return tuple(Site(i, path) for i, node in enumerate(nodes) for path in _numbers(node))


def _numbers(node: Node) -> Iterator[ArgPath]:
    types = {argument.name: str(argument.type) for argument in node.op._schema.arguments}
    for slot, path, arg in slots(node):
        if isinstance(arg, Size) and not arg.whole and "int" not in types[slot.split(".")[0]].lower():
            yield path


class _Lift(Exception):
    """Values that must be known over the whole batch before the graph can be judged."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


@dataclass(frozen=True, slots=True)
class _Fact:
    """What is known: `free` of parameters, tangents and random numbers; all `zero`; `uniform`, all samples alike."""

    place: BatchPlacement
    free: bool
    zero: bool = False
    uniform: bool = False


class _Scan:
    """One walk over the graph, with the values in `lifted` taken as known over the whole batch."""

    def __init__(self, inputs: Sequence[Input], outputs: Sequence[Output], lifted: frozenset[str]) -> None:
        self.lifted = lifted
        self.values = {entry.value.name: entry.value for entry in inputs}
        self.facts = {entry.value.name: _input_fact(entry) for entry in inputs if entry.kind != "tangent"}
        # a tangent is placed as its output is, which is known by the time that the backward reads it
        self.tangents = {entry.value.name: entry for entry in inputs if entry.kind == "tangent"}
        self.outputs = {output.target: output.name for output in outputs if output.kind == "output"}
        self.inputs = {entry.target: entry.value.name for entry in inputs if entry.kind == "input"}
        self.shares: list[Site] = []

    def fact(self, name: str) -> _Fact:
        """What is known of a value that was defined before."""
        if name not in self.facts:
            self.facts[name] = self._tangent(self.tangents[name])
        return self.facts[name]

    def _tangent(self, entry: Input) -> _Fact:
        dims = _batch_dims(entry.value)
        of = self.outputs.get(entry.target)
        if not dims:
            return _Fact(Replicated(), free=False)
        same = of is not None and self.values[of].shape == entry.value.shape
        return _Fact(self.fact(of).place if of is not None and same else Split(dims[0]), free=False)

    def node(self, index: int, node: Node) -> None:
        """Place the results of one node."""
        outs = [out for out in node.outs if out is not None]
        reads = [self.fact(name) for name in node.refs()]
        free = all(fact.free for fact in reads) and torch.Tag.nondeterministic_seeded not in node.op.tags
        for out in outs:
            self.values[out.name] = out
        if all(out.name in self.lifted for out in outs):
            self.facts |= {out.name: _Fact(Replicated(), free) for out in outs}
        elif all(isinstance(fact.place, Replicated) for fact in reads) and not any(map(_batch_dims, outs)):
            zero = _makes_zero(node) or (any(fact.zero for fact in reads) and _Step(self, index, node, free).zero())
            self.facts |= {out.name: _Fact(Replicated(), free, zero) for out in outs}
        else:
            self.facts |= _Step(self, index, node, free).place()

    def output(self, output: Output) -> bool:
        """Whether an output must be multiplied by the microbatch's share."""
        fact = self.fact(output.name)
        if output.kind not in ("loss", "grad", "mutation"):
            return False
        if output.kind == "mutation":
            if isinstance(fact.place, Replicated):
                return False
            raise CaptureError(f"the buffer {output.target!r} is updated from {_ACROSS}. {_ADVICE}")
        source = self.inputs.get(output.target) if output.kind == "grad" else None
        wanted: BatchPlacement = self.fact(source).place if source is not None else Replicated()
        if isinstance(wanted, Split):
            if fact.place != wanted and not fact.uniform:
                raise CaptureError(
                    f"the gradient of the input {output.target} does not belong to its samples. {_ADVICE}"
                )
            return False
        if isinstance(fact.place, Split):
            raise CaptureError(
                f"the {output.kind} {output.target!r} has a dim that is the batch, and is no sum over it"
            )
        return isinstance(fact.place, Replicated) and not fact.zero


class _Step:
    """The judgement of one node."""

    def __init__(self, scan: _Scan, index: int, node: Node, free: bool) -> None:
        rule_family = family(node.op)
        if rule_family is None:
            _refuse(node, "has no factor rule, so how its result depends on the batch is unknown")
        self.scan, self.index, self.node, self.free = scan, index, node, free
        self.call: Call = bind(node, scan.values)
        self.rule: Rule = rule_family(self.call)
        self.facts = {operand.slot: scan.fact(operand.value.name) for operand in self.call.operands}
        self.outs = [(i, out) for i, out in enumerate(node.outs) if out is not None]

    def place(self) -> dict[str, _Fact]:
        """What is known of the node's results; shares that it needs go to the scan."""
        batch = self._batch()
        partial = frozenset(slot for slot, fact in self.facts.items() if isinstance(fact.place, Partial))
        pending = partial - self.rule.shape_only
        if batch is not None:
            places = [self._result(i, out, batch) for i, out in self.outs]
            summed = all(isinstance(place, Partial) for place in places)
            sums = self.rule.additive(batch[0]) if summed else frozenset()
            if pending - sums:
                self._need_whole([pending - sums])
        elif pending:
            places = [Partial()] * len(self.outs)
            sums = self._linear(pending)
        else:
            places, sums = [Replicated()] * len(self.outs), frozenset()
        self._share(sums, pending)
        zero = self.zero()
        split = [fact for fact in self.facts.values() if isinstance(fact.place, Split)]
        alike = all(fact.uniform for fact in split) and torch.Tag.nondeterministic_seeded not in self.node.op.tags
        return {
            out.name: _Fact(place, self.free, zero, alike and isinstance(place, Split))
            for (_, out), place in zip(self.outs, places, strict=True)
        }

    def zero(self) -> bool:
        """Whether the results are zero: made so, or linear in operands that are all zero."""
        return _makes_zero(self.node) or any(all(map(self._is_zero, together)) for together in self.rule.linear)

    def _is_zero(self, slot: str) -> bool:
        return self.facts[slot].zero if slot in self.facts else _is_number_zero(self.call.args[slot])

    def _batch(self) -> tuple[int, int] | None:
        """The factor that is the batch, with the number of elements outside of the batch within it."""
        exact: set[tuple[int, int]] = set()
        alike: set[tuple[int, int]] = set()
        dims = dict(self.rule.operands)
        for slot, fact in self.facts.items():
            if isinstance(fact.place, Split):
                found = _locate(dims[slot], self.rule.factors, fact)
                if found is None:
                    self._couple("it regroups the batch with another dim")
                else:
                    (alike if fact.uniform else exact).add(found)
        if not exact and not alike:
            made = (dim for result, _ in self.outs for dim in self.rule.results[result] or ())
            alike = {(factor, 1) for dim in made for factor in dim if is_batch(self.rule.factors[factor].size)}
        if len({factor for factor, _ in exact | alike}) > 1 or len(exact) > 1:
            self._couple("it relates the samples to each other")
        if not exact and not alike:
            return None
        batch = next(iter(exact or alike))
        if self.rule.factors[batch[0]].blocked:
            self._couple(
                _BLOCKED.get(self.node.op.overloadpacket.__name__, "it needs the whole of the batch dim at once")
            )
        return batch

    def _result(self, result: int, out: Value, batch: tuple[int, int]) -> BatchPlacement:
        """The placement of one result, checked against the dims of its shape that move with the batch."""
        factor, within = batch
        place: BatchPlacement = Replicated()
        for i, dim in enumerate(self.rule.results[result] or ()):
            if factor in dim:
                place = Split(i, within * _elements(dim[: dim.index(factor)], self.rule.factors))
        if self.rule.contracts(result, factor):
            how = self.rule.factors[factor].reduction
            if how != "sum":
                self._couple(f"it takes the {how} over the batch")
            place = Partial()
        moving = _batch_dims(out)
        if moving != ((place.dim,) if isinstance(place, Split) else ()):
            self._couple(f"dims {list(moving)} of its result move with the batch, where one alone may")
        if moving and isinstance(size := out.shape[moving[0]], Size) and size.constant:
            self._couple(f"its result has {size.text('batch')} rows, which are not the same number for every sample")
        return place

    def _linear(self, pending: frozenset[str]) -> frozenset[str]:
        """The smallest linear set that has all the pending sums; without one, those sums are lifted or refused."""
        fitting = [together for together in self.rule.linear if pending <= together]
        if fitting:
            return min(fitting, key=len)
        self._need_whole([pending - together for together in self.rule.linear] or [pending])

    def _need_whole(self, choices: Sequence[frozenset[str]]) -> NoReturn:
        """Lift the first choice of pending sums that no parameter enters; refuse if there is none."""
        for choice in choices:
            if all(self.facts[slot].free for slot in choice):
                raise _Lift(frozenset(o.value.name for o in self.call.operands if o.slot in choice))
        names = ", ".join(sorted(choices[0]))
        _refuse(self.node, f"couples the samples of a batch: it makes more than a sum of {names}, a sum over the batch")

    def _share(self, sums: frozenset[str], pending: frozenset[str]) -> None:
        """Ask for the share of operands that are equal on all microbatches and are added to a sum."""
        needed = {slot for slot in sums - pending if not self._is_zero(slot)}
        if not needed:
            return
        counts = {o.slot for o in self.call.operands if not _has_fractions(o.value)}
        if counts & sums:  # a whole number has no share
            self._need_whole([pending])
        self.scan.shares += [Site(self.index, path) for slot, path, _ in slots(self.node) if slot in needed]

    def _couple(self, why: str) -> NoReturn:
        """Lift the results if no parameter enters them and they have no sample of their own; else refuse."""
        if self.free and self.outs and not any(_batch_dims(out) for _, out in self.outs):
            raise _Lift(frozenset(out.name for _, out in self.outs))
        _refuse(self.node, f"couples the samples of a batch: {why}")


_ACROSS = "the samples of the batch, so microbatches would each update it differently"
_ADVICE = (
    'Pass semantics="accumulate" to train microbatch by microbatch, as gradient accumulation does, '
    "or name the inputs that hold no samples, batch={name: None}"
)
_BLOCKED: Mapping[str, str] = {
    "arange": "it numbers the samples, and a microbatch does not know where in the batch it is",
    "linspace": "it numbers the samples, and a microbatch does not know where in the batch it is",
    "native_batch_norm": "it normalises by the statistics of the whole batch",
    "_native_batch_norm_legit": "it normalises by the statistics of the whole batch",
    "_native_batch_norm_legit_functional": "it normalises by the statistics of the whole batch",
}


def _refuse(node: Node, what: str) -> NoReturn:
    module = f" in module {node.module!r}" if node.module else ""
    source = f"\n  {node.source}" if node.source else ""
    raise CaptureError(f"{node.opname}{module} {what}.{source}\n{_ADVICE}")


def _has_fractions(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _batch_dims(value: Value) -> tuple[int, ...]:
    return tuple(i for i, size in enumerate(value.shape) if is_batch(size))


def _input_fact(entry: Input) -> _Fact:
    dims = _batch_dims(entry.value)
    free = entry.kind != "parameter"
    if not dims:
        return _Fact(Replicated(), free)
    shape = ", ".join(size.text("batch") if isinstance(size, Size) else str(size) for size in entry.value.shape)
    size = entry.value.shape[dims[0]]
    if entry.kind != "input" or len(dims) > 1 or not isinstance(size, Size) or size.constant:
        raise CaptureError(
            f"the {entry.kind} {entry.target!r} has shape [{shape}]: one dim of an input may be the batch, and of nothing "
            "else. Say which dim holds the samples, batch={name: dim or None}"
        )
    return _Fact(Split(dims[0]), free)


def _locate(dims: Dims, factors: Sequence[Factor], fact: _Fact) -> tuple[int, int] | None:
    """The factor of a split operand that is the batch, and how many elements are outside of the batch within it."""
    assert isinstance(fact.place, Split)
    dim = dims[fact.place.dim]
    for i, factor in enumerate(dim):
        size = factors[factor].size
        if isinstance(size, Size) and is_batch(size):
            before = _elements(dim[:i], factors)
            within = 1 if fact.uniform else fact.place.outer // before
            exact = fact.uniform or within * before == fact.place.outer
            return (factor, within) if exact and size.per_sample % within == 0 else None
    return None


def _elements(product: Sequence[int], factors: Sequence[Factor]) -> int:
    total = 1
    for factor in product:
        size = factors[factor].size
        assert isinstance(size, int)  # a dim has one batch, and what is outside of it is a number
        total *= size
    return total


_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_FILL: Mapping[str, str] = {
    "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "fill": "value", "scalar_tensor": "s"
}  # fmt: skip


def _makes_zero(node: Node) -> bool:
    name = node.op.overloadpacket.__name__
    if name in _ZEROS:
        return True
    given = [arg for slot, _, arg in slots(node) if slot == _FILL.get(name)]
    return bool(given) and _is_number_zero(given[0])


def _is_number_zero(arg: Arg) -> bool:
    return not isinstance(arg, Size | Ref) and arg == 0
