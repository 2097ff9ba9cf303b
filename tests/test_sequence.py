"""Slices of the sequence: closed forms, memory laws, the order that attention asks for."""

from dataclasses import replace

import pytest

from autopart.schedules import Link, build, read, simulate, spell, validate

SIZES = [(p, m, k) for p in (1, 2, 3, 5) for m in (1, 2, 6) for k in (1, 2, 4)]


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_closed_forms(name):
    for p, m, k in SIZES:
        schedule = build(name, ranks=p, microbatches=m, slices=k)
        validate(schedule)
        timeline = simulate(schedule, costs={"F": 3, "I": 4, "W": 1})
        assert timeline.flush_bubble == pytest.approx((p - 1) * 8 / k)
        held = [m if name == "terapipe" else min(m, (p - 1 - r + k) / k) for r in range(p)]
        assert timeline.peak_activations == pytest.approx(held)


def test_one_slice_is_the_plain_schedule():
    for sliced, plain in (("terapipe", "gpipe"), ("seq1f1b", "1f1b")):
        assert build(sliced, ranks=3, microbatches=5, slices=1).table == build(plain, ranks=3, microbatches=5).table


def test_rows():
    assert str(build("seq1f1b", ranks=2, microbatches=2, slices=2)).splitlines() == [
        "0F0,0F0s1,0F1,0B0s1,0F1s1,0B0,0B1s1,0B1",
        "1F0,1F0s1,1B0s1,1F1,1B0,1F1s1,1B1s1,1B1",
    ]
    assert str(build("terapipe", ranks=1, microbatches=1, slices=3)) == "0F0,0F0s1,0F0s2,0B0s2,0B0s1,0B0"


def test_slices_of_unequal_cost():
    """Later slices attend to more: a function gives each its own time."""
    schedule = build("terapipe", ranks=2, microbatches=1, slices=2)
    timeline = simulate(schedule, {"F": lambda action: 1 + action.slice, "B": lambda action: 2})
    assert timeline.makespan == 1 + 2 + 2 + 2 * 2 + 2
    with pytest.raises(ValueError, match=r"costs: 'F' must be times of at least 0, not -1"):
        simulate(schedule, {"F": lambda action: -1, "B": 1})


@pytest.mark.parametrize(("slices", "error"), [(0, ValueError), (2.0, TypeError)])
def test_bad_slices(slices, error):
    for name in ("terapipe", "seq1f1b"):
        with pytest.raises(error, match="slices must be"):
            build(name, ranks=2, microbatches=2, slices=slices)


def test_lengths():
    """Slices of given lengths share times, messages and what is kept by them; a name and a table say them."""
    made = build("seq1f1b", ranks=2, microbatches=2, lengths=(3, 1, 2))
    assert made.slices == 3 and made.name == spell(made) == "seq1f1b(lengths=(3, 1, 2))"
    assert made.table == build("seq1f1b", ranks=2, microbatches=2, slices=3).table
    table = replace(made, name="custom")
    assert spell(table).startswith("lengths: 3 1 2\n0F0,") and read(spell(table)) == table
    timeline = simulate(made, {"F": 6, "B": 12}, comm=Link(0.0, 0.6))
    first = {span.action.slice: span.end - span.start for span in timeline.spans if str(span.action)[:3] == "0F0"}
    assert first == {0: 3, 1: 1, 2: 2}
    received = next(span for span in timeline.spans if str(span.action) == "1F0")
    assert received.start == pytest.approx(3 + 0.3)
    assert timeline.peak_activations == (9 / 6, 7 / 6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": (3, 1), "slices": 3}, ValueError, r"slices=3 contradicts lengths=\(3, 1\), which are of 2 slices"),
        ({"lengths": (3, 0)}, ValueError, "lengths must be at least 1, not 0"),
        ({"lengths": (3, 1.5)}, TypeError, "lengths must be a whole number"),
        ({"lengths": 3}, TypeError, r"lengths must be the tokens of each slice, such as \(5, 3\), not 3"),
    ],
)
def test_bad_lengths(options, error, message):
    with pytest.raises(error, match=message):
        build("terapipe", ranks=2, microbatches=2, **options)


def test_lengths_of_another_number_of_slices():
    with pytest.raises(ValueError, match=r"lengths must be a token or more for each of 2 slices, not \(1, 2, 3\)"):
        validate(replace(build("terapipe", ranks=1, microbatches=1, slices=2), lengths=(1, 2, 3)))
    with pytest.raises(ValueError, match=r"is no setting; they are .*lengths: the tokens of each slice"):
        read("lengths: many\n0F0,0B0")
