"""Slices: a step in which each slice of the batch computes as if it were the whole batch.

before: mean = sum(x) / (8 * B)                  of the whole batch
after:  mean = sum(x) / (8 * b)                  of the slice

A slice is one microbatch of one data rank. The graph runs on it as it is, at its own size, whatever couples its
samples: batch statistics, a softmax over the batch, contrastive pairs. What a value is to the other slices follows from
its shape and its operands alone; what the slices' losses weigh, `passes.weights` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Arg, Input, Node, Share, Size, Value
from autopart.ir.placement import Partial, PerSlice, Replicate, Shard
from autopart.passes.judge import takes_sizes
from autopart.rules.dependence import NeededWhole, batch_dims, depend, is_random
from autopart.rules.fact import Fact
from autopart.rules.factor import bind, slots

UNKNOWN = 0
"""`Shard.outer` of a dim that holds the batch among others, in an order that is not known."""


def of_the_slice(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with every size that of the slice, also where it enters the arithmetic."""

    def leaf(arg: Arg) -> Arg:
        return replace(arg, whole=False) if isinstance(arg, Size) and arg.whole else arg

    return tuple(node.mapped(leaf) for node in nodes)


def least_samples(captured: Captured) -> int:
    """The samples that a slice needs: two where a BatchNorm in training has one value a sample and channel."""
    values = {value.name: value for value in captured.values()} if captured.sliced else {}
    for node in captured.nodes if captured.sliced else ():
        if "batch_norm" in node.aten and not node.backward and node.op._schema.arguments[0].name == "input":
            call = bind(node, values)
            x = call.shape("input")
            if (
                call.args.get("training", "no_training" not in node.opname)
                and all(size == 1 for size in x[2:])
                and x[0] == Size(1)
            ):
                return 2
    return 1


def without_running_statistics(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with the backward of a training BatchNorm not given the running statistics, which it does not read."""

    def freed(node: Node) -> Node:
        if node.opname != "aten.native_batch_norm_backward.default" or not node.args[7]:
            return node
        return replace(node, args=(*node.args[:3], None, None, *node.args[5:]))

    return tuple(map(freed, nodes))


def given(item: Input, updated: bool) -> Fact:
    """What is known of a graph input: samples are split; a buffer that forwards update differs from slice to slice."""
    dims = batch_dims(item.value)
    place = Shard(dims[0]) if dims else PerSlice() if updated else Replicate()
    return Fact(place, free=item.kind in ("input", "buffer", "constant", "prologue") and not updated)


def in_slice(node: Node, values: Mapping[str, Value], known: Mapping[str, Fact]) -> dict[str, Fact]:
    """What is known of a node's results on a slice.

    A result with a dim that moves with the batch is split by it; one without is equal on all slices, or a part of a
    plain sum where the factor rules say so, else the slice's own.
    """
    names = node.refs()
    outs = [out for out in node.outs if out is not None]
    free = all(known[name].free for name in names) and not is_random(node)
    same = all(isinstance(known[name].place, Replicate) for name in names)
    same = same and not (_has_share(node) or is_random(node) or takes_sizes(node))
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


class Drawn:
    """The values made of draws alone, which must lie in a slice as in the whole batch: sample by sample, in order."""

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}  # with the draw

    def node(self, node: Node, values: Mapping[str, Value], known: Mapping[str, Fact]) -> None:
        """Follow one node. Raises CaptureError where a draw meets samples that are in another order than its own."""
        if is_random(node):
            self.names.update(dict.fromkeys(node.names(), node))
            if any(len(batch_dims(values[name])) > 1 for name in node.names()):
                raise CaptureError(f"{node.place()}{node.opname} {_NO_PLACE}")
            return
        moving = [name for name in node.refs() if batch_dims(values[name])]
        draws = [self.names[name] for name in moving if name in self.names]
        if draws and len(draws) == len(moving):
            self.names.update(dict.fromkeys(node.names(), draws[0]))
        elif draws:
            try:
                depend(node, values, known)
            except CaptureError:
                raise CaptureError(f"{draws[0].place()}{draws[0].opname} {_NO_PLACE}") from None
            except NeededWhole:
                return


_NO_PLACE = (
    "draws random numbers for samples that are among others in their dim, or in several dims, so that a slice does not "
    "know its part of them; draw before samples are put together, with the batch as the first dim"
)


def _has_share(node: Node) -> bool:
    return any(isinstance(arg, Share) for _, _, arg in slots(node))
