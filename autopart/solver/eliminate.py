"""Elimination: the exact minimum of a `Layout`, by dynamic programming over its graph.

Every unit is a variable (its option), and so is, for every value, the set of placements in which it is needed. Costs
are tables over few variables each:

    time(o) + price * memory(o)                 over a unit
    tree(given(o), s)                           over a value's maker and its set
    0 if s has the placement needed(o), else inf    over the set and a reader

A variable is eliminated by adding up the tables that have it and taking the minimum over it; what is left is a table
over its neighbours (bucket elimination; Dechter 1999). Forward and backward of a transformer layer need tables of some
millions of entries. Variables in `keep` stay: the result is the minimum for each of their values, so that what is
outside of the body can be chosen later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import isfinite, log2, prod
from random import Random

import torch

from autopart.solver.layout import MOST, Layout, Moves, Unit, cheapest

Variable = str
"""``u:name`` for a unit, ``s:name`` for a value's set."""


@dataclass(frozen=True, slots=True)
class Table:
    """Costs over some variables, a dim each, in their order."""

    variables: tuple[Variable, ...]
    costs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Eliminated:
    """What is left: `costs` has a dim for each of `keep`; `parts` the tables that each variable was eliminated from."""

    keep: tuple[Variable, ...]
    costs: torch.Tensor
    parts: tuple[tuple[Variable, tuple[Table, ...]], ...]

    def least(self, given: Mapping[Variable, int] | None = None) -> int | None:
        """The least cost where kept variables have the values `given`; None if there is no way.

        Sums are of float64: exact up to 2**53.
        """
        found = float(self.costs[tuple((given or {}).get(v, slice(None)) for v in self.keep)].min())
        return int(found) if isfinite(found) else None

    def best(self, given: Mapping[Variable, int] | None = None) -> dict[Variable, int] | None:
        """The values of all variables at that cost; of several that are equally good, the first."""
        if self.least(given) is None:
            return None
        costs = self.costs
        for dim, variable in enumerate(self.keep):
            if given and variable in given:
                costs = costs.narrow(dim, given[variable], 1)
        at = torch.unravel_index(costs.argmin(), costs.shape)
        values = {v: (given or {}).get(v, int(i)) for v, i in zip(self.keep, at, strict=True)}
        for variable, tables in reversed(self.parts):
            column = sum(
                t.costs[tuple(slice(None) if v == variable else values[v] for v in t.variables)] for t in tables
            )
            assert isinstance(column, torch.Tensor)  # a variable is in some table
            values[variable] = int(column.argmin())
        return values


def eliminate(tables: Sequence[Table], keep: Sequence[Variable] = (), largest: int = 1 << 27) -> Eliminated:
    """Add up the tables and minimise over every variable but those of `keep`, which must be in some table.

    Raises MemoryError, before it begins, where a table would pass `largest` entries.
    """
    sizes = {v: n for table in tables for v, n in zip(table.variables, table.costs.shape, strict=True)}
    settled = {v for v, n in sizes.items() if n == 1}.difference(keep)
    loose = [_without(table, settled) for table in tables]
    order, entries = elimination_order(loose, keep, {v: n for v, n in sizes.items() if v not in settled})
    entries = max(entries, prod(sizes[v] for v in keep))
    if entries > largest:
        raise MemoryError(f"a table of {entries} entries: this graph is too entangled to be solved exactly")
    left: dict[int, Table] = {}  # by number, in the order in which they were made
    having: dict[Variable, list[int]] = {variable: [] for variable in sizes}

    def add(number: int, table: Table) -> None:
        left[number] = table
        for variable in table.variables:
            having[variable].append(number)

    for number, table in enumerate(loose):
        add(number, table)
    nothing = torch.zeros(1, dtype=torch.float64)
    parts: list[tuple[Variable, tuple[Table, ...]]] = [(v, (Table((v,), nothing),)) for v in settled]
    for number, variable in enumerate(order, start=len(loose)):
        mine = tuple(left.pop(n) for n in having[variable] if n in left)
        whole = _join(mine, sizes)
        dim = whole.variables.index(variable)
        add(number, Table(whole.variables[:dim] + whole.variables[dim + 1 :], whole.costs.amin(dim)))
        parts.append((variable, mine))
    kept = Table(tuple(keep), torch.zeros([sizes[v] for v in keep], dtype=torch.float64))
    return Eliminated(tuple(keep), _join([kept, *left.values()], sizes).costs, tuple(parts))


