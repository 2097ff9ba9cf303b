"""Schedules written by hand, for stages placed in a zigzag: what `autopart.schedules.build` does not make."""

from __future__ import annotations

from autopart.ir.action import Action, Kind, Schedule


def zigzag(ranks: int, legs: int) -> tuple[int, ...]:
    """The rank of each stage: down the ranks and up again, so that neighbours at a turn share a rank (2 legs: a V)."""
    down = tuple(range(ranks))
    return tuple(rank for leg in range(legs) for rank in (down if leg % 2 == 0 else down[::-1]))


def listed(place: tuple[int, ...], microbatches: int, cap: int) -> Schedule:
    """Step by step, each rank does the first backward that can be done, else the forward of its deepest stage.

    At most `cap` microbatches are between their first forward and their last backward.
    """
    ranks, stages = max(place) + 1, len(place)
    table: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < 2 * stages * microbatches:
        made = []
        for rank in range(ranks):
            held = [stage for stage in range(stages) if place[stage] == rank]
            backwards = [Action(Kind.B, s, k) for k in range(microbatches) for s in reversed(held)]
            forwards = [Action(Kind.F, s, k) for s in reversed(held) for k in range(microbatches)]
            ready = [a for a in (*backwards, *forwards) if a not in done and _ready(a, stages, done, cap)]
            made += [(rank, action) for action in ready[:1]]
        for rank, action in made:
            table[rank].append(action)
            done.add(action)
    return Schedule("listed", microbatches, place, tuple(map(tuple, table)))


def _ready(action: Action, stages: int, done: set[Action], cap: int) -> bool:
    stage, k = action.stage, action.microbatch
    if action.kind is Kind.B:
        return Action(Kind.F, stage, k) in done and (stage + 1 == stages or Action(Kind.B, stage + 1, k) in done)
    if stage:
        return Action(Kind.F, stage - 1, k) in done
    return k < cap or Action(Kind.B, 0, k - cap) in done
