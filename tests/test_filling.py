"""Filled loops: forwards of a frozen front go where the first rank waits, and training stays what it was."""

from itertools import combinations, pairwise, permutations

import pytest

from autopart.ir.action import Kind
from autopart.schedules import build, read, simulate, validate, versions
from autopart.schedules.filling import Filled, fill_idle
from autopart.schedules.progress import check
from autopart.solver.front import front_split


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (3, 5), (4, 8)])
def test_tables_end_on_any_transport_and_train_on_one_version(name, ranks, microbatches):
    filled = fill_idle(build(name, ranks=ranks, microbatches=microbatches), [{"F": 1.0, "B": 2.0}] * ranks, 1.5)
    table = filled.table()
    validate(table)
    validate(filled.one)
    assert sum(filled.fills) == microbatches
    again = Filled.read(read(str(table)), microbatches)
    assert again is not None and (again.fills, again.table()) == (filled.fills, table)
    used = versions(table)
    assert all(version == a.microbatch // microbatches for a, version in used.items() if a.stage)
    for edges in (frozenset(), frozenset(permutations(range(ranks + 1), 2))):
        for batches in (1, 2, 4):
            check(filled.rows(edges, batches), filled.one.place)


def test_windows_are_filled_first_and_cost_no_time():
    """At p = 4, m = 8 the first rank waits (p-1)(F+B) = 9 a batch, of which windows of at least 1 take 8 forwards."""
    trained = build("1f1b", ranks=4, microbatches=8)
    filled = fill_idle(trained, [{"F": 1.0, "B": 2.0}] * 4, 1.0)
    assert filled.fills[-1] == 0 and sum(map(bool, filled.fills)) > 1
    costs = {"F": (1.0,) * 5, "B": (0.0, *(2.0,) * 4)}
    assert simulate(filled.table(), costs).makespan == 8 + 3 * 33, "only the first batch's frozen forwards take time"
    assert simulate(filled.one, costs).makespan > 33, "in an ordinary call each batch's do"
    assert fill_idle(trained, [{"F": 1.0, "B": 2.0}] * 4, 100.0).fills[-1] == 8, "what fits nowhere comes at the end"


def test_other_tables_are_not_filled_loops():
    table = fill_idle(build("1f1b", ranks=2, microbatches=2), [{"F": 1.0, "B": 2.0}] * 2, 1.0).table()
    assert Filled.read(table, 3) is None and Filled.read(build("paci", ranks=2, microbatches=6), 2) is None
    text = str(table).replace("0F2,0F3", "0F3,0F2")
    assert text != str(table) and Filled.read(read(text), 2) is None
    assert [a for a in table.table[0][:2] if a.kind is Kind.F and a.stage == 0]


def test_the_split_behind_the_front_is_the_best():
    seconds = [9.0, 9.0, 3.0, 1.0, 4.0, 1.0, 5.0, 2.0]
    for ranks in (1, 2, 3, 4):
        cuts = [(2, *more, 8) for more in combinations(range(3, 8), ranks - 1)]
        best = min(max(sum(seconds[a:b]) for a, b in pairwise(c)) for c in cuts)
        starts = (*front_split(seconds, 2, ranks), 8)
        assert max(sum(seconds[a:b]) for a, b in pairwise(starts)) == best
    with pytest.raises(ValueError, match="6 layers that are trained cannot be on 7 pipeline ranks"):
        front_split(seconds, 2, 7)
