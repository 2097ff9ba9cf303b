"""Causal attention in slices of the sequence equals that of whole ones, however queries, keys and values come about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.passes.segment import segment
from autopart.passes.slice_sequence import slice_sequence
from autopart.testing import assert_parity

TOKENS, WIDTH, HEADS = 7, 8, 4

Attend = Callable[["Attending", torch.Tensor], torch.Tensor]


class Attending(nn.Module):
    """An embedding, attention as a function writes it, and a loss."""

    def __init__(self, attend: Attend, *, shifted: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, WIDTH)
        self.q, self.k, self.v, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend, self.shifted = attend, shifted

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.shifted:
            ids, labels = ids[:, :-1], ids[:, 1:]
        x = self.wte(ids)
        x = x + self.attend(self, x).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten() % WIDTH)

    def heads(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2)

    def three(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.heads(layer, x) for layer in (self.q, self.k, self.v)]


def plain(self: Attending, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*self.three(x), is_causal=True, scale=0.7)


def grouped(self: Attending, x: torch.Tensor) -> torch.Tensor:
    q, k, v = self.three(x)
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, 2:], is_causal=True, enable_gqa=True)


def turned(self: Attending, x: torch.Tensor) -> torch.Tensor:
    """Queries and keys turned by their position, as in rotary embeddings."""
    angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0]).double()
    q, k, v = self.three(x)
    turn = (torch.cat([t[..., :1] * angle.cos() - t[..., 1:] * angle.sin(), t[..., 1:]], -1) for t in (q, k))
    return F.scaled_dot_product_attention(*turn, v, is_causal=True)


def window(self: Attending, x: torch.Tensor) -> torch.Tensor:
    """The last three tokens alone."""
    behind = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(*self.three(x), attn_mask=(behind >= 0) & (behind < 3))


def twice(self: Attending, x: torch.Tensor) -> torch.Tensor:
    """Two attend to the same keys and values."""
    q, k, v = self.three(x)
    first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(first, k, v, is_causal=True) + first


def frozen(self: Attending, x: torch.Tensor) -> torch.Tensor:
    """Nothing learns by the keys."""
    q, k, v = self.three(x)
    return F.scaled_dot_product_attention(q, k.detach(), v, is_causal=True)


def sample(attend: Attend, *, shifted: bool = False) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = Attending(attend, shifted=shifted).double()
    return model, (torch.randint(0, 11, (4, TOKENS)), torch.randint(0, 11, (4, TOKENS)))


@pytest.mark.parametrize(
    ("attend", "shifted"),
    [
        (twice, True),
        *(
            pytest.param(each, at, marks=pytest.mark.soak)
            for each, at in ((plain, False), (grouped, False), (turned, True), (window, True), (frozen, False))
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_trains_as_one_device(attend: Attend, shifted: bool) -> None:
    model, args = sample(attend, shifted=shifted)
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "schedule": "seq1f1b(slices=3)", "microbatches": 2}
    assert_parity(model, args, steps=2, **pins)


def test_the_cache_and_the_gradients_of_keys_as_nodes() -> None:
    """Slice 1 attends to its keys behind those of slice 0, under a mask; a key has one gradient in the end."""
    model, args = sample(plain)
    step = captured_step(model, read(model, args, {}), None, False, "direct")
    made = slice_sequence(segment(step), 2).captured
    by_name = {name: node for node in made.nodes for name in node.names()}
    values = {value.name: value for value in made.values()}
    forwards = [node for node in made.nodes if "attention" in node.opname and not node.backward]
    first, second = forwards
    assert first.args[4] is True and second.args[4] is False
    cache = by_name[second.args[1].name]
    assert cache.opname == "aten.cat.default" and cache.args[0][0] == first.args[1]
    assert values[cache.names()[0]].at(1) == (1, HEADS, TOKENS, 2)
    mask = by_name[dict(second.kwargs)["attn_mask"].name]
    assert mask.opname == "aten.triu.default" and mask.args[1] == 5 and values[mask.names()[0]].at(1) == (3, TOKENS)
    late, early = (node for node in made.nodes if "attention" in node.opname and node.backward)
    for own, all_so_far in zip(early.names()[1:], late.names()[1:], strict=True):
        (total,) = (node for node in made.nodes if node.opname == "aten.add.Tensor" and own in node.refs())
        rest = by_name[next(name for name in total.refs() if name != own)]  # a dense copy of a part of the late one's
        part = by_name[rest.refs()[0]]
        assert part.opname == "aten.slice.Tensor" and (part.refs()[0], *part.args[1:]) == (all_so_far, 2, 0, 4)
        assert sum(rest.names()[0] in node.refs() for node in made.nodes) == 1
