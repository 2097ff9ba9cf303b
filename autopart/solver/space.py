"""The space of plans that is searched jointly, under schedules of one copy of the model, and what bounds its plans.

    meshes        a pinned one; else all pp x dp, beside the axes inside segments that there are costs for; of few
                  equal devices also those whose pipeline ranks differ in width, under 1f1b and gpipe
    tensors       the variants of what segments cost: the placements inside them that were found for those axes
    microbatches  a pinned count; else the powers of two, four a stage, and single samples
    placements    a pinned one; else ddp, zero1, zero2, fsdp (of an open pattern, for what it leaves open); where the
                  host may be used, these also with the optimizer there, and with optimizer and gradients
    schedules     a pinned one, or those that are looked at (`solver.families`), with one stage a rank or several
    recompute     as pinned; else any segments of each stage, or, where ranks hold several, all of a rank's or none
    splits        all, into stages of whole segments that begin with one that has parameters, if there are enough
    devices       of a cluster of unlike ones, the orders in which its groups are dealt to ranks with one stage each

A setting is one choice of all but recompute and splits. T is the time of a microbatch through all segments, a the part
of it (all where backwards are whole, else the least that the forward is of a segment) for which a rank waits for the
stages before its own, forth or back. No plan of m microbatches on p ranks is faster than the longest of

    m T / p;  m x the longest segment;  all segments once (where backwards are in two, without their W), both ways over
    every edge;  of gpipe, T + (m - 1) T / p, or x the longest segment
    a T / (1 - (1 - a/m)^p), where rank k has stage k alone and waits for those before it
    m T / p + the mean over the ranks of what s segments at the start take, s being a rank's first stage, where ranks
    hold several

and the collectives of a rank that has the mean of them. Where devices are unlike, times are those of one that is
nowhere slower than any, and p counts each rank as the part of such a one that it is at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from math import comb, inf

from autopart.ir.cost import REST
from autopart.ir.mesh import Mesh
from autopart.solver import dealt
from autopart.solver.columns import Columns, Order, orders
from autopart.solver.cut import Cut, Found, Pipe, least_need, shortest, within
from autopart.solver.dealt import Held
from autopart.solver.families import WHOLE
from autopart.solver.kinds import FEMTOSECONDS, Table
from autopart.solver.memory import in_flight
from autopart.solver.request import Request
from autopart.solver.search import Candidate, Solved, meshes, pose
from autopart.solver.setting import Setting
from autopart.solver.shared import Shared
from autopart.solver.split import Moment, evaluate
from autopart.solver.stages import Stages, Unlike

SHARES = 64
"""Up to how many ways to deal a batch to unlike data ranks all are looked at."""

LONGEST = 6000
"""How many actions a schedule may have to be looked at, but for 1f1b and gpipe, where there are several."""


class Space(Shared):
    """The plans that a request allows."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._moments: dict[tuple[str, int, int], tuple[Moment, ...]] = {}
        self._learned: dict[tuple[Setting, int | None, bool | None], float] = {}
        self._floors: dict[tuple[int, Mesh, int, str, Order], int] = {}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting that the pins allow."""
        found = []
        for mesh in meshes(self.request):
            alternatives = self.request.placements_on(mesh.data)
            found += [
                Setting(shared, count, rules, text, rank, variant, order, groups)
                for count in self._counts(mesh)
                for order, text in enumerate(self._texts(mesh, count))
                for groups in (((),) if mesh.widths else self._orders)
                for shared in self._sharing(mesh, count, groups)
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
            if mesh.widths and (shape.several or (request.mesh is None and text not in WHOLE)):
                continue
            if not (request.searched and text not in WHOLE and 3 * len(shape.place) * microbatches > LONGEST):
                yield text

    def _sharing(self, mesh: Mesh, microbatches: int, groups: Order) -> Iterator[Mesh]:
        """The mesh with equal shares of the batch, and where its data ranks are unlike devices, with unequal ones.

        All that there are, if these are few; else those in proportion to how fast each rank's slowest device is.
        """
        yield mesh
        if not groups or mesh.shares or mesh.coupled:
            return
        columns = Columns.of(self.request.cluster, mesh, groups)
        if columns.uneven:
            yield from dict.fromkeys(
                mesh.sharing(each) for each in self._shares(mesh, microbatches, columns) if len(set(each)) > 1
            )

    def _shares(self, mesh: Mesh, microbatches: int, columns: Columns) -> Iterator[tuple[int, ...]]:
        batch, dp = self.request.batch, mesh.degree("dp")
        if comb(batch - 1, dp - 1) <= SHARES:
            cuts = combinations(range(1, batch), dp - 1)
            every = (tuple(b - a for a, b in pairwise((0, *each, batch))) for each in cuts)
            yield from (each for each in every if min(each) >= microbatches)
            return
        costs, samples = self.costs(self.request.variants_on(mesh)[0]), self.request.samples(mesh, microbatches)
        slowest = [
            max(Table.of(costs, ((samples, cluster),), halved=False).total for cluster in place)
            for place in zip(*columns.places, strict=True)
        ]
        taken = Mesh.of({"dp": dp}).sharing([10**15 // time for time in slowest]).dealt(batch) if all(slowest) else ()
        if taken and min(taken) >= microbatches:
            yield taken

    @cached_property
    def _orders(self) -> tuple[Order, ...]:
        """The orders in which groups of unlike devices are dealt to pipeline ranks of one width."""
        return orders(self.request.cluster, self.request.devices)

    def _counts(self, mesh: Mesh) -> Iterator[int]:
        """The numbers of microbatches of a mesh, few first."""
        if self.request.microbatches is not None:
            yield self.request.microbatches
            return
        most = min(mesh.dealt(self.request.batch)) // mesh.widest
        powers = {1 << i for i in range(most.bit_length())}
        yield from sorted({*powers, min(most, 4 * mesh.degree("pp")), most})

    def bound(self, setting: Setting) -> int:
        """No plan of the setting has a shorter step, in femtoseconds."""
        key = setting.variant, setting.mesh, setting.microbatches, setting.text, setting.groups
        if key not in self._floors:
            self._floors[key] = self._floor(setting)
        kinds, rings = self.placed(setting).kinds, dict.fromkeys(self.rings(setting))
        collectives = min(kinds.total(self.exchanges(setting, *each)) for each in rings)
        return self._floors[key] + -(-collectives // setting.mesh.degree("pp"))

    def _floor(self, setting: Setting) -> int:
        """The bound without collectives."""
        table, p, m, shape = self.table(setting), setting.mesh.degree("pp"), setting.microbatches, self.form(setting)
        hops = sum(one != other for one, other in pairwise(shape.place))
        forward, backward, inputs, _ = table.actions
        once = forward[-1] + (inputs[-1] if shape.halved else backward[-1])
        share = max(table.longest, self._shared(setting))
        least = max(m * share, once + 2 * hops * round(self.columns(setting).latency * FEMTOSECONDS))
        if shape.several:
            ahead = forward if shape.halved else table.elapsed
            least = max(least, (m * table.total + sum(ahead[shape.place.index(rank)] for rank in range(p))) // p)
        elif p > 1:
            lead = min((f / (f + b) for f, b, _, _ in table.times if f + b), default=1.0) if shape.halved else 1.0
            least = max(least, int(lead * table.total / (1 - (1 - lead / m) ** p) * (1 - 1e-12))) if lead else least
        if setting.text == "gpipe":
            least = max(least, table.total + (m - 1) * share)
        return least

    def _shared(self, setting: Setting) -> int:
        """The least time of the slowest stage, if segments could be parted at will.

        Where devices are unlike, a stage takes at least as many times the least that its segments take anywhere as the
        segment does that gains least there.
        """
        table, tables = self.table(setting), self.tables(setting)
        if not setting.groups:
            return -(-table.total // len(tables))
        times = [f + b for f, b, _, _ in table.times]
        slower = []
        for each in tables:
            pairs = zip(each.times, times, strict=True)
            slower.append(min(((f + b) / time for (f, b, _, _), time in pairs if time), default=1.0))
        return int(table.total / sum(1 / each for each in slower) * (1 - 1e-12))

    def stages(self, setting: Setting, limit: int | None, *, recomputing: bool | None = None) -> Stages:
        """The stages that the setting allows within a limit, None for any."""
        free = self.request.free if recomputing is None else recomputing
        flights = () if self.form(setting).several else self.flights(setting)
        table = self.table(setting)
        if not setting.groups and not setting.mesh.widths:
            return Stages(table, self.holding(setting), flights, limit, recomputing=free)
        columns = self.columns(setting)
        spare = self.request.spare(columns)
        limits = [None if limit is None else limit + more for more in spare]
        own = [
            Stages(each, self.holding(setting, column), flights, most, recomputing=free)
            for column, (each, most) in enumerate(zip(self.tables(setting), limits, strict=True))
        ]
        place = self.form(setting).place
        return Unlike(table, [own[rank] for rank in place], [spare[rank] for rank in place], limit)

    def held(self, setting: Setting, stages: Stages) -> Held:
        """What the ranks of a setting hold that have several stages each."""
        key = setting.text, setting.mesh.degree("pp"), setting.microbatches
        if key not in self._moments:
            self._moments[key] = in_flight(self.made(setting))
        return Held(stages, self.pipe(setting), self.form(setting).place, self._moments[key])

    def pipe(self, setting: Setting) -> Pipe:
        """What the setting's step is made of, beside its stages."""
        count, columns, shape = setting.microbatches, self.columns(setting), self.form(setting)
        halved, stages, exchanged = shape.halved, len(shape.place), self.exchanged(setting)
        sides = self._sides(setting)
        transfers = {
            id(side): tuple(
                side.values([round(n.boundary_bytes / columns.bandwidth * FEMTOSECONDS) for n in side.numbers])
            )
            for side in sides
        }
        return Pipe(
            stages=stages,
            microbatches=count,
            actions=(3 if halved else 2) * stages * count,
            flush=partial(self.flush, setting),
            whole=not halved,
            alternating=setting.text == "1f1b" and not setting.groups and not setting.mesh.widths,
            latency=round(columns.latency * FEMTOSECONDS),
            transfer=tuple(transfers[id(side)] for side in sides),
            exchanged=tuple(exchanged[column] for column in shape.place),
            starts=self.request.starts,
            allowed=self.allowed(stages),
        )

    def _sides(self, setting: Setting) -> list[Table]:
        """For each stage the segments as those see them who have most of a message into it: the fewer ranks do."""
        if not setting.mesh.widths:
            return [self.table(setting)] * len(self.form(setting).place)
        tables, widths = self.tables(setting), setting.mesh.widths
        narrow = [stage - (stage > 0 and widths[stage - 1] < width) for stage, width in enumerate(widths)]
        return [tables[column] for column in narrow]

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
        spare, every = self.request.spare(self.columns(setting)), range(len(setting.mesh.widths) or 1)
        least = min(self.holding(setting, column).resident(0, len(self.request.costs)) for column in every)
        return least <= sum(limit + more for more in spare)

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
            setting.groups,
        )
        models, problem = pose(request, candidate)
        split = evaluate(problem, cut.starts)
        assert split is not None, f"internal error: {cut} does not fit when counted afresh"
        return request, Solved(candidate, models, problem, split)


def roomy(request: Request) -> Iterator[Mesh]:
    """The meshes on which the ranks have room for what is held beside activations, whatever the schedule."""
    space = Space(request)
    for mesh in meshes(request):
        settings = (
            Setting(mesh, 1, rules, "1f1b", variant=variant)
            for rules in request.placements_on(mesh.data)
            for variant in request.variants_on(mesh)
        )
        if any(space.room(setting, request.memory) for setting in settings):
            yield mesh
