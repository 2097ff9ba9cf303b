"""What computing the output layer and MLPs in chunks of tokens saves and takes: one device, with and without.

    python benchmarks/chunks.py [--chunks 8] [--vocabulary 32768] [--length 1024] [--width 256] [--rounds 5]

A GPT trains in this process. The table has what is predicted (kept between forward and backward, and made again at a
time), the most that the allocator held beside what was there before the step, and the time of a step beside that of the
plain program, with its interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import alternate, held_and_peak, machine, ratios
from torch import nn

import autopart


class Layer(nn.Module):
    """A pre-norm transformer layer, whose MLP is a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention of four heads, then the MLP."""
        q, k, v = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Layers between an embedding and an output layer."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(vocabulary, width), nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def main() -> None:
    """Print a row a way to run the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"chunks": 8, "layers": 4, "vocabulary": 32768, "length": 1024, "width": 256, "rounds": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ids = torch.randint(0, options.vocabulary, (1, options.length))
    head, mlps = {"head": options.chunks}, {"h.*.mlp": options.chunks}
    made = {}
    for name, chunks in {"nothing": None, "head": head, "MLPs": mlps, "both": {**head, **mlps}}.items():
        torch.manual_seed(0)
        plain = GPT(options.layers, options.width, options.vocabulary)
        made[name] = autopart.parallelize(plain, devices=1, chunks=chunks)
    steps = {name: step(each, ids) for name, each in made.items()}
    for run in steps.values():
        run()
    peaks = {name: held_and_peak(run)[1] for name, run in steps.items()}
    times = alternate(steps, options.rounds)
    print(machine())
    print(f"{'in chunks':<9}  {'kept':>9}  {'made again':>10}  {'peak':>9}  time / that of nothing in chunks")
    for name, each in made.items():
        memory = each.plan.prediction.memory[0]
        sizes = (f"{size / 1e6:.1f} MB" for size in (memory.activations, memory.transient, peaks[name]))
        print("{:<9}  {:>9}  {:>10}  {:>9}  {}".format(name, *sizes, ratios(times, name, "nothing")))


def step(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """A forward and a backward of a parallelised model, whose gradients go where those of the last one were."""

    def run() -> None:
        model.zero_grad(set_to_none=False)
        model(ids, ids).backward()

    return run


if __name__ == "__main__":
    main()
