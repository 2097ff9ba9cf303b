"""Actions and schedules: what each rank does, in order, as frozen data without tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does: compute up to OPT; SEND, RECV move one edge's values; GATHER, REDUCE are collectives.

    S and T are the two parts of an output layer that is split over all ranks, which perform them together: S the logits
    and the statistics of the softmax, T what needs those of all ranks. E and D are those of an input embedding that is
    split so: E looks up what the first stage then begins with, D makes the table's gradient. OPT is the stage's
    optimizer step inside the table; its `microbatch` is the number of the step.
    """

    F = "F"  # forward
    B = "B"  # full backward, I + W
    I = "I"  # backward for inputs  # noqa: E741
    W = "W"  # backward for weights
    R = "R"  # recompute
    PAIR = "PAIR"  # a forward and a full backward, of two microbatches, as one
    S = "S"
    T = "T"
    E = "E"
    D = "D"
    OPT = "OPT"
    SEND = "SEND"
    RECV = "RECV"
    GATHER = "GATHER"
    REDUCE = "REDUCE"


ENDS = frozenset({Kind.B, Kind.W})
"""What ends the backward of a microbatch on a stage: its gradients are complete then, and what it kept is free."""

SHARED = frozenset({Kind.S, Kind.T})
"""What all ranks perform together."""

LOOKUPS = frozenset({Kind.E, Kind.D})
"""What the first stage needs of all ranks, and they of it."""

COMPLETES = ENDS | {Kind.T, Kind.D}
"""What makes gradients of a stage's parameters, or of its part of the output layer or the input embedding."""

COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.PAIR, Kind.S, Kind.T, Kind.E, Kind.D})

