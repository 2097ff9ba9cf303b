"""BitPipe: its closed form, its memory law, what it refuses."""

import pytest

from autopart.schedules import build, simulate, validate


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_closed_forms(ranks):
    for units in (1, 2, 3):
        schedule = build("bitpipe", ranks=ranks, microbatches=units * ranks)
        validate(schedule)
        timeline = simulate(schedule)
        assert timeline.flush_bubble == pytest.approx((ranks - 2) * (1 + (units - 1) / 2))
        assert max(timeline.peak_activations) == timeline.peak_activations[ranks // 2] == ranks


def test_each_half_of_a_unit_travels_its_own_pipe():
    schedule = build("bitpipe", ranks=4, microbatches=8)
    assert schedule.places == ((0, 1, 2, 3, 3, 2, 1, 0), (3, 2, 1, 0, 0, 1, 2, 3))
    pipes = {action.microbatch: action.pipe for action in schedule.parts()}
    assert [pipes[number] for number in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [
        (3, 6, "3 ranks; it takes an even number of them, such as 4"),
        (4, 6, "6 microbatches on 4 ranks; it takes a multiple of the ranks, such as 8"),
    ],
)
def test_what_it_does_not_take(ranks, microbatches, message):
    with pytest.raises(ValueError, match=message):
        build("bitpipe", ranks=ranks, microbatches=microbatches)
