"""What a placed body would take otherwise: with nothing split, or with what passes through it placed in other ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopart.ir.cost import PICO
from autopart.ir.placement import TensorPlacement
from autopart.ir.tensor_plan import Costs
from autopart.solver.body_layout import BodyLayout
from autopart.solver.eliminate import Eliminated, picks
from autopart.solver.layout import Layout, evaluate

Choices = Mapping[str, Sequence[TensorPlacement]]
"""The placements among which each unit of a boundary chooses."""

WHOLE = "with nothing split"
"""What a body is called in which every place computes all."""


def alternatives(made: BodyLayout, solved: Eliminated, given: Mapping[str, int], choices: Choices) -> Costs:
    """The costs of a body whose boundary is `given`, by variable, and of others: each the best of its kind.

    Shared parameters stay as they are; a value that cannot be placed so keeps its placement.
    """
    layout = made.layout
    chosen = _time(layout, solved, given)
    assert chosen is not None  # the boundary is that of a solution
    others = [(WHOLE, None if made.plain is None else evaluate(made.plain, [0] * len(made.plain.units)))]
    others += [(f"with {how} passing", _time(layout, solved, other)) for how, other in _boundaries(given, choices)]
    return Costs(chosen / PICO, tuple((what, time / PICO) for what, time in others if time is not None), made.exact)


def _boundaries(given: Mapping[str, int], choices: Choices) -> Iterator[tuple[TensorPlacement, dict[str, int]]]:
    """For each placement another boundary, in which all that passes has it, if it can."""
    passing = {unit: list(places) for unit, places in choices.items() if not unit.startswith("parameter ")}
    seen = [dict(given)]
    for how in dict.fromkeys(how for places in passing.values() for how in places):
        other = {**given, **{f"u:{unit}": places.index(how) for unit, places in passing.items() if how in places}}
        if other not in seen:
            seen.append(other)
            yield how, other


def _time(layout: Layout, solved: Eliminated, given: Mapping[str, int]) -> int | None:
    """The time of the best with this boundary, counted afresh; None if there is none."""
    values = solved.best(given)
    return None if values is None else evaluate(layout, picks(layout, values))
