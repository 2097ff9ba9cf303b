"""The places of a mesh axis in one process: local functions run in step, their collectives done on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopart.ir.graph import Size
from autopart.ir.mesh import pieces
from autopart.ir.placement import Partial, Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Function
from tests.interpret import Values, formals, steps


def number(size: Any, batch: int) -> int:
    return int(size.at(batch)) if isinstance(size, Size) else int(size)


def parts(whole: torch.Tensor, dim: int, outer: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Each place's piece of a dim that is ``outer x sum(sizes)``."""
    shape = whole.shape
    apart = whole.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    return [p.reshape(*shape[:dim], outer * n, *shape[dim + 1 :]).contiguous()
            for p, n in zip(apart.split(list(sizes), dim + 1), sizes, strict=True)]  # fmt: skip


def joined(found: Sequence[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """The inverse of `parts`."""
    apart = [p.reshape(*p.shape[:dim], outer, p.shape[dim] // outer, *p.shape[dim + 1 :]) for p in found]
    whole = torch.cat(apart, dim + 1)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def cuts(size: int, how: Shard, degree: int, batch: int) -> tuple[int, int, list[int]]:
    """A split as (dim, outer, lengths)."""
    outer, unit = number(how.outer, batch), number(how.unit, batch)
    return how.dim, outer, [n * unit for n in pieces(size // outer // unit, degree)]


def scattered(whole: torch.Tensor, how: TensorPlacement, degree: int, batch: int) -> list[torch.Tensor]:
    """What each place has of a value; a sum is taken apart at random."""
    match how:
        case Replicate():
            return [whole] * degree
        case Shard():
            return parts(whole, *cuts(whole.shape[how.dim], how, degree, batch))
        case Partial():
            if not whole.is_floating_point():
                return [whole, *([torch.zeros_like(whole)] * (degree - 1))]
            rest = [torch.rand_like(whole) for _ in range(degree - 1)]
            return [whole - sum(rest), *rest]
    raise AssertionError(how)


def gathered(found: Sequence[torch.Tensor], how: TensorPlacement, batch: int) -> torch.Tensor:
    """The whole of what the places have; asserts that they agree where each has all of it."""
    match how:
        case Replicate():
            for other in found[1:]:
                torch.testing.assert_close(other, found[0], rtol=1e-13, atol=1e-14, equal_nan=True)
            return found[0]
        case Shard():
            return joined(found, how.dim, number(how.outer, batch))
        case Partial():
            return torch.stack(list(found)).sum(0)
    raise AssertionError(how)


def run(functions: Sequence[Function], given: Sequence[Sequence[torch.Tensor]], batch: int, whole: int) -> tuple[
    list[Values], list[tuple[str, int]]
]:  # fmt: skip
    """The environments of all places after their functions, and every collective as (name, bytes of the whole)."""
    runs = [steps(f.nodes, formals(f, x, batch), batch, whole) for f, x in zip(functions, given, strict=True)]
    log: list[tuple[str, int]] = []
    answers: list[Any] = [None] * len(runs)
    while True:
        asked: list[Any] = []
        ended: list[Values] = []
        for generator, answer in zip(runs, answers, strict=True):
            try:
                asked.append(generator.send(answer))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            assert not asked, f"some places wait in {asked[0][0]}, others have ended"
            return ended, log
        assert all((a[0], a[2]) == (asked[0][0], asked[0][2]) for a in asked), f"unlike collectives: {asked}"
        name, _, args = asked[0]
        tensors = [tensor for _, tensor, _ in asked]
        answers = _perform(name, tensors, args)
        split = name in ("all_gather", "all_to_all", "shift")
        log.append((name, sum(t.nbytes for t in tensors) if split else tensors[0].nbytes))


def _perform(name: str, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    if name == "all_reduce":
        _, how = args
        both = torch.stack(tensors)
        return [both.sum(0) if how == "sum" else both.amax(0)] * len(tensors)
    if name == "shift":
        return tensors[-1:] + tensors[:-1]
    _, dim, outer, sizes, *rest = args
    if name == "all_gather":
        return [joined(tensors, dim, outer)] * len(tensors)
    if name == "reduce_scatter":
        return parts(torch.stack(tensors).sum(0), dim, outer, sizes)
    assert name == "all_to_all"
    return parts(joined(tensors, dim, outer), *rest)
