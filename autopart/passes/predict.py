"""predict: what a staged and scheduled step will send and hold, to the byte, from units, edges, sizes and the schedule.

Nothing is run. Traffic follows `ir.traffic`, as the runtime's counters do; activations are those of
`passes.activations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from autopart.codegen.exchange import exchanges
from autopart.codegen.moves import Bucket, Moves, moves
from autopart.codegen.stages import reads_prologue
from autopart.codegen.step import makers, outputs
from autopart.ir.action import COMPLETES, COMPUTE, Action, Kind, Scheduled, Weights, stages_of
from autopart.ir.cost import optimizer_bytes
from autopart.ir.dealing import sent
from autopart.ir.mesh import Mesh, pieces
from autopart.ir.plan import Plan, StageMemory
from autopart.ir.staged import Staged, averaged
from autopart.ir.state import Unit
from autopart.ir.traffic import COLLECTIVES, sent_bytes
from autopart.passes.activations import peak_activations
from autopart.passes.costs import recomputed
from autopart.passes.schedule import with_collectives
from autopart.schedules.stream import stream_of

Sent = tuple[tuple[str, int], ...]
"""Bytes that a rank sends in a step: (send or a collective, bytes), an entry a kind."""

Calls = Iterator[tuple[str, int, int, int]]
"""Collectives of a rank: (collective, payload bytes, ranks, how often)."""


Shares = Sequence[int]
"""The samples of each data rank; by default its part of a batch of the plan's size."""


def with_traffic(
    plan: Plan,
    staged: Staged,
    scheduled: Scheduled,
    shares: Shares | None = None,
    *,
    others: Sequence[Staged] = (),
) -> Plan:
    """The plan with the bytes that every rank sends filled in."""
    sent = predict_traffic(staged, scheduled, plan, shares, others=others)
    return replace(plan, prediction=replace(plan.prediction, sent=sent))


def with_memory(plan: Plan, staged: Staged, scheduled: Scheduled, shares: Shares | None = None) -> Plan:
    """The plan with the memory of its stages counted anew, on the graph instead of a segment at a time."""
    return replace(plan, prediction=replace(plan.prediction, memory=predict_memory(staged, scheduled, plan, shares)))


def predict_traffic(
    staged: Staged,
    scheduled: Scheduled,
    plan: Plan,
    shares: Shares | None = None,
    *,
    others: Sequence[Staged] = (),
) -> tuple[Sent, ...]:
    """Bytes that each rank sends in one step, an entry a rank.

    `others` are the steps of the further places of the axes inside segments, of whose first one `staged` is.
    """
    shares = shares or plan.mesh.dealt(plan.batch)
    sent: dict[int, Sent] = {}
    for place, each in enumerate((staged, *others)):
        ranks = [rank for rank in range(plan.mesh.size) if plan.place_inside(rank) == place]
        sent.update(zip(ranks, _of_place(each, scheduled, plan, shares, ranks), strict=True))
    return tuple(sent[rank] for rank in range(plan.mesh.size))


def _of_place(staged: Staged, scheduled: Scheduled, plan: Plan, shares: Shares, ranks: Sequence[int]) -> Iterator[Sent]:
    """Bytes that each of these ranks sends, which all run their part of one step."""
    mesh, places = plan.mesh, scheduled.schedule.place
    widths = [mesh.width(column) for column in range(len(scheduled.table))]
    rows = with_collectives(staged, scheduled, widths)
    shared = [staged.shared(column) for column in range(len(rows))]
    everywhere = tuple(_outputs(staged, plan, shares))
    held = [stages_of(places, column) for column in range(len(rows))]
    hosted = [_hosted(staged, column, widths[column], plan.microbatches) for column in range(len(rows))]
    known: dict[object, Sent] = {}
    for rank in ranks:
        here, samples = mesh.coordinate(rank), shares[mesh.part(rank)]
        column = here.get("pp", 0)
        degree, units = widths[column], staged.state.on(column)
        across = tuple(_across_stages(shared[column], here.get("dp", 0), degree))
        key = column, mesh.widths and rank, samples, across
        if key not in known:
            count = _batches(scheduled, plan)
            wires = {unit.name: unit.wire_bytes(degree) for unit in units}
            at_once = {unit.name for unit in units if unit.reduced_at_once(degree)}
            sizes = pieces(samples, plan.microbatches)
            if mesh.widths:
                sizes = tuple(size for _, size in mesh.spans(rank, shares, plan.microbatches))
            sizes *= count
            actions = [a for a in rows[column] if a.kind is Kind.GATHER or a.unit in at_once]
            calls = [*_each_microbatch(actions, wires, degree), *across, *everywhere]
            calls += _buffers(staged, places, column, mesh.parts)
            calls += _counts(staged, degree) if plan.inputs == "local" and reads_prologue(staged, held[column]) else ()
            calls += _once(staged, scheduled, column, held[column], wires, degree)
            calls += _inside(staged, scheduled.table[column], sizes, mesh) if plan.inside > 1 else ()
            send = _sends(staged, scheduled.table[column], sizes) // count
            send += _dealt(staged, scheduled.table[column], plan, rank, shares) if mesh.widths else 0
            known[key] = (*_added(send, calls), *hosted[column])
        yield known[key]


