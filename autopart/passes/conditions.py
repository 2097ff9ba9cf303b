"""conditions: Placement + graph -> which of the two conditions hold under which training is that of one device.

Mehta (arXiv 2601.02311) claims them necessary and sufficient; stated here for what can be checked on a graph. Let
parameters have elements e, and each sample, microbatch and use of a parameter contribute to its gradient.

gradient integrity   whoever updates e does so with the whole batch's gradient of e: every contribution counted once,
                     under the divisor of the whole batch
state consistency    wherever e is used, it is there, and all its copies are equal: it is held by whoever uses it, has
                     one placement, and one owner updates it

An axis divides what the graph says: ``pp`` the stages (of a `Staged`), any axis whose activations are materialized (or
offloaded) the samples, as does the graph's own data axis whatever the modes claim. On other axes the graph is not
divided: all devices compute the same. Exact arithmetic and elementwise optimizers are taken for granted. Of a step
whose slices are batches of their own (`Captured.sliced`), the one device takes them one after the other.

This is for callers to ask: neither planning nor compiling does so yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from autopart.errors import CaptureError
from autopart.ir.action import Kind
from autopart.ir.captured import Captured
from autopart.ir.graph import Node, descendants
from autopart.ir.placement import Mode, Modes, Partial, PerSlice, Placement, Shard, TensorPlacement
from autopart.ir.plan import first_match
from autopart.ir.segmented import Segment
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Staged
from autopart.passes.judge import takes_sizes
from autopart.passes.segment import segment
from autopart.passes.shard import AXIS, shard
from autopart.rules.dependence import NeededWhole

Rules = tuple[tuple[str, Placement], ...]
"""(pattern, placement) as in a plan: the first match holds, the last pattern is '*'."""

STAGES = "pp"
"""The axis over which stages are dealt."""


class Condition(Enum):
    """What must hold for training to be that of one device."""

    GRADIENT_INTEGRITY = "gradient integrity"
    STATE_CONSISTENCY = "state consistency"


@dataclass(frozen=True, slots=True)
class Break:
    """Where a condition does not hold: the parameter ("" for the loss, and so all), the axis, the use, and why."""

    condition: Condition
    parameter: str
    axis: str
    use: str
    reason: str

    def __str__(self) -> str:
        return f"{self.condition.value}: {self.parameter or 'the loss'} on {self.axis}, {self.use}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The answer: no breaks, or all that were found."""

    breaks: tuple[Break, ...]

    @property
    def gradient_integrity(self) -> bool:
        """Whether every update is with the whole batch's gradient."""
        return all(item.condition is not Condition.GRADIENT_INTEGRITY for item in self.breaks)

    @property
    def state_consistency(self) -> bool:
        """Whether every use finds the parameter, and all copies are equal."""
        return all(item.condition is not Condition.STATE_CONSISTENCY for item in self.breaks)

    def __str__(self) -> str:
        """A line a break, or that there is none."""
        return "\n".join(map(str, self.breaks)) or "gradient integrity and state consistency hold"


@dataclass(frozen=True, slots=True)
class _Use:
    """A place where a parameter is read, or (with the placement of what is made there) given a gradient."""

    parameter: str
    segment: str
    stage: int
    at: str
    gradient: TensorPlacement | None = None


def conditions(placement: Placement | Sequence[tuple[str, Placement]], graph: Captured | Staged) -> Conditions:
    """Which conditions hold for a placement on a normalised graph; each break names parameter, axis and use.

    `placement` may be a plan's (`Plan.placements`), which differs between parameters. A `Captured` has no stages: only
    a `Staged` answers for a placement that speaks of ``pp``, and is held to its own units in any case.

    Raises ValueError for a placement on ``pp`` without stages, and where no pattern matches a parameter.
    """
    rules: Rules = (("*", placement),) if isinstance(placement, Placement) else tuple(placement)
    axes = tuple(dict.fromkeys(axis for _, each in rules for axis, _ in each.axes))
    if isinstance(graph, Staged):
        sharded, stages = graph.sharded, graph.stages
    else:
        if STAGES in axes:
            raise ValueError(f"placement: {STAGES} deals stages, and the graph has none; pass it staged")
        try:
            sharded = shard(segment(graph))
        except (CaptureError, NeededWhole) as error:
            return Conditions(tuple(_coupled(axis, error) for axis in axes))
        stages = (sharded.segmented.segments,)
    captured = sharded.segmented.captured
    uses = [use for number, row in enumerate(stages) for item in row for use in _uses(sharded, item, number)]
    return Conditions(
        (
            *_normalised(captured, axes, uses),
            *_counted(captured, stages),
            *_tied(captured, rules),
            *(found for use in uses for found in _used(use, first_match(rules, use.parameter))),
            *(_held(graph, uses) if isinstance(graph, Staged) else ()),
        )
    )


def _coupled(axis: str, error: Exception) -> Break:
    what = f"{', '.join(sorted(error.names))} is needed whole" if isinstance(error, NeededWhole) else str(error)
    reason = f"the graph's parts do not add up to the whole batch (is it normalised?): {what}"
    return Break(Condition.GRADIENT_INTEGRITY, "", axis, "the backward", reason)


