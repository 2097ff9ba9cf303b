"""Small models that the tests share, each with a sample batch: ``MODELS[name]() -> (module, args, kwargs)``.

Every function seeds torch first, so two calls give equal models and batches. All are float64 (Hugging Face's losses and
rotary tables compute in float32 whatever the parameters' dtype: compare those with 1e-6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class MLP(nn.Module):
    """Four hidden layers and a mean squared error."""

    def __init__(self, width: int = 8, layers: int = 4) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
        self.layers = nn.Sequential(*blocks)
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.layers(x)), y)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose later blocks get the results of earlier ones, as a U-Net's do; the loss counts valid targets only."""

    def __init__(
        self,
        layers: int = 8,
        width: int = 16,
        heads: int = 4,
        vocabulary: int = 32,
        length: int = 8,
        *,
        skips: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.skips = skips
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        half, kept = len(self.blocks) // 2, []
        for i, block in enumerate(self.blocks):
            if self.skips and i >= half:
                x = x + kept.pop()
            x = block(x)
            if self.skips and i < half:
                kept.append(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class HalfFrozen(nn.Module):
    """The first half is frozen; the result is a dict; `mask` and `labels` are keywords that only the end needs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width))
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
        self.encoder.requires_grad_(False)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor, labels: torch.Tensor | None = None, scale: int = 3
    ) -> dict[str, Any]:
        out = self.decoder(self.encoder(x))
        if labels is None:
            return {"out": out}
        loss = ((out - labels) ** 2 * mask).sum() / mask.sum()
        return {"loss": loss, "out": out, "extra": {"none": None, "scale": scale}}


def mlp() -> Sample:
    """An MLP on a batch of 6."""
    torch.manual_seed(0)
    return MLP().double(), (torch.randn(6, 8).double(), torch.randn(6, 3).double()), {}


def gpt() -> Sample:
    """A GPT of 8 layers with tied embedding and skips, on a batch of 8 with some targets ignored."""
    torch.manual_seed(0)
    model = GPT().double()
    ids, labels = torch.randint(0, 32, (8, 8)), torch.randint(0, 32, (8, 8))
    labels[torch.rand(8, 8) < 0.2] = -100
    return model, (ids, labels), {}


def half_frozen() -> Sample:
    """The half-frozen model on a batch of 6."""
    torch.manual_seed(0)
    model = HalfFrozen().double()
    keywords = {"labels": torch.randn(6, 4).double(), "mask": torch.rand(6, 4).double()}
    return model, (torch.randn(6, 8).double(),), keywords


def gpt2() -> Sample:
    """Hugging Face's GPT-2 with 3 layers, without dropout, on a batch of 4."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).double()
    return model, (), _tokens(64)


def llama() -> Sample:
    """Hugging Face's Llama with 4 layers and grouped key/value heads, on a batch of 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).double()
    return model, (), _tokens(64)


def _tokens(vocabulary: int) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (4, 8))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


MODELS: dict[str, Callable[[], Sample]] = {
    "mlp": mlp,
    "gpt": gpt,
    "half_frozen": half_frozen,
    "gpt2": gpt2,
    "llama": llama,
}
"""The models of the parity suite."""
