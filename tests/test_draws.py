"""Stateless random numbers: the hash against its definition in whole numbers, its statistics, the names of draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.capture import capture, read
from autopart.draws import SPREAD, Draws, bernoulli, following, normal, uniform
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.passes.draws import with_draws
from autopart.passes.normalise import normalise

CPU = torch.device("cpu")
COUNT = 1 << 16


def bits(draw: torch.Tensor, count: int = COUNT) -> torch.Tensor:
    """The 32 random bits of the first elements of a draw, as whole numbers."""
    whole = uniform(draw, (count,), dtype=torch.float64, device=CPU)
    return torch.floor(whole * 2**32).long()


# ---- the definition --------------------------------------------------------------------------------------------------


def hashed(index: int, key: Sequence[int]) -> int:
    """One element's 32 bits, in Python's whole numbers."""
    low = 2**32 - 1
    x = (index + key[0]) & low
    x = ((x ^ x >> 17) * 0xED5AD4BB + key[1] + (index >> 32) * SPREAD) & low
    x = ((x ^ x >> 11) * 0xAC4C1B51 + key[2]) & low
    x = (x ^ x >> 15) * 0x31848BAB & low
    return x ^ x >> 14


def indices(size: Sequence[int], dim: int | None, first: int, samples: int, whole: int) -> list[int]:
    """The place in the unsplit tensor of every element of a piece."""
    full, start = list(size), [0] * len(size)
    if dim is not None:
        full[dim], start[dim] = size[dim] // samples * whole, size[dim] // samples * first
    found = []
    for place in itertools.product(*map(range, size)):
        index = 0
        for extent, at, offset in zip(full, place, start, strict=True):
            index = index * extent + at + offset
        found.append(index)
    return found


PIECES = [
    ((6, 5), 0, 2, 3, 9),
    ((4, 6, 5), 1, 1, 2, 7),
    ((3, 2), 1, 0, 2, 5),
    ((7,), None, 0, 1, 1),
    ((), None, 0, 1, 1),
    ((0, 3), 0, 2, 1, 9),
    ((3, 4), 0, 2**31, 3, 2**40),  # beyond 32 bits
    ((3, 4), 1, 2**29, 4, 2**30),  # rows on both sides of 2**32
    ((2, 70_000), 0, 0, 2, 4),  # more than is hashed at once
    ((300, 400), 1, 2**25, 4, 2**27),
]


@pytest.mark.parametrize("piece", PIECES, ids=str)
def test_a_piece_is_the_hash_of_the_places_of_its_elements(piece: Any) -> None:
    size, dim, first, samples, whole = piece
    draw = Draws(7, 2).of("h.3.drop#0", first, samples, whole)
    key = draw.tolist()[:3]
    places = indices(size, dim, first, samples, whole)
    step = max(1, len(places) // 500)
    one = [hashed(i, key) for i in places[::step]]
    two = [hashed(i, [*key[1:], key[0]]) for i in places[::step]]
    double = uniform(draw, size, dim, dtype=torch.float64, device=CPU).reshape(-1)[::step]
    assert double.tolist() == [((a << 20 | b >> 12) + 0.5) * 2.0**-52 for a, b in zip(one, two, strict=True)]
    for dtype, count in ((torch.float32, 23), (torch.float16, 10), (torch.bfloat16, 7)):
        found = uniform(draw, size, dim, dtype=dtype, device=CPU).reshape(-1)[::step]
        assert found.dtype == dtype and found.tolist() == [((a >> 32 - count) + 0.5) * 2.0**-count for a in one]
    kept = bernoulli(draw, 0.3, size, dim, device=CPU).reshape(-1)[::step]
    assert kept.tolist() == [(a + 2**31) % 2**32 < round(0.3 * 2**32) for a in one]
    bell = normal(draw, size, dim, dtype=torch.float64, device=CPU).reshape(-1)[::step]
    assert torch.equal(bell, torch.erfinv(double * 2 - 1) * 2**0.5)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_of_a_draw_make_up_the_whole(dim: int) -> None:
    draws, size = Draws(1, 0), (6, 7, 5)
    whole = uniform(draws.of("x#0"), size, dtype=torch.float64, device=CPU)
    parts = []
    for first, samples in ((0, 1), (1, 3), (4, size[dim] - 4)):
        shape = [samples if i == dim else n for i, n in enumerate(size)]
        draw = draws.of("x#0", first, samples, size[dim])
        parts.append(uniform(draw, shape, dim, dtype=torch.float64, device=CPU))
    assert torch.equal(torch.cat(parts, dim), whole)


def test_the_ends_of_probability_are_certain() -> None:
    draw = Draws(0, 0).of("x#0")
    assert bernoulli(draw, 1.0, (1000,), device=CPU).all() and not bernoulli(draw, 0.0, (1000,), device=CPU).any()


def test_calls_count_from_a_change_of_the_seed() -> None:
    one = following(None, 5)
    two = following(one, 5)
    assert (one, two, following(two, 5)) == (Draws(5, 0), Draws(5, 1), Draws(5, 2))
    assert following(two, 6) == Draws(6, 0)
    assert Draws(5, 0).of("x#0").tolist() == Draws(5, 0).of("x#0").tolist()


# ---- statistics ------------------------------------------------------------------------------------------------------


def chi_square(counts: torch.Tensor) -> float:
    """Standard deviations of Pearson's statistic of equally likely cells from what is expected."""
    expected = counts.double().mean()
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def correlations(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Standard deviations from 0 of the correlation of every bit of one sequence with every bit of the other."""
    planes = [(x[:, None] >> torch.arange(32) & 1).double() * 2 - 1 for x in (one, two)]
    return planes[0].T @ planes[1] / math.sqrt(len(one))


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that must not look alike: neighbours, and equal places of neighbouring draws."""
    here = bits(Draws(0, 0).of("h.0.drop#0"), COUNT + 4096)
    others = {
        "the next element": here[1:],
        "the element 1024 on": here[1024:],
        "the element 4096 on": here[4096:],
        "the next call": bits(Draws(0, 1).of("h.0.drop#0")),
        "the next seed": bits(Draws(1, 0).of("h.0.drop#0")),
        "the next operation": bits(Draws(0, 0).of("h.0.drop#1")),
        "the next layer": bits(Draws(0, 0).of("h.1.drop#0")),
        "the second word": torch.floor(uniform(Draws(0, 0).of("h.0.drop#0"), (COUNT,), dtype=torch.float64, device=CPU)
                                       * 2**52).long() & 0xFFFFF,
        "the next 2**32 elements": bits_from(2**32),
    }  # fmt: skip
    return {name: (here[:COUNT], other[:COUNT]) for name, other in others.items()}


def bits_from(first: int) -> torch.Tensor:
    draw = Draws(0, 0).of("h.0.drop#0", first, COUNT, 2**40)
    return torch.floor(uniform(draw, (COUNT,), 0, dtype=torch.float64, device=CPU) * 2**32).long()


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_bits_and_buckets_are_uniform(seed: int) -> None:
    x = bits(Draws(seed, 0).of("h.0.drop#0"), 1 << 18)
    ones = (x[:, None] >> torch.arange(32) & 1).sum(0)
    assert ((ones - len(x) / 2).abs() < 4.5 * math.sqrt(len(x) / 4)).all()
    for shift, cells in ((24, 256), (16, 256), (8, 256), (0, 256), (22, 1024)):
        assert abs(chi_square(torch.bincount(x >> shift & cells - 1, minlength=cells))) < 4.5, (shift, cells)
    pairs_of_neighbours = (x[:-1:2] >> 27) * 32 + (x[1::2] >> 27)
    assert abs(chi_square(torch.bincount(pairs_of_neighbours, minlength=1024))) < 4.5


def test_sequences_are_independent() -> None:
    for name, (one, two) in pairs().items():
        deviations = correlations(one, two)
        # of 1024 correlations the largest is beyond 5.5 once in 26,000
        assert deviations.abs().max() < 5.5, (name, deviations.abs().max())
        joint = (one >> 28) * 16 + (two >> 28) if name != "the second word" else (one >> 28) * 16 + (two >> 16)
        assert abs(chi_square(torch.bincount(joint, minlength=256))) < 4.5, name


def test_the_statistics_see_a_weak_generator() -> None:
    """Sequences that are shifts of one another, or linear in the index, do not pass what the hash passes."""
    here = bits(Draws(0, 0).of("h.0.drop#0"))
    assert correlations(here[7:], here[:-7].roll(-7)).abs().max() > 100
    counter = torch.arange(COUNT) * 0x9E3779B1 % 2**32
    assert abs(chi_square(torch.bincount((counter[:-1:2] >> 27) * 32 + (counter[1::2] >> 27), minlength=1024))) > 100


def test_runs_of_a_mask_are_as_long_as_chance_has_it() -> None:
    kept = bernoulli(Draws(3, 0).of("drop#0"), 0.9, (1 << 18,), device=CPU)
    gaps = torch.diff((~kept).nonzero().flatten())
    counts = torch.bincount(gaps.clamp(max=40), minlength=41)[1:].double()
    chance = torch.tensor([0.9 ** (n - 1) * 0.1 for n in range(1, 40)] + [0.9**39]).double() * len(gaps)
    statistic = float(((counts - chance) ** 2 / chance).sum())
    assert abs(statistic - 39) / math.sqrt(2 * 39) < 4.5


def test_normal_numbers_have_the_moments_and_the_tails() -> None:
    z = normal(Draws(0, 0).of("x#0"), (1 << 18,), dtype=torch.float64, device=CPU)
    root = math.sqrt(len(z))
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 4.5 * math.sqrt(spread) / root, power
    beyond = float((z.abs() > 3).double().mean())
    assert abs(beyond - 0.0026998) < 4.5 * math.sqrt(0.0027) / root


# ---- names -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Draws by a module, by functions of its own, and by a module that others use too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.lin, self.drop, self.shared = nn.Linear(4, 4), nn.Dropout(0.5), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop(x)  # drawn for nothing, and counted all the same
        x = self.drop(self.lin(x))
        x = F.dropout(x + torch.rand_like(x), 0.3, self.training)
        return self.shared(x)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Dropout(0.1)
        self.h = nn.ModuleList(Layer(shared) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


NAMES = ["h.0.drop#1", "h.0#0", "h.0#1", "h.0.shared#0", "h.1.drop#1", "h.1#0", "h.1#1", "h.0.shared#1"]


@pytest.mark.parametrize("route", ["compile", "direct"])
def test_draws_are_named_by_module_and_occurrence(route: str) -> None:
    module = Layers()
    made = normalise(capture(module, read(module, (torch.randn(4, 4),)), route=route))
    assert [item.target for item in made.of_kind("random")] == NAMES


def captured(forward: Callable[..., Any]) -> Captured:
    module = type("Model", (Layers,), {"forward": forward})()
    return capture(module, read(module, (torch.randn(4, 4),)), route="direct")


def test_a_generator_of_ones_own_is_refused() -> None:
    generator = torch.Generator()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(x).uniform_(generator=generator)
        return (self.h[0].lin(x) * noise).sum()

    with pytest.raises(CaptureError, match=r"test_draws.py:\d+.*draws random numbers from a generator of its own"):
        with_draws(captured(forward))


def test_a_draw_in_the_backward_is_refused() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.rand_like(grad)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return Noisy.apply(self.h[0].lin(x)).sum()

    with pytest.raises(CaptureError, match="draws random numbers during the backward"):
        with_draws(captured(forward))


def test_a_draw_whose_place_in_the_batch_is_unknown_is_refused() -> None:
    """The batch is inside of a dim, where a draw of that size has it outside."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.h[0].lin(x).t().reshape(-1), 0.5).sum()

    with pytest.raises(CaptureError, match="relates the samples to each other"):
        normalise(captured(forward))
