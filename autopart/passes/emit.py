"""emit: Scheduled -> Program. Write each rank's text; read its actions back, and assert that they are the plan's.

before: 0F0 0SEND0>1 ...
after:  ``acts_0_1[0], saved_0[0] = stage0_forward(world, batch, 0)``, ``world.send(acts_0_1.pop(0), ...)``, ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from autopart.codegen.graphs import stage_graphs
from autopart.codegen.recording import Recording, record
from autopart.codegen.recording_batch import RecordingBatch, RecordingBatches
from autopart.codegen.recording_loop import RecordingLoop
from autopart.codegen.recording_world import RecordingWorld
from autopart.codegen.shapes import Bodies, Spec
from autopart.codegen.source import sources
from autopart.errors import VerificationError
from autopart.ir.action import COMPUTE, Scheduled
from autopart.ir.captured import Captured
from autopart.ir.graph import Value
from autopart.ir.plan import Plan
from autopart.ir.program import Program, RankProgram
from autopart.ir.staged import Staged
from autopart.ir.state import State
from autopart.passes.reuse import reuse
from autopart.passes.schedule import with_collectives
from autopart.schedules.stream import overlaps, stream_of

_RANK = re.compile(r"^RANK, MESH = (\d+),", re.MULTILINE)


def emit(
    staged: Staged, scheduled: Scheduled, plan: Plan, *, others: Sequence[Staged] = (), bodies: Bodies | None = None
) -> Program:
    """The program. Raises VerificationError if a text does something else than was planned (a fault of autopart).

    Texts reuse memory as `reuse` says; the graph in the program does not.
    `others` are the steps of the further places of the axes inside segments, of whose first one `staged` is. What is
    found out about bodies on shapes is kept in `bodies`, which `verify` may be given too.
    """
    captured, mesh = staged.segmented.captured, plan.mesh
    computed = {(action.stage, action.kind) for row in scheduled.table for action in row if action.kind in COMPUTE}
    assert all(kind in staged.kinds(stage) for stage, kind in computed), "backwards are cut as the schedule has them"
    bodies = bodies or Bodies()
    ranks, places = [], (staged, *others)
    widths = tuple(map(mesh.width, range(mesh.degree("pp"))))
    planned = [with_collectives(each, scheduled, widths) for each in places]
    for rank, text in enumerate(sources(tuple(map(reuse, places)), scheduled, plan)):
        place = plan.place_inside(rank)
        actions = observe(text, rank, captured, places[place].state, plan, plan.batch, bodies).actions
        expected = planned[place][mesh.coordinate(rank).get("pp", 0)]
        if actions != expected:
            at = next((i for i, (a, b) in enumerate(zip(actions, expected, strict=False)) if a != b), len(expected))
            raise VerificationError(
                f"rank {rank}: action {at} of the text is {actions[at : at + 1]}, planned is {expected[at : at + 1]}"
            )
        ranks.append(RankProgram(rank, text, actions))
    return Program(tuple(ranks), plan, staged, stage_graphs, tuple(others))


def observe(
    text: str, rank: int, captured: Captured, state: State, plan: Plan, batch: int, bodies: Bodies
) -> Recording:
    """What one rank's text does for a whole batch of `batch` samples."""
    mesh, shares = plan.mesh, plan.mesh.dealt(batch)
    mine = _sizes(plan, rank, shares)
    # Data ranks run the same text but for its first line and their number.
    inside = plan.place_inside(rank)
    alike = (_RANK.sub("", text.partition("\n")[2]), mine, batch, inside)
    number = _RANK.search(text)
    if number is not None and alike in bodies.recordings:
        known: Recording = bodies.recordings[alike]
        return replace(known, names={**known.names, "RANK": int(number[1])})
    values = {item.target: item.value for item in captured.of_kind("input")}
    buffers = {item.target: _spec(item.value, batch) for item in captured.of_kind("buffer", "constant")}
    if updates := captured.updates():  # a buffer that is only written is no input
        made = {value.name: value for value in captured.values()}
        buffers |= {out.target: _spec(made[out.name], batch) for out in updates}
    inputs = {target: (lambda b, value=value: _spec(value, b)) for target, value in values.items()}
    tangents = {
        item.value.name: replace(
            _spec(item.value, batch), whole=item.value.at(1) != item.value.at(2), source=("tangent", item.target)
        )
        for item in captured.of_kind("tangent")
        if captured.deferred
    }
    draws = {item.target: _spec(item.value, batch) for item in captured.of_kind("random")}
    places = plan.places_inside(rank)
    given = RecordingBatch(inputs, mine, batch, draws, local=len(shares) > 1 and plan.inputs == "local")
    part = mesh.coordinate(rank)["dp"] if mesh.widths else mesh.part(rank)
    widths = {
        stage: [sum(_sizes(plan, other, shares)) for other in mesh.column(column)]
        for stage, column in enumerate(plan.place if mesh.widths else ())
    }
    world = RecordingWorld(state, shares, part, buffers, places, tangents, widths)
    if captured.training and overlaps(plan.schedule):
        given = RecordingBatches(given, stream_of(plan).shown)
        world = RecordingLoop(state, shares, part, buffers, places)
    seen = bodies.recordings[alike] = record(text, f"<rank {rank}>", world, given, bodies)
    return seen


def _sizes(plan: Plan, rank: int, shares: Sequence[int]) -> tuple[int, ...]:
    """The samples of each microbatch of a rank."""
    return tuple(count for _, count in plan.mesh.spans(rank, shares, plan.microbatches))


def _spec(value: Value, batch: int) -> Spec:
    return Spec(value.at(batch), value.dtype)
