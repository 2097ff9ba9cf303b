"""Orders for stages that have their places already: forwards alone, and all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.ir.action import Action, Kind, Schedule, stages_of


def forwards(place: Sequence[int], microbatches: int, barriers: int = 0) -> Schedule:
    """Forwards only, for programs without a backward.

    A rank takes as many microbatches as there are ranks through its first stage, then through its next, and so on: by
    then the first of them has been through the stages between, and few wait. With `barriers` the output layer is split
    over the ranks, one stage each: a rank has an S and a T of each microbatch after the forwards of its round.
    """
    ranks = max(place) + 1
    rounds = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    kinds = (Kind.F, Kind.S, Kind.T) if barriers else (Kind.F,)
    rows = (
        tuple(Action(kind, stage, k) for each in rounds for stage in held for kind in kinds for k in each)
        for held in _held(place)
    )
    return Schedule("forward", microbatches, tuple(place), tuple(rows), barriers=barriers)


def forwards_first(place: Sequence[int], microbatches: int) -> Schedule:
    """All forwards, stage by stage, then all backwards, for steps without a loss. With a stage a rank this is GPipe."""
    every = range(microbatches)
    rows = (
        (
            *(Action(Kind.F, stage, k) for stage in held for k in every),
            *(Action(Kind.B, stage, k) for stage in reversed(held) for k in every),
        )
        for held in _held(place)
    )
    return Schedule("forwards first", microbatches, tuple(place), tuple(rows))


def is_forwards_first(schedule: Schedule) -> bool:
    """Whether every rank has done all of its forwards when it begins its first backward."""
    forwards = ([action.kind is Kind.F for action in row] for row in schedule.table)
    return all(row == sorted(row, reverse=True) for row in forwards)


def _held(place: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The stages of each rank."""
    return (stages_of(place, rank) for rank in range(max(place) + 1))
