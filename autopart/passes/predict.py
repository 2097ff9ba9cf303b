"""predict: what a staged and scheduled step will send and hold, to the byte, from units, edges, sizes and the schedule.

Nothing is run. Traffic follows `ir.traffic`, as the runtime's counters do; activations are those of
`passes.activations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from autopart.ir.action import Action, Kind, Scheduled
from autopart.ir.mesh import pieces
from autopart.ir.plan import Plan, StageMemory
from autopart.ir.segmented import Segment
from autopart.ir.staged import Staged
from autopart.ir.state import Unit
from autopart.ir.traffic import COLLECTIVES, sent_bytes
from autopart.passes.activations import peak_activations
from autopart.passes.schedule import with_collectives

Sent = tuple[tuple[str, int], ...]
"""Bytes that a rank sends in a step: (send or a collective, bytes), an entry a kind."""

Calls = Iterator[tuple[str, int, int, int]]
"""Collectives of a rank: (collective, payload bytes, ranks, how often)."""


def with_traffic(plan: Plan, staged: Staged, scheduled: Scheduled) -> Plan:
    """The plan with the bytes that every rank sends filled in."""
    return replace(plan, prediction=replace(plan.prediction, sent=predict_traffic(staged, scheduled, plan)))


def with_memory(plan: Plan, staged: Staged, scheduled: Scheduled, *, optimizer_ratio: float = 2.0) -> Plan:
    """The plan with the memory of its stages counted anew, on the graph instead of a segment at a time."""
    memory = predict_memory(staged, scheduled, plan, optimizer_ratio=optimizer_ratio)
    return replace(plan, prediction=replace(plan.prediction, memory=memory))


def predict_traffic(staged: Staged, scheduled: Scheduled, plan: Plan) -> tuple[Sent, ...]:
    """Bytes that each rank sends in one step on a batch of the plan's size, an entry a rank."""
    mesh, degree, places = plan.mesh, plan.mesh.degree("dp"), scheduled.schedule.place
    shares = pieces(plan.batch, degree)
    first = replace(scheduled, table=tuple(tuple(a for a in row if a.microbatch == 0) for row in scheduled.table))
    rows = with_collectives(staged, first, degree)
    held = [_held(staged, places, column) for column in range(len(rows))]
    wires = {unit.name: unit.padded(degree) * degree * unit.dtype.itemsize for unit in staged.state.units}
    everywhere = tuple(_outputs(staged, plan))
    reads = [_reads_prologue(staged, places, column) for column in range(len(rows))]
    known: dict[object, Sent] = {}
    made = []
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        column, part = here.get("pp", 0), here.get("dp", 0)
        across = tuple(_across_stages(staged, held[column], places, part, degree))
        key = column, shares[part], across
        if key not in known:
            sizes = pieces(shares[part], plan.microbatches)
            calls = [*_each_microbatch(rows[column], wires, degree, plan.microbatches), *across, *everywhere]
            calls += _once(staged, held[column], wires, degree)
            calls += _counts(staged, degree) if plan.inputs == "local" and reads[column] else ()
            known[key] = _added(_sends(staged, scheduled.table[column], sizes), calls)
        made.append(known[key])
    return tuple(made)


def _held(staged: Staged, places: Sequence[int], column: int) -> tuple[Unit, ...]:
    """The units of the stages that a pp rank holds."""
    return tuple(unit for unit in staged.state.units if any(places[stage] == column for stage in unit.stages))


def _added(send: int, calls: Sequence[tuple[str, int, int, int]]) -> Sent:
    sent = dict.fromkeys(("send", *COLLECTIVES), 0)
    sent["send"] = send
    for collective, payload, ranks, times in calls:
        sent[collective] += times * sent_bytes(collective, payload, ranks)
    return tuple(sent.items())


def _sends(staged: Staged, row: Sequence[Action], sizes: Sequence[int]) -> int:
    """Bytes from stage to stage; `sizes` are the samples of each microbatch."""
    edges = {(edge.source, edge.target): edge for edge in staged.edges}
    sends = [action for action in row if action.kind is Kind.SEND]
    return sum(edges[action.stage, action.peer].nbytes(sizes[action.microbatch]) for action in sends)


def _each_microbatch(row: Sequence[Action], wires: Mapping[str, int], degree: int, microbatches: int) -> Calls:
    """Gathers before use and gradients reduced as they are made: those of the first microbatch, for every one."""
    kinds = {Kind.GATHER: "all_gather", Kind.REDUCE: "reduce_scatter"}
    for action, times in Counter(action for action in row if action.stage >= 0).items():
        if action.kind in kinds:
            yield kinds[action.kind], wires[action.unit], degree, times * microbatches