def _hosted(staged: Staged, column: int, degree: int, microbatches: int) -> Sent:
    """What a rank of a column and its host send each other, where the optimizer is there; part 0 has the most."""
    units = [u for u in staged.state.on(column) if u.trainable and "optimizer" in u.modes.on_host]
    away = [(unit.part_numel(0, degree) * unit.dtype.itemsize, "gradients" in unit.modes.on_host) for unit in units]
    to_host = sum(nbytes * (microbatches if at_once else 1) for nbytes, at_once in away)
    return (("to_host", to_host), ("from_host", sum(nbytes for nbytes, _ in away))) if away else ()


def _inside(staged: Staged, row: Sequence[Action], sizes: Sequence[int], mesh: Mesh) -> Calls:
    """The collectives inside segments, of all microbatches together."""
    done = Counter((a.stage, a.kind, sizes[a.microbatch]) for a in row if a.kind in COMPUTE)
    for (stage, kind, samples), times in done.items():
        for _, phase in staged.phases(stage, kind):
            for each in exchanges(phase.function, samples):
                yield each.counted, each.payload, mesh.degree(each.axis), times


def _added(send: int, calls: Sequence[tuple[str, int, int, int]]) -> Sent:
    sent = dict.fromkeys(("send", *COLLECTIVES), 0)
    sent["send"] = send
    for collective, payload, ranks, times in calls:
        sent[collective] = sent.get(collective, 0) + times * sent_bytes(collective, payload, ranks)
    return tuple(sent.items())


def _sends(staged: Staged, row: Sequence[Action], sizes: Sequence[int]) -> int:
    """Bytes from stage to stage of one width; `sizes` are the samples of each microbatch."""
    edges = {(edge.source, edge.target): edge for edge in staged.edges if not edge.deal}
    sends = [action for action in row if action.kind is Kind.SEND and (action.stage, action.peer) in edges]
    return sum(edges[action.stage, action.peer].nbytes(sizes[action.microbatch]) for action in sends)


def _dealt(staged: Staged, row: Sequence[Action], plan: Plan, rank: int, shares: Shares) -> int:
    """Bytes from stage to stage of another width."""
    mesh, edges = plan.mesh, {(edge.source, edge.target): edge for edge in staged.edges if edge.deal}
    columns = [[mesh.spans(r, shares, plan.microbatches) for r in mesh.column(c)] for c in range(len(mesh.widths))]
    place, total = mesh.coordinate(rank)["dp"], 0
    for action in row:
        edge = edges.get((action.stage, action.peer)) if action.kind is Kind.SEND else None
        if edge is not None:
            ends = (plan.place[stage] for stage in (action.stage, action.peer))
            here, there = ([spans[action.microbatch] for spans in columns[column]] for column in ends)
            total += sum(
                value.nbytes(count if isinstance(how, int) else 1)
                for _, value, how, (_, count) in sent(edge.values, edge.deal, place, here, there)
            )
    return total


def _each_microbatch(row: Iterable[Action], wires: Mapping[str, int], degree: int) -> Calls:
    """Gathers before use and gradients reduced as they are made, of all microbatches together."""
    kinds = {Kind.GATHER: "all_gather", Kind.REDUCE: "reduce_scatter"}
    for (kind, unit), times in Counter((action.kind, action.unit) for action in row if action.stage >= 0).items():
        yield kinds[kind], wires[unit], degree, times


