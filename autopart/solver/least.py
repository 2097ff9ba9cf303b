"""What a step takes at least inside its segments, wherever its values lie on an axis, by mini-buckets.

A body that is too entangled for its exact tables over its boundary has several smaller ones, whose sum is nowhere above
them (`eliminate.bounds`); so has the whole step over what passes between segments. The least of that is what no
placement is faster than.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopart.ir.cost import PICO
from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Segmented
from autopart.ir.tensor_plan import TensorPlan
from autopart.rules.ring import in_turn
from autopart.solver.axis import Axis
from autopart.solver.body_layout import BodyLayout
from autopart.solver.eliminate import Table, bounds, tables_of
from autopart.solver.tensor import layout_of
from autopart.solver.wires import Boundary, Domains, boundaries, domains, over, unsplit

LARGEST = 1 << 22
"""The most entries of a table."""

Choices = tuple[tuple[TensorPlacement, ...], ...]


def unproven(segmented: Segmented, plan: TensorPlan) -> tuple[str, ...]:
    """A sentence for each axis on which not all placements inside segments were looked at, for the notes of a plan.

    Of an axis alone it says how far from the fastest placement the plan's is at most.
    """
    found = []
    for each in plan.axes:
        names = [s.name for s, n in zip(segmented.segments, each.segments, strict=True) if not each.costs[n].exact]
        if names:
            told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            alone = plan.inner is None and each.axis != "dp"
            found.append(
                f"{each.axis} inside {told}: too entangled to be solved exactly, so not all that may be split was "
                f"looked at, and {_faster(segmented, each) if alone else POSSIBLE}"
            )
    return tuple(found)


POSSIBLE = "a faster placement is possible"
"""What is said where no bound is known."""


def _faster(segmented: Segmented, plan: TensorPlan) -> str:
    """By how much another placement on the axis may be faster, at most, one that splits the samples among them."""
    axis = Axis(plan.axis, plan.degree, plan.cluster, plan.samples)
    axis = replace(axis, divides=not axis.whole_parameters and plan.samples % plan.degree == 0)
    taken, least = sum(plan.costs[n].chosen for n in plan.segments), least_seconds(segmented, axis)
    if not least:
        return POSSIBLE
    proven = taken <= least * (1 + 1e-6)
    return (
        "no placement is faster all the same"
        if proven
        else f"a placement may be faster, by {1 - least / taken:.1%} at most"
    )


def least_seconds(segmented: Segmented, axis: Axis, largest: int = LARGEST) -> float:
    """The seconds that all segments take at least for a microbatch, forward and backward, on an axis without pins."""
    turns = in_turn((node for body in segmented.bodies for node in body.forward.nodes), axis.degree)
    known: dict[object, tuple[BodyLayout, tuple[Table, ...]]] = {}
    found: list[tuple[Boundary, Choices, tuple[Table, ...]]] = []
    for each in boundaries(segmented, axis, {}, unsplit(segmented)):
        if each.key not in known:
            layout = layout_of(segmented.bodies[each.segment.body], each.segment, axis, each.whole, turns=turns)
            kept = [f"u:{unit}" for unit in each.units]
            known[each.key] = layout, bounds(tuple(tables_of(layout.layout)), kept, largest)
        layout, tables = known[each.key]
        found.append((each, tuple(layout.choices(unit) for unit in each.units), tables))
    places = domains([(each.variables, choices) for each, choices, _ in found])
    outside = [made for row in found for made in _outside(*row, places, largest)]
    return sum(float(table.costs) for table in bounds(outside, (), largest)) / PICO


def _outside(
    boundary: Boundary, choices: Choices, tables: tuple[Table, ...], places: Domains, largest: int
) -> list[Table]:
    """A segment's tables over what is outside. One that would be too large says of a choice no more than its least."""
    units = {f"u:{unit}": (v, own) for unit, v, own in zip(boundary.units, boundary.variables, choices, strict=True)}
    made = []
    for table in tables:
        pairs = [units[each] for each in table.variables]
        variables = [variable for variable, _ in pairs]
        if prod(len(places[variable]) for variable in variables) > largest:
            made.append(Table((), table.costs.min()))
        else:
            made.append(over(table.costs, variables, [own for _, own in pairs], places))
    return made
