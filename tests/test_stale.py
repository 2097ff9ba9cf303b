"""Schedules without a flush: the steady period, the bounds of staleness, planted faults in the updates."""

from dataclasses import replace

import pytest

from autopart.ir.action import Boundary, Kind, Weights
from autopart.schedules import build, read, simulate, staleness, validate, versions

NAMES = ("pipedream", "2bw", "paci", "pb")


@pytest.mark.parametrize("name", NAMES)
def test_steady_state_has_no_bubble(name):
    """Twice as many microbatches take just that much longer: 3 each at F = I = W, plus the steps."""
    for ranks in (1, 2, 4):
        short, long = (build(name, ranks=ranks, microbatches=m) for m in (24, 48))
        validate(long)
        assert (long.weights, long.optimizer) != (Weights.SYNC, Boundary.BARRIER)
        assert simulate(long).makespan - simulate(short).makespan == 24 * 3
        assert read(str(long), name=name) == long


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_paci_bounds_what_a_microbatch_crosses(accumulate):
    for ranks in (2, 4, 6):
        schedule = build("paci", ranks=ranks, microbatches=60, accumulate=accumulate)
        bounds = [-(-(ranks - 1 - rank) // accumulate) for rank in range(ranks)]
        assert all(each.crossed <= bound for each, bound in zip(staleness(schedule), bounds, strict=True))


def test_every_batch_of_2bw_uses_one_version_which_is_still_there():
    """w(t+1) = w(t) - lr * g(w(t-1)): batch t computes with version t - 1, made before and kept until it is done."""
    ranks, batch = 4, 5
    schedule = build("2bw", ranks=ranks, microbatches=6 * batch, accumulate=batch)
    used = versions(schedule)
    for row in schedule.table:
        steps = 0
        for action in row:
            if action.kind is Kind.OPT:
                assert action.microbatch == steps
                steps += 1
            else:
                number = action.microbatch // batch
                assert used[action] == max(number - 1, 0)
                assert steps - 1 <= used[action] <= steps, "one of the two newest"


def test_a_stashed_backward_uses_the_version_of_its_forward():
    schedule = build("pipedream", ranks=3, microbatches=8)
    used = versions(schedule)
    for action, version in used.items():
        if action.kind is Kind.B:
            assert version == used[replace(action, kind=Kind.F)]
    behind = [{n - version for (n, version) in _backwards(used, stage)} for stage in range(3)]
    assert [max(each) for each in behind] == [2, 1, 0], "the delay of a gradient is p-1-r steps"


def _backwards(used, stage):
    return [(a.microbatch, version) for a, version in used.items() if a.kind is Kind.B and a.stage == stage]


def test_pipelined_backprop_meets_the_newest_weights():
    used = versions(build("pb", ranks=3, microbatches=12))
    for stage in range(3):
        forwards = [version for action, version in used.items() if action.kind is Kind.F and action.stage == stage]
        backwards = [version for action, version in used.items() if action.kind is Kind.B and action.stage == stage]
        assert forwards == [max(0, number - 2 * (2 - stage)) for number in range(12)]
        assert backwards == list(range(12))


def test_a_flush_has_one_version():
    schedule = build("1f1b", ranks=3, microbatches=4)
    assert set(versions(schedule).values()) == {0}
    assert all((each.crossed, each.live) == (0, 1) for each in staleness(schedule))


TEXT = str(build("paci", ranks=2, microbatches=4, accumulate=2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1OPT0,", "", "rank 1: 1OPT0 is missing"),
        ("0B1,0OPT0", "0OPT0,0B1", "0OPT0 comes before 0B1, which it needs"),
        ("1B1,1OPT0,1F2,1B2", "1B1,1F2,1B2,1OPT0", "1B2 comes before 1OPT0, which it needs"),
        ("0OPT1", "0OPT1,0OPT2", "rank 1: 1OPT2 is missing"),
        ("0OPT1", "0OPT1,0OPT1", "0OPT1 is there twice"),
        ("0OPT1", "0OPT1s1", "0OPT1s1 names slice 1"),
    ],
)
def test_planted_faults(old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        validate(replace(read(TEXT.replace(old, new, 1)), slices=1))


def test_a_forward_of_2bw_may_not_come_before_the_version_it_uses():
    text = "weights: double\n0F0,0F1,0F2,0B0,0OPT0,0B1,0OPT1,0B2,0OPT2"
    with pytest.raises(ValueError, match="0F2 comes before 0OPT0, which it needs"):
        validate(read(text))
    validate(read(text.replace("double", "stash")))


def test_updates_that_do_not_divide_the_microbatches():
    text = "weights: current\n0F0,0B0,0F1,0B1,0OPT0,0F2,0B2,0OPT1"
    with pytest.raises(ValueError, match="2 OPTs a stage, which do not divide 3 microbatches"):
        validate(read(text))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "2bw",
            {"microbatches": 9},
            "9 microbatches; it takes a multiple of 4, the microbatches of one step, such as 12",
        ),
        ("paci", {"microbatches": 10}, "10 microbatches; it takes a multiple of 3"),
        ("2bw", {"accumulate": 3}, "3 microbatches a batch on 4 ranks; it takes at least 4"),
        ("paci", {"accumulate": 0}, "accumulate must be at least 1"),
    ],
)
def test_what_they_do_not_take(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **{"ranks": 4, "microbatches": 12, **options})


def test_several_iterations_of_a_stream_are_a_longer_stream():
    with pytest.raises(ValueError, match="'pb' steps inside its table; build it with more microbatches"):
        simulate(build("pb", ranks=2, microbatches=4), iterations=2)