def _completed(staged: Staged, scheduled: Scheduled, stages: Sequence[int], degree: int) -> list[Bucket]:
    """What travels together of the accumulated gradients of a rank's stages that are reduced on dp, each unit once."""
    found = []
    for stage in stages:
        completed = staged.completed(stage, degree, scheduled.unfinished(stage))
        rows = moves(staged, stage, staged.kinds(stage)[-1], degree, completed)
        found += [bucket for each in rows for bucket in each.reduces if not bucket[0].reduced_at_once(degree)]
    return found


def _once(
    staged: Staged, scheduled: Scheduled, column: int, stages: Sequence[int], wires: Mapping[str, int], degree: int
) -> Calls:
    """What a step does once on dp: parameters updated in parts are made whole; accumulated gradients are reduced."""
    for unit in staged.state.on(column):
        if unit.updated_in_parts(degree):
            yield "all_gather", wires[unit.name], degree, 1
    for bucket in _completed(staged, scheduled, stages, degree):
        if bucket[0].updated_in_parts(degree):
            yield "reduce_scatter", sum(wires[unit.name] for unit in bucket), degree, 1
        else:
            yield "all_reduce", sum(unit.nbytes for unit in bucket), degree, 1


def _counts(staged: Staged, degree: int) -> Calls:
    """The sums over the whole batch that are added up from those of the data ranks, once a step."""
    for item in staged.segmented.captured.of_kind("prologue"):
        yield "all_reduce", item.value.nbytes(1), degree, 1


def _across_stages(shared: Iterable[Unit], part: int, degree: int) -> Calls:
    """Gradients of parameters that several pp ranks use, summed over those: the part that is held, unpadded."""
    for unit in shared:
        numel = unit.part_numel(part, degree) if unit.held_in_parts(degree) else unit.numel
        yield "all_reduce", numel * unit.dtype.itemsize, len(unit.columns), 1


def _buffers(staged: Staged, places: Sequence[int], column: int, parts: int) -> Calls:
    """What makes updated buffers one over dp, and then known on every stage; those of a dtype travel together."""
    for stage, place in enumerate(places):
        sizes: Counter[tuple[torch.dtype, bool]] = Counter()
        for _, value in staged.updated(stage):
            sizes[value.dtype, averaged(value)] += value.nbytes(1)
        for (_, mean), nbytes in sizes.items():
            if place == column and parts > 1:
                yield "all_reduce" if mean else "all_gather", nbytes if mean else nbytes * parts, parts, 1
            if len(set(places)) > 1:
                yield "broadcast", nbytes, len(set(places)), 1


def _outputs(staged: Staged, plan: Plan, shares: Shares) -> Calls:
    """What makes outputs whole: sums over the world; broadcasts of every data rank's piece to all ranks."""
    mesh, ranks = plan.mesh, plan.mesh.size
    returned = outputs(staged)
    values = staged.segmented.handed_on({out.name for out in returned})
    for out in returned:
        if out.partial:
            yield "all_reduce", values[out.name].nbytes(1), ranks, 1
        elif out.everywhere:
            taken = shares
            if mesh.widths:
                spans = (
                    mesh.spans(r, shares, plan.microbatches) for r in mesh.column(plan.place[makers(staged, out)[0]])
                )
                taken = [sum(count for _, count in each) for each in spans]
            for samples in taken if out.dim is not None else taken[:1]:
                yield "broadcast", values[out.name].nbytes(samples), ranks, 1


def predict_memory(
    staged: Staged,
    scheduled: Scheduled,
    plan: Plan,
    shares: Shares | None = None,
    *,
    part: int | None = None,
) -> tuple[StageMemory, ...]:
    """Peak bytes by state of each stage's rank at place `part` on dp, an entry a stage; by default the most of each.

    Activations are the most that is kept between two actions: what is saved for the backwards to come, and edges not
    yet sent or used. `transient` is the parameters of a segment that are gathered, with those of the next one, whole
    gradients on their way to become parts, and the activations that a backward recomputes.
    """
    shares = shares or plan.mesh.dealt(plan.batch)
    mesh, held = plan.mesh, []
    for column in range(len(scheduled.table)):
        if mesh.widths:  # the first data rank has the largest pieces
            spans = mesh.spans(mesh.rank({"pp": column, "dp": part or 0}), shares, plan.microbatches)
            sizes = tuple(count for _, count in spans)
        else:
            samples = max(shares) if part is None else shares[0 if mesh.coupled else part]
            sizes = pieces(samples, plan.microbatches)
        held.append(_rank_memory(staged, scheduled, plan, column, part or 0, sizes))
    return tuple(held[column] for column in plan.place)


