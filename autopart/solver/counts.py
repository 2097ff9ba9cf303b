"""Whether the counts of a request can go together: devices, mesh, stages and segments, batch and microbatches."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from autopart.ir import plan_text
from autopart.solver.families import WHOLE

if TYPE_CHECKING:
    from autopart.solver.request import Request


def check_counts(request: Request) -> None:
    """Refuse counts that cannot go together: segments and stages, devices and stages, batch and microbatches."""
    dp = _least_data(request, _pipelines(request))
    count = request.microbatches or 1
    if request.mesh is not None and request.mesh.shares:
        taken = request.mesh.dealt(request.batch)
        if min(taken) < count:
            raise ValueError(
                f"mesh: {request.mesh} deals {taken} of {request.batch} samples: too few for {count} microbatches"
            )
    if request.batch < dp * count:
        raise ValueError(
            f"microbatches: a batch of {request.batch} over dp={dp} allows at most {request.batch // dp}, not {count}"
            if request.batch >= dp
            else f"batch: {request.batch} samples are too few for dp={dp}; at least {dp} are needed"
        )


def _least_data(request: Request, pipelines: list[int]) -> int:
    """The smallest data degree beside one of some numbers of pipeline ranks, and axes inside segments looked at."""
    if request.mesh is not None:
        return request.mesh.parts * request.mesh.widest
    wide = request.degrees if request.wide and request.schedules[0] in WHOLE else ()
    places = [1, *(prod(size for _, size in inner) for inner in wide)]
    most = max(pp * count for pp in pipelines for count in places if request.devices % (pp * count) == 0)
    return request.devices // most


def _pipelines(request: Request) -> list[int]:
    """The numbers of pipeline ranks that the pins allow; ValueError if there is none."""
    if request.mesh is not None:
        pp = request.mesh.degree("pp")
        _check_stages(request, request.stages_on(pp))
        return [pp]
    found: dict[int, int] = {}
    refused: ValueError | None = None
    for pp in (pp for pp in range(1, request.devices + 1) if request.devices % pp == 0):
        if request.ranks not in (None, pp):
            continue
        try:
            found[pp] = request.stages_on(pp)
        except ValueError as error:  # a family may be for even numbers only, say
            refused = error
    allowed = [pp for pp, stages in found.items() if request.allows(stages)]
    if not found and refused is not None:
        raise refused
    if not found:
        raise ValueError(f"schedule: it is for {request.ranks} pipeline ranks, which {request.devices} devices are not")
    if not allowed:
        raise ValueError(
            f"stages: {request.devices} devices cannot be divided into {request.stages} equal stages"
            if all(pp == stages for pp, stages in found.items())
            else f"stages: {plan_text.schedule(request.schedules[0])} on {request.devices} devices has "
            f"{' or '.join(map(str, found.values()))} stages, not {request.stages}"
        )
    fitting = [pp for pp in allowed if found[pp] <= len(request.costs)]
    if not fitting:
        _check_stages(request, min(found[pp] for pp in allowed))
    return fitting


def _check_stages(request: Request, stages: int) -> None:
    """Refuse a number of stages that contradicts the `stages` pin, or for which there are too few segments."""
    segments, wanted, mesh = len(request.costs), request.stages, request.mesh
    if mesh is not None and wanted is not None and not request.allows(stages):
        ranks = mesh.degree("pp")
        begun = f"{[request.names[i] for i in request.starts]} make " if request.starts else ""
        chunks, over = divmod(wanted, ranks)
        several = "" if over or chunks < 2 else f", or a schedule such as 'interleaved(chunks={chunks})'"
        raise ValueError(
            f"stages: {begun}{wanted} stages contradict the mesh of {mesh} (pp={ranks}), on which the schedule has "
            f"{stages}; pin {stages}, or another mesh{several}"
        )
    if stages > segments:
        chunked = mesh is not None and stages > mesh.degree("pp")
        pinned = "stages" if mesh is None or wanted == stages else "schedule" if chunked else "mesh"
        raise ValueError(
            f"{pinned}: {stages} stages need {stages} segments, but the model has {segments}: "
            f"{', '.join(request.names)}; have fewer pipeline ranks"
            + (f", or fewer stages on each than {plan_text.schedule(request.schedules[0])}" if chunked else "")
        )
