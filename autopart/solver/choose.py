"""From segment costs and pins to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Unpack

from autopart.ir.cost import SegmentCost
from autopart.ir.plan import Plan, Prediction, Stage, pinned_chunks
from autopart.ir.plan_text import in_chunks
from autopart.ir.plan_text import schedule as written
from autopart.ir.tensor_plan import TensorPlan
from autopart.solver.alternatives import alternatives, facts
from autopart.solver.certify import certify, many
from autopart.solver.columns import alike
from autopart.solver.infeasible import infeasible
from autopart.solver.joint import Best, Progress, best, leanest
from autopart.solver.kinds import FEMTOSECONDS
from autopart.solver.lighter import lighter
from autopart.solver.question import Question, deadline, with_degrees
from autopart.solver.reasons import lightened, notes, optimality, quality
from autopart.solver.request import Pins, Request
from autopart.solver.schedule import Chosen, search
from autopart.solver.search import (
    Solved,
    check_schedule,
    columns_of,
    exchanged_seconds,
    first_fit,
    flush,
    stage_seconds,
)
from autopart.solver.space import Space
from autopart.solver.split import solve_split
from autopart.solver.variants import Chunked, Costed, Degrees

OBJECTIVES = {
    "time": "predicted step time",
    "memory": "peak memory, then step time",
    "throughput_per_cost": "device time of a step",
}
"""What a plan can be searched for, and what that is called."""


def choose(
    costs: Sequence[SegmentCost],
    *,
    batch: int,
    recomputed: Sequence[SegmentCost] | None = None,
    optimizer_ratio: float = 2.0,
    forwards_first: bool = False,
    fingerprint: str = "",
    tensor: TensorPlan | None = None,
    others: Sequence[Costed] = (),
    degrees: Degrees = MappingProxyType({}),
    chunked: Chunked = MappingProxyType({}),
    looks_up: bool = False,
    families: bool = False,
    widths: bool = False,
    **pins: Unpack[Pins],
) -> Plan:
    """The plan for a model of these segments and a batch of `batch` samples.

    What is not pinned is searched for jointly: mesh, placement, microbatches, stage split and what is recomputed, for
    the shortest predicted step within the memory limit (`solver.space`, `solver.joint`); the mesh has a tensor axis if
    that is faster, where a `cluster` is given and `degrees` says what there is of them. The schedule is the pinned one,
    else 1f1b; with `families`, where a `cluster` is given and the mesh is free, it is one more choice, among those in
    wide use, and with ``schedule="auto"`` among all that programs run with one copy of the model (`solver.families`),
    and tables that are made for the best plans (`solver.schedule`); with `forwards_first`, among those that steps
    without a loss can follow. With `widths` a free mesh of few equal devices (`request.FEW`) may have pipeline ranks of
    unlike width, under 1f1b and gpipe. The plan's `optimality` names the space and says that the plan is optimal in it,
    or how far from the best it can be at most; `alternatives` has the runner-up of each choice. `objective` may also be
    "memory", the fewest bytes on the fullest device, of such plans the fastest; or "throughput_per_cost", with which
    fewer devices may be used, for the least device time a step. After `time_limit` seconds the best plan so far is
    returned.

    With a schedule of two copies of the model, slices of the sequence or an output layer in parts, mesh, placement and
    microbatches follow a rule instead: the first that fits, trying ddp, zero1, zero2 and fsdp before smaller
    microbatches, and those before more stages (`solver.search`); everything recomputed if nothing fits otherwise. Then
    the stage split has the shortest predicted flush of several with a small load of the busiest rank
    (`solver.chunks`).

    `cluster` defaults to CPU devices, `devices` to the size of a pinned mesh, else of the cluster, `memory` (bytes per
    device) to the cluster's.
    `stages` is a count or names where a stage begins: segments, or modules that begin with one. `schedule` is a name,
    with options such as ``"interleaved(chunks=3)"``, a Schedule, or a CSV of actions; the last two say for how many
    pipeline ranks and microbatches they are. Memory is counted a
    segment at a time: a placement pattern holds for a segment if it matches its name or a module around it.
    `recompute` pins that: True, False, or modules whose segments are recomputed; `recomputed` has what every segment
    costs when it is (by default as much as it does anyway). With `offload` the optimizer, or optimizer and gradients,
    may be on the hosts, where that is fastest of what fits; programs do not do that yet. `chunks`, modules whose tokens
    are computed chunk after chunk, are noted in the plan; the costs are with them.
    `optimizer_ratio` is bytes of optimizer state per byte of trainable parameter, of which `precision` is only noted in
    the plan. With a `mesh` that splits tensors inside segments the costs are those of one place, `tensor` is what was
    decided there, and `others` is what else comes into question: what is decided then, and what segments cost, plain
    and recomputed. `degrees` has such, by tensor degree, for a mesh that is free; with a pinned one, and without a
    `cluster`, it is asked only for ways out where nothing fits, as `chunked` is, for modules in chunks. With `looks_up`
    the first of the costs are of a lookup in the input embedding, which is split over the pipeline ranks as the output
    layer is, the last of them. `progress` is told how many tensor degrees are done, of how many, and then how many
    settings.

    Raises ValueError or TypeError naming a bad argument; `PlanInfeasible` where nothing fits, with the stage that needs
    most, by state, the pins that contradict each other, and single changes that make it fit.
    """
    objective, progress = pins.get("objective", "time"), pins.get("progress", lambda done, count: None)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: {objective!r} is not known; one of {', '.join(OBJECTIVES)}")
    began = time.monotonic()
    until = deadline(began, pins.get("time_limit"))
    question = Question.of(
        costs,
        pins,
        batch=batch,
        recomputed=recomputed,
        optimizer_ratio=optimizer_ratio,
        forwards_first=forwards_first,
        tensor=tensor,
        others=others,
        degrees=degrees,
        chunked=chunked,
        looks_up=looks_up,
        families=families,
        widths=widths,
    )
    request = question.request()
    space = Space(request)
    if space.joint:
        space = Space(with_degrees(request, until, progress))
    check_wide(request, space)
    if space.joint and space.settings:
        plan = _jointly(space, objective, until, progress)
    else:
        check_schedule(space.request)
        if objective != "time":
            raise ValueError(
                f"objective: {objective!r} is searched for under schedules of one copy of the model and whole "
                f"sequences; pin such a one, as 1f1b, not {written(request.schedules[0])}"
            )
        plan = _by_rule(request)
    if plan is None:
        nearest = space.request if space.joint or not request.free else request.recomputing()
        raise infeasible(nearest, question.given, partial(question.keeping, devices=request.devices))
    pinned = pinned_chunks(pins.get("chunks"))
    told = (f"in chunks {in_chunks(pinned)}: pinned",) if pinned else ()
    plan = replace(plan, chunks=pinned, notes=(*plan.notes, *told))
    return replace(plan, precision=pins.get("precision"), fingerprint=fingerprint, took=time.monotonic() - began)


def check_wide(request: Request, space: Space) -> None:
    """Refuse pipeline ranks of unlike width under a schedule that they cannot have. Raises ValueError."""
    if request.mesh is not None and request.mesh.widths and not (space.joint and space.settings):
        raise ValueError(
            f"schedule: {written(request.schedules[0])} is not for a mesh of {request.mesh}, whose pipeline ranks of "
            "unlike width have one stage each of one copy of the model, in order; pin such a schedule, as 1f1b, or pp "
            "and dp as numbers"
        )


def _jointly(space: Space, objective: str, until: float, progress: Progress) -> Plan | None:
    """The best plan of a space, None if none fits."""
    if objective == "memory":  # the fullest device is what counts, whichever that is
        space = Space(replace(space.request, cluster=alike(space.request.cluster)))
        if space.request.searched:
            space = Space(replace(space.request, schedules=space.request.lean, tables=False))
    request, what = space.request, OBJECTIVES[objective]
    if objective == "throughput_per_cost" and request.mesh is None:
        space, found = _cheapest(space, until, progress)
    else:
        limit = min(request.memory, leanest(space, space.settings)[1]) if objective == "memory" else None
        found = best(space, space.settings, limit=limit, deadline=until, progress=progress)
    if found is None:
        return None
    afresh, solved = space.solved(found.setting, found.cut)
    text = quality(space, found, certified=_certified(solved), what=what)
    chosen = Chosen(solved)
    plan = _plan(afresh, solved, text, notes(afresh, chosen, what))
    _check(plan, space, found)
    if request.tables and objective == "time" and not solved.candidate.mesh.widths:
        afresh, chosen = search(space, found)
        text = f"{text}; {chosen.verdict}"
        plan = _plan(afresh, chosen.solved, text, notes(afresh, chosen, what))
    light = lighter(afresh, chosen.solved) if request.per_layer and objective == "time" else None
    if light is not None:
        made = _plan(afresh, light, text, notes(afresh, replace(chosen, solved=light), what))
        plan = replace(made, notes=(*made.notes, lightened(plan, made)))
    others = alternatives(space, found) if time.monotonic() < until else ()
    return replace(plan, alternatives=others, facts=facts(space, found.setting))


def _cheapest(space: Space, until: float, progress: Progress) -> tuple[Space, Best | None]:
    """The space of as many devices, or of fewer, whose best plan takes the least time of all of them together."""
    spaces = [
        Space(replace(space.request, devices=count))
        for count in range(1, space.request.devices + 1)
        if space.request.devices % count == 0
    ]
    plans = ((each, best(each, each.settings, deadline=until, progress=progress)) for each in spaces)
    found = [(each, plan) for each, plan in plans if plan is not None]
    # of equals the one with fewest devices, which is the first
    return min(found, key=lambda pair: pair[0].request.devices * pair[1].cut.step, default=(space, None))


def _check(plan: Plan, space: Space, found: Best) -> None:
    """The search and the code that predicts plans must agree: raises AssertionError, an internal error."""
    step, counted = found.cut.step / FEMTOSECONDS, plan.prediction.step_seconds
    if abs(step - counted) > 1e-9 * step + 1e-12:
        raise AssertionError(f"internal error: a step of {step} s was searched for, but {counted} s are predicted")
    peak, held = space.peak(found.setting, found.cut), plan.prediction.peak
    if held > peak:
        raise AssertionError(f"internal error: {peak} bytes were searched for, but {held} are predicted")


def _certified(solved: Solved) -> bool:
    """Whether z3 proves that the slowest stage is as fast as can be: asked of small problems, where it is."""
    problem = solved.problem
    if problem.stages == 1 or problem.stages > problem.ranks or many(problem):
        return False
    if solved.candidate.groups or solved.candidate.mesh.widths:
        return False
    fastest = solve_split(problem)
    if fastest is None or fastest.slowest != solved.split.slowest:
        return False
    certify(problem, solved.split)
    return True


def _by_rule(request: Request) -> Plan | None:
    """The plan by the rule, where there are two copies of the model, or it is cut besides; None if nothing fits."""
    solved = first_fit(request)
    if solved is None and request.free:
        request = request.recomputing()
        solved = first_fit(request)
    if solved is None:
        return None
    solved = replace(solved, split=certify(solved.problem, solved.split))
    return _plan(request, solved, optimality(solved), notes(request, Chosen(solved)))


def _plan(request: Request, solved: Solved, optimality: str, notes: tuple[str, ...]) -> Plan:
    """The plan of a solution."""
    candidate = solved.candidate
    stages = [
        Stage(request.names[i:j], candidate.mesh.column(column))
        for (i, j), column in zip(solved.runs, candidate.schedule.place, strict=True)
    ]
    if request.output is not None:
        stages[-1] = replace(stages[-1], segments=(*stages[-1].segments, request.output.name))
    if request.lookup is not None:
        stages[0] = replace(stages[0], segments=(request.lookup.name, *stages[0].segments))
    return Plan(
        mesh=candidate.mesh,
        stages=tuple(stages),
        placements=candidate.placements,
        schedule=candidate.text,
        microbatches=candidate.microbatches,
        recompute=request.recompute,
        batch=request.batch,
        prediction=predict(request, solved),
        optimality=optimality,
        notes=notes,
        fingerprint="",
        mirrors=candidate.schedule.mirrors,
        tensor=request.at(candidate.variant).tensor,
        barriers=candidate.schedule.barriers,
        lookup=request.lookup is not None,
        slices=candidate.schedule.slices,
        lengths=candidate.schedule.lengths,
        devices=columns_of(request, candidate).devices if candidate.groups else (),
    )


def predict(request: Request, solved: Solved) -> Prediction:
    """Time and memory of a solved request; the bytes that each rank sends are known only once the program is made."""
    candidate = solved.candidate
    kinds = ("F", "B", "S", "T", "E", "D")
    both = tuple(sum(each.get(kind, 0.0) for kind in kinds) for each in stage_seconds(request, solved))
    length = flush(request, solved).makespan
    memory = solved.memory()
    most = [solved.problem.room(rank) for rank in solved.problem.place]
    assert all(need.total <= limit for need, limit in zip(memory, most, strict=True)), "counted afresh, it keeps limits"
    busy = candidate.microbatches * sum(both) / candidate.schedule.ranks
    return Prediction(
        step_seconds=length + exchanged_seconds(request, solved),
        bubble=max(0.0, 1 - busy / length) if length else 0.0,
        stage_seconds=both,
        memory=memory,
    )
