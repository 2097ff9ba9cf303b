"""Every family against the published figures, and what all families have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopart.schedules import build, lower, simulate
from autopart.schedules.dependencies import chain

FIGURES = json.loads((Path(__file__).parent / "golden" / "schedule_families.json").read_text())
BUILT: tuple[str, ...] = ("interleaved", "bfs", "interleaved-zb", "zb-h1", "zb-h2", "2bp-1f1b", "2bp-gpipe", "zb-v")


def cases() -> list[Any]:
    rows = [row for row in FIGURES["schedules"] if row["schedule"].partition("(")[0] in BUILT]
    return [pytest.param(row, id=f"{row['schedule']}-p{row['ranks']}m{row['microbatches']}") for row in rows]


@pytest.mark.parametrize("row", cases())
def test_published_figures(row: dict[str, Any]) -> None:
    schedule = build(row["schedule"], ranks=row["ranks"], microbatches=row["microbatches"])
    timeline = simulate(schedule)
    assert timeline.makespan == pytest.approx(row["T"], abs=1e-5)
    assert timeline.flush_bubble == pytest.approx(row["bubble"], abs=1e-5)
    assert timeline.span_bubble == pytest.approx(row["span_bubble"], abs=1e-5)
    assert timeline.peak_activations == pytest.approx(row["peak"], abs=1e-5)
    lowered = lower(schedule, chain(schedule.stages))
    assert sum(action.kind == "SEND" for line in lowered.table for action in line) == row["sends"]
