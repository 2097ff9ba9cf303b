"""From segment costs and pins to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan, Prediction, Stage, stage_ranks
from autopart.ir.plan_text import format_bytes, format_seconds, spans
from autopart.ir.tensor_plan import TensorPlan
from autopart.schedules.spell import splits_output
from autopart.solver.certify import certify
from autopart.solver.chunks import PRECISION, fastest
from autopart.solver.infeasible import infeasible
from autopart.solver.request import INSIDE, Pinned, Request, resolve
from autopart.solver.schedule import Chosen, search
from autopart.solver.search import Solved, check_schedule, exchanged_seconds, first_fit, flush, stage_seconds


def choose(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    cluster: Cluster | None = None,
    devices: int | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    stages: int | Sequence[str] | None = None,
    placement: Pinned = None,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    memory: str | int | None = None,
    recompute: bool | Sequence[str] | None = None,
    recomputed: Sequence[SegmentCost] | None = None,
    optimizer_ratio: float = 2.0,
    forwards_first: bool = False,
    fingerprint: str = "",
    tensor: TensorPlan | None = None,
) -> Plan:
    """The plan for a model of these segments and a batch of `batch` samples.

    What is not pinned is chosen by a simple rule: the first that fits the memory limit, trying ddp, zero1, zero2 and
    fsdp before smaller microbatches, and those before more stages, from one data axis over everything upwards
    (`solver.search`). The schedule is 1f1b; with ``schedule="auto"`` it is, the other choices made by that rule, the
    one that is predicted to be fastest of those that fit (`solver.schedule`; with `forwards_first`, of those that steps
    without a loss can follow), and the notes say what it was compared with. If nothing fits so, the same search is made
    with every segment recomputed that keeps less by it. For these choices the stage split is optimal: the busiest rank
    is as fast as it can be, proven by z3 (`solver.certify`), with ties broken by a faster slowest stage, fewer boundary
    bytes, then earlier cuts. Where ranks hold several stages, the split has the shortest predicted flush of several
    with a small load of the busiest rank (`solver.chunks`), and the plan's `optimality` says what is proven of it.

    `cluster` defaults to CPU devices, `devices` to the size of a pinned mesh, else of the cluster, `memory` (bytes per
    device) to the cluster's.
    `stages` is a count or names where a stage begins: segments, or modules that begin with one. `schedule` is a name,
    with options such as ``"interleaved(chunks=3)"``, a Schedule, or a CSV of actions; the last two say for how many
    pipeline ranks and microbatches they are. Memory is counted a
    segment at a time: a placement pattern holds for a segment if it matches its name or a module around it.
    `recompute` pins that: True, False, or modules whose segments are recomputed; `recomputed` has what every segment
    costs when it is (by default as much as it does anyway).
    `optimizer_ratio` is bytes of optimizer state per byte of trainable parameter. With a `mesh` that splits tensors
    inside segments the costs are those of one place, and `tensor` is what was decided there.

    Raises ValueError or TypeError naming a bad argument; `PlanInfeasible` where nothing fits, with the stage that needs
    most, by state, and single changes that make it fit.
    """
    output = None
    if splits_output(schedule):  # it is on no stage: each rank has a part
        *costs, output = costs
        if not costs:
            raise ValueError("schedule: the model is an output layer alone, with no layer for a stage; pin '1f1b'")
        recomputed = None if recomputed is None else recomputed[:-1]
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
        forwards_first=forwards_first,
        output=output,
    )
    inside = {axis: request.mesh.degree(axis) for axis in INSIDE} if request.mesh is not None else {}
    if any(degree > 1 for degree in inside.values()) and tensor is None:
        raise ValueError(f"mesh: {request.mesh} splits tensors inside segments; use autopart.plan, which places them")
    if output is not None and any(degree > 1 for degree in inside.values()):
        raise ValueError(
            f"schedule: it splits the output layer over the pipeline ranks, and the mesh {request.mesh} splits tensors "
            "inside segments, which do not go together yet; pin another schedule, such as schedule='1f1b'"
        )
    check_schedule(request)
    solved = first_fit(request)
    if solved is None and recompute is None:
        request = request.recomputing()
        solved = first_fit(request)
    if solved is None:
        raise infeasible(request)
    chosen = search(request, solved) if request.searched else Chosen(solved, "", "")
    plan = _plan(request, chosen, tensor)
    return replace(plan, notes=_notes(request, chosen, mesh is not None, recompute), fingerprint=fingerprint)


def _plan(request: Request, chosen: Chosen, tensor: TensorPlan | None) -> Plan:
    """The plan of a solution, whose split is proven."""
    solved = chosen.solved
    solved = replace(solved, split=certify(solved.problem, solved.split))
    candidate = solved.candidate
    stages = [
        Stage(request.names[i:j], stage_ranks(candidate.mesh, column))
        for (i, j), column in zip(solved.runs, candidate.schedule.place, strict=True)
    ]
    if request.output is not None:
        stages[-1] = replace(stages[-1], segments=(*stages[-1].segments, request.output.name))
    return Plan(
        mesh=candidate.mesh,
        stages=tuple(stages),
        placements=candidate.placements,
        schedule=candidate.text,
        microbatches=candidate.microbatches,
        recompute=request.recompute,
        batch=request.batch,
        prediction=predict(request, solved),
        optimality="; ".join(filter(None, (_optimality(solved), chosen.verdict))),
        notes=(),
        fingerprint="",
        mirrors=candidate.schedule.mirrors,
        tensor=tensor,
        barriers=candidate.schedule.barriers,
        slices=candidate.schedule.slices,
        lengths=candidate.schedule.lengths,
    )


def predict(request: Request, solved: Solved) -> Prediction:
    """Time and memory of a solved request; the bytes that each rank sends are known only once the program is made."""
    candidate = solved.candidate
    kinds = ("F", "B", "S", "T")
    both = tuple(sum(each.get(kind, 0.0) for kind in kinds) for each in stage_seconds(request, solved))
    length = flush(request, solved).makespan
    memory = solved.memory()
    assert all(need.total <= solved.problem.limit for need in memory), "the split keeps the limit when counted afresh"
    busy = candidate.microbatches * sum(both) / candidate.schedule.ranks
    return Prediction(
        step_seconds=length + exchanged_seconds(request, solved),
        bubble=max(0.0, 1 - busy / length) if length else 0.0,
        stage_seconds=both,
        memory=memory,
    )


def _optimality(solved: Solved) -> str:
    problem, split = solved.problem, solved.split
    rest = "mesh, placement and microbatches by rule, not searched"
    if problem.stages == 1:
        return f"one stage, so nothing to split; {rest}"
    busiest = format_seconds(split.busiest * 1e-15)
    ways = f"cut {problem.segments} segments into {problem.stages} stages"
    if problem.ranks == problem.stages:
        return (
            f"optimal split (z3): no way to {ways} within the memory limit has a slowest stage faster than {busiest} a"
            f" microbatch; {rest}"
        )
    if split.exact:
        return (
            f"shortest flush found of the ways to {ways} on {problem.ranks} ranks: the busiest rank takes {busiest} a"
            f" microbatch, and within the memory limit none can take more than {1 / PRECISION:.1%} less than"
            f" {format_seconds(split.least * 1e-15)} (z3); {rest}"
        )
    return (
        f"shortest flush found of the ways to {ways} on {problem.ranks} ranks: the busiest rank takes {busiest} a"
        f" microbatch, {split.busiest / fastest(problem) - 1:.1%} more than the mean of the ranks, or than the longest"
        f" segment; {rest}"
    )


def _split_output(name: str, ranks: int) -> str:
    return f"output layer {name}: on none of the stages, each of the {ranks} pipeline ranks has a part of its classes"


def _notes(request: Request, chosen: Chosen, pinned: bool, recompute: bool | Sequence[str] | None) -> tuple[str, ...]:
    """Where each choice comes from."""
    candidate = chosen.solved.candidate
    mesh, limit = candidate.mesh, format_bytes(request.memory)
    stages = mesh.degree("pp")
    if pinned:
        where = f"mesh {mesh}: pinned"
    elif request.stages is not None:
        where = f"mesh {mesh}: {request.stages} stages were pinned, the other devices share the batch"
    elif stages == 1:
        where = f"mesh {mesh}: everything fits {limit} per device on one data axis"
    else:
        where = f"mesh {mesh}: the fewest stages that fit {limit} per device and the batch of {request.batch}"
    again = spans(request.recompute, request.names) or "nothing"
    return (
        where,
        f"placement {candidate.placements[-1][1]}: "
        + ("pinned" if len(request.placements) == 1 else "the first of ddp, zero1, zero2, fsdp that fits"),
        f"microbatches {candidate.microbatches}: "
        + ("pinned" if request.microbatches else "1 without a pipeline, else 4 a stage; more where memory asks for it"),
        *([chosen.note] if chosen.note else []),
        *([_split_output(request.output.name, stages)] if request.output is not None else []),
        f"recompute for memory {again}: "
        + ("pinned" if recompute is not None else "nothing fits without" if request.recompute else "it fits without"),
        f"memory limit {limit} per device, optimizer state {request.optimizer_ratio:g} x the trainable parameters,"
        f" times of the {request.cluster.name} cluster at its peak rates",
    )
