"""What a plan says of itself: how good it is, and where each of its choices comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.ir.cost import SegmentCost
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.ir.plan_text import format_bytes, format_seconds, schedule, spans
from autopart.solver.chunks import PRECISION, fastest
from autopart.solver.columns import orders
from autopart.solver.joint import Best
from autopart.solver.kinds import FEMTOSECONDS
from autopart.solver.request import Request, inside
from autopart.solver.schedule import Chosen
from autopart.solver.search import Solved, columns_of
from autopart.solver.setting import Setting
from autopart.solver.space import LONGEST, Space


def quality(space: Space, found: Best, *, certified: bool, what: str) -> str:
    """How good the best plan of a space is, the space being named."""
    searched = _space(space)
    if found.gap:
        late = "" if found.complete else ", as the time was up"
        narrow = found.over(found.narrow)
        late += f" ({narrow:.1%} where each rank holds one stage)" * (narrow < found.gap)
        text = f"at most {found.gap:.1%} above the best possible{late}: the {what} found of {searched}"
    else:
        text = f"optimal: no plan has a better {what}, of {searched}"
    same = "with the same recomputation " * bool(found.cut.recomputed)
    return text + f"; {same}no split has a faster slowest stage (z3)" * certified


def _space(space: Space) -> str:
    """The space in words."""
    settings, request = space.settings, space.request
    meshes = {setting.mesh for setting in settings}
    counts = {setting.microbatches for setting in settings}
    ranks = len({setting.placements for setting in settings})
    dealt = len({setting.groups for setting in settings if setting.groups})
    again = any(keep is not None for each in request.variants for keep in each.again) and request.free
    pipes = {mesh.degree("pp") for mesh in meshes} - {1}
    anywhere = all(len(space.allowed(pp)) == len(request.costs) - 1 for pp in pipes)
    begin = "" if anywhere else " (no stage begins with a segment without parameters, where others are enough)"
    parts = [
        f"{len(meshes)} meshes of {request.devices} devices" if len(meshes) > 1 else f"the mesh {next(iter(meshes))}",
        *_degrees(request, settings),
        *([f"{dealt} orders of devices"] if dealt > 1 else []),
        f"{ranks} placements" if ranks > 1 else "one placement",
        f"{len(counts)} numbers of microbatches" if len(counts) > 1 else f"{max(counts)} microbatches",
        *([f"all splits of {len(request.costs)} segments under {_schedules(space)}{begin}"] if pipes else []),
        *([_again(space)] if again else []),
    ]
    return ", ".join(parts)


def _schedules(space: Space) -> str:
    """The schedules of a space, and what was left out of it."""
    request = space.request
    if not request.searched:
        return schedule(request.schedules[0]).removeprefix("by ")
    known = dict.fromkeys(each.text for each in space.settings if each.mesh.degree("pp") > 1)
    names = ", ".join(text for text in request.schedules if text in known)
    return f"{len(known)} schedules of up to {LONGEST} actions ({names})" if len(known) > 1 else names


def _again(space: Space) -> str:
    several = {space.form(each).several for each in space.settings}
    if several == {True}:
        return "all segments of a rank recomputed or none"
    rest = ", where ranks hold several stages all of a rank's or none" * (len(several) > 1)
    return f"any recomputation of whole segments{rest}"


def _degrees(request: Request, settings: Sequence[Setting]) -> Iterator[str]:
    """The tensor degrees among the meshes, on which axes, with how many placements inside segments; those left out."""
    known = sorted({inside(setting.mesh) for setting in settings})
    axes = {axis for setting in settings for axis in setting.mesh.inside} - {"tp", "dp"}
    late = [each for each in request.degrees if request.wide and all(v.inner != each for v in request.variants)]
    ways = len({setting.variant for setting in settings if inside(setting.mesh) > 1})
    if known != [1] or late:
        left_out = [str(Mesh(inner)) for inner in late]
        yield (
            f"tensor degree{'s' * (len(known) > 1)} {_and(list(map(str, known)))}"
            + (f", on {_and(sorted(axes))} too" if axes else "")
            + (f" (not {_and(left_out)}, as the time was up)" if late else "")
            + f" with {ways} placement{'s' * (ways > 1)} inside segments" * (ways > 0)
        )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def optimality(solved: Solved) -> str:
    """How good the split of a plan is whose global choices were made by rule."""
    problem, split = solved.problem, solved.split
    rest = "mesh, placement and microbatches by rule, not searched"
    if problem.stages == 1:
        return f"one stage, so nothing to split; {rest}"
    busiest = format_seconds(split.busiest / FEMTOSECONDS)
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
            f" {format_seconds(split.least / FEMTOSECONDS)} (z3); {rest}"
        )
    return (
        f"shortest flush found of the ways to {ways} on {problem.ranks} ranks: the busiest rank takes {busiest} a"
        f" microbatch, {split.busiest / fastest(problem) - 1:.1%} more than the mean of the ranks, or than the longest"
        f" segment; {rest}"
    )


def notes(request: Request, chosen: Chosen, objective: str | None = None) -> tuple[str, ...]:
    """Where each choice comes from; `objective` says what was searched for jointly, None that a rule chose."""
    solved, candidate = chosen.solved, chosen.solved.candidate
    mesh, limit = candidate.mesh, request.room
    searched = "" if objective is None else f"of all that fit {limit} per device, searched jointly for the {objective}"
    if request.mesh is not None:
        where = f"mesh {mesh}: pinned"
    elif request.stages is not None:
        where = f"mesh {mesh}: {request.stages} stages were pinned, the other devices share the batch"
    elif searched:
        where = f"mesh {mesh}: {searched}"
    elif mesh.degree("pp") == 1:
        where = f"mesh {mesh}: everything fits {limit} per device on one data axis"
    else:
        where = f"mesh {mesh}: the fewest stages that fit {limit} per device and the batch of {request.batch}"
    again = spans(request.recompute, request.names) or "nothing"
    placement = searched or "the first of ddp, zero1, zero2, fsdp that fits"
    microbatches = searched or "1 without a pipeline, else 4 a stage; more where memory asks for it"
    return (
        where,
        f"placement {candidate.placements[-1][1]}: {'pinned' if len(request.placements) == 1 else placement}",
        f"microbatches {candidate.microbatches}: {'pinned' if request.microbatches else microbatches}",
        *_devices(request, solved),
        *([chosen.note] if chosen.note else _schedule(request, chosen, searched)),
        *([_split_output(request.output.name, mesh.degree("pp"))] if request.output is not None else []),
        *([_split_input(request.lookup, mesh.degree("pp"))] if request.lookup is not None else []),
        f"recompute for memory {again}: " + (_why(bool(request.recompute), objective) if request.free else "pinned"),
        *_on_host(solved),
        f"memory limit {limit} per device, optimizer state {request.optimizer_ratio:g} x the trainable parameters,"
        f" times of the {request.cluster.name} cluster at its rates",
    )


def lightened(plan: Plan, made: Plan) -> str:
    """Why some segments have another placement than the rest, as they have in the plan `made` of a plan."""
    count = len(made.placements) - len(plan.placements)
    saved = 1 - made.prediction.step_seconds / plan.prediction.step_seconds
    return (
        f"placement of {count} layer{'s' * (count > 1)}: lighter than the others', as their ranks have memory for it: "
        f"the step is {saved:.1%} shorter than with {plan.placements[-1][1]} for all that is not pinned"
    )


def _devices(request: Request, solved: Solved) -> Iterator[str]:
    """On which devices the stages are, where these are unlike."""
    if solved.candidate.groups:
        columns = columns_of(request, solved.candidate)
        names = (" and ".join(dict.fromkeys(g.device.name for g in each.groups)) for each in columns.clusters)
        where = ", ".join(f"stage {stage} on {name}" for stage, name in enumerate(names))
        several = len(orders(request.cluster, request.devices)) > 1
        yield f"devices: {where}" + ": the order of the groups was searched jointly" * several


def _on_host(solved: Solved) -> Iterator[str]:
    """What the hosts have to do with it."""
    most = max(need.host for need in solved.memory())
    if most:
        yield f"each device has up to {format_bytes(most)} on its host, where the optimizer steps: that is not counted"


def _schedule(request: Request, chosen: Chosen, searched: str) -> Iterator[str]:
    """Where the schedule comes from, if it was searched for and there is a pipeline."""
    if request.searched and chosen.solved.problem.ranks > 1:
        yield f"schedule {schedule(chosen.solved.candidate.text)}: {searched}"


def _split_output(name: str, ranks: int) -> str:
    return f"output layer {name}: on none of the stages, each of the {ranks} pipeline ranks has a part of its classes"


def _split_input(lookup: SegmentCost, ranks: int) -> str:
    has = "of it the rows that it has of the output layer" if lookup.tied else "a part of its columns"
    return f"input embedding {lookup.name}: on none of the stages, each of the {ranks} pipeline ranks has {has}"


def _why(recomputed: bool, objective: str | None) -> str:
    if not recomputed:
        return "it fits without"
    return "nothing fits without" if objective is None else "what each stage needs to fit, at the least time"
