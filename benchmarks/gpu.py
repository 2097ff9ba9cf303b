"""One CUDA device: parity in the local world, a one-rank NCCL run, step time beside eager and torch.compile, memory.

    python benchmarks/gpu.py [--rounds 20]

Says so and does nothing where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any

import torch
from common import ROOT, alternate, bootstrap, machine, ratios

sys.path.insert(0, str(ROOT / "examples"))

PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": {"pp": 2}, "microbatches": 4},
    {"mesh": {"dp": 2}, "microbatches": 2, "placement": "zero1"},
    {"mesh": {"dp": 2}, "microbatches": 2, "placement": "fsdp"},
    {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "placement": "zero2"},
)


def gpt(width: int, layers: int) -> Any:
    """A GPT on the device."""
    from gpt import GPT, Config

    torch.manual_seed(0)
    config = Config(layers=layers, width=width, heads=width // 64, context=256, vocabulary=4000)
    return GPT(config).cuda()


def tokens(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets on the device."""
    torch.manual_seed(1)
    draw = torch.randint(0, 4000, (2, batch, 256), device="cuda")
    return draw[0].contiguous(), draw[1].contiguous()


def parity() -> None:
    """The largest relative difference of loss and gradients from eager, in float64, for each plan."""
    import autopart

    plain, batch = gpt(128, 4).double(), tokens(8)
    reference = copy.deepcopy(plain)
    expected = reference(*batch)
    expected.backward()
    for pins in PLANS:
        model = autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins)
        loss = model(*batch)
        loss.backward()
        largest = max(float(p.grad.norm()) for p in reference.parameters() if p.grad is not None)
        worst = max(
            float((a.grad - b.grad).norm()) / max(float(b.grad.norm()), 1e-3 * largest)
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
            if b.grad is not None
        )
        off = abs(float(loss) - float(expected)) / abs(float(expected))
        print(
            f"parity  {pins}: loss {off:.1e}, gradients {worst:.1e}: {'met' if max(off, worst) <= 1e-9 else 'MISSED'}"
        )


def nccl() -> None:
    """One rank over NCCL: a step there equals one without a process group."""
    import autopart

    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ.update(environment)
    plain, batch = gpt(128, 2), tokens(4)
    reference = copy.deepcopy(plain)
    expected = reference(*batch)
    expected.backward()
    model = autopart.parallelize(plain, capture="direct")
    loss = model(*batch)
    loss.backward()
    same = torch.allclose(loss, expected, rtol=1e-5)
    same &= all(
        torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        if b.grad is not None
    )
    backend = torch.distributed.get_backend()
    print(
        f"one rank over {backend}: loss {float(loss):.6f}, eager {float(expected):.6f}: {'met' if same else 'MISSED'}"
    )


def times(rounds: int) -> None:
    """Seconds and memory of a step by eager, torch.compile and autopart on one device."""
    import autopart

    batch = tokens(16)
    plain = gpt(768, 12)
    models = {
        "eager": plain,
        "torch.compile": torch.compile(copy.deepcopy(plain)),
        "autopart": autopart.parallelize(copy.deepcopy(plain), devices=1, microbatches=1, capture="direct"),
    }

    def step(model: Any) -> Any:
        def run() -> None:
            model(*batch).backward()
            model.zero_grad()
            torch.cuda.synchronize()

        return run

    sides = {name: step(model) for name, model in models.items()}
    found = alternate(sides, rounds, warmup=3)
    for name in sides:
        milliseconds = [1000 * second for second in found[name]]
        print(f"step    {name:14} {bootstrap(milliseconds)} ms, over eager {ratios(found, name, 'eager')}")
    for name in ("eager", "autopart"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sides[name]()
        print(
            f"memory  {name:14} {(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB above what was held before"
        )
    report = models["autopart"].report()
    held = sum(p.numel() * p.element_size() for p in plain.parameters())
    print(
        f"memory  predicted for the step {(report.predicted_memory - held) / 1e6:.0f} MB, "
        f"counted by the program {(report.peak_memory - held) / 1e6:.0f} MB, parameters left out"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    print(f"{machine()}, {rounds} rounds")
    parity()
    times(rounds)
    nccl()


if __name__ == "__main__":
    main()
