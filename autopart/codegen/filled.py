"""The text of a loop whose idle time takes forwards of frozen layers, for the batch after the one that it trains on.

As in `codegen.loop`, what outlives a step is in stores by name, and microbatches are counted over the whole loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.codegen.functions import indented
from autopart.codegen.loop import function, once, reductions, store_names, total
from autopart.codegen.stages import stage_outputs, stage_prologue
from autopart.codegen.step import action_lines, scheduled_lines
from autopart.ir.action import Action, Kind, stages_of
from autopart.ir.staged import Staged
from autopart.schedules.filling import Filled, counts


def filled(staged: Staged, loop: Filled, column: int, degree: int) -> list[str]:
    """The functions of pp rank `column`: ``step``, ``drain``, ``train``, and on the first one ``frozen``."""
    first = column == 0
    doc = "A batch comes; the one before it is trained on."
    lines = ["coming = batches.entering", "if not coming.start:"]
    lines += ["    frozen(world, batches, coming)"] * first + ["    return {}"]
    lines += [f"return train(world, batches, coming.start - {loop.batch}, coming)"]
    made = function("step(world, batches)", doc, lines, [])
    lines = [f"return train(world, batches, batches.count - {loop.batch}, range(0))"]
    made += function("drain(world, batches)", "No batch comes any more: train on the last one.", lines, [])
    if first:
        made += _frozen(staged)
    return [*made, *_train(staged, loop, column, degree)]


def _frozen(staged: Staged) -> list[str]:
    lines = ["for k in coming:", "    batch = batches.of(k)"]
    lines += indented(once(staged, stage_prologue(staged, 0, Kind.F)))
    lines += indented(action_lines(staged, Action(Kind.F, 0, 0), "k"))
    lines = [f"{name} = {{}}" for name in stage_outputs(staged, 0)] + lines
    doc = "Forwards of the layers that are not trained, for microbatches of the batch that comes."
    return function("frozen(world, batches, coming)", doc, lines, store_names(staged, [0]))


def _train(staged: Staged, loop: Filled, column: int, degree: int) -> list[str]:
    stages = stages_of(loop.one.place, column)
    edges = frozenset((edge.source, edge.target) for edge in staged.edges)
    lines = ["batch = batches.of(first)"]
    read = dict.fromkeys(
        name
        for s in stages
        for kind in staged.kinds(s)
        if (s, kind) != (0, Kind.F)
        for name in stage_prologue(staged, s, kind)
    )
    lines += once(staged, tuple(read))
    lines += [f"{name} = {{}}" for s in stages for name in stage_outputs(staged, s)]
    row, fills = loop.batch_rows(edges)[column], loop.fills if column == 0 else ()
    done = 0
    for part, count in _parts(row, fills):
        lines += scheduled_lines(staged, part, "first")
        if count:
            lines.append(f"frozen(world, batches, coming[{done}:{done + count}])")
            done += count
    for stage in stages:
        lines += reductions(staged, stage, degree)
        lines.append(f"world.update(stage={stage}, step=first // {loop.batch}, keep=0)")
    lines.append(f"return {total(staged, stages)}")
    doc = (
        "Train on a batch, and where this rank would wait prepare the one that comes." if fills else "Train on a batch."
    )
    return function("train(world, batches, first, coming)", doc, lines, store_names(staged, stages))


def _parts(row: Sequence[Action], fills: Sequence[int]) -> Iterator[tuple[Sequence[Action], int]]:
    """The row cut where frozen forwards go, each part with how many come after it."""
    waiting = list(fills)
    part: list[Action] = []
    for action in row:
        if waiting and counts(action) and (count := waiting.pop(0)):
            yield part, count
            part = []
        part.append(action)
    yield part, sum(waiting)
