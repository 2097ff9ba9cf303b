"""What a plan decides inside segments: how every value and every operator is placed on mesh axes, as data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from autopart.cluster import Cluster
from autopart.ir.placed import Move, PlacedBody, PlacedFunction, PlacedStep, Strategy
from autopart.ir.placement import Dispatched, TensorPlacement
from autopart.ir.segmented import Body, Function, Segmented


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """What is decided of one function of a body: all of a `PlacedFunction` but the function."""

    inputs: tuple[TensorPlacement, ...]
    strategies: tuple[Strategy, ...]
    outputs: tuple[TensorPlacement, ...]
    moves: tuple[Move, ...]

    @classmethod
    def of(cls, part: PlacedFunction) -> FunctionChoice:
        """The decisions of a placed function."""
        return cls(part.inputs, part.strategies, part.outputs, part.moves)

    def on(self, function: Function) -> PlacedFunction:
        """The function under these decisions. Raises ValueError where they are for one of another size."""
        mine = len(self.inputs), len(self.strategies), len(self.outputs)
        needed = len(function.inputs), len(function.nodes), len(function.outputs)
        if mine != needed:
            raise ValueError(f"plan: choices for {mine} inputs, operators and outputs, where a body has {needed}")
        return PlacedFunction(function, self.inputs, self.strategies, self.outputs, self.moves)


@dataclass(frozen=True, slots=True)
class BodyChoice:
    """What is decided of the body with this `digest`."""

    digest: str
    forward: FunctionChoice
    saved: tuple[TensorPlacement, ...]
    backward: FunctionChoice | None

    @classmethod
    def of(cls, placed: PlacedBody) -> BodyChoice:
        """The decisions of a placed body."""
        backward = None if placed.backward is None else FunctionChoice.of(placed.backward)
        return cls(digest(placed.body), FunctionChoice.of(placed.forward), placed.saved, backward)

    def on(self, body: Body, axis: str, degree: int) -> PlacedBody:
        """The body under these decisions, on `degree` places. Raises ValueError where they are for another body."""
        if len(self.saved) != len(body.saved) or (self.backward is None) != (body.backward is None):
            raise ValueError(f"plan: the choices inside {body.name} are not for what it saves for its backward")
        forward, backward = self.forward.on(body.forward), None
        if self.backward is not None and body.backward is not None:
            backward = self.backward.on(body.backward)
        return PlacedBody(body, axis, degree, forward, self.saved, backward)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a body is predicted to take for a microbatch, forward and backward, in seconds: as chosen, and otherwise.

    `exact`: what is chosen is the best of all that may be split, not only the best of what was looked at.
    """

    chosen: float
    others: tuple[tuple[str, float], ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What is decided inside segments on `axis`, of `degree` places.

    Where another axis splits tensors too, `inner` is what is decided there, of what this one leaves at its first place;
    at the others it holds likewise, as they differ from that in numbers only.

    `parameters` are the placements of the state, which hold for every program under the plan, `between` those of what
    passes between segments (what is not there is whole at every place). ``choices[segments[i]]`` are those inside
    segment i of the step that was planned, and `costs` what each of them takes. Other steps (an evaluation, other
    lengths) are placed when they are compiled, for devices as in `cluster` and microbatches of `samples`. The step that
    was planned is for microbatches that are multiples of `multiple` samples: more than 1 where places have some each.
    """

    axis: str
    degree: int
    parameters: tuple[tuple[str, TensorPlacement], ...]
    between: tuple[tuple[str, TensorPlacement], ...]
    choices: tuple[BodyChoice, ...]
    costs: tuple[Costs, ...]
    segments: tuple[int, ...]
    cluster: Cluster
    samples: int
    multiple: int = 1
    inner: TensorPlan | None = None

    def __post_init__(self) -> None:
        if self.degree < 2 or self.samples < 1:
            raise ValueError(
                f"plan: {self.axis} inside segments is of {self.degree} places, for {self.samples} samples"
            )
        if self.multiple not in (1, self.degree):
            raise ValueError(f"plan: microbatches are multiples of 1 or {self.degree} samples, not of {self.multiple}")
        if len(self.costs) != len(self.choices):
            raise ValueError(f"plan: there are costs of {len(self.costs)} bodies, and choices in {len(self.choices)}")
        if any(number not in range(len(self.choices)) for number in self.segments):
            raise ValueError(f"plan: the segments have the choices {self.segments}; there are {len(self.choices)}")

        if self.inner is not None and any(map(_dispatches, self.choices)):
            raise ValueError(
                f"plan: rows are sent to their groups on {self.axis!r}; how many a place then has is not known to "
                f"{self.inner.axis!r}, which is placed after it"
            )

    @property
    def axes(self) -> tuple[TensorPlan, ...]:
        """What is decided on each axis, in the order in which they are placed: this one and those inside it."""
        return (self, *(self.inner.axes if self.inner is not None else ()))

    @property
    def places(self) -> int:
        """The number of places on all axes together."""
        return prod(each.degree for each in self.axes)

    @property
    def of_samples(self) -> int:
        """What the samples of each microbatch must be a multiple of, so that all axes can split them as planned."""
        return max(each.multiple for each in self.axes)

    def place(self, coordinate: Mapping[str, int]) -> int:
        """The number of the place at a coordinate: the axis that is placed last varies fastest."""
        number = 0
        for each in self.axes:
            number = number * each.degree + coordinate[each.axis]
        return number

    @classmethod
    def nested(cls, axes: Iterable[TensorPlan]) -> TensorPlan:
        """The plans of several axes, each placed on what those before it leave, as one."""
        first, *rest = axes
        return replace(first, inner=cls.nested(rest)) if rest else first

    @classmethod
    def of(
        cls, placed: PlacedStep, costs: Iterable[Costs], cluster: Cluster, samples: int, multiple: int = 1
    ) -> TensorPlan:
        """The record of a placed step, with the costs of every segment."""
        bodies = {id(body): (body, cost) for body, cost in zip(placed.bodies, costs, strict=True)}
        numbers = {key: number for number, key in enumerate(bodies)}
        return cls(
            axis=placed.axis,
            degree=placed.degree,
            parameters=placed.parameters,
            between=placed.between,
            choices=tuple(BodyChoice.of(body) for body, _ in bodies.values()),
            costs=tuple(cost for _, cost in bodies.values()),
            segments=tuple(numbers[id(body)] for body in placed.bodies),
            cluster=cluster,
            samples=samples,
            multiple=multiple,
        )

    def step(self, segmented: Segmented) -> PlacedStep | None:
        """The step under these decisions, None where it is another one than was planned.

        Raises ValueError where the decisions do not fit bodies that they are for.
        """
        if len(self.segments) != len(segmented.segments):
            return None
        digests = [digest(body) for body in segmented.bodies]
        made: dict[tuple[int, int], PlacedBody] = {}
        bodies: list[PlacedBody] = []
        for segment, number in zip(segmented.segments, self.segments, strict=True):
            choice, key = self.choices[number], (segment.body, number)
            if choice.digest != digests[segment.body]:
                return None
            if key not in made:
                made[key] = choice.on(segmented.bodies[segment.body], self.axis, self.degree)
            bodies.append(made[key])
        return PlacedStep(self.axis, self.degree, tuple(bodies), self.between, self.parameters)


def _dispatches(choice: BodyChoice) -> bool:
    """Whether rows are sent to the places of their groups somewhere."""
    functions = [each for each in (choice.forward, choice.backward) if each is not None]
    return any(isinstance(move.target, Dispatched) for each in functions for move in each.moves)


def digest(body: Body) -> str:
    """A hash of what a body computes, the same in every process; where the user's code is does not count."""
    parts: list[object] = [body.saved]
    for function in (body.forward, body.backward):
        if function is not None:
            parts += [function.inputs, function.outputs]
            parts += [(node.opname, node.args, node.kwargs, node.outs) for node in function.nodes]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
