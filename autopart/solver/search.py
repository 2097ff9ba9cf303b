"""The search over the global choices, in a stated order: the first candidate with a split within the memory limit wins.

    meshes        a pinned one; else pp = 1, 2, ... over the divisors of the device count, dp the rest (where asked
                  for, then those whose pipeline ranks differ in width)
    microbatches  a pinned count; else 1 without a pipeline and min(samples of a data rank, 4 pp) with one, then
                  doubled (smaller microbatches save fewer activations) up to one sample each; where the schedule cannot
                  be for so many, the next smaller number that it can be for
    schedules     a pinned one, or 1f1b; where it is searched for, those that hold little say whether something fits,
                  and with the other choices made so, `solver.schedule` looks for the fastest
    placements    a pinned one; else ddp, zero1, zero2, fsdp: rising traffic and latency, falling memory

The innermost choice varies first: sharding a state is tried before cutting the batch finer, that before adding a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, pairwise, product
from math import prod

from autopart.cluster import Cluster
from autopart.ir.action import Kind, Schedule, stages_of
from autopart.ir.cost import SegmentCost, SegmentNumbers
from autopart.ir.mesh import Inner, Mesh
from autopart.ir.placement import Modes
from autopart.ir.plan import StageMemory, first_match
from autopart.schedules import Timeline
from autopart.solver.axis import linked
from autopart.solver.chunks import solve_chunks
from autopart.solver.columns import Columns, Order
from autopart.solver.kinds import FEMTOSECONDS, Kinds, handed, numbered
from autopart.solver.memory import MemoryModel, in_flight
from autopart.solver.presets import Rules
from autopart.solver.request import FEW, Request
from autopart.solver.split import Moment, Split, SplitProblem, solve_split
from autopart.solver.timing import action_seconds, exchange_seconds, output_seconds, segment_seconds, timeline


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting of the global choices, and the schedule that it makes from its text."""

    mesh: Mesh
    microbatches: int
    placements: Rules
    text: str
    schedule: Schedule
    moments: tuple[Moment, ...]  # of the schedule
    variant: int  # of what segments cost, by number
    groups: Order = ()  # of devices, as they are dealt to the stages; empty where all count alike


@dataclass(frozen=True, slots=True)
class Solved:
    """A candidate with the best split of its problem.

    A problem knows the stages of the first copy of the model. Where a schedule has more, a split is the best of those
    whose first copy fits the limit, and its ranks, with all that they hold, are counted afterwards.
    """

    candidate: Candidate
    models: tuple[MemoryModel, ...]  # of each pipeline rank
    problem: SplitProblem
    split: Split

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The segments of each stage: the first one, and the one after the last."""
        return list(pairwise([*self.split.starts, self.problem.segments]))

    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, in whichever copies of the model."""
        schedule = self.candidate.schedule
        held = ({s for place in schedule.places for s in stages_of(place, rank)} for rank in range(schedule.ranks))
        return tuple(tuple(sorted(stages)) for stages in held)

    def memory(self) -> tuple[StageMemory, ...]:
        """What the rank of each stage holds at most, stage by stage."""
        problem, held, runs = self.problem, self.held(), self.runs
        found = {}
        for rank in set(problem.place):
            moments = [[counts[stage] for stage in held[rank]] for counts, at in problem.moments if at == rank]
            found[rank] = self.models[rank].rank([runs[stage] for stage in held[rank]], moments)
        return tuple(found[rank] for rank in problem.place)

    def peak(self) -> int:
        """The most that a rank holds."""
        return max(need.total for need in self.memory())


def candidates(request: Request, on: Iterable[Mesh] | None = None) -> Iterator[Candidate]:
    """Every setting that the pins allow, in the order of preference; of some of the meshes `on` these only."""
    for mesh in meshes(request) if on is None else on:
        alternatives = request.placements_on(mesh.data)
        for made in _schedules(request, mesh):
            moments = [in_flight(schedule) for _, schedule in made]
            for placements, ((text, schedule), held) in product(alternatives, zip(made, moments, strict=True)):
                for variant in request.variants_on(mesh, schedule.microbatches):
                    yield Candidate(mesh, schedule.microbatches, placements, text, schedule, held, variant)