def _uses(sharded: Sharded, item: Segment, stage: int) -> Iterator[_Use]:
    """What a segment reads of parameters, and the gradients that it makes."""
    inside = sharded.inside[item.body]
    for phase in filter(None, (sharded.segmented.phase(item, kind) for kind in (Kind.F, Kind.B))):
        nodes, inputs, outputs = phase.function.nodes, phase.function.inputs, phase.function.outputs
        for formal, parameter in zip(inputs[len(inputs) - len(phase.parameters) :], phase.parameters, strict=True):
            for node in nodes:
                if formal.name in node.refs():
                    yield _Use(parameter, item.name, stage, _at(item.name, node))
        makers = {name: node for node in nodes for name in node.names()}
        for parameter, name in zip(phase.gradients, outputs[len(outputs) - len(phase.gradients) :], strict=True):
            at = _at(item.name, makers[name]) if name in makers else item.name
            yield _Use(parameter, item.name, stage, at, inside[name])


def _at(where: str, node: Node) -> str:
    return f"{where}: {node.opname}" + (f" ({node.source})" if node.source else "")


def _used(use: _Use, placement: Placement) -> Iterator[Break]:
    """One use on every axis that the parameter's placement speaks of."""
    for axis, modes in placement.axes:
        if axis == STAGES:
            continue
        if use.gradient is None:
            if modes.parameters is Mode.SHARDED:
                reason = "it is read whole, and each device has its part only (S); gathered before each use (S*) it is"
                yield Break(Condition.STATE_CONSISTENCY, use.parameter, axis, use.at, f"{reason} there")
        elif reason := _wrong_sum(axis, modes, use.gradient):
            yield Break(Condition.GRADIENT_INTEGRITY, use.parameter, axis, use.at, reason)


def _wrong_sum(axis: str, modes: Modes, gradient: TensorPlacement) -> str:
    """What is wrong with how a gradient is put together on an axis, "" if nothing is."""
    divided = axis == AXIS or modes.activations in (Mode.MATERIALIZED, Mode.OFFLOADED)
    reduced = modes.inputs_differ and modes.parameters is not Mode.SHARDED
    if divided and isinstance(gradient, Shard):
        return "the gradient is split over the samples, and no sum over them"
    if divided and isinstance(gradient, Partial | PerSlice) and not reduced:
        return f"the gradient is a part of a sum over the samples, and the modes {modes} sum nothing there"
    if not divided and reduced:
        return f"the gradient is the same on all devices, and the modes {modes} would count it once for each"
    return ""


def _normalised(captured: Captured, axes: Sequence[str], uses: Sequence[_Use]) -> Iterator[Break]:
    """A mean whose divisor is the microbatch's size is not the whole batch's mean, nor is the sum of such."""
    graded = {use.parameter for use in uses if use.gradient is not None}
    for node in () if captured.sliced else captured.nodes:
        if takes_sizes(node):
            for parameter in sorted(graded & _reached(captured, node)):
                reason = (
                    "it computes with the size of the microbatch, where the whole batch's divides every contribution"
                )
                at = _at(node.module or "the model", node)
                yield from (Break(Condition.GRADIENT_INTEGRITY, parameter, axis, at, reason) for axis in axes)


def _reached(captured: Captured, start: Node) -> set[str]:
    """The parameters whose gradients depend on what a node makes."""
    reached = descendants(captured.nodes, start.names())
    return {out.target for out in captured.outputs if out.kind == "grad" and out.name in reached}


def _counted(captured: Captured, stages: Sequence[Sequence[Segment]]) -> Iterator[Break]:
    """Every gradient that the graph makes is handed on by its segment, once."""
    due = Counter(out.target for out in captured.outputs if out.kind == "grad")
    done = Counter(target for row in stages for item in row for target in item.gradients)
    for parameter in sorted({*due, *done}):
        if due[parameter] != done[parameter]:
            where = ", ".join(item.name for row in stages for item in row if parameter in item.gradients)
            reason = f"its gradient has {due[parameter]} contributions in the graph, and {done[parameter]} are counted"
            at = f"in {where}" if where else "in no segment"
            yield Break(Condition.GRADIENT_INTEGRITY, parameter, STAGES, at, reason)


def _tied(captured: Captured, rules: Rules) -> Iterator[Break]:
    """One tensor under several names has one placement."""
    for name, known in captured.tied:
        here, there = (first_match(rules, each) for each in (name, known))
        for axis in dict.fromkeys(axis for each in (here, there) for axis, _ in each.axes):
            if here.on(axis) != there.on(axis):
                reason = f"it is the same tensor as {known}, whose modes are {there.on(axis)} and not {here.on(axis)}"
                yield Break(Condition.STATE_CONSISTENCY, name, axis, f"as {name}", reason)


def _held(staged: Staged, uses: Sequence[_Use]) -> Iterator[Break]:
    """Every parameter is in one unit, and every stage that uses it holds that, so that gradients of all uses meet."""
    units = Counter(p.target for unit in staged.state.units for p in unit.parameters)
    homes = staged.state.homes()
    for use in uses:
        condition = Condition.STATE_CONSISTENCY if use.gradient is None else Condition.GRADIENT_INTEGRITY
        at = f"{use.at}, on stage {use.stage}"
        if units[use.parameter] != 1:
            reason = f"{units[use.parameter]} units hold it, and each would be updated; one has to"
            yield Break(condition, use.parameter, STAGES, at, reason)
        elif use.stage not in homes[use.parameter].stages:
            reason = f"only the stages {homes[use.parameter].stages} hold it and sum its gradients"
            yield Break(condition, use.parameter, STAGES, at, reason)
