"""What a stage holds beside its activations, for any run of segments at once: sums from the first one on, and maxima.

The same as `MemoryModel.stage` says, which counts a run segment by segment. Parameters, gradients and optimizer do not
depend on the size of a microbatch, so one `Holding` serves all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.cost import SegmentNumbers
from autopart.ir.placement import Modes
from autopart.solver.kinds import Kinds, Largest, Sums
from autopart.solver.memory import MemoryModel


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of runs of segments under one placement on a data axis; see `Holding.of`."""

    own: Sums
    tied: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # a tied parameter: its users, and its bytes with each
    wires: Largest

    @classmethod
    def of(
        cls,
        kinds: Kinds,
        numbers: Sequence[SegmentNumbers],
        modes: Sequence[Modes],
        degree: int,
        optimizer_ratio: float,
    ) -> Holding:
        """The bytes of segments of some `kinds` on `degree` data ranks; `numbers` and `modes` have an entry a kind."""
        model, every = MemoryModel(tuple(numbers), tuple(modes), degree, optimizer_ratio), range(len(numbers))
        tied: dict[str, tuple[list[int], list[int]]] = {}
        shared = {
            kind: [(t.name, sum(model.held(kind, t.nbytes, t.nbytes * t.trainable))) for t in numbers[kind].tied]
            for kind in every
            if numbers[kind].tied
        }
        for place, kind in enumerate(kinds.of if shared else ()):
            for name, size in shared.get(kind, ()):
                users, sizes = tied.setdefault(name, ([], []))
                users.append(place)
                sizes.append(size)
        return cls(
            own=kinds.sums([sum(model.held(kind, *model.own(kind))) for kind in every]),
            tied=tuple((tuple(users), tuple(sizes)) for users, sizes in tied.values()),
            wires=Largest(kinds, [model.wire(kind) for kind in every]),
        )

    def resident(self, start: int, stop: int) -> int:
        """The bytes of segments `start` to `stop` - 1 as a stage, activations and what is recomputed left out."""
        held = self.own[stop] - self.own[start] + self.wires.two(start, stop)
        for users, sizes in self.tied:
            first = bisect_left(users, start)
            if first < len(users) and users[first] < stop:
                held += sizes[first]
        return held
