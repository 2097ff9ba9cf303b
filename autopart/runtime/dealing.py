"""Values on their way between stages of unlike width: cut for the ranks that they go to, and put together there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from autopart.ir.dealing import How, part_of, received, sent
from autopart.ir.mesh import Span
from autopart.runtime.transport import Pending

Form = tuple[tuple[int, ...], torch.dtype]

Begin = Callable[[tuple[int, ...], torch.dtype, int], Pending[torch.Tensor]]
"""What begins to receive a tensor of a shape and dtype from a data rank of the other stage."""


def outgoing(
    values: Sequence[torch.Tensor], deal: Sequence[How], source: int, sources: Sequence[Span], targets: Sequence[Span]
) -> Iterator[tuple[int, torch.Tensor]]:
    """What data rank `source` sends, in order, each with the data rank that it is for. See `ir.dealing`."""
    samples = sources[source][1]
    for target, value, how, (first, count) in sent(values, deal, source, sources, targets):
        if isinstance(how, int):
            rows = value.shape[how] // samples
            value = value.narrow(how, rows * first, rows * count)
        yield target, value.contiguous()


def incoming(
    like: Sequence[Form],
    deal: Sequence[How],
    target: int,
    sources: Sequence[Span],
    targets: Sequence[Span],
    begin: Begin,
    device: torch.device,
) -> list[Pending[torch.Tensor]]:
    """The values that data rank `target` begins to receive, each of the shape and dtype that it has there."""
    samples = targets[target][1]
    parts: list[list[Pending[torch.Tensor]]] = [[] for _ in like]
    for source, number, how, (_, count) in received(range(len(like)), deal, target, sources, targets):
        shape, dtype = like[number]
        parts[number].append(begin(part_of(shape, how, count, samples), dtype, source))
    return [_whole(*each, device) for each in zip(like, deal, parts, strict=True)]


def _whole(like: Form, how: How, parts: Sequence[Pending[torch.Tensor]], device: torch.device) -> Pending[torch.Tensor]:
    def finish() -> torch.Tensor:
        found = [part.wait() for part in parts]
        if not found:
            return torch.zeros(like[0], dtype=like[1], device=device)
        if len(found) == 1:
            return found[0]
        return torch.cat(found, dim=how) if isinstance(how, int) else torch.stack(found).sum(0)

    return Pending(finish)


def in_order(parts: Sequence[torch.Tensor], spans: Sequence[Sequence[Span]], dim: int) -> torch.Tensor:
    """A whole tensor out of what each of several ranks has of the `spans` of samples, joined, along `dim`."""
    if all(max(one) < min(other) for one, other in pairwise(spans)):
        return torch.cat(list(parts), dim=dim)
    cut: list[tuple[int, torch.Tensor]] = []
    for part, own in zip(parts, spans, strict=True):
        sizes = [count for _, count in own]
        rows = part.shape[dim] // max(1, sum(sizes))
        pieces = torch.split(part, [rows * count for count in sizes], dim=dim)
        cut += [(first, piece) for (first, _), piece in zip(own, pieces, strict=True)]
    return torch.cat([piece for _, piece in sorted(cut, key=lambda each: each[0])], dim=dim)
