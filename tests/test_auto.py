"""`auto` against brute force, z3, the published profiles, and its own promises."""

from __future__ import annotations

import json
import math
import random
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from autopart.ir.action import Action, Kind, Schedule
from autopart.schedules import auto, build, simulate, validate

RATES = json.loads((Path(__file__).parent / "golden" / "schedule_families.json").read_text())["zero_bubble_rates"]
UNIT = {"F": 1.0, "I": 1.0, "W": 1.0}


def every_row(rank: int, microbatches: int, limit: int) -> list[tuple[Action, ...]]:
    """All orders of a rank's F, I and W within the limit, microbatches in any order."""
    wanted = [Action(kind, rank, k) for kind in (Kind.F, Kind.I, Kind.W) for k in range(microbatches)]
    rows = []
    for row in permutations(wanted):
        where = {action: step for step, action in enumerate(row)}
        chains = ([where[Action(kind, rank, k)] for kind in (Kind.F, Kind.I, Kind.W)] for k in range(microbatches))
        held = most = 0
        for action in row:
            held += {Kind.F: 1, Kind.I: 0, Kind.W: -1}[action.kind]
            most = max(most, held)
        if most <= limit and all(chain == sorted(chain) for chain in chains):
            rows.append(row)
    return rows


def shortest(ranks: int, microbatches: int, costs: dict[str, Any], comm: float, limit: int, per_rank: bool) -> float:
    """The best over all schedules whatever, by simulation."""
    best = math.inf
    for rows in product(*(every_row(rank, microbatches, limit) for rank in range(ranks))):
        schedule = Schedule("every", microbatches, tuple(range(ranks)), rows)
        try:
            timeline = simulate(schedule, costs=costs, comm=comm)
        except ValueError:
            continue  # the rows lock each other
        spans = [[span for span in timeline.spans if span.rank == rank] for rank in range(ranks)]
        length = max(each[-1].end - (each[0].start if per_rank else 0) for each in spans)
        best = min(best, length)
    return best


def drawn(rng: random.Random, ranks: int) -> dict[str, list[int]]:
    return {kind: [rng.randint(2, 9) for _ in range(ranks)] for kind in "FIW"}


@pytest.mark.parametrize("seed", range(4))
def test_as_short_as_the_shortest_of_all_schedules(seed: int) -> None:
    rng = random.Random(seed)
    for limit, per_rank in product((1, 2), (False, True)):
        costs, comm = drawn(rng, 2), rng.choice([0, 1, 3])
        found = auto(2, 2, costs, comm, limit, "per-rank" if per_rank else "barrier", prove=True)
        assert found.length == shortest(2, 2, costs, comm, limit, per_rank), (costs, comm, limit, per_rank)
        assert found.certificate.startswith("optimal") and found.gap == pytest.approx(0)


def compared(seed: int, count: int, sizes: tuple[int, ...], slack: float) -> int:
    """The search finds what z3 proves to be the best, or something longer by no more than `slack`.

    Returns how often z3 was asked: where the lower bound is reached, there is nothing to compare.
    """
    rng, asked = random.Random(seed), 0
    for _ in range(count):
        p, m = rng.choice([2, 3, 4]), rng.choice(sizes)
        costs, comm = drawn(rng, p), rng.choice([0, 0, 1, 2])
        limit, optimizer = rng.choice([1, p, p + 1, 2 * p - 1, None]), rng.choice(["barrier", "per-rank"])
        searched = auto(p, m, costs, comm, limit, optimizer)
        if searched.certificate.startswith("not proven"):
            asked += 1
            proven = auto(p, m, costs, comm, limit, optimizer, prove=True)
            assert proven.certificate.startswith("optimal"), (p, m, costs, comm, limit, optimizer)
            most = proven.length * (1 + slack)
            assert searched.bound <= proven.length <= searched.length <= most, (p, m, costs, comm, limit, optimizer)
    return asked


def test_search_finds_what_z3_proves() -> None:
    assert compared(11, 12, (2, 3, 4), 0.0) > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", (4, 5, 7, 8))
