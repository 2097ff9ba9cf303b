"""What a stateless dropout mask costs beside torch's own, and what random numbers do.

    python benchmarks/randomness.py [--elements 4194304] [--rounds 20] [--device cpu]

Rounds alternate between torch's way and the draw's, in float32; the table has the median time of an element in
nanoseconds, and the median of the rounds' ratios with their middle half. The last rows are what one place of four
draws of a mask, its own rows or columns, beside the whole mask: their times are those of an element of the whole.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from autopart.capture.randomness import RECIPES
from autopart.draws import Draws, bernoulli, normal, uniform

aten = torch.ops.aten
Row = tuple[str, Callable[[], object], Callable[[], object]]


def rows(x: torch.Tensor) -> list[Row]:
    """(what, torch's way, the draw's way)."""
    draw, size, device = Draws(0, 0).of("drop#0"), x.shape, x.device
    noise = torch.empty_like(x)
    dropout = RECIPES[aten.native_dropout.default]

    def whole() -> torch.Tensor:
        return bernoulli(draw, 0.9, size, device=device)

    def part(shape: tuple[int, ...], dim: int, *, turns: bool = False) -> torch.Tensor:
        mine = list(x.view(shape).shape)
        mine[dim] //= 4
        cut = [dim, 1, 1, 4] if turns else [dim, mine[dim], mine[dim], 4 * mine[dim]]
        return bernoulli(draw, 0.9, mine, None, cut, device=device)

    return [
        ("dropout, whole", lambda: aten.native_dropout(x, 0.1, True), lambda: dropout(draw, x, 0.1, True)),
        ("its mask", lambda: aten.native_dropout(x, 0.1, True), lambda: bernoulli(draw, 0.9, size, device=device)),
        ("uniform", lambda: noise.uniform_(), lambda: uniform(draw, size, dtype=x.dtype, device=device)),
        ("normal", lambda: noise.normal_(), lambda: normal(draw, size, dtype=x.dtype, device=device)),
        ("a quarter: rows", whole, lambda: part((8, -1, 1024), 1)),
        ("  columns", whole, lambda: part((8, -1, 1024), 2)),
        ("  every 4th row", whole, lambda: part((8, -1, 1024), 1, turns=True)),
    ]


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """The time of a call."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.elements, device=options.device)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.device}, one thread")
    print(f"{options.elements} elements, {options.rounds} rounds\n")
    print(f"{'':18}{'other':>8}{'draw':>8}   ratio")
    for what, theirs, ours in rows(x):
        theirs(), ours()
        pairs = [(seconds(theirs, x.device), seconds(ours, x.device)) for _ in range(options.rounds)]
        one, two = (statistics.median(column) / options.elements * 1e9 for column in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        print(f"{what:18}{one:8.2f}{two:8.2f}   {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
