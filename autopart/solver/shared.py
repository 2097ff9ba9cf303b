"""What settings share: schedules, and what segments cost and hold, each computed once for all that ask for it."""

from __future__ import annotations

from functools import partial

from autopart.cluster import Cluster
from autopart.ir.action import Kind, Schedule
from autopart.ir.mesh import Mesh
from autopart.solver.axis import linked
from autopart.solver.columns import Columns, Order
from autopart.solver.families import ANYWHERE, WHOLE
from autopart.solver.flush import Flush
from autopart.solver.holding import Holding
from autopart.solver.kinds import FEMTOSECONDS, Costs, Places, Sums, Table
from autopart.solver.request import Request
from autopart.solver.setting import Placed, Setting, Shape, flights_of
from autopart.solver.timing import exchange_seconds


class Shared:
    """Of the settings of one request: what several of them have in common."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._schedules: dict[tuple[str, int, int], Schedule | None] = {}
        self._shapes: dict[tuple[str, int, int], Shape | None] = {}
        self._flushes: dict[tuple[str, int, int], Flush] = {}
        self._tables: dict[tuple[int, bool, Places], Table] = {}
        self._beside: dict[tuple[int, bool, Mesh, int, Order], tuple[Table, tuple[Table, ...]]] = {}
        self._columns: dict[tuple[Mesh, Order], Columns] = {}
        self._holdings: dict[tuple[int, int, int], Holding] = {}
        self._placed: dict[tuple[int, int], Placed] = {}
        self._exchanges: dict[tuple[int, Mesh, int, int, Cluster, int], tuple[int, ...]] = {}
        self._costs: dict[int, Costs] = {}

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

    def columns(self, setting: Setting) -> Columns:
        """What the setting's stages run on."""
        key = setting.mesh, setting.groups
        if key not in self._columns:
            self._columns[key] = Columns.of(self.request.cluster, *key)
        return self._columns[key]

    def places(self, setting: Setting) -> tuple[Places, ...]:
        """What each column computes, and on what: alike at all its places on dp, unless they have unequal shares."""
        columns, mesh, samples = self.columns(setting), setting.mesh, partial(self.request.taken, setting.mesh)
        if not (setting.groups and setting.mesh.shares):
            clusters = enumerate(columns.clusters)
            return tuple(((samples(setting.microbatches, column), cluster),) for column, cluster in clusters)
        taken = self.request.each(mesh, setting.microbatches)
        return tuple(tuple(zip(taken, places, strict=True)) for places in columns.places)

    def table(self, setting: Setting) -> Table:
        """The segments at the size of the setting's largest microbatch; their times are the least of any column.

        Where pipeline ranks differ in width, at that of the widest one.
        """
        return self._both(setting)[0]

    def tables(self, setting: Setting) -> tuple[Table, ...]:
        """The segments as each column runs them."""
        return self._both(setting)[1]

    def _both(self, setting: Setting) -> tuple[Table, tuple[Table, ...]]:
        """The `table` and the `tables` of a setting."""
        mesh, halved = setting.mesh, self.halved(setting)
        key = setting.variant, halved, mesh, setting.microbatches, setting.groups
        if key not in self._beside:
            tables = tuple(self._table(setting.variant, halved, each) for each in self.places(setting))
            first = tables[max(range(len(tables)), key=mesh.width)]
            one = first if len(set(map(id, tables))) == 1 else Table.least([first, *tables])
            self._beside[key] = one, tables
        return self._beside[key]

    def _table(self, variant: int, halved: bool, places: Places) -> Table:
        key = variant, halved, places
        if key not in self._tables:
            self._tables[key] = Table.of(self.costs(variant), places, halved=halved)
        return self._tables[key]

    def placed(self, setting: Setting) -> Placed:
        """The segments as they are placed on the data axis."""
        key = setting.variant, setting.rank
        if key not in self._placed:
            self._placed[key] = Placed.of(self.costs(setting.variant).kinds, self.request.names, setting.placements)
        return self._placed[key]

    def holding(self, setting: Setting, column: int = 0) -> Holding:
        """What segments hold beside activations, on a rank of some column."""
        dp = setting.mesh.width(column)
        key = setting.variant, dp, setting.rank
        if key not in self._holdings:
            placed = self.placed(setting)
            numbers = placed.numbers(self.table(setting))
            self._holdings[key] = Holding.of(placed.kinds, numbers, placed.modes, dp, self.request.optimizer_ratio)
        return self._holdings[key]

    def exchanges(self, setting: Setting, cluster: Cluster, dp: int) -> tuple[int, ...]:
        """The time of the collectives of `dp` data ranks on a cluster, for each kind of segments as they are placed."""
        mesh, count = setting.mesh, setting.microbatches
        key = setting.variant, mesh, count, setting.rank, cluster, dp
        if key not in self._exchanges:
            near, placed = linked(cluster, mesh, "dp"), self.placed(setting)
            pairs = zip(placed.numbers(self.table(setting)), placed.modes, strict=True)
            self._exchanges[key] = tuple(
                round(exchange_seconds([numbers], [modes], dp, count, near) * FEMTOSECONDS) for numbers, modes in pairs
            )
        return self._exchanges[key]

    def rings(self, setting: Setting) -> tuple[tuple[Cluster, int], ...]:
        """Of every column the cluster that it is on, and its data ranks."""
        return tuple((each, setting.mesh.width(at)) for at, each in enumerate(self.columns(setting).clusters))

    def exchanged(self, setting: Setting) -> tuple[Sums, ...]:
        """The time of the collectives of the data axis, in each column."""
        rings, kinds = self.rings(setting), self.placed(setting).kinds
        sums = {each: kinds.sums(self.exchanges(setting, *each)) for each in dict.fromkeys(rings)}
        return tuple(sums[each] for each in rings)

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
