"""What a plan says of one module, for people: its stage, how its tensors are placed, and what other placements take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from autopart.ir.placed import collective_of
from autopart.ir.plan_text import format_seconds
from autopart.ir.tensor_plan import Costs, FunctionChoice, TensorPlan

if TYPE_CHECKING:
    from autopart.ir.plan import Plan


def explain_module(plan: Plan, module: str) -> str:
    """A paragraph for each segment that the module is, has or is part of.

    Raises ValueError, naming the next, where there is none.
    """
    names = [name for stage in plan.stages for name in stage.segments]
    numbers = [i for i, name in enumerate(names) if _related(module, name.split("@")[0])]
    if not numbers:
        near = get_close_matches(module, names, n=3) or names[:8]
        raise ValueError(f"explain: no segment is {module!r} or has it; the segments are such as {', '.join(near)}")
    return "\n".join(line for number in numbers for line in _segment(plan, names, number, module))


def _related(module: str, segment: str) -> bool:
    return _within(module, segment) or _within(segment, module)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _segment(plan: Plan, names: list[str], number: int, module: str) -> Iterator[str]:
    name, tensor = names[number], plan.tensor
    own = name.split("@")[0]
    stage = next(i for i, each in enumerate(plan.stages) if name in each.segments)
    part = module.startswith(f"{own}.")
    ranks = ", ".join(map(str, plan.stages[stage].ranks))
    yield f"{name}{f', which has {module}' if part else ''}: in stage {stage}, on the ranks {ranks}"
    if tensor is None:
        yield "- whole on each of them: the mesh has no axis that splits the tensors inside segments"
        return
    choice = tensor.choices[tensor.segments[number]]
    yield from _parameters(tensor, module if part else own)
    yield f"- forward: {_passing(choice.forward)}"
    if choice.backward is not None:
        yield f"- backward: {_passing(choice.backward)}"
    yield from _costs(tensor.costs[tensor.segments[number]])


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
    kinds = Counter(collective_of(move.source, move.target) for move in part.moves)
    sent = [f"{count} {kind}" for kind, count in kinds.items() if kind not in (None, "slice", "first")]
    together = sum(strategy.spread for strategy in part.strategies)
    sent += [f"what {together} operator{'s' * (together > 1)} need to run together"] if together else []
    return f"from {taken or 'nothing'} to {given or 'nothing'}, {', '.join(sent) or 'nothing'} exchanged"


def _costs(costs: Costs) -> Iterator[str]:
    yield f"- takes {format_seconds(costs.chosen)} a microbatch, with what is exchanged there"
    for what, seconds in costs.others:
        more = f"{seconds / costs.chosen - 1:+.1%}" if costs.chosen else "longer"
        yield f"- {what} it would take {format_seconds(seconds)} ({more})"
