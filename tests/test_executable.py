"""What cannot be compiled yet is refused by what it needs; the rest passes."""

import pytest

from autopart.schedules import build, executable, validate


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("terapipe", "attention over 4 slices"),
    ],
)
def test_refused(name, needs):
    with pytest.raises(
        ValueError, match=rf"schedule: '{name}' cannot be compiled yet, only simulated .*{needs}.*'1f1b'"
    ):
        executable(build(name, ranks=4, microbatches=12))


def test_a_loop_whose_steps_overlap_is_train_loops():
    with pytest.raises(ValueError, match=r"'paci' takes the optimizer's steps between .* autopart.train_loop\("):
        executable(build("paci", ranks=4, microbatches=12))


@pytest.mark.parametrize("name", ["gpipe", "zb-v", "dualpipev", "dualpipe", "bitpipe", "vocab", "forward"])
def test_accepted_without_pairs(name):
    schedule = build(name, ranks=4, microbatches=12)
    made = executable(schedule)
    validate(made)
    assert list(made.parts()) == list(schedule.parts()) == [action for _, action in made.actions()]
