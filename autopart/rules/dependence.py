"""How the results of one node depend on the batch, given how its operands do. `judge` asks this of every node.

The batch is one factor of the node's factor rule: carried into a result it splits that result, contracted it leaves a
sum of which each microbatch has a part, and a sum passes through the operands in which the operator is linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Node, Ref, Size, Value
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.rules.fact import Fact, Groups, Of, Order, Picks
from autopart.rules.factor import ArgPath, Call, Dims, Factor, Rule, bind, is_batch, slots
from autopart.rules.rows import WRITES, groups_of, picked, picks_of, same_numbers, sorted_facts
from autopart.rules.table import rule_of


@dataclass(frozen=True, slots=True)
class Dependence:
    """What is known of a node's results, by name, and the paths of the arguments that must take a share."""

    facts: Mapping[str, Fact]
    shares: tuple[ArgPath, ...] = ()


class NeededWhole(Exception):
    """Values that must be known over the whole batch before the node can be judged."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


ADVICE = (
    "Compute it within each sample (a LayerNorm or GroupNorm rather than a BatchNorm), "
    "name the inputs that hold no samples, batch={name: None}, "
    "have one microbatch, microbatches=1, whose samples compute together, "
    'or let each microbatch compute as if it were the whole batch, semantics="accumulate"'
)

REGISTER = (
    "Say which loops it has, autopart.register_sharding_rule(op, 'b ..., ... -> b ...'), write it in other operations, "
    "or do it outside and pass its result in as an input."
)

_BAGS = (
    "A bag ends where the next one's offset says. Give the EmbeddingBag its input as [batch, bag length] without "
    "offsets, bags filled up with its padding_idx, or have one microbatch, microbatches=1."
)
_INSTEAD: Mapping[str, str] = dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _BAGS)


def depend(node: Node, values: Mapping[str, Value], known: Mapping[str, Fact]) -> Dependence:
    """The dependence of a node's results.

    Raises NeededWhole for sums that no parameter enters and that are used as more than a sum, and CaptureError for any
    other coupling of the samples, or an operator without a rule.
    """
    reads = [known[name] for name in node.refs()]
    free = all(fact.free for fact in reads) and not is_random(node)
    outs = [out for out in node.outs if out is not None]
    if any(not isinstance(fact.place, Replicate) for fact in reads) or any(map(batch_dims, outs)):
        return _Step(node, values, known, free).dependence()
    zero = makes_zero(node) or (any(fact.zero for fact in reads) and _Step(node, values, known, free).zero())
    return Dependence({out.name: Fact(Replicate(), free, zero) for out in outs})


class _Step:
    """One node with its rule and the facts of its operands, by slot."""

    def __init__(self, node: Node, values: Mapping[str, Value], known: Mapping[str, Fact], free: bool) -> None:
        self.call: Call = bind(node, values)
        found = rule_of(node, self.call)
        if found is None:
            advice = _INSTEAD.get(node.aten, REGISTER)
            refuse(node, "has no factor rule, so how its result depends on the batch is unknown", advice)
        self.node, self.free = node, free
        self.name = node.aten
        self.rule: Rule = found
        self.facts = {operand.slot: known[operand.value.name] for operand in self.call.operands}
        self.outs = [(i, out) for i, out in enumerate(node.outs) if out is not None]

    def dependence(self) -> Dependence:
        """Place the results, and say which operands take a share."""
        known = sorted_facts(self.name, self.call, self.facts, self.free)
        if known is not None:
            return Dependence(known)
        picks = picks_of(self.name, self.call, self.facts)
        groups = groups_of(self.name, self.call, self.facts)
        whole = same_numbers(self.name, self.call, self.facts)
        self.picked = self._picked_rows(picks)
        self.order = self._order()
        batch = None if picks is not None and self.name == "arange" else self._batch()
        partial = frozenset(slot for slot, fact in self.facts.items() if isinstance(fact.place, Partial))
        pending = partial - self.rule.shape_only - {slot for _, slot in self._ends()}
        places, sums = self._places(batch, pending)
        zero, uniform = self.zero(), self._uniform()
        order = self.picked.order if self.picked is not None and self.name in WRITES else self.order
        facts = {
            out.name: Fact(place, self.free, zero, uniform, picks, order, groups, whole)
            if isinstance(place, Shard)
            else Fact(place, self.free, zero, groups=groups)
            for (_, out), place in zip(self.outs, places, strict=True)
        }
        return Dependence(facts, self._shares(sums, pending))

    def zero(self) -> bool:
        """Whether the results are zero: made so, or linear in operands that are all zero."""
        return makes_zero(self.node) or any(all(map(self._is_zero, together)) for together in self.rule.linear)

    def _is_zero(self, slot: str) -> bool:
        return self.facts[slot].zero if slot in self.facts else _is_number_zero(self.call.args[slot])

    def _uniform(self) -> bool:
        split = [fact for fact in self.facts.values() if isinstance(fact.place, Shard)]
        return all(fact.uniform for fact in split) and self.name != "arange" and not is_random(self.node)

    # ---- the batch factor --------------------------------------------------------------------------------------------

    def _batch(self) -> tuple[int, int] | None:
        """The factor that is the batch, with the number of elements outside of the batch within it."""
        exact: set[tuple[int, int]] = set()
        alike: set[tuple[int, int]] = set()
        dims = dict(self.rule.operands)
        for slot, fact in self.facts.items():
            if not isinstance(fact.place, Shard) or (self.picked is not None and slot == "self"):
                continue
            found = _locate(dims[slot], self.rule.factors, fact)
            if slot in self.rule.shape_only and (found is None or self.rule.factors[found[0]].blocked):
                continue  # the dims of the result do not come from this one
            if found is None:
                self._couple("it regroups the batch with another dim")
            if fact.order is not None and dims[slot][fact.place.dim] != (found[0],):
                self._couple(_REGROUPED)
            (alike if fact.uniform else exact).add(found)
        if not exact and not alike:
            made = (dim for result, _ in self.outs for dim in self.rule.results[result] or ())
            alike = {(factor, 1) for dim in made for factor in dim if is_batch(self.rule.factors[factor].size)}
        if len({factor for factor, _ in exact | alike}) > 1 or len(exact) > 1:
            self._couple("it relates the samples to each other")
        if not exact and not alike:
            return None
        batch = next(iter(exact or alike))
        if self.rule.factors[batch[0]].blocked and self.picked is None and batch[0] not in dict(self._ends()):
            self._couple(_REASONS.get(self.name, "it needs the whole of the batch dim at once"))
        return batch

    def _places(
        self, batch: tuple[int, int] | None, pending: frozenset[str]
    ) -> tuple[list[TensorPlacement], frozenset[str]]:
        """The placements of the results, and the slots that are summed into them."""
        count = len(self.outs)
        if batch is None:
            if self.name == "arange":
                return [Shard(0)] * count, frozenset()
            return ([Partial()] * count, self._linear(pending)) if pending else ([Replicate()] * count, frozenset())
        if self.picked is not None and self.name in WRITES:
            places: list[TensorPlacement] = [self.facts["self"].place]
        else:
            places = [self._place(i, out, batch) for i, out in self.outs]
        summed = all(isinstance(place, Partial) for place in places)
        sums = self.rule.additive(batch[0]) if summed else frozenset()
        if pending - sums:
            self._need_whole([pending - sums])
        return places, sums

    def _place(self, result: int, out: Value, batch: tuple[int, int]) -> TensorPlacement:
        """The placement of one result, checked against the dims of its shape that move with the batch."""
        factor, within = batch
        place: TensorPlacement = Replicate()
        for i, dim in enumerate(self.rule.results[result] or ()):
            if factor in dim:
                if self.order is not None and dim != (factor,):
                    self._couple(_REGROUPED)
                place = Shard(i, within * _elements(dim[: dim.index(factor)], self.rule.factors))
        if self.rule.contracts(result, factor):
            how = self.rule.factors[factor].reduction
            if how != "sum":
                self._couple(f"it takes the {how} over the batch")
            place = Partial()
        moving = batch_dims(out)
        if moving != ((place.dim,) if isinstance(place, Shard) else ()):
            self._couple(f"dims {list(moving)} of its result move with the batch, where one alone may")
        size = out.shape[moving[0]] if moving else 0
        if isinstance(size, Size) and size.constant:
            self._couple(f"its result has {size.text('batch')} rows, not the same number for every sample")
        return place

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _linear(self, pending: frozenset[str]) -> frozenset[str]:
        """The smallest linear set that has all the pending sums; without one, those sums are needed whole."""
        fitting = [together for together in self.rule.linear if pending <= together]
        if fitting:
            return min(fitting, key=len)
        self._need_whole([pending - together for together in self.rule.linear] or [pending])

    def _need_whole(self, choices: Sequence[frozenset[str]]) -> NoReturn:
        """Ask for the first choice of pending sums that no parameter enters; refuse if there is none."""
        for choice in choices:
            if all(self.facts[slot].free for slot in choice):
                raise NeededWhole(frozenset(o.value.name for o in self.call.operands if o.slot in choice))
        names = ", ".join(sorted(choices[0]))
        refuse(self.node, f"couples the samples of a batch: it makes more than a sum of {names}, a sum over the batch")

    def _shares(self, sums: frozenset[str], pending: frozenset[str]) -> tuple[ArgPath, ...]:
        """The paths of operands that are equal on all microbatches and are added to a sum."""
        needed = {slot for slot in sums - pending if not self._is_zero(slot)}
        if needed and any(o.slot in sums and not _has_fractions(o.value) for o in self.call.operands):
            self._need_whole([pending])  # a whole number has no share
        return tuple(path for slot, path, _ in slots(self.node) if slot in needed)

    def _couple(self, why: str) -> NoReturn:
        """Ask for the results whole if no parameter enters them and they have no dim that is the batch; else refuse."""
        if self.free and self.outs and not any(batch_dims(out) for _, out in self.outs):
            raise NeededWhole(frozenset(out.name for _, out in self.outs))
        refuse(self.node, f"couples the samples of a batch: {why}")

    # ---- the order of rows (`rows`) ----------------------------------------------------------------------------------

    def _picked_rows(self, picks: Picks | None) -> Picks | None:
        """The rows that this picks, such as each sample's own: the same ones in a microbatch as in the whole batch.

        Refuses any use of the rows' numbers but to pick them or to make other such numbers, `picks`, of them: they are
        not the same in a microbatch.
        """
        read = ((slot, fact.picks) for slot, fact in self.facts.items() if slot not in self.rule.shape_only)
        picking = {slot: found for slot, found in read if found is not None}
        found = picked(self.name, self.call, self.facts, picking) if picking else None
        if picking and picks is None and found is None:
            self._couple(NUMBERS)
        return found

    def _order(self) -> Order | None:
        """The order of the rows that are read, those aside that are picked from, and what is the same in any order."""
        aside = self.rule.shape_only | ({"self"} if self.picked is not None else set())
        orders = {
            fact.order
            for slot, fact in self.facts.items()
            if slot not in aside and isinstance(fact.place, Shard) and not (fact.zero or fact.uniform)
            if slot != "values" or fact.picks is None  # which is arange, of whichever rows it is written to
        }
        if len(orders) > 1:
            self._couple("it puts rows that were sorted beside rows in another order")
        return orders.pop() if orders else None

    def _ends(self) -> tuple[tuple[int, str], ...]:
        """The factors whose groups are of just these rows, so that a microbatch's may be alone, and what says so."""
        if self.order is None or not self.order.keys:
            return ()
        ends = Groups(Of.ENDS, self.order.keys)
        return tuple((factor, slot) for factor, slot in self.rule.ends if self.facts[slot].groups == ends)


