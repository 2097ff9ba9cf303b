"""Slices: how a step is judged in which each slice of the batch computes as if it were the whole batch.

A slice is one microbatch of one data rank. The graph runs on it as it is, at its own size, whatever couples its
samples: batch statistics, a softmax over the batch, contrastive pairs. What remains to be found is the weight of each
slice's loss, its share of the whole reduction:

* a loss that is a plain sum over the samples has weight 1;
* one that divides such sums by counts of the inputs alone (valid targets) has weight 1 as well, and the counts of the
  whole batch, so a slice without valid targets contributes zero;
* any other has the slice's share of the samples, ``b / B``, on the loss and on the gradient that its backward starts
  from. A term with a count then takes that share of the whole batch's count, so it keeps the weight of its targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Arg, Input, Node, Output, Ref, Share, Size, Value, map_arg
from autopart.ir.placement import Partial, PerSlice, Replicate, Shard
from autopart.passes.dependence import Fact, NeededWhole, batch_dims, depend, is_random
from autopart.passes.judge import Judgement, Site, takes_sizes
from autopart.rules.factor import bind, slots

UNKNOWN = 0
"""`Shard.outer` of a dim that holds the batch among others, in an order that is not known."""


def of_the_slice(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with every size that of the slice, also where it enters the arithmetic."""

    def leaf(arg: Arg) -> Arg:
        return replace(arg, whole=False) if isinstance(arg, Size) and arg.whole else arg

    def ours(node: Node) -> Node:
        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in node.kwargs)
        return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs)

    return tuple(map(ours, nodes))


def least_samples(captured: Captured) -> int:
    """The samples that a slice needs: two where a BatchNorm in training has one value a sample and channel."""
    values = {value.name: value for value in captured.values()} if captured.sliced else {}
    for node in captured.nodes if captured.sliced else ():
        if "batch_norm" in node.opname and not node.backward and node.op._schema.arguments[0].name == "input":
            call = bind(node, values)
            x = call.shape("input")
            if call.args.get("training", True) and all(size == 1 for size in x[2:]) and x[0] == Size(1):
                return 2
    return 1


