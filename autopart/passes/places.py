"""places: Segmented + PlacedStep -> Segmented, a place. The step that one place of an axis runs.

before: h: x [b, 16, 96] -> x + up(x)          after, at place 1 of tp=2: the body of `localise`, and of the parameters
        up.weight [384, 96]                                               up.weight [192, 96], rows 192 to 383

From here on a step is that of one place, and the passes after this one need not know. Where several axes split tensors,
each is placed on the step of one place of those before it: the steps of the other places differ in numbers only, so the
same decisions hold for them (`likewise`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopart.errors import VerificationError
from autopart.ir.graph import Dim, Size, Value
from autopart.ir.placed import PlacedBody, PlacedFunction, PlacedStep
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, Here, Segmented, defined
from autopart.ir.state import Piece, State
from autopart.passes.consistent import faults, step_faults
from autopart.passes.localise import localise
from autopart.rules.split import local_shape, span
from autopart.rules.strategies import Ruled, equal, matching


def check_places(segmented: Segmented, placed: PlacedStep) -> None:
    """The gate: raise VerificationError for placements under which the places do not compute what one device does."""
    seen: set[tuple[int, int]] = set()
    for segment, body in zip(segmented.segments, placed.bodies, strict=True):
        if (segment.body, id(body)) not in seen:
            seen.add((segment.body, id(body)))
            _refuse(f"inside {segment.name} on {placed.axis}", faults(body, segment))
    _refuse(f"between segments on {placed.axis}", step_faults(placed, segmented))


def _refuse(where: str, found: tuple[str, ...]) -> None:
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise VerificationError(f"rule placements: {where}: {found[0]}{more}; plan again")


def likewise(placed: PlacedStep, segmented: Segmented) -> PlacedStep:
    """The decisions of a placed step, for the step of another place of the axes before."""
    made: dict[int, PlacedBody] = {}
    for segment, body in zip(segmented.segments, placed.bodies, strict=True):
        if id(body) not in made:
            made[id(body)] = _body(body, segmented.bodies[segment.body])
    return replace(placed, bodies=tuple(made[id(body)] for body in placed.bodies))


def _body(placed: PlacedBody, other: Body) -> PlacedBody:
    backward = None
    if placed.backward is not None:
        assert other.backward is not None  # they differ in numbers only
        backward = _function(placed.backward, other.backward, placed.degree)
    return replace(
        placed, body=other, forward=_function(placed.forward, other.forward, placed.degree), backward=backward
    )


def _function(part: PlacedFunction, other: Function, degree: int) -> PlacedFunction:
    """The same placements for a function of other numbers; every node's strategy has them."""
    mine, theirs = defined(part.function), defined(other)
    found = []
    for before, node, strategy in zip(part.function.nodes, other.nodes, part.strategies, strict=True):
        if not equal(before, mine, node, theirs):
            strategy = matching(Ruled.of(node, theirs), strategy, degree) or strategy  # the gate says what is wrong
        found.append(strategy)
    return replace(part, function=other, strategies=tuple(found))


def at_place(
    segmented: Segmented, placed: PlacedStep, place: int, *, state: State | None = None, alike: bool = False
) -> Segmented:
    """The step of place number `place`. The placements must have passed `check_places`.

    Where there is a `state` already, what is here of all its parameters is known, also of those not used in this step.
    `alike` is as in `localise`: for another axis to be placed on this step.
    """
    numbers: dict[int, int] = {}
    bodies: list[Body] = []
    segments = []
    for segment, body in zip(segmented.segments, placed.bodies, strict=True):
        number = numbers.setdefault(id(body), len(bodies))
        if number == len(bodies):
            bodies.append(localise(body, place, alike=alike))
        segments.append(segment if segment.body == number else replace(segment, body=number))
    shapes = {item.target: item.value.at(1) for item in segmented.captured.of_kind("parameter")}
    shapes |= {p.target: p.module_shape for unit in (state.units if state else ()) for p in unit.parameters}
    before = segmented.here or Here((), (), (), ())
    values, placements = _between(segmented, placed, place)
    pieces = dict(before.pieces)
    for target, piece in _pieces(placed, shapes | {t: p[-1].local for t, p in pieces.items()}, place):
        pieces[target] = (*pieces.get(target, ()), piece)
    here = Here((*before.places, (placed.axis, place)), values, (*before.placements, placements), tuple(pieces.items()))
    return replace(segmented, bodies=tuple(bodies), segments=tuple(segments), here=here)


def takes_samples(step: Segmented) -> bool:
    """Whether the step of a place has a part of each microbatch's samples somewhere."""
    functions = [f for body in step.bodies for f in (body.forward, body.backward) if f is not None]
    values = (value for function in functions for value in defined(function).values())
    return any(isinstance(size, Size) and size.over > 1 for value in values for size in value.shape)


def _between(
    segmented: Segmented, placed: PlacedStep, place: int
) -> tuple[tuple[Value, ...], tuple[TensorPlacement, ...]]:
    """What passes between segments, as it is at a place, and how it is placed."""
    how, values = dict(placed.between), segmented.values()
    names = dict.fromkeys(
        name
        for segment in segmented.segments
        for name in (*segment.values, *segment.outputs, *segment.backward_inputs, *segment.backward_outputs)
    )
    whole = Replicate()
    placements = tuple(how.get(name, whole) for name in names)
    known: dict[object, tuple[Dim, ...]] = {}

    def here(value: Value, there: TensorPlacement) -> Value:
        key = value.shape, there
        if key not in known:
            known[key] = local_shape(value.shape, there, placed.degree, place)
        return value if known[key] == value.shape else replace(value, shape=known[key])

    return tuple([here(values[name], there) for name, there in zip(names, placements, strict=True)]), placements


def _pieces(placed: PlacedStep, shapes: Mapping[str, tuple[int, ...]], place: int) -> Iterator[tuple[str, Piece]]:
    known: dict[object, Piece] = {}
    for target, how in placed.parameters:
        if isinstance(how, Shard) and target in shapes:
            key = shapes[target], how
            if key not in known:
                known[key] = _piece(placed, shapes[target], how, place)
            yield target, known[key]


def _piece(placed: PlacedStep, shape: tuple[int, ...], how: Shard, place: int) -> Piece:
    assert isinstance(how.outer, int)  # no batch in a parameter
    mine = span(shape[how.dim], how.outer, how.unit, placed.degree, place)
    return Piece(placed.axis, shape, how.dim, how.outer, *mine)