NUMBERS = "it uses the numbers of the samples, and a microbatch does not know where in the batch it is"
_REGROUPED = "it regroups rows that were sorted"
_SQUEEZE = "it drops a dim of size 1, which the batch may be in a microbatch; name the dim that it is to drop"
_STATISTICS = "it normalises by the statistics of the whole batch"
_REASONS: Mapping[str, str] = {
    "arange": NUMBERS,
    "linspace": NUMBERS,
    "squeeze": _SQUEEZE,
    "native_batch_norm": _STATISTICS,
    "_native_batch_norm_legit": _STATISTICS,
    "_native_batch_norm_legit_functional": _STATISTICS,
}


def refuse(node: Node, what: str, advice: str = ADVICE) -> NoReturn:
    """Raise CaptureError about a node, naming its operator, module and source line."""
    module = f" in module {node.module!r}" if node.module else ""
    source = f"\n  {node.source}" if node.source else ""
    raise CaptureError(f"{node.opname}{module} {what}.{source}\n{advice}")


def batch_dims(value: Value) -> tuple[int, ...]:
    """The dims of a value that move with the batch."""
    return tuple(i for i, size in enumerate(value.shape) if is_batch(size))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in node.op.tags


_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_FILL: Mapping[str, str] = {
    "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "fill": "value", "scalar_tensor": "s"
}  # fmt: skip


