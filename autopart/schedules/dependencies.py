"""What each action waits for. Derived from the edges between stages, never stored in a schedule.

Actions are F, B, I, W, S, T and OPT here: the members of a PAIR stand for themselves, and the pair waits for what
either of them needs.
"""

from __future__ import annotations

from collections import defaultdict

from autopart.ir.action import ENDS, Action, Kind, Schedule, Weights

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
    return {action: rules.needs(action) for action in schedule.parts()}


def batch_size(schedule: Schedule) -> int:
    """How many microbatches make up one update of the weights: all, where no OPT is in the table."""
    updates = sum(action.kind is Kind.OPT and action.stage == 0 for action in schedule.parts())
    return schedule.microbatches // max(updates, 1)


class _Rules:
    """The rules of one schedule: the actions that one action waits for."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self.schedule, self.batch = schedule, batch_size(schedule)
        self.changing = schedule.weights is not Weights.SYNC
        self.stages = stages = range(schedule.stages)
        self.feeders = [sorted(a for a, b in edges if b == stage and a < stage) for stage in stages]
        self.givers = [sorted(a for a, b in edges if b == stage and a > stage) for stage in stages]
        self.rules = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weights,
            Kind.S: self._logits,
            Kind.T: self._rest,
            Kind.OPT: self._step,
        }
        self.known: dict[tuple[Kind, int, int, int, int], Action] = {}
        self.ended: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for a in schedule.parts():
            self.known[a.kind, a.stage, a.microbatch, a.slice, a.pipe] = a
            if self.changing and a.kind in ENDS:
                self.ended[a.stage, a.microbatch // self.batch].append(a)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What an action waits for."""
        rule = self.rules.get(action.kind)
        if rule is None:
            raise ValueError(f"schedule {self.schedule.name!r}: {action} is not one of F, B, I, W, S, T and OPT")
        found = rule(action)
        if self.changing and action.kind in ENDS:
            found += self._update(action, 1)
        return tuple(found)

    def _forward(self, action: Action) -> list[Action]:
        found = [self._find(Kind.F, action, feeder, action.slice) for feeder in self.feeders[action.stage]]
        if action.slice:
            found.append(self._find(Kind.F, action, action.stage, action.slice - 1))
        if self.schedule.weights is Weights.DOUBLE:
            found += self._update(action, 2)
        return found

    def _backward(self, action: Action) -> list[Action]:
        found = [self._find(Kind.F, action, action.stage, action.slice)]
        found += [self._gradient(action, giver, action.slice) for giver in self.givers[action.stage]]
        if action.slice + 1 < self.schedule.slices:
            found.append(self._gradient(action, action.stage, action.slice + 1))
        if self.schedule.barriers and action.stage == self.stages[-1]:
            found += self._everywhere(Kind.S if self.schedule.barriers == 1 else Kind.T, action)
        return found

    def _weights(self, action: Action) -> list[Action]:
        return [self._find(Kind.I, action, action.stage, action.slice)]

    def _logits(self, action: Action) -> list[Action]:
        return [self._find(Kind.F, action, self.stages[-1], action.slice)]

    def _rest(self, action: Action) -> list[Action]:
        return self._everywhere(Kind.S, action)

    def _step(self, action: Action) -> list[Action]:
        before = [Action(Kind.OPT, action.stage, action.microbatch - 1)] if action.microbatch else []
        return self.ended[action.stage, action.microbatch] + before

    def _update(self, action: Action, back: int) -> list[Action]:
        """The OPT that comes `back` batches before that of the action's own batch, if there is one."""
        number = action.microbatch // self.batch - back
        return [Action(Kind.OPT, action.stage, number)] if number >= 0 else []

    def _everywhere(self, kind: Kind, action: Action) -> list[Action]:
        return [self._find(kind, action, stage, action.slice) for stage in self.stages]

    def _gradient(self, action: Action, stage: int, piece: int) -> Action:
        key = (Kind.B, stage, action.microbatch, piece, action.pipe)
        return self.known.get(key) or self._find(Kind.I, action, stage, piece)

    def _find(self, kind: Kind, action: Action, stage: int, piece: int) -> Action:
        """The action of the same microbatch and pipe at a stage and slice."""
        key = (kind, stage, action.microbatch, piece, action.pipe)
        return self.known.get(key) or Action(*key)
