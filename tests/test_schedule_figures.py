"""Families with slices, pipes, pairs, a split output layer or versions against an independent simulator's figures."""

import json
from pathlib import Path

import pytest

from autopart.schedules import build, lower, names, read, simulate, slice_lengths, staleness, validate
from autopart.schedules.dependencies import chain
from autopart.schedules.progress import check

FIGURES = json.loads((Path(__file__).parent / "golden" / "schedule_figures.json").read_text())


def identify(row):
    options = "".join(f"-{value}" for value in row["options"].values())
    return f"{row['name']}{options}-p{row['ranks']}m{row['microbatches']}"


@pytest.mark.parametrize("row", FIGURES["schedules"], ids=identify)
def test_time_bubbles_peaks_and_messages(row):
    schedule = build(row["name"], ranks=row["ranks"], microbatches=row["microbatches"], **row["options"])
    validate(schedule)
    timeline = simulate(schedule, {"F": 1, "I": 1, "W": 1, "S": row.get("S", 0)})
    assert (timeline.makespan, timeline.flush_bubble) == pytest.approx((row["T"], row["bubble"]))
    assert timeline.span_bubble == pytest.approx(row.get("span_bubble", row["bubble"]))
    assert timeline.peak_activations == pytest.approx(row["peak"])
    lowered = lower(schedule, chain(schedule.stages))
    sends = sum(action.kind == "SEND" for line in lowered.table for action in line)
    # The independent simulator counts no messages of `vocab`: an output and a gradient pass each boundary of stages.
    assert sends == row.get("sends", 2 * row["microbatches"] * (row["ranks"] - 1))
    check(lowered.table, schedule.place, schedule.mirrors, schedule.barriers)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in FIGURES["versions"].items() for row in rows])
def test_steps_between_forward_and_backward_and_live_versions(name, row):
    steady = 4 * row["ranks"] * (row["ranks"] - 1)
    schedule = build(name, ranks=row["ranks"], microbatches=steady, **row["options"])
    validate(schedule)
    assert [[each.crossed, each.live] for each in staleness(schedule)] == row["crossed and live"]


@pytest.mark.parametrize("row", FIGURES["slice lengths"])
def test_slice_lengths(row):
    found, lengths = slice_lengths(
        row["length"], row["ranks"], lambda size, before: 1 + size / 2 + 0.02 * size * (before + size / 2)
    )
    assert found == pytest.approx(row["time"])
    assert list(lengths) == row["lengths"]


LARGE = {"paci": 248}  # steps come every 31 microbatches there

SLOW = {"v1f1b": 93.5, "bitpipe": 135, "hanayo": 184.5}  # those that wait longer than GPipe; the last two are for m = p


@pytest.mark.soak
@pytest.mark.parametrize("name", [family.name for family in names()])
def test_every_family_is_checked_at_32_ranks_and_256_microbatches(name):
    schedule = build(name, ranks=32, microbatches=LARGE.get(name, 256))
    lowered = lower(schedule, chain(schedule.stages))
    check(lowered.table, schedule.place, schedule.mirrors, schedule.barriers)
    timeline = simulate(schedule)
    assert timeline.makespan - timeline.flush_bubble == pytest.approx(3 * schedule.microbatches)
    assert timeline.flush_bubble <= SLOW.get(name, 3 * 31)


@pytest.mark.parametrize("name", [family.name for family in names()])
def test_every_family_ends_under_all_progress_models_and_reads_back(name):
    for ranks, microbatches in ((1, 2), (2, 4), (4, 12), (6, 30)):
        if ranks == 1 and name in ("bitpipe", "dualpipe"):
            continue  # they take even numbers of ranks
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        assert read(str(schedule), name=schedule.name) == schedule
        lowered = lower(schedule, chain(schedule.stages))
        check(lowered.table, schedule.place, schedule.mirrors, schedule.barriers)
