"""Collectives on values inside a layer, as a program's bodies call them: over one axis, along one dim, uneven or not.

A split dim is seen as ``outer x split x rest`` (`autopart.collectives`); on the wire pieces are flat, padded to the
longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from autopart.ir.mesh import Mesh
from autopart.ir.traffic import Split, chunk, owned
from autopart.runtime.flat import flat_padded
from autopart.runtime.transport import Transport


class ValueCollectives:
    """What the places of an axis do together on the values of one microbatch. Results are new tensors."""

    transport: Transport
    mesh: Mesh

    def all_reduce_values(self, x: torch.Tensor, *, axis: str, how: str) -> torch.Tensor:
        """The sum (`how` "sum") or the largest ("max") over the places, element by element, at every place."""
        whole = x.clone(memory_format=torch.contiguous_format)
        self.transport.all_reduce(whole, self._group(axis), how=how)
        return whole

    def all_gather_values(
        self, x: torch.Tensor, *, axis: str, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """The whole of what the places have pieces of along `dim`."""
        group, most, rest = self._group(axis), max(pieces), x.shape[dim + 1 :].numel()
        mine = _padded(x.reshape(-1, outer, x.shape[dim] // outer, rest), most)
        every = self.transport.all_gather(mine.reshape(-1), group).view(len(group), *mine.shape)
        joined = torch.cat([each.narrow(2, 0, n) for each, n in zip(every, pieces, strict=True)], dim=2)
        return joined.reshape(*x.shape[:dim], outer * sum(pieces), *x.shape[dim + 1 :])

    def reduce_scatter_values(
        self, x: torch.Tensor, *, axis: str, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """This place's piece along `dim` of the sum over the places."""
        group, most, rest = self._group(axis), max(pieces), x.shape[dim + 1 :].numel()
        runs = torch.split(x.reshape(-1, outer, sum(pieces), rest), list(pieces), dim=2)
        each = torch.stack([_padded(run, most) for run in runs])
        mine, own = self.transport.reduce_scatter(each.reshape(-1), group), pieces[self._place(axis)]
        piece = mine.view(each.shape[1:]).narrow(2, 0, own).contiguous()  # also where others have more
        return piece.reshape(*x.shape[:dim], outer * own, *x.shape[dim + 1 :])

    def all_to_all_values(
        self,
        x: torch.Tensor,
        *,
        axis: str,
        from_dim: int,
        from_outer: int = 1,
        from_pieces: Sequence[int],
        dim: int,
        outer: int = 1,
        pieces: Sequence[int],
    ) -> torch.Tensor:
        """What is split along `from_dim`, split along `dim` instead, which may be the same dim cut in another way."""
        group, place = self._group(axis), self._place(axis)
        shape = [*x.shape[:from_dim], from_outer * sum(from_pieces), *x.shape[from_dim + 1 :]]
        before: Split = (from_dim, from_outer, tuple(from_pieces))
        after: Split = (dim, outer, tuple(pieces))
        size = chunk(tuple(shape), before, after)
        sent, taken = owned(shape[from_dim], before), owned(shape[dim], after)
        whole = flat_padded(([_for(x, sent[place], to, before, after)], size) for to in taken)
        every = self.transport.all_to_all(whole, group).view(len(group), size)
        shape[dim] = len(taken[place])
        made = x.new_empty(shape)
        for row, have in zip(every, sent, strict=True):
            _into(made, row, have, taken[place], before, after)
        return made

    def shift_values(
        self, x: torch.Tensor, *, axis: str, hops: int, dim: int, outer: int = 1, pieces: Sequence[int]
    ) -> torch.Tensor:
        """The piece along `dim` of the place `hops` before this one, for `x`, that of the place ``hops - 1`` before.

        Every place hands what it has to the next one in the ring.
        """
        group, most, rest = self._group(axis), max(pieces), x.shape[dim + 1 :].numel()
        held = _padded(x.reshape(-1, outer, x.shape[dim] // outer, rest), most)
        own = pieces[(self._place(axis) - hops) % len(pieces)]
        piece = self.transport.shift(held.reshape(-1), group).view(held.shape).narrow(2, 0, own)
        return piece.reshape(*x.shape[:dim], outer * own, *x.shape[dim + 1 :])

    def dispatch_values(
        self, x: torch.Tensor, *, axis: str, dim: int, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> torch.Tensor:
        """The rows of this place's groups, group after group, for `x`, its own `rows` of all groups.

        ``ends[p * groups + g]`` is where group g ends in the rows of place p; what is behind the last goes with it. Of
        a group the rows of each place come in the order of the places.
        """
        sent, came = self._routes(axis, rows, pieces, ends)
        got = self.transport.exchange(x.movedim(dim, 0).contiguous(), self._group(axis), sent, [*map(sum, came)])
        return got.index_select(0, _by_group(came, x.device)).movedim(0, dim)

    def combine_values(
        self, x: torch.Tensor, *, axis: str, dim: int, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> torch.Tensor:
        """This place's own `rows` of all groups, for `x`, the rows of its groups: `dispatch_values` undone."""
        taken, came = self._routes(axis, rows, pieces, ends)
        grouped = x.movedim(dim, 0)
        back = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        back.index_copy_(0, _by_group(came, x.device), grouped)
        return self.transport.exchange(back, self._group(axis), [*map(sum, came)], taken).movedim(0, dim)

    def _routes(
        self, axis: str, rows: int, pieces: Sequence[int], ends: torch.Tensor
    ) -> tuple[list[int], list[list[int]]]:
        """How many of this place's rows go to each place, and how many of each of its groups come from each."""
        counts, runs, place = _counts(ends, rows, pieces), _runs(pieces), self._place(axis)
        start, stop = runs[place]
        return [sum(counts[place][a:b]) for a, b in runs], [each[start:stop] for each in counts]

    def _place(self, axis: str) -> int:
        return self.mesh.coordinate(self.transport.rank)[axis]

    def _group(self, axis: str) -> tuple[int, ...]:
        """The ranks along an axis from this one."""
        return self.mesh.group(self.transport.rank, axis)


def _counts(ends: torch.Tensor, rows: int, pieces: Sequence[int]) -> list[list[int]]:
    """How many rows of each group each place has; last those behind its groups, as if they were one more."""
    found = []
    for each in ends.view(len(pieces), -1).tolist():
        marks = [0, *each, rows]
        found.append([stop - start for start, stop in itertools.pairwise(marks)])
    return found


def _runs(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """The groups ``[start, stop)`` of each place, the rows of none with the last ones."""
    stops = list(itertools.accumulate(pieces))
    stops[-1] += 1
    return list(itertools.pairwise([0, *stops]))


def _by_group(came: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The rows that came place after place, ``came[p][g]`` of group g from place p, in the order of their groups."""
    groups = torch.arange(len(came[0]), device=device).repeat(len(came))
    lengths, rows = torch.tensor(came, device=device).flatten(), sum(map(sum, came))
    return groups.repeat_interleave(lengths, output_size=rows).argsort(stable=True)


def _padded(runs: torch.Tensor, most: int) -> torch.Tensor:
    """``[before, outer, n, rest]`` with n made `most`."""
    missing = most - runs.shape[2]
    return torch.nn.functional.pad(runs, (0, 0, 0, missing)) if missing else runs


def _index(positions: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int64, device=like.device)


def _for(x: torch.Tensor, have: Sequence[int], to: Sequence[int], before: Split, after: Split) -> torch.Tensor:
    """Of this place's piece, the part that is another's afterwards."""
    if before[0] != after[0]:
        return x.index_select(after[0], _index(to, x))
    wanted = {*to}
    return x.index_select(after[0], _index([i for i, at in enumerate(have) if at in wanted], x))


def _into(
    made: torch.Tensor, row: torch.Tensor, have: Sequence[int], own: Sequence[int], before: Split, after: Split
) -> None:
    """Put what another place had, flat and padded in `row`, where it belongs in this place's piece."""
    dim, positions = before[0], list(have)
    if dim == after[0]:
        place = {at: i for i, at in enumerate(own)}
        positions = [place[at] for at in have if at in place]
    shape = [*made.shape[:dim], len(positions), *made.shape[dim + 1 :]]
    made.index_copy_(dim, _index(positions, made), row[: torch.Size(shape).numel()].view(shape))