def test_search_finds_what_z3_proves_of_larger_ones(seed: int) -> None:
    assert compared(seed, 40, (2, 3, 4), 0.0) > 0
    compared(seed, 20, (6, 8), 0.02)


def checked(p: int, m: int, costs: dict[str, Any], comm: float, limit: float | None, optimizer: str) -> Any:
    """What `auto` returns is a schedule within the limit that runs as it says, and no family that fits is shorter."""
    found = auto(p, m, costs, comm, limit, optimizer)
    validate(found.schedule)
    assert found.timeline == simulate(found.schedule, costs=costs, comm=comm)
    assert limit is None or max(found.timeline.peak_activations) <= limit + 1e-9
    busy = found.timeline.makespan - found.timeline.flush_bubble
    ends = found.timeline.makespan if optimizer == "barrier" else found.timeline.span_bubble + busy
    assert found.length == pytest.approx(ends)
    assert found.bound <= found.length * (1 + 1e-9) and found.gap == pytest.approx(found.length / found.bound - 1)
    return found


def test_no_family_that_fits_is_shorter_and_none_beats_the_bound() -> None:
    rng = random.Random(0)
    for p, m, chunks in ((3, 7, 1), (2, 4, 2), (2, 2, 4)):
        costs = {kind: [rng.randint(2, 9) for _ in range(p * chunks)] for kind in "FIW"}
        for limit, optimizer in ((1, "barrier"), (p, "per-rank"), (2 * p, "barrier")):
            found = checked(p, m, costs, 1, limit, optimizer)
            names = {
                1: ("gpipe", "1f1b", "zb-h1", "zb-h2", "2bp-1f1b", "zb-auto"),
                2: ("interleaved", "bfs", "interleaved-zb", "zb-v", "vmin", "vhalf", "vzb", "v1f1b", "hanayo", "gis"),
                4: ("interleaved(chunks=4)", "hanayo(waves=2)", "zeropp(chunks=4)"),
            }[chunks]
            for name in names:
                timeline = simulate(build(name, ranks=p, microbatches=m), costs=costs, comm=1)
                busy = timeline.makespan - timeline.flush_bubble
                length = timeline.makespan if optimizer == "barrier" else timeline.span_bubble + busy
                if max(timeline.peak_activations) <= limit:
                    assert found.length <= length * (1 + 1e-9), name
                    assert found.bound <= length * (1 + 1e-9), name


def rate(row: dict[str, Any], limit: int) -> float:
    """The bubble rate that `auto` finds for a published profile, to four decimals."""
    costs = {kind: row[kind] for kind in "FIW"}
    found = auto(row["ranks"], row["microbatches"], costs, row["comm"], limit, "per-rank")
    assert max(found.timeline.peak_activations) <= limit
    return round(1 - row["microbatches"] * sum(costs.values()) / found.length, 4)


def test_published_profiles_with_the_memory_of_1f1b() -> None:
    for row in RATES:
        if row["ranks"] <= 16:
            assert rate(row, row["ranks"]) <= row["zb-h1"], row


@pytest.mark.parametrize(("model", "double"), [("1.5B", 0.1015), ("6.2B", 0.0607)])
def test_published_profiles_with_twice_the_memory(model: str, double: float) -> None:
    row = next(row for row in RATES if (row["model"], row["microbatches"]) == (model, 24))
    assert rate(row, 16) <= double


@pytest.mark.soak
@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['model']}-m{row['microbatches']}")
def test_every_published_profile(row: dict[str, Any]) -> None:
    assert rate(row, row["ranks"]) <= row["zb-h1"]
    assert rate(row, 2 * row["ranks"] - 1) <= row["zb-h2"]


