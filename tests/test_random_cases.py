"""Random models under random plans on random batches train as on one device; a case is its number.

`--soak` runs a thousand of them, otherwise a few.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopart.testing import assert_parity

WIDTH, LENGTH, CLASSES = 8, 4, 5
CASES, TOGETHER = 1000, 10
BLOCKS = ("linear", "residual", "attention", "dropout", "noise", "norm", "conv", "again", "frozen", "skip", "alternate")
LOSSES = ("mean", "sum", "ignored", "weighted", "outside")


class Block(nn.Module):
    """One layer of a drawn kind, [batch, LENGTH, WIDTH] to the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if kind == "conv":
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if kind == "frozen":
            self.up.requires_grad_(False)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.kind == "attention":
            h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        if self.kind == "conv":
            h = self.mix(h.transpose(1, 2)).transpose(1, 2)
        if self.kind == "noise":
            h = h + 0.1 * torch.randn_like(h)
        if self.kind == "skip":
            h = h + first
        h = self.down(F.gelu(self.up(h)))
        if self.kind == "dropout":
            h = F.dropout(h, 0.25, self.training)
        return h if self.kind == "linear" else x + h


class Drawn(nn.Module):
    """An embedding, drawn blocks, and a head that may be tied to the embedding; a drawn loss of the labels."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(draw.choice(BLOCKS)) for _ in range(draw.randint(1, 4)))
        if draw.random() < 0.2:
            self.embed.weight.requires_grad_(False)
        self.loss = draw.choice(LOSSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = first = self.embed(ids)
        for block in self.blocks:
            x = block(x, first)
            if block.kind == "again":
                x = block(x, first)
            if block.kind == "alternate":
                x = torch.tanh(x)
        logits = self.head(x)
        if self.loss == "outside":
            return logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=0)
        if self.loss == "ignored":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        if self.loss == "weighted":
            weights = 1.0 + labels.flatten()
            return (each * weights).sum() / weights.sum()
        return each.sum() if self.loss == "sum" else each.mean()


def check(case: int) -> None:
    """Draw a case and compare it with one device."""
    draw = random.Random(case)
    torch.manual_seed(case)
    model = Drawn(draw)
    stages, parts = draw.choice([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
    stages = min(stages, len(model.blocks) + 1)
    microbatches = draw.randint(1, 3)
    batch = parts * microbatches + draw.randint(0, 3)
    ids, labels = torch.randint(0, CLASSES, (batch, LENGTH)), torch.randint(0, CLASSES, (batch, LENGTH))
    labels[0, 0] = 1  # a valid target in every batch
    schedule = "gpipe" if model.loss == "outside" else draw.choice(["gpipe", "1f1b"])
    recompute = draw.choice([None, None, True, ["blocks.0"]])
    pins = {
        "devices": stages * parts,
        "mesh": {"pp": stages, "dp": parts},
        "placement": draw.choice(["ddp", "zero1", "zero2", "fsdp"]),
        "schedule": schedule,
        "microbatches": microbatches,
        "recompute": recompute,
    }
    loss = (lambda logits: logits.square().mean() + logits[..., 0].sum()) if model.loss == "outside" else None
    try:
        assert_parity(model, (ids, labels), steps=2, loss=loss, **pins)
    except Exception as error:
        error.add_note(f"case {case}: {[block.kind for block in model.blocks]}, loss {model.loss}, {batch=}, {pins}")
        raise


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.soak] if first else [], id=f"from {first}")
        for first in range(0, CASES, TOGETHER)
    ],
)
def test_trains_as_on_one_device(first: int) -> None:
    for case in range(first, first + TOGETHER):
        check(case)
