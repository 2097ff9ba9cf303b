"""Which units travel together, and how their names are written."""

from __future__ import annotations

import pytest
import torch

from autopart.codegen.moves import _buckets
from autopart.codegen.roll import listed
from autopart.ir.placement import Placement
from autopart.ir.state import Parameter, Unit
from autopart.testing import assert_parity
from tests.models import MODELS
from tests.test_emit import program


def unit(name: str, elements: int, placement: str = "fsdp", dtype: torch.dtype = torch.float32) -> Unit:
    return Unit(name, (Parameter(name, (elements,), dtype),), True, Placement.preset(placement).on("dp"), (0,))


def test_neighbours_travel_together_up_to_the_limit() -> None:
    a, b, c, d = (unit(name, 4) for name in "abcd")
    found = _buckets([[a], [b, c], [d]], 2, 32)
    assert found == [((a, b), 0, 1), ((c, d), 1, 2)]
    assert [bucket for bucket, *_ in _buckets([[a], [b], [c]], 2, 15)] == [(a,), (b,), (c,)]


def test_what_is_used_twice_or_is_unlike_travels_alone() -> None:
    shared, a, b = (unit(name, 2) for name in ("shared", "a", "b"))
    assert _buckets([[shared, a], [b, shared]], 2, 100) == [
        ((shared,), 0, 0),
        ((a, b), 0, 1),
        ((shared,), 1, 1),
    ]
    half, other = unit("half", 2, dtype=torch.float16), unit("other", 2, "zero2")
    assert [bucket for bucket, *_ in _buckets([[a], [half], [b], [other]], 2, 100)] == [(a,), (half,), (b,), (other,)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], '("a",)'),
        (["a", "b"], '("a", "b")'),
        (["h.0", "h.1"], '("h.0", "h.1")'),
        (["e", "h.0", "h.1", "h.2", "o"], '("e", *(f"h.{i}" for i in range(3)), "o")'),
        (["h.4", "h.3", "h.2"], '(*(f"h.{i}" for i in reversed(range(2, 5))),)'),
        (["h.0", "h.2", "h.4"], '("h.0", "h.2", "h.4")'),
    ],
)
def test_names_are_listed_as_a_person_would(names: list[str], text: str) -> None:
    assert listed(names) == text
    assert eval(text) == tuple(names)


@pytest.mark.parametrize(
    ("placement", "bucket"),
    [
        ("fsdp", 700),
        pytest.param("fsdp", 2000, marks=pytest.mark.soak),
        ("ddp", 700),
        ("zero1", 2000),
        ("zero2", 2000),
    ],
)
def test_trains_as_one_device_however_units_travel(placement: str, bucket: int) -> None:
    made = program("gpt", (("dp", 2),), placement, 2, "1f1b", bucket)
    assert_parity(*MODELS["gpt"](), plan=made, steps=2)
