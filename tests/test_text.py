import pytest
from hypothesis import given

from autopart.ir.action import Action, Boundary, Kind, Weights
from autopart.schedules import read
from autopart.schedules.text import grid
from tests.schedule_strategies import schedules


@given(schedules())
def test_text_round_trips(schedule):
    assert read(str(schedule), name=schedule.name) == schedule


def test_idle_cells_and_blank_lines_are_skipped():
    schedule = read("0F0, 0F1,,,0B0,0B1\n\n,1F0,1F1,1B0,1B1\n")
    assert str(schedule) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"
    assert (schedule.name, schedule.microbatches, schedule.place) == ("custom", 2, (0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2: not an action: '1X0'"),
        ("0F0,2F0,0B0,2B0", "no action of stage 1, though there is one of stage 2"),
        ("\n", "the table has no actions"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


def test_grid_of_a_long_table_shows_the_neighbourhood_of_the_marks():
    table = [[Action(Kind.F, rank, microbatch) for microbatch in range(40)] for rank in range(2)]
    assert grid(table, {(1, 20): "", (0, 40): "no 0F40"}).splitlines() == [
        "step    ..  17    18    19    20      21    22    23    ..  37    38    39    40",
        "rank 0  ..  0F17  0F18  0F19  0F20    0F21  0F22  0F23  ..  0F37  0F38  0F39  [no 0F40]",
        "rank 1  ..  1F17  1F18  1F19  [1F20]  1F21  1F22  1F23  ..  1F37  1F38  1F39",
    ]


def test_a_stage_belongs_to_the_first_rank_that_uses_it():
    assert read("0F0,0B0\n1F0,1B0,0F1").place == (0, 1)


def test_settings_are_lines_of_their_own():
    text = "weights: stash\noptimizer: per-rank\n0F0,0B0,0OPT0"
    schedule = read(text)
    assert (schedule.weights, schedule.optimizer, schedule.microbatches) == (Weights.STASH, Boundary.PER_RANK, 1)
    assert str(schedule) == text
    assert read("barriers: 2\n0F0,0S0,0T0,0B0").barriers == 2
    for line in ("weight: stash", "weights: old", "barriers: many"):
        with pytest.raises(ValueError, match=f"line 1: '{line}' is no setting; they are weights: sync | stash"):
            read(f"{line}\n0F0,0B0")


def test_pipes_have_places_of_their_own():
    schedule = read("0F0,1F1p1\n1F0,0F1p1")
    assert (schedule.place, schedule.mirrors) == ((0, 1), ((1, 0),))
    with pytest.raises(ValueError, match="no action of stage 0 in pipe 1, though there is one of stage 1"):
        read("0F0,1F1p1\n1F0")
