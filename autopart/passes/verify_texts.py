"""What `verify` reads: each rank's text, run on shapes at one batch size, and how its faults are told."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from autopart.codegen.recording import Recording
from autopart.codegen.recording_world import Event
from autopart.codegen.shapes import Bodies
from autopart.errors import VerificationError
from autopart.ir.action import Action, stages_of
from autopart.ir.mesh import Mesh, Span
from autopart.ir.program import Program, RankProgram
from autopart.passes.emit import observe
from autopart.schedules.stream import overlaps, stream_of


@dataclass(frozen=True, slots=True)
class Text:
    """A rank's text and what it did. `place` is the pp rank of each stage, `stages` those that this rank holds.

    `samples` are those of each of its microbatches, of a `batch` of so many.
    """

    rank: int
    mesh: Mesh
    lines: tuple[str, ...]
    place: tuple[int, ...]
    stages: tuple[int, ...]
    recording: Recording
    samples: tuple[int, ...] = ()
    batch: int = 0

    @property
    def events(self) -> tuple[Event, ...]:
        """The world's calls, in order."""
        return self.recording.events

    @property
    def performed(self) -> tuple[Action, ...]:
        """The compute actions, in order."""
        return tuple(e.action for e in self.events if e.call == "action" and e.action is not None)

    @property
    def degree(self) -> int:
        """The data ranks of this rank's stages."""
        return self.mesh.width(self.mesh.coordinate(self.rank).get("pp", 0))

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage for the same part of the batch."""
        return self.mesh.rank({**self.mesh.coordinate(self.rank), "pp": self.place[stage]})

    def group(self, event: Event) -> tuple[int, ...]:
        """The ranks that take part in a collective."""
        if event.axis == "world":
            return tuple(range(self.mesh.size))
        if event.stages and event.call != "broadcast_buffers":
            place = self.mesh.coordinate(self.rank).get("dp", 0)
            wide = [stage for stage in event.stages if place < self.mesh.width(self.place[stage])]
            return tuple(sorted({self.rank_of(stage) for stage in wide}))
        return self.mesh.group(self.rank, event.axis)

    def spans(self, stage: int, microbatch: int) -> tuple[Span, ...]:
        """The samples of a microbatch that each data rank of a stage has."""
        shares, count = self.mesh.dealt(self.batch), len(self.samples)
        column = self.mesh.column(self.place[stage])
        return tuple(self.mesh.spans(rank, shares, count)[microbatch] for rank in column)

    def where(self, line: int) -> str:
        """``line 12: `world.send(...)```."""
        found = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        return f"line {line}: `{found}`"

    def at(self, event: Event) -> str:
        """Rank, stage, microbatch, action and line of an event."""
        place = self.during(event.within or event.action)
        done = "" if event.action is not None and str(event.action) in place else f", {told(event)}"
        return f"{place}{done} ({self.where(event.line)})"

    def during(self, action: Action | None) -> str:
        """Rank, and stage and microbatch where there are such."""
        if action is None or action.microbatch < 0:
            return f"rank {self.rank}"
        return f"rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}"


def told(event: Event) -> str:
    """The call, and what it is about: ``all_reduce of "h.1"``."""
    if event.exchange is not None:
        return str(event.exchange)
    about = (event.unit,) if event.unit else event.buffers
    return f"{event.call} of {', '.join(map(json.dumps, about))}" if about else event.call


def fault(rule: str, where: str, problem: str, remedy: str) -> VerificationError:
    """The error for a broken rule."""
    return VerificationError(f"rule {rule}: {where}: {problem}; {remedy}")


def read(program: Program, rank: int, batch: int, bodies: Bodies) -> Text:
    """The text of one rank, run at a batch size. Raises VerificationError if it does not run or is not this rank's."""
    plan, written = program.plan, program.ranks[rank]
    mesh, lines = plan.mesh, tuple(written.source.splitlines())
    try:
        recording = observe(written.source, rank, program.captured, program.state_on(rank), plan, batch, bodies)
    except Exception as error:
        raise _does_not_run(written, error) from error
    _check_names(program, rank, recording.names)
    place = tuple(recording.names["PLACE"])
    column = mesh.coordinate(rank).get("pp", 0)
    samples = tuple(count for _, count in mesh.spans(rank, mesh.dealt(batch), plan.microbatches))
    if program.captured.training and overlaps(plan.schedule):
        samples *= stream_of(plan).shown
    return Text(rank, mesh, lines, place, stages_of(place, column), recording, samples, batch)


def _check_names(program: Program, rank: int, names: Mapping[str, object]) -> None:
    plan = program.plan
    staged = program.staged
    place = plan.places(staged.copies, staged.slices, helpers=staged.helpers)
    expected = {"RANK": rank, "MESH": plan.mesh.sizes, "PLACE": place, "MICROBATCHES": plan.microbatches}
    for name, value in expected.items():
        if name not in names:
            raise fault("text", f"rank {rank}", f"the text does not define {name}", f"define it as {value}")
        if names[name] != value:
            raise fault("text", f"rank {rank}", f"{name} is {names[name]}", f"the plan's is {value}")


def _does_not_run(written: RankProgram, error: Exception) -> VerificationError:
    """The error for a text that raises, with the innermost line of the text."""
    lines = written.source.splitlines()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == f"<rank {written.rank}>"]
    line = frames[-1].lineno if frames else error.lineno if isinstance(error, SyntaxError) else None
    shown = f" (line {line}: `{lines[line - 1].strip()}`)" if line and line <= len(lines) else ""
    during = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    problem = error.msg if isinstance(error, SyntaxError) else str(error)
    where = f"rank {written.rank}{during}{shown}"
    return fault("text", where, f"{type(error).__name__}: {problem}", "mend that line, or what should come before it")
