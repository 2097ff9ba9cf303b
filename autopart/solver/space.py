"""The space of plans that is searched jointly, where each pipeline rank holds one stage, and what bounds its plans.

    meshes        a pinned one; else all pp x dp, for each tensor degree tp that there are costs for, of as many devices
    tensors       the variants of what segments cost: the placements inside them that were found for the tensor degree
    microbatches  a pinned count; else the powers of two, four a stage, and single samples
    placements    a pinned one; else ddp, zero1, zero2, fsdp (of an open pattern, for what it leaves open); where the
                  host may be used, these also with the optimizer there, and with optimizer and gradients
    recompute     as pinned; else any segments of each stage
    splits        all, into stages of whole segments that begin with one that has parameters, if there are enough

A setting is one choice of the first four. No plan of it is faster than the longest of

    m x the mean of the stages, m x the longest segment, all segments once (both ways over every edge)
    what m microbatches take where every stage waits for those before it and after it: sum T / (1 - (1 - 1/m)^p)

and the collectives of a rank that has the mean of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from autopart.ir.action import ENDS, Kind, Schedule
from autopart.ir.cost import REST, SegmentNumbers
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Modes
from autopart.ir.plan import first_match
from autopart.solver.axis import linked
from autopart.solver.counts import WHOLE
from autopart.solver.cut import Cut, Found, Pipe, least_need, shortest, within
from autopart.solver.flush import Flush
from autopart.solver.holding import Holding
from autopart.solver.kinds import FEMTOSECONDS, Costs, Kinds, Sums, Table
from autopart.solver.memory import in_flight
from autopart.solver.presets import Rules
from autopart.solver.request import Request, inside
from autopart.solver.search import Candidate, Solved, meshes, pose
from autopart.solver.split import evaluate
from autopart.solver.stages import Stages
from autopart.solver.timing import exchange_seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the global choices; `rank` is the place of the placement among its alternatives."""

    mesh: Mesh
    microbatches: int
    placements: Rules
    text: str  # of the schedule
    rank: int = 0
    variant: int = 0  # of what segments cost, by number

    @property
    def preference(self) -> tuple[int, ...]:
        """Of equally fast plans, the one with fewer stages and places, fewer microbatches, less sharded states."""
        return self.mesh.degree("pp"), inside(self.mesh), self.microbatches, self.rank, self.variant


@dataclass(frozen=True, slots=True)
class Placed:
    """Segments told apart by their placement on the data axis, too.

    Of every such kind: its modes on the axis, and which kind its segments are of if that is left aside.
    """

    kinds: Kinds
    modes: tuple[Modes, ...]
    plain: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Kinds, names: Sequence[str], rules: Rules) -> Placed:
        """The segments called `names`, of some `kinds`, placed by some rules."""
        if len(rules) == 1:
            count = len(kinds.counts)
            return cls(kinds, (rules[0][1].on("dp"),) * count, tuple(range(count)))
        pairs = [(kind, first_match(rules, name).on("dp")) for kind, name in zip(kinds.of, names, strict=True)]
        plain, modes = zip(*dict.fromkeys(pairs), strict=True)
        return cls(Kinds.telling(pairs), modes, plain)

    def numbers(self, table: Table) -> list[SegmentNumbers]:
        """The numbers of every kind."""
        return [table.numbers[kind] for kind in self.plain]


