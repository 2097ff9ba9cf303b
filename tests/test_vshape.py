"""Two stages a rank on a V, against torch's tables and the laws of bubble and memory."""

from __future__ import annotations

import random

import pytest

from autopart.schedules import build, simulate, validate
from tests.torch_tables import torch_rows

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 4 * p + 1)]
SAMPLE = random.Random(0).sample(SIZES, 20)


def same_as_torch(p: int, m: int) -> None:
    theirs = torch_rows("ScheduleZBVZeroBubble", ranks=p, microbatches=m, chunks=2)
    ours = build("zb-v", ranks=p, microbatches=m)
    assert [[str(action) for action in row] for row in ours.table] == theirs, (p, m)


def test_zb_v_equals_the_tables_of_torch() -> None:
    for size in SAMPLE:
        same_as_torch(*size)


@pytest.mark.soak
def test_zb_v_equals_every_table_of_torch() -> None:
    for size in SIZES:
        same_as_torch(*size)


def test_zb_v_has_no_span_bubble() -> None:
    for p, m in SAMPLE:
        schedule = build("zb-v", ranks=p, microbatches=m)
        validate(schedule)
        assert schedule.place == (*range(p), *reversed(range(p)))
        timeline = simulate(schedule)
        assert max(timeline.peak_activations) <= min(m, p)
        if m >= 2 * p - 1:
            assert timeline.span_bubble == 0
            assert timeline.peak_activations == (p,) * p


def test_laws_of_the_building_blocks() -> None:
    for p in (2, 3, 4, 5, 6, 8, 9):
        for m in (2 * p, 2 * p + 3):
            ran = {name: simulate(build(name, ranks=p, microbatches=m)) for name in ("vmin", "vhalf", "vzb", "v1f1b")}
            assert ran["vmin"].flush_bubble <= 2 * p - 2.5 + (p == 2)
            assert ran["vhalf"].flush_bubble == (1.5 * p - 2 if p % 2 else 1.5 * p - 3.5 + (p == 2))
            assert ran["vzb"].span_bubble == 0
            assert ran["v1f1b"].flush_bubble <= 3 * p - 1
            peaks = {"vmin": (p + 4) // 3, "vhalf": (p + 2) // 2, "vzb": p, "v1f1b": 2 * p // 3 + 1}
            for name, peak in peaks.items():
                assert max(ran[name].peak_activations) <= peak, (name, p, m)


def test_half_and_third_of_the_memory_of_1f1b() -> None:
    peaks = {name: max(simulate(build(name, ranks=8, microbatches=24)).peak_activations) for name in ("vhalf", "vmin")}
    assert peaks == {"vhalf": 5, "vmin": 4}
