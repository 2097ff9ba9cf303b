"""How long planning takes: from a module to a plan, for the largest models and for ever more equal blocks.

    python benchmarks/planner.py [--only llama|gpt3|trillion|stacks]

Modules are on the meta device, so nothing of them is in memory. Targets: Llama-3-70B's shapes on 64 H100 in 8 nodes
and GPT-3 175B's on 1,024 A100, at most 60 s each from module to plan, the shapes of a GPT of 10**12 parameters
(Narayanan et al. 2021) on 3,072 A100, at most 90 s, all within 3 GB; planning a stack of 256 equal blocks, capture left
out, at most twice the time of 4.

Stacks are planned on 4 devices, for a cluster (which has tensor degrees looked at) and without one. What is timed is
all that comes after capture: cutting the graph into segments, which looks at every node; the search, from costs to a
plan with its explanations; and counting the plan's traffic and memory on the graph. Sizes take turns within a round;
figures are medians of processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.api import compiler
from autopart.capture import read
from autopart.capture.guard import uncollected
from autopart.passes.segment import segment

TARGET_SECONDS, TARGET_BYTES, TARGET_GROWTH = 60.0, 3e9, 2.0
TRILLION_SECONDS = 90.0
SIZES = (4, 16, 64, 256)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. With `groups` heads of keys and values it is a Llama, without one a GPT.

    Attention is one kernel, or where that is not `fused` two products with a softmax between them; its causal mask,
    part of a kernel of softmax then, is left out. With `tied` the output layer has the weight of the embedding.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    length: int
    groups: int = 0
    fused: bool = True
    tied: bool = False


LLAMA_70B = Shape(layers=80, width=8192, heads=64, inner=28672, vocabulary=128256, length=8192, groups=8)
GPT3_175B = Shape(layers=96, width=12288, heads=96, inner=4 * 12288, vocabulary=51200, length=2048)
TRILLION = Shape(128, 25600, heads=160, inner=4 * 25600, vocabulary=51200, length=2048, fused=False, tied=True)


class Block(nn.Module):
    """Attention and an MLP, gated in a Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.width // shape.heads
        llama = shape.groups > 0
        norm: Any = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(shape.width), norm(shape.width)
        kept = self.size * (shape.groups or shape.heads)
        self.query = nn.Linear(shape.width, shape.width, bias=not llama)
        self.key, self.value = (nn.Linear(shape.width, kept, bias=not llama) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=not llama)
        self.up = nn.Linear(shape.width, shape.inner, bias=not llama)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False) if llama else None
        self.down = nn.Linear(shape.inner, shape.width, bias=not llama)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        query, key, value = (
            each(y).view(batch, length, -1, self.size).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        share = self.shape.heads // (self.shape.groups or self.shape.heads)
        if share > 1:
            key, value = (each.repeat_interleave(share, dim=1) for each in (key, value))
        if self.shape.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = torch.softmax(query @ key.transpose(2, 3) * self.size**-0.5, dim=-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class Decoder(nn.Module):
    """A decoder-only transformer and its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = None if shape.groups else nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width) if shape.groups else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids)
        if self.position is not None:
            x = x + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def sample(shape: Shape, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model in bfloat16, without data, and a batch."""
    ids = torch.zeros(batch, shape.length, dtype=torch.long)
    with torch.device("meta"):
        return Decoder(shape).to(torch.bfloat16), (ids, ids)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def large(name: str, shape: Shape, batch: int, cluster: autopart.Cluster, target: float = TARGET_SECONDS) -> None:
    """One model from module to plan."""
    began, used = time.perf_counter(), time.process_time()
    model, args = sample(shape, batch)
    call = read(model, args)
    captured = compiler.captured_step(model, call, None, False, "compile")
    capture = time.perf_counter() - began
    seconds, plan = timed(lambda: compiler.planned(captured, cluster=cluster))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    used = time.process_time() - used
    met = capture + seconds <= target and peak <= TARGET_BYTES
    print(
        f"{name}: {capture + seconds:.1f} s from module to plan, of which capture {capture:.1f}; {used:.1f} s of the "
        f"processor; {peak / 1e9:.2f} GB"
    )
    print(f"target {target:g} s, {TARGET_BYTES / 1e9:g} GB: {'met' if met else 'missed'}")
    print("\n".join(line for line in plan.summary().splitlines() if not line.startswith("rank ")))
    print(plan.explain(), "\n", flush=True)


def processor(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor and result of a call."""
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def stacks(rounds: int) -> None:
    """The time of planning ever more equal blocks."""
    steps = {}
    for layers in SIZES:
        model, args = sample(Shape(layers=layers, width=1024, heads=16, inner=4096, vocabulary=1024, length=128), 64)
        steps[layers] = compiler.captured_step(model, read(model, args), None, False, "compile")
    requests: dict[str, Any] = {
        "4 A100": {"cluster": autopart.Cluster.preset("a100-80", nodes=1, per_node=4)},
        "4 devices, no cluster": {"devices": 4},
    }
    for name, pins in requests.items():
        found: dict[int, list[tuple[float, ...]]] = {layers: [] for layers in SIZES}
        for number in range(rounds + 1):
            for layers, captured in steps.items():
                with uncollected():  # as `compiler.planned` does
                    cutting, segmented = processor(lambda captured=captured: segment(captured))
                    searching, plan = processor(lambda s=segmented, pins=pins: compiler._best(s, 64, pins))
                    predicting, _ = processor(lambda s=segmented, p=plan: compiler.predicted(s, p))
                if number:  # the first round is for what is done once
                    found[layers].append((cutting, searching, predicting))
        medians = {
            layers: [statistics.median(each) for each in zip(*rows, strict=True)] for layers, rows in found.items()
        }
        print(f"\n{name}, {rounds} rounds, s of the processor; in brackets against {SIZES[0]} blocks")
        print(f"{'blocks':>6}{'segment':>18}{'search':>18}{'predict':>18}{'together':>18}")
        first = [*medians[SIZES[0]], sum(medians[SIZES[0]])]
        for layers, figures in medians.items():
            row = zip([*figures, sum(figures)], first, strict=True)
            print(f"{layers:6}" + "".join(f"{here:10.3f} ({here / least:5.2f})" for here, least in row), flush=True)
        growth = sum(medians[SIZES[-1]]) / first[-1]
        print(f"target {TARGET_GROWTH:g} times: {'met' if growth <= TARGET_GROWTH else 'missed'}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("llama", "gpt3", "trillion", "stacks"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.only in (None, "stacks"):
        stacks(arguments.rounds)
    if arguments.only in (None, "llama"):
        large("Llama-3-70B", LLAMA_70B, 512, autopart.Cluster.preset("h100-80", nodes=8, per_node=8))
    if arguments.only in (None, "gpt3"):
        large("GPT-3 175B", GPT3_175B, 1536, autopart.Cluster.preset("a100-80", nodes=128, per_node=8))
    if arguments.only in (None, "trillion"):
        cluster = autopart.Cluster.preset("a100-80", nodes=384, per_node=8)
        large("GPT 1T", TRILLION, 3072, cluster, TRILLION_SECONDS)


if __name__ == "__main__":
    main()
