"""Lookups in an input embedding that all ranks have a part of: in time for the first stage, in nobody's way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Action, Kind
from autopart.passes.schedule import unfolded
from autopart.schedules import build, lower, read, simulate, validate
from autopart.schedules.dependencies import chain
from autopart.schedules.lookups import with_lookups
from autopart.schedules.placed import forwards
from autopart.schedules.progress import check
from tests.test_vocabulary import split_outputs

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 2 * p + 1)]


def edges(ranks):
    """Those of a program: stages in a chain, parts of the output layer, parts of the input embedding."""
    outputs, inputs = range(ranks, 2 * ranks), range(2 * ranks, 3 * ranks)
    found = {(a, b) for a in outputs for b in outputs if a != b}
    found |= {pair for part in outputs for pair in ((ranks - 1, part), (part, ranks - 1))}
    found |= {pair for part in inputs for pair in ((0, part), (part, 0))}
    return chain(ranks) | found


def check_ends(schedule):
    """The rows end under all models, with exchanges of their own and with the messages of a program."""
    check(lower(schedule, chain(schedule.ranks)).table, schedule.place, (), schedule.barriers)
    whole = unfolded(lower(schedule, edges(schedule.ranks)))
    check(whole.table, whole.schedule.place)
    return whole


@pytest.mark.parametrize("barriers", [1, 2])
def test_every_size_ends_and_takes_no_longer(barriers):
    """Whatever an S takes, as long as a lookup takes nothing; and no rank keeps more microbatches."""
    for p, m in SIZES:
        plain = build("vocab", ranks=p, microbatches=m, barriers=barriers)
        schedule = with_lookups(plain)
        assert read(str(schedule), name=schedule.name) == schedule
        for s in (0.0, 0.3, 1.0, 4.0):
            costs = {"F": 1, "I": 1, "W": 1, "S": s}
            before, after = simulate(plain, costs), simulate(schedule, costs)
            assert (after.makespan, after.peak_activations) == (before.makespan, before.peak_activations)
        whole = check_ends(schedule)
        assert whole.schedule.place == (*range(p),) * 3
        kinds = [str(a.kind) for row in whole.table for a in row if a.stage >= 2 * p and a.peer < 0]
        assert sorted(kinds) == ["B"] * p * m + ["F"] * p * m


def test_messages_delay_the_beginning_and_the_end_alone():
    """A microbatch ahead, a latency is hidden: what is left is the first lookup's and the last gradient's."""
    costs, latency = {"F": 1, "I": 1, "W": 1, "S": 0.3}, 0.05
    for m in (8, 16, 32):
        plain = build("vocab", ranks=4, microbatches=m)
        more = simulate(with_lookups(plain), costs, latency).makespan - simulate(plain, costs, latency).makespan
        assert more <= 2 * latency + 1e-9


@given(split_outputs())
def test_any_rows_that_end_still_do(plain):
    validate(plain)
    schedule = with_lookups(plain)
    validate(schedule)
    assert [[a for a in row if a.kind not in "ED"] for row in schedule.table] == [list(row) for row in plain.table]
    check_ends(schedule)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 2))
def test_forwards_alone_have_no_gradients(ranks, microbatches, barriers):
    schedule = with_lookups(forwards(range(ranks), microbatches, barriers))
    validate(schedule)
    assert not any(action.kind is Kind.D for action in schedule.parts())
    check_ends(schedule)


def test_backwards_in_two_give_their_gradient_early():
    table = "barriers: 1\n0F0,0S0,0T0,0I0,0W0\n1F0,1S0,1I0,1W0,1T0"
    schedule = with_lookups(read(table))
    assert [str(row[-1]) for row in schedule.table] == ["0W0", "1D0"] and str(schedule.table[0][-2]) == "0D0"
    check_ends(schedule)


def test_the_first_forward_waits_for_all_ranks():
    schedule = with_lookups(build("vocab", ranks=3, microbatches=1))
    slow = {"F": 1, "B": 2, "E": (0, 0, 7), "D": (0, 3, 0)}
    timeline = simulate(schedule, slow)
    spans = {str(span.action): span for span in timeline.spans}
    assert spans["0F0"].start == 7 and spans["1D0"].start == spans["0B0"].end
    assert timeline.makespan == spans["1D0"].end == spans["0B0"].end + 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1E1,", "", "rank 1: 1E1 is missing"),
        ("1D1", "1E2", "names microbatch 2"),
        (",1D1", "", "rank 1: 1D1 is missing"),
        ("0E1,0F1", "0F1,0E1", "0F1 comes before 0E1, which it needs"),
        ("0B0,0D0", "0D0,0B0", "0D0 comes before 0B0, which it needs"),
        ("1E0,", "0E0,", "0E0 is misplaced: stage 0 belongs to rank 0"),
    ],
)
def test_planted_faults(old, new, message):
    text = str(with_lookups(build("vocab", ranks=2, microbatches=2)))
    assert old in text
    with pytest.raises(ValueError, match=message):
        validate(replace(read(text.replace(old, new, 1)), microbatches=2))


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="'1f1b' does not split its output layer"):
        with_lookups(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(ValueError, match="'vocab' has lookups already"):
        with_lookups(with_lookups(build("vocab", ranks=2, microbatches=2)))
    with pytest.raises(
        ValueError, match="0E0 is of an input embedding split over the ranks, as only the output layer's"
    ):
        validate(read("0E0,0F0,0B0,0D0"))


def test_a_lookup_comes_a_microbatch_ahead():
    """In the steady state of another rank: E of a microbatch by the time the one before it begins on stage 0."""
    schedule = with_lookups(build("vocab", ranks=4, microbatches=12))
    starts = {str(s.action): s.start for s in simulate(schedule, {"F": 1, "B": 2, "S": 2}).spans}
    for rank in range(1, 4):
        for k in range(1, 12):
            assert starts[str(Action(Kind.E, rank, k))] <= starts[f"0F{k - 1}"]
