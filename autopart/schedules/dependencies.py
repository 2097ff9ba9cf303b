"""What each action waits for. Derived from the edges between stages, never stored in a schedule.

Actions are F, B, I, W, S, T and OPT here: the members of a PAIR stand for themselves, and the pair waits for what
either of them needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopart.ir.action import Action, Kind, Schedule, Weights

Edges = frozenset[tuple[int, int]]
"""(source stage, target stage) pairs over which values flow: outputs if source < target, else gradients."""

Needs = dict[Action, tuple[Action, ...]]
"""What each action waits for."""


def chain(stages: int) -> Edges:
    """The edges of a plain pipeline: each stage feeds the next one, and gets its gradient back."""
    forward = {(stage, stage + 1) for stage in range(stages - 1)}
    return frozenset(forward | {(target, source) for source, target in forward})


def dependencies(schedule: Schedule, edges: Edges | None = None) -> Needs:
    """The actions that each action waits for; `edges` defaults to the chain of stages.

    Within a microbatch and its pipe: F waits for F of the stages that feed it, and for its own F of the slice before
    (keys and values); B or I for its own F, for B or I of the stages that give it gradients, and for its own B or I of
    the slice after (the gradients of keys and values); W for its own I. Where the output layer is split over the ranks,
    S waits for F of the last stage, T for S of all ranks, and B or I of the last stage for S of all ranks (T, if it
    takes two barriers). Between microbatches: OPT number n waits for the backwards of the n-th batch of its stage and
    OPT n-1, the backwards of the next batch for OPT n; with two buffers, forwards of batch n for OPT n-2. Needs a table
    in which every stage and microbatch has what `validate` asks for.
    """
    rules = _Rules(schedule, chain(schedule.stages) if edges is None else edges)
    return {action: tuple(rules.needs(action)) for action in schedule.parts()}


def batch_size(schedule: Schedule) -> int:
    """How many microbatches make up one update of the weights: all, where no OPT is in the table."""
    updates = sum(action.kind is Kind.OPT and action.stage == 0 for action in schedule.parts())
    return schedule.microbatches // max(updates, 1)


class _Rules:
    """The rules of one schedule: the actions that one action waits for."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        stages = range(schedule.stages)
        self.schedule, self.batch = schedule, batch_size(schedule)
        self.feeders = [sorted(a for a, b in edges if b == stage and a < stage) for stage in stages]
        self.givers = [sorted(a for a, b in edges if b == stage and a > stage) for stage in stages]
        self.known: dict[tuple[Kind, int, int, int, int], Action] = {}
        self.ended: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for a in schedule.parts():
            self.known[a.kind, a.stage, a.microbatch, a.slice, a.pipe] = a
            if schedule.weights is not Weights.SYNC and a.kind in (Kind.B, Kind.W):
                self.ended[a.stage, a.microbatch // self.batch].append(a)

    def needs(self, action: Action) -> Iterator[Action]:
        """What an action waits for."""
        match action.kind:
            case Kind.F:
                yield from self._forward(action)
            case Kind.B | Kind.I:
                yield from self._backward(action)
            case Kind.W:
                yield self._find(Kind.I, action)
            case Kind.S:
                yield self._find(Kind.F, action, stage=self.schedule.stages - 1)
            case Kind.T:
                yield from self._everywhere(Kind.S, action)
            case Kind.OPT:
                yield from self.ended[action.stage, action.microbatch]
                if action.microbatch:
                    yield Action(Kind.OPT, action.stage, action.microbatch - 1)
            case _:
                raise ValueError(f"schedule {self.schedule.name!r}: {action} is not one of F, B, I, W, S, T and OPT")
        if self.schedule.weights is not Weights.SYNC and action.kind in (Kind.B, Kind.W):
            yield from self._update(action, 1)

    def _forward(self, action: Action) -> Iterator[Action]:
        for feeder in self.feeders[action.stage]:
            yield self._find(Kind.F, action, stage=feeder)
        if action.slice:
            yield self._find(Kind.F, action, piece=action.slice - 1)
        if self.schedule.weights is Weights.DOUBLE:
            yield from self._update(action, 2)

    def _backward(self, action: Action) -> Iterator[Action]:
        yield self._find(Kind.F, action)
        for giver in self.givers[action.stage]:
            yield self._gradient(action, giver, action.slice)
        if action.slice + 1 < self.schedule.slices:
            yield self._gradient(action, action.stage, action.slice + 1)
        if self.schedule.barriers and action.stage == self.schedule.stages - 1:
            yield from self._everywhere(Kind.S if self.schedule.barriers == 1 else Kind.T, action)

    def _update(self, action: Action, back: int) -> Iterator[Action]:
        """The OPT that comes `back` batches before that of the action's own batch, if there is one."""
        number = action.microbatch // self.batch - back
        if number >= 0:
            yield Action(Kind.OPT, action.stage, number)

    def _everywhere(self, kind: Kind, action: Action) -> Iterator[Action]:
        return (self._find(kind, action, stage=stage) for stage in range(self.schedule.stages))

    def _gradient(self, action: Action, stage: int, piece: int) -> Action:
        key = (stage, action.microbatch, piece, action.pipe)
        return self.known.get((Kind.B, *key)) or self._find(Kind.I, action, stage=stage, piece=piece)

    def _find(self, kind: Kind, action: Action, *, stage: int | None = None, piece: int | None = None) -> Action:
        """The action of the same microbatch and pipe, and of the same stage and slice unless others are given."""
        key = (
            kind,
            action.stage if stage is None else stage,
            action.microbatch,
            action.slice if piece is None else piece,
            action.pipe,
        )
        return self.known.get(key) or Action(*key)
