"""Why a request has no plan, and the smallest single changes that give it one, each tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopart.cluster import parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.mesh import Mesh
from autopart.ir.placement import PRESETS, Placement
from autopart.ir.plan_text import format_bytes, schedule, span
from autopart.solver.chunks import least_limit
from autopart.solver.request import LEAN, Request
from autopart.solver.search import Solved, best_split, candidates, first_fit, pose
from autopart.solver.split import bottleneck


def infeasible(request: Request) -> PlanInfeasible:
    """The error for a request without a plan: what the fullest stage of the nearest miss needs, and the ways out."""
    nearest = nearest_miss(request)
    split, mesh, problem = nearest.split, nearest.candidate.mesh, nearest.problem
    cuts = [*split.starts, len(request.costs)]
    needs = nearest.memory()
    stage = max(range(len(needs)), key=lambda k: needs[k].total)
    need, held = needs[stage], nearest.held()[problem.place[stage]]
    flight = max(sum(counts) for counts, at in problem.moments if at == problem.place[stage])
    parts = [
        (need.parameters, "parameters"),
        (need.optimizer, "optimizer"),
        (need.gradients, "gradients"),
        (
            need.activations,
            f"activations of {flight} in-flight microbatch{'es' * (flight > 1)}{' of its stages' * (len(held) > 1)}",
        ),
        (need.transient, "transient buffers"),
    ]
    placement = "; ".join(f"{pattern}: {chosen}" for pattern, chosen in nearest.candidate.placements)
    ways = "; or ".join(remedies(request, nearest)) or "no single change of placement, microbatches, schedule or mesh"
    runs = ", ".join(span(request.names[cuts[k] : cuts[k + 1]]) for k in held)
    who = f"stage {stage}" if len(held) == 1 else f"the rank of stages {' and '.join(map(str, held))}"
    return PlanInfeasible(
        f"no plan fits {format_bytes(request.memory)} per device. Nearest, with mesh {mesh}, placement {placement},"
        f" {nearest.candidate.microbatches} microbatches, {schedule(nearest.candidate.text)},"
        f" {'recomputing' if request.recompute else 'without recomputing'}: {who} ({runs}) needs at least"
        f" {format_bytes(need.total)} = "
        + " + ".join(f"{format_bytes(size)} {what}" for size, what in parts if size)
        + f". It fits with: {ways}."
        + " With several copies of the model, other stages= may fit too." * bool(nearest.candidate.schedule.mirrors)
    )


def nearest_miss(request: Request) -> Solved:
    """Of all candidates the one whose fullest rank needs the least memory, split so that it does."""
    best: Solved | None = None
    for candidate in candidates(request):
        model, problem = pose(request, candidate)
        several = problem.ranks < problem.stages
        peak = (
            least_limit(problem, best.problem.limit if best is not None else None)
            if several
            else int(bottleneck(problem, problem.need))
        )
        if best is None or peak < best.problem.limit:
            relaxed = replace(problem, limit=peak)
            split = best_split(request, candidate, model, relaxed)
            assert split is not None, "the least peak is feasible"
            best = Solved(candidate, model, relaxed, split)
            best = replace(best, problem=replace(relaxed, limit=max(peak, best.peak())))
    assert best is not None, "a resolved request has a candidate"
    return best


def remedies(request: Request, nearest: Solved) -> Iterator[str]:
    """Single changes of the request under which it was solved, each the smallest of its kind."""
    for kind in (
        _placements(request),
        _recompute(request),
        _microbatches(request),
        _schedules(request),
        _mesh(request),
    ):
        for text, changed in kind:
            if first_fit(changed) is not None:
                yield text
                break
    text, enough = _memory(nearest.problem.limit)
    if first_fit(replace(request, memory=enough)) is not None:
        yield text


def _placements(request: Request) -> Iterator[tuple[str, Request]]:
    if len(request.placements) == 1:
        for name in PRESETS[1:]:
            yield f"placement={name!r}", replace(request, placements=((("*", Placement.preset(name)),),))


def _recompute(request: Request) -> Iterator[tuple[str, Request]]:
    everything = request.recomputing()
    if everything.recompute != request.recompute:
        yield "recompute=True", everything


def _microbatches(request: Request) -> Iterator[tuple[str, Request]]:
    if request.microbatches is not None and request.ranks is None:
        count, dp = request.microbatches * 2, request.mesh.degree("dp") if request.mesh else 1
        while count * dp <= request.batch:
            yield f"microbatches={count}", replace(request, microbatches=count)
            count *= 2


def _schedules(request: Request) -> Iterator[tuple[str, Request]]:
    """1f1b, then those that hold less and less: v1f1b, vhalf, vmin."""
    if not request.searched and not request.forwards_first:
        for name in LEAN[:4]:
            if name != request.schedules[0]:
                yield f"schedule={name!r}", replace(request, schedules=(name,), ranks=None)


def _mesh(request: Request) -> Iterator[tuple[str, Request]]:
    if request.mesh is not None and request.stages is None and request.ranks is None:
        for pp in range(1, min(request.devices, len(request.costs)) + 1):
            dp, rest = divmod(request.devices, pp)
            if rest == 0 and request.batch >= dp * (request.microbatches or 1):
                mesh = Mesh.of({"pp": pp, "dp": dp})
                yield f"mesh={dict(mesh.axes)}", replace(request, mesh=mesh)


def _memory(least: int) -> tuple[str, int]:
    """At least `least` bytes as a readable argument: whole tenths of a binary unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if least >= unit:
            tenths = -(-least * 10 // unit)
            text = f"{tenths // 10}.{tenths % 10}{name}"
            return f"memory={text!r}", parse_bytes(text)
    return f"memory={least}", least
