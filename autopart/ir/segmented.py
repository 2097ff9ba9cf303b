"""Segments: the graph cut into the units of planning, repeated ones sharing one body."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from autopart.ir.action import Kind
from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Value
from autopart.ir.loop import Loop
from autopart.ir.placement import TensorPlacement
from autopart.ir.state import Piece


@dataclass(frozen=True, slots=True)
class Function:
    """A straight piece of graph under local names: `inputs` in order to `outputs` in order.

    `loops` say which runs of its nodes are run chunk after chunk, in order.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    loops: tuple[Loop, ...] = ()


def defined(function: Function) -> dict[str, Value]:
    """Every value of a function by its local name: its inputs and what its nodes make."""
    made = (out for node in function.nodes for out in node.outs if out is not None)
    return {value.name: value for value in (*function.inputs, *made)}


@dataclass(frozen=True, slots=True)
class Halves:
    """A backward in two: `input` (I) makes the gradients that leave the stage, `weight` (W) all others.

    ``input(gradients, saved, fixed, parameters) -> (gradients, stash)`` and ``weight(gradients, stash, fixed,
    parameters) -> (gradients, parameter gradients)``. `stash` names what `weight` takes of what `input` was given or
    made. Where no gradient leaves the stage there is no `input`, and the stash is what the forward saved; there is no
    `weight` where nothing is left for it.
    """

    input: Function | None
    stash: tuple[str, ...]
    weight: Function | None


@dataclass(frozen=True, slots=True)
class Body:
    """The code of one or more segments.

    ``forward(values, fixed, parameters) -> (outputs, updates, saved)`` and ``backward(gradients, saved, fixed,
    parameters) -> (gradients, parameter gradients)``; each list in the order of the segments' tuples of the same
    meaning. `saved` names, in the forward's local names, what the backward reads. `halves` are there where it is
    performed in two actions.
    """

    name: str
    forward: Function
    saved: tuple[str, ...]
    backward: Function | None
    halves: Halves | None = None


@dataclass(frozen=True, slots=True)
class Half:
    """What one half of a segment's backward reads and hands on, each as the segment's field of the same name says."""

    inputs: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One use of a body: what its formal inputs and outputs are in the whole graph, by value name or parameter target.

    `fixed` are what comes neither from other segments nor from the caller: buffers, constants, prologue values, draws.
    `forward_parameters` and `backward_parameters` are targets, in the order of the body's formals. `gradients` pairs
    each parameter gradient that the backward returns, after the `backward_outputs`, with its parameter; `updates` are
    the buffers of which the forward returns the new values, after the `outputs`. `halves` are those of I and of W,
    where the body has them; all parameter gradients are W's. `slice` is the piece of the sequence that it works on.
    `parameters` are all that are read or given a gradient, in order of first use.
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
    halves: tuple[Half, Half] | None = None
    slice: int = 0
    parameters: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        used = dict.fromkeys((*self.forward_parameters, *self.backward_parameters, *self.gradients))
        object.__setattr__(self, "parameters", tuple(used))

    @property
    def layer(self) -> str:
        """The name of the segment that does the same for the first slice: its own but for the slice's."""
        return self.name.removeprefix(f"slice{self.slice}.") if self.slice else self.name


@dataclass(frozen=True, slots=True)
class Phase:
    """What one segment does in an action of one kind, and what its `function` takes and returns there.

    It takes, in this order: values that other segments made (`takes`, by name in the whole graph), what an earlier
    action of the segment kept for it (`kept`, by local name), `fixed` and `parameters`. It returns values (`gives`),
    new values of buffers (`updates`), what it keeps for a later action (`keeps`, None where there is none to come), and
    parameter `gradients`. It is given the units of the parameters `reads` as they are, whole.
    """

    function: Function
    takes: tuple[str, ...]
    kept: tuple[str, ...]
    fixed: tuple[str, ...]
    parameters: tuple[str, ...]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    updates: tuple[str, ...] = ()
    keeps: tuple[str, ...] | None = None
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Here:
    """What one place has, where mesh axes split the tensors inside segments: `places` are its numbers, by axis.

    The axes are in the order in which they were placed. `values` are those that pass between segments, as they are
    here; `placements` how they are placed on each axis, in their order; `pieces` what is here of each parameter that is
    split, each of what the one before leaves.
    """

    places: tuple[tuple[str, int], ...]
    values: tuple[Value, ...]
    placements: tuple[tuple[TensorPlacement, ...], ...]
    pieces: tuple[tuple[str, tuple[Piece, ...]], ...]

    def placement(self, name: str) -> tuple[tuple[str, TensorPlacement], ...]:
        """How a value that passes between segments is placed, by axis."""
        at = next(i for i, value in enumerate(self.values) if value.name == name)
        return tuple((axis, row[at]) for (axis, _), row in zip(self.places, self.placements, strict=True))

    @property
    def aside(self) -> tuple[str, ...]:
        """The axes of which this is not the first place."""
        return tuple(axis for axis, place in self.places if place)


