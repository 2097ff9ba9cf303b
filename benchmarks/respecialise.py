"""How long a call with another sequence length takes to compile, beside the first: an 8-layer GPT of width 384.

    python benchmarks/respecialise.py [--rounds 5] [--capture compile]

A round is a process of its own: the first call compiles, the second has another length, the third the first again. What
is measured is capture to loaded program, in wall time and in this process's own processor time. The target: half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from common import ROOT, bootstrap, machine

TARGET = 0.5


def once(route: str) -> list[list[float]]:
    """(wall, processor) seconds of each compile of one process: the first, and one for another length."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, Config

    import autopart
    from autopart.api.programs import Programs

    found: list[list[float]] = []
    compiling = Programs._compile

    def timed(self: Programs, *call: Any) -> Any:
        start = time.perf_counter(), time.process_time()
        made = compiling(self, *call)
        found.append([time.perf_counter() - start[0], time.process_time() - start[1]])
        return made

    Programs._compile = timed  # type: ignore[method-assign]
    model = GPT(Config(layers=8, width=384, heads=6, context=128))
    model = autopart.parallelize(model, mesh={"pp": 2, "dp": 2}, placement="zero1", microbatches=4, capture=route)
    for length in (128, 96, 128):
        ids = torch.randint(0, 256, (8, length))
        model(ids, ids)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capture", choices=["compile", "direct"], default="compile")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(once(options.capture)))
        return
    rounds = []
    for _ in range(options.rounds):
        command = [sys.executable, __file__, "--one", "--capture", options.capture]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rounds.append(json.loads(output.splitlines()[-1]))
    assert all(len(each) == 2 for each in rounds), "a length that was seen before must not compile"
    print(f"{machine()}, {options.rounds} rounds, capture={options.capture}")
    print(f"{'':16}{'first':>24}{'another length':>24}{'ratio':>24}")
    for clock, name in enumerate(("wall time", "processor time")):
        first, second = ([each[call][clock] for each in rounds] for call in (0, 1))
        share = bootstrap([b / a for a, b in zip(first, second, strict=True)])
        cells = "".join(f"{cell!s:>24}" for cell in (bootstrap(first), bootstrap(second), share))
        print(f"{name:16}{cells}  target {TARGET}: {'met' if share.meets(TARGET) else 'missed'}")


if __name__ == "__main__":
    main()
