"""How a body meets the units: the order of its parameter formals, and of the gradients it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.ir.segmented import Body, Segment, Segmented
from autopart.ir.state import Unit, used_units


@dataclass(frozen=True, slots=True)
class Layout:
    """One segment's use of its body.

    `units` are the units it takes, in order; `formals` the local names of all their parameters. `gradients` has, for
    each trainable unit, the source of the gradient of each of its parameters (``"None"`` where the segment makes
    none). `buffers` pairs the value names of buffers and constants with their names in the module, `draws` those of
    random inputs with the names of their draws.
    """

    segment: Segment
    body: Body
    units: tuple[Unit, ...]
    formals: tuple[str, ...]
    gradients: tuple[tuple[Unit, tuple[str, ...]], ...]
    buffers: tuple[tuple[str, str], ...]
    draws: tuple[tuple[str, str], ...]

    @property
    def values(self) -> tuple[str, ...]:
        """Local names of the values that the forward takes from other segments."""
        return tuple(value.name for value in self.body.forward.inputs[: len(self.segment.values)])

    @property
    def forward_fixed(self) -> tuple[str, ...]:
        """Local names of the buffers, prologue values and draws of the forward."""
        start = len(self.segment.values)
        return tuple(v.name for v in self.body.forward.inputs[start : start + len(self.segment.forward_fixed)])

    @property
    def backward_inputs(self) -> tuple[str, ...]:
        """Local names of the gradients that come in."""
        assert self.body.backward is not None
        return tuple(v.name for v in self.body.backward.inputs[: len(self.segment.backward_inputs)])

    @property
    def backward_fixed(self) -> tuple[str, ...]:
        """Local names of the buffers, prologue values and draws of the backward."""
        assert self.body.backward is not None
        start = len(self.segment.backward_inputs) + len(self.body.saved)
        return tuple(v.name for v in self.body.backward.inputs[start : start + len(self.segment.backward_fixed)])

    @property
    def variant(self) -> object:
        """What the text of the body's functions depends on besides the body."""
        sizes = tuple(len(unit.parameters) for unit in self.units)
        return self.segment.body, self.formals, sizes, tuple(sources for _, sources in self.gradients)


def layout(segment: Segment, segmented: Segmented, homes: Mapping[str, Unit]) -> Layout:
    """The layout of one segment, given the unit of every parameter."""
    body = segmented.bodies[segment.body]
    local = _locals(segment, body)
    units = used_units(segment.parameters, homes)
    # A parameter of a unit that this segment does not read still has a place among the formals, so that units pass
    # whole.
    formals = tuple(
        local.get(parameter.target, f"unused_{i}")
        for i, parameter in enumerate(p for unit in units for p in unit.parameters)
    )
    sources = _gradient_sources(segment, body)
    gradients = tuple(
        (unit, tuple(sources.get(parameter.target, "None") for parameter in unit.parameters))
        for unit in units
        if unit.trainable and any(parameter.target in sources for parameter in unit.parameters)
    )
    fixed = {*segment.forward_fixed, *segment.backward_fixed}

    def outside(*kinds: str) -> tuple[tuple[str, str], ...]:
        held = segmented.captured.of_kind(*kinds)
        return tuple((item.value.name, item.target) for item in held if item.value.name in fixed)

    return Layout(segment, body, units, formals, gradients, outside("buffer", "constant"), outside("random"))


def _locals(segment: Segment, body: Body) -> dict[str, str]:
    start = len(segment.values) + len(segment.forward_fixed)
    names = dict(zip(segment.forward_parameters, (v.name for v in body.forward.inputs[start:]), strict=True))
    if body.backward is not None:
        start = len(segment.backward_inputs) + len(body.saved) + len(segment.backward_fixed)
        names |= dict(zip(segment.backward_parameters, (v.name for v in body.backward.inputs[start:]), strict=True))
    return names


def _gradient_sources(segment: Segment, body: Body) -> Mapping[str, str]:
    """Source for each parameter's gradient; a parameter used twice in the segment has the sum of two."""
    if body.backward is None:
        return {}
    sources: dict[str, str] = {}
    values = body.backward.outputs[len(segment.backward_outputs) :]
    for target, value in zip(segment.gradients, values, strict=True):
        sources[target] = f"{sources[target]} + {value}" if target in sources else value
    return sources
