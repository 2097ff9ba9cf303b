"""In-place operations, strides and other effects within a forward: the same numbers as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.testing import assert_parity

Between = Callable[[torch.Tensor], torch.Tensor]


class Chain(nn.Module):
    """Two layers with a function between them and one after; [batch, 3, 4] throughout."""

    def __init__(self, between: Between, after: Between = torch.tanh) -> None:
        super().__init__()
        self.between, self.after = between, after
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.after(self.second(self.between(self.first(x))))
        return self.third(h).square().mean()


def slices(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 1:3] = torch.tanh(h[:, :2])
    h[:, 0] *= 2
    h[..., 1].add_(h[..., 0])
    return h


def filled(h: torch.Tensor) -> torch.Tensor:
    out = h.new_zeros(h.shape)
    for i in range(h.shape[1]):
        out[:, i] = h[:, i] * (i + 1)
    return out.masked_fill_(h > 1, 0.5)


def columns_first(h: torch.Tensor) -> torch.Tensor:
    out = torch.empty(h.shape[1], len(h), 4, dtype=h.dtype)
    out[:] = h.transpose(0, 1)
    return out.transpose(0, 1).sin()


def spectrum(h: torch.Tensor) -> torch.Tensor:
    found = torch.fft.rfft(h, dim=1)
    return torch.fft.irfft(found * found.abs().tanh(), n=3, dim=1) + torch.fft.fft2(h).real


def circular(h: torch.Tensor) -> torch.Tensor:
    return F.pad(h, (1, 2), mode="circular")[..., 1:5] * F.pad(h, (1, 0), mode="reflect")[..., :4]


def windows(h: torch.Tensor) -> torch.Tensor:
    return h.unfold(2, 2, 1).sum(-1).matmul(torch.ones(3, 4, dtype=h.dtype)) + torch.diag_embed(h)[:, 0, :3]


def geometry(h: torch.Tensor) -> torch.Tensor:
    square = h[:, :, :3] + 4 * torch.eye(3, dtype=h.dtype)
    spread = torch.cdist(h, h.detach() + 1) + torch.linalg.det(square)[:, None, None] * 0.1
    turned = torch.cross(h[..., :3], h[..., 1:], dim=-1) + torch.matrix_exp(square * 0.1)
    return h + (spread + turned + square.cumsum(1).cummax(1).values).sum(-1, keepdim=True)


def sampled(h: torch.Tensor) -> torch.Tensor:
    grid = torch.stack([h[..., :2], h[..., 2:]], 1).tanh()
    return h + F.grid_sample(h[:, None], grid, align_corners=False).sum((1, 2, 3))[:, None, None]


CHAINS: dict[str, Between] = {
    "slices": slices, "filled": filled, "columns first": columns_first, "spectrum": spectrum, "circular": circular,
    "windows": windows, "geometry": geometry, "sampled": sampled,
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_trains_as_on_one_device(name: str) -> None:
    assert_parity(Chain(CHAINS[name]), (torch.randn(5, 3, 4),), steps=1, mesh={"dp": 2}, microbatches=2)


def turned(h: torch.Tensor) -> torch.Tensor:
    """Rows and columns exchanged in memory, not in shape."""
    return h.transpose(1, 2).contiguous().transpose(1, 2)


class Turning(nn.Module):
    """What the first layer hands on is column-major, and the second sees it transposed, as one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = turned(self.first(x)) * 2
        return self.second(h.transpose(1, 2).reshape(len(h), 12)).square().mean()


@pytest.mark.parametrize("pins", [{"mesh": {"pp": 2}}, {"mesh": {"dp": 2}}], ids=["pp2", "dp2"])
def test_a_view_of_what_another_rank_sends_does_not_rely_on_strides(pins: dict[str, Any]) -> None:
    assert_parity(Turning(), (torch.randn(6, 3, 4),), steps=1, microbatches=2, **pins)
