"""A schedule as a plan holds it, one text: a family's name, with its options if any, or a table of actions as CSV."""

from __future__ import annotations

from autopart.ir.action import Action, Schedule
from autopart.schedules.build import build, read_name
from autopart.schedules.text import read
from autopart.schedules.validate import validate

AUTO = "auto"
"""What a caller writes to have the schedule searched for. A plan holds the schedule that was found."""


def spell(schedule: str | Schedule) -> str:
    """The text of a schedule as a caller gives it: a name, with options if any, a Schedule, or a CSV of actions.

    `AUTO` stays as it is. A Schedule that `build` makes from its name becomes that name, any other one its table.
    Raises ValueError for an unknown name or an option that its family does not have, and for a table that `validate`
    refuses; TypeError for what is neither text nor a Schedule.
    """
    if isinstance(schedule, Schedule):
        validate(schedule)
        return schedule.name if _made_by_name(schedule) else str(schedule)
    if not isinstance(schedule, str):
        raise TypeError(
            "schedule: expected a name such as '1f1b', a Schedule (see autopart.schedules.build) or a CSV of actions, "
            f"not {schedule!r}"
        )
    if is_table(schedule):
        table = read(schedule)
        validate(table)
        return str(table)
    if schedule.strip() != AUTO:
        read_name(schedule)
    return schedule.strip()


def make(text: str, *, ranks: int, microbatches: int) -> Schedule:
    """The schedule that a text from `spell` stands for, on `ranks` pipeline ranks with `microbatches` microbatches.

    Raises ValueError, naming the argument, where a table is for other numbers, and what `build` raises.
    """
    if not is_table(text):
        return build(text, ranks=ranks, microbatches=microbatches)
    table = read(text)
    if table.ranks != ranks:
        rows = f"{table.ranks} row{'s' * (table.ranks > 1)}"
        raise ValueError(f"schedule: the table has {rows}, one a pipeline rank, but the mesh has pp={ranks}")
    if table.microbatches != microbatches:
        count = f"{table.microbatches} microbatch{'es' * (table.microbatches > 1)}"
        raise ValueError(f"microbatches: the schedule's table has {count}, not {microbatches}")
    return table


def splits_output(schedule: str | Schedule | None) -> bool:
    """Whether a schedule, as it was given, splits the output layer over the pipeline ranks."""
    if schedule is None or (text := spell(schedule)) == AUTO:
        return False
    try:
        return (read(text) if is_table(text) else build(text, ranks=4, microbatches=8)).barriers > 0
    except ValueError:  # it is for other numbers, or no schedule, which is said where it is made
        return False


def is_table(text: str) -> bool:
    """Whether a schedule's text is a table of actions rather than a name: a cell is an action, or there are several."""
    first, *more = text.strip().splitlines() or [""]
    cells = first.split("(")[0].split(",") if not first.startswith("(") else [first, ""]
    return bool(more) or len(cells) > 1 or _is_action(first)


def _is_action(cell: str) -> bool:
    try:
        Action.parse(cell)
    except ValueError:
        return False
    return True


def _made_by_name(schedule: Schedule) -> bool:
    try:
        return build(schedule.name, ranks=schedule.ranks, microbatches=schedule.microbatches) == schedule
    except (TypeError, ValueError):
        return False
