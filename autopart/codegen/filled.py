"""The text of a loop whose idle time takes forwards of frozen layers, for the batch after the one that it trains on.

As in `codegen.loop`, what outlives a step is in stores by name, and microbatches are counted over the whole loop. A
rank that computes frozen layers has a function ``frozen`` for them, which calls those of their stages where they have
several; one that trains on what another rank made of them has ``arriving_s`` for what comes from stage s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autopart.codegen.functions import indented
from autopart.codegen.loop import function, once, reductions, store_names, total
from autopart.codegen.stages import stage_outputs, stage_prologue
from autopart.codegen.step import action_lines, scheduled_lines
from autopart.ir.action import Action, Kind, stages_of
from autopart.ir.staged import Staged
from autopart.schedules.filling import Filled

WHOLE = "frozen"
"""The name of the function that computes all frozen layers."""


def filled(staged: Staged, loop: Filled, column: int, degree: int) -> list[str]:
    """The functions of pp rank `column`: ``step``, ``drain``, ``train``, and those of the frozen layers."""
    edges = frozenset((edge.source, edge.target) for edge in staged.edges)
    doc = "A batch comes; the one before it is trained on."
    first = _ahead(staged, loop.first(edges)[column], 0, loop.batch)
    lines = ["coming = batches.entering", "if not coming.start:", *indented([*first, "return {}"])]
    lines += [f"return train(world, batches, coming.start - {loop.batch}, coming)"]
    made = function("step(world, batches)", doc, lines, [])
    lines = [f"return train(world, batches, batches.count - {loop.batch}, range(0))"]
    made += function("drain(world, batches)", "No batch comes any more: train on the last one.", lines, [])
    row = loop.steady(edges)[column]
    stages = sorted({a.stage for a in row if a.kind is Kind.F and a.microbatch >= loop.batch})
    for stage in stages:
        made += _frozen(staged, stage, row)
    if len(stages) > 1:
        lines = ["for k in coming:", *(f"    {_name(staged, s)}(world, batches, range(k, k + 1))" for s in stages)]
        doc = "All layers that are not trained, for microbatches of the batch that comes."
        made += function(f"{WHOLE}(world, batches, coming)", doc, lines, [])
    for source in dict.fromkeys(a.peer for a in row if a.kind is Kind.RECV and a.microbatch >= loop.batch):
        made += _arriving(staged, source, row, loop.batch)
    return [*made, *_train(staged, loop, column, degree, row)]


def _frozen(staged: Staged, stage: int, row: Sequence[Action]) -> list[str]:
    """The forwards of one stage of the front on its rank, and where they send what they make."""
    targets = sorted({a.peer for a in row if a.kind is Kind.SEND and a.stage == stage})
    lines = [f"{name} = {{}}" for name in stage_outputs(staged, stage)]
    lines += ["for k in coming:", "    batch = batches.of(k)"]
    lines += indented(once(staged, stage_prologue(staged, stage, Kind.F)))
    for action in (Action(Kind.F, stage, 0), *(Action(Kind.SEND, stage, 0, peer=target) for target in targets)):
        lines += indented(action_lines(staged, action, "k"))
    doc = "Forwards of the layers that are not trained, for microbatches of the batch that comes."
    return function(f"{_name(staged, stage)}(world, batches, coming)", doc, lines, store_names(staged, [stage]))


def _arriving(staged: Staged, source: int, row: Sequence[Action], batch: int) -> list[str]:
    """What comes from a stage of the front on another rank, for microbatches of the batch that comes."""
    taken = [a for a in row if a.kind is Kind.RECV and a.microbatch >= batch and a.peer == source]
    targets = sorted({action.stage for action in taken})
    lines = ["for k in coming:", "    batch = batches.of(k)"]
    for target in targets:
        lines += indented(action_lines(staged, Action(Kind.RECV, target, 0, peer=source), "k"))
    doc = f"What stage {source} made of microbatches of the batch that comes: the frozen layers on another rank."
    return function(f"arriving_{source}(world, batches, coming)", doc, lines, store_names(staged, targets))


def _train(staged: Staged, loop: Filled, column: int, degree: int, row: Sequence[Action]) -> list[str]:
    stages = [stage for stage in stages_of(loop.place, column) if not staged.is_front(stage)]
    lines = ["batch = batches.of(first)"]
    read = dict.fromkeys(name for s in stages for kind in staged.kinds(s) for name in stage_prologue(staged, s, kind))
    lines += once(staged, tuple(read))
    lines += [f"{name} = {{}}" for s in stages for name in stage_outputs(staged, s)]
    for coming, part in groupby(row, lambda action: action.microbatch >= loop.batch):
        if coming:
            lines += _ahead(staged, [*part], loop.batch, loop.batch)
        else:
            lines += scheduled_lines(staged, [*part], "first")
    lines += reductions(staged, stages, degree)
    lines += [f"world.update(stage={stage}, step=first // {loop.batch}, keep=0)" for stage in stages]
    lines.append(f"return {total(staged, stages)}")
    fills = any(a.kind is Kind.F and a.microbatch >= loop.batch for a in row)
    doc = "Train on a batch" + ", and where this rank would wait prepare the one that comes" * fills + "."
    return function("train(world, batches, first, coming)", doc, lines, store_names(staged, stages))


def _ahead(staged: Staged, part: Sequence[Action], first: int, batch: int) -> Iterator[str]:
    """The calls for what a rank does for a batch that comes, whose microbatches are counted from `first`."""
    spans: list[tuple[str, int, int]] = []
    # What one stage hands to several of this rank's comes in one call.
    for name, k in dict.fromkeys(_calls(staged, [action for action in part if action.kind is not Kind.SEND])):
        if spans and (spans[-1][0], spans[-1][2]) == (name, k - first):
            spans[-1] = name, spans[-1][1], k - first + 1
        else:
            spans.append((name, k - first, k - first + 1))
    for name, start, stop in spans:
        which = "coming" if (start, stop) == (0, batch) else f"coming[{start}:{stop}]"
        yield f"{name}(world, batches, {which})"


def _calls(staged: Staged, part: Sequence[Action]) -> Iterator[tuple[str, int]]:
    """The function for each action, with its microbatch; one for all stages of the front where they come in a row."""
    place = 0
    while place < len(part):
        action, run = part[place], part[place : place + staged.front]
        pieces = [Action(Kind.F, action.stage + piece, action.microbatch) for piece in range(staged.front)]
        if staged.home(action.stage) == 0 and run == pieces:
            yield WHOLE, action.microbatch
            place += staged.front
        else:
            name = _name(staged, action.stage) if action.kind is Kind.F else f"arriving_{action.peer}"
            yield name, action.microbatch
            place += 1


def _name(staged: Staged, stage: int) -> str:
    return WHOLE if staged.front == 1 else f"{WHOLE}_{stage}"
