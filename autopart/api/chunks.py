"""Modules in chunks of their tokens: what does not go with them, and the output layer in chunks as a way out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autopart.api.tensor import costs_of
from autopart.errors import CaptureError
from autopart.ir.action import Kind, Schedule
from autopart.ir.plan import pinned_chunks
from autopart.ir.segmented import Segmented
from autopart.passes.chunked import output_module
from autopart.schedules import make, read, spell
from autopart.schedules.spell import AUTO, is_table, splits_output
from autopart.solver.request import Pins
from autopart.solver.variants import Chunked, Costed

COUNTS = (2, 4, 8, 16, 32, 64)
"""The chunks of the output layer that are tried where nothing fits."""


def check_beside(pins: Pins) -> None:
    """Raise ValueError for chunks beside what they do not go with."""
    if pinned_chunks(pins.get("chunks")) and pins.get("schedule") == AUTO:
        raise ValueError(
            "chunks: schedule='auto' looks at schedules whose backward is in two, with which they do not go; pin one "
            "of whole backwards, such as '1f1b' or 'interleaved', or leave chunks out"
        )


def ways_out(segmented: Segmented, pins: Pins) -> Chunked:
    """What finds the costs with the output layer in more and more chunks, where it may be run so."""
    schedule = pins.get("schedule")
    if pins.get("chunks") is not None or splits_output(schedule) or not _whole_backwards(schedule):
        return {}
    module = output_module(segmented.captured)

    def found(count: int) -> Sequence[Costed]:
        try:
            return ((None, *costs_of(segmented, chunks=((module, count),))),)
        except CaptureError:
            return ()

    return {f"chunks={{{module!r}: {count}}}": partial(found, count) for count in COUNTS if module}


def _whole_backwards(schedule: str | Schedule | None) -> bool:
    """Whether a schedule, as it was given, is known to have its backwards in one, of whole sequences."""
    if schedule is None:
        return True
    text = spell(schedule)
    try:
        made = read(text) if is_table(text) else make(text, ranks=4, microbatches=8)
    except ValueError:  # it is for other numbers, or searched for
        return False
    return made.slices == 1 and all(action.kind is not Kind.I for _, action in made.actions())
