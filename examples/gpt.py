"""A byte-level GPT in plain PyTorch, the English text it learns, and a sampler. Nothing here knows of autopart."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Tokens are bytes, so the vocabulary has 256 entries."""

    layers: int = 4
    width: int = 96
    heads: int = 4
    context: int = 64
    vocabulary: int = 256


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then an MLP, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer: `forward(ids)` gives logits, `forward(ids, targets)` the mean cross-entropy."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> Tensor:
    """The bytes of the language reference that every CPython carries: about half a megabyte of English, or more."""
    topics = pydoc_data.topics.topics
    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def batches(batch: int, context: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: `batch` random windows of the text as (ids, the ids that follow), the same for the same seed."""
    data, generator = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
        window = data[starts + torch.arange(context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


@torch.no_grad()
def generate(model: GPT, prompt: str, count: int = 200, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` and `count` bytes more, drawn from the model one at a time."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(ids[:, -model.config.context :])[0, -1] / temperature
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def sample(batch: int = 8) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A model and the arguments of one call, for `autopart plan` and `autopart inspect`."""
    config = Config()
    return GPT(config), next(batches(batch, config.context))
