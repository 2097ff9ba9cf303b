"""What a stage holds, by state, and the collectives that its placement implies: one rule a mode, for each segment.

A state of |s| bytes takes |s| where it is replicated over N data ranks and ceil(|s| / N) where it is sharded, with or
without gather; offloaded, it takes that on the host of each rank, and nothing here. On top come the gathered parameters
(sharded-with-gather) and the whole gradients before they are reduced to a part (sharded gradients) or sent to the host,
of the two segments of the stage that have most of these, as one is gathered or reduced beside the other; and the
activations that one segment recomputes. Activations are what one microbatch saves, times those in flight. A parameter
that several segments of a stage use is held once. A rank holds what its stages do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from operator import le, mul
from typing import overload

from autopart.ir.action import ENDS, Kind, Schedule
from autopart.ir.cost import SegmentNumbers
from autopart.ir.placement import Mode, Modes
from autopart.ir.plan import StageMemory
from autopart.solver.split import Moment


def in_flight(schedule: Schedule) -> tuple[Moment, ...]:
    """The moments at which a rank keeps most, by the schedule's own table: how many microbatches each stage keeps then.

    A microbatch is kept from its F to the end of its backward, before which a rank keeps most; slices of the sequence
    count as whole microbatches, rounded up. Of two moments of a rank, one at which no stage keeps more than at the
    other is left out.
    """
    found: list[Moment] = []
    for rank, row in enumerate(schedule.table):
        counts, moments = [0] * schedule.stages, set[tuple[int, ...]]()
        for action in row:
            if action.kind in ENDS:
                moments.add(tuple(-(-count // schedule.slices) for count in counts))
            counts[action.stage] += (action.kind is Kind.F) - (action.kind in ENDS)
        most = [m for m in moments if not any(m != n and all(map(le, m, n)) for n in moments)]
        found += [(moment, rank) for moment in sorted(most)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The segments at one microbatch size, their modes on the data axis, its degree, and the optimizer.

    `optimizer_ratio`: bytes of optimizer state per byte of trainable parameter (AdamW: 2, both moments in its dtype).
    """

    segments: tuple[SegmentNumbers, ...]
    modes: tuple[Modes, ...]
    degree: int
    optimizer_ratio: float

    def rank(self, stages: Sequence[tuple[int, int]], moments: Sequence[Sequence[int]]) -> StageMemory:
        """The memory of a rank, stage by stage: its stages as (start, stop), and how many each keeps at its moments."""
        alone = [self.stage(start, stop) for start, stop in stages]
        saved = [sum(self.segments[i].saved_bytes for i in range(start, stop)) for start, stop in stages]
        return StageMemory(
            sum(stage.parameters for stage in alone),
            sum(stage.optimizer for stage in alone),
            sum(stage.gradients for stage in alone),
            max(sum(map(mul, moment, saved)) for moment in moments),
            sum(stage.transient for stage in alone),
            sum(stage.host for stage in alone),
        )

    def stage(self, start: int, stop: int) -> StageMemory:
        """The memory of segments `start` to `stop` - 1 as one stage, its activations left out."""
        own = [(i, *self.own(i)) for i in range(start, stop)]
        first = {t.name: (i, t) for i in reversed(range(start, stop)) for t in self.segments[i].tied}
        pieces = own + [(i, t.nbytes, t.nbytes * t.trainable) for i, t in first.values()]
        parameters, optimizer, gradients = map(sum, zip(*(self.held(*piece) for piece in pieces), strict=True))
        away = sum(self.away(i, trainable) for i, _, trainable in pieces)
        wire = sum(sorted(self.wire(i) for i in range(start, stop))[-2:])
        recomputed = max(self.segments[i].recomputed_bytes for i in range(start, stop))
        return StageMemory(parameters, optimizer, gradients, 0, wire + recomputed, away)

    def resident(self) -> Rows:
        """The interval table: [i][j - i - 1] is the bytes of segments i to j - 1 as a stage, activations left out."""
        return Rows(self)

    def growing(self, start: int) -> Iterator[int]:
        """The bytes of the stages that begin at `start`, one segment longer each time."""
        held, wires, recomputed, seen = 0, [0], 0, set[str]()
        for i in range(start, len(self.segments)):
            held += sum(self.held(i, *self.own(i)))
            for tied in self.segments[i].tied:
                if tied.name not in seen:
                    held += sum(self.held(i, tied.nbytes, tied.nbytes * tied.trainable))
                    seen.add(tied.name)
            wires = sorted([*wires, self.wire(i)])[-2:]
            recomputed = max(recomputed, self.segments[i].recomputed_bytes)
            yield held + sum(wires) + recomputed

    def own(self, i: int) -> tuple[int, int]:
        """Parameter and trainable bytes of segment i that no other segment uses."""
        segment = self.segments[i]
        return (
            segment.parameter_bytes - sum(t.nbytes for t in segment.tied),
            segment.trainable_bytes - sum(t.nbytes for t in segment.tied if t.trainable),
        )

    def held(self, i: int, parameters: int, trainable: int) -> tuple[int, int, int]:
        """Parameter, optimizer and gradient bytes that a rank holds of a piece of segment i."""
        modes = self.modes[i]
        return (
            self._part(parameters, modes.parameters),
            self._part(ceil(trainable * self.optimizer_ratio), modes.optimizer),
            self._part(trainable, modes.gradients),
        )

    def away(self, i: int, trainable: int) -> int:
        """Bytes on a rank's host of the optimizer and the gradients of a piece of segment i."""
        sizes = {"optimizer": ceil(trainable * self.optimizer_ratio), "gradients": trainable}
        return sum(-(-sizes[state] // self.degree) for state in self.modes[i].on_host)

    def _part(self, size: int, mode: Mode) -> int:
        if mode is Mode.OFFLOADED:
            return 0
        return size if mode is Mode.REPLICATED else -(-size // self.degree)

    def wire(self, i: int) -> int:
        """The wire buffers of segment i: of two segments at a time, as one is moved beside the other."""
        modes, segment = self.modes[i], self.segments[i]
        if self.degree == 1:
            return segment.trainable_bytes if "gradients" in modes.on_host else 0
        gathered = segment.parameter_bytes if modes.gathered else 0
        return gathered + (segment.trainable_bytes if modes.reduced_at_once else 0)


class Rows(Sequence[tuple[int, ...]]):
    """The interval table of `MemoryModel.resident`, a row when it is first asked for."""

    def __init__(self, model: MemoryModel) -> None:
        self.model, self.known = model, dict[int, tuple[int, ...]]()

    def __len__(self) -> int:
        return len(self.model.segments)

    @overload
    def __getitem__(self, start: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, start: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, start: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(start, slice):
            return [self[each] for each in range(len(self))[start]]
        if start not in self.known:
            self.known[start] = tuple(self.model.growing(range(len(self))[start]))
        return self.known[start]


def exchanges(segment: SegmentNumbers, modes: Modes, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """The collectives of one segment on the data axis in a step: (collective, payload bytes, times), as `Modes` says.

    Payloads as in `ir.traffic`; a segment's frozen parameters are gathered, but have no gradients.
    """
    times = microbatches if modes.reduced_at_once else 1
    if segment.trainable_bytes:
        yield "reduce_scatter" if modes.reduced_to_parts else "all_reduce", segment.trainable_bytes, times
        if modes.regathered:
            yield "all_gather", segment.trainable_bytes, 1
    if segment.parameter_bytes and modes.gathered:
        yield "all_gather", segment.parameter_bytes, 2 * microbatches


def hosted(segment: SegmentNumbers, modes: Modes, degree: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """What a rank and its host send each other of one segment in a step: (direction, bytes, times).

    Gradients go there once they are reduced, with every microbatch if they are kept there; updated parameters come
    back. As `ir.calculus` has it (ZeRO-Offload, arXiv 2101.06840).
    """
    if "optimizer" in modes.on_host and segment.trainable_bytes:
        part = -(-segment.trainable_bytes // degree)
        yield "to_host", part, microbatches if "gradients" in modes.on_host else 1
        yield "from_host", part, 1
