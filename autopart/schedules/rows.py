"""What generators share: where stages lie, rows from a script of phases, backwards in two parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.ir.action import Action, Kind
from autopart.schedules.family import check_count

Row = tuple[Action, ...]
"""The actions of one rank, in order."""


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """The loop placement: rank r holds stages r, r + ranks, r + 2 ranks, ...

    Raises TypeError or ValueError unless `chunks` is a whole number of at least 1.
    """
    check_count("chunks", chunks)
    return tuple(range(ranks)) * chunks


def wave(ranks: int, chunks: int) -> tuple[int, ...]:
    """The wave placement: stages run down the ranks and up again; two chunks make a V."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def script(stages: Mapping[str, int], *phases: tuple[int, str]) -> Row:
    """A row told in phases, each a number of repetitions and the actions of one, such as ``(3, "Fa Iz Wz")``.

    An action is its kind and the letter of its stage in `stages`; the k-th time that it comes, it is of microbatch k.
    """
    done: Counter[str] = Counter()
    row = []
    for repetitions, cells in phases:
        for cell in cells.split() * repetitions:
            row.append(Action(Kind(cell[0]), stages[cell[1]], done[cell]))
            done[cell] += 1
    return tuple(row)


def run(kind: Kind, stage: int, microbatches: Iterable[int]) -> Row:
    """The actions of one kind at one stage."""
    return tuple(Action(kind, stage, microbatch) for microbatch in microbatches)


def in_turn(forwards: Row, backwards: Row, ahead: int) -> Row:
    """So many forwards to warm up, then a forward and a backward in turn, then the backwards that are left."""
    warmup, turns = forwards[:ahead], forwards[ahead:]
    pairs = zip(turns, backwards, strict=False)
    return (*warmup, *(action for pair in pairs for action in pair), *backwards[len(turns) :])


def warmed(counts: Sequence[int], microbatches: int, backward: Kind) -> list[Row]:
    """A row of one stage for each count of forwards to warm up, forwards and backwards `in_turn`."""
    every = range(microbatches)
    return [
        in_turn(run(Kind.F, stage, every), run(backward, stage, every), count) for stage, count in enumerate(counts)
    ]


def split(row: Iterable[Action], lag: int) -> Row:
    """Every B in two: its I in its place, its W after the `lag`-th I that follows, or at the end.

    rewrite (lag 1):  0F0 0B0 0F1 0B1  -->  0F0 0I0 0F1 0I1 0W0 0W1
    """
    return tuple(_split(row, lag))


def _split(row: Iterable[Action], lag: int) -> Iterator[Action]:
    pending: list[Action] = []
    for action in row:
        if action.kind is not Kind.B:
            yield action
            continue
        yield replace(action, kind=Kind.I)
        pending.append(replace(action, kind=Kind.W))
        if len(pending) > lag:
            yield pending.pop(0)
    yield from pending