class Space:
    """The plans that a request allows. What settings share is computed once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._schedules: dict[tuple[str, int, int], Schedule | None] = {}
        self._flushes: dict[tuple[str, int, int], Flush] = {}
        self._tables: dict[tuple[int, int, bool], Table] = {}
        self._holdings: dict[tuple[int, int, int], Holding] = {}
        self._placed: dict[tuple[int, int], Placed] = {}
        self._exchanges: dict[tuple[int, Mesh, int, int], tuple[int, ...]] = {}
        self._costs: dict[int, Costs] = {}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting that the pins allow."""
        found = []
        for mesh in meshes(self.request):
            alternatives = self.request.placements_on(mesh.degree("dp"))
            if mesh.degree("pp") <= len(self.request.costs) and self.request.allows(mesh.degree("pp")):
                found += [
                    Setting(mesh, count, rules, self.request.schedules[0], rank, variant)
                    for count in self._counts(mesh)
                    if self._exists(mesh.degree("pp"), count)
                    for rank, rules in enumerate(self.request.placements)
                    if rules in alternatives
                    for variant in self.request.variants_on(mesh, count)
                ]
        return tuple(found)

    @property
    def single(self) -> bool:
        """Whether stage k of the one copy of the model is on pipeline rank k, and runs whole, whatever the mesh."""
        if self.request.searched or self.request.output is not None:
            return False
        if self.request.schedules[0] in WHOLE:
            return True
        for mesh in meshes(self.request):
            pp = mesh.degree("pp")
            made = (self.schedule(self.request.schedules[0], pp, count) for count in self._counts(mesh))
            known = next((schedule for schedule in made if schedule is not None), None)
            if known is None or known.place != tuple(range(pp)) or known.mirrors or known.slices > 1 or known.barriers:
                return False
        return True

    def allowed(self, stages: int) -> tuple[int, ...]:
        """The segments where a stage may begin, after the first: those with parameters, if they are enough.

        What has none, as a dropout or a loss, may compute nothing in evaluation, where stages begin at the same places.
        """
        costs, starts = self.request.costs, self.request.starts
        every = range(1, len(costs))
        for barred in (lambda cost: not cost.parameter_bytes, lambda cost: cost.name == REST):
            found = tuple(i for i in every if not barred(costs[i]) or i in starts)
            if len(found) >= stages - 1:
                return found
        return tuple(every)

    def _exists(self, ranks: int, microbatches: int) -> bool:
        """Whether there is a schedule for so many ranks and microbatches; some families are for some numbers only."""
        text = self.request.schedules[0]
        return text in WHOLE or self.schedule(text, ranks, microbatches) is not None

    def _counts(self, mesh: Mesh) -> Iterator[int]:
        """The numbers of microbatches of a mesh, few first."""
        if self.request.microbatches is not None:
            yield self.request.microbatches
            return
        most = self.request.batch // mesh.parts
        powers = {1 << i for i in range(most.bit_length())}
        yield from sorted({*powers, min(most, 4 * mesh.degree("pp")), most})

    # ---- what settings share -----------------------------------------------------------------------------------------

    def schedule(self, text: str, ranks: int, microbatches: int) -> Schedule | None:
        """The schedule for so many ranks and microbatches; None where there is none."""
        key = text, ranks, microbatches
        if key not in self._schedules:
            try:
                self._schedules[key] = self.request.scheduled(*key)
            except ValueError:
                self._schedules[key] = None
        return self._schedules[key]

    def made(self, setting: Setting) -> Schedule:
        """The schedule of a setting."""
        schedule = self.schedule(setting.text, setting.mesh.degree("pp"), setting.microbatches)
        assert schedule is not None, "settings are those whose schedule there is"
        return schedule

    def halved(self, setting: Setting) -> bool:
        """Whether backwards are in two."""
        if setting.text in WHOLE:
            return False
        return any(action.kind is Kind.I for _, action in self.made(setting).actions())

    def costs(self, number: int) -> Costs:
        """The costs of the segments in a variant."""
        if number not in self._costs:
            variant = self.request.variants[number]
            self._costs[number] = Costs.of(variant.costs, variant.again)
        return self._costs[number]

    def table(self, setting: Setting) -> Table:
        """The segments at the size of the setting's largest microbatch."""
        samples = self.request.samples(setting.mesh, setting.microbatches)
        key = setting.variant, samples, self.halved(setting)
        if key not in self._tables:
            self._tables[key] = Table.of(self.costs(key[0]), key[1], self.request.cluster, halved=key[2])
        return self._tables[key]

    def placed(self, setting: Setting) -> Placed:
        """The segments as they are placed on the data axis."""
        key = setting.variant, setting.rank
        if key not in self._placed:
            self._placed[key] = Placed.of(self.costs(setting.variant).kinds, self.request.names, setting.placements)
        return self._placed[key]

    def holding(self, setting: Setting) -> Holding:
        """What segments hold beside activations."""
        dp = setting.mesh.degree("dp")
        key = setting.variant, dp, setting.rank
        if key not in self._holdings:
            placed = self.placed(setting)
            numbers = placed.numbers(self.table(setting))
            self._holdings[key] = Holding.of(placed.kinds, numbers, placed.modes, dp, self.request.optimizer_ratio)
        return self._holdings[key]

    def exchanges(self, setting: Setting) -> tuple[int, ...]:
        """The time of the collectives of the data axis, for every kind of segments as they are placed."""
        mesh, count = setting.mesh, setting.microbatches
        key = setting.variant, mesh, count, setting.rank
        if key not in self._exchanges:
            dp, cluster, placed = mesh.degree("dp"), linked(self.request.cluster, mesh, "dp"), self.placed(setting)
            pairs = zip(placed.numbers(self.table(setting)), placed.modes, strict=True)
            self._exchanges[key] = tuple(
                round(exchange_seconds([numbers], [modes], dp, count, cluster) * FEMTOSECONDS)
                for numbers, modes in pairs
            )
        return self._exchanges[key]

    def exchanged(self, setting: Setting) -> Sums:
        """The time of the collectives of the data axis."""
        return self.placed(setting).kinds.sums(self.exchanges(setting))

    # ---- a setting ---------------------------------------------------------------------------------------------------

    def bound(self, setting: Setting) -> int:
        """No plan of the setting has a shorter step, in femtoseconds."""
        table, p, m = self.table(setting), setting.mesh.degree("pp"), setting.microbatches
        latency = round(self.request.cluster.link_latency * FEMTOSECONDS)
        least = max(m * max(table.longest, -(-table.total // p)), table.total + 2 * (p - 1) * latency)
        if p > 1 and not self.halved(setting):
            least = max(least, int(table.total / (1 - (1 - 1 / m) ** p) * (1 - 1e-12)))
        return least + -(-self.placed(setting).kinds.total(self.exchanges(setting)) // p)

    def stages(self, setting: Setting, limit: int | None, *, recomputing: bool | None = None) -> Stages:
        """The stages that the setting allows within a limit, None for any."""
        free = self.request.free if recomputing is None else recomputing
        return Stages(self.table(setting), self.holding(setting), self.flights(setting), limit, recomputing=free)

    def flush(self, setting: Setting) -> Flush:
        """The flush of a setting's pipeline."""
        key = setting.text, setting.mesh.degree("pp"), setting.microbatches
        if key not in self._flushes:
            self._flushes[key] = Flush.of(self.made(setting))
        return self._flushes[key]

    def flights(self, setting: Setting) -> tuple[int, ...]:
        """How many microbatches each rank keeps at most: by law where that is known, else by the schedule's rows."""
        pp, count = setting.mesh.degree("pp"), setting.microbatches
        if setting.text == "1f1b":
            return tuple(min(count, pp - rank) for rank in range(pp))
        return (count,) * pp if setting.text == "gpipe" else _flights(self.made(setting))

    def pipe(self, setting: Setting) -> Pipe:
        """What the setting's step is made of, beside its stages."""
        pp, count, cluster = setting.mesh.degree("pp"), setting.microbatches, self.request.cluster
        table, halved = self.table(setting), self.halved(setting)
        transfer = [round(n.boundary_bytes / cluster.link_bandwidth * FEMTOSECONDS) for n in table.numbers]
        return Pipe(
            stages=pp,
            microbatches=count,
            actions=(3 if halved else 2) * pp * count,
            flush=partial(self.flush, setting),
            whole=not halved,
            alternating=setting.text == "1f1b",
            latency=round(cluster.link_latency * FEMTOSECONDS),
            transfer=tuple(table.values(transfer)),
            exchanged=self.exchanged(setting),
            starts=self.request.starts,
            allowed=self.allowed(pp),
        )

    def best(
        self, setting: Setting, known: float = inf, *, limit: int | None = None, recomputing: bool | None = None
    ) -> Found | None:
        """The best plan of the setting within a limit, by default the request's; None if none fits."""
        stages = self.stages(setting, self.request.memory if limit is None else limit, recomputing=recomputing)
        return shortest(stages, self.pipe(setting), known)

    def least(self, setting: Setting, *, recomputing: bool | None = None) -> int:
        """The smallest limit that a plan of the setting fits."""
        return least_need(self.stages(setting, None, recomputing=recomputing), self.pipe(setting))

    def room(self, setting: Setting, limit: int) -> bool:
        """Whether the ranks have, in the mean, room within a limit for what the setting holds beside activations."""
        return self.holding(setting).resident(0, len(self.request.costs)) <= setting.mesh.degree("pp") * limit

    def fits(self, setting: Setting, limit: int, *, recomputing: bool | None = None) -> bool:
        """Whether some plan of the setting fits a limit."""
        if not self.room(setting, limit):
            return False
        return within(self.stages(setting, None, recomputing=recomputing), self.pipe(setting))(limit)

    def peak(self, setting: Setting, cut: Cut) -> int:
        """The bytes of the fullest rank of a plan of a setting."""
        stages = self.stages(setting, None)
        ends = [*cut.starts[1:], stages.table.segments]
        return max(stages.held(k, i, j, cut.ways[k]) for k, (i, j) in enumerate(zip(cut.starts, ends, strict=True)))

    def solved(self, setting: Setting, cut: Cut, *, limit: int | None = None) -> tuple[Request, Solved]:
        """A plan of a setting as other code counts it afresh: the request with what is recomputed, and its solution."""
        stages = self.stages(setting, limit)
        ends = [*cut.starts[1:], stages.table.segments]
        again = [i for i, j, way in zip(cut.starts, ends, cut.ways, strict=True) for i in stages.recomputed(i, j, way)]
        request = self.request.at(setting.variant).again(again)
        if limit is not None:
            request = replace(request, memory=limit)
        made = self.made(setting)
        candidate = Candidate(
            setting.mesh,
            setting.microbatches,
            setting.placements,
            setting.text,
            made,
            in_flight(made),
            setting.variant,
        )
        model, problem = pose(request, candidate)
        split = evaluate(problem, cut.starts)
        assert split is not None, f"internal error: {cut} does not fit when counted afresh"
        return request, Solved(candidate, model, problem, split)


def roomy(request: Request) -> Iterator[Mesh]:
    """The meshes on which the ranks have room for what is held beside activations, whatever the schedule."""
    space = Space(request)
    for mesh in meshes(request):
        settings = (
            Setting(mesh, 1, rules, "1f1b", variant=variant)
            for rules in request.placements_on(mesh.degree("dp"))
            for variant in request.variants_on(mesh)
        )
        if any(space.room(setting, request.memory) for setting in settings):
            yield mesh


def _flights(schedule: Schedule) -> tuple[int, ...]:
    """How many microbatches each rank keeps at most, its stage being the only one."""
    found = []
    for row in schedule.table:
        kept = most = 0
        for action in row:
            most = max(most, kept) if action.kind in ENDS else most
            kept += (action.kind is Kind.F) - (action.kind in ENDS)
        found.append(most)
    return tuple(found)