def _rank_memory(
    staged: Staged, scheduled: Scheduled, plan: Plan, column: int, part: int, sizes: tuple[int, ...]
) -> StageMemory:
    degree, stages = plan.mesh.width(column), stages_of(scheduled.schedule.place, column)
    units = staged.state.on(column)

    def held(unit: Unit, in_parts: bool) -> int:
        return (unit.part_numel(part, degree) if in_parts else unit.numel) * unit.dtype.itemsize

    trained = [unit for unit in units if unit.trainable]
    parts = [held(unit, unit.held_in_parts(degree)) for unit in trained]
    updated = sum(parts)
    states = {
        "optimizer": [
            optimizer_bytes(nbytes, unit.dtype.itemsize, plan.precision)
            for nbytes, unit in zip(parts, trained, strict=True)
        ],
        "gradients": [held(unit, unit.reduced_at_once(degree)) for unit in trained],
    }

    def on(state: str, *, host: bool) -> int:
        return sum(n for n, u in zip(states[state], trained, strict=True) if (state in u.modes.on_host) is host)

    whole = (degree if plan.mesh.widths else plan.mesh.parts) * plan.microbatches == 1
    sizes = sizes * _batches(scheduled, plan)
    numbers = {segment.body for stage in stages for segment in staged.stages[stage]}
    again = [recomputed(staged.segmented.bodies[number]) for number in numbers]
    return StageMemory(
        parameters=sum(held(unit, unit.gathered(degree)) for unit in units) + updated * _older(scheduled, plan, column),
        optimizer=on("optimizer", host=False),
        gradients=on("gradients", host=False),
        activations=peak_activations(staged, scheduled, column, sizes, whole=whole),
        transient=_transient(staged, scheduled, column, degree)
        + _padding(_completed(staged, scheduled, stages, degree), degree)
        + max((sum(value.nbytes(max(sizes)) for value in values) for values in again), default=0),
        host=on("optimizer", host=True) + on("gradients", host=True),
    )


def _batches(scheduled: Scheduled, plan: Plan) -> int:
    """The batches that a table is for: one, or several where steps overlap."""
    return scheduled.schedule.microbatches // plan.microbatches


def _older(scheduled: Scheduled, plan: Plan, column: int) -> int:
    """The versions of the weights that a rank keeps beside the newest."""
    return 0 if scheduled.schedule.weights is Weights.SYNC else stream_of(plan).keep[column]


def _transient(staged: Staged, scheduled: Scheduled, column: int, degree: int) -> int:
    """Parameters gathered for a segment, and those that travel next; whole gradients of two buckets on their way.

    Two buckets that are reduced follow each other within a microbatch, or from the end of a backward to the beginning
    of the rank's next one.
    """
    if degree == 1:  # of gradients that go to the host, two units at a time
        away = (unit for unit in staged.state.on(column) if unit.trainable and "gradients" in unit.modes.on_host)
        return sum(sorted(unit.nbytes for unit in away)[-2:])
    ahead, reduced = 0, {}
    for stage in stages_of(scheduled.schedule.place, column):
        for kind in staged.kinds(stage):
            rows = moves(staged, stage, kind, degree, {})
            ahead = max(ahead, _gathered(rows, degree))
            reduced[stage] = [_wire(bucket, degree) for each in rows for bucket in each.reduces]
    order = [action.stage for action in scheduled.table[column] if action.kind in COMPLETES]
    on_the_way = [size for stage in order for size in reduced[stage]]
    return ahead + max((a + b for a, b in pairwise([*on_the_way, 0])), default=0)


def _gathered(rows: Sequence[Moves], degree: int) -> int:
    """The most that is gathered at once in an action: for a segment, and what is begun to be gathered meanwhile."""
    most = here = 0
    for each in rows:
        here += sum(_wire(bucket, degree) for bucket, _ in each.gathers)
        begun = _wire(each.gathers[-1][1], degree) if each.gathers else 0
        most = max(most, here + begun)
        here -= sum(_wire(bucket, degree) for bucket in each.drops)
    return most


def _wire(bucket: Bucket, degree: int) -> int:
    return sum(unit.wire_bytes(degree) for unit in bucket)


def _padding(completed: Sequence[Bucket], degree: int) -> int:
    """Bytes on the wire beyond the gradients themselves, of those that are reduced to parts once a step."""
    units = [unit for bucket in completed for unit in bucket if unit.updated_in_parts(degree)]
    return sum(unit.wire_bytes(degree) - unit.nbytes for unit in units)
