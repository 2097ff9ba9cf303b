"""Tensor placements of a whole step on one axis: every segment's table over its boundary, and the best of their sum.

A body's table says what it costs for each placement of the values that come in and go out, forward and backward. What
passes between segments has one placement that all its segments agree on; a body moves it inside where it wants it
otherwise. What several segments read and no parameter enters (rotary tables, masks) is whole at every place, and each
takes its piece. Parameters of several segments are part of the boundary. Equal bodies share a table, so the time goes
with the number of distinct bodies.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from autopart.ir.graph import descendants
from autopart.ir.placed import PlacedBody
from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Body, Segment, Segmented
from autopart.ir.tensor_plan import Costs
from autopart.rules.ring import in_turn
from autopart.solver.axis import Axis
from autopart.solver.eliminate import Eliminated, Table, eliminate, picks, solve
from autopart.solver.layout import evaluate
from autopart.solver.otherwise import alternatives
from autopart.solver.tensor import BodyLayout, Pin, layout_of, layouts_along


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
    domains: Mapping[str, tuple[TensorPlacement, ...]]
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
        return cls(wired, _domains(wired), pins, axis, exact)

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
                made = _over(one, solved[id(one.layout)].costs, self.domains)
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
    plain, whole = replace(axis, divides=False), _whole(segmented)
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
    users = Counter(target for segment in segmented.segments for target in segment.parameters)
    turns = in_turn((node for body in segmented.bodies for node in body.forward.nodes), axis.degree)
    outside = {target for target, count in users.items() if count > 1}
    layouts: dict[object, tuple[BodyLayout, Eliminated]] = {}
    found = []
    for segment in segmented.segments:
        body = segmented.bodies[segment.body]
        wires, owners = _wires(body, segment, outside, axis), _owners(body, segment)
        units = tuple(unit for unit, name in wires.items() if name not in whole)
        pinned = {local: pins[target] for target, local in owners.items() if target in pins}
        key = segment.body, units, tuple(pinned.items())
        if key not in layouts:
            shared = {unit.split()[-1] for unit, name in wires.items() if name in whole}
            alike = [other.bodies[segment.body] for other in others]
            layouts[key] = _solvable(body, segment, axis, shared, pinned, units, turns, alike)
        layout, usual = layouts[key]
        choices = tuple(layout.choices(unit) for unit in units)
        found.append(_Wired(layout, usual, units, choices, tuple(wires[unit] for unit in units)))
    return found


def _solvable(
    body: Body,
    segment: Segment,
    axis: Axis,
    whole: Collection[str],
    pins: Mapping[str, Pin],
    units: Sequence[str],
    turns: Collection[int],
    others: Sequence[Body],
) -> tuple[BodyLayout, Eliminated]:
    """The layout of a body, solved at the usual price.

    Of one too entangled for that with its samples split, or with attention in a ring, as it is without; of one too
    entangled at all, the best of those along one loop and of that in which nothing is split.
    """
    plain = replace(axis, divides=False)
    rung = None if axis.alike else turns  # under a causal mask the places of a ring run different operators
    for way, rings in dict.fromkeys(((axis, rung), (plain, rung), (plain, None))):
        layout = layout_of(body, segment, way, whole, pins, turns=rings, others=others)
        with contextlib.suppress(MemoryError):
            solved = solve(layout.layout, units, TIE, LARGEST)
            return replace(layout, exact=(way, rings) == (axis, rung)), solved
    return _entangled(body, segment, axis, whole, pins, units, others)


def _entangled(
    body: Body,
    segment: Segment,
    axis: Axis,
    whole: Collection[str],
    pins: Mapping[str, Pin],
    units: Sequence[str],
    others: Sequence[Body],
) -> tuple[BodyLayout, Eliminated]:
    """The best of a body's layouts along one loop, and of that in which nothing is split."""
    made = list(layouts_along(body, segment, axis, whole, pins, others=others))
    try:
        plain = layout_of(body, segment, axis, whole, pins, split=False, others=others)
        made = [replace(each, plain=plain.layout, exact=False) for each in (plain, *made)]
    except ValueError:  # a pin, which another may keep
        if not made:
            raise
    solved = [(each, solve(each.layout, units, TIE, LARGEST)) for each in made]
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


