"""A rank's whole source: header, bodies, edges, stage functions, step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.codegen import stages as stage_text
from autopart.codegen.bodies import bodies
from autopart.codegen.filled import filled
from autopart.codegen.functions import function
from autopart.codegen.layout import layout
from autopart.codegen.loop import loop
from autopart.codegen.parsed import PROLOGUE
from autopart.codegen.step import edges, prologue_inputs, step
from autopart.ir.action import Scheduled, Weights, stages_of
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.schedules.filling import Filled
from autopart.schedules.stream import stream_of


def sources(places: Sequence[Staged], scheduled: Scheduled, plan: Plan) -> Iterator[str]:
    """The source of every rank, in order; data ranks differ in their headers only.

    `places` are the steps of the places of the axes inside segments; one where there is no such axis.
    """
    known: dict[tuple[int, int], str] = {}
    for rank in range(plan.mesh.size):
        column, inside = plan.mesh.coordinate(rank).get("pp", 0), plan.place_inside(rank)
        staged, key = places[inside], (column, inside)
        if key not in known:
            known[key] = code(staged, scheduled, plan, column)
        yield _joined(_header(staged, scheduled, plan, rank, stages_of(scheduled.schedule.place, column))) + known[key]


def code(staged: Staged, scheduled: Scheduled, plan: Plan, column: int) -> str:
    """What follows the header in the source of the ranks at place `column` on pp."""
    degree, held = plan.mesh.width(column), stages_of(scheduled.schedule.place, column)
    homes = staged.state.homes()
    layouts = {s: [layout(x, staged.segmented, homes, staged.kinds(s)) for x in staged.stages[s]] for s in held}
    text = bodies(item for s in held for item in layouts[s])
    local = plan.inputs == "local"
    lines = [*_prologue(staged, held, local and plan.mesh.parts > 1), *text.lines, *edges(staged, held)]
    overlaps = scheduled.schedule.weights is not Weights.SYNC
    for s in held:
        completed = {} if overlaps else staged.completed(s, degree, scheduled.unfinished(s))
        last = scheduled.last_backward(s)
        for kind in staged.kinds(s):
            lines += stage_text.function_of(staged, s, kind, layouts[s], text.names, degree, completed, last)
    if overlaps:
        made = stream_of(plan)
        lines += (
            filled(staged, made, column, degree) if isinstance(made, Filled) else loop(staged, made, column, degree)
        )
    else:
        lines += step(staged, scheduled, column, degree, local=local, parts=plan.mesh.parts)
    return _joined(lines)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _header(staged: Staged, scheduled: Scheduled, plan: Plan, rank: int, held: Sequence[int]) -> list[str]:
    schedule = scheduled.schedule
    names = {s: [segment.name for segment in staged.stages[s]] for s in held}
    spans = {s: row[0] if len(row) == 1 else f"{row[0]} to {row[-1]}" for s, row in names.items()}
    where = ", ".join(f"{axis} {place}" for axis, place in plan.mesh.coordinate(rank).items()) or "the only one"
    placements = ", ".join(f"{pattern}: {placement}" for pattern, placement in plan.placements)
    kind = "training" if staged.segmented.captured.training else "forward only"
    first = f"Rank {rank} of {plan.mesh.size} ({where}): "
    if len(held) == 1:
        first += f"stage {held[0]} of {schedule.stages}, {spans[held[0]]}."
    else:
        first += f"stages {', '.join(map(str, held))} of {schedule.stages}."
    return [
        f'"""{first}',
        "",
        *([*(f"stage {s}: {span}{_copy(staged, s)}" for s, span in spans.items()), ""] if len(held) > 1 else []),
        f"{kind}, schedule {schedule.name}, {plan.microbatches} microbatches, placements {placements}",
        "b is the number of samples in the microbatch at hand, B in the whole batch.",
        *(["Samples compute together: every rank is given all, and dp splits them inside layers."] * plan.mesh.coupled),
        *(["Each data rank is given its own samples."] if plan.inputs == "local" else []),
        *(
            ["Each microbatch is cut over the data ranks of a stage, of which stages have unlike numbers."]
            if plan.mesh.widths
            else []
        ),
        '"""',
        "",
        "import torch",
        "",
        "aten = torch.ops.aten",
        "",
        f"RANK, MESH = {rank}, {plan.mesh.sizes!r}",
        f"PLACE = {schedule.place}  # the pp rank of each stage",
        f"MICROBATCHES = {plan.microbatches}",
        'DEVICE = torch.device("cpu")  # the world\'s device when the program runs',
    ]


def _copy(staged: Staged, stage: int) -> str:
    """What a stage is in which copy of the model or slice of the sequence, or of which layer it is a part."""
    if staged.helper(stage) >= 0:
        return f" (stage {staged.home(stage)} again: where this rank would wait, it computes that a batch ahead)"
    if staged.is_part(stage):
        return f" (this rank's part of the output layer, of {staged.parts})"
    if staged.is_lookup(stage):
        return f" (this rank's part of the input embedding, of {staged.lookups})"
    if staged.slices > 1:
        piece, number = divmod(stage, staged.width)
        return f" (stage {number} on slice {piece} of the sequence)"
    copy, number = divmod(stage, staged.depth)
    return f" (stage {number} of copy {copy} of the model)" if staged.copies > 1 else ""


def _prologue(staged: Staged, held: Sequence[int], local: bool) -> list[str]:
    captured = staged.segmented.captured
    if not stage_text.reads_prologue(staged, held):
        return []
    formals = [*(["b", "B"] if local else ["B"]), *(name for _, _, name in prologue_inputs(staged))]
    results = ", ".join(item.value.name for item in captured.of_kind("prologue"))
    doc = (
        "What the inputs of this data rank's b samples, of B in all, add to the sums over the whole batch."
        if local
        else "What depends on the whole batch's inputs alone, computed before its first microbatch."
    )
    made = function(PROLOGUE, formals, captured.prologue, results, doc=doc, batch="b" if local else "B")
    return ["", "", *made]
