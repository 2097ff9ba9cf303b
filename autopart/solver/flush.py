"""The length of a flush, asked again and again: a schedule as an order in which the ends of actions can be computed.

`schedules.simulate` says the same of one set of costs, with all that a picture needs; a search asks of thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.action import Kind, Schedule

KINDS = "FBIW"

NOTHING = -1
"""No step, where one may be."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The actions of a schedule, each after what it waits for.

    A step has the place of its time in a list of those of every stage, kind by kind; the step before it on its rank;
    and that of another rank that it waits for. The step that is not there, `NOTHING`, ends at 0.
    """

    stages: int
    steps: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Flush:
        """The steps of a schedule of one copy of the model: what waits for another rank is over one edge.

        A forward waits for that of the stage before, a backward (or the half of it for the inputs) for that of the
        stage after. What is on the same rank, as its own forward, comes before it in its row.
        """
        place, stages = schedule.place, range(schedule.stages)
        known: dict[tuple[bool, int, int], int] = {}
        steps: list[tuple[int, int, int]] = []
        done, last = [0] * schedule.ranks, [NOTHING] * schedule.ranks
        total = sum(map(len, schedule.table))
        while len(steps) < total:
            before = len(steps)
            for rank, row in enumerate(schedule.table):
                while done[rank] < len(row):
                    action = row[done[rank]]
                    forward, over = action.kind is Kind.F, NOTHING
                    peer = action.stage - 1 if forward else action.stage + 1
                    if action.kind is not Kind.W and peer in stages and place[peer] != rank:
                        over = known.get((forward, peer, action.microbatch), NOTHING)
                        if over == NOTHING:
                            break
                    if action.kind is not Kind.W:
                        known[forward, action.stage, action.microbatch] = len(steps)
                    steps.append((KINDS.index(action.kind) * schedule.stages + action.stage, last[rank], over))
                    last[rank] = len(steps) - 1
                    done[rank] += 1
            assert len(steps) > before, "a schedule that was validated ends"
        return cls(schedule.stages, tuple(steps))

    def length(self, times: Mapping[str, Sequence[int]], edge: int) -> int:
        """The time of one flush from that of each kind of action at each stage; `edge` is that of a message."""
        prices = [time for kind in KINDS for time in times[kind]]
        ends = [0] * (len(self.steps) + 1)
        for at, (price, before, over) in enumerate(self.steps):
            start = ends[before]
            if over != NOTHING and ends[over] + edge > start:
                start = ends[over] + edge
            ends[at] = start + prices[price]
        return max(ends)
