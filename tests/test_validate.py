"""Valid schedules pass; every planted fault is refused, with the table and the fault in brackets."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopart.ir.action import Action, Kind, Schedule, Weights
from autopart.schedules import build, read, simulate, validate
from tests.schedule_strategies import schedules

TEXT = str(build("1f1b", ranks=3, microbatches=4))


@given(schedules())
def test_every_terminating_order_passes(schedule):
    validate(schedule)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1B2,", "", "rank 1: 1B2 is missing"),
        ("2F3,", "", "rank 2: 2F3 is missing"),
        ("0F3,", "0F3,0F3,", "rank 0, step 5: 0F3 is there twice"),
        ("2B3", "2B3,0F9", "rank 2, step 8: 0F9 names microbatch 9, but microbatches are 0 to 3"),
        ("2B3", "2B3,3F0", "rank 2, step 8: 3F0 names stage 3, but stages are 0 to 2"),
        ("2B3", "2B3,0F0", "rank 2, step 8: 0F0 is misplaced: stage 0 belongs to rank 0"),
        ("2F0,2B0", "2B0,2F0", "rank 2, step 0: 2B0 comes before 2F0, which it needs"),
        ("1B3", "1I3", "rank 1: 1W3 is missing"),
        ("1B3", "1W3,1I3", "rank 1, step 7: 1W3 comes before 1I3, which it needs"),
        ("1B3", "1B3,1W3", "rank 1: both 1B3 and 1W3"),
        ("2B3", "2B3s1", "rank 2, step 7: 2B3s1 names slice 1, but slices are 0 to 0"),
        ("2B3", "2B3,2SEND3>1", "rank 2, step 8: 2SEND3>1 is not one of F, B, I, W, S, T, E, D and OPT"),
        ("2B3", "2B3,2R3", "rank 2, step 8: 2R3 is not one of F, B, I, W, S, T, E, D and OPT"),
        ("2B3", "2B3,2S3", "rank 2, step 8: 2S3 is of an output layer split over the ranks, which this schedule"),
        ("2B3", "2B3,2OPT3", "rank 2, step 8: 2OPT3 changes the weights inside the table, which needs one of"),
        ("2B2,2F3", "(2F3;2I2)&", "rank 2, step 5: 2F3 is in a PAIR that is not of an F and a B"),
        ("2F3,2B3", "(2F3;2B3)&", "rank 2, step 6: 2B3 is in one PAIR with 2F3, which it needs"),
    ],
)
def test_planted_faults(old, new, message):
    assert old in TEXT
    faulty = replace(read(TEXT.replace(old, new, 1)), place=(0, 1, 2), microbatches=4, slices=1, mirrors=())
    with pytest.raises(ValueError) as caught:
        validate(faulty)
    assert message in str(caught.value)
    lines = str(caught.value).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["rank", "0"], ["rank", "1"], ["rank", "2"]]
    assert "[" in "".join(lines[2:])


def test_a_table_that_never_ends_shows_where_each_rank_waits():
    with pytest.raises(ValueError) as caught:
        validate(read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
    assert str(caught.value).splitlines() == [
        "schedule 'custom': the table never ends: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1",
        "step    0      1      2    3",
        "rank 0  0F0    [0B0]  0F1  0B1",
        "rank 1  [1F1]  1B1    1F0  1B0",
    ]


def test_a_missing_action_is_shown_where_it_belongs():
    with pytest.raises(ValueError) as caught:
        validate(read("0F0,0F1,0F2,0B0,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"))
    assert str(caught.value).splitlines()[2] == "rank 0  0F0  0F1  0F2  0B0  [no 0B1]  0B2"


@pytest.mark.parametrize(
    ("place", "microbatches", "message"),
    [
        ((0, 2), 1, "stage 1 is on rank 2, but ranks are 0 to 1"),
        ((0, 0), 1, "rank 1 holds no stage"),
        ((0, 1), 0, "microbatches must be at least 1, not 0"),
    ],
)
def test_bad_placement(place, microbatches, message):
    rows = tuple((Action(Kind.F, s, 0), Action(Kind.B, s, 0)) for s in range(2))
    with pytest.raises(ValueError, match=message):
        validate(Schedule("bad", microbatches, place, rows))


@given(schedules(), st.data())
def test_no_action_can_be_dropped_or_doubled(schedule, data):
    rank, step = data.draw(
        st.sampled_from([(rank, step) for rank, row in enumerate(schedule.table) for step in range(len(row))])
    )
    row = schedule.table[rank]
    assume(row[step].kind is Kind.F or len(list(schedule.actions())) > 2)  # an F alone is a forward-only schedule
    for changed in ((*row[:step], *row[step + 1 :]), (*row, row[step])):
        with pytest.raises(ValueError):
            validate(replace(schedule, table=(*schedule.table[:rank], changed, *schedule.table[rank + 1 :])))


TWO_PIPES = "0F0,1F1p1,1B1p1,0B0\n1F0,0F1p1,1B0,0B1p1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1B0", "1B0,1B1", "rank 1, step 3: 1B1 travels pipe 0, but 1F1p1 of the same microbatch pipe 1"),
        ("1B0", "1B0,0B0", "rank 1, step 3: 0B0 is misplaced: stage 0 belongs to rank 0"),
        ("0B1p1", "0B1p2", "0B1p2 names pipe 2, but pipes are 0 to 1"),
        (",1B1p1", "", "rank 0: 1B1p1 is missing"),
        ("1F0,0F1p1,1B0", "(0F1p1;1B0)&,1F0", "1B0 comes before 1F0, which it needs"),
    ],
)
def test_planted_faults_in_two_pipes(old, new, message):
    plain = read(TWO_PIPES)
    validate(plain)
    assert plain.places == ((0, 1), (1, 0)) and old in TWO_PIPES
    lines = TWO_PIPES.replace(old, new, 1).splitlines()
    faulty = replace(plain, table=tuple(tuple(map(Action.parse, line.split(","))) for line in lines))
    with pytest.raises(ValueError) as caught:
        validate(faulty)
    assert message in str(caught.value)
    assert "[" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slices": 0}, "slices must be at least 1, not 0"),
        ({"mirrors": ((1, 2),)}, "stage 1 of pipe 1 is on rank 2, but ranks are 0 to 1"),
        ({"mirrors": ((1,),)}, "pipe 1 has 1 stages, but pipe 0 2"),
        ({"weights": Weights.STASH}, "weights that change inside the table need one pipe"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(read(TWO_PIPES), **changes))


def test_slices_come_in_the_order_that_attention_asks_for():
    validate(read("0F0,0F0s1,0B0s1,0B0"))
    for text, message in (
        ("0F0s1,0F0,0B0s1,0B0", "0F0s1 comes before 0F0"),
        ("0F0,0F0s1,0B0,0B0s1", "0B0 comes before 0B0s1"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(read(text))


def test_a_pipe_that_no_microbatch_travels_may_not_leave_a_rank_idle():
    alone = Schedule("idle", 1, (0,), (read("0F0,0B0").table[0], ()), mirrors=((1,),))
    with pytest.raises(ValueError, match="rank 1 has nothing to do: no microbatch travels its pipe"):
        validate(alone)
    with pytest.raises(ValueError, match="rank 1 has nothing to do"):
        simulate(alone)
