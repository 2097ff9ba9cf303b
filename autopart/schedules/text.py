"""Schedules as text: the CSV form (a line a rank, actions in order) and the grid that error messages show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopart.ir.action import SETTINGS, Action, Boundary, Kind, Schedule, Weights

Table = Sequence[Sequence[Action]]

WHOLE = 16
"""A table of at most this many steps is shown whole."""

MARGIN = 3
"""Of a longer one, the steps shown on either side of a fault."""

GAP = ".."


def read(text: str, *, name: str = "custom") -> Schedule:
    """The schedule that a CSV of actions denotes: a line a rank, cells such as ``0F3``. The inverse of ``str``.

    Empty cells (idle steps) and blank lines are skipped. Lines such as ``weights: stash`` give a setting (`SETTINGS`).
    A stage of a pipe belongs to the first rank that uses it (of those that may be anywhere, to the rank of the stage
    after them), and microbatches, slices and pipes are those up to the highest number: `validate` finds what does not
    fit. Raises ValueError for a cell that is no action, a setting that there is not, or a stage number left out;
    TypeError for what is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"schedule: expected a CSV of actions such as 0F0,0F1,0B0,0B1, not {text!r}")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    settings = dict(_read_setting(number, line) for number, line in lines if ":" in line)
    table = tuple(_read_row(number, line) for number, line in lines if ":" not in line)
    parts = [(rank, part) for rank, row in enumerate(table) for action in row for part in action.parts]
    if not parts:
        raise ValueError("schedule: the table has no actions; give one line a rank, such as 0F0,0F1,0B0,0B1")
    places: list[dict[int, int]] = [{} for _ in range(1 + max(part.pipe for _, part in parts))]
    for rank, part in parts:
        places[part.pipe].setdefault(part.stage, rank)
    stages = 1 + max(part.stage for _, part in parts)
    for pipe, place in enumerate(places):
        absent = sorted(set(range(stages)) - set(place))
        if absent:
            of = f" in pipe {pipe}" if len(places) > 1 else ""
            raise ValueError(f"schedule: no action of stage {absent[0]}{of}, though there is one of stage {stages - 1}")
    made = Schedule(
        name,
        1 + max(part.microbatch for _, part in parts if part.kind is not Kind.OPT),
        tuple(places[0][stage] for stage in range(stages)),
        table,
        slices=1 + max(part.slice for _, part in parts),
        mirrors=tuple(tuple(place[stage] for stage in range(stages)) for place in places[1:]),
    )
    made = replace(made, **settings)
    if not 0 < made.anywhere < stages:
        return made
    return replace(made, place=(made.place[made.anywhere],) * made.anywhere + made.place[made.anywhere :])


def grid(table: Table, marks: Mapping[tuple[int, int], str]) -> str:
    """The table with a line a rank and a column a step, the (rank, step) cells of `marks` shown in brackets.

    A mark's text replaces the cell's (an empty one keeps it), and may stand past the end of its row. Of a long table
    only the steps near a mark are shown.
    """
    width = max([len(row) for row in table] + [step + 1 for _, step in marks])
    columns = _columns(width, [step for _, step in marks])
    lines = [["step", *(GAP if step is None else str(step) for step in columns)]]
    for rank, row in enumerate(table):
        lines.append([f"rank {rank}", *(_cell(rank, step, row, marks) for step in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _read_setting(number: int, line: str) -> tuple[str, Any]:
    """The name and the value of a setting."""
    name, value = (part.strip() for part in line.split(":", 1))
    kinds: dict[str, Any] = dict(zip(SETTINGS, (Weights, Boundary, int, _numbers, int), strict=True))
    try:
        return name, kinds[name](value)
    except (KeyError, ValueError):
        takes = f"weights: {' | '.join(Weights)}, optimizer: {' | '.join(Boundary)}, barriers: 0 | 1 | 2"
        takes += ", lengths: the tokens of each slice, anywhere: how many of the first stages train nothing"
        raise ValueError(f"schedule: line {number}: {line.strip()!r} is no setting; they are {takes}") from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _read_row(number: int, line: str) -> tuple[Action, ...]:
    row = []
    for column, cell in enumerate(line.split(","), 1):
        if cell.strip():
            try:
                row.append(Action.parse(cell))
            except ValueError as error:
                raise ValueError(f"schedule: line {number}, cell {column}: {error}") from None
    return tuple(row)


def _columns(width: int, marked: Sequence[int]) -> list[int | None]:
    """The steps to show, None standing for a run of steps left out."""
    if width <= WHOLE:
        return list(range(width))
    near = {step + offset for step in marked for offset in range(-MARGIN, MARGIN + 1)}
    columns: list[int | None] = []
    for step in range(width):
        if step in near:
            columns.append(step)
        elif not columns or columns[-1] is not None:
            columns.append(None)
    return columns


def _cell(rank: int, step: int | None, row: Sequence[Action], marks: Mapping[tuple[int, int], str]) -> str:
    if step is None:
        return GAP if row else ""
    text = str(row[step]) if step < len(row) else ""
    return f"[{marks[rank, step] or text}]" if (rank, step) in marks else text
