"""Why a request has no plan, and the smallest single changes that give it one, each tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.cluster import parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.placement import PRESETS, Placement
from autopart.ir.plan_text import format_bytes, rules, schedule, span, spans
from autopart.solver.chunks import least_limit
from autopart.solver.families import LEAN
from autopart.solver.joint import best, leanest
from autopart.solver.pins import Asked, contradiction
from autopart.solver.request import Request
from autopart.solver.search import Solved, best_split, candidates, first_fit, meshes, pose
from autopart.solver.space import Space, roomy
from autopart.solver.split import bottleneck

MOST = 64
"""How many times as many devices are tried at most."""

FEW = 16
"""Up to how many devices a few more are tried, and not only twice as many."""

NAMED = 8
"""How many layers are named at most, rather than all of them."""


def infeasible(request: Request, given: Mapping[str, object], asked: Asked) -> PlanInfeasible:
    """The error for a request without a plan: what the fullest stage of the nearest miss needs, and the ways out.

    Which of the pins that are `given` contradict each other is found with `asked`: see `solver.pins`.
    """
    request = replace(request, schedules=request.lean)
    afresh, nearest = nearest_miss(request)
    split, mesh, problem = nearest.split, nearest.candidate.mesh, nearest.problem
    cuts = [*split.starts, len(request.costs)]
    needs = nearest.memory()
    stage = max(range(len(needs)), key=lambda k: needs[k].total - problem.room(problem.place[k]))
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
    core, lifted = contradiction(request, given, asked), tuple(remedies(request, nearest))
    ways = "; or ".join(lifted) or "no single change of placement, microbatches, schedule or mesh"
    runs = ", ".join(span(request.names[cuts[k] : cuts[k + 1]]) for k in held)
    who = f"stage {stage}" if len(held) == 1 else f"the rank of stages {' and '.join(map(str, held))}"
    again = "everything" if request.recompute == afresh.recompute else spans(afresh.recompute, request.names)
    return PlanInfeasible(
        f"no plan fits {request.room} per device. Nearest, with mesh {mesh},"
        f" placement {rules(nearest.candidate.placements)},"
        f" {nearest.candidate.microbatches} microbatches, {schedule(nearest.candidate.text)},"
        f" {f'recomputing {again}' if afresh.recompute else 'without recomputing'}: {who} ({runs}) needs at least"
        f" {format_bytes(need.total)} = "
        + " + ".join(f"{format_bytes(size)} {what}" for size, what in parts if size)
        + f".{_together(request, core, tuple(given))} It fits with: {ways}."
        + " With several copies of the model, other stages= may fit too." * bool(nearest.candidate.schedule.mirrors),
        core,
        lifted,
    )


def _together(request: Request, core: tuple[str, ...], given: tuple[str, ...]) -> str:
    """Which pins contradict each other within the memory limit, the last of the core."""
    *pins, _ = core
    if not given:
        return ""
    if not pins:
        return f" Nothing fits on {request.devices} devices without {_and(given, 'or')} either."
    if len(pins) == 1:
        return f" {pins[0]} rules out what would fit."
    each = "are each fine alone" if len(pins) == 2 else "are fine without any one of them"
    return f" {_and(pins)} {each}, but not together."


def _and(words: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def fits(request: Request) -> bool:
    """Whether the request has a plan."""
    space = Space(request)
    if not space.joint:
        return first_fit(request) is not None
    return any(space.fits(setting, request.memory) for setting in space.lean(space.settings))


def nearest_miss(request: Request) -> tuple[Request, Solved]:
    """Of all plans the one whose fullest rank needs least, with the limit that it needs and what it recomputes."""
    space = Space(request)
    if not space.joint:
        everything = request.recomputing() if request.free else request
        return everything, _nearest_candidate(everything)
    setting, limit = leanest(space, space.settings)
    found = best(space, [setting], limit=limit)
    assert found is not None, "the least need is enough"
    return space.solved(setting, found.cut, limit=limit)


def _nearest_candidate(request: Request) -> Solved:
    nearest: Solved | None = None
    for candidate in candidates(request):
        models, problem = pose(request, candidate)
        several = problem.ranks < problem.stages
        peak = (
            least_limit(problem, nearest.problem.limit if nearest is not None else None)
            if several
            else int(bottleneck(problem, problem.need))
        )
        if nearest is None or peak < nearest.problem.limit:
            relaxed = replace(problem, limit=peak)
            split = best_split(request, candidate, models, relaxed)
            assert split is not None, "the least peak is feasible"
            nearest = Solved(candidate, models, relaxed, split)
            nearest = replace(nearest, problem=replace(relaxed, limit=max(peak, nearest.peak())))
    assert nearest is not None, "a resolved request has a candidate"
    return nearest


def remedies(request: Request, nearest: Solved) -> Iterator[str]:
    """Single changes under which there is a plan, each the smallest of its kind."""
    for kind in (
        _placements(request),
        _recompute(request),
        _offload(request),
        _chunks(request),
        _microbatches(request),
        _schedules(request),
        _stages(request),
        _mesh(request),
        _tensors(request),
        _devices(request),
    ):
        for text, changed in kind:
            if fits(changed):
                yield text
                break
    text, enough = _memory(nearest.problem.limit)
    if fits(replace(request, memory=enough, pinned=True)):
        yield text


Changes = Iterator[tuple[str, Request]]
"""The change as an argument, and the request with it."""


def _placements(request: Request) -> Changes:
    if len(request.placements) == 1:
        for name in PRESETS[1:]:
            yield f"placement={name!r}", replace(request, placements=((("*", Placement.preset(name)),),))


def _recompute(request: Request) -> Changes:
    """The segments whose recomputation takes least, if stages may choose them; else all."""
    if request.free:
        return
    free, everything = replace(request, free=True), request.recomputing()
    space = Space(free)
    found = best(space, space.settings) if space.joint else None
    if found is not None:
        some, _ = space.solved(found.setting, found.cut)
        if len(some.recompute) <= NAMED and some.recompute != everything.recompute:
            yield f"recompute={list(some.recompute)}", some
    if everything.recompute != request.recompute:
        yield "recompute=True", everything


def _offload(request: Request) -> Changes:
    """The optimizer on the host, or gradients too, also where the search may not use it."""
    if request.cluster.host and request.offloading() != request:
        yield "offload=True (to plan with; programs do not do it yet)", request.offloading()


def _chunks(request: Request) -> Changes:
    """The output layer in chunks, in as few as will do."""
    for text, find in request.chunked:
        if variants := find():
            yield text, replace(request, variants=variants, number=0)


def _microbatches(request: Request) -> Changes:
    if request.microbatches is not None and request.ranks is None:
        count, dp = request.microbatches * 2, request.mesh.parts * request.mesh.widest if request.mesh else 1
        while count * dp <= request.batch:
            yield f"microbatches={count}", replace(request, microbatches=count)
            count *= 2


def _schedules(request: Request) -> Changes:
    """1f1b, then those that hold less and less: v1f1b, vhalf, vmin."""
    if not request.tables and not request.forwards_first and next(roomy(request), None) is not None:
        for name in LEAN[:4]:
            if name not in request.schedules:
                yield f"schedule={name!r}", replace(request, schedules=(name,), ranks=None)


def _stages(request: Request) -> Changes:
    """Other numbers of stages, or the same number that may begin anywhere."""
    if request.mesh is None and request.stages is not None and request.ranks is None:
        for count in range(1, min(request.devices, len(request.costs)) + 1):
            if request.devices % count == 0 and request.batch >= request.devices // count * (request.microbatches or 1):
                yield f"stages={count}", replace(request, stages=count, starts=())


def _mesh(request: Request) -> Changes:
    """Another mesh of what there are costs for."""
    if request.mesh is not None and request.stages is None and request.ranks is None:
        yield from _meshes(request)


def _tensors(request: Request) -> Changes:
    """A mesh with axes inside segments that are not looked at, if tensors may be split there at all."""
    if request.stages is None and request.ranks is None and Space(request).joint:
        for inner, find in request.degrees.items():
            if all(variant.inner != inner for variant in request.variants) and (variants := find()):
                yield from _meshes(replace(request, variants=variants, number=0))


def _meshes(request: Request) -> Changes:
    for mesh in meshes(replace(request, mesh=None)):
        yield f"mesh={mesh.sizes}", replace(request, mesh=mesh)


def _devices(request: Request) -> Changes:
    """Of a few devices each larger number up to twice as many; then twice as many, and so on."""
    if request.mesh is None and request.ranks is None and request.stages is None:
        now = request.devices
        between = range(now + 1, 2 * now) if now <= FEW else ()
        for count in (*between, *(now << times for times in range(1, MOST.bit_length()))):
            changed = replace(request, devices=count)
            if next(iter(Space(changed).settings), None) is not None:
                there = count <= request.cluster.devices
                yield f"devices={count}" if there else f"{count} such devices", changed


def _memory(least: int) -> tuple[str, int]:
    """At least `least` bytes as a readable argument: whole tenths of a binary unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if least >= unit:
            tenths = -(-least * 10 // unit)
            text = f"{tenths // 10}.{tenths % 10}{name}"
            return f"memory={text!r}", parse_bytes(text)
    return f"memory={least}", least
