"""Ordinary models for the axes inside segments, float64 throughout, each tiny: ``AXIS_ZOO[name]() -> Specimen``.

Hugging Face's models compute norms, softmaxes, rotary tables and losses in float32 whatever their parameters are;
`Widened` has them do so in float64, so that what is compared with one device is compared to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.zoo import Specimen, integers, resnet, unet

SAMPLES, LENGTH, WORDS, BAG = 6, 8, 32, 5


class _Doubled(TorchFunctionMode):
    """Calls that ask for float32 get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {key: torch.float64 if a is torch.float32 else a for key, a in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


class Widened(nn.Module):
    """A model in float64 throughout; it returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        with _Doubled():
            return self.model(**inputs).loss


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Token ids, and targets of which some are ignored."""
    ids = integers(WORDS, SAMPLES, LENGTH)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(SAMPLES, LENGTH) < 0.3, -100), **more}


SHAPE: Mapping[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: Mapping[str, Any] = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}


def gpt2() -> Specimen:
    """Hugging Face's GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return Specimen(Widened(GPT2LMHeadModel(config)), (), _tokens())


def llama() -> Specimen:
    """Hugging Face's Llama, with two heads of keys for four of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return Specimen(Widened(LlamaForCausalLM(LlamaConfig(**GROUPED, intermediate_size=32))), (), _tokens())


def bert() -> Specimen:
    """Hugging Face's BERT with a padding mask, its loss over the masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        **SHAPE, intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    padding = (torch.arange(LENGTH) < integers(4, SAMPLES, 1) + 3).long()
    return Specimen(Widened(BertForMaskedLM(config)), (), _tokens(attention_mask=padding))


def t5() -> Specimen:
    """Hugging Face's T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0, use_cache=False,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Specimen(Widened(T5ForConditionalGeneration(config)), (), _tokens())


def vit() -> Specimen:
    """Hugging Face's vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(SAMPLES, 3, 8, 8).double(), "labels": integers(4, SAMPLES)}
    return Specimen(Widened(ViTForImageClassification(config)), (), batch)


def mixtral() -> Specimen:
    """Hugging Face's Mixtral, each token's experts looked up in one batched product."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**GROUPED, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"
    return Specimen(Widened(MixtralForCausalLM(config)), (), _tokens())


def qwen_moe() -> Specimen:
    """Hugging Face's Qwen2-MoE: a shared expert beside those that each token chooses."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **GROUPED, intermediate_size=32, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    model = Qwen2MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.3)  # zeros at first, of which all experts are equally good
    return Specimen(Widened(model), (), _tokens())


class Tables(nn.Module):
    """Embedding tables of equal shape in one parameter, a row of each a sample."""

    def __init__(self, count: int, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, rows, width) / 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        index = ids.t().unsqueeze(-1).expand(-1, -1, self.weight.shape[-1])
        return self.weight.gather(1, index).transpose(0, 1)


class DLRM(nn.Module):
    """Meta's recommendation model: tables, an MLP of the dense features, their products by pairs, an MLP of these."""

    def __init__(self, tables: int = 4, rows: int = 64, width: int = 8, dense: int = 6) -> None:
        super().__init__()
        self.tables = Tables(tables, rows, width)
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) ** 2 + width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.cat((x.unsqueeze(1), self.tables(ids)), dim=1)
        pairs = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat((x, pairs), dim=1)).squeeze(1), clicked)


def dlrm(width: int = 8, samples: int = SAMPLES) -> Specimen:
    """A DLRM of four tables."""
    torch.manual_seed(0)
    model = DLRM(width=width).double()
    clicked = (torch.rand(samples) < 0.5).double()
    return Specimen(model, (torch.randn(samples, 6).double(), integers(64, samples, 4), clicked))


class Separate(DLRM):
    """The same with a module for each table."""

    def __init__(self, tables: int = 4, rows: int = 64, width: int = 8, dense: int = 6) -> None:
        super().__init__(tables, rows, width, dense)
        del self.tables
        self.lookups = nn.ModuleList(nn.Embedding(rows + 8 * i, width) for i in range(tables))

    def tables(self, ids: torch.Tensor) -> torch.Tensor:
        """A row of each table."""
        return torch.stack([table(ids[:, i]) for i, table in enumerate(self.lookups)], dim=1)


def dlrm_separate() -> Specimen:
    """A DLRM of four modules, of unlike sizes."""
    return Specimen(Separate().double(), dlrm().args)


