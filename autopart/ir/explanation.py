"""Why a plan is as it is, as text for people: its choices beside their runners-up, and single segments."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from autopart.ir.choice import Alternative, SegmentFact
from autopart.ir.module_text import placed
from autopart.ir.plan_text import STATES, format_bytes, format_seconds, inside, schedule, span

if TYPE_CHECKING:
    from autopart.ir.plan import Plan

_SHOWN = 8  # segments that are explained at once


def explain(plan: Plan) -> str:
    """The reasons for the choices, what the runners-up would cost, and which stage binds time and memory."""
    predicted = plan.prediction
    slow = max(range(len(plan.stages)), key=lambda s: predicted.stage_seconds[s])
    full = max(range(len(plan.stages)), key=lambda s: predicted.memory[s].total)
    together = plan.together(full)
    held = ", ".join(span(plan.stages[s].segments) for s in together)
    parts = [(state, getattr(predicted.memory[full], state)) for state in STATES]
    largest = " + ".join(f"{format_bytes(size)} {state}" for state, size in parts if size)
    return "\n".join(
        [
            f"mesh {plan.mesh}, schedule {schedule(plan.schedule)}, microbatches {plan.microbatches}",
            *(f"- {note}" for note in plan.notes),
            *(f"- {line}" for line in inside(plan)),
            *(f"- another {each.choice}: {_against(plan, each)}" for each in plan.alternatives),
            f"- slowest is stage {slow} ({span(plan.stages[slow].segments)}):"
            f" {format_seconds(predicted.stage_seconds[slow])} a microbatch",
            f"- fullest {'is stage' if len(together) == 1 else 'are the ranks of stages'}"
            f" {' and '.join(map(str, together))} ({held}):"
            f" {format_bytes(predicted.memory[full].total)} = {largest or 'nothing'}",
            f"- optimality: {plan.optimality}" + f" (found in {format_seconds(plan.took)})" * (plan.took > 0),
        ]
    )


def _against(plan: Plan, other: Alternative) -> str:
    """What a runner-up would cost, beside the plan."""
    if other.step_seconds is None:
        return f"{other.option} does not fit, as the fullest rank would need at least {format_bytes(other.peak)}"
    mine = plan.prediction.step_seconds
    change = other.step_seconds / mine - 1 if mine else 0.0
    longer = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'}" if round(change, 4) else "as long"
    return (
        f"{other.option} would make the step {format_seconds(other.step_seconds)}, {longer},"
        f" and the fullest rank hold {format_bytes(other.peak)}"
    )


def segment(plan: Plan, name: str) -> str:
    """Of the segments that are called `name`, lie inside that module or around it: stage, time, memory, recomputation.

    Raises ValueError where there is none.
    """
    found = [
        (stage, each)
        for stage, row in enumerate(plan.stages)
        for each in row.segments
        if each == name or each.startswith((f"{name}.", f"{name}@")) or name.startswith(f"{each.split('@')[0]}.")
    ]
    if not found:
        near = get_close_matches(name, plan.segments, n=3) or plan.segments[:_SHOWN]
        raise ValueError(f"explain: no segment is called {name!r}; there are {', '.join(near)}")
    lines = [line for stage, each in found[:_SHOWN] for line in _lines(plan, stage, each, name)]
    return "\n".join([*lines, *([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])])


def _lines(plan: Plan, stage: int, name: str, asked: str) -> Iterator[str]:
    row, ranks = plan.stages[stage], ", ".join(map(str, plan.stages[stage].ranks))
    yield f"{name}: in stage {stage} ({span(row.segments)}), on rank{'s' * (len(row.ranks) > 1)} {ranks}"
    yield f"- placement {plan.placement_of(name)}"
    yield from placed(plan.axes_inside, plan.segments.index(name), name, asked)
    fact = next((fact for fact in plan.facts if name in fact.segments), None)
    again = name in plan.recompute
    if fact is None:
        yield f"- {'recomputed' if again else 'not recomputed'}"
        return
    seconds, whole = fact.forward_seconds + fact.backward_seconds, plan.prediction.stage_seconds[stage]
    share = f", {min(1.0, seconds / whole):.1%} of its stage" if whole else ""
    yield (
        f"- a microbatch takes {format_seconds(fact.forward_seconds)} forward and"
        f" {format_seconds(fact.backward_seconds)} backward{share}"
    )
    yield f"- {format_bytes(fact.parameter_bytes)} of parameters before any sharding"
    yield f"- {_recomputed(plan, fact) if again else _kept(plan, fact)}"


def _recomputed(plan: Plan, fact: SegmentFact) -> str:
    if fact.again_saved_bytes < 0:
        return "recomputed, as the model or a pin says"
    more = fact.again_seconds * plan.microbatches
    return (
        f"recomputed: keeps {format_bytes(fact.again_saved_bytes)} a microbatch instead of"
        f" {format_bytes(fact.saved_bytes)}; without, the stage's step would be {format_seconds(more)} shorter"
    )


def _kept(plan: Plan, fact: SegmentFact) -> str:
    kept = f"keeps {format_bytes(fact.saved_bytes)} a microbatch"
    if fact.again_saved_bytes < 0:
        return f"{kept}; recomputing would keep no less"
    more = fact.again_seconds * plan.microbatches
    return (
        f"{kept}, not recomputed: that would keep {format_bytes(fact.again_saved_bytes)}, make"
        f" {format_bytes(fact.again_transient)} again at a time, and take {format_seconds(more)} a step more"
    )
