"""Layouts: elimination equals brute force, for every value of what is kept; z3 certifies it; worse ones are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.solver.eliminate import Table, eliminate, picks, solve
from autopart.solver.layout import IMPOSSIBLE, MOST, Layout, Moves, Option, Unit, evaluate, tree
from autopart.solver.proof import prove
from tests.tensor_cases import steps

# ---- an independent oracle -------------------------------------------------------------------------------------------


def cheapest(moves: Moves, start: int, needed: set[int]) -> float:
    """The cheapest set of moves by which all of `needed` can be reached: every set is tried."""
    edges = [(i, j) for i in range(len(moves)) for j in range(len(moves)) if i != j and moves[i][j] < IMPOSSIBLE]
    best = float("inf")
    for count in range(len(edges) + 1):
        for chosen in combinations(edges, count):
            there = {start}
            for _ in moves:
                there |= {j for i, j in chosen if i in there}
            if needed <= there:
                best = min(best, sum(moves[i][j] for i, j in chosen))
    return best


def oracle(layout: Layout, chosen: Sequence[int], price: float) -> float:
    options = [unit.options[pick] for unit, pick in zip(layout.units, chosen, strict=True)]
    total: float = sum(option.time + round(option.memory * price) for option in options)
    for value, moves in layout.moves:
        makers = zip(layout.units, options, strict=True)
        (start,) = (o.gives[u.makes.index(value)] for u, o in makers if value in u.makes)
        reads = [zip(u.reads, o.needs, strict=True) for u, o in zip(layout.units, options, strict=True)]
        needed = {how for pairs in reads for name, how in pairs if name == value and how is not None}
        total += cheapest(moves, start, needed) if len(needed) <= MOST else float("inf")
    return total


def random_layout(seed: int) -> Layout:
    """A few units in order, each reading some of the values made before it, some of them twice."""
    random = Random(seed)
    values: list[str] = []
    units = []
    count: dict[str, int] = {}
    for number in range(random.randint(2, 5)):
        reads = tuple(random.choice(values) for _ in range(random.randint(0, 2))) if values else ()
        makes = tuple(f"v{number}{i}" for i in range(random.randint(0 if values else 1, 2)))
        count |= {name: random.randint(1, 3) for name in makes}
        options = tuple(
            Option(
                tuple(None if random.random() < 0.15 else random.randrange(count[name]) for name in reads),
                tuple(random.randrange(count[name]) for name in makes),
                random.randint(0, 9),
                random.randint(0, 9),
            )
            for _ in range(random.randint(1, 3))
        )
        units.append(Unit(f"u{number}", reads, makes, options))
        values += makes
    moves = tuple((name, _prices(random, count[name])) for name in values)
    return Layout(tuple(units), moves)


def _prices(random: Random, count: int) -> Moves:
    def price() -> int:
        return IMPOSSIBLE if random.random() < 0.3 else random.randint(1, 9)

    return tuple(tuple(0 if i == j else price() for j in range(count)) for i in range(count))


# ---- elimination -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 2.5]))
def test_elimination_equals_brute_force(seed: int, price: float) -> None:
    layout = random_layout(seed)
    keep = tuple(unit.name for unit in layout.units[:2])
    found = solve(layout, keep, price)
    every = [range(len(unit.options)) for unit in layout.units]
    costs = {chosen: oracle(layout, chosen, price) for chosen in product(*every)}
    for kept in product(*every[:2]):
        least = min(cost for chosen, cost in costs.items() if chosen[:2] == kept)
        options = dict(zip((f"u:{name}" for name in keep), kept, strict=True))
        assert found.least(options) == (None if least == float("inf") else least)
        values = found.best(options)
        assert (values is None) == (least == float("inf"))
        if values is not None:
            chosen = picks(layout, values)
            assert chosen[:2] == kept and costs[chosen] == least == evaluate(layout, chosen, price)


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_z3_finds_nothing_cheaper_and_notices_what_is_dearer(seed: int) -> None:
    layout = random_layout(seed)
    values = solve(layout).best()
    if values is None:
        return
    best = picks(layout, values)
    prove(layout, best)
    every = product(*(range(len(unit.options)) for unit in layout.units))
    worse = [c for c in every if evaluate(layout, best) < oracle(layout, c, 0.0) < float("inf")]  # type: ignore[operator]
    for chosen in worse[:2]:
        with pytest.raises(AssertionError, match="cheaper"):
            prove(layout, chosen)


def test_z3_certifies_the_body_of_an_mlp() -> None:
    from autopart.cluster import Cluster
    from autopart.solver.axis import Axis
    from autopart.solver.tensor import layout_of

    _, found, batch = steps("mlp")
    cluster = Cluster.uniform(2, 2**30, 1e6, 1e9, 1e9, 1e-6)
    layout = layout_of(found[0].body, found[0].segment, Axis("tp", 2, cluster, batch)).layout
    values = solve(layout).best()
    assert values is not None
    prove(layout, picks(layout, values))


def test_a_tree_passes_through_what_nobody_needs_where_that_is_cheaper() -> None:
    moves = ((0, 1, 9, 9), (9, 0, 2, 2), (9, 9, 0, 9), (9, 9, 9, 0))
    both, one, none = (tree(moves, 0, needed) for needed in ({2, 3}, {2}, {0}))
    assert both is not None and both.cost == 5 and both.steps[0] == (0, 1)
    assert one is not None and one.cost == 3
    assert none is not None and none.steps == ()
    assert tree(((0, IMPOSSIBLE), (1, 0)), 0, {1}) is None and tree(((0, IMPOSSIBLE), (1, 0)), 1, {0, 1}) is not None


def test_a_graph_without_a_good_order_is_refused_before_it_is_tried() -> None:
    names = [f"x{i}" for i in range(12)]
    tables = [Table((a, b), torch.zeros(30, 30, dtype=torch.float64)) for a, b in combinations(names, 2)]
    with pytest.raises(MemoryError, match="too entangled"):
        eliminate(tables)