def bounds(tables: Sequence[Table], keep: Sequence[Variable], largest: int) -> tuple[Table, ...]:
    """Tables over `keep` whose sum is nowhere above the least over all other variables, made within `largest` entries.

    Where joining all tables that have a variable would take more, they are joined in groups, of each of which the
    minimum is taken by itself (mini-bucket elimination; Dechter and Rish 2003).
    """
    sizes = {v: n for table in tables for v, n in zip(table.variables, table.costs.shape, strict=True)}
    order, _ = elimination_order(tables, keep, sizes)
    left = list(tables)
    for variable in order:
        mine = [table for table in left if variable in table.variables]
        left = [table for table in left if variable not in table.variables]
        groups: list[list[Table]] = []
        for table in sorted(mine, key=lambda each: -each.costs.numel()):
            fitting = (group for group in groups if _entries((*group, table), sizes) <= largest)
            group = next(fitting, None)
            if group is None:
                groups.append(group := [])
            group.append(table)
        for whole in (_join(group, sizes) for group in groups):
            dim = whole.variables.index(variable)
            left.append(Table(whole.variables[:dim] + whole.variables[dim + 1 :], whole.costs.amin(dim)))
    return tuple(left)


def _entries(tables: Iterable[Table], sizes: Mapping[Variable, int]) -> int:
    """The entries of the tables' sum."""
    return prod(sizes[v] for v in {v for table in tables for v in table.variables})


def _without(table: Table, settled: Collection[Variable]) -> Table:
    """A table without variables that have one value, which tie nothing together."""
    kept = [(v, n) for v, n in zip(table.variables, table.costs.shape, strict=True) if v not in settled]
    return Table(tuple(v for v, _ in kept), table.costs.reshape([n for _, n in kept]))


def elimination_order(
    tables: Sequence[Table], keep: Collection[Variable], sizes: Mapping[Variable, int]
) -> tuple[list[Variable], int]:
    """An order that keeps tables small, and the entries of the largest: the variable that joins least anew is first.

    (The weighted minimum fill-in of Kjaerulff 1990: what two variables joined cost is the product of their log sizes.)
    Where that makes a table of more than `EASY` entries, and not of so many that there is no hope, it is the best of
    some more: with what is joined counted for each bit of the variable that goes, and that a little disturbed, each
    time in another way.
    """
    around = _neighbours(tables)
    bits = {v: log2(n) + 1e-9 for v, n in sizes.items()}
    first = _order(around, keep, sizes, bits, dict.fromkeys(sizes, 1.0))
    if not EASY < first[1] < HOPELESS:
        return first
    orders = [first, _order(around, keep, sizes, bits, bits)]
    for seed in range(DISTURBED):
        draw = Random(seed)
        worth = {v: bits[v] / (1 + draw.random() * 0.3) for v in sorted(sizes)}
        orders.append(_order(around, keep, sizes, bits, worth))
    return min(orders, key=lambda found: found[1])


EASY, HOPELESS, DISTURBED = 1 << 22, 1 << 48, 8
"""Up to and from how many entries of a table no other order is looked for, and how many disturbed ones are."""


def _order(
    graph: Mapping[Variable, Collection[Variable]],
    keep: Collection[Variable],
    sizes: Mapping[Variable, int],
    bits: Mapping[Variable, float],
    worth: Mapping[Variable, float],
) -> tuple[list[Variable], int]:
    """First what joins least anew, as counted in `bits`, for what its going is `worth`; the largest table's entries."""
    around = {variable: set(near) for variable, near in graph.items()}

    def fill(variable: Variable) -> float:
        near = sorted(around[variable])
        joined = sum(bits[a] * sum(bits[b] for b in near[i + 1 :] if b not in around[a]) for i, a in enumerate(near))
        return joined / worth[variable]

    waiting = {v: fill(v) for v in sizes.keys() - set(keep)}
    heap = [(filled, variable) for variable, filled in waiting.items()]
    heapify(heap)
    order: list[Variable] = []
    largest = 1
    while heap:
        filled, variable = heappop(heap)
        if waiting.get(variable) != filled:  # gone, or counted anew
            continue
        del waiting[variable]
        order.append(variable)
        near = around.pop(variable)
        largest = max(largest, prod(sizes[v] for v in near) * sizes[variable])
        for other in _joined(around, near, variable) & waiting.keys():
            waiting[other] = fill(other)
            heappush(heap, (waiting[other], other))
    return order, largest


