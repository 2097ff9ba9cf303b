"""Tensor placements of a whole step on one axis: every segment's table over its boundary, and the best of their sum.

A body's table says what it costs for each placement of the values that come in and go out, forward and backward. What
passes between segments has one placement that all its segments agree on; a body moves it inside where it wants it
otherwise. What several segments read and no parameter enters (rotary tables, masks) is whole at every place, and each
takes its piece. Parameters of several segments are part of the boundary. Equal bodies share a table, so the time goes
with the number of distinct bodies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from autopart.ir.placed import PlacedBody
from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Body, Segmented
from autopart.ir.tensor_plan import Costs
from autopart.rules.ring import in_turn
from autopart.solver.axis import Axis
from autopart.solver.body_layout import BodyLayout
from autopart.solver.eliminate import Eliminated, Table, eliminate, picks, solve
from autopart.solver.layout import evaluate
from autopart.solver.otherwise import alternatives
from autopart.solver.tensor import Pin, layout_of, layouts_along
from autopart.solver.wires import Boundary, Domains, boundaries, domains, over, unsplit


@dataclass(frozen=True, slots=True)
class Placed:
    """The bodies of the segments, in order, as placed (equal ones are one object), and how values pass between them.

    `time` is predicted, in picoseconds; `memory` are the bytes of parameters (`Axis.copies` times) and of what is saved
    for the backward, on the fullest place. A parameter counts in every segment that has it. `costs` are what each
    segment takes, and what others would.
    """

    segments: tuple[PlacedBody, ...]
    between: Mapping[str, TensorPlacement]
    time: int
    memory: int
    costs: tuple[Costs, ...]


@dataclass(frozen=True, slots=True)
class _Wired:
    """A segment's body as a layout, and what each unit of its boundary is outside: a value or a parameter.

    `choices` are the placements among which each of `units` chooses. Segments with one layout have equal units.
    `usual` is its solution at the usual price of a byte.
    """

    layout: BodyLayout
    usual: Eliminated
    units: tuple[str, ...]
    choices: tuple[tuple[TensorPlacement, ...], ...]
    variables: tuple[str, ...]


def place(
    segmented: Segmented, axis: Axis, pins: Mapping[str, Pin] | None = None, *, others: Sequence[Segmented] = ()
) -> Placed:
    """The fastest placement of every value on an axis. `pins` are of parameters, by target.

    Where other axes were placed before, `segmented` is the step of their first place, `others` those of the others:
    they differ in numbers only, and what is chosen fits them all.

    What the caller passes and gets is whole at every place. A byte costs `TIE` in any case, so of layouts that are
    equally fast the smaller is taken. What is too entangled for the tables runs along one of its loops, or is computed
    whole at every place, whichever is faster. Raises ValueError for a pin that no layout can keep, naming those that
    one can.
    """
    return _posed(segmented, axis, pins or {}, others)[1]


def front(
    segmented: Segmented, axis: Axis, pins: Mapping[str, Pin] | None = None, *, others: Sequence[Segmented] = ()
) -> tuple[Placed, ...]:
    """The fastest placement, the smallest, and one between them, as far as they differ; else as `place`.

    Each is the fastest at some price of a byte, so they lie on the convex hull of time against memory. The one between
    is that at the price where the other two cost the same.
    """
    posed, fastest = _posed(segmented, axis, pins or {}, others)
    smallest = posed.at(min(DEAR, EXACT / max(1, fastest.memory)))
    if smallest.memory >= fastest.memory:
        return (fastest,)
    if smallest.time <= fastest.time:
        return (smallest,)
    price = (smallest.time - fastest.time) / (fastest.memory - smallest.memory)
    between, line = posed.at(price), fastest.time + price * fastest.memory
    # on the line it is the other two in turns, layer by layer
    inner = (between,) if between.time + price * between.memory < line * (1 - SLACK) else ()
    return (fastest, *inner, smallest)


@dataclass(frozen=True, slots=True)
class _Posed:
    """The bodies on an axis as tables, and what their boundaries choose among; `exact`: among all that may be."""

    wired: Sequence[_Wired]
    domains: Domains
    pins: Mapping[str, Pin]
    axis: Axis
    exact: bool

    @classmethod
    def of(
        cls,
        segmented: Segmented,
        axis: Axis,
        pins: Mapping[str, Pin],
        whole: Collection[str],
        others: Sequence[Segmented],
        *,
        exact: bool,
    ) -> _Posed:
        """The tables of a step in which the values in `whole` pass between segments unsplit."""
        wired = _wired(segmented, axis, pins, whole, others)
        return cls(wired, domains([(one.variables, one.choices) for one in wired]), pins, axis, exact)

    def at(self, price: float) -> Placed:
        """The best placement at a price of a byte. Raises MemoryError where what passes is too entangled."""
        solved: dict[int, Eliminated] = {}
        for one in self.wired:
            if id(one.layout) not in solved:
                solved[id(one.layout)] = one.usual if price == TIE else solve(one.layout.layout, one.units, price)
        values = eliminate(tuple(self._tables(solved)), largest=LARGEST).best()
        if values is None:
            raise ValueError(
                f"no layout on {self.axis.name!r} keeps all of these pins together: {', '.join(self.pins)}"
            )
        between = {name: self.domains[name][at] for name, at in values.items()}
        bodies: dict[object, tuple[PlacedBody, int, int, Costs]] = {}
        taken = []
        for one in self.wired:
            given = {
                f"u:{unit}": choices.index(between[variable])
                for unit, choices, variable in zip(one.units, one.choices, one.variables, strict=True)
            }
            same = id(one.layout), tuple(given.items())
            if same not in bodies:
                bodies[same] = _body(one, solved[id(one.layout)], given)
            taken.append(bodies[same])
        placed, times, memories, costs = zip(*taken, strict=True)
        costs = tuple(replace(each, exact=each.exact and self.exact) for each in costs)
        return Placed(placed, between, sum(times), sum(memories), costs)

    def _tables(self, solved: Mapping[int, Eliminated]) -> Iterator[Table]:
        """The table of every segment over what is outside; segments that are wired alike share its costs."""
        known: dict[object, tuple[tuple[int, ...], torch.Tensor]] = {}
        for one in self.wired:
            outside = one.variables
            key = id(one.layout), tuple([self.domains[v] for v in outside]), tuple(map(outside.index, outside))
            if key not in known:
                if (entries := prod(len(self.domains[variable]) for variable in outside)) > LARGEST:
                    raise MemoryError(
                        f"a table of {entries} entries: what passes is too entangled to be solved exactly"
                    )
                made = over(solved[id(one.layout)].costs, outside, one.choices, self.domains)
                known[key] = tuple(map(outside.index, made.variables)), made.costs
            places, costs = known[key]
            yield Table(tuple([outside[place] for place in places]), costs)


def _posed(
    segmented: Segmented, axis: Axis, pins: Mapping[str, Pin], others: Sequence[Segmented]
) -> tuple[_Posed, Placed]:
    """The tables of a step, and the fastest placement.

    Where what passes between segments is too entangled, samples stay together, or all of it is whole.
    """
    _known(segmented, pins)
    plain, whole = replace(axis, divides=False), unsplit(segmented)
    for way in dict.fromkeys((axis, plain)):
        posed = _Posed.of(segmented, way, pins, whole, others, exact=way == axis)
        with contextlib.suppress(MemoryError):
            return posed, posed.at(TIE)
    posed = _Posed.of(segmented, plain, pins, whole | set(_passing(segmented)), others, exact=False)
    return posed, posed.at(TIE)


TIE, DEAR = 1e-3, 1e6
"""Picoseconds a byte: of equally fast layouts the smaller, and memory before all."""

EXACT = 2.0**50
"""What the bytes of a step may cost: larger sums are rounded, and equal layers would differ by chance."""

SLACK = 1e-6
"""By how much of it two sums differ that differ by more than rounding."""

LARGEST = 1 << 25
"""The most entries of a table that is worth its time: what needs more is split in fewer ways, or (a loop over time,
say) along one loop alone."""


def _passing(segmented: Segmented) -> Iterator[str]:
    """The values between segments."""
    for segment in segmented.segments:
        yield from (*segment.values, *segment.outputs, *segment.backward_inputs, *segment.backward_outputs)


def _wired(
    segmented: Segmented, axis: Axis, pins: Mapping[str, Pin], whole: Collection[str], others: Sequence[Segmented]
) -> list[_Wired]:
    turns = in_turn((node for body in segmented.bodies for node in body.forward.nodes), axis.degree)
    layouts: dict[object, tuple[BodyLayout, Eliminated]] = {}
    found = []
    for each in boundaries(segmented, axis, pins, whole):
        if each.key not in layouts:
            number = each.segment.body
            alike = [other.bodies[number] for other in others]
            layouts[each.key] = _solvable(segmented.bodies[number], each, axis, turns, alike)
        layout, usual = layouts[each.key]
        choices = tuple(layout.choices(unit) for unit in each.units)
        found.append(_Wired(layout, usual, each.units, choices, each.variables))
    return found


def _solvable(
    body: Body, boundary: Boundary, axis: Axis, turns: Collection[int], others: Sequence[Body]
) -> tuple[BodyLayout, Eliminated]:
    """The layout of a body, solved at the usual price.

    Of one too entangled for that with its samples split, or with attention in a ring, as it is without; of one too
    entangled at all, the best of those along one loop and of that in which nothing is split.
    """
    plain = replace(axis, divides=False)
    rung = None if axis.alike else turns  # under a causal mask the places of a ring run different operators
    for way, rings in dict.fromkeys(((axis, rung), (plain, rung), (plain, None))):
        first = (way, rings) == (axis, rung)
        with contextlib.suppress(MemoryError, *(() if first else (ValueError,))):  # a pin that only the first can keep
            layout = layout_of(body, boundary.segment, way, boundary.whole, boundary.pins, turns=rings, others=others)
            solved = solve(layout.layout, boundary.units, TIE, LARGEST)
            return replace(layout, exact=first), solved
    return _entangled(body, boundary, axis, others)


def _entangled(body: Body, boundary: Boundary, axis: Axis, others: Sequence[Body]) -> tuple[BodyLayout, Eliminated]:
    """The best of a body's layouts along one loop, and of that in which nothing is split."""
    segment, whole, pins = boundary.segment, boundary.whole, boundary.pins
    made = list(layouts_along(body, segment, axis, whole, pins, others=others))
    try:
        plain = layout_of(body, segment, axis, whole, pins, split=False, others=others)
        made = [replace(each, plain=plain.layout, exact=False) for each in (plain, *made)]
    except ValueError:  # a pin, which another may keep
        if not made:
            raise
    solved = [(each, solve(each.layout, boundary.units, TIE, LARGEST)) for each in made]
    return min(solved, key=lambda pair: float(pair[1].costs.min()))


def _body(one: _Wired, solved: Eliminated, given: Mapping[str, int]) -> tuple[PlacedBody, int, int, Costs]:
    """A body with its boundary given, counted afresh: time and memory, and what it would take otherwise."""
    layout, values = one.layout, solved.best(given)
    assert values is not None  # the sum of the tables is finite
    taken = picks(layout.layout, values)
    time = evaluate(layout.layout, taken)
    assert time is not None  # what the tables allow can be done
    memory = sum(unit.options[pick].memory for unit, pick in zip(layout.layout.units, taken, strict=True))
    choices = dict(zip(one.units, one.choices, strict=True))
    return layout.placed(taken), time, memory, alternatives(layout, solved, given, choices)


def _known(segmented: Segmented, pins: Mapping[str, Pin]) -> None:
    targets = {target for segment in segmented.segments for target in segment.parameters}
    for target in pins:
        if target not in targets:
            raise ValueError(f"placement: no segment has a parameter {target!r}")
