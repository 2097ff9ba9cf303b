"""GIS, ZeroPP and Hanayo against their laws of bubble and memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autopart.ir.action import Kind, Schedule
from autopart.schedules import build, simulate, validate


def test_gis_holds_three_quarters_of_1f1b() -> None:
    for p in (2, 4, 6, 8):
        for v in (1, 2, 3):
            timeline = simulate(build("gis", ranks=p, microbatches=3 * p, chunks=v))
            assert timeline.peak_activations[0] == pytest.approx(p * (v + 1) / (2 * v))
            assert list(timeline.peak_activations) == sorted(timeline.peak_activations, reverse=True)


def test_gis_with_a_group_of_all_ranks_is_as_fast_as_zb_h1() -> None:
    for p in (2, 4, 8):
        timelines = [simulate(build(name, ranks=p, microbatches=2 * p)) for name in (f"gis(group={p})", "zb-h1")]
        assert timelines[0].makespan == timelines[1].makespan


def switches(schedule: Schedule) -> int:
    """How often the busiest rank turns to another of its chunks."""
    stages = [[action.stage for action in row if action.kind is not Kind.W] for row in schedule.table]
    return max(sum(a != b for a, b in pairwise(row)) for row in stages)


def test_zeropp_switches_chunks_rarely() -> None:
    for p, m, u in ((4, 8, 4), (4, 16, 8), (8, 32, 8)):
        schedule = build("zeropp", ranks=p, microbatches=m, unit=u)
        timeline = simulate(schedule)
        assert timeline.flush_bubble == p - 1
        assert max(timeline.peak_activations) <= u
        assert switches(schedule) < switches(build("interleaved", ranks=p, microbatches=m)) / 3


def test_hanayo_approaches_no_bubble_with_more_waves() -> None:
    for p, waves in ((4, (6, 3.25, 1.625)), (8, (14, 7.5, 3.75))):
        for count, bubble in zip((1, 2, 4), waves, strict=True):
            timeline = simulate(build("hanayo", ranks=p, microbatches=p, waves=count))
            assert timeline.flush_bubble == bubble
            assert max(timeline.peak_activations) <= p


def test_hanayo_never_locks_up() -> None:
    for p in range(1, 6):
        for waves in (1, 2, 3):
            for m in (1, p, p + 1, 3 * p + 2):
                validate(build("hanayo", ranks=p, microbatches=m, waves=waves))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gis(group=5)", "group must be at most 4, the number of ranks, not 5"),
        ("gis(group=0)", "group must be at least 1, not 0"),
        ("zeropp(unit=3)", "unit must be at least 4, the smaller of 4 ranks and 8 microbatches, not 3"),
        ("hanayo(waves=0)", "waves must be at least 1, not 0"),
    ],
)
def test_bad_options(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, ranks=4, microbatches=8)
