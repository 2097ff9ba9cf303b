"""A body on an axis as a `Layout`, and a solution of it as a `PlacedBody`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.placed import Move, PlacedBody, PlacedFunction, Strategy
from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Body, Function
from autopart.solver.axis import Axis
from autopart.solver.layout import Layout, Option, Unit, flows, tree

LATER = "'"
"""What the backward reads of a forward value is a value of its own, of this name after the forward's."""


@dataclass(frozen=True, slots=True)
class BodyLayout:
    """A body as a layout. `placements` lists each value's; ``strategies[i]`` are unit i's options, if it is a node.

    `plain` is a layout of the same units whose first options split nothing, None where pins leave none. `exact`: all
    that may be split comes into question.
    """

    body: Body
    axis: Axis
    layout: Layout
    placements: Mapping[str, tuple[TensorPlacement, ...]]
    strategies: tuple[tuple[Strategy, ...], ...]
    plain: Layout | None
    exact: bool = True

    def choices(self, unit: str) -> tuple[TensorPlacement, ...]:
        """The placements among which a unit of the boundary chooses, in the order of its options."""
        found = next(u for u in self.layout.units if u.name == unit)
        value = (found.makes or found.reads)[0]
        return tuple(self.placements[value][(o.gives or o.needs)[0] or 0] for o in found.options)

    def placed(self, picks: Sequence[int]) -> PlacedBody:
        """A solution as placements, strategies and moves."""
        units = self.layout.units
        chosen = {unit.name: unit.options[pick] for unit, pick in zip(units, picks, strict=True)}
        taken = [s[pick] for s, pick in zip(self.strategies, picks, strict=True) if s]
        prices = dict(self.layout.moves)
        moves: list[Move] = []
        given: dict[str, TensorPlacement] = {}
        for value, how, needed in flows(self.layout, list(chosen.values())):
            places = self.placements[value]
            given[value] = places[how]
            way = tree(prices[value], how, needed)
            assert way is not None  # a solution has a way to whatever it needs
            moves += [Move(value, places[a], places[b]) for a, b in way.steps]
        forward, backward = self.body.forward, self.body.backward

        def outputs(function: Function, names: Mapping[str, str], phase: str) -> tuple[TensorPlacement, ...]:
            return tuple(
                self.placements[name][_need(units, chosen, f"{phase} {i} {name}", names.get(name, name))]
                for i, name in enumerate(function.outputs)
            )

        def part(function: Function, steps: list[Strategy], names: Mapping[str, str], phase: str) -> PlacedFunction:
            own = {*names.values(), *(name for node in function.nodes for name in node.names())}
            inputs = tuple(given[names[v.name]] for v in function.inputs)
            mine = tuple(replace(m, value=m.value.removesuffix(LATER)) for m in moves if m.value in own)
            return PlacedFunction(function, inputs, tuple(steps), outputs(function, names, phase), mine)

        count = len(forward.nodes)
        first = part(forward, taken[:count], {v.name: v.name for v in forward.inputs}, "out")
        if backward is None:
            return PlacedBody(self.body, self.axis.name, self.axis.degree, first, (), None)
        late = {v.name: v.name + LATER for v in backward.inputs}
        names = {name: later if later in self.placements else name for name, later in late.items()}
        saved = tuple(given[name + LATER] for name in self.body.saved)
        second = part(backward, taken[count:], names, "back")
        return PlacedBody(self.body, self.axis.name, self.axis.degree, first, saved, second)


def _need(units: Sequence[Unit], chosen: Mapping[str, Option], unit: str, value: str) -> int:
    """How an output is needed: by the unit of its own, or by that of the parameter whose gradient it is."""
    found = next((u for u in units if u.name == unit), None)
    if found is None:
        found = next(u for u in units if u.name.startswith("parameter ") and value in u.reads)
    need = chosen[found.name].needs[found.reads.index(value)]
    assert need is not None  # only nodes ignore what they read
    return need
