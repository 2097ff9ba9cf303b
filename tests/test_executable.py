"""What cannot be compiled yet is refused by what it needs; the rest passes."""

import pytest

from autopart.schedules import build, check_executable


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("terapipe", "attention over 4 slices"),
        ("bitpipe", "2 copies of the model"),
        ("dualpipe", "2 copies of the model"),
        ("vocab", "an output layer split over the pipeline ranks"),
        ("paci", "optimizer steps between the microbatches"),
    ],
)
def test_refused(name, needs):
    with pytest.raises(
        ValueError, match=rf"schedule: '{name}' cannot be compiled yet, only simulated .*{needs}.*'1f1b'"
    ):
        check_executable(build(name, ranks=4, microbatches=12))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "dualpipev", "forward"])
def test_accepted(name):
    check_executable(build(name, ranks=4, microbatches=12))
