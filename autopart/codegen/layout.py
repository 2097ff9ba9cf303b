"""How a body meets the units: the order of its parameter formals, and of the gradients it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopart.ir.action import Kind
from autopart.ir.segmented import Body, Phase, Segment, Segmented
from autopart.ir.state import Unit, used_units


@dataclass(frozen=True, slots=True)
class Layout:
    """One segment's use of its body.

    `phases` are what it does, by kind of action. `units` are the units it takes, in order; `formals` the local names of
    all their parameters. `gradients` has, for each trainable unit, the source of the gradient of each of its parameters
    (``"None"`` where the segment makes none). `buffers` pairs the value names of buffers and constants with their names
    in the module, `draws` those of random inputs with the names of their draws.
    """

    segment: Segment
    body: Body
    phases: Mapping[Kind, Phase]
    units: tuple[Unit, ...]
    formals: tuple[str, ...]
    gradients: tuple[tuple[Unit, tuple[str, ...]], ...]
    buffers: tuple[tuple[str, str], ...]
    draws: tuple[tuple[str, str], ...]

    def given(self, kind: Kind) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
        """The units that the function of a phase takes, each with the formals of its parameters."""
        read, names = self.phases[kind].reads, iter(self.formals)
        each = [(unit, tuple(next(names) for _ in unit.parameters)) for unit in self.units]
        return tuple((unit, formals) for unit, formals in each if unit.holds(read))

    def inputs(self, kind: Kind) -> tuple[str, ...]:
        """The formals of a phase's function: values, what was kept, fixed ones, and the parameters of whole units."""
        phase = self.phases[kind]
        count = len(phase.function.inputs) - len(phase.parameters)
        before = (value.name for value in phase.function.inputs[:count])
        return (*before, *(name for _, formals in self.given(kind) for name in formals))

    @property
    def variant(self) -> object:
        """What the text of the body's functions depends on besides the body."""
        sizes = tuple(len(unit.parameters) for unit in self.units)
        return self.segment.body, self.formals, sizes, tuple(sources for _, sources in self.gradients)


def layout(segment: Segment, segmented: Segmented, homes: Mapping[str, Unit], kinds: Iterable[Kind]) -> Layout:
    """The layout of one segment, given the unit of every parameter and the kinds of actions that its stage performs."""
    body = segmented.bodies[segment.body]
    found = {kind: segmented.phase(segment, kind) for kind in kinds}
    phases = {kind: phase for kind, phase in found.items() if phase is not None}
    local = _locals(segment, body)
    units = used_units(segment.parameters, homes)
    # A parameter of a unit that this segment does not read still has a place among the formals, so that units pass
    # whole.
    formals = tuple(
        local.get(parameter.target, f"unused_{i}")
        for i, parameter in enumerate(p for unit in units for p in unit.parameters)
    )
    sources = _gradient_sources(phases.values())
    gradients = tuple(
        (unit, tuple(sources.get(parameter.target, "None") for parameter in unit.parameters))
        for unit in units
        if unit.trainable and any(parameter.target in sources for parameter in unit.parameters)
    )
    fixed = {*segment.forward_fixed, *segment.backward_fixed}

    def outside(*kinds: str) -> tuple[tuple[str, str], ...]:
        held = segmented.captured.of_kind(*kinds)
        return tuple((item.value.name, item.target) for item in held if item.value.name in fixed)

    return Layout(segment, body, phases, units, formals, gradients, outside("buffer", "constant"), outside("random"))


def _locals(segment: Segment, body: Body) -> dict[str, str]:
    start = len(segment.values) + len(segment.forward_fixed)
    names = dict(zip(segment.forward_parameters, (v.name for v in body.forward.inputs[start:]), strict=True))
    if body.backward is not None:
        start = len(segment.backward_inputs) + len(body.saved) + len(segment.backward_fixed)
        names |= dict(zip(segment.backward_parameters, (v.name for v in body.backward.inputs[start:]), strict=True))
    return names


def _gradient_sources(phases: Iterable[Phase]) -> Mapping[str, str]:
    """Source for each parameter's gradient; a parameter used twice in the segment has the sum of two.

    A backward and its W make them under the same names.
    """
    phase = next((each for each in phases if each.gradients), None)
    if phase is None:
        return {}
    sources: dict[str, str] = {}
    for target, value in zip(phase.gradients, phase.function.outputs[len(phase.gives) :], strict=True):
        sources[target] = f"{sources[target]} + {value}" if target in sources else value
    return sources
