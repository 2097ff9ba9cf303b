"""Segments by kind: sums and largest values of any run, against those counted segment by segment."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.cost import SegmentCost, batch_symbol
from autopart.solver.kinds import Kinds, Largest, numbered


@st.composite
def rows(draw: st.DrawFn) -> tuple[Kinds, list[int]]:
    """Some segments' kinds, and a value of every kind."""
    kinds = Kinds.telling(draw(st.lists(st.integers(0, 4), min_size=1, max_size=12)))
    count = len(kinds.counts)
    return kinds, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))


@given(rows())
def test_sums_and_largest_of_runs(drawn: tuple[Kinds, list[int]]) -> None:
    kinds, values = drawn
    every = [values[kind] for kind in kinds.of]
    largest, sums = Largest(kinds, values), kinds.sums(values)
    assert kinds.total(values) == sum(every) == sums[-1]
    assert [kinds.of[first] for first in kinds.firsts] == list(range(len(kinds.counts)))
    for start in range(len(every)):
        for stop in range(start + 1, len(every) + 1):
            run = sorted(every[start:stop], reverse=True)
            assert sums[stop] - sums[start] == sum(run)
            assert largest.value(start, stop) == run[0]
            assert largest.two(start, stop) == sum(run[:2])


def test_costs_are_told_apart_by_all_but_their_names() -> None:
    b = batch_symbol()
    one = SegmentCost("a", 2 * b, 4 * b, b, b, 10**6, 10**6, 3 * b, b)
    alike = replace(one, name="b", saved_bytes=b + 2 * b, parameter_bytes=int("1000000"))
    other = replace(one, name="a", saved_bytes=3 * b + 1)
    assert numbered([one, alike, None, other, one, None]) == [0, 0, 1, 2, 0, 1]
