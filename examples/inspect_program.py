"""What each rank will run, before any rank exists: plan and compile a small model, print stages and a rank's source.

python examples/inspect_program.py [--rank 1]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import autopart


class Classifier(nn.Module):
    """Four layers and a loss: the smallest thing worth two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.outer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.outer(self.inner(x)), labels)


def main() -> None:
    """Plan for 2 stages x 2 data ranks, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0, help="whose source to print, 0 to 3")
    rank = parser.parse_args().rank

    model, args = Classifier(), (torch.randn(32, 16), torch.randint(10, (32,)))
    plan = autopart.plan(
        model, args, devices=4, mesh={"pp": 2, "dp": 2}, placement="fsdp", schedule="1f1b", microbatches=4
    )
    print(plan.summary())
    program = autopart.compile(model, plan, args)
    for number, stage in enumerate(program.stages):
        print(
            f"\n# stage {number}, forward\n{stage.forward.graph}\n\n# stage {number}, backward\n{stage.backward.graph}"
        )
    print(f"\n# all that rank {rank} runs\n{program.ranks[rank].source}")


if __name__ == "__main__":
    main()
