"""What a solver of tensor placements is told of one mesh axis, and what it pays there: alpha-beta and a roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopart.cluster import Cluster, Link
from autopart.codegen.exchange import exchange_of
from autopart.collectives import is_collective
from autopart.ir.cost import PICO
from autopart.ir.graph import Node, Value
from autopart.ir.mesh import Mesh
from autopart.ir.placed import Strategy, collective_of
from autopart.ir.placement import TensorPlacement
from autopart.ir.traffic import counted, sent_bytes
from autopart.rules.alias import viewed
from autopart.rules.flops import GATHERS, flops
from autopart.rules.split import part, share
from autopart.rules.strategies import Ruled
from autopart.rules.writer import Sent
from autopart.solver.layout import IMPOSSIBLE, Moves

WHOLE = ("cp", "dp")
"""The axes for what moves with the batch alone: parameters are whole at every place, and so are their gradients.

The first is for sequences, the second for samples (`Axis.by_samples`).
"""

LOCAL = 1
"""The price of what needs no communication, such as a slice: enough to avoid what is not needed."""


def linked(cluster: Cluster, mesh: Mesh, axis: str) -> Cluster:
    """The cluster with the links that the ranks of one axis of a mesh have to each other.

    Where each group lies in one node, those are the node's. Else the ring of a group goes from node to node as often
    side by side as it has ranks in a node, since each has a link of its own there: it has as much bandwidth as those
    together, up to that of the node's links. A cluster of unlike parts is as it is: its slowest link counts; so does
    one of several nodes where pipeline ranks differ in width.
    """
    (first, *others), size = cluster.groups, mesh.data if axis == "dp" else mesh.degree(axis)
    if others or cluster.joints or first.nodes == 1 or size == 1:
        return cluster
    if mesh.widths:  # which ranks of a pipeline rank share a node depends on those before it
        return replace(cluster, groups=(replace(first, nodes=1),)) if mesh.size <= first.per_node else cluster
    names = [name for name, _ in mesh.axes]
    stride = prod(degree for _, degree in mesh.axes[names.index(axis) + 1 :])
    if mesh.size <= first.per_node or first.per_node % (stride * size) == 0:
        return replace(cluster, groups=(replace(first, nodes=1),))
    abreast = min(size, first.per_node // stride)
    if abreast < 2:
        return cluster
    between = Link(min(first.inside.bandwidth, abreast * first.between.bandwidth), first.between.latency)
    return replace(cluster, groups=(replace(first, between=between),))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis to place a body on: its name and degree, the devices, and the microbatch whose time counts.

    `copies` is how many times a parameter's bytes are held: itself, its gradient, Adam's moments. `divides` says that
    all microbatches are multiples of `degree` samples, so that places may have some samples each. `outer` are the axes
    that were placed before, whose collectives are nodes of the body. `alike` says that another axis is placed after, on
    what is left at each place: all of them must run the same operators.
    """

    name: str
    degree: int
    cluster: Cluster
    batch: int
    copies: int = 4
    divides: bool = False
    outer: tuple[Axis, ...] = ()
    alike: bool = False

    def __post_init__(self) -> None:
        if self.degree < 2:
            raise ValueError(f"Axis: {self.name!r} must have at least 2 places, not {self.degree}")

    @property
    def whole_parameters(self) -> bool:
        """Whether parameters and their gradients are whole at every place."""
        return self.name in WHOLE

    @property
    def by_samples(self) -> bool:
        """Whether it is the data axis: whatever can be split by samples is, and nothing otherwise."""
        return self.name == "dp"

    def collective(self, kind: str, nbytes: int) -> int:
        """The time of one collective over a buffer of `nbytes` bytes."""
        seconds = self.cluster.link_latency + sent_bytes(kind, nbytes, self.degree) / self.cluster.link_bandwidth
        return round(seconds * PICO)

    def moves(self, value: Value, placements: Sequence[TensorPlacement]) -> Moves:
        """The price of every redistribution of a value."""
        nbytes = value.nbytes(self.batch)
        return tuple(tuple(self._move(nbytes, a, b) for b in placements) for a in placements)

    def _move(self, nbytes: int, source: TensorPlacement, target: TensorPlacement) -> int:
        if source == target:
            return 0
        kind = collective_of(source, target)
        if kind is None:
            return IMPOSSIBLE
        if kind == "ends":
            return self.collective("all_gather", nbytes * self.degree)
        return LOCAL if kind in ("slice", "first") else self.collective(counted(kind), nbytes)

    def times(
        self, node: Node, ruled: Ruled, taken: Sequence[Strategy], values: Mapping[str, Value]
    ) -> tuple[int, ...]:
        """The time of a node under each strategy, on the fullest place; `node` and `values` are of plain sizes."""
        if viewed(node) is not None:
            return (0,) * len(taken)
        if is_collective(node.op):
            return tuple(self._outside(node, ruled, strategy) for strategy in taken)
        work = float(flops(node, values))
        return tuple(self._time(work, ruled, strategy, values) for strategy in taken)

    def _outside(self, node: Node, ruled: Ruled, strategy: Strategy) -> int:
        """The time of a collective of an axis that was placed before, over what a place of this one has."""
        made, ((_, how),), (operand,) = exchange_of(node, self.batch), strategy.needs, ruled.call.operands
        axis = next(each for each in self.outer if each.name == made.axis)
        return axis.collective(counted(made.kind), round(made.payload * share(operand.value.shape, how, self.degree)))

    def _time(self, work: float, ruled: Ruled, strategy: Strategy, values: Mapping[str, Value]) -> int:
        """The time of `work` FLOPs, and of the bytes that go through memory for them."""
        cluster = self.cluster
        read = [(o.value, how) for o, (_, how) in zip(ruled.call.operands, strategy.needs, strict=True)]
        made = [(v, how) for v, how in zip(ruled.node.outs, strategy.gives, strict=True) if v is not None]
        if ruled.node.aten in GATHERS:
            read = [*read[1:], *made]
        moved = sum(self.local_bytes(value, how) for value, how in (*dict.fromkeys(read), *made))
        spread = ruled.spread if strategy.spread else None
        if spread is not None and spread.turns:
            moved *= self.degree
        seconds = max(work * self._part(ruled, strategy) / cluster.flops, moved / cluster.bandwidth)
        return round(seconds * PICO) + (
            0 if spread is None else sum(self._sent(ruled, values, s) for s in spread.sends)
        )

    def local_bytes(self, value: Value, how: TensorPlacement | None) -> float:
        """The bytes that the fullest place has of a value."""
        return value.nbytes(self.batch) * share(value.shape, how, self.degree)

    def _part(self, ruled: Ruled, strategy: Strategy) -> float:
        """The part of the loops that the fullest place runs."""
        cut = strategy.cut
        if cut is None or ruled.rule is None:
            return 1.0
        return part(ruled.rule.factors[cut.factor].size, cut.outer, cut.unit, self.degree)

    def _sent(self, ruled: Ruled, values: Mapping[str, Value], sent: Sent) -> int:
        """The time of what an operator's places send each other."""
        value = values[next(o.value.name for o in ruled.call.operands if o.slot == sent.slot)]
        nbytes = value.nbytes(1) // (1 if sent.without is None else value.at(1)[sent.without])
        if sent.kind == "all_gather":
            nbytes *= self.degree
        return (self.degree - 1 if sent.kind == "shift" else 1) * self.collective(sent.kind, nbytes)