_TEXT = re.compile(r"(-?\d+)([A-Z]+)(-?\d+)(?:s(\d+))?(?:p(\d+))?(?:>(\d+))?(?:@(\S+))?")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)&")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    `slice` is the piece of the microbatch's sequence, `pipe` the copy of the model that the microbatch travels. `peer`
    is the other stage of a SEND or RECV (-1 elsewhere): whether it carries activations or gradients follows from the
    order of the two stages. `unit` names the parameters of a GATHER or REDUCE; `microbatch` is -1 where an action
    belongs to the step as a whole. A PAIR, and nothing else, has `members`: its F and its B; its other fields are those
    of the F.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    pipe: int = 0
    peer: int = -1
    unit: str = ""
    members: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.members) != (self.kind is Kind.PAIR):
            raise ValueError(f"a {self.kind} with the members {self.members}: a PAIR has two, nothing else has any")

    def __hash__(self) -> int:
        # Of what tells nearly all actions of a table apart: tables are looked up in action by action.
        return hash((self.kind, self.stage, self.microbatch, self.slice, self.pipe))

    @classmethod
    def pair(cls, forward: Action, backward: Action) -> Action:
        """The two as one action."""
        where = (forward.stage, forward.microbatch, forward.slice, forward.pipe)
        return cls(Kind.PAIR, *where, members=(forward, backward))

    @property
    def parts(self) -> tuple[Action, ...]:
        """The members of a PAIR; of any other action the action itself."""
        return self.members or (self,)

    def __str__(self) -> str:
        """Text such as ``0F3``, ``1SEND2>0``, ``0GATHER-1@h.3`` or ``(0F3;3B1)&``; `parse` is its inverse."""
        if self.members:
            return f"({';'.join(map(str, self.members))})&"
        parts = [f"{self.stage}{self.kind}{self.microbatch}"]
        parts += [f"s{self.slice}"] if self.slice else []
        parts += [f"p{self.pipe}"] if self.pipe else []
        parts += [f">{self.peer}"] if self.peer >= 0 else []
        parts += [f"@{self.unit}"] if self.unit else []
        return "".join(parts)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` denotes."""
        pair = _PAIR.fullmatch(text.strip())
        if pair is not None:
            return cls.pair(cls.parse(pair[1]), cls.parse(pair[2]))
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in Kind.__members__ or match[2] == Kind.PAIR:
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


def stages_of(place: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages that a pp rank holds, given the rank of each."""
    return tuple(stage for stage, at in enumerate(place) if at == rank)


class Weights(StrEnum):
    """Which version of the weights a microbatch meets; a version is the number of optimizer steps that made it."""

    SYNC = "sync"  # one version: the optimizer steps after the flush
    STASH = "stash"  # a forward the newest one, its backward the same again
    DOUBLE = "double"  # forward and backward the one before the newest: two buffers
    CURRENT = "current"  # forward and backward whatever is newest


class Boundary(StrEnum):
    """How the optimizer steps of the ranks are tied together."""

    BARRIER = "barrier"  # no rank steps before all have ended, as when a norm over all gradients is needed
    PER_RANK = "per-rank"  # each rank steps once it has ended, and goes on


@dataclass(frozen=True, slots=True)
class Schedule:
    """The compute actions of every pipeline rank, in order, and which pipeline rank holds each stage.

    ``place[s]`` is the pp rank of stage s; ``table[r]`` the actions of pp rank r. A microbatch is cut into `slices`
    pieces along the sequence, of `lengths` tokens, by default as even as can be. `mirrors` has the places of further
    copies of the model: pipe 0 is that of `place`, pipe k + 1 that of ``mirrors[k]``, and a microbatch travels one
    pipe. With `barriers` of 1 or 2 the output layer is split over all ranks, which then perform an S and a T for each
    microbatch: the last stage's backward needs S of all ranks where one barrier is enough, else T. If the table has an
    E and a D of each microbatch on each rank, the input embedding is split as well. The first `anywhere` stages train
    nothing: each of their forwards is on whichever rank performs it, and they have no backward. Dependencies are
    derived from these, never stored (`schedules.dependencies`).
    """

    name: str
    microbatches: int
    place: tuple[int, ...]
    table: tuple[tuple[Action, ...], ...]
    slices: int = 1
    mirrors: tuple[tuple[int, ...], ...] = ()
    weights: Weights = Weights.SYNC
    optimizer: Boundary = Boundary.BARRIER
    barriers: int = 0
    lengths: tuple[int, ...] = ()
    anywhere: int = 0

    @property
    def portions(self) -> tuple[int, ...]:
        """How the slices of the sequence share what there is of a microbatch."""
        return self.lengths or (1,) * self.slices

    @property
    def ranks(self) -> int:
        """The number of pp ranks."""
        return len(self.table)

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.place)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The place of each pipe."""
        return (self.place, *self.mirrors)

    @property
    def looks_up(self) -> bool:
        """Whether the input embedding is split over the ranks."""
        return any(action.kind is Kind.E for _, action in self.actions())

    def rank(self, action: Action) -> int:
        """The pp rank that performs an action."""
        return (self.mirrors[action.pipe - 1] if action.pipe else self.place)[action.stage]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        for rank, row in enumerate(self.table):
            for action in row:
                yield rank, action

    def parts(self) -> Iterator[Action]:
        """Every action, rank by rank, with the members of a PAIR in its stead."""
        for row in self.table:
            for action in row:
                yield from action.parts

    def __str__(self) -> str:
        """One line a rank, actions separated by commas (the CSV form), after a line for each setting not the usual."""
        usual = (Weights.SYNC, Boundary.BARRIER, 0, "", 0)
        given = (self.weights, self.optimizer, self.barriers, " ".join(map(str, self.lengths)), self.anywhere)
        lines = [
            f"{name}: {value}" for name, value, plain in zip(SETTINGS, given, usual, strict=True) if value != plain
        ]
        return "\n".join([*lines, *(",".join(map(str, row)) for row in self.table)])


SETTINGS = ("weights", "optimizer", "barriers", "lengths", "anywhere")
"""What the text of a schedule says beside its actions."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule lowered: the same compute actions with SEND and RECV put among them, a table row a pp rank."""

    schedule: Schedule
    table: tuple[tuple[Action, ...], ...]

    def last_backward(self, stage: int) -> int:
        """The microbatch whose B, W or T a stage performs last, after which its gradients are complete; -1 for none."""
        row = self.table[self.schedule.place[stage]]
        done = [a.microbatch for a in row if a.stage == stage and a.kind in COMPLETES]
        return done[-1] if done else -1

    def unfinished(self, stage: int) -> frozenset[int]:
        """The stages of the same rank that have a backward to do after the last one of `stage`."""
        row = self.table[self.schedule.place[stage]]
        ended = max((i for i, a in enumerate(row) if a.stage == stage and a.kind in COMPLETES), default=len(row))
        return frozenset(action.stage for action in row[ended + 1 :] if action.kind in COMPLETES)

    def __str__(self) -> str:
        """One line a rank, actions separated by commas."""
        return "\n".join(",".join(map(str, row)) for row in self.table)
