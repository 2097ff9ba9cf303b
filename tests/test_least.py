"""What a step takes at least inside its segments: a true bound, which is what the exact solver finds where it can."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopart
from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from autopart.solver.axis import Axis
from autopart.solver.eliminate import Table, bounds
from autopart.solver.least import least_seconds
from autopart.solver.place import place
from tests.axis_zoo import AXIS_ZOO
from tests.tensor_axis import CHEAP
from tests.zoo import ZOO, Specimen

NAMES = "abcdef"


@st.composite
def sums(draw: st.DrawFn) -> list[Table]:
    """Tables over a few of six variables of two or three values each."""
    sizes = {name: draw(st.integers(2, 3)) for name in NAMES}
    made = []
    for _ in range(draw(st.integers(4, 8))):
        names = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)))
        shape = [sizes[name] for name in names]
        numbers = st.integers(0, 9) | st.just(torch.inf)
        costs = torch.tensor([draw(numbers) for _ in range(torch.Size(shape).numel())], dtype=torch.float64)
        made.append(Table(names, costs.reshape(shape)))
    return made


def total(tables: list[Table] | tuple[Table, ...], values: dict[str, int]) -> float:
    return sum(float(table.costs[tuple(values[name] for name in table.variables)]) for table in tables)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sums(), st.integers(0, 2), st.sampled_from([1, 4, 10, 10**6]))
def test_bounds_are_nowhere_above_the_least_and_equal_it_where_nothing_is_parted(
    tables: list[Table], kept: int, largest: int
) -> None:
    sizes = {v: n for table in tables for v, n in zip(table.variables, table.costs.shape, strict=True)}
    keep = sorted(sizes)[:kept]
    found = bounds(tables, keep, largest)
    assert all({*table.variables} <= {*keep} for table in found)
    others = sorted(sizes.keys() - {*keep})
    for given_ in product(*(range(sizes[name]) for name in keep)):
        fixed = dict(zip(keep, given_, strict=True))
        every = product(*(range(sizes[name]) for name in others))
        least = min(total(tables, fixed | dict(zip(others, each, strict=True))) for each in every)
        bound = total(found, fixed)
        assert bound <= least and (largest < 10**6 or bound == least)


def segmented(found: Specimen) -> tuple[Segmented, int]:
    call = read(found.model, found.args, found.kwargs, batch=found.batch)
    captured = captured_step(found.model, call, None, False, found.capture)
    return segment(captured), captured.batch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet", pytest.param("t5", marks=pytest.mark.soak)])
def test_what_is_solved_exactly_is_as_fast_as_the_bound(name: str) -> None:
    step, batch = segmented(AXIS_ZOO[name]())
    for axis in (Axis("tp", 2, CHEAP, batch), Axis("cp", 2, CHEAP, batch)):
        found = place(step, axis)
        assert all(each.exact for each in found.costs)
        least = least_seconds(step, axis) * 1e12
        assert least <= found.time * (1 + 1e-9) and found.time <= least * (1 + 1e-4)  # where a byte costs a trifle
        assert least_seconds(step, axis, 1 << 6) * 1e12 <= least * (1 + 1e-9)
        dearer = replace(axis, cluster=autopart.Cluster.uniform(2, 2**30, 1e9, 1e9, 1e6))
        assert place(step, dearer).time >= least_seconds(step, dearer) * 1e12 * (1 - 1e-9)


@pytest.mark.filterwarnings("ignore")
def test_a_plan_says_how_far_what_is_too_entangled_may_be_from_the_fastest() -> None:
    found = ZOO["cells"]()
    plan = autopart.plan(
        found.model, found.args, found.kwargs, mesh={"tp": 2}, batch=found.batch, capture=found.capture
    )
    assert "too entangled to be solved exactly" in plan.explain()
    assert "a placement may be faster, by " in plan.explain() or "no placement is faster all the same" in plan.explain()
