"""From segment costs and pins to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autopart.cluster import Cluster
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Placement
from autopart.ir.plan import Plan, Prediction, Stage, stage_ranks
from autopart.ir.plan_text import format_bytes, format_seconds, spans
from autopart.solver.certify import certify
from autopart.solver.infeasible import infeasible
from autopart.solver.request import Request, resolve
from autopart.solver.search import Solved, first_fit
from autopart.solver.timing import exchange_seconds, flush_seconds, segment_seconds


def choose(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    cluster: Cluster | None = None,
    devices: int | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    stages: int | Sequence[str] | None = None,
    placement: str | Placement | Mapping[str, str | Placement] | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    memory: str | int | None = None,
    recompute: bool | Sequence[str] | None = None,
    recomputed: Sequence[SegmentCost] | None = None,
    optimizer_ratio: float = 2.0,
    fingerprint: str = "",
) -> Plan:
    """The plan for a model of these segments and a batch of `batch` samples.

    What is not pinned is chosen by a simple rule: the first that fits the memory limit, trying ddp, zero1, zero2 and
    fsdp before smaller microbatches, and those before more stages, from one data axis over everything upwards
    (`solver.search`). The schedule is 1f1b. If nothing fits so, the same search is made with every segment recomputed
    that keeps less by it. For these choices the stage split is optimal: the slowest stage is as fast
    as it can be, proven by z3 (`solver.certify`), with ties broken by fewer boundary bytes, then earlier cuts.

    `cluster` defaults to CPU devices, `devices` to the size of a pinned mesh, else of the cluster, `memory` (bytes per
    device) to the cluster's.
    `stages` is a count or names where a stage begins: segments, or modules that begin with one. Memory is counted a
    segment at a time: a placement pattern holds for a segment if it matches its name or a module around it.
    `recompute` pins that: True, False, or modules whose segments are recomputed; `recomputed` has what every segment
    costs when it is (by default as much as it does anyway).
    `optimizer_ratio` is bytes of optimizer state per byte of trainable parameter.

    Raises ValueError or TypeError naming a bad argument; `PlanInfeasible` where nothing fits, with the stage that needs
    most, by state, and single changes that make it fit.
    """
    request = resolve(
        costs,
        batch=batch,
        cluster=cluster,
        devices=devices,
        mesh=mesh,
        stages=stages,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
        memory=memory,
        recompute=recompute,
        recomputed=recomputed,
        optimizer_ratio=optimizer_ratio,
    )
    solved = first_fit(request)
    if solved is None and recompute is None:
        request = request.recomputing()
        solved = first_fit(request)
    if solved is None:
        raise infeasible(request)
    plan = _plan(request, solved)
    return replace(plan, notes=_notes(request, solved, mesh is not None, recompute), fingerprint=fingerprint)


def _plan(request: Request, solved: Solved) -> Plan:
    """The plan of a solution, whose split is proven."""
    candidate, starts = solved.candidate, certify(solved.problem, solved.split).starts
    cuts = [*starts, len(request.costs)]
    return Plan(
        mesh=candidate.mesh,
        stages=tuple(
            Stage(request.names[cuts[k] : cuts[k + 1]], stage_ranks(candidate.mesh, k)) for k in range(len(starts))
        ),
        placements=candidate.placements,
        schedule=request.schedule,
        microbatches=candidate.microbatches,
        recompute=request.recompute,
        batch=request.batch,
        prediction=predict(request, solved),
        optimality=_optimality(solved),
        notes=(),
        fingerprint="",
    )


def predict(request: Request, solved: Solved) -> Prediction:
    """Time and memory of a solved request; the bytes that each rank sends are known only once the program is made."""
    model, problem, microbatches = solved.model, solved.problem, solved.candidate.microbatches
    cuts = [*solved.split.starts, len(model.segments)]
    spans = list(pairwise(cuts))
    seconds = [segment_seconds(numbers, request.cluster) for numbers in model.segments]
    forward = [sum(f for f, _ in seconds[i:j]) for i, j in spans]
    backward = [sum(b for _, b in seconds[i:j]) for i, j in spans]
    both = tuple(f + b for f, b in zip(forward, backward, strict=True))
    flush = flush_seconds(request.schedule, forward, backward, microbatches)
    exchanged = max(
        exchange_seconds(model.segments[i:j], model.modes[i:j], model.degree, microbatches, request.cluster)
        for i, j in spans
    )
    memory = tuple(model.stage(i, j, problem.flight[k]) for k, (i, j) in enumerate(spans))
    assert all(need.total <= problem.limit for need in memory), "the split keeps the memory limit when counted afresh"
    busy = microbatches * sum(both) / len(both)
    return Prediction(
        step_seconds=flush + exchanged,
        bubble=max(0.0, 1 - busy / flush) if flush else 0.0,
        stage_seconds=both,
        memory=memory,
    )


def _optimality(solved: Solved) -> str:
    segments, stages = solved.problem.segments, solved.problem.stages
    if stages == 1:
        return "one stage, so nothing to split; mesh, placement and microbatches by rule, not searched"
    slowest = format_seconds(solved.split.slowest * 1e-15)
    return (
        f"optimal split (z3): no way to cut {segments} segments into {stages} stages within the memory limit has a"
        f" slowest stage faster than {slowest} a microbatch; mesh, placement and microbatches by rule, not searched"
    )


def _notes(request: Request, solved: Solved, pinned: bool, recompute: bool | Sequence[str] | None) -> tuple[str, ...]:
    """Where each choice comes from."""
    mesh, limit = solved.candidate.mesh, format_bytes(request.memory)
    stages = mesh.degree("pp")
    if pinned:
        where = f"mesh {mesh}: pinned"
    elif request.stages is not None:
        where = f"mesh {mesh}: {stages} stages were pinned, the other devices share the batch"
    elif stages == 1:
        where = f"mesh {mesh}: everything fits {limit} per device on one data axis"
    else:
        where = f"mesh {mesh}: the fewest stages that fit {limit} per device and the batch of {request.batch}"
    again = spans(request.recompute, request.names) or "nothing"
    chosen = str(solved.candidate.placements[-1][1])
    return (
        where,
        f"placement {chosen}: "
        + ("pinned" if len(request.placements) == 1 else "the first of ddp, zero1, zero2, fsdp that fits"),
        f"microbatches {solved.candidate.microbatches}: "
        + ("pinned" if request.microbatches else "1 without a pipeline, else 4 a stage; more where memory asks for it"),
        f"recompute for memory {again}: "
        + ("pinned" if recompute is not None else "nothing fits without" if request.recompute else "it fits without"),
        f"memory limit {limit} per device, optimizer state {request.optimizer_ratio:g} x the trainable parameters,"
        f" times of the {request.cluster.name} cluster at its peak rates",
    )
