"""What is decided inside one segment, for people: how its tensors are placed, and what other placements take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopart.ir.placed import Move, Strategy, collective_of
from autopart.ir.plan_text import format_seconds
from autopart.ir.tensor_plan import Costs, FunctionChoice, TensorPlan


def placed(axes: Sequence[TensorPlan], number: int, name: str, asked: str) -> Iterator[str]:
    """A line for each thing that is said of segment `number`, called `name`, of which the module `asked` may be a part.

    The parameters are the module's, all else is the segment's. What it takes is said of each axis as it was placed: on
    what those before it leave, and before those after it.
    """
    own = name.split("@")[0]
    for i, tensor in enumerate(axes):
        choice = tensor.choices[tensor.segments[number]]
        where = f" on {tensor.axis}" if len(axes) > 1 else ""
        yield from _parameters(tensor, asked if _within(asked, own) else own)
        yield f"- forward{where}: {_passing(choice.forward)}"
        if choice.backward is not None:
            yield f"- backward{where}: {_passing(choice.backward)}"
        later = " and ".join(each.axis for each in axes[i + 1 :])
        yield from _costs(tensor.costs[tensor.segments[number]], f", before it is split on {later}" if later else "")


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _parameters(tensor: TensorPlan, module: str) -> Iterator[str]:
    how: dict[str, list[str]] = {}
    for target, placement in tensor.parameters:
        if _within(target, module):
            how.setdefault(str(placement), []).append(target)
    for text, found in how.items():
        yield f"- {tensor.axis} {text}: {', '.join(found)}"


def _passing(part: FunctionChoice) -> str:
    """What comes in, goes out and is exchanged; what operators exchange among themselves is counted with them."""
    taken, given = (", ".join(dict.fromkeys(map(str, places))) for places in (part.inputs[:1], part.outputs[:1]))
    kinds = Counter(_kind(move) for move in part.moves)
    sent = [f"{count} {kind}" for kind, count in kinds.items() if kind not in (None, "slice", "first")]
    rings = [strategy for strategy in part.strategies if strategy.ring]
    sent += [_ring(strategy) for strategy in rings]
    together = sum(strategy.spread for strategy in part.strategies) - len(rings)
    sent += [f"what {together} operator{'s' * (together > 1)} need to run together"] if together else []
    return f"from {taken or 'nothing'} to {given or 'nothing'}, {', '.join(sent) or 'nothing'} exchanged"


def _kind(move: Move) -> str | None:
    kind = collective_of(move.source, move.target)
    return "all_gather" if kind == "ends" else kind


def _ring(strategy: Strategy) -> str:
    dealt = strategy.cut is not None and strategy.cut.outer != 1
    return f"keys and values in a ring{' (tokens dealt out in turn)' if dealt else ''}"


def _costs(costs: Costs, when: str) -> Iterator[str]:
    yield f"- takes {format_seconds(costs.chosen)} a microbatch, with what is exchanged there{when}"
    for what, seconds in costs.others:
        more = f"{seconds / costs.chosen - 1:+.1%}" if costs.chosen else "longer"
        yield f"- {what} it would take {format_seconds(seconds)} ({more})"
