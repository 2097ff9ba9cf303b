"""Segments: the graph cut into the units of planning, repeated ones sharing one body."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Value


@dataclass(frozen=True, slots=True)
class Function:
    """A straight piece of graph under local names: `inputs` in order to `outputs` in order."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The code of one or more segments.

    ``forward(values, fixed, parameters) -> (outputs, updates, saved)`` and ``backward(gradients, saved, fixed,
    parameters) -> (gradients, parameter gradients)``; each list in the order of the segments' tuples of the same
    meaning. `saved` names, in the forward's local names, what the backward reads.
    """

    name: str
    forward: Function
    saved: tuple[str, ...]
    backward: Function | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One use of a body: what its formal inputs and outputs are in the whole graph, by value name or parameter target.

    `fixed` are what comes neither from other segments nor from the caller: buffers, constants, prologue values, draws.
    `forward_parameters` and `backward_parameters` are targets, in the order of the body's formals. `gradients` pairs
    each parameter gradient that the backward returns, after the `backward_outputs`, with its parameter; `updates` are
    the buffers of which the forward returns the new values, after the `outputs`.
    """

    name: str
    body: int
    values: tuple[str, ...]
    forward_fixed: tuple[str, ...]
    forward_parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...] = ()
    backward_inputs: tuple[str, ...] = ()
    backward_fixed: tuple[str, ...] = ()
    backward_parameters: tuple[str, ...] = ()
    backward_outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Every parameter that is read or given a gradient, in order of first use."""
        return tuple(dict.fromkeys((*self.forward_parameters, *self.backward_parameters, *self.gradients)))


@dataclass(frozen=True, slots=True)
class Segmented:
    """The segments in order, their bodies, and the graph they come from."""

    captured: Captured
    bodies: tuple[Body, ...]
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        """A line a segment: name, body, number of forward and backward nodes."""
        lines = []
        for segment in self.segments:
            body = self.bodies[segment.body]
            backward = len(body.backward.nodes) if body.backward is not None else 0
            lines.append(f"{segment.name}: {body.name}, {len(body.forward.nodes)} forward, {backward} backward nodes")
        return "\n".join(lines)
