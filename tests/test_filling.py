"""Filled loops: forwards of a frozen front go where ranks wait, and training stays what it was."""

import random
from itertools import combinations, pairwise, permutations

import pytest

from autopart.ir.action import Action, Kind
from autopart.schedules import build, executable, read, simulate, validate, versions
from autopart.schedules.filling import Filled
from autopart.schedules.progress import check
from autopart.solver.front import front_split


def somewhere(name: str, ranks: int, microbatches: int, front: int, seed: int) -> Filled:
    """A loop in which some rank or other performs the front of each microbatch, some time or other."""
    chance = random.Random(seed)
    trained = executable(build(name, ranks=ranks, microbatches=microbatches))
    fills: list[list[list[Action]]] = [[[] for _ in range(len(row) + 1)] for row in trained.table]
    for k in range(microbatches):
        gaps = fills[chance.randrange(ranks)]
        for piece, gap in enumerate(sorted(chance.choices(range(len(gaps)), k=front))):
            gaps[gap].append(Action(Kind.F, piece, k))
    return Filled(trained, tuple(tuple(map(tuple, gaps)) for gaps in fills), front)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "front"),
    [
        ("1f1b", 1, 3, 1),
        ("1f1b", 3, 5, 1),
        ("gpipe", 4, 4, 2),
        ("interleaved", 2, 4, 1),
        ("zb-h1", 3, 6, 2),
        ("zb-v", 2, 4, 1),
        ("dualpipev", 2, 4, 1),
    ],
)
def test_tables_end_on_any_transport_and_train_on_one_version(name, ranks, microbatches, front):
    """Whoever performs the front, and whichever stages read it; a table says all of it."""
    for seed in range(3):
        filled = somewhere(name, ranks, microbatches, front, seed)
        table = filled.table()
        validate(table)
        validate(filled.one)
        again = Filled.read(read(str(table)), microbatches)
        assert again is not None
        assert (again.fills, again.front, again.table(), again.place) == (filled.fills, front, table, filled.place)
        used = versions(table)
        assert all(version == a.microbatch // microbatches * (a.stage >= front) for a, version in used.items())
        every = ((a, b) for a, b in permutations(range(filled.stages), 2) if b >= front)
        for edges in (frozenset(), frozenset(every)):
            for batches in (1, 2, 4):
                check(filled.rows(edges, batches), filled.place)


def test_what_a_helper_makes_is_sent_at_once_and_received_in_the_batch_before():
    """Of stages 0 (frozen), 1 and 2, rank 1 has a copy of the first as stage 3; only rank 1 trains stage 2."""
    trained = build("1f1b", ranks=2, microbatches=2)
    fills = (((), (), (Action(Kind.F, 0, 1),), (), ()), ((Action(Kind.F, 0, 0),), (), (), (), ()))
    filled = Filled(trained, fills)
    assert (filled.home, filled.helpers, filled.place, filled.number(1, 0)) == (0, (1,), (0, 0, 1, 1), 3)
    rows = filled.rows(frozenset({(0, 1), (3, 1), (1, 2), (2, 1)}), 2)
    assert ",".join(map(str, rows[0][:12])) == (
        "1RECV0>3,0F1,1RECV2>3,1F0,1SEND0>2,1F1,1SEND1>2,0F3,1RECV0>2,1B0,1RECV1>2,1B1"
    )
    assert ",".join(map(str, rows[1][:6])) == "3F0,3SEND0>1,3F2,3SEND2>1,2RECV0>1,2F0"
    assert not any(action.stage == 3 for action in rows[1][6:]), "no batch comes after the second"
    both = filled.rows(frozenset({(0, 1), (3, 1), (0, 2), (3, 2), (1, 2), (2, 1)}), 1)
    assert [str(a) for a in both[1][:3]] == ["3F0", "3SEND0>1", "2RECV1>0"], "on its own rank it is there"


def test_other_tables_are_not_filled_loops():
    fills = (((), (), (Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)), (), ()), ((),) * 5)
    filled = Filled(build("1f1b", ranks=2, microbatches=2), fills)
    table = filled.table()
    assert Filled.read(table, 3) is None and Filled.read(build("paci", ranks=2, microbatches=6), 2) is None
    text = str(table)
    for before, after in (("1F2,1F3", "1F3,1F2"), ("0F4,0F5", "0F5,0F4"), ("1B4,1B5", "1B5,1B4")):
        assert before in text and Filled.read(read(text.replace(before, after)), 2) is None
    pieces = Filled(filled.trained, (((),) * 5, ((Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)), *((),) * 4)), 2)
    apart = (((Action(Kind.F, 1, 0), Action(Kind.F, 1, 1)), *((),) * 4), pieces.fills[1])
    assert Filled.read(Filled(filled.trained, apart, 2).table(), 2) is None, "pieces of a microbatch on two ranks"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("1F0", "0F0", "0F0 is there twice"),
        ("0F1,", "", "0F1 is missing"),
        ("1B0", "0B0", "0B0 is of a stage that trains nothing, and has forwards alone"),
        ("anywhere: 1", "anywhere: 3", "anywhere must be fewer than all 3 stages"),
    ],
)
def test_tables_with_a_front_are_checked(before, after, message):
    fills = (((), (), (Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)), (), ()), ((),) * 5)
    text = str(Filled(build("1f1b", ranks=2, microbatches=2), fills).table())
    assert before in text
    with pytest.raises(ValueError, match=message):
        validate(read(text.replace(before, after, 1)))


def test_pieces_that_always_come_together_need_not_be_apart():
    one, two, three, four = (Action(Kind.F, piece, 0) for piece in range(4))
    trained = build("1f1b", ranks=1, microbatches=2)
    later = tuple(Action(Kind.F, piece, 1) for piece in range(4))
    fills = (((one, two), (), (three, four), later, ()),)
    assert Filled(trained, fills, 4).parted() == (0, 2)


def test_stages_that_train_nothing_hold_nothing():
    filled = somewhere("1f1b", 2, 4, 1, seed=0)
    assert filled.helpers == (1,)
    assert simulate(filled.table()).peak_activations == simulate(filled.trained).peak_activations


def test_the_split_behind_the_front_is_the_best():
    seconds = [9.0, 9.0, 3.0, 1.0, 4.0, 1.0, 5.0, 2.0]
    for ranks in (1, 2, 3, 4):
        cuts = [(2, *more, 8) for more in combinations(range(3, 8), ranks - 1)]
        best = min(max(sum(seconds[a:b]) for a, b in pairwise(c)) for c in cuts)
        starts = (*front_split(seconds, 2, ranks), 8)
        assert max(sum(seconds[a:b]) for a, b in pairwise(starts)) == best
    with pytest.raises(ValueError, match="6 layers that are trained cannot make the schedule's 7 stages"):
        front_split(seconds, 2, 7)
