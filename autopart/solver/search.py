"""The search over the global choices, in a stated order: the first candidate with a split within the memory limit wins.

    meshes        a pinned one; else pp = 1, 2, ... over the divisors of the device count, dp the rest
    microbatches  a pinned count; else 1 without a pipeline and min(samples of a data rank, 4 pp) with one, then
                  doubled (smaller microbatches save fewer activations) up to one sample each
    placements    a pinned one; else ddp, zero1, zero2, fsdp: rising traffic and latency, falling memory

The innermost choice varies first: sharding a state is tried before cutting the batch finer, that before adding a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopart.ir.mesh import Mesh
from autopart.ir.plan import first_match
from autopart.solver.memory import MemoryModel, in_flight
from autopart.solver.request import Request, Rules
from autopart.solver.split import Split, SplitProblem, solve_split
from autopart.solver.timing import segment_seconds

# Whole femtoseconds make sums of times exact, so that equal stages compare equal.
_FEMTOSECONDS = 10**15


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting of the global choices."""

    mesh: Mesh
    microbatches: int
    placements: Rules


@dataclass(frozen=True, slots=True)
class Solved:
    """A candidate with the best split of its problem."""

    candidate: Candidate
    model: MemoryModel
    problem: SplitProblem
    split: Split


def candidates(request: Request) -> Iterator[Candidate]:
    """Every setting that the pins allow, in the order of preference."""
    for mesh in _meshes(request):
        for count in _microbatches(request, mesh):
            alternatives = request.placements if mesh.degree("dp") > 1 else request.placements[:1]
            for placements in alternatives:
                yield Candidate(mesh, count, placements)


def pose(request: Request, candidate: Candidate) -> tuple[MemoryModel, SplitProblem]:
    """The split problem of a candidate, its numbers those of the largest microbatch."""
    dp, pp = candidate.mesh.degree("dp"), candidate.mesh.degree("pp")
    microbatch = -(-request.batch // (dp * candidate.microbatches))
    numbers = tuple(cost.at(microbatch) for cost in request.costs)
    modes = tuple(first_match(candidate.placements, name).on("dp") for name in request.names)
    model = MemoryModel(numbers, modes, dp, request.optimizer_ratio)
    problem = SplitProblem(
        times=tuple(round(sum(segment_seconds(n, request.cluster)) * _FEMTOSECONDS) for n in numbers),
        boundaries=tuple(n.boundary_bytes for n in numbers),
        resident=model.resident(),
        saved=tuple(n.saved_bytes for n in numbers),
        flight=in_flight(request.schedule, pp, candidate.microbatches),
        limit=request.memory,
        starts=request.starts,
    )
    return model, problem


def first_fit(request: Request) -> Solved | None:
    """The first candidate with a split within the memory limit, None if there is none."""
    for candidate in candidates(request):
        model, problem = pose(request, candidate)
        split = solve_split(problem)
        if split is not None:
            return Solved(candidate, model, problem, split)
    return None


def _meshes(request: Request) -> Iterator[Mesh]:
    if request.mesh is not None:
        yield request.mesh
        return
    for pp in range(1, min(request.devices, len(request.costs)) + 1):
        dp, rest = divmod(request.devices, pp)
        enough = request.batch >= dp * (request.microbatches or 1)
        if rest == 0 and enough and request.stages in (None, pp):
            yield Mesh.of({"pp": pp, "dp": dp})


def _microbatches(request: Request, mesh: Mesh) -> Iterator[int]:
    if request.microbatches is not None:
        yield request.microbatches
        return
    largest, pp = request.batch // mesh.degree("dp"), mesh.degree("pp")
    count = min(largest, 4 * pp) if pp > 1 else 1
    while count < largest:
        yield count
        count *= 2
    yield largest
