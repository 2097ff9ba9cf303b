"""Placed bodies: how each value and each node of one body is placed on a mesh axis, and where values are moved."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.graph import Dim
from autopart.ir.placement import Dispatched, Own, Partial, Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function


@dataclass(frozen=True, slots=True)
class Cut:
    """A loop of an operator that is split: factor number `factor`, as the inner part of ``outer x split x rest``.

    `outer` and `unit` are as in `Shard`.
    """

    factor: int
    outer: Dim = 1
    unit: Dim = 1


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a node on the places of an axis.

    `needs` is how each tensor operand must be placed, by slot (None: any way, it is not read); `gives` how each result
    then is (None for one that nothing uses). `cut` is the loop that is split, None if every place runs all of it.
    `spread`: the operator needs all of the loop at once, and the places help each other (`rules.spread`).
    """

    needs: tuple[tuple[str, TensorPlacement | None], ...]
    gives: tuple[TensorPlacement | None, ...]
    cut: Cut | None = None
    spread: bool = False

    @property
    def ring(self) -> bool:
        """Whether it is attention of which queries and keys are both split: those travel round the places."""
        how = dict(self.needs)
        return self.spread and all(isinstance(how.get(slot), Shard) for slot in ("query", "key"))


@dataclass(frozen=True, slots=True)
class Move:
    """A value made available in another placement."""

    value: str
    source: TensorPlacement
    target: TensorPlacement


def collective_of(source: TensorPlacement, target: TensorPlacement) -> str | None:
    """The collective that makes one placement into another; None: there is none.

    ``slice`` and ``first`` are local; ``ends`` is an all-gather of what places have of the ends of groups.
    """
    match source, target:
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial():
            return "first"
        case Own(dim), Dispatched() if dim == target.dim:
            return "ends" if dim is None else "dispatch"
        case Dispatched(), Own(dim) if dim == source.dim and dim is not None:
            return "combine"
    return None


def of_gradient(axis: str, parameter: TensorPlacement) -> TensorPlacement:
    """How the gradients of a parameter must be, given how that is placed: as it is, complete.

    On the data axis they are parts of a sum: as where the batch is cut, the gradients of whole units are reduced there.
    """
    return Partial() if axis == "dp" else parameter


@dataclass(frozen=True, slots=True)
class PlacedFunction:
    """A function with a placement for every input and output and a strategy for every node, in order.

    `moves` has each redistribution once, each after those that it starts from; the first reader causes it.
    """

    function: Function
    inputs: tuple[TensorPlacement, ...]
    strategies: tuple[Strategy, ...]
    outputs: tuple[TensorPlacement, ...]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedBody:
    """A body on `degree` places of `axis`; `saved` is how each saved value is kept for the backward."""

    body: Body
    axis: str
    degree: int
    forward: PlacedFunction
    saved: tuple[TensorPlacement, ...]
    backward: PlacedFunction | None

    def wanted(self) -> dict[str, TensorPlacement]:
        """How each value that the backward reads must be there at the end of the forward."""
        return dict(zip(self.body.saved, self.saved, strict=True))


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """The segments of a step on `degree` places of `axis`: the body of each, in order; equal ones are one object.

    `between` has how values pass between segments, by name, `parameters` how parameters lie, by target; what is in
    neither is whole at every place.
    """

    axis: str
    degree: int
    bodies: tuple[PlacedBody, ...]
    between: tuple[tuple[str, TensorPlacement], ...]
    parameters: tuple[tuple[str, TensorPlacement], ...]
