"""Idle windows: who computes a frozen front, and when, so that the step of a loop is shortest."""

from itertools import combinations_with_replacement, product

import pytest

from autopart.ir.action import Action, Kind
from autopart.schedules import build, executable, simulate, validate
from autopart.schedules.filling import Filled
from autopart.schedules.idle import fill_idle, filled_timeline, steady


def seconds(schedule):
    """Times of stages that share a rank's equally: F = I = W = 1, B = 2."""
    share = schedule.ranks / schedule.stages
    return [{"F": share, "B": 2 * share, "I": share, "W": share}] * schedule.stages


def steps(name, frozen, *, ranks=4, microbatches=8):
    """The step of a loop that the first rank alone fills, and of one that all do."""
    trained = executable(build(name, ranks=ranks, microbatches=microbatches))
    times = seconds(trained)
    alone, every = (fill_idle(trained, times, frozen, ranks=some) for some in ([0], None))
    for loop in (alone, every):
        validate(loop.table())
        assert sum(len(gap) for gaps in loop.fills for gap in gaps) == microbatches * len(frozen)
    return steady(alone, times, frozen).seconds, steady(every, times, frozen).seconds


def test_windows_are_filled_first_and_cost_no_time():
    """At p = 4, m = 8 the first rank waits (p-1)(F+B) = 9 a batch, of which windows of at least 1 take 8 forwards."""
    trained = build("1f1b", ranks=4, microbatches=8)
    loop = fill_idle(trained, seconds(trained), [1.0])
    assert loop.helpers == () and not loop.fills[0][-1], "where the first rank can do it, no other one does"
    found = steady(loop, seconds(trained), [1.0])
    assert found.seconds == pytest.approx(33) and found.bubble == pytest.approx(1 - 32 / 33)
    assert simulate(trained).makespan == 33
    costs = {"F": (1.0,) * 5, "B": (0.0, *(2.0,) * 4)}
    assert simulate(loop.one, costs).makespan > 33, "in an ordinary call the front takes time"


@pytest.mark.parametrize(
    ("name", "frozen", "alone", "every"),
    [
        ("1f1b", [2.0], 40, 33),  # all of the front is in windows: the step is that of the trained layers
        ("1f1b", [4.0], 56, 35),
        ("gpipe", [4.0], 56, 35),
        ("interleaved", [2.0], 40, 30),
        ("zb-h1", [2.0], 40, 29),
        ("zb-v", [2.0], 40, 28),  # no windows: the front is shared out evenly, 24 + 8 x 2 / 4
        ("vhalf", [2.0], 40, 30.5),
    ],
)
def test_how_much_shorter_the_step_is_than_with_the_first_rank_alone(name, frozen, alone, every):
    """p = 4, m = 8; a microbatch of the front takes `frozen`, one of all trained layers 12."""
    assert steps(name, frozen) == (pytest.approx(alone), pytest.approx(every))


def test_pieces_fill_what_whole_microbatches_do_not():
    """At p = 2, m = 4 a front of 4 fits into none of the windows of 3; its pieces of 1 do, and the rest is even."""
    assert steps("1f1b", [4.0], ranks=2, microbatches=4) == (pytest.approx(28), pytest.approx(23))
    assert steps("1f1b", [1.0] * 4, ranks=2, microbatches=4)[1] == pytest.approx(20)
    assert steps("1f1b", [1.0, 1.0])[1] == pytest.approx(33), "no piece is put where a whole microbatch is better"


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "frozen"),
    [
        ("1f1b", 2, 2, [5.0]),
        ("1f1b", 3, 2, [4.0]),
        ("zb-h1", 2, 2, [1.5]),
        ("zb-h1", 3, 2, [4.0]),
        pytest.param("1f1b", 2, 3, [1.7], marks=pytest.mark.soak),
        pytest.param("vhalf", 2, 2, [2.5], marks=pytest.mark.soak),
        pytest.param("zb-h1", 2, 2, [2.0, 1.0], marks=pytest.mark.soak),
    ],
)
def test_small_loops_have_the_shortest_step_there_is(name, ranks, microbatches, frozen):
    """Against every rank and every gap for every microbatch, and for every piece."""
    trained = executable(build(name, ranks=ranks, microbatches=microbatches))
    times = seconds(trained)
    spots = [
        (rank, gaps)
        for rank, row in enumerate(trained.table)
        for gaps in combinations_with_replacement(range(len(row) + 1), len(frozen))
    ]
    best = float("inf")
    for picked in product(spots, repeat=microbatches):
        fills = [[[] for _ in range(len(row) + 1)] for row in trained.table]
        for k, (rank, gaps) in enumerate(picked):
            for piece, gap in enumerate(gaps):
                fills[rank][gap].append(Action(Kind.F, piece, k))
        loop = Filled(trained, tuple(tuple(map(tuple, gaps)) for gaps in fills), len(frozen))
        best = min(best, steady(loop, times, frozen).seconds)
    assert steady(fill_idle(trained, times, frozen), times, frozen).seconds == pytest.approx(best)


def test_messages_and_ranks_that_may_not():
    trained = build("1f1b", ranks=3, microbatches=4)
    times = seconds(trained)
    loop = fill_idle(trained, times, [3.0], ranks=[2], comm=0.25)
    assert loop.helpers == (2,) and loop.home == 0
    assert steady(loop, times, [3.0], 0.25).seconds > steady(loop, times, [3.0]).seconds
    shown = filled_timeline(loop.table(), times, [3.0])
    there = [span for span in shown.spans if span.rank == 2 and span.action.stage == 0]
    assert there and all(span.end - span.start == 3 and span.action.kind is Kind.F for span in there)
    assert fill_idle(build("1f1b", ranks=1, microbatches=2), [{"F": 1.0, "B": 2.0}], [1.0]).helpers == ()
