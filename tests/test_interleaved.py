"""Several chunks a rank on the loop placement, against the closed forms and torch's own tables."""

from __future__ import annotations

import random

import pytest

from autopart.ir.action import Action
from autopart.schedules import build, simulate, validate
from tests.torch_tables import torch_rows

SIZES = [(p, m, v) for p in range(1, 9) for m in range(1, 4 * p + 1) for v in (1, 2, 3)]
SAMPLE = random.Random(0).sample(SIZES, 24)
TORCH = {"bfs": "LoopedBFS", "interleaved": "Interleaved1F1B", "interleaved-zb": "InterleavedZeroBubble"}


def same_as_torch(name: str, p: int, m: int, v: int) -> None:
    try:
        theirs = torch_rows(f"Schedule{TORCH[name]}", ranks=p, microbatches=m, chunks=v)
    except ValueError:
        return  # torch takes only microbatches that make equal rounds
    ours = [[str(action) for action in row] for row in build(name, ranks=p, microbatches=m, chunks=v).table]
    if name == "bfs":  # torch's backwards run in the other order of microbatches
        theirs = [[*row[: m * v], *(cell for k in range(v) for cell in row[m * (v + k) : m * (v + k + 1)][::-1])]
                  for row in theirs]  # fmt: skip
    assert ours == theirs, (name, p, m, v)


@pytest.mark.parametrize("name", TORCH)
def test_equals_the_tables_of_torch(name: str) -> None:
    for size in SAMPLE:
        same_as_torch(name, *size)


@pytest.mark.soak
@pytest.mark.parametrize("name", TORCH)
def test_equals_every_table_of_torch(name: str) -> None:
    for size in SIZES:
        same_as_torch(name, *size)


@pytest.mark.parametrize("name", TORCH)
def test_any_number_of_microbatches(name: str) -> None:
    for p, m, v in SAMPLE:
        validate(build(name, ranks=p, microbatches=m, chunks=v))


def test_closed_forms_of_bubble_and_peak() -> None:
    f, i, w = 6, 12, 6
    for p, m, v in [(p, k * p, v) for p in (1, 2, 3, 5) for k in (1, 2, 3) for v in (1, 2, 3)]:
        bubbles = {
            "bfs": (p - 1) * (f + i + w) / v,
            "interleaved": (p - 1) * (f + i + w) / v,
            "interleaved-zb": (p - 1) * (f + i - w) / v,
        }
        warmups = [min(m, ((v - 1) * p + 2 * (p - 1 - r) + 1) / v) for r in range(p)]
        peaks = {"bfs": [m] * p, "interleaved": warmups, "interleaved-zb": [p] * p}
        for name, bubble in bubbles.items():
            timeline = simulate(build(name, ranks=p, microbatches=m, chunks=v), costs={"F": f, "I": i, "W": w})
            assert timeline.flush_bubble == pytest.approx(bubble), (name, p, m, v)
            assert timeline.span_bubble == pytest.approx(bubble), (name, p, m, v)
            assert timeline.peak_activations == pytest.approx(peaks[name]), (name, p, m, v)


def test_larger_groups_cost_memory_not_time() -> None:
    small, large = (build("interleaved", ranks=2, microbatches=8, group=group) for group in (2, 4))
    assert (small.name, large.name) == ("interleaved(group=2)", "interleaved(group=4)")
    assert simulate(small).makespan == simulate(large).makespan
    assert simulate(large).peak_activations == (3.5, 2.5)
    assert simulate(small).peak_activations == (2.5, 1.5)


def test_groups_are_as_even_as_can_be() -> None:
    row = build("interleaved", ranks=3, microbatches=7).table[2]
    first = [action.microbatch for action in row if action.kind == "F" and action.stage == 2]
    assert first == list(range(7)) and row.index(Action.parse("2F3")) < row.index(Action.parse("5F0"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group": 2}, ValueError, "group must be at least 4, the smaller of 4 ranks and 5 microbatches, not 2"),
        ({"chunks": 0}, ValueError, "chunks must be at least 1, not 0"),
        ({"chunks": 1.5}, TypeError, "chunks must be a whole number, not 1.5"),
        ({"group": "all"}, TypeError, "group must be a whole number, not 'all'"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build("interleaved", ranks=4, microbatches=5, **options)


def test_layered_accumulation_is_breadth_first_on_one_rank() -> None:
    assert str(build("bfs", ranks=1, microbatches=2, chunks=3)) == "0F0,0F1,1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1,0B0,0B1"