def check_schedule(request: Request) -> None:
    """Raise ValueError where the schedule can be for no number of microbatches that the batch can be cut into."""
    if next(candidates(request), None) is None:
        mesh = next(meshes(request))
        most = max(_microbatches(request, mesh))
        try:
            request.scheduled(request.schedules[0], mesh.degree("pp"), most)
        except ValueError as error:
            allowed = f"not with {most} microbatches, the most that the batch allows, nor with fewer"
            raise ValueError(f"schedule: {allowed}: {error}") from None


def numbers_of(costs: Sequence[SegmentCost], batch: int) -> tuple[SegmentNumbers, ...]:
    """The numbers of segments for microbatches of `batch` samples, once of those that cost the same."""
    kinds = Kinds(numbered(costs))
    numbers = [costs[first].at(batch) for first in kinds.firsts]
    return tuple(numbers[kind] for kind in kinds.of)


def pose(request: Request, candidate: Candidate) -> tuple[tuple[MemoryModel, ...], SplitProblem]:
    """What each pipeline rank holds, and the split problem of a candidate, its numbers those of the largest microbatch.

    Where pipeline ranks differ in width, those of the widest, on which segments take and hold least.
    """
    mesh = candidate.mesh
    models = _models(request, candidate)
    widest = mesh.widths.index(max(mesh.widths)) if mesh.widths else 0
    model, dp = models[widest], mesh.width(widest)
    numbers = model.segments
    every = sum(
        MemoryModel((part,), (mode,), dp, request.optimizer_ratio).rank([(0, 1)], [(2,)]).total
        for part, mode in in_parts(request, candidate)  # two microbatches are between S and T at a time
    )
    spare = request.spare(columns_of(request, candidate))
    problem = SplitProblem(
        times=tuple(round(sum(segment_seconds(n, request.cluster)) * FEMTOSECONDS) for n in numbers),
        boundaries=tuple(n.boundary_bytes for n in numbers),
        resident=model.resident(),
        saved=tuple(n.saved_bytes for n in numbers),
        place=candidate.schedule.place,
        moments=candidate.moments,
        limit=request.memory - every,
        starts=request.starts,
        spare=spare if any(spare) else (),
    )
    return models, problem


def _models(request: Request, candidate: Candidate) -> tuple[MemoryModel, ...]:
    """What the segments hold on each pipeline rank; those of one width have one model."""
    mesh, costs = candidate.mesh, request.at(candidate.variant).costs
    halved = any(action.kind is Kind.I for _, action in candidate.schedule.actions())
    modes = tuple(first_match(candidate.placements, name).on("dp") for name in request.names)
    known: dict[int, MemoryModel] = {}
    for column in range(mesh.degree("pp")):
        if (dp := mesh.width(column)) not in known:
            samples = request.taken(mesh, candidate.microbatches, column)
            numbers = tuple(handed(n, halved) for n in numbers_of(costs, samples))
            known[dp] = MemoryModel(numbers, modes, dp, request.optimizer_ratio)
    return tuple(known[mesh.width(column)] for column in range(mesh.degree("pp")))


def columns_of(request: Request, candidate: Candidate) -> Columns:
    """What the stages of a candidate run on."""
    return Columns.of(request.cluster, candidate.mesh, candidate.groups)


def in_parts(request: Request, candidate: Candidate) -> tuple[tuple[SegmentNumbers, Modes], ...]:
    """What each pipeline rank has beside its stage of the layers that are split over them, and how it is placed."""
    found = (output_part(request, candidate), input_part(request, candidate))
    return tuple((part, first_match(candidate.placements, part.name).on("dp")) for part in found if part is not None)


