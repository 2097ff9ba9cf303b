"""Unequal shares of the batch on data ranks: how they are dealt, one device's numbers, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopart
from autopart.ir.mesh import Mesh, pieces
from autopart.testing import assert_parity
from tests.test_chunked import batch
from tests.test_chunked_inside import Model


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 200))
def test_shares_make_up_the_batch_in_proportion(shares: list[int], samples: int) -> None:
    mesh = Mesh.of({"dp": shares})
    taken, total = mesh.dealt(samples), sum(shares)
    assert sum(taken) == samples
    assert all(abs(n - samples * share / total) < 1 for n, share in zip(taken, shares, strict=True))
    assert mesh.dealt(total * samples) == tuple(share * samples for share in shares)
    if len(set(shares)) == 1:
        assert not mesh.shares and taken == pieces(samples, len(shares))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), st.integers(0, 12))
def test_no_other_deal_is_nearer_to_the_proportion(shares: list[int], samples: int) -> None:
    def away(sizes: tuple[int, ...]) -> Fraction:
        exact = (Fraction(samples * share, sum(shares)) for share in shares)
        return sum(((size - wanted) ** 2 for size, wanted in zip(sizes, exact, strict=True)), Fraction(0))

    every = (sizes for sizes in product(range(samples + 1), repeat=len(shares)) if sum(sizes) == samples)
    assert away(Mesh.of({"dp": shares}).dealt(samples)) == min(map(away, every))


@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"pp": 2, "dp": (1, 3)}, {"placement": "fsdp", "microbatches": 2}),
        pytest.param({"dp": (3, 1)}, {"placement": "zero1"}, marks=pytest.mark.soak),
        pytest.param({"dp": (5, 2, 1), "pp": 2}, {"placement": "zero2", "schedule": "zb-h1"}, marks=pytest.mark.soak),
        pytest.param({"dp": (3, 1), "tp": 2}, {"placement": "fsdp", "microbatches": 2}, marks=pytest.mark.soak),
    ],
)
def test_numbers(mesh: dict[str, Any], pins: dict[str, Any]) -> None:
    """Masks and valid targets too: 12 samples are dealt as 3 and 9, or 8, 3 and 1."""
    torch.manual_seed(0)
    assert_parity(Model(), batch(12, 8, 12), mesh=mesh, **pins)


def test_bytes_outputs_and_other_batches() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    x = torch.randn(8, 4).double()
    mine = autopart.parallelize(plain, mesh={"dp": (3, 1)}, capture="direct", outputs="all")
    assert mine(x).shape == (8, 3)
    mine(x).square().sum().backward()
    assert all(rank.bytes_sent == rank.predicted_bytes for rank in mine.report().ranks)
    assert mine.plan.mesh.shares == (3, 1) and autopart.Plan.from_json(mine.plan.to_json()) == mine.plan
    mine.eval()
    with torch.no_grad():
        for samples in (1, 3, 7):
            torch.testing.assert_close(mine(x[:samples]), mine(x)[:samples])


def test_a_ragged_last_batch_trains_as_on_one_device_and_one_too_small_is_refused() -> None:
    """Planned for 8 samples, dealt as 6 and 2: 7 are dealt as 5 and 2, 5 as 4 and 1, which has no second microbatch."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    x = torch.randn(8, 4).double()
    mine = autopart.parallelize(plain, mesh={"dp": (3, 1)}, microbatches=2, capture="direct", outputs="all")
    mine(x).square().mean().backward()
    mine.zero_grad()
    loss, expected = mine(x[:7]).square().mean(), plain(x[:7]).square().mean()
    loss.backward()
    grads = torch.autograd.grad(expected, list(plain.parameters()))
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    for (name, found), grad in zip(mine.full_grads().items(), grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-14, msg=name)
    with pytest.raises(
        ValueError, match=r"the 1 samples of data rank 1 \(dp=3:1 deals 5 as \(4, 1\)\) cannot be .* or shares that"
    ):
        mine(x[:5])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": (3, 1)}, "'tp' must be a whole number"),
        ({"dp": (3, 0)}, "shares of 'dp' must be whole numbers of at least 1"),
        ({"dp": (7, 1)}, r"mesh: dp=7:1 deals \(4, 0\) of 4 samples: too few"),
    ],
)
def test_what_is_refused(mesh: dict[str, Any], message: str) -> None:
    model, x = torch.nn.Linear(4, 1), torch.randn(4, 4)
    with pytest.raises(ValueError, match=message):
        autopart.plan(model, (x,), mesh=mesh, loss_fn=torch.sum, capture="direct")


def test_samples_that_compute_together_have_equal_shares() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), torch.randn(8, 4)
    with pytest.raises(ValueError, match="compute together, so dp has equal parts"):
        autopart.plan(model, (x,), mesh={"dp": (3, 1)}, loss_fn=torch.sum, capture="direct")
