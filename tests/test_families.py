"""Every family against the published figures, and what all families have in common."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autopart.schedules import build, lower, names, simulate, validate
from autopart.schedules.dependencies import chain

FIGURES = json.loads((Path(__file__).parent / "golden" / "schedule_families.json").read_text())
SEARCHED = ("vmin", "vhalf", "vzb", "v1f1b", "hanayo", "zeropp")
"""Families whose figures are upper bounds: others may find better orders than ours, and ours than theirs."""


def identify(row: dict[str, Any]) -> str:
    return f"{row['schedule']}-p{row['ranks']}m{row['microbatches']}"


@pytest.mark.parametrize("row", [row for row in FIGURES["schedules"] if "auto" not in row["schedule"]], ids=identify)
def test_published_figures(row: dict[str, Any]) -> None:
    schedule = build(row["schedule"], ranks=row["ranks"], microbatches=row["microbatches"])
    validate(schedule)
    timeline = simulate(schedule)
    found = (timeline.makespan, timeline.flush_bubble, timeline.span_bubble, max(timeline.peak_activations))
    published = (row["T"], row["bubble"], row["span_bubble"], max(row["peak"]))
    if row["schedule"].partition("(")[0] in SEARCHED:
        assert all(ours <= theirs + 1e-5 for ours, theirs in zip(found, published, strict=True)), (found, published)
    else:
        assert found == pytest.approx(published, abs=1e-5)
        assert timeline.peak_activations == pytest.approx(row["peak"], abs=1e-5)
    lowered = lower(schedule, chain(schedule.stages))
    assert sum(action.kind == "SEND" for line in lowered.table for action in line) == row["sends"]


def test_every_family_takes_any_number_of_ranks_and_microbatches() -> None:
    sizes = random.Random(1).sample([(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)], 12)
    for family in names():
        for p, m in sizes:
            validate(build(family.name, ranks=p, microbatches=m))
