import re

import pytest

from autopart.schedules import build, names, validate


def test_every_listed_family_builds_and_says_what_it_is():
    listed = names()
    assert len({family.name for family in listed}) == len(listed)
    for family in listed:
        assert family.summary and family.source and re.search(r"\b[mp]\b", family.memory)
        schedule = build(family.name, ranks=4, microbatches=24)
        validate(schedule)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (family.name, 4, 24)


def test_forward_is_built_but_not_listed():
    assert build("forward", ranks=2, microbatches=1).stages == 2
    assert "forward" not in {family.name for family in names()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "1f2b"}, ValueError, "unknown name '1f2b'; the schedules are gpipe, 1f1b"),
        ({"ranks": 0}, ValueError, "ranks must be at least 1, not 0"),
        ({"microbatches": -2}, ValueError, "microbatches must be at least 1, not -2"),
        ({"ranks": 2.0}, TypeError, "ranks must be a whole number, not 2.0"),
        ({"microbatches": True}, TypeError, "microbatches must be a whole number, not True"),
        ({"chunks": 2}, TypeError, "schedule '1f1b' has no option 'chunks'; it has no options"),
    ],
)
def test_bad_arguments(arguments, error, message):
    name = arguments.pop("name", "1f1b")
    with pytest.raises(error, match=message):
        build(name, **{"ranks": 2, "microbatches": 4, **arguments})