def makes_zero(node: Node) -> bool:
    """Whether a node makes a tensor of zeros."""
    name = node.aten
    if name in _ZEROS:
        return True
    given = [arg for slot, _, arg in slots(node) if slot == _FILL.get(name)]
    return bool(given) and _is_number_zero(given[0])


def _is_number_zero(arg: Arg) -> bool:
    return not isinstance(arg, Size | Ref) and arg == 0


def _has_fractions(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _locate(dims: Dims, factors: Sequence[Factor], fact: Fact) -> tuple[int, int] | None:
    """The factor of a split operand that is the batch, and how many elements are outside of the batch within it."""
    assert isinstance(fact.place, Shard) and isinstance(
        fact.place.outer, int
    )  # what is outside of the batch is a number
    dim = dims[fact.place.dim]
    for i, factor in enumerate(dim):
        size = factors[factor].size
        if isinstance(size, Size) and is_batch(size):
            before = _elements(dim[:i], factors)
            within = 1 if fact.uniform else fact.place.outer // before
            exact = fact.uniform or (within > 0 and within * before == fact.place.outer)
            return (factor, within) if exact and size.per_sample % within == 0 else None
    return None


def _elements(product: Sequence[int], factors: Sequence[Factor]) -> int:
    total = 1
    for factor in product:
        size = factors[factor].size
        assert isinstance(size, int)  # a dim has one batch, and what is outside of it is a number
        total *= size
    return total
