"""Actions and schedules: what each rank does, in order, as frozen data without tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does: F, B, I, W, R compute; SEND, RECV move one edge's values; GATHER, REDUCE are collectives."""

    F = "F"  # forward
    B = "B"  # full backward, I + W
    I = "I"  # backward for inputs  # noqa: E741
    W = "W"  # backward for weights
    R = "R"  # recompute
    SEND = "SEND"
    RECV = "RECV"
    GATHER = "GATHER"
    REDUCE = "REDUCE"


ENDS = frozenset({Kind.B, Kind.W})
"""What ends the backward of a microbatch on a stage: its gradients are complete then, and what it kept is free."""

COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})

_TEXT = re.compile(r"(-?\d+)([A-Z]+)(-?\d+)(?:s(\d+))?(?:p(\d+))?(?:>(\d+))?(?:@(\S+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    `peer` is the other stage of a SEND or RECV (-1 elsewhere): whether it carries activations or gradients follows from
    the order of the two stages. `unit` names the parameters of a GATHER or REDUCE; `microbatch` is -1 where an action
    belongs to the step as a whole.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    pipe: int = 0
    peer: int = -1
    unit: str = ""

    def __str__(self) -> str:
        """Text such as ``0F3``, ``1SEND2>0`` or ``0GATHER-1@h.3``; `parse` is its inverse."""
        parts = [f"{self.stage}{self.kind}{self.microbatch}"]
        parts += [f"s{self.slice}"] if self.slice else []
        parts += [f"p{self.pipe}"] if self.pipe else []
        parts += [f">{self.peer}"] if self.peer >= 0 else []
        parts += [f"@{self.unit}"] if self.unit else []
        return "".join(parts)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` denotes."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in Kind.__members__:
            raise ValueError(f"not an action: {text!r}; actions look like 0F3 (stage, kind, microbatch)")
        stage, kind, microbatch, piece, pipe, peer, unit = match.groups()
        return cls(
            Kind(kind),
            int(stage),
            int(microbatch),
            int(piece or 0),
            int(pipe or 0),
            int(peer) if peer else -1,
            unit or "",
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The compute actions of every pipeline rank, in order, and which pipeline rank holds each stage.

    ``place[s]`` is the pp rank of stage s; ``table[r]`` the actions of pp rank r. Dependencies are derived, never
    stored: F(s) needs F(s-1), B(s) needs its own F and B(s+1), each of the same microbatch.
    """

    name: str
    microbatches: int
    place: tuple[int, ...]
    table: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of pp ranks."""
        return len(self.table)

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.place)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        for rank, row in enumerate(self.table):
            for action in row:
                yield rank, action

    def __str__(self) -> str:
        """One line a rank, actions separated by commas (the CSV form)."""
        return "\n".join(",".join(map(str, row)) for row in self.table)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule lowered: the same compute actions with SEND and RECV put among them, a table row a pp rank."""

    schedule: Schedule
    table: tuple[tuple[Action, ...], ...]

    def last_backward(self, stage: int) -> int:
        """The microbatch whose B or W a stage performs last, after which its gradients are complete; -1 for none."""
        done = [a.microbatch for a in self.table[self.schedule.place[stage]] if a.stage == stage and a.kind in ENDS]
        return done[-1] if done else -1

    def unfinished(self, stage: int) -> frozenset[int]:
        """The stages of the same rank that have a backward to do after the last one of `stage`."""
        row = self.table[self.schedule.place[stage]]
        ended = max((i for i, a in enumerate(row) if a.stage == stage and a.kind in ENDS), default=len(row))
        return frozenset(action.stage for action in row[ended + 1 :] if action.kind in ENDS)

    def __str__(self) -> str:
        """One line a rank, actions separated by commas."""
        return "\n".join(",".join(map(str, row)) for row in self.table)
