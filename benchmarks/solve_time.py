"""How long it takes from a module to the programs of all ranks, by phase: tensors, stages and data placed together.

    python benchmarks/solve_time.py [--only blocks|llama8b|llama70b] [--rounds 3]

Modules are on the meta device. Each round is a process of its own, as a user's is: torch's and autopart's first-time
work counts, and so does building the module. Figures are medians of processor time and of wall time, in seconds.
Targets (module to verified program, 2 cores): 12 equal blocks of an MLP and a norm on dp2 x tp4, 6 s; the shapes of
Llama-3-8B on 64 devices with three axes, 20 s; of Llama-3-70B, 30 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import machine
from planner import LLAMA_70B, Shape, sample
from torch import Tensor, nn

import autopart
from autopart.api import compiler
from autopart.capture import capture, read
from autopart.capture.guard import uncollected
from autopart.passes.emit import emit
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from autopart.passes.verify import verify

LLAMA_8B = Shape(layers=32, width=4096, heads=32, inner=14336, vocabulary=128256, length=8192, groups=8)


class Residual(nn.Module):
    """A norm and an MLP of two products."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Equal residual blocks and a squared loss."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, 4 * width) for _ in range(count))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


@dataclass(frozen=True)
class Row:
    """A module with its call, where it is to run, and the seconds that this may take."""

    name: str
    made: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    mesh: dict[str, int]
    devices: int
    target: float
    pins: dict[str, Any]


def blocks() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The 12 blocks, 4096 wide, and a batch of 64 x 256 vectors."""
    with torch.device("meta"):
        module = Blocks(12, 4096)
    x = torch.zeros(64, 256, 4096)
    return module, (x, x)


H100 = {"device": "h100-80", "per_node": 8}
ROWS = {
    "blocks": Row("12 MLP+LayerNorm blocks", blocks, {"dp": 2, "tp": 4}, 8, 6.0, {}),
    "llama8b": Row(
        "Llama-3-8B", lambda: sample(LLAMA_8B, 64), {"pp": 2, "dp": 4, "tp": 8}, 64, 20.0, {"microbatches": 8}
    ),
    "llama70b": Row(
        "Llama-3-70B", lambda: sample(LLAMA_70B, 64), {"pp": 4, "dp": 2, "tp": 8}, 64, 30.0, {"microbatches": 16}
    ),
}


def once(row: Row) -> dict[str, tuple[float, float]]:
    """(processor, wall) seconds of each phase, in this process."""
    found: dict[str, tuple[float, float]] = {}

    def timed(phase: str, function: Callable[[], Any]) -> Any:
        start = time.process_time(), time.perf_counter()
        result = function()
        found[phase] = time.process_time() - start[0], time.perf_counter() - start[1]
        return result

    cluster = autopart.Cluster.preset("h100-80", nodes=max(1, row.devices // 8), per_node=min(8, row.devices))
    model, args = timed("build", row.made)
    call = read(model, args)
    captured = timed("capture", lambda: capture(model, call))
    segmented = timed("normalise, segment", lambda: segment(normalise(captured)))
    plan = timed(
        "solve", lambda: compiler.solve(segmented, cluster=cluster, devices=row.devices, mesh=row.mesh, **row.pins)
    )
    made = timed("place, split, schedule", lambda: compiler._staged(segmented, plan))
    (staged, *others), lowered = made
    bodies = compiler.Bodies()
    with uncollected():  # as `compiler.lower` does
        program = timed("emit", lambda: emit(staged, lowered, plan, others=others, bodies=bodies))
        timed("verify", lambda: verify(program, bodies=bodies))
    found["all"] = tuple(sum(figures) for figures in zip(*found.values(), strict=True))  # type: ignore[assignment]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=tuple(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = once(ROWS[options.one])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"phases": found, "peak": peak}))
        return
    print(f"{machine()}, {options.rounds} rounds")
    for key, row in ROWS.items():
        if options.only not in (None, key):
            continue
        rounds = []
        for _ in range(options.rounds):
            command = [sys.executable, __file__, "--one", key]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rounds.append(json.loads(output.splitlines()[-1]))
        mesh = " x ".join(f"{axis}{degree}" for axis, degree in row.mesh.items())
        peak = statistics.median(each["peak"] for each in rounds)
        print(f"\n{row.name} on {mesh}: target {row.target:g} s; {peak / 1e9:.2f} GB")
        print(f"{'':24}{'processor':>12}{'wall':>12}")
        for phase in rounds[0]["phases"]:
            cpu, wall = (statistics.median(each["phases"][phase][i] for each in rounds) for i in (0, 1))
            print(f"{phase:24}{cpu:12.2f}{wall:12.2f}")
        wall = statistics.median(each["phases"]["all"][1] for each in rounds)
        print("met" if wall <= row.target else "missed", flush=True)


if __name__ == "__main__":
    main()
