"""DualPipeV and DualPipe: torch's own tables, closed forms, memory laws, what they refuse."""

import pytest

from autopart.ir.action import Kind
from autopart.schedules import build, simulate, unpaired, validate
from tests.torch_tables import torch_rows


@pytest.mark.parametrize("ranks", range(2, 9))
def test_dualpipev_is_the_table_of_torch(ranks):
    for microbatches in range(2 * ranks, 4 * ranks + 1):
        ours = build("dualpipev", ranks=ranks, microbatches=microbatches)
        theirs = torch_rows("ScheduleDualPipeV", ranks=ranks, microbatches=microbatches, chunks=2)
        for rank, (row, wanted) in enumerate(zip(ours.table, theirs, strict=True)):
            assert list(map(str, row)) == [cell.replace("OVERLAP_F_B", "&") for cell in wanted], (microbatches, rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_closed_forms_of_dualpipev(ranks):
    for microbatches in (2 * ranks, 3 * ranks + 1):
        schedule = build("dualpipev", ranks=ranks, microbatches=microbatches)
        validate(schedule)
        timeline = simulate(schedule)
        assert timeline.flush_bubble == (ranks - 1) * (3 + 2 - 3) / 2
        assert timeline.peak_activations == (ranks + 0.5,) * ranks if ranks > 1 else (1.5,)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_closed_forms_of_dualpipe(ranks):
    for microbatches in (2 * ranks, 3 * ranks):
        schedule = build("dualpipe", ranks=ranks, microbatches=microbatches)
        validate(schedule)
        timeline = simulate(schedule)
        assert timeline.flush_bubble == (ranks // 2 - 1) * (3 + 2 - 3)
        assert timeline.peak_activations == (ranks + 1,) * ranks
        pipes = {action.microbatch: action.pipe for action in schedule.parts()}
        assert [pipes[number] for number in range(microbatches)] == sorted(pipes.values())
        assert sum(pipes.values()) == microbatches // 2


def test_a_pair_that_overlaps_is_cheaper():
    schedule = build("dualpipev", ranks=2, microbatches=8)
    whole = simulate(schedule).makespan
    assert simulate(schedule, {"F": 1, "I": 1, "W": 1, "PAIR": 3}).makespan == whole
    assert simulate(schedule, {"F": 1, "I": 1, "W": 1, "PAIR": 2}).makespan < whole


def test_unpaired():
    schedule = build("dualpipe", ranks=4, microbatches=8)
    apart = unpaired(schedule)
    validate(apart)
    assert list(apart.parts()) == list(schedule.parts())
    assert Kind.PAIR not in {action.kind for _, action in apart.actions()}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "message"),
    [
        ("dualpipev", 4, 7, "7 microbatches are too few for 4 ranks; it takes at least 8"),
        ("dualpipe", 3, 6, "3 ranks; it takes an even number of them, such as 4"),
        ("dualpipe", 4, 9, "9 microbatches on 4 ranks; it takes an even number of at least 8, such as 10"),
        ("dualpipe", 4, 3, "3 microbatches on 4 ranks; it takes an even number of at least 8, such as 8"),
    ],
)
def test_what_they_do_not_take(name, ranks, microbatches, message):
    with pytest.raises(ValueError, match=f"schedule '{name}': {message}"):
        build(name, ranks=ranks, microbatches=microbatches)
