"""Ordinary models, each as small as its kind allows, with a sample batch: ``ZOO[name]() -> Specimen``.

Every function seeds torch first, so two calls give equal models and batches. Dropout is off and norms are within a
sample unless an argument says otherwise, as it does in `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Specimen:
    """A model with one call of it; `batch` names the batch dims that are not 0, as `parallelize` takes them.

    So are `semantics` and `capture`, where they are not the usual ones.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, int | None] | None = None
    semantics: str = "exact"
    capture: str = "direct"


def integers(high: int, *shape: int) -> torch.Tensor:
    """Class labels or tokens."""
    return torch.randint(0, high, shape)


# ---- images ----------------------------------------------------------------------------------------------------------


def norm_layer(kind: str, channels: int) -> nn.Module:
    """A GroupNorm ("group") or a BatchNorm ("batch")."""
    return nn.GroupNorm(2, channels) if kind == "group" else nn.BatchNorm2d(channels)


class Residual(nn.Module):
    """A residual block; the skip is a strided 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outside)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """A residual CNN for classes, with label smoothing."""

    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm_layer(norm, 4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layers = nn.Sequential(
            Residual(4, 4, 1, norm), Residual(4, 4, 1, norm), Residual(4, 8, 2, norm), Residual(8, 8, 1, norm)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.layers(self.pool(self.stem(images)))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(h, 1).flatten(1)), labels, label_smoothing=0.1)


def resnet(norm: str = "group") -> Specimen:
    """A residual CNN with GroupNorm (or BatchNorm)."""
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 3, 8, 8), integers(5, SAMPLES)
    return Specimen(ResNet(norm), batch, semantics="exact" if norm == "group" else "accumulate")


class UNet(nn.Module):
    """A U-Net of depth 2; `up` is how it grows: "nearest", "bilinear" or "transposed" convolutions.

    Its convolutions have BatchNorms if `normed`.
    """

    def __init__(self, up: str, normed: bool, widths: tuple[int, ...] = (3, 4, 6)) -> None:
        super().__init__()
        self.up, self.normed = up, normed
        self.first = self.twice(1, widths[0])
        self.down = nn.ModuleList(self.twice(a, b) for a, b in pairwise(widths))
        pairs = list(pairwise(widths))[::-1]
        grown = nn.ConvTranspose2d if up == "transposed" else nn.Conv2d
        self.grow = nn.ModuleList(grown(b, a, *((2, 2) if up == "transposed" else (1,))) for a, b in pairs)
        self.join = nn.ModuleList(self.twice(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def twice(self, a: int, b: int) -> nn.Module:
        norms = [nn.BatchNorm2d(b) if self.normed else nn.Identity() for _ in range(2)]
        one, two = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        return nn.Sequential(one, norms[0], nn.GELU(), two, norms[1], nn.SiLU())

    def forward(self, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        h, kept = self.first(images), []
        for block in self.down:
            kept.append(h)
            h = block(F.max_pool2d(h, 2))
        for grow, join in zip(self.grow, self.join, strict=True):
            if self.up == "nearest":
                h = F.interpolate(h, scale_factor=2, mode="nearest")
            elif self.up == "bilinear":
                h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
            h = join(torch.cat([kept.pop(), grow(h)], dim=1))
        return F.binary_cross_entropy_with_logits(self.head(h), masks, pos_weight=torch.tensor(2.0, dtype=h.dtype))


def unet(up: str = "nearest", *, normed: bool = False) -> Specimen:
    """A U-Net, with BatchNorms if `normed`."""
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 1, 8, 8), (torch.rand(SAMPLES, 1, 8, 8) > 0.5).double()
    return Specimen(UNet(up, normed), batch, semantics="accumulate" if normed else "exact")


def vit(dropout: float = 0.0) -> Specimen:
    """Hugging Face's vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    images, labels = torch.randn(SAMPLES, 3, 8, 8), integers(3, SAMPLES)
    return Specimen(ViTForImageClassification(config), (), {"pixel_values": images, "labels": labels})


# ---- sequences -------------------------------------------------------------------------------------------------------


