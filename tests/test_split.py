"""The stage split against brute force, its z3 certificate, and the certificate against planted faults."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.cost import SegmentNumbers, Tied
from autopart.ir.placement import PRESETS, Placement
from autopart.schedules import build
from autopart.solver.certify import certify
from autopart.solver.memory import MemoryModel, in_flight
from autopart.solver.split import Split, SplitProblem, bottleneck, evaluate, solve_split
from tests.oracle import best_split, every_split


def numbers(
    name: str, seconds: int, parameters: int, trainable: int, saved: int, boundary: int, tied: bool
) -> SegmentNumbers:
    shared = (Tied("shared", 6),) if tied else ()
    extra = sum(t.nbytes for t in shared)
    return SegmentNumbers(name, seconds, 0, 0, 0, saved, boundary, parameters + extra, trainable + extra, shared)


@st.composite
def instances(draw: st.DrawFn) -> tuple[MemoryModel, SplitProblem, dict[str, object]]:
    count = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(count, 4)))
    small = st.integers(0, 9)
    segments = []
    for i in range(count):
        parameters = draw(st.integers(0, 40))
        trainable = draw(st.sampled_from([0, parameters // 2, parameters]))
        segments.append(numbers(f"s{i}", 0, parameters, trainable, draw(small), draw(small), draw(st.booleans())))
    times = tuple(draw(st.lists(small, min_size=count, max_size=count)))
    pinned = draw(st.lists(st.integers(0, count - 1), max_size=stages - 1, unique=True))
    settings_ = {
        "stages": stages,
        "schedule": draw(st.sampled_from(["gpipe", "1f1b"])),
        "microbatches": draw(st.integers(1, 5)),
        "preset": draw(st.sampled_from(PRESETS)),
        "dp": draw(st.integers(1, 3)),
        "ratio": draw(st.sampled_from([0, 1, 2, 1.5])),
        "limit": draw(st.integers(50, 1000)),
        "pinned": tuple(sorted(pinned)),
    }
    modes = (Placement.preset(settings_["preset"]).on("dp"),) * count
    model = MemoryModel(tuple(segments), modes, settings_["dp"], settings_["ratio"])
    problem = SplitProblem(
        times,
        tuple(s.boundary_bytes for s in segments),
        model.resident(),
        tuple(s.saved_bytes for s in segments),
        tuple(range(stages)),
        in_flight(build(settings_["schedule"], ranks=stages, microbatches=settings_["microbatches"])),
        settings_["limit"],
        settings_["pinned"],
    )
    return model, problem, settings_


@settings(max_examples=150, deadline=None, derandomize=True)
@given(instances())
def test_equals_brute_force(instance: tuple[MemoryModel, SplitProblem, dict[str, object]]) -> None:
    model, problem, given_ = instance
    expected = best_split(model.segments, problem.times, **given_)
    split = solve_split(problem)
    assert (split and (split.slowest, split.boundary, split.starts)) == expected
    if split:
        assert certify(problem, split) == split


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instances())
def test_certificate_accepts_exactly_the_fastest_splits(
    instance: tuple[MemoryModel, SplitProblem, dict[str, object]],
) -> None:
    _, problem, _ = instance
    best = solve_split(problem)
    for starts in every_split(problem.segments, problem.stages):
        split = evaluate(problem, starts)
        if split is None:
            continue
        assert best is not None
        if split.slowest == best.slowest:
            assert certify(problem, split) == split
        else:
            with pytest.raises(AssertionError, match="faster"):
                certify(problem, split)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instances())
def test_bottleneck_of_the_need_is_the_least_sufficient_limit(
    instance: tuple[MemoryModel, SplitProblem, dict[str, object]],
) -> None:
    model, problem, given_ = instance
    least = bottleneck(problem, problem.need)
    for limit in (least, least - 1):
        solved = solve_split(replace(problem, limit=limit))
        assert (solved is None) == (best_split(model.segments, problem.times, **{**given_, "limit": limit}) is None)
        assert (solved is None) == (limit < least)


def layers(count: int, stages: int, *, equal: bool, limit: int = 10**9) -> SplitProblem:
    times = tuple(100 if equal else 50 + 37 * i % 101 for i in range(count))
    saved = tuple(3 + (0 if equal else i % 5) for i in range(count))
    table = tuple(tuple(10 * (j - i) for j in range(i + 1, count + 1)) for i in range(count))
    moments = in_flight(build("1f1b", ranks=stages, microbatches=4 * stages))
    return SplitProblem(times, (7,) * count, table, saved, tuple(range(stages)), moments, limit)


def test_heavy_ends_get_fewer_segments() -> None:
    problem = replace(layers(10, 4, equal=True), times=(300, *(100,) * 8, 400))
    split = solve_split(problem)
    assert split == Split((0, 1, 5, 9), 400, 400, 21)
    assert certify(problem, split) == split


def test_ties_take_fewer_boundary_bytes_then_earlier_cuts() -> None:
    problem = replace(layers(5, 2, equal=True), times=(4, 0, 0, 0, 4), boundaries=(0, 5, 5, 4, 4))
    assert solve_split(problem) == Split((0, 3), 4, 4, 4)
    assert solve_split(replace(problem, boundaries=(5,) * 5)) == Split((0, 1), 4, 4, 5)
    assert solve_split(replace(problem, times=(1, 1, 9, 0, 0))) == Split((0, 2), 9, 9, 5)


def test_certificate_refuses_false_claims() -> None:
    problem = layers(12, 4, equal=True, limit=100)
    split = solve_split(problem)
    assert split is not None and split.starts == (0, 3, 6, 9)
    with pytest.raises(AssertionError, match="faster"):
        certify(problem, evaluate(problem, (0, 4, 7, 9)) or split)
    for wrong in (
        replace(split, busiest=split.busiest - 1),
        replace(split, boundary=split.boundary - 1),
        replace(split, starts=(0, 3, 6, 8)),
        replace(split, starts=(0, 3, 3, 9)),
    ):
        with pytest.raises(AssertionError, match="internal error"):
            certify(problem, wrong)
    with pytest.raises(AssertionError, match="refuses"):
        certify(replace(problem, limit=60), split)
    with pytest.raises(AssertionError, match="refuses"):
        certify(replace(problem, starts=(4,)), split)


def test_early_stages_hold_more_under_1f1b() -> None:
    problem = layers(8, 2, equal=True)
    tight = replace(problem, saved=(100,) * 8, limit=7 * 110)
    split = solve_split(tight)
    assert split is not None and split.starts == (0, 3), "two microbatches in flight leave room for 3 segments"
    assert solve_split(problem).starts == (0, 4)


def test_impossible_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="3 segments cannot be split into 4 stages"):
        layers(3, 4, equal=True)
    with pytest.raises(ValueError, match="more than 2 stages"):
        replace(layers(6, 2, equal=True), starts=(2, 4))
    assert solve_split(layers(6, 2, equal=True, limit=5)) is None


@pytest.mark.parametrize(
    ("count", "equal", "seconds"), [(48, True, 0.5), (48, False, 0.5), (96, True, 2), (96, False, 2)]
)
def test_split_and_proof_are_quick(count: int, equal: bool, seconds: float) -> None:
    problem = layers(count, 8, equal=equal)
    certify(layers(2, 2, equal=True), Split((0, 1), 100, 100, 7))
    began = time.process_time()
    split = solve_split(problem)
    assert split is not None
    certify(problem, split)
    assert time.process_time() - began < seconds
