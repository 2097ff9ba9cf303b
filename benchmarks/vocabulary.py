"""What splitting the output layer and the input embedding over the pipeline ranks gains, in prediction.

    python benchmarks/vocabulary.py [--vocabularies 32768,262144] [--blocks 64] [--width 4096] [--ranks 8]

A GPT on the meta device is captured and planned for H100s: with both layers whole, on the last and the first stage,
under ``1f1b``, all stages having equally many blocks (the naive layout) or as the solver splits them, and with
``vocab``, blocks dealt equally. The table has how much longer the steps of the first two are, and the bytes of
parameters, gradients and optimizer that each rank holds: the first has the positions besides, the last the final norm.
A tied table (``--tied``) is held, and looked up in, by the rows that a rank has of the output layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopart.api.compiler import captured_step, planned
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.captured import Captured
from autopart.ir.plan import Prediction
from tests.models import GPT


def graph(vocabulary: int, blocks: int, width: int, length: int, batch: int, *, tied: bool) -> Captured:
    """The training step of a GPT in bfloat16, without weights."""
    with torch.device("meta"):
        model = GPT(blocks, width, width // 128, vocabulary, length, skips=False, tied=tied).bfloat16()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return captured_step(model, read(model, (ids, ids), {}), None, False, "direct")


def resident(prediction: Prediction) -> list[int]:
    """The bytes of parameters, gradients and optimizer of each rank."""
    return [each.parameters + each.gradients + each.optimizer for each in prediction.memory]


def main() -> None:
    """Print a row a vocabulary and number of barriers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="32768,65536,131072,262144")
    for name, default in (("blocks", 64), ("width", 4096), ("ranks", 8), ("length", 2048), ("microbatches", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    ranks, each = options.ranks, options.blocks // options.ranks
    equal = [f"blocks.{each * rank}" for rank in range(1, ranks)]
    cluster = Cluster.preset("h100-80", per_node=ranks)
    print("vocabulary  barriers  naive / vocab  solver's / vocab  most / least  GB of each rank")
    for vocabulary in map(int, options.vocabularies.split(",")):
        step = graph(vocabulary, options.blocks, options.width, options.length, options.microbatches, tied=options.tied)

        def predicted(schedule: str, stages: list[str] | None, step: Captured = step) -> Prediction:
            return planned(
                step,
                schedule=schedule,
                stages=stages,
                mesh={"pp": ranks},
                microbatches=options.microbatches,
                cluster=cluster,
                memory="4TiB",
            ).prediction

        naive, best = (predicted("1f1b", stages).step_seconds for stages in (equal, None))
        for barriers in (1, 2):
            found = predicted(f"vocab(barriers={barriers})", equal)
            held = resident(found)
            print(
                f"{vocabulary:>10}  {barriers:>8}  {naive / found.step_seconds:>13.3f}  "
                f"{best / found.step_seconds:>16.3f}  {max(held) / min(held):>12.4f}  "
                + " ".join(f"{count / 1e9:.2f}" for count in held)
            )


if __name__ == "__main__":
    main()
