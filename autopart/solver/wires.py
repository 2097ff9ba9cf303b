"""What segments share, as variables: the values that pass between them, and parameters that several of them use.

A segment's body has units for its boundary; each is wired to a variable, which all segments that have it agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.ir.graph import descendants
from autopart.ir.placement import TensorPlacement
from autopart.ir.segmented import Body, Segment, Segmented
from autopart.solver.axis import Axis
from autopart.solver.eliminate import Table
from autopart.solver.tensor import Pin

Domains = Mapping[str, tuple[TensorPlacement, ...]]
"""The placements of every variable that some segment can do."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A segment's boundary: its units, and the variable of each. Segments with one `key` have equal problems inside.

    `whole` are the local names of what passes it unsplit, `pins` those of its parameters, by local name.
    """

    segment: Segment
    units: tuple[str, ...]
    variables: tuple[str, ...]
    whole: frozenset[str]
    pins: Mapping[str, Pin]

    @property
    def key(self) -> tuple[object, ...]:
        """What tells the problem inside from others."""
        return self.segment.body, self.units, tuple(self.pins.items())


def boundaries(segmented: Segmented, axis: Axis, pins: Mapping[str, Pin], whole: Collection[str]) -> Iterator[Boundary]:
    """The boundary of every segment, where the values in `whole` pass between segments unsplit."""
    users = Counter(target for segment in segmented.segments for target in segment.parameters)
    outside = {target for target, count in users.items() if count > 1}
    for segment in segmented.segments:
        body = segmented.bodies[segment.body]
        wires, owners = _wires(body, segment, outside, axis), _owners(body, segment)
        units = tuple(unit for unit, name in wires.items() if name not in whole)
        yield Boundary(
            segment,
            units,
            tuple(wires[unit] for unit in units),
            frozenset(unit.split()[-1] for unit, name in wires.items() if name in whole),
            {local: pins[target] for target, local in owners.items() if target in pins},
        )


def unsplit(segmented: Segmented) -> set[str]:
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


def domains(choices: Sequence[tuple[Sequence[str], Sequence[Sequence[TensorPlacement]]]]) -> Domains:
    """Of segments' variables, and the choices of each, the placements of every variable that some segment can do."""
    found: dict[str, dict[TensorPlacement, None]] = {}
    for variables, every in choices:
        for variable, places in zip(variables, every, strict=True):
            found.setdefault(variable, {}).update(dict.fromkeys(places))
    return {variable: tuple(places) for variable, places in found.items()}


def over(
    costs: torch.Tensor, variables: Sequence[str], choices: Sequence[Sequence[TensorPlacement]], known: Domains
) -> Table:
    """Costs over some choices of each variable, over all of its placements; one that is no choice costs infinity."""
    names = tuple(variables)
    for dim, (own, variable) in enumerate(zip(choices, names, strict=True)):
        numbers = {how: i for i, how in enumerate(own)}
        at = [numbers.get(how, len(numbers)) for how in known[variable]]
        nowhere = torch.full_like(costs.narrow(dim, 0, 1), torch.inf)
        costs = torch.cat((costs, nowhere), dim).index_select(dim, torch.tensor(at))
    for variable in dict.fromkeys(v for v in names if names.count(v) > 1):
        first, *more = (dim for dim, v in enumerate(names) if v == variable)
        for dim in reversed(more):  # one value in two places of the boundary: only equal placements count
            costs = costs.diagonal(0, first, dim).movedim(-1, first)
            names = names[:dim] + names[dim + 1 :]
    return Table(names, costs)
