"""How long the slices of a sequence had better be: TeraPipe's dynamic program, in exact form.

A pipeline of p ranks that takes the pieces one behind the other needs T = sum t_i + (p-1) max t_i, where t_i is the
time of piece i on a rank, its message included. Later tokens attend to more before them, so equal times need unequal
lengths. For each bound t_max that some piece could set,

    f[e] = min over l of f[e-l] + t(l, e-l), t(l, e-l) <= t_max        the first e tokens: `_cut`
    T    = min over t_max of f[L] + (p-1) t_max                        all bounds: `_best`

and bounds are tried in ascending order until (p-1) t_max alone is no better. With several sequences a piece may hold a
part of the batch, and a second recursion of the same form deals the batch into parts, each cut by the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

Cut = tuple[float, tuple[int, ...]]
"""The sum of the times of the pieces, and their sizes."""


def slice_lengths(length: int, ranks: int, time: Callable[[int, int], float]) -> Cut:
    """The least T for one microbatch of `length` tokens, and the lengths of its slices in order.

    ``time(l, c)`` is the time on a rank of a slice of l tokens that attends to c tokens before it.
    """
    times = [time(size, start) for start in range(length) for size in range(1, length - start + 1)]
    return _best(times, ranks, lambda most: _cut(length, time, most))[0]


def batch_and_slice_lengths(
    batch: int, length: int, ranks: int, time: Callable[[int, int, int], float]
) -> tuple[float, tuple[tuple[int, tuple[int, ...]], ...]]:
    """The least T for `batch` sequences of `length` tokens, and the microbatches: samples and slice lengths of each.

    ``time(b, l, c)`` is the time on a rank of a slice of l tokens of b sequences that attends to c tokens before it.
    """
    sizes = range(1, batch + 1)
    spans = [(size, start) for start in range(length) for size in range(1, length - start + 1)]

    def lengths(samples: int, most: float) -> Cut:
        return _cut(length, lambda size, start: time(samples, size, start), most)

    def dealt(most: float) -> Cut:
        cuts = {samples: lengths(samples, most) for samples in sizes}
        return _cut(batch, lambda samples, _: cuts[samples][0], inf)

    (total, parts), most = _best([time(samples, *span) for samples in sizes for span in spans], ranks, dealt)
    return total, tuple((samples, lengths(samples, most)[1]) for samples in parts)


def _best(times: Sequence[float], ranks: int, cut: Callable[[float], Cut]) -> tuple[Cut, float]:
    """The least T over all bounds that one of the `times` could set with its sizes, and the bound."""
    best: Cut = (inf, ())
    bound = inf
    for most in sorted(set(times)):
        if (ranks - 1) * most >= best[0]:
            break
        total, sizes = cut(most)
        if total + (ranks - 1) * most < best[0]:
            best, bound = (total + (ranks - 1) * most, sizes), most
    return best, bound


def _cut(length: int, time: Callable[[int, int], float], most: float) -> Cut:
    """The cut of `length` into pieces of at most `most` that takes the least time in all; inf where there is none."""
    best: list[Cut] = [(0.0, ())]
    for end in range(1, length + 1):
        found: Cut = (inf, ())
        for size in range(1, end + 1):
            piece = time(size, end - size)
            total = best[end - size][0] + piece
            if piece <= most and total < found[0]:
                found = (total, (*best[end - size][1], size))
        best.append(found)
    return best[length]
