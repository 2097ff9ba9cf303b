"""The split over ranks of several stages against brute force, and its z3 certificate against planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart import schedules
from autopart.ir.placement import PRESETS, Placement
from autopart.solver import chunks
from autopart.solver.certify import certify
from autopart.solver.chunks import fastest, least_limit, solve_chunks
from autopart.solver.memory import MemoryModel, in_flight
from autopart.solver.split import Split, SplitProblem, evaluate
from tests.oracle import best_dealt, every_split
from tests.test_split import numbers

FAMILIES = ("interleaved", "bfs", "interleaved(chunks=3)", "zb-v")


@st.composite
def instances(draw: st.DrawFn) -> tuple[MemoryModel, SplitProblem, dict[str, object]]:
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    schedule = schedules.make(draw(st.sampled_from(FAMILIES)), ranks=ranks, microbatches=microbatches)
    count = draw(st.integers(schedule.stages, max(schedule.stages, 8)))
    small = st.integers(0, 9)
    segments = [
        numbers(f"s{i}", 0, p := draw(st.integers(0, 40)), p // 2, draw(small), draw(small), draw(st.booleans()))
        for i in range(count)
    ]
    times = tuple(draw(st.lists(small, min_size=count, max_size=count)))
    pinned = draw(st.lists(st.integers(1, count - 1), max_size=schedule.stages - 1, unique=True))
    settings_ = {
        "table": [[str(action) for action in row] for row in schedule.table],
        "preset": draw(st.sampled_from(PRESETS)),
        "dp": draw(st.integers(1, 3)),
        "ratio": 2,
        "limit": draw(st.integers(100, 1500)),
        "pinned": tuple(sorted(pinned)),
    }
    modes = (Placement.preset(settings_["preset"]).on("dp"),) * count
    model = MemoryModel(tuple(segments), modes, settings_["dp"], 2)
    problem = SplitProblem(
        times,
        tuple(s.boundary_bytes for s in segments),
        model.resident(),
        tuple(s.saved_bytes for s in segments),
        schedule.place,
        in_flight(schedule),
        settings_["limit"],
        settings_["pinned"],
    )
    return model, problem, settings_


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instances())
def test_equals_brute_force(instance: tuple[MemoryModel, SplitProblem, dict[str, object]]) -> None:
    model, problem, given_ = instance
    expected = best_dealt(model.segments, problem.times, **given_)
    split = solve_chunks(problem)
    assert (split and (split.busiest, split.slowest, split.boundary, split.starts)) == expected
    if split:
        assert split.exact and certify(problem, split) == split and certify(problem, split).exact
    else:
        least = least_limit(problem)
        assert best_dealt(model.segments, problem.times, **{**given_, "limit": least}) is not None
        assert best_dealt(model.segments, problem.times, **{**given_, "limit": least - 1}) is None


@settings(max_examples=20, deadline=None, derandomize=True)
@given(instances())
def test_certificate_accepts_exactly_the_fastest_splits(
    instance: tuple[MemoryModel, SplitProblem, dict[str, object]],
) -> None:
    _, problem, _ = instance
    best = solve_chunks(problem)
    for starts in list(every_split(problem.segments, problem.stages))[:12]:
        split = evaluate(problem, starts)
        if split is None:
            continue
        assert best is not None
        if split.busiest == best.busiest:
            assert certify(problem, split) == split
        else:
            with pytest.raises(AssertionError, match="faster"):
                certify(problem, split)


def layers(count: int, name: str, ranks: int, limit: int = 10**9, *, equal: bool = True) -> SplitProblem:
    """A light segment, `count` layers and a head as long as two of them, in femtoseconds."""
    schedule = schedules.make(name, ranks=ranks, microbatches=4 * ranks)
    middle = tuple(10**12 + (0 if equal else 10**11 * (37 * i % 7)) for i in range(count))
    times, size = (10**9, *middle, 2 * 10**12), count + 2
    table = tuple(tuple(10 * (j - i) for j in range(i + 1, size + 1)) for i in range(size))
    return SplitProblem(times, (7,) * size, table, (3,) * size, schedule.place, in_flight(schedule), limit)


def test_ranks_share_out_the_layers() -> None:
    problem = layers(10, "interleaved", 2)
    split = solve_chunks(problem)
    assert split is not None and split.busiest == 6 * 10**12 + 10**9 and split.slowest == 3 * 10**12 + 10**9
    assert certify(problem, split).exact
    with pytest.raises(AssertionError, match="refuses"):
        certify(problem, replace(split, starts=(0, 2, 9, 11)))
    with pytest.raises(AssertionError, match="counts as"):
        certify(problem, replace(split, slowest=1))


def test_a_rank_has_the_memory_of_all_its_stages() -> None:
    """On a V the first rank's stages keep 4 and 1 microbatches at their fullest, but not at once."""
    counts = [count for count, rank in in_flight(schedules.build("zb-v", ranks=2, microbatches=6)) if rank == 0]
    assert counts == [(3, 0, 0, 1), (4, 0, 0, 0)]
    tight = layers(10, "interleaved", 2)
    free = solve_chunks(tight)
    assert free is not None
    found = solve_chunks(replace(tight, limit=least_limit(tight)))
    assert found is not None and found.busiest > free.busiest
    assert solve_chunks(replace(tight, limit=least_limit(tight) - 1)) is None


def test_a_search_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PATIENCE", 7)
    problem = layers(12, "interleaved(chunks=3)", 2, equal=False)
    split = solve_chunks(problem)
    assert split is not None and not split.exact and not certify(problem, split).exact


@pytest.mark.parametrize(
    ("count", "name", "equal", "over"),
    [
        (48, "interleaved", True, 0.12),  # 8 ranks share 50 layers' time: one has 7
        (48, "interleaved", False, 0.04),
        (96, "bfs(chunks=4)", True, 0.07),
        (96, "bfs(chunks=4)", False, 0.02),
    ],
)
def test_many_layers_are_dealt_evenly(count: int, name: str, equal: bool, over: float) -> None:
    problem = layers(count, name, 8, equal=equal)
    split = solve_chunks(problem)
    assert isinstance(split, Split) and evaluate(problem, split.starts) == split
    assert split.busiest <= (1 + over) * fastest(problem)
    assert not certify(problem, split).exact  # too many intervals to ask z3
    if equal:
        assert split.slowest == 4 * 10**12


def test_a_busiest_rank_may_take_a_little_longer_for_a_shorter_flush() -> None:
    problem = replace(layers(6, "interleaved", 2), times=(11, 36, 6, 58, 29, 32, 43, 53))
    asked: list[Split] = []

    def flush(split: Split) -> float:
        asked.append(split)
        return split.slowest

    plain, found = solve_chunks(problem), solve_chunks(problem, flush)
    assert plain == Split((0, 2, 3, 5), 134, 128, 21) and found == Split((0, 3, 5, 7), 140, 87, 21)
    assert len(set(asked)) == len(asked) == 3 and found.slowest == min(split.slowest for split in asked)
    assert found.least == plain.least == 134 and certify(problem, found).exact
    with pytest.raises(AssertionError, match="faster"):
        certify(problem, replace(found, least=140))
