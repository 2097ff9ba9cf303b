"""Split backwards on one stage a rank, against closed forms, published rates and torch's tables."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autopart.schedules import build, simulate, validate
from tests.torch_tables import torch_rows

RATES = json.loads((Path(__file__).parent / "golden" / "schedule_families.json").read_text())["zero_bubble_rates"]
SIZES = [(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)]
SAMPLE = random.Random(0).sample(SIZES, 20)


def costs(row: dict[str, Any]) -> dict[str, float]:
    return {kind: row[kind] for kind in "FIW"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.soak] if row["ranks"] > 8 else []) for row in RATES],
    ids=lambda row: f"{row['model']}-m{row['microbatches']}",
)
def test_the_rates_of_the_zero_bubble_paper(row: dict[str, Any]) -> None:
    work = row["microbatches"] * sum(costs(row).values())
    for name in ("1f1b", "zb-h1", "zb-h2"):
        schedule = build(name, ranks=row["ranks"], microbatches=row["microbatches"])
        timeline = simulate(schedule, costs=costs(row), comm=row["comm"])
        rate = 1 - work / (timeline.span_bubble + work)
        assert rate == pytest.approx(row[name], abs=5.1e-5), name


def test_closed_forms_of_bubble_and_peak() -> None:
    for p, m in SAMPLE:
        for f, i, w in ((1, 1, 1), (3, 4, 2), (4, 3, 3)):
            made = {name: build(name, ranks=p, microbatches=m) for name in ("zb-h1", "zb-h2", "2bp-1f1b", "2bp-gpipe")}
            ran = {name: simulate(schedule, costs={"F": f, "I": i, "W": w}) for name, schedule in made.items()}
            assert ran["zb-h1"].peak_activations == (min(m, p),) * p
            assert ran["zb-h2"].peak_activations == (min(m, 2 * p - 1),) * p
            if m >= p:
                assert ran["zb-h1"].flush_bubble == ran["zb-h1"].span_bubble == (p - 1) * (f + i - w)
            if m >= 2 * p - 1:
                assert ran["zb-h2"].span_bubble == (p - 1) * (f + i - 2 * w)
            elif m >= p and f == i == w:
                assert ran["zb-h2"].span_bubble == 2 * p - 1 - m
            for name in ("2bp-1f1b", "2bp-gpipe"):
                assert ran[name].peak_activations == (m,) * p
                assert ran[name].flush_bubble == (p - 1) * (f + i)


def test_any_number_of_microbatches() -> None:
    for p, m in SAMPLE:
        for name in ("zb-h1", "zb-h2", "2bp-1f1b", "2bp-gpipe"):
            validate(build(name, ranks=p, microbatches=m))


def test_h1_is_torch_s_interleaved_zero_bubble_of_one_chunk() -> None:
    for p, m in SAMPLE:
        if m % max(1, m // p) == 0:
            ours = build("zb-h1", ranks=p, microbatches=m)
            theirs = torch_rows("ScheduleInterleavedZeroBubble", ranks=p, microbatches=m, chunks=1)
            assert [[str(action) for action in row] for row in ours.table] == theirs, (p, m)


def test_rows_are_those_of_the_papers() -> None:
    assert str(build("zb-h2", ranks=2, microbatches=4)).splitlines() == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1I0,1W0,1F1,1I1,1F2,1I2,1F3,1I3,1W1,1W2,1W3",
    ]
    assert str(build("2bp-1f1b", ranks=2, microbatches=2)).splitlines() == [
        "0F0,0F1,0I0,0I1,0W0,0W1",
        "1F0,1I0,1F1,1I1,1W0,1W1",
    ]
