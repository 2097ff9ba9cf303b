"""How every value depends on the batch: equal on all microbatches, split over them, or a sum over them.

The batch enters with the inputs that hold samples and is followed node by node (`dependence`). A sum over the batch
that is used as more than a sum must be known whole before: a value that no parameter enters (a count of valid targets)
is lifted into a prologue over the whole batch; anything else couples the samples of a batch and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Input, Node, Output, Size
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.passes.dependence import (
    ADVICE,
    Fact,
    NeededWhole,
    batch_dims,
    depend,
)
from autopart.rules.factor import ArgPath, slots


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
    taken of the whole batch. `prologue`: values to be computed over the whole batch first; they count as Replicate.
    """

    placements: Mapping[str, TensorPlacement]
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
        except NeededWhole as needed:
            lifted |= needed.names
            continue
        return Judgement(
            {name: fact.place for name, fact in scan.facts.items()},
            tuple(scan.shares),
            tuple(i for i, output in enumerate(outputs) if scan.needs_share(output)),
            whole_sizes(nodes),
            tuple(name for node in nodes for name in node.names() if name in lifted),
        )


def whole_sizes(nodes: Sequence[Node]) -> tuple[Site, ...]:
    """The arguments that are a `Size` used as a number, not as the size or place of a dim."""
    return tuple(Site(i, path) for i, node in enumerate(nodes) for path in _numbers(node))


def _numbers(node: Node) -> Iterator[ArgPath]:
    if not _has_size((node.args, node.kwargs)):
        return
    found = [(slot, path) for slot, path, arg in slots(node) if isinstance(arg, Size) and not arg.whole]
    if found and node.op.overloadpacket.__name__ not in _COUNTING:
        types = {argument.name: str(argument.type) for argument in node.op._schema.arguments}
        yield from (path for slot, path in found if "int" not in types[slot.split(".")[0]].lower())


def _has_size(arg: Arg) -> bool:
    return any(map(_has_size, arg)) if isinstance(arg, tuple) else isinstance(arg, Size)


_COUNTING = frozenset({"arange", "linspace"})
"""Operators whose numbers make the size of their result."""


class _Scan:
    """One walk over the graph, with the values in `lifted` taken as known over the whole batch."""

    def __init__(self, inputs: Sequence[Input], outputs: Sequence[Output], lifted: frozenset[str]) -> None:
        self.lifted = lifted
        self.values = {entry.value.name: entry.value for entry in inputs}
        self.facts = {entry.value.name: _input_fact(entry) for entry in inputs if entry.kind != "tangent"}
        # a tangent is placed as its output is, which is known by the time that the backward reads it
        self.tangents = {entry.value.name: entry for entry in inputs if entry.kind == "tangent"}
        self.outputs = {output.target: output.name for output in outputs if output.kind == "output"}
        self.samples = {entry.target: entry.value.name for entry in inputs if entry.kind == "input"}
        self.shares: list[Site] = []
        self._known: dict[object, tuple[tuple[Fact, ...], tuple[ArgPath, ...]]] = {}
        self._kinds: dict[str, int] = {}
        self._numbers: dict[object, int] = {}

    def node(self, index: int, node: Node) -> None:
        """Place the results of one node. Equal calls on alike values are judged once: layers repeat."""
        for name in node.refs():
            if name not in self.facts:
                self.facts[name] = self._tangent(self.tangents[name])
        self.values.update({out.name: out for out in node.outs if out is not None})
        names = tuple(node.names())
        if self.lifted and all(name in self.lifted for name in names):
            self.facts.update({name: Fact(Replicate(), free=True) for name in names})
            return
        key = (node.form, tuple([out is None for out in node.outs]), tuple([self._kind(name) for name in node.refs()]))
        if key not in self._known:
            found = depend(node, self.values, self.facts)
            self._known[key] = tuple(found.facts[name] for name in names), found.shares
        facts, shares = self._known[key]
        self.facts.update(zip(names, facts, strict=True))
        self.facts.update({name: Fact(Replicate(), free=True) for name in names if name in self.lifted})
        self.shares += [Site(index, path) for path in shares]

    def _kind(self, name: str) -> int:
        """A number for what is known of a value; alike values have the same."""
        if name not in self._kinds:
            value = self.values[name]
            known = (value.shape, value.dtype, self.facts[name])
            self._kinds[name] = self._numbers.setdefault(known, len(self._numbers))
        return self._kinds[name]

    def _tangent(self, entry: Input) -> Fact:
        dims, of = batch_dims(entry.value), self.outputs.get(entry.target)
        if not dims:
            return Fact(Replicate(), free=False)
        if of is not None and self.values[of].shape == entry.value.shape:
            return Fact(self.facts[of].place, free=False)
        return Fact(Shard(dims[0]), free=False)

    def needs_share(self, output: Output) -> bool:
        """Whether an output must be multiplied by the microbatch's share; refuses what cannot be put together."""
        fact = self.facts[output.name]
        if output.kind == "mutation" and not isinstance(fact.place, Replicate):
            raise CaptureError(
                f"the buffer {output.target!r} is updated from the samples, by each microbatch on its own. {ADVICE}"
            )
        if output.kind not in ("loss", "grad"):
            return False
        source = self.samples.get(output.target) if output.kind == "grad" else None
        wanted = self.facts[source].place if source is not None else Partial()
        if isinstance(wanted, Shard) and not (fact.place == wanted or fact.uniform):
            raise CaptureError(f"the gradient of input {output.target} does not belong to its samples. {ADVICE}")
        if isinstance(fact.place, Shard) and not isinstance(wanted, Shard):
            raise CaptureError(
                f"the {output.kind} {output.target!r} has a dim that is the batch, and is no sum over it"
            )
        return isinstance(fact.place, Replicate) and not fact.zero


def _input_fact(entry: Input) -> Fact:
    dims = batch_dims(entry.value)
    free = entry.kind != "parameter"
    if not dims:
        return Fact(Replicate(), free)
    size = entry.value.shape[dims[0]]
    if entry.kind != "input" or len(dims) > 1 or not isinstance(size, Size) or size.constant:
        shape = ", ".join(size.text("batch") if isinstance(size, Size) else str(size) for size in entry.value.shape)
        raise CaptureError(
            f"the {entry.kind} {entry.target!r} has shape [{shape}]: one dim of an input may be the batch, and none of "
            "anything else. Say which dim holds the samples, batch={name: dim or None}"
        )
    return Fact(Shard(dims[0]), free)
