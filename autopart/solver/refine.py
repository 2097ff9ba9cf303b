"""Finer cuts: where whole segments make uneven stages, the modules inside a segment at which a stage had better begin.

    given  a plan of whole segments whose slowest stage is more than `GAIN` above their mean
    widen  cut the segments on both sides of every stage boundary into their parts, and split again, with the same mesh,
           placement and microbatches; again beside the new boundaries, until nothing is left to cut there
    narrow take back the cuts at which no stage begins, and split again, until every cut has its stage
    keep   the result if its predicted step is shorter than the given one's by more than `GAIN`

Only segments beside a boundary are cut: the others go on sharing one body, and the search stays small.
"""

from __future__ import annotations

from collections.abc import Callable

from autopart.errors import PlanInfeasible
from autopart.ir.plan import Plan
from autopart.ir.plan_text import format_seconds

GAIN = 0.02
"""What cuts inside segments must take off the predicted step: each adds bodies to the text, and predictions err."""

ROUNDS = 3
"""How often the search widens, and how often it narrows, at most."""

Cuts = tuple[str, ...]
"""Module names at which a segment must begin."""


def refine(whole: Plan, *, parts: Callable[[Cuts, Plan], Cuts], choose: Callable[[Cuts], Plan]) -> Cuts | None:
    """Cuts with which the plan is better than `whole`, a stage beginning at each; None if there are none.

    ``parts(cuts, plan)`` are the places where the segments beside the plan's stage boundaries can be cut further, the
    model being segmented with `cuts`; ``choose(cuts)`` is the plan for that model.
    """
    if even(whole):
        return None
    try:
        cuts, plan = _widened(whole, parts, choose)
        for _ in range(ROUNDS):
            if set(cuts) <= set(plan.cuts):
                break
            cuts, plan = plan.cuts, choose(plan.cuts)
        else:
            return None
    except PlanInfeasible:  # segments in parts may keep a value twice, which tight memory does not allow
        return None
    return cuts if cuts and gain(whole, plan) > GAIN else None


def _widened(whole: Plan, parts: Callable[[Cuts, Plan], Cuts], choose: Callable[[Cuts], Plan]) -> tuple[Cuts, Plan]:
    cuts: Cuts = ()
    plan = whole
    for _ in range(ROUNDS):
        more = tuple(part for part in parts(cuts, plan) if part not in cuts)
        if not more:
            break
        cuts = (*cuts, *more)
        plan = choose(cuts)
    return cuts, plan


def even(plan: Plan) -> bool:
    """Whether no other split could shorten the step by more than `GAIN`."""
    seconds = plan.prediction.stage_seconds
    return max(seconds) <= (1 + GAIN) * sum(seconds) / len(seconds)


def gain(whole: Plan, plan: Plan) -> float:
    """The part of the predicted step that the second plan takes off."""
    return 1 - plan.prediction.step_seconds / whole.prediction.step_seconds if whole.prediction.step_seconds else 0.0


def reason(whole: Plan, plan: Plan) -> str:
    """Where the second plan cuts inside a segment of the first, and why, to read."""
    known = {*whole.segments}
    inside = [f"{s.segments[0]} begins stage {k}" for k, s in enumerate(plan.stages) if s.segments[0] not in known]
    before, after = (max(p.prediction.stage_seconds) for p in (whole, plan))
    return (
        f"cut inside a segment, {', '.join(inside)}: the slowest stage takes {format_seconds(after)} a microbatch,"
        f" of whole segments {format_seconds(before)}; this makes the predicted step {gain(whole, plan):.1%} shorter"
    )