class RecurrentLM(nn.Module):
    """A language model on `nn.LSTM` or `nn.GRU`; without `batch_first` its batch is dim 1."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], batch_first: bool, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = kind(6, 5, num_layers=2, batch_first=batch_first, dropout=dropout)
        self.head = nn.Linear(5, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def recurrent(kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, batch_first: bool = True, dropout: float = 0.0) -> Specimen:
    """A recurrent language model; some targets are ignored."""
    torch.manual_seed(0)
    shape = (SAMPLES, 4) if batch_first else (4, SAMPLES)
    labels = integers(11, *shape)
    labels[torch.rand(shape) < 0.3] = -100
    batch = None if batch_first else {"ids": 1, "labels": 1}
    return Specimen(RecurrentLM(kind, batch_first, dropout), (integers(11, *shape), labels), batch=batch)


class CellLoop(nn.Module):
    """Two GRU cells in a loop over time, the state a tensor of zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(5, 11)
        self.cells = nn.ModuleList([nn.GRUCell(6, 5), nn.GRUCell(5, 5)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        states, out = [x.new_zeros(ids.shape[0], 5) for _ in self.cells], []
        for step in range(ids.shape[1]):
            h = x[:, step]
            for i, cell in enumerate(self.cells):
                states[i] = h = cell(h, states[i])
            out.append(self.head(h))
        return F.cross_entropy(torch.stack(out, dim=1).transpose(1, 2), labels)


def cells() -> Specimen:
    """GRU cells in a loop."""
    torch.manual_seed(0)
    return Specimen(CellLoop(), (integers(11, SAMPLES, 4), integers(11, SAMPLES, 4)))


class EncoderDecoder(nn.Module):
    """`nn.Transformer` as torch has it by default: the batch is dim 1 of every tensor but the padding mask."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(13, 8)
        self.transformer = nn.Transformer(8, 2, 2, 4, 16, dropout=dropout)
        self.head = nn.Linear(8, 13)

    def forward(
        self, src: torch.Tensor, tgt: torch.Tensor, labels: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        source, target = self.embed(src), self.embed(tgt)
        mask = self.transformer.generate_square_subsequent_mask(len(tgt), dtype=source.dtype) if self.causal else None
        h = self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def transformer(causal: bool = True, padding: bool = False, dropout: float = 0.0) -> Specimen:
    """An encoder-decoder transformer; `padding` masks the end of some sources."""
    torch.manual_seed(0)
    tensors = integers(13, 5, SAMPLES), integers(13, 4, SAMPLES), integers(13, 4, SAMPLES)
    masks = (torch.arange(5) >= integers(4, SAMPLES, 1) + 2,) if padding else ()
    return Specimen(
        EncoderDecoder(causal, dropout), (*tensors, *masks), batch={"src": 1, "tgt": 1, "labels": 1, "padding": 0}
    )


def bert(dropout: float = 0.0) -> Specimen:
    """Hugging Face's BERT with a padding mask, its loss over the masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    ids, labels = integers(32, SAMPLES, 6), integers(32, SAMPLES, 6)
    labels[torch.rand(SAMPLES, 6) < 0.6] = -100
    mask = (torch.arange(6) < integers(4, SAMPLES, 1) + 3).long()
    return Specimen(BertForMaskedLM(config), (), {"input_ids": ids, "attention_mask": mask, "labels": labels})


def gpt2(dropout: float, *, checkpointed: bool = False) -> Specimen:
    """Hugging Face's GPT-2, its blocks checkpointed as the library does it if asked."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=3, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = integers(32, SAMPLES, 6)
    labels = ids.masked_fill(torch.rand(SAMPLES, 6) < 0.3, -100)
    capture = "compile" if checkpointed else "direct"
    return Specimen(model, (), {"input_ids": ids, "labels": labels}, capture=capture)


def t5(dropout: float = 0.0) -> Specimen:
    """Hugging Face's T5: relative position buckets that all layers share, one embedding for encoder, decoder, head."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=dropout,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    ids, labels = integers(32, SAMPLES, 6), integers(32, SAMPLES, 5)
    labels[torch.rand(SAMPLES, 5) < 0.3] = -100
    return Specimen(T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": labels})


# ---- models made of unusual parts ------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Residual layers of experts, each weighted by a softmax gate (dense routing), and a loss that balances them."""

    def __init__(self, experts: int = 3, width: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(width, experts),
                    "experts": nn.ModuleList(
                        nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, width)) for _ in range(experts)
                    ),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        balance = 0.0
        for layer in self.layers:
            weights = layer["gate"](x).softmax(-1)
            top = torch.where(weights >= weights.topk(2, dim=-1).values[..., -1:], weights, 0.0)
            x = x + torch.einsum("be,ebd->bd", top, torch.stack([expert(x) for expert in layer["experts"]]))
            balance = balance + (weights * weights.log()).sum(-1).mean()
        return F.mse_loss(self.head(x), y) + 0.01 * balance


def mixture() -> Specimen:
    """A mixture of experts in which every expert runs."""
    torch.manual_seed(0)
    return Specimen(Mixture(), (torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 2)))


class Reused(nn.Module):
    """One block applied four times, with a flag that changes what it does (F082)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.block = nn.ModuleDict({"up": self.up, "down": self.down, "norm": self.norm})
        self.head = nn.Linear(6, 2)

    def apply_block(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
        h = self.block["down"](torch.tanh(self.block["up"](self.block["norm"](x))))
        return x + h + (1 if flag else 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for flag in (True, False, True, False):
            x = self.apply_block(x, flag)
        return F.smooth_l1_loss(self.head(x), y)


def reused() -> Specimen:
    """One set of weights used four times."""
    torch.manual_seed(0)
    return Specimen(Reused(), (torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 2)))


def lora(dropout: float = 0.0) -> Specimen:
    """A peft LoRA over Hugging Face's Llama: all else is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    adapted = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    model = get_peft_model(LlamaForCausalLM(config), adapted)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # zeros at first, which would leave lora_A without a gradient
    ids = integers(32, SAMPLES, 5)
    return Specimen(model, (), {"input_ids": ids, "labels": ids.clone()})


class Einsum(nn.Module):
    """Weights in a ParameterList at the root, multiplied by einsum; a convolution with circular padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(2, 3, 4) * 0.4), nn.Parameter(torch.randn(4, 2, 3))])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bcl,hcd->bhld", self.conv(x), self.weights[0])
        return F.kl_div(torch.einsum("bhld,dhc->bcl", torch.tanh(h), self.weights[1]).log_softmax(1), y)


def einsum() -> Specimen:
    """Einsum, a ParameterList, circular padding and a KL divergence."""
    torch.manual_seed(0)
    return Specimen(Einsum(), (torch.randn(SAMPLES, 3, 5), torch.rand(SAMPLES, 3, 5).softmax(1)))


ZOO: Mapping[str, Callable[[], Specimen]] = {
    "resnet": resnet,
    **{f"unet-{up}": partial(unet, up) for up in ("nearest", "bilinear", "transposed")},
    "vit": vit,
    "lstm": partial(recurrent, nn.LSTM),
    "gru-time-first": partial(recurrent, nn.GRU, False),
    "cells": cells,
    "transformer": partial(transformer, False),
    "transformer-causal": transformer,
    "transformer-padded": partial(transformer, True, True),
    "bert": bert,
    "t5": t5,
    "mixture": mixture,
    "reused": reused,
    "lora": lora,
    "einsum": einsum,
}
"""The models by name."""

VARIANTS: Mapping[str, Callable[[], Specimen]] = {
    "resnet-batchnorm": partial(resnet, "batch"),
    "unet-batchnorm": partial(unet, "transposed", normed=True),
    "vit-dropout": partial(vit, 0.2),
    "lstm-dropout": partial(recurrent, nn.LSTM, dropout=0.3),
    "transformer-dropout": partial(transformer, True, True, 0.2),
    "bert-dropout": partial(bert, 0.2),
    "t5-dropout": partial(t5, 0.2),
    "lora-dropout": partial(lora, 0.2),
    "gpt2-dropout": partial(gpt2, 0.2),
    "gpt2-dropout-checkpointed": partial(gpt2, 0.2, checkpointed=True),
}
"""Those whose kind has it by nature, with BatchNorm or dropout, and checkpoint regions around dropout."""
