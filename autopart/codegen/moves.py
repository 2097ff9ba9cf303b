"""Moves: what an action gathers and reduces, where among its segments, and which units travel together, as text.

Small units that follow each other travel in one collective, up to `State.bucket` bytes: it costs much the same however
little it moves (buckets, Li et al. 2020, arXiv 2006.15704, section 3.2.3).

before: h.0(world.all_gather("h.0")); h.1(world.all_gather("h.1"))
after:  world.all_gather(("h.0", "h.1")); h.0(world.gathered("h.0")); h.1(world.gathered("h.1"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopart.codegen.functions import call
from autopart.codegen.layout import Layout
from autopart.codegen.roll import listed
from autopart.ir.action import Kind
from autopart.ir.staged import Staged
from autopart.ir.state import Unit, used_units

T = TypeVar("T")

Bucket = tuple[Unit, ...]
"""Units that one collective moves, in order of use."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What is moved around one segment's call.

    `gathers`: the buckets of which it uses a unit first, each with the one that is begun to be gathered when it is
    there; `drops`: those of which it uses a unit last. `reduces`: the buckets whose gradients are all there after it.
    """

    gathers: tuple[tuple[Bucket, Bucket], ...]
    drops: tuple[Bucket, ...]
    reduces: tuple[Bucket, ...]


def moves(
    staged: Staged, stage: int, kind: Kind, degree: int, completed: Mapping[str, tuple[Unit, ...]]
) -> tuple[Moves, ...]:
    """The moves of each segment that does something in actions of a kind, in the order in which they are called.

    `completed` are the units whose accumulated gradients are complete then, by segment.
    """
    homes, limit = staged.state.homes(), staged.state.bucket
    each_time = any(unit.gathered(degree) or unit.reduced_at_once(degree) for unit in staged.state.units)
    reads: list[list[Unit]] = []
    at_once: list[list[Unit]] = []
    done: list[Sequence[Unit]] = []
    for segment, phase in staged.phases(stage, kind):
        used = used_units(segment.parameters, homes) if each_time else ()
        graded = {unit.name for unit in used_units(phase.gradients, homes)} if each_time else ()
        reads.append([unit for unit in used if unit.gathered(degree) and unit.holds(phase.reads)])
        at_once.append([unit for unit in used if unit.name in graded and unit.reduced_at_once(degree)])
        done.append(completed.get(segment.name, ()) if phase.gradients else ())
    gathered = _buckets(reads, degree, limit)
    following: list[Bucket] = [bucket for bucket, *_ in gathered[1:]] + [()] * bool(gathered)
    reduced = [*_buckets(at_once, degree, limit), *_buckets(done, degree, limit)]
    reduced.sort(key=lambda found: len(found[0]) > 1)  # a segment's own lines come first
    begun = _by_row((first, (b, then)) for (b, first, _), then in zip(gathered, following, strict=True))
    dropped, complete = (_by_row((last, b) for b, _, last in found) for found in (gathered, reduced))
    rows = range(len(reads))
    return tuple(Moves(begun.get(row, ()), dropped.get(row, ()), complete.get(row, ())) for row in rows)


def _by_row(items: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    """Items by the number of the segment that they come with, in their order."""
    found: dict[int, list[T]] = {}
    for row, item in items:
        found.setdefault(row, []).append(item)
    return {row: tuple(each) for row, each in found.items()}


def _buckets(rows: Sequence[Sequence[Unit]], degree: int, limit: int) -> list[tuple[Bucket, int, int]]:
    """The units of some segments in buckets, each with the first and the last of its segments.

    A unit that several segments use is moved for each of them, alone.
    """
    uses = Counter(unit.name for units in rows for unit in units)
    found: list[tuple[Bucket, int, int]] = []
    size = 0  # of the last one
    for row, units in enumerate(rows):
        for unit in units:
            bucket, first = found[-1][:2] if found else ((), row)
            own = unit.wire_bytes(degree)
            if (
                bucket
                and uses[unit.name] == uses[bucket[0].name] == 1
                and (unit.dtype, unit.modes) == (bucket[0].dtype, bucket[0].modes)
                and size + own <= limit
            ):
                found[-1], size = ((*bucket, unit), first, row), size + own
            else:
                found.append(((unit,), row, row))
                size = own
    return found


@dataclass(frozen=True, slots=True)
class Lines:
    """The text of a segment's moves.

    `before` and `behind` its call stand lines that several segments have in common, `after` it those of its own.
    `parameters` are the source of what it is given, `gradients` the names of what it returns of each unit.
    """

    before: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    after: tuple[str, ...]
    behind: tuple[str, ...]


def lines(rows: Sequence[Layout], kind: Kind, degree: int, moved: Sequence[Moves]) -> list[Lines]:
    """The text of the moves of some segments, in the order in which they are called."""
    gathered = {unit.name for each in moved for bucket, _ in each.gathers if len(bucket) > 1 for unit in bucket}
    waiting = {unit.name for each in moved for bucket in each.reduces if len(bucket) > 1 for unit in bucket}
    return [_lines(item, kind, degree, each, gathered, waiting) for item, each in zip(rows, moved, strict=True)]


def _lines(
    item: Layout, kind: Kind, degree: int, moved: Moves, gathered: Collection[str], waiting: Collection[str]
) -> Lines:
    ahead = {bucket[0].name: then for bucket, then in moved.gathers}
    stated = any(len(bucket) > 1 for bucket, _ in moved.gathers)  # in lines of their own, all of them: in their order

    def source(unit: Unit) -> str:
        if not unit.gathered(degree):
            return f'*world.parameters("{unit.name}")'
        if unit.name in gathered or (stated and unit.name in ahead):
            return f'*world.gathered("{unit.name}")'
        return ", ".join([f'*world.all_gather("{unit.name}"', *_gather(ahead[unit.name])]) + ")"

    units = [unit for unit, _ in item.gradients] if item.phases[kind].gradients else []
    names = ["grads" if len(units) == 1 else f"grads_{i}" for i in range(len(units))]
    after = []
    for unit, name in zip(units, names, strict=True):
        if not unit.reduced_at_once(degree):
            after.append(f'world.accumulate("{unit.name}", {name})')
        elif unit.name in waiting:
            after.append(f'world.keep("{unit.name}", {name})')
        else:
            after.append(f'world.reduce_scatter("{unit.name}", {name}, axis="dp")')
    alone = [bucket for bucket in moved.reduces if len(bucket) == 1 and not bucket[0].reduced_at_once(degree)]
    several = [bucket for bucket in moved.reduces if len(bucket) > 1]
    return Lines(
        before=tuple(
            line
            for bucket, then in moved.gathers * stated
            for line in call("world.all_gather", [listed(_names(bucket)), *_gather(then)], "")
        ),
        parameters=tuple(source(unit) for unit, _ in item.given(kind)),
        gradients=tuple(names),
        after=(*after, *(line for bucket in alone for line in _reduction(bucket, degree))),
        behind=tuple(line for bucket in several for line in _reduction(bucket, degree)),
    )


def _gather(then: Bucket) -> list[str]:
    return ['axis="dp"', *([f"then={_named(then)}"] if then else [])]


def _reduction(bucket: Bucket, degree: int) -> list[str]:
    """The lines that begin to reduce what a bucket's segments made of gradients."""
    if bucket[0].reduced_at_once(degree):
        return call("world.reduce_scatter", [_named(bucket), 'axis="dp"'], "")
    name = "reduce_scatter" if bucket[0].updated_in_parts(degree) else "all_reduce"
    return ["if last:", *("    " + line for line in call(f"world.{name}", [_named(bucket), 'axis="dp"'], ""))]


def _named(bucket: Bucket) -> str:
    """Source for the name of a unit, or for those of several."""
    return f'"{bucket[0].name}"' if len(bucket) == 1 else listed(_names(bucket))


def _names(bucket: Bucket) -> list[str]:
    return [unit.name for unit in bucket]
