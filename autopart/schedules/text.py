"""Schedules as text: the CSV form (a line a rank, actions in order) and the grid that error messages show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.ir.action import Action, Schedule

Table = Sequence[Sequence[Action]]

WHOLE = 16
"""A table of at most this many steps is shown whole."""

MARGIN = 3
"""Of a longer one, the steps shown on either side of a fault."""

GAP = ".."


def read(text: str, *, name: str = "custom") -> Schedule:
    """The schedule that a CSV of actions denotes: a line a rank, cells such as ``0F3``. The inverse of ``str``.

    Empty cells (idle steps) and blank lines are skipped. A stage belongs to the first rank that uses it, and the
    microbatches are those up to the highest number: `validate` finds what does not fit. Raises ValueError for a cell
    that is no action, or a stage number left out.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    table = tuple(_read_row(number, line) for number, line in lines)
    if not any(table):
        raise ValueError("schedule: the table has no actions; give one line a rank, such as 0F0,0F1,0B0,0B1")
    place: dict[int, int] = {}
    for rank, row in enumerate(table):
        for action in row:
            place.setdefault(action.stage, rank)
    absent = sorted(set(range(max(place) + 1)) - set(place))
    if absent:
        raise ValueError(f"schedule: no action of stage {absent[0]}, though there is one of stage {max(place)}")
    microbatches = 1 + max(action.microbatch for row in table for action in row)
    return Schedule(name, microbatches, tuple(place[stage] for stage in range(len(place))), table)


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
