"""How long a compile takes: an 8-layer GPT of width 384, by both capture routes, and how it grows with depth.

    python benchmarks/compile_time.py [--rounds 3]

Every compile runs in a process of its own, as a user's does, so torch's, z3's and autopart's first-time work counts.
Rounds alternate between the rows; the table has the median and the spread of each figure in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, Config

from autopart.api import compiler
from autopart.capture import capture, read
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def compile_once(layers: int, route: str) -> dict[str, float]:
    """Seconds of capture and of everything after it, for pp=2 x dp=2."""
    model = GPT(Config(layers=layers, width=384, heads=6, context=128))
    ids = torch.randint(0, 256, (16, 128))
    call = read(model, (ids, ids))
    capturing, captured = timed(lambda: capture(model, call, route=route))

    def rest() -> Any:
        segmented = segment(normalise(captured))
        plan = compiler.solve(segmented, devices=4, mesh={"pp": 2, "dp": 2}, placement="zero1", microbatches=4)
        return compiler.lower(segmented, plan)

    after, _ = timed(rest)
    return {"capture": capturing, "after": after, "total": capturing + after}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "ROUTE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_once(int(options.one[0]), options.one[1])))
        return
    rounds = options.rounds
    rows = [(8, "compile"), (8, "direct"), (32, "direct")]
    found: dict[tuple[int, str], list[dict[str, float]]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            command = [sys.executable, __file__, "--one", str(row[0]), row[1]]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[row].append(json.loads(output.splitlines()[-1]))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds")
    print(f"{'layers':>6}  {'route':8}  {'capture':>18}  {'after capture':>18}  {'total':>18}")
    for (layers, route), samples in found.items():
        cells = []
        for name in ("capture", "after", "total"):
            numbers = [sample[name] for sample in samples]
            cells.append(f"{statistics.median(numbers):6.2f} [{min(numbers):.2f}-{max(numbers):.2f}]".rjust(18))
        print(f"{layers:6}  {route:8}  {'  '.join(cells)}")

    def median(row: tuple[int, str], name: str) -> float:
        return statistics.median(sample[name] for sample in found[row])

    slope = (median((32, "direct"), "capture") - median((8, "direct"), "capture")) / 24
    growth = median((32, "direct"), "after") / median((8, "direct"), "after")
    print(f"capture, direct, two sizes: {slope:.3f} s a layer; after capture, 32 layers over 8: {growth:.2f}")


if __name__ == "__main__":
    main()