def _once(staged: Staged, units: Sequence[Unit], wires: Mapping[str, int], degree: int) -> Calls:
    """What a step does once on dp: parameters updated in parts are made whole; accumulated gradients are reduced."""
    trained = {unit.name for unit in staged.trained()}
    for unit in units:
        if unit.updated_in_parts(degree):
            yield "all_gather", wires[unit.name], degree, 1
        if unit.name in trained and not unit.reduced_at_once(degree):
            if unit.updated_in_parts(degree):
                yield "reduce_scatter", wires[unit.name], degree, 1
            else:
                yield "all_reduce", unit.nbytes, degree, 1


def _reads_prologue(staged: Staged, places: Sequence[int], column: int) -> bool:
    """Whether a stage of a pp rank reads a value of the prologue."""
    names = {item.value.name for item in staged.segmented.captured.of_kind("prologue")}
    return any(
        names & {*segment.forward_fixed, *segment.backward_fixed}
        for stage, segments in enumerate(staged.stages)
        if places[stage] == column
        for segment in segments
    )


def _counts(staged: Staged, degree: int) -> Calls:
    """The sums over the whole batch that are added up from those of the data ranks, once a step."""
    for item in staged.segmented.captured.of_kind("prologue"):
        yield "all_reduce", item.value.nbytes(1), degree, 1


def _across_stages(staged: Staged, units: Sequence[Unit], places: Sequence[int], part: int, degree: int) -> Calls:
    """Gradients of parameters that several stages use, summed over those stages: the part that is held, unpadded."""
    trained = {unit.name for unit in staged.trained()}
    for unit in units:
        if unit.name in trained and len(unit.stages) > 1:
            numel = unit.part_numel(part, degree) if unit.held_in_parts(degree) else unit.numel
            yield "all_reduce", numel * unit.dtype.itemsize, len({places[stage] for stage in unit.stages}), 1


def _outputs(staged: Staged, plan: Plan) -> Calls:
    """What makes outputs whole: sums over the world; outside training, broadcasts of every data rank's piece."""
    captured, degree = staged.segmented.captured, plan.mesh.degree("dp")
    values = {value.name: value for value in captured.values()}
    for out in {out.name: out for out in captured.outputs if out.kind in ("loss", "output")}.values():
        if out.partial:
            yield "all_reduce", values[out.name].nbytes(1), plan.mesh.size, 1
        elif not captured.training:
            for samples in pieces(plan.batch, degree)[: degree if out.dim is not None else 1]:
                yield "broadcast", values[out.name].nbytes(samples), plan.mesh.size, 1


def predict_memory(
    staged: Staged, scheduled: Scheduled, plan: Plan, *, part: int = 0, optimizer_ratio: float = 2.0
) -> tuple[StageMemory, ...]:
    """Peak bytes by state of each stage's rank at place `part` on dp, an entry a stage; part 0 has the most.

    `optimizer_ratio` is bytes of optimizer state per byte of trainable parameter. Activations are the most that is kept
    between two actions: what is saved for the backwards to come, and edges not yet sent or used. `transient` is the
    largest segment's gathered parameters and whole gradients, where these become parts at once.
    """
    columns = [
        _rank_memory(staged, scheduled, plan, column, part, optimizer_ratio) for column in range(len(scheduled.table))
    ]
    return tuple(columns[column] for column in scheduled.schedule.place)


def _rank_memory(
    staged: Staged, scheduled: Scheduled, plan: Plan, column: int, part: int, optimizer_ratio: float
) -> StageMemory:
    degree, places = plan.mesh.degree("dp"), scheduled.schedule.place
    units = _held(staged, places, column)

    def held(unit: Unit, in_parts: bool) -> int:
        return (unit.part_numel(part, degree) if in_parts else unit.numel) * unit.dtype.itemsize

    trained = [unit for unit in units if unit.trainable]
    updated = sum(held(unit, unit.held_in_parts(degree)) for unit in trained)
    segments = [segment for stage, place in enumerate(places) if place == column for segment in staged.stages[stage]]
    sizes = pieces(pieces(plan.batch, degree)[part], plan.microbatches)
    return StageMemory(
        parameters=sum(held(unit, unit.gathered(degree)) for unit in units),
        optimizer=ceil(optimizer_ratio * updated),
        gradients=sum(held(unit, unit.reduced_at_once(degree)) for unit in trained),
        activations=peak_activations(staged, scheduled, column, sizes, whole=degree * plan.microbatches == 1),
        transient=max(_transients(segments, units, degree), default=0),
    )


def _transients(segments: Sequence[Segment], units: Sequence[Unit], degree: int) -> Iterator[int]:
    home = {parameter.target: unit for unit in units for parameter in unit.parameters}
    for segment in segments:
        used = {home[target].name: home[target] for target in segment.parameters}.values()
        gathered = sum(u.padded(degree) * degree * u.dtype.itemsize for u in used if u.gathered(degree))
        yield gathered + sum(u.nbytes for u in used if u.reduced_at_once(degree))