def output_part(request: Request, candidate: Candidate) -> SegmentNumbers | None:
    """What each pipeline rank has of the output layer where it is split over them, else None."""
    if request.output is None:
        return None
    made = _share(request, candidate, request.output)
    split = {tied.name for tied in request.lookup.tied} if request.lookup is not None else set[str]()
    whole = [tied for tied in request.output.tied if tied.name not in split]  # which every rank has whole
    ranks = candidate.mesh.degree("pp")
    rest = [(tied.nbytes - tied.nbytes // ranks, tied.trainable) for tied in whole]
    return replace(
        made,
        parameter_bytes=made.parameter_bytes + sum(more for more, _ in rest),
        trainable_bytes=made.trainable_bytes + sum(more * trainable for more, trainable in rest),
    )


def input_part(request: Request, candidate: Candidate) -> SegmentNumbers | None:
    """What each pipeline rank has of the input embedding where it is split over them, else None.

    Of one that is tied to the output layer, it has the same part as of that.
    """
    if request.lookup is None:
        return None
    made = _share(request, candidate, request.lookup)
    return replace(made, parameter_bytes=0, trainable_bytes=0) if request.lookup.tied else made


def _share(request: Request, candidate: Candidate, cost: SegmentCost) -> SegmentNumbers:
    """A pipeline rank's share of what a segment costs, all its parameters divided."""
    ranks = candidate.mesh.degree("pp")
    numbers = cost.at(request.samples(candidate.mesh, candidate.microbatches))
    shares = {f.name: -(-getattr(numbers, f.name) // ranks) for f in fields(numbers) if f.name not in ("name", "tied")}
    return replace(numbers, tied=(), **shares)


def best_split(
    request: Request, candidate: Candidate, models: tuple[MemoryModel, ...], problem: SplitProblem
) -> Split | None:
    """The best split, None if none fits the limit; where ranks hold several stages, that with the shortest flush."""
    if problem.ranks == problem.stages:
        return solve_split(problem)
    return solve_chunks(problem, lambda split: flush(request, Solved(candidate, models, problem, split)).makespan)


def flush(request: Request, solved: Solved) -> Timeline:
    """The predicted timeline of the pipeline in a step: all but the collectives of the data axis."""
    seconds = stage_seconds(request, solved)
    return timeline(solved.candidate.schedule, seconds, edge_seconds(request, solved))


def stage_seconds(request: Request, solved: Solved) -> list[dict[str, float]]:
    """The time of each kind of action of one microbatch, stage by stage."""
    part = output_part(request, solved.candidate)
    shared = {} if part is None else output_seconds(part, request.cluster, solved.candidate.schedule.barriers)
    looked = input_part(request, solved.candidate)
    if looked is not None:
        shared |= dict(zip("ED", segment_seconds(looked, request.cluster), strict=True))
    made, columns = [], columns_of(request, solved.candidate)
    for (i, j), column in zip(solved.runs, solved.problem.place, strict=True):
        first, *beside = [(each[i:j], cluster) for each, cluster in _abreast(request, solved, columns, column)]
        made.append({**action_seconds(*first, first=i == 0 and looked is None, beside=beside), **shared})
    return made


def _abreast(
    request: Request, solved: Solved, columns: Columns, column: int
) -> list[tuple[Sequence[SegmentNumbers], Cluster]]:
    """What segments take, and on what, at each place of a column that has a share of the batch of its own."""
    candidate = solved.candidate
    if not (candidate.groups and candidate.mesh.shares):
        return [(solved.models[column].segments, columns.clusters[column])]
    costs = request.at(candidate.variant).costs
    taken = request.each(candidate.mesh, candidate.microbatches)
    return [(numbers_of(costs, n), cluster) for n, cluster in zip(taken, columns.places[column], strict=True)]


def edge_seconds(request: Request, solved: Solved) -> float:
    """The time of a message between ranks, the largest of a microbatch's."""
    nbytes = max((_message(solved, stage) for stage in range(1, len(solved.split.starts))), default=0)
    columns = columns_of(request, solved.candidate)
    return columns.latency + nbytes / columns.bandwidth


def _message(solved: Solved, stage: int) -> int:
    """The bytes into a stage of a rank that has most of them: where two differ in width, one of the fewer does."""
    start, place, widths = solved.split.starts[stage], solved.problem.place, solved.candidate.mesh.widths
    if not widths:
        return solved.problem.boundaries[start]
    column = min(place[stage - 1], place[stage], key=widths.__getitem__)
    return solved.models[column].segments[start].boundary_bytes


def exchanged_seconds(request: Request, solved: Solved) -> float:
    """What a step takes beside its flush: the collectives of the data axis, which do not overlap it."""
    models, count = solved.models, solved.candidate.microbatches
    cluster = linked(request.cluster, solved.candidate.mesh, "dp")
    clusters = [linked(each, solved.candidate.mesh, "dp") for each in columns_of(request, solved.candidate).clusters]
    exchanged = [
        exchange_seconds(
            models[column].segments[i:j], models[column].modes[i:j], models[column].degree, count, clusters[column]
        )
        for (i, j), column in zip(solved.runs, solved.problem.place, strict=True)
    ]
    shared = sum(
        exchange_seconds([part], [mode], models[0].degree, count, cluster)
        for part, mode in in_parts(request, solved.candidate)
    )
    return shared + max(sum(exchanged[stage] for stage in held) for held in solved.held())


def first_fit(request: Request) -> Solved | None:
    """The first candidate with a split within the memory limit, None if there is none."""
    found = (fitting(request, candidate) for candidate in candidates(request))
    return next((solved for solved in found if solved is not None), None)


def fitting(request: Request, candidate: Candidate) -> Solved | None:
    """A candidate with its best split within the memory limit, None if there is none."""
    models, problem = pose(request, candidate)
    split = best_split(request, candidate, models, problem)
    if split is None:
        return None
    solved = Solved(candidate, models, problem, split)
    return solved if not candidate.schedule.mirrors or solved.peak() <= problem.limit else None


def meshes(request: Request) -> Iterator[Mesh]:
    """The meshes that the pins allow, few stages first, for all axes inside segments that there are costs for."""
    if request.mesh is not None:
        yield request.mesh
        return
    for inner in dict.fromkeys(variant.inner for variant in request.variants):
        for mesh in shapes(request.devices, inner, len(request.costs)):
            pp, enough = mesh.degree("pp"), min(mesh.dealt(request.batch)) >= (request.microbatches or 1)
            if enough and request.ranks in (None, pp):
                yield mesh
    yield from _wide(request)


def _wide(request: Request) -> Iterator[Mesh]:
    """The meshes whose pipeline ranks differ in width, few stages first, where such are looked at."""
    if not request.widths or request.devices > FEW:
        return
    for pp in range(2, min(request.devices, len(request.costs) + 1)):
        for cuts in combinations(range(1, request.devices), pp - 1) if request.ranks in (None, pp) else ():
            mesh = Mesh.of({"pp": tuple(b - a for a, b in pairwise((0, *cuts, request.devices)))})
            if mesh.widths and request.batch >= mesh.least(request.microbatches or 1):
                yield mesh


def shapes(devices: int, inner: Inner, longest: int) -> Iterator[Mesh]:
    """The meshes of so many devices with some axes inside segments and at most `longest` stages, few first."""
    for pp in range(1, min(devices, longest) + 1):
        dp, rest = divmod(devices, pp * prod(size for _, size in inner))
        if rest == 0 and dp:
            yield Mesh.of({"pp": pp, "dp": dp, **dict(inner)})


def _schedules(request: Request, mesh: Mesh) -> Iterator[list[tuple[str, Schedule]]]:
    """The schedules for every number of microbatches whose stages are as many as pinned and have a segment each."""
    known, pp = set[int](), mesh.degree("pp")
    for count in _microbatches(request, mesh):
        made = []
        for text in request.schedules if pp > 1 else request.schedules[:1]:  # alone, a rank waits for nobody
            found = _nearest(request, text, pp, count)
            if found is None or found.microbatches in known or found.stages > len(request.costs):
                continue
            if request.allows(found.stages):
                made.append((text, found))
        known |= {schedule.microbatches for _, schedule in made}
        if made:
            yield made


def _nearest(request: Request, text: str, pp: int, count: int) -> Schedule | None:
    """The schedule for the largest number of microbatches up to `count` that it can be for, of several for `count`."""
    exact = request.microbatches is not None or request.searched
    for fewer in range(count, count - 1 if exact else 0, -1):
        try:
            return request.scheduled(text, pp, fewer)
        except ValueError:
            continue
    return None


def _microbatches(request: Request, mesh: Mesh) -> Iterator[int]:
    if request.microbatches is not None:
        yield request.microbatches
        return
    largest, pp = min(mesh.dealt(request.batch)), mesh.degree("pp")
    count = min(largest, 4 * pp) if pp > 1 else 1
    while count < largest:
        yield count
        count *= 2
    yield largest
