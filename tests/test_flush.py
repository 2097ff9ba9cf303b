"""GPipe and 1F1B against the closed forms, published figures and torch's own tables."""

import pytest

from autopart.schedules import build, lower, simulate, validate
from autopart.schedules.dependencies import chain

# name, ranks, microbatches, makespan, bubble, peaks, sends at F = I = W = 1
GOLDEN = [
    ("gpipe", 2, 4, 15, 3, (4, 4), 8),
    ("gpipe", 4, 4, 21, 9, (4,) * 4, 24),
    ("gpipe", 4, 8, 33, 9, (8,) * 4, 48),
    ("gpipe", 8, 16, 69, 21, (16,) * 8, 224),
    ("1f1b", 2, 4, 15, 3, (2, 1), 8),
    ("1f1b", 4, 4, 21, 9, (4, 3, 2, 1), 24),
    ("1f1b", 4, 8, 33, 9, (4, 3, 2, 1), 48),
    ("1f1b", 8, 16, 69, 21, (8, 7, 6, 5, 4, 3, 2, 1), 224),
]
SIZES = [(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "makespan", "bubble", "peaks", "sends"), GOLDEN)
def test_golden_figures(name, ranks, microbatches, makespan, bubble, peaks, sends):
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    timeline = simulate(schedule)
    assert (timeline.makespan, timeline.flush_bubble, timeline.span_bubble) == (makespan, bubble, bubble)
    assert timeline.peak_activations == peaks
    lowered = lower(schedule, chain(ranks))
    assert sum(action.kind == "SEND" for row in lowered.table for action in row) == sends


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_forms_of_bubble_and_peak(name):
    for p, m in SIZES:
        schedule = build(name, ranks=p, microbatches=m)
        validate(schedule)
        timeline = simulate(schedule, costs={"F": 3, "I": 4, "W": 1})
        assert timeline.flush_bubble == timeline.span_bubble == (p - 1) * (3 + 5)
        assert timeline.makespan == (m + p - 1) * (3 + 5)
        assert timeline.peak_activations == tuple(m if name == "gpipe" else min(m, p - r) for r in range(p))


def test_rows_are_those_of_the_papers():
    assert str(build("gpipe", ranks=2, microbatches=2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert str(build("1f1b", ranks=3, microbatches=4)).splitlines() == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


def test_forward_only():
    schedule = build("forward", ranks=3, microbatches=2)
    validate(schedule)
    assert str(schedule) == "0F0,0F1\n1F0,1F1\n2F0,2F1"
    timeline = simulate(schedule, costs={"F": 2})
    assert (timeline.makespan, timeline.peak_activations) == (8, (0, 0, 0))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equals_the_tables_of_torch(name):
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    family = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[name]
    if not hasattr(family, "_get_pipeline_order"):
        pytest.skip("this torch has no such table")
    for p, m in SIZES:
        if m < p:
            continue  # torch's 1F1B has no table there
        oracle = object.__new__(family)
        oracle._num_stages, oracle._n_microbatches = p, m
        order = oracle._get_pipeline_order()
        ours = build(name, ranks=p, microbatches=m)
        # The last rank of torch's 1F1B begins at microbatch 1 and ends at one that is not there.
        for rank in range(p - 1 if name == "1f1b" else p):
            theirs = [str(action) for action in order[rank] if action is not None and "REDUCE" not in str(action)]
            assert theirs == [str(action) for action in ours.table[rank]], (p, m, rank)
