"""How values go from a stage to one of another width: re-dealt by samples among the data ranks of both.

Each of several data ranks has some samples of a microbatch. What is split over them goes to whoever has these samples
on the other side, which joins what it gets; what is equal on all comes from one rank; parts of a sum each go to one
rank, which adds what it gets, nothing being zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from autopart.ir.mesh import Span

EQUAL, SUM = "equal", "sum"
"""Of a value that has no dim of samples: whether it is equal on all data ranks, or a part of a sum on each."""

How = int | str
"""How one value is dealt: its dim of samples, `EQUAL` or `SUM`."""

T = TypeVar("T")


def overlap(source: Span, target: Span) -> Span:
    """The samples that are among both, counted from the source's first; none if there are none."""
    first, end = max(source[0], target[0]), min(sum(source), sum(target))
    return max(0, first - source[0]), max(0, end - first)


def passes(how: How, source: int, target: int, sources: Sequence[Span], targets: Sequence[Span]) -> bool:
    """Whether data rank `source` of a stage has something of a value for data rank `target` of the next one.

    `sources` and `targets` are the samples of a microbatch that the ranks of either have.
    """
    if how == EQUAL:
        return source == target * len(sources) // len(targets)
    if how == SUM:
        return target == source * len(targets) // len(sources)
    return overlap(sources[source], targets[target])[1] > 0


def sent(
    values: Sequence[T], deal: Sequence[How], source: int, sources: Sequence[Span], targets: Sequence[Span]
) -> Iterator[tuple[int, T, How, Span]]:
    """What data rank `source` sends, in order: to which data rank, of which value, how dealt, and which samples of it.

    The samples are counted from the first that the rank has; of a value without a dim for them they mean nothing.
    """
    for target, span in enumerate(targets):
        for value, how in zip(values, deal, strict=True):
            if passes(how, source, target, sources, targets):
                yield target, value, how, overlap(sources[source], span)


def received(
    values: Sequence[T], deal: Sequence[How], target: int, sources: Sequence[Span], targets: Sequence[Span]
) -> Iterator[tuple[int, T, How, Span]]:
    """What data rank `target` receives, in order: from which data rank, of which value, how dealt, which samples.

    The samples are counted from the first that this rank has.
    """
    for source, span in enumerate(sources):
        for value, how in zip(values, deal, strict=True):
            if passes(how, source, target, sources, targets):
                yield source, value, how, overlap(targets[target], span)


def part_of(shape: Sequence[int], how: How, count: int, samples: int) -> tuple[int, ...]:
    """The shape of the part of a value that has `count` of its `samples`; all of it where it has no dim for them."""
    if isinstance(how, str):
        return tuple(shape)
    return (*shape[:how], shape[how] // samples * count, *shape[how + 1 :])