@dataclass(frozen=True, slots=True)
class Segmented:
    """The segments in order, their bodies, and the graph they come from; `homes`: the segment of each of its nodes.

    Where mesh axes split the tensors inside segments, the bodies are those of one place of them, and `here` says which
    that is; `captured` is the whole step all the same.
    `made` are values that pass between segments and are not in that graph: those of layers in parts. `lookup` says that
    the first segment is the lookup in the input embedding, to be split.
    """

    captured: Captured
    bodies: tuple[Body, ...]
    segments: tuple[Segment, ...]
    homes: tuple[int, ...]
    here: Here | None = None
    made: tuple[Value, ...] = ()
    lookup: bool = False

    def values(self) -> dict[str, Value]:
        """Every value that may pass between segments, by name, in the shape that it has here."""
        values = {value.name: value for value in (*self.captured.values(), *self.made)}
        return values | ({value.name: value for value in self.here.values} if self.here is not None else {})

    def handed_on(self, names: Set[str]) -> dict[str, Value]:
        """Some of the values that segments hand on, forward or backward, by name, in the shape that they have here."""
        found: dict[str, Value] = {}
        for segment in self.segments:
            body = self.bodies[segment.body]
            for function, made in ((body.forward, segment.outputs), (body.backward, segment.backward_outputs)):
                if function is not None and not names.isdisjoint(made):
                    local, values = dict(zip(made, function.outputs, strict=False)), defined(function)
                    found |= {name: replace(values[local[name]], name=name) for name in made if name in names}
        return found

    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """What is here of each parameter that is split, by its name: a piece of the whole, a piece of that, ..."""
        return dict(self.here.pieces) if self.here is not None else {}

    def phase(self, segment: Segment, kind: Kind) -> Phase | None:
        """What a segment does in a forward (F), a backward (B) or half of one (I, W); None if nothing.

        A part of the output layer has S for its first function, and T for its second.
        """
        body = self.bodies[segment.body]
        match kind:
            case Kind.F | Kind.S:
                return _forward(segment, body)
            case Kind.B | Kind.T:
                return _backward(segment, body)
            case Kind.I | Kind.W:
                return _half(segment, body, kind)
            case _:
                raise AssertionError(f"a segment does nothing in {kind}")

    def __str__(self) -> str:
        """A line a segment: name, body, number of forward and backward nodes."""
        lines = []
        for segment in self.segments:
            body = self.bodies[segment.body]
            backward = len(body.backward.nodes) if body.backward is not None else 0
            lines.append(f"{segment.name}: {body.name}, {len(body.forward.nodes)} forward, {backward} backward nodes")
        return "\n".join(lines)


def _forward(segment: Segment, body: Body) -> Phase:
    return Phase(
        function=body.forward,
        takes=segment.values,
        kept=(),
        fixed=segment.forward_fixed,
        parameters=segment.forward_parameters,
        reads=segment.parameters,
        gives=segment.outputs,
        updates=segment.updates,
        keeps=None if body.backward is None else body.saved,
    )


def _backward(segment: Segment, body: Body) -> Phase | None:
    if body.backward is None:
        return None
    return Phase(
        function=body.backward,
        takes=segment.backward_inputs,
        kept=body.saved,
        fixed=segment.backward_fixed,
        parameters=segment.backward_parameters,
        reads=segment.parameters,
        gives=segment.backward_outputs,
        gradients=segment.gradients,
    )


def _half(segment: Segment, body: Body, kind: Kind) -> Phase | None:
    """I or W; what I stashes for W is what W takes."""
    halves, first = body.halves, kind is Kind.I
    if halves is None or segment.halves is None:
        return None
    function = halves.input if first else halves.weight
    if function is None:
        return None
    half = segment.halves[0 if first else 1]
    return Phase(
        function=function,
        takes=half.inputs,
        kept=body.saved if first else halves.stash,
        fixed=half.fixed,
        parameters=half.parameters,
        reads=half.parameters,
        gives=half.outputs,
        keeps=halves.stash if first and halves.weight is not None else None,
        gradients=() if first else segment.gradients,
    )
