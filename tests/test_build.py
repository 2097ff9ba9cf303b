import re

import pytest

from autopart.schedules import build, names, validate


def test_every_listed_family_builds_and_says_what_it_is():
    listed = names()
    assert len({family.name for family in listed}) == len(listed)
    for family in listed:
        assert family.summary and family.source and re.search(r"\b\d?[mp]\b", family.memory)
        schedule = build(family.name, ranks=4, microbatches=24)
        validate(schedule)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (family.name, 4, 24)


def test_the_name_of_a_schedule_builds_it_again():
    named = build("interleaved", ranks=2, microbatches=4, group=4, chunks=3)
    assert named.name == "interleaved(chunks=3, group=4)"
    assert build(named.name, ranks=2, microbatches=4) == named
    assert build(" interleaved ( group = 4 ) ", ranks=2, microbatches=4, chunks=3) == named
    assert build("interleaved(chunks=2)", ranks=2, microbatches=4).name == "interleaved"


def test_forward_is_built_but_not_listed():
    assert build("forward", ranks=2, microbatches=1).stages == 2
    assert "forward" not in {family.name for family in names()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "vzip"}, ValueError, "'vzip' is not known; one of gpipe, 1f1b"),
        (
            {"name": "1f2b(chunks=2)"},
            ValueError,
            r"'1f2b\(chunks=2\)' is not known, did you mean '1f1b'. one of gpipe, 1f1b",
        ),
        ({"name": 3}, TypeError, "schedule: expected a name such as '1f1b', not 3"),
        ({"name": "bfs(chunks=2, chunks=3)"}, ValueError, "is not a name with options.*: an option is there twice"),
        ({"name": "bfs(chunks)"}, ValueError, r"'bfs\(chunks\)' is not a name .*: an option has no name"),
        ({"name": "bfs(chunks=2"}, ValueError, r"'bfs\(chunks=2' is not a name .*: it does not end as a call does"),
        ({"name": "bfs(chunks=2)(3)"}, ValueError, "is not a name .*: there is more after the options"),
        ({"name": "bfs(chunks=p)"}, ValueError, r"'bfs\(chunks=p\)' is not a name .*: p is not a plain value"),
        ({"name": "bfs(chunks=1.5)"}, ValueError, "schedule 'bfs': chunks must be a whole number, not 1.5"),
        ({"name": "bfs(waves=3)"}, ValueError, "schedule: 'bfs' has no option 'waves'; its options are chunks"),
        ({"name": "bfs(chunks=3)", "chunks": 3}, TypeError, "has the option 'chunks' already"),
        ({"ranks": 0}, ValueError, "ranks must be at least 1, not 0"),
        ({"microbatches": -2}, ValueError, "microbatches must be at least 1, not -2"),
        ({"ranks": 2.0}, TypeError, "ranks must be a whole number, not 2.0"),
        ({"microbatches": True}, TypeError, "microbatches must be a whole number, not True"),
        ({"chunks": 2}, TypeError, "schedule: '1f1b' has no option 'chunks'; it has no options"),
    ],
)
def test_bad_arguments(arguments, error, message):
    name = arguments.pop("name", "1f1b")
    with pytest.raises(error, match=message):
        build(name, **{"ranks": 2, "microbatches": 4, **arguments})
