"""What each action waits for. Derived from the edges between stages, never stored in a schedule.

Actions are F, B, I, W, S, T, E, D and OPT here: the members of a PAIR stand for themselves, and the pair waits for what
either of them needs. They are told by number: their place among `Schedule.parts()`. Within a microbatch, what an action
waits for depends on its kind, stage, slice and pipe alone, so those that differ in the microbatch are seen to together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat

from autopart.ir.action import ENDS, Kind, Schedule, Weights

Edges = frozenset[tuple[int, int]]
"""(source stage, target stage) pairs over which values flow: outputs if source < target, else gradients."""

Columns = dict[tuple[Kind, int, int, int], dict[int, int]]
"""The numbers of a table's actions: by kind, stage, slice and pipe, then by microbatch."""

Needs = list[tuple[int, ...]]
"""The numbers of what each action waits for, action by action."""

NEVER = -1
"""The number of an action that is not there: what waits for it waits for ever."""

Source = tuple[tuple[Kind, ...], int, int]
"""What is waited for within a microbatch: an action of one of the kinds, its stage, its slice."""

GRADIENT = (Kind.I, Kind.B)
"""What makes the gradients that flow on."""


def chain(stages: int) -> Edges:
    """The edges of a plain pipeline: each stage feeds the next one, and gets its gradient back."""
    forward = {(stage, stage + 1) for stage in range(stages - 1)}
    return frozenset(forward | {(target, source) for source, target in forward})


def columns(schedule: Schedule) -> Columns:
    """The numbers of a schedule's actions."""
    found: Columns = defaultdict(dict)
    for number, a in enumerate(schedule.parts()):
        found[a.kind, a.stage, a.slice, a.pipe][a.microbatch] = number
    return found


def dependencies(schedule: Schedule, edges: Edges | None = None, known: Columns | None = None) -> Needs:
    """What each action waits for; `edges` defaults to the chain of stages, `known` to the schedule's `columns`.

    Within a microbatch and its pipe: F waits for F of the stages that feed it, and for its own F of the slice before
    (keys and values); B or I for its own F, for B or I of the stages that give it gradients, and for its own B or I of
    the slice after (the gradients of keys and values); W for its own I. Where the output layer is split over the ranks,
    S waits for F of the last stage, T for S of all ranks, and B or I of the last stage for S of all ranks (T, if it
    takes two barriers). Where the input embedding is, F of the first stage waits for E of all ranks, and D for B or I
    of the first stage. Between microbatches: OPT number n waits for the backwards of the n-th batch of its stage and
    OPT n-1, the backwards of the next batch for OPT n; with two buffers, forwards of batch n for OPT n-2. Needs a table
    in which every stage and microbatch has what `validate` asks for.
    """
    known = columns(schedule) if known is None else known
    rules = _Rules(schedule, chain(schedule.stages) if edges is None else edges)
    needs: Needs = [(NEVER,)] * sum(len(action.parts) for row in schedule.table for action in row)
    for (kind, stage, piece, pipe), column in known.items():
        sources = [_found(known, source, pipe) for source in rules.sources(kind, stage, piece)]
        waits = [[source.get(microbatch, NEVER) for microbatch in column] for source in sources]
        for number, wanted in zip(column.values(), zip(*waits, strict=True) if waits else repeat(()), strict=False):
            needs[number] = wanted
    if schedule.weights is not Weights.SYNC:
        _tie_updates(schedule, known, needs)
    return needs


def batch_size(schedule: Schedule) -> int:
    """How many microbatches make up one update of the weights: all, where no OPT is in the table."""
    updates = sum(action.kind is Kind.OPT and action.stage == schedule.anywhere for action in schedule.parts())
    return schedule.microbatches // max(updates, 1)


class _Rules:
    """What the actions of one schedule wait for within their microbatch."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self.schedule, self.last, self.looks_up = schedule, schedule.stages - 1, schedule.looks_up
        self.feeders = [sorted(a for a, b in edges if b == stage and a < stage) for stage in range(schedule.stages)]
        self.givers = [sorted(a for a, b in edges if b == stage and a > stage) for stage in range(schedule.stages)]

    def sources(self, kind: Kind, stage: int, piece: int) -> list[Source]:
        """What the actions of a kind at a stage and a slice wait for."""
        match kind:
            case Kind.F:
                return self._forward(stage, piece)
            case Kind.B | Kind.I:
                return self._backward(stage, piece)
            case Kind.W:
                return [((Kind.I,), stage, piece)]
            case Kind.S:
                return [((Kind.F,), self.last, piece)]
            case Kind.T:
                return self._everywhere(Kind.S, piece)
            case Kind.D:
                return [(GRADIENT, 0, piece)]
            case Kind.E | Kind.OPT:
                return []
            case _:
                raise ValueError(f"schedule {self.schedule.name!r}: {kind} is not one of F, B, I, W, S, T, E, D, OPT")

    def _forward(self, stage: int, piece: int) -> list[Source]:
        found: list[Source] = [((Kind.F,), feeder, piece) for feeder in self.feeders[stage]]
        found += self._everywhere(Kind.E, piece) if self.looks_up and stage == 0 else []
        return [*found, ((Kind.F,), stage, piece - 1)] if piece else found

    def _backward(self, stage: int, piece: int) -> list[Source]:
        found: list[Source] = [((Kind.F,), stage, piece)]
        found += [(GRADIENT, giver, piece) for giver in self.givers[stage]]
        if piece + 1 < self.schedule.slices:
            found.append((GRADIENT, stage, piece + 1))
        if self.schedule.barriers and stage == self.last:
            found += self._everywhere(Kind.S if self.schedule.barriers == 1 else Kind.T, piece)
        return found

    def _everywhere(self, kind: Kind, piece: int) -> list[Source]:
        return [((kind,), stage, piece) for stage in range(self.schedule.stages)]


def _found(known: Columns, source: Source, pipe: int) -> dict[int, int]:
    """The numbers, by microbatch, of what is waited for."""
    kinds, stage, piece = source
    found = [known[key] for kind in kinds if (key := (kind, stage, piece, pipe)) in known]
    return found[0] if len(found) == 1 else {k: number for column in found for k, number in column.items()}


def _tie_updates(schedule: Schedule, known: Columns, needs: Needs) -> None:
    """Add what is waited for between microbatches: OPTs, and what they wait for."""
    batch = batch_size(schedule)
    ended: dict[tuple[int, int], list[int]] = defaultdict(list)

    def update(stage: int, number: int) -> Iterable[int]:
        """The OPT of a stage and batch, if there are such batches."""
        return [known.get((Kind.OPT, stage, 0, 0), {}).get(number, NEVER)] if number >= 0 else []

    for (kind, stage, _, _), column in known.items():
        back = 1 if kind in ENDS else 2 if kind is Kind.F and schedule.weights is Weights.DOUBLE else 0
        for microbatch, number in column.items() if back else ():
            needs[number] += (*update(stage, microbatch // batch - back),)
            if kind in ENDS:
                ended[stage, microbatch // batch].append(number)
    for (kind, stage, _, _), column in known.items():
        if kind is Kind.OPT:
            for number, at in column.items():
                needs[at] = (*sorted(ended[stage, number]), *update(stage, number - 1))
