"""An ordinary training loop on the GPT of gpt.py, on many ranks.

All ranks inside this process:      python examples/train.py --devices 4 --mesh pp=2,dp=2
One process a rank (CPUs or GPUs):  torchrun --nproc-per-node 4 examples/train.py --mesh pp=2,dp=2
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
from gpt import GPT, Config, batches

import autopart


def mesh_of(text: str) -> dict[str, int]:
    """The mesh that `pp=2,dp=2` writes."""
    return {axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--devices", type=int, help="default: the world size under torchrun, else 1")
    parser.add_argument("--mesh", type=mesh_of, help="for example pp=2,dp=2; default: chosen by autopart")
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss and the plan on rank 0."""
    args = arguments()

    @autopart.parallelize(devices=args.devices, mesh=args.mesh)
    class ParallelGPT(GPT):
        """The same model on many ranks."""

    torch.manual_seed(0)
    config = Config()
    model = ParallelGPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = os.environ.get("RANK", "0") == "0"
    for step, (ids, targets) in enumerate(itertools.islice(batches(args.batch, config.context), args.steps)):
        loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first and step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if first:
        print(f"step {args.steps - 1:4d}  loss {loss.item():.4f}\n\n{model.plan.summary()}")


if __name__ == "__main__":
    main()