class Bags(DLRM):
    """The same with several rows of each table a sample: summed, weighted, averaged without padding, or the maxima."""

    def __init__(self, tables: int = 4, rows: int = 64, width: int = 8, dense: int = 6) -> None:
        super().__init__(tables, rows, width, dense)
        del self.tables
        kinds: tuple[dict[str, Any], ...] = ({"mode": "sum"}, {"mode": "mean", "padding_idx": 3}, {"mode": "max"})
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, **kind) for kind in (*kinds, {"mode": "sum"}))
        self.position = nn.Parameter(torch.rand(BAG))

    def tables(self, ids: torch.Tensor) -> torch.Tensor:
        """What is in the bag of each table."""
        *plain, last = self.bags
        found = [bag(ids[:, i]) for i, bag in enumerate(plain)]
        found.append(last(ids[:, -1], per_sample_weights=self.position.expand(len(ids), BAG)))
        return torch.stack(found, dim=1)


def dlrm_bags() -> Specimen:
    """A DLRM of four modules with bags of five rows."""
    dense, _, clicked = dlrm().args
    return Specimen(Bags().double(), (dense, integers(64, SAMPLES, 4, BAG), clicked))


class AlexNet(nn.Module):
    """Convolutions with few weights on many positions, then wide layers with many weights on few."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.wide = nn.Sequential(nn.Linear(8 * 4 * 4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.wide(self.features(images).flatten(1))), labels)


def alexnet() -> Specimen:
    """A net as AlexNet is."""
    torch.manual_seed(0)
    return Specimen(AlexNet().double(), (torch.randn(SAMPLES, 3, 16, 16).double(), integers(10, SAMPLES)))


class Attention(nn.Module):
    """A residual attention over the last dim but one, of as many sequences as there are before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.movedim(-3, 0).transpose(-2, -3).unbind()
        scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return x + self.out((scores @ value).transpose(-2, -3).flatten(-2))


class SpatioTemporal(nn.Module):
    """Video: patches attend to those of their frame, then to themselves over time, and an MLP."""

    def __init__(self, width: int = 8, layers: int = 2, heads: int = 1) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, width)
        self.layers = nn.ModuleList(self.layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def layer(self, width: int, heads: int) -> nn.Module:
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)
        return nn.ModuleDict({"space": Attention(width, heads), "time": Attention(width, heads), "mlp": mlp})

    def forward(self, video: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.inlet(video)  # sample, frame, patch, width
        for layer in self.layers:
            x = layer["space"](x)
            x = layer["time"](x.transpose(1, 2)).transpose(1, 2)
            x = x + layer["mlp"](x)
        return F.mse_loss(self.head(x), following)


def spatio_temporal(layers: int = 2) -> Specimen:
    """A spatio-temporal transformer on eight frames of eight patches."""
    torch.manual_seed(0)
    model = SpatioTemporal(layers=layers).double()
    return Specimen(model, tuple(torch.randn(SAMPLES, 8, 8, 3).double() for _ in range(2)))


class CLIP(nn.Module):
    """Two towers, and a loss in which every image of the batch meets every text."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, width))
        self.token = nn.Embedding(WORDS, width)
        self.text = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(self.token(ids).mean(1)), dim=-1)
        logits = self.scale.exp() * image @ text.t()
        labels = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip() -> Specimen:
    """A contrastive loss, of the whole batch."""
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 12).double(), integers(WORDS, SAMPLES, 5)
    return Specimen(CLIP().double(), batch)


def _wide(made: Specimen) -> Specimen:
    args = tuple(a.double() if a.is_floating_point() else a for a in made.args)
    return Specimen(made.model.double(), args, made.kwargs, made.batch, "exact", made.capture)


AXIS_ZOO: Mapping[str, Callable[[], Specimen]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "unet": lambda: _wide(unet()),
    "resnet": lambda: _wide(resnet()),
    "batch-norm": lambda: _wide(resnet("batch")),
    "mixtral": mixtral,
    "qwen-moe": qwen_moe,
    "dlrm": dlrm,
    "dlrm-separate": dlrm_separate,
    "dlrm-bags": dlrm_bags,
    "alexnet": alexnet,
    "spatio-temporal": spatio_temporal,
    "clip": clip,
}
"""The models by name."""

COUPLED = ("batch-norm", "clip")
"""Those whose samples compute together, which takes one microbatch."""
