"""What a stage holds beside its activations, for any run of segments at once: sums from the first one on, and maxima.

The same as `MemoryModel.stage` says, which counts a run segment by segment. Parameters, gradients and optimizer do not
depend on the size of a microbatch, so one `Holding` serves all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopart.ir.cost import SegmentNumbers
from autopart.ir.placement import Modes
from autopart.solver.memory import MemoryModel


class Largest:
    """Where the largest of some values are, in any run of them: of runs of 1, 2, 4, ... the place of the largest."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = values
        self.rows: list[list[int]] = [list(range(len(values)))] if any(values) else []
        length = 1
        while self.rows and 2 * length <= len(values):
            row = self.rows[-1]
            self.rows.append([self._larger(row[i], row[i + length]) for i in range(len(row) - length)])
            length *= 2

    def _larger(self, one: int, other: int) -> int:
        return other if self.values[other] > self.values[one] else one

    def place(self, start: int, stop: int) -> int:
        """The place of the largest value from `start` to `stop` - 1; there is one."""
        level = (stop - start).bit_length() - 1
        return self._larger(self.rows[level][start], self.rows[level][stop - (1 << level)])

    def value(self, start: int, stop: int) -> int:
        """The largest value from `start` to `stop` - 1, 0 for none."""
        return self.values[self.place(start, stop)] if self.rows and start < stop else 0

    def two(self, start: int, stop: int) -> int:
        """The sum of the two largest values from `start` to `stop` - 1."""
        if not self.rows:
            return 0
        place = self.place(start, stop)
        return self.values[place] + max(self.value(start, place), self.value(place + 1, stop))


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of runs of segments under one placement on a data axis; see `Holding.of`."""

    own: tuple[int, ...]
    tied: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # a tied parameter: its users, and its bytes with each
    wires: Largest

    @classmethod
    def of(
        cls,
        kinds: Sequence[int],
        numbers: Sequence[SegmentNumbers],
        modes: Sequence[Modes],
        degree: int,
        optimizer_ratio: float,
    ) -> Holding:
        """The bytes of segments of some `kinds`, whose `numbers` are given, in these `modes` on `degree` data ranks."""
        pairs = list(zip(kinds, modes, strict=True))
        alike = list(dict.fromkeys(pairs))
        model = MemoryModel(
            tuple(numbers[kind] for kind, _ in alike), tuple(m for _, m in alike), degree, optimizer_ratio
        )
        own = {pair: sum(model.held(i, *model.own(i))) for i, pair in enumerate(alike)}
        wire = {pair: model.wire(i) for i, pair in enumerate(alike)}
        tied: dict[str, tuple[list[int], list[int]]] = {}
        for place, (kind, _) in enumerate(pairs):
            for parameter in numbers[kind].tied:
                users, sizes = tied.setdefault(parameter.name, ([], []))
                users.append(place)
                trainable = parameter.nbytes * parameter.trainable
                sizes.append(sum(model.held(alike.index(pairs[place]), parameter.nbytes, trainable)))
        return cls(
            own=tuple(accumulate((own[pair] for pair in pairs), initial=0)),
            tied=tuple((tuple(users), tuple(sizes)) for users, sizes in tied.values()),
            wires=Largest([wire[pair] for pair in pairs]),
        )

    def resident(self, start: int, stop: int) -> int:
        """The bytes of segments `start` to `stop` - 1 as a stage, activations and what is recomputed left out."""
        held = self.own[stop] - self.own[start] + self.wires.two(start, stop)
        for users, sizes in self.tied:
            first = bisect_left(users, start)
            if first < len(users) and users[first] < stop:
                held += sizes[first]
        return held