def _whole(segmented: Segmented) -> set[str]:
    """The values between segments that are whole at every place."""
    captured = segmented.captured
    readers = Counter(name for segment in segmented.segments for name in segment.values)
    several = {name for name, count in readers.items() if count > 1}
    given = {item.value.name for item in captured.of_kind("input", "tangent")}
    returned = {out.name for out in captured.outputs if out.kind in ("loss", "output", "input_grad")}
    if several:
        parameters = (item.value.name for item in captured.of_kind("parameter") if item.requires_grad)
        several -= descendants(captured.nodes, parameters)
    return given | returned | several


def _owners(body: Body, segment: Segment) -> dict[str, str]:
    """The local name of each parameter that a segment reads."""
    names = [v.name for v in body.forward.inputs]
    owners = dict(
        zip(segment.forward_parameters, names[len(segment.values) + len(segment.forward_fixed) :], strict=True)
    )
    if body.backward is not None:
        formals, count = [v.name for v in body.backward.inputs], len(segment.backward_parameters)
        owners = dict(zip(segment.backward_parameters, formals[len(formals) - count :], strict=True)) | owners
    return owners


def _wires(body: Body, segment: Segment, outside: set[str], axis: Axis) -> dict[str, str]:
    """From units of a body's boundary to variables: names of values in the whole graph, and targets of parameters."""
    owners = _owners(body, segment)
    wires = {f"in {v.name}": name for v, name in zip(body.forward.inputs, segment.values, strict=False)}
    outputs = zip(body.forward.outputs, segment.outputs, strict=False)
    wires |= {f"out {i} {local}": name for i, (local, name) in enumerate(outputs)}
    if body.backward is not None:
        taken = zip(body.backward.inputs, segment.backward_inputs, strict=False)
        wires |= {f"in {v.name}": name for v, name in taken}
        results = (*segment.backward_outputs, *segment.gradients)
        for i, (local, name) in enumerate(zip(body.backward.outputs, results, strict=True)):
            apart = name in owners or axis.by_samples  # those of the data axis are not placed as parameters are
            if i < len(segment.backward_outputs) or not apart:
                wires[f"back {i} {local}"] = name
    return wires | {f"parameter {local}": target for target, local in owners.items() if target in outside}


def _domains(wired: Sequence[_Wired]) -> dict[str, tuple[TensorPlacement, ...]]:
    """The placements of every variable that some segment can do."""
    found: dict[str, dict[TensorPlacement, None]] = {}
    for one in wired:
        for choices, variable in zip(one.choices, one.variables, strict=True):
            found.setdefault(variable, {}).update(dict.fromkeys(choices))
    return {variable: tuple(places) for variable, places in found.items()}


def _over(one: _Wired, costs: torch.Tensor, domains: Mapping[str, tuple[TensorPlacement, ...]]) -> Table:
    """A body's table over the variables of a segment; a placement that it cannot do costs infinity."""
    variables = one.variables
    if (entries := prod(len(domains[variable]) for variable in variables)) > LARGEST:
        raise MemoryError(f"a table of {entries} entries: what passes is too entangled to be solved exactly")
    for dim, (choices, variable) in enumerate(zip(one.choices, variables, strict=True)):
        own = {how: i for i, how in enumerate(choices)}
        at = [own.get(how, len(own)) for how in domains[variable]]
        nowhere = torch.full_like(costs.narrow(dim, 0, 1), torch.inf)
        costs = torch.cat((costs, nowhere), dim).index_select(dim, torch.tensor(at))
    for variable in dict.fromkeys(v for v in variables if variables.count(v) > 1):
        first, *more = (dim for dim, v in enumerate(variables) if v == variable)
        for dim in reversed(more):  # one value in two places of the boundary: only equal placements count
            costs = costs.diagonal(0, first, dim).movedim(-1, first)
            variables = variables[:dim] + variables[dim + 1 :]
    return Table(variables, costs)
