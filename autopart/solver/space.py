"""The space of plans that is searched jointly, under schedules of one copy of the model, and what bounds its plans.

    meshes        a pinned one; else all pp x dp, for each tensor degree tp that there are costs for, of as many devices
    tensors       the variants of what segments cost: the placements inside them that were found for the tensor degree
    microbatches  a pinned count; else the powers of two, four a stage, and single samples
    placements    a pinned one; else ddp, zero1, zero2, fsdp (of an open pattern, for what it leaves open); where the
                  host may be used, these also with the optimizer there, and with optimizer and gradients
    schedules     a pinned one, or those that are looked at (`solver.families`), with one stage a rank or several
    recompute     as pinned; else any segments of each stage, or, where ranks hold several, all of a rank's or none
    splits        all, into stages of whole segments that begin with one that has parameters, if there are enough

A setting is one choice of the first five. T is the time of a microbatch through all segments, a the part of it (all
where backwards are whole, else the least that the forward is of a segment) for which a rank waits for the stages before
its own, forth or back. No plan of m microbatches on p ranks is faster than the longest of

    m T / p;  m x the longest segment;  all segments once (where backwards are in two, without their W), both ways over
    every edge;  of gpipe, T + (m - 1) T / p, or x the longest segment
    a T / (1 - (1 - a/m)^p), where rank k has stage k alone and waits for those before it
    m T / p + the mean over the ranks of what s segments at the start take, s being a rank's first stage, where ranks
    hold several

and the collectives of a rank that has the mean of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf

from autopart.ir.action import Kind, Schedule
from autopart.ir.cost import REST
from autopart.ir.mesh import Mesh
from autopart.solver import dealt
from autopart.solver.axis import linked
from autopart.solver.cut import Cut, Found, Pipe, least_need, shortest, within
from autopart.solver.dealt import Held
from autopart.solver.families import ANYWHERE, WHOLE
from autopart.solver.flush import Flush
from autopart.solver.holding import Holding
from autopart.solver.kinds import FEMTOSECONDS, Costs, Sums, Table
from autopart.solver.memory import in_flight
from autopart.solver.request import Request
from autopart.solver.search import Candidate, Solved, meshes, pose
from autopart.solver.setting import Placed, Setting, Shape, flights_of
from autopart.solver.split import Moment, evaluate
from autopart.solver.stages import Stages
from autopart.solver.timing import exchange_seconds

LONGEST = 6000
"""How many actions a schedule may have to be looked at, but for 1f1b and gpipe, where there are several."""


class Space:
    """The plans that a request allows. What settings share is computed once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._schedules: dict[tuple[str, int, int], Schedule | None] = {}
        self._shapes: dict[tuple[str, int, int], Shape | None] = {}
        self._flushes: dict[tuple[str, int, int], Flush] = {}
        self._tables: dict[tuple[int, int, bool], Table] = {}
        self._holdings: dict[tuple[int, int, int], Holding] = {}
        self._placed: dict[tuple[int, int], Placed] = {}
        self._exchanges: dict[tuple[int, Mesh, int, int], tuple[int, ...]] = {}
        self._costs: dict[int, Costs] = {}
        self._moments: dict[tuple[str, int, int], tuple[Moment, ...]] = {}
        self._learned: dict[tuple[Setting, int | None, bool | None], float] = {}
        self._floors: dict[tuple[int, Mesh, int, str], int] = {}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting that the pins allow."""
        found = []
        for mesh in meshes(self.request):
            alternatives = self.request.placements_on(mesh.degree("dp"))
            found += [
                Setting(mesh, count, rules, text, rank, variant, order)
                for count in self._counts(mesh)
                for order, text in enumerate(self._texts(mesh, count))
                for rank, rules in enumerate(self.request.placements)
                if rules in alternatives
                for variant in self.request.variants_on(mesh, count)
            ]
        return tuple(found)

    @cached_property
    def joint(self) -> bool:
        """Whether this is how the request is searched: there is one copy of the model, which runs whole."""
        request = self.request
        if request.output is not None:
            return False
        if not request.searched and request.schedules[0] not in WHOLE:
            pairs = ((mesh.degree("pp"), count) for mesh in meshes(request) for count in self._counts(mesh))
            made = (self.schedule(request.schedules[0], *pair) for pair in pairs)
            known = next((schedule for schedule in made if schedule is not None), None)
            if known is None or known.mirrors or known.slices > 1 or known.barriers:
                return False
        return True

    @property
    def single(self) -> bool:
        """Whether that is so, and each rank holds one stage, in order."""
        return self.joint and not any(self.form(each).several for each in self.settings)

    def lean(self, settings: Iterable[Setting]) -> list[Setting]:
        """Of some settings those whose schedule holds little, or all where none is known to."""
        every, names = list(settings), self.request.lean
        return [each for each in every if each.text in names] or every

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

    def _texts(self, mesh: Mesh, microbatches: int) -> Iterator[str]:
        """The schedules that there are for so many ranks and microbatches, whose stages have a segment each."""
        ranks, request = mesh.degree("pp"), self.request
        for text in request.schedules if ranks > 1 else request.schedules[:1]:  # alone, a rank waits for nobody
            if request.searched and text not in WHOLE and 6 * ranks * microbatches > LONGEST:
                continue
            shape = self.shape(text, ranks, microbatches)
            if shape is None or len(shape.place) > len(request.costs) or not request.allows(len(shape.place)):
                continue
            if not (request.searched and text not in WHOLE and 3 * len(shape.place) * microbatches > LONGEST):
                yield text

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

    def shape(self, text: str, ranks: int, microbatches: int) -> Shape | None:
        """The shape of a schedule; None where there is none for so many ranks and microbatches."""
        if text in WHOLE:
            return Shape(tuple(range(ranks)), halved=False)
        key = text, ranks, 2 if text in ANYWHERE else microbatches
        if key not in self._shapes:
            made = self.schedule(*key)
            split = made is not None and any(action.kind is Kind.I for _, action in made.actions())
            self._shapes[key] = None if made is None else Shape(made.place, split)
        return self._shapes[key]

    def form(self, setting: Setting) -> Shape:
        """The shape of a setting's schedule."""
        found = self.shape(setting.text, setting.mesh.degree("pp"), setting.microbatches)
        assert found is not None, "settings are those whose schedule there is"
        return found

    def made(self, setting: Setting) -> Schedule:
        """The schedule of a setting."""
        schedule = self.schedule(setting.text, setting.mesh.degree("pp"), setting.microbatches)
        assert schedule is not None, "settings are those whose schedule there is"
        return schedule

    def halved(self, setting: Setting) -> bool:
        """Whether backwards are in two."""
        return self.form(setting).halved

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
        key = setting.variant, setting.mesh, setting.microbatches, setting.text
        if key not in self._floors:
            self._floors[key] = self._floor(setting)
        collectives = self.placed(setting).kinds.total(self.exchanges(setting))
        return self._floors[key] + -(-collectives // setting.mesh.degree("pp"))

    def _floor(self, setting: Setting) -> int:
        """The bound without collectives."""
        table, p, m, shape = self.table(setting), setting.mesh.degree("pp"), setting.microbatches, self.form(setting)
        hops = sum(one != other for one, other in pairwise(shape.place))
        forward, backward, inputs, _ = table.actions
        once = forward[-1] + (inputs[-1] if shape.halved else backward[-1])
        share = max(table.longest, -(-table.total // p))
        least = max(m * share, once + 2 * hops * round(self.request.cluster.link_latency * FEMTOSECONDS))
        if shape.several:
            ahead = forward if shape.halved else table.elapsed
            least = max(least, (m * table.total + sum(ahead[shape.place.index(rank)] for rank in range(p))) // p)
        elif p > 1:
            lead = min((f / (f + b) for f, b, _, _ in table.times if f + b), default=1.0) if shape.halved else 1.0
            least = max(least, int(lead * table.total / (1 - (1 - lead / m) ** p) * (1 - 1e-12))) if lead else least
        if setting.text == "gpipe":
            least = max(least, table.total + (m - 1) * share)
        return least

    def stages(self, setting: Setting, limit: int | None, *, recomputing: bool | None = None) -> Stages:
        """The stages that the setting allows within a limit, None for any."""
        free = self.request.free if recomputing is None else recomputing
        flights = () if self.form(setting).several else self.flights(setting)
        return Stages(self.table(setting), self.holding(setting), flights, limit, recomputing=free)

    def held(self, setting: Setting, stages: Stages) -> Held:
        """What the ranks of a setting hold that have several stages each."""
        key = setting.text, setting.mesh.degree("pp"), setting.microbatches
        if key not in self._moments:
            self._moments[key] = in_flight(self.made(setting))
        return Held(stages, self.pipe(setting), self.form(setting).place, self._moments[key])

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
        return (count,) * pp if setting.text == "gpipe" else flights_of(self.made(setting))

    def pipe(self, setting: Setting) -> Pipe:
        """What the setting's step is made of, beside its stages."""
        count, cluster, shape = setting.microbatches, self.request.cluster, self.form(setting)
        table, halved, stages = self.table(setting), shape.halved, len(shape.place)
        transfer = [round(n.boundary_bytes / cluster.link_bandwidth * FEMTOSECONDS) for n in table.numbers]
        return Pipe(
            stages=stages,
            microbatches=count,
            actions=(3 if halved else 2) * stages * count,
            flush=partial(self.flush, setting),
            whole=not halved,
            alternating=setting.text == "1f1b",
            latency=round(cluster.link_latency * FEMTOSECONDS),
            transfer=tuple(table.values(transfer)),
            exchanged=self.exchanged(setting),
            starts=self.request.starts,
            allowed=self.allowed(stages),
        )

    def best(
        self, setting: Setting, known: float = inf, *, limit: int | None = None, recomputing: bool | None = None
    ) -> Found | None:
        """The best plan of the setting within a limit, by default the request's; None if none fits."""
        key = setting, limit, recomputing
        least = self._learned.get(key, 0)
        if least == inf:
            return None
        if least > known:
            return Found(None, int(least))
        stages = self.stages(setting, self.request.memory if limit is None else limit, recomputing=recomputing)
        if self.form(setting).several:
            found, beyond = dealt.shortest(stages, self.pipe(setting), self.held(setting, stages), known), inf
        else:
            found, beyond = shortest(stages, self.pipe(setting), known), known + 1
        self._learned[key] = max(least, beyond if found is None else found.bound)
        return found

    def least(self, setting: Setting, *, recomputing: bool | None = None) -> int:
        """The smallest limit that a plan of the setting is known to fit."""
        stages = self.stages(setting, None, recomputing=recomputing)
        if self.form(setting).several:
            return self.held(setting, stages).least()
        return least_need(stages, self.pipe(setting))

    def room(self, setting: Setting, limit: int) -> bool:
        """Whether the ranks have, in the mean, room within a limit for what the setting holds beside activations."""
        return self.holding(setting).resident(0, len(self.request.costs)) <= setting.mesh.degree("pp") * limit

    def fits(self, setting: Setting, limit: int, *, recomputing: bool | None = None) -> bool:
        """Whether some plan of the setting fits a limit."""
        if not self.room(setting, limit):
            return False
        if self.form(setting).several:
            return self.held(setting, self.stages(setting, limit, recomputing=recomputing)).fits()
        return within(self.stages(setting, None, recomputing=recomputing), self.pipe(setting))(limit)

    def peak(self, setting: Setting, cut: Cut) -> int:
        """The bytes of the fullest rank of a plan of a setting."""
        stages = self.stages(setting, None)
        if self.form(setting).several:
            return self.held(setting, stages).peak(cut.starts, cut.ways)
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