def _joined(around: dict[Variable, set[Variable]], near: set[Variable], gone: Variable) -> set[Variable]:
    """Join all that was near what is gone; the variables for which this changes what their going would join."""
    pairs = []
    for one in near:
        fresh = near - around[one] - {one}
        pairs += [(one, other) for other in fresh if one < other]
        around[one] |= fresh
        around[one].discard(gone)
    return near.union(*(around[one] & around[other] for one, other in pairs))


def solve(layout: Layout, keep: Sequence[str] = (), price: float = 0.0, largest: int = 1 << 27) -> Eliminated:
    """A layout's minimum over all but the units `keep`, at a price of a byte. The variable of a unit is ``u:name``.

    Raises MemoryError as `eliminate` does.
    """
    return eliminate(tuple(tables_of(layout, price)), tuple(f"u:{name}" for name in keep), largest)


def picks(layout: Layout, values: Mapping[Variable, int]) -> tuple[int, ...]:
    """The option of every unit."""
    return tuple(values[f"u:{unit.name}"] for unit in layout.units)


def tables_of(layout: Layout, price: float = 0.0) -> Iterator[Table]:
    """What a layout costs at a price of a byte, as tables of few variables each."""
    moves = dict(layout.moves)
    readers: dict[str, list[tuple[Unit, int]]] = {}
    for unit in layout.units:
        costs = torch.tensor([option.cost(price) for option in unit.options], dtype=torch.float64)
        yield Table((f"u:{unit.name}",), costs)
        for place, value in enumerate(unit.reads):
            readers.setdefault(value, []).append((unit, place))
    for unit in layout.units:
        for place, value in enumerate(unit.makes):
            if value in readers:
                yield from _value_tables(value, unit, place, readers[value], moves[value])


def _value_tables(
    value: str, maker: Unit, made: int, readers: Sequence[tuple[Unit, int]], moves: Moves
) -> Iterator[Table]:
    wanted = [{o.needs[place] for o in unit.options} for unit, place in readers]
    sets = [*_sets(wanted)]
    given = [option.gives[made] for option in maker.options]
    trees = {how: cheapest(moves, how) for how in set(given)}
    costs = {
        how: [found[rest].cost if (rest := needed - {how}) in found else torch.inf for needed in sets]
        for how, found in trees.items()
    }
    rows = torch.tensor([costs[how] for how in given], dtype=torch.float64)
    yield Table((f"u:{maker.name}", f"s:{value}"), rows)
    for unit, place in readers:
        fits = [[o.needs[place] is None or o.needs[place] in needed for o in unit.options] for needed in sets]
        free = torch.zeros(len(sets), len(unit.options), dtype=torch.float64)
        yield Table((f"s:{value}", f"u:{unit.name}"), free.masked_fill(~torch.tensor(fits), torch.inf))


def _sets(wanted: Sequence[Collection[int | None]]) -> Iterator[frozenset[int]]:
    """Every set of placements that readers can need together, who each have one of `wanted`."""
    places = sorted({how for needs in wanted for how in needs if how is not None})
    least = 0 if all(None in needs for needs in wanted) else 1
    for count in range(least, min(len(wanted), len(places), MOST) + 1):
        yield from map(frozenset, combinations(places, count))


def _neighbours(tables: Iterable[Table]) -> dict[Variable, set[Variable]]:
    found: dict[Variable, set[Variable]] = {}
    for table in tables:
        for variable in table.variables:
            found.setdefault(variable, set()).update(v for v in table.variables if v != variable)
    return found


def _join(tables: Sequence[Table], sizes: Mapping[Variable, int]) -> Table:
    """The sum of tables, over all of their variables."""
    variables = tuple(dict.fromkeys(v for table in tables for v in table.variables))
    costs = torch.zeros([sizes[v] for v in variables], dtype=torch.float64)
    for table in tables:
        order = sorted(range(len(table.variables)), key=lambda i: variables.index(table.variables[i]))
        shape = [sizes[v] if v in table.variables else 1 for v in variables]
        costs += table.costs.permute(order).reshape(shape)
    return Table(variables, costs)
