"""How every value depends on the batch: equal on all microbatches, split over them, or a sum over them.

The batch enters with the inputs that hold samples and is followed node by node (`dependence`). A sum over the batch
that is used as more than a sum must be known whole before: a value that no parameter enters (a count of valid targets)
is lifted into a prologue over the whole batch; anything else couples the samples of a batch and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Dim, Form, Input, Node, Output, Size
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.rules.dependence import (
    ADVICE,
    NUMBERS,
    NeededWhole,
    batch_dims,
    depend,
    refuse,
)
from autopart.rules.fact import Fact
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

    Raises `CaptureError`, naming the operator, its module, its source line and how the inputs are split, for what
    couples the samples of a batch, and for an operator without a rule that reads samples.
    """
    try:
        return _judge(inputs, nodes, outputs)
    except CaptureError as error:
        raise CaptureError(f"{error}\nInputs: {_split_inputs(inputs)}") from None


def _judge(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Judgement:
    scan, start = _Scan(inputs, outputs), 0
    while start < len(nodes):
        try:
            for index in range(start, len(nodes)):
                scan.node(index, nodes[index])
            break
        except NeededWhole as needed:
            start = next(i for i, node in enumerate(nodes) if needed.names.intersection(node.names()))
            scan.lift(needed.names, nodes, start)
    scan.place_unread()
    return Judgement(
        {name: fact.place for name, fact in scan.facts.items()},
        tuple(scan.shares),
        tuple(i for i, output in enumerate(outputs) if scan.needs_share(output, nodes)),
        tuple(scan.whole),
        tuple(name for node in nodes for name in node.names() if name in scan.lifted),
    )


def takes_sizes(node: Node) -> bool:
    """Whether a size that moves with the batch enters a node's arithmetic."""
    return any(True for _ in _numbers(node))


def check_sums(inputs: Sequence[Input], prologue: Sequence[Node]) -> None:
    """Raise CaptureError unless every value of a prologue is a plain sum over the samples.

    Only such can be added up from what each data rank computes of its own samples.
    """
    scan = _Scan([item for item in inputs if item.kind != "prologue"], ())
    wanted = {item.value.name for item in inputs if item.kind == "prologue"}
    for index, node in enumerate(prologue):
        where = node.place()
        try:
            scan.node(index, node)
        except NeededWhole as needed:
            raise CaptureError(f"{where}{node.opname} of {', '.join(sorted(needed.names))} {_NOT_LOCAL}") from None
        names = [name for name in node.names() if name in wanted and not isinstance(scan.facts[name].place, Partial)]
        if names or scan.shares:
            raise CaptureError(f"{where}{', '.join(names) or node.opname} {_NOT_LOCAL}")


_NOT_LOCAL = (
    "is needed over the whole batch and is no plain sum over its samples, so that with inputs='local' no data rank can "
    "compute it; pass the whole batch on every rank (inputs='global')"
)


def _numbers(node: Node) -> Iterator[ArgPath]:
    """The arguments that are a `Size` used as a number, not as the size or place of a dim."""
    if not _has_size((node.args, node.kwargs)):
        return
    found = [(slot, path) for slot, path, arg in slots(node) if isinstance(arg, Size) and not arg.whole]
    if found and node.aten not in _COUNTING:
        types = {argument.name: str(argument.type) for argument in node.op._schema.arguments}
        yield from (path for slot, path in found if "int" not in types[slot.split(".")[0]].lower())


def _has_size(arg: Arg) -> bool:
    return any(map(_has_size, arg)) if isinstance(arg, tuple) else isinstance(arg, Size)


_COUNTING = frozenset({"arange", "linspace"})
"""Operators whose numbers make the size of their result."""


class _Scan:
    """A walk over the graph, with the values in `lifted` taken as known over the whole batch."""

    def __init__(self, inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
        self.lifted: frozenset[str] = frozenset()
        self.values = {entry.value.name: entry.value for entry in inputs}
        self.facts = {entry.value.name: _input_fact(entry) for entry in inputs if entry.kind != "tangent"}
        # a tangent is placed as its output is, which is known by the time that the backward reads it
        self.tangents = {entry.value.name: entry for entry in inputs if entry.kind == "tangent"}
        self.outputs = {output.target: output.name for output in outputs if output.kind == "output"}
        self.samples = {entry.target: entry.value.name for entry in inputs if entry.kind == "input"}
        self.shares: list[Site] = []
        self.whole: list[Site] = []
        self._known: dict[object, tuple[tuple[Fact, ...], tuple[int, ...], tuple[ArgPath, ...]]] = {}
        self._forms: dict[Form, tuple[int, tuple[ArgPath, ...]]] = {}  # a number for each, and its whole sizes
        self._kinds: dict[str, int] = {}
        self._numbers: dict[object, int] = {}

    def node(self, index: int, node: Node) -> None:
        """Place the results of one node. Equal calls on alike values are judged once: layers repeat."""
        names, reads = node.names(), node.refs()
        for name in reads:
            if name not in self.facts:
                self.facts[name] = self._tangent(self.tangents[name])
        for out in node.outs:
            if out is not None:
                self.values[out.name] = out
        if (seen := self._forms.get(node.form)) is None:
            seen = self._forms[node.form] = len(self._forms), tuple(_numbers(node))
        form, whole = seen
        self.whole += [Site(index, path) for path in whole]
        if self.lifted and self.lifted.issuperset(names):
            self.facts.update({name: Fact(Replicate(), free=True) for name in names})
            return
        key = (form, tuple([self._kind(name) for name in reads]))
        if (known := self._known.get(key)) is None:
            found = depend(node, self.values, self.facts)
            self.facts.update(found.facts)
            kinds = tuple([self._kind(name) for name in names])
            known = tuple([found.facts[name] for name in names]), kinds, found.shares
            if all(found.facts[name].named().isdisjoint((*names, *reads)) for name in names):
                self._known[key] = known
        facts, kinds, shares = known
        self.facts.update(zip(names, facts, strict=True))
        self._kinds.update(zip(names, kinds, strict=True))
        for name in self.lifted.intersection(names):
            self.facts[name] = Fact(Replicate(), free=True)
            del self._kinds[name]
        self.shares += [Site(index, path) for path in shares]

    def lift(self, names: frozenset[str], nodes: Sequence[Node], start: int) -> None:
        """Take `names` as known over the whole batch, and forget what the nodes from `start` on said."""
        self.lifted |= names
        for name in (*self.tangents, *(made for node in nodes[start:] for made in node.names())):
            self.facts.pop(name, None)
            self._kinds.pop(name, None)
        self.shares = [site for site in self.shares if site.node < start]
        self.whole = [site for site in self.whole if site.node < start]

    def _kind(self, name: str) -> int:
        """A number for what is known of a value; alike values have the same."""
        if name not in self._kinds:
            value = self.values[name]
            known = (value.shape, value.dtype, self.facts[name])
            self._kinds[name] = self._numbers.setdefault(known, len(self._numbers))
        return self._kinds[name]

    def place_unread(self) -> None:
        """Place the tangents that no node reads: each is a gradient as it is."""
        unread = {name: self._tangent(entry) for name, entry in self.tangents.items() if name not in self.facts}
        self.facts.update(unread)

    def _tangent(self, entry: Input) -> Fact:
        dims, of = batch_dims(entry.value), self.outputs.get(entry.target)
        if not dims:
            return Fact(Replicate(), free=False)
        if of is not None and self.values[of].shape == entry.value.shape:
            return Fact(self.facts[of].place, free=False)
        return Fact(Shard(dims[0]), free=False)

    def needs_share(self, output: Output, nodes: Sequence[Node]) -> bool:
        """Whether an output must be multiplied by the microbatch's share; refuses what cannot be put together."""
        fact = self.facts[output.name]
        made = (node for node in nodes if output.name in node.names())
        if fact.order is not None:
            refuse(next(made), "couples the samples of a batch: its rows, which were sorted, are returned as they lie")
        if fact.picks is not None:
            refuse(next(made), f"couples the samples of a batch: {NUMBERS}")
        if output.kind == "mutation" and not isinstance(fact.place, Replicate):
            refuse(next(made), f"updates the buffer {output.target!r} from the samples, which are those of a part")
        if output.kind not in ("loss", "grad", "input_grad"):
            return False
        source = self.samples.get(output.target) if output.kind == "input_grad" else None
        wanted = self.facts[source].place if source is not None else Partial()
        if isinstance(wanted, Shard) and not (fact.place == wanted or fact.uniform):
            raise CaptureError(f"the gradient of input {output.target} does not belong to its samples. {ADVICE}")
        if isinstance(fact.place, Shard) and not isinstance(wanted, Shard):
            raise CaptureError(
                f"the {output.kind} {output.target!r} has a dim that is the batch, and is no sum over it"
            )
        return isinstance(fact.place, Replicate) and not fact.zero


def _split_inputs(inputs: Sequence[Input]) -> str:
    """The user's inputs with the dim of each that holds the samples: ``ids [batch, 8], mask [8, 8]``."""
    shapes = {entry.value.name: entry.value.shape for entry in inputs if entry.kind == "input"}
    return ", ".join(f"{name} [{_shape(shape)}]" for name, shape in shapes.items())


def _shape(shape: Sequence[Dim]) -> str:
    return ", ".join(size.text("batch") if isinstance(size, Size) else str(size) for size in shape)


def _input_fact(entry: Input) -> Fact:
    dims = batch_dims(entry.value)
    free = entry.kind != "parameter"
    if not dims:
        return Fact(Replicate(), free)
    size = entry.value.shape[dims[0]]
    if entry.kind != "input" or len(dims) > 1 or not isinstance(size, Size) or size.constant:
        raise CaptureError(
            f"the {entry.kind} {entry.target!r} has shape [{_shape(entry.value.shape)}]: one dim of an input may be "
            "the batch, and none of anything else. Say which dim holds the samples, batch={name: dim or None}"
        )
    return Fact(Shard(dims[0]), free)
