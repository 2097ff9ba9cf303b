"""What cannot be compiled yet is refused by what it needs; the rest passes."""

import pytest

from autopart.schedules import build, executable, read, validate


def test_a_loop_whose_steps_overlap_is_train_loops():
    with pytest.raises(ValueError, match=r"'paci' takes the optimizer's steps between .* autopart.train_loop\("):
        executable(build("paci", ranks=4, microbatches=12))


@pytest.mark.parametrize("name", ["gpipe", "zb-v", "dualpipev", "dualpipe", "bitpipe", "vocab", "seq1f1b", "forward"])
def test_accepted_without_pairs(name):
    schedule = build(name, ranks=4, microbatches=12)
    made = executable(schedule)
    validate(made)
    assert list(made.parts()) == list(schedule.parts()) == [action for _, action in made.actions()]


def test_slices_on_copies_of_the_model_are_refused():
    table = read("0F0,0F0s1,0B0s1,0B0,0F1p1,0F1s1p1,0B1s1p1,0B1p1")
    validate(table)
    with pytest.raises(ValueError, match="needs several copies of the model, each for slices of the sequence"):
        executable(table)