@pytest.mark.parametrize(
    ("limit", "optimizer", "length"),
    [(4, "barrier", 27), (4, "per-rank", 27), (5, "per-rank", 26), (7, "per-rank", 24), (None, "barrier", 27)],
)
def test_where_zero_bubble_pays(limit: int | None, optimizer: str, length: float) -> None:
    """At F = I = W more memory than ZB-H1's buys nothing under a barrier, and all of the bubble without one."""
    found = auto(4, 8, UNIT, limit=limit, optimizer=optimizer)
    assert (found.length, found.bound) == (length, length)


def test_z3_proves_four_ranks_and_eight_microbatches() -> None:
    costs = {"F": [5, 4, 9, 4], "I": [7, 7, 9, 7], "W": [4, 7, 3, 6]}
    found = auto(4, 8, costs, 0, 4, "barrier", prove=True)
    assert found.certificate == "optimal: z3 finds no schedule of these stages shorter than 188"
    assert (found.length, found.bound, found.gap) == (188, 188, 0)


def test_two_stages_a_rank_on_the_better_placement() -> None:
    costs = {kind: [1.0] * 4 for kind in "FIW"}
    loop, vee = (auto(2, 4, costs, limit=2, optimizer=optimizer) for optimizer in ("barrier", "per-rank"))
    assert (loop.schedule.name, loop.schedule.place, loop.length) == ("interleaved-zb", (0, 1, 0, 1), 25)
    three = auto(2, 4, {kind: [1.0] * 6 for kind in "FIW"}, limit=2).schedule
    assert build(three.name, ranks=2, microbatches=4) == three and three.name == "interleaved-zb(chunks=3)"
    assert (vee.schedule.name, vee.schedule.place, vee.length) == ("zb-v", (0, 1, 1, 0), 24)


def test_whole_backwards() -> None:
    found = checked(3, 6, {"F": 1, "B": 2}, 0, None, "barrier")
    assert {action.kind for _, action in found.schedule.actions()} == {Kind.F, Kind.B}
    assert found.length == found.bound == 3 * (6 + 3 - 1)


def test_a_whole_backward_that_is_cheaper_than_its_parts() -> None:
    dear = auto(2, 4, {"F": 1, "I": 2, "W": 2, "B": 2.5}, limit=2)
    assert any(action.kind is Kind.B for _, action in dear.schedule.actions())
    assert dear.length < auto(2, 4, {"F": 1, "I": 2, "W": 2}, limit=2).length


def test_a_proof_that_takes_too_long_is_not_claimed() -> None:
    costs = {"F": [5, 4, 9, 4], "I": [7, 7, 9, 7], "W": [4, 7, 3, 6]}
    found = auto(4, 8, costs, 0, 4, "barrier", prove=True, seconds=0.001)
    assert found.certificate == "not proven within 0.001 s: z3 found nothing shorter than 188"
    assert found.bound < found.length


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 0}, ValueError, "ranks must be at least 1, not 0"),
        ({"microbatches": 1.5}, TypeError, "microbatches must be a whole number, not 1.5"),
        ({"costs": {"F": 1}}, ValueError, "costs must have F, and I and W or B, not F"),
        ({"costs": {"F": 1, "I": 1, "B": 2}}, ValueError, "costs must have F, and I and W or B, not F, I, B"),
        ({"costs": {"F": 1, "B": 1, "S": 1}}, ValueError, "costs: unknown kind 'S'; the kinds are F, I, W and B"),
        ({"costs": {"F": [1, 1, 1], "B": 2}}, ValueError, "costs must have one number a stage, 2 or a multiple of it"),
        ({"costs": {"F": [1, 1], "B": [2] * 4}}, ValueError, "costs must have one number a stage, 2 or a multiple"),
        ({"costs": {"F": -1, "B": 2}}, ValueError, "costs: 'F' must be times of at least 0, not -1"),
        ({"comm": math.inf}, ValueError, "comm must be a latency of at least 0, not inf"),
        ({"limit": 0.5}, ValueError, "limit must be at least 1, a microbatch on a rank, not 0.5"),
        ({"optimizer": "none"}, ValueError, "optimizer must be 'barrier' or 'per-rank', not 'none'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto(**{"ranks": 2, "microbatches": 4, "costs": UNIT, **arguments})
