"""Every family against the published figures, and what all families have in common."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from autopart.schedules import build, lower, names, simulate, validate
from autopart.schedules.dependencies import chain

FIGURES = json.loads((Path(__file__).parent / "golden" / "schedule_families.json").read_text())
SEARCHED = ("vmin", "vhalf", "vzb", "v1f1b", "hanayo", "zeropp", "zb-auto")
"""Families whose figures are upper bounds: others may find better orders than ours, and ours than theirs."""


def identify(row: dict[str, Any]) -> str:
    return f"{row['schedule']}-p{row['ranks']}m{row['microbatches']}"


@pytest.mark.parametrize("row", FIGURES["schedules"], ids=identify)
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


PARTICULAR = ("dualpipe", "dualpipev", "bitpipe", "2bw", "paci")
"""Families that do not take every number of ranks and microbatches; they say what they take."""


def test_families_take_any_number_of_ranks_and_microbatches_or_say_what_they_take() -> None:
    sizes = random.Random(1).sample([(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)], 6)
    for family, (p, m) in itertools.product(names(), sizes):
        try:
            schedule = build(family.name, ranks=p, microbatches=m)
        except ValueError as error:
            assert family.name in PARTICULAR, error
            assert re.search(rf"{family.name}.*it takes", str(error))
        else:
            validate(schedule)