def without_running_statistics(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with the backward of a training BatchNorm not given the running statistics, which it does not read."""

    def freed(node: Node) -> Node:
        if node.opname != "aten.native_batch_norm_backward.default" or not node.args[7]:
            return node
        return replace(node, args=(*node.args[:3], None, None, *node.args[5:]))

    return tuple(map(freed, nodes))


def judge_slices(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Judgement:
    """Judge a joint graph that runs on each slice as it is.

    Raises CaptureError for a loss that adds a plain sum over the batch to what is none, and for an output that cannot
    be put together from the slices'.
    """
    weights = _Weights(inputs, nodes, outputs)
    by_samples, counted = weights.checked()
    values, facts = weights.values, weights.facts
    tangents = {item.value.name for item in inputs if item.kind == "tangent" and item.target == "loss"}
    taking = (tangents | counted) if by_samples else frozenset[str]()
    places = {name: fact.place for name, fact in facts.items()} | dict.fromkeys(counted, Replicate())
    places |= {out.name: Partial() for out in outputs if out.kind in ("loss", "grad")}
    return Judgement(
        placements=places,
        shares=tuple(site for site in _reads(nodes) if _name(nodes, site) in taking),
        output_shares=tuple(
            index
            for index, out in enumerate(outputs)
            if (out.kind == "loss" and by_samples) or (out.kind == "output" and _averaged(out, values, facts, counted))
        ),
        whole=(),
        prologue=tuple(name for node in nodes for name in node.names() if name in counted),
    )


def counts(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> frozenset[str]:
    """The values by which the loss divides sums over the samples, and that the inputs alone decide."""
    return frozenset(_Weights(inputs, nodes, outputs).counts)


def given(item: Input, updated: bool) -> Fact:
    """What is known of a graph input: samples are split; a buffer that forwards update differs from slice to slice."""
    dims = batch_dims(item.value)
    place = Shard(dims[0]) if dims else PerSlice() if updated else Replicate()
    return Fact(place, free=item.kind not in ("parameter", "tangent") and not updated)


def in_slice(node: Node, values: Mapping[str, Value], known: Mapping[str, Fact]) -> dict[str, Fact]:
    """What is known of a node's results on a slice.

    A result with a dim that moves with the batch is split by it; one without is equal on all slices, or a part of a
    plain sum where the factor rules say so, else the slice's own.
    """
    names = node.refs()
    outs = [out for out in node.outs if out is not None]
    free = all(known[name].free for name in names) and not is_random(node)
    same = (
        all(isinstance(known[name].place, Replicate) for name in names) and not _has_share(node) and not is_random(node)
    )
    summable = not any(isinstance(known[name].place, PerSlice) for name in names)
    ruled = _ruled(node, values, known)
    facts = {}
    for out in outs:
        dims, found = batch_dims(out), ruled.get(out.name)
        if dims and found is not None and isinstance(found.place, Shard):
            facts[out.name] = found
        elif dims:
            size = out.shape[dims[0]]
            alone = len(dims) == 1 and isinstance(size, Size) and size.per_sample == 1
            facts[out.name] = Fact(Shard(dims[0], 1 if alone else UNKNOWN), free)
        elif found is not None and isinstance(found.place, Partial) and summable and not _has_share(node):
            facts[out.name] = found
        else:
            zero = found is not None and found.zero
            facts[out.name] = Fact(Replicate() if same else PerSlice(), free, zero)
    return facts


def _ruled(node: Node, values: Mapping[str, Value], known: Mapping[str, Fact]) -> Mapping[str, Fact]:
    """The facts of a node whose samples stay apart, by the factor rules; none where they have no say."""
    shapes = [*(values[name] for name in node.refs()), *(out for out in node.outs if out is not None)]
    places = [known[name].place for name in node.refs()]
    if any(len(batch_dims(value)) > 1 for value in shapes):
        return {}
    if any(isinstance(place, Shard) and place.outer == UNKNOWN for place in places) or takes_sizes(node):
        return {}
    try:
        found = depend(node, values, known)
    except (CaptureError, NeededWhole):
        return {}
    return {} if found.shares else found.facts


def _has_share(node: Node) -> bool:
    return any(isinstance(arg, Share) for _, _, arg in slots(node))


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
        for node in nodes:
            self.values.update({out.name: out for out in node.outs if out is not None})
            self.facts.update(in_slice(node, self.values, self.facts))
        self.forward = [node for node in nodes if not node.backward]
        self.made = {name: node for node in self.forward for name in node.names()}
        self.counts: set[str] = set()
        self.sums: list[Node] = []
        self.others: list[Node] = []
        for out in outputs:
            if out.kind == "loss":
                self._follow(out.name)

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
        packet = node.op.overloadpacket.__name__
        refs = [arg.name for _, _, arg in slots(node) if isinstance(arg, Ref)]
        inner = [name for name in refs if not batch_dims(self.values[name])]
        if isinstance(place, Partial):
            self.sums.append(node)
        elif isinstance(place, Replicate) or len(inner) < len(refs) or takes_sizes(node):
            self.others.append(node)
        elif packet == "div" and len(refs) == 2 and self._counts(refs[0], refs[1]):
            self.counts.add(refs[1])
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
        known = node.op.overloadpacket.__name__ in ("add", "sub")
        if (known and len(refs) == 1) or any(ref not in self.made for ref in refs):
            self.others.append(node)
        for ref in refs:
            self._follow(ref)

    def _moves(self, name: str) -> bool:
        return not isinstance(self.facts[name].place, Replicate)

    def _counts(self, numerator: str, divisor: str) -> bool:
        """Whether this is a sum over the samples divided by a number that the inputs alone decide."""
        return isinstance(self.facts[numerator].place, Partial) and self._moves(divisor) and self.facts[divisor].free

    def _check(self, count: str, by_samples: bool) -> None:
        node = self.made[count]
        users = [user for user in self.forward if count in user.refs()]
        other = next((user for user in users if user.op.overloadpacket.__name__ != "div"), None)
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
