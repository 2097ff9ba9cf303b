"""A Pareto front of plans: step time against the memory of the fullest device; for forwards alone see `serving`.

Each plan is the fastest within some limit, and of equally fast ones the one that needs least, so none dominates
another. The limits lie evenly between what the fastest plan of all needs and the least that any plan needs; where that
makes fewer plans than wanted, those between them follow: where the front has no more, all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopart.errors import PlanInfeasible
from autopart.ir.plan import Plan
from autopart.solver.resolve import whole

OBJECTIVES = ("time", "memory")
"""What is weighed of a training step, or of forwards alone."""

FORWARDS = ("latency", "throughput")
"""What is weighed of forwards alone."""


def check(n: int, objectives: Sequence[str]) -> None:
    """TypeError or ValueError, naming the argument, for what is no front."""
    whole("n", n)
    if sorted(objectives) not in (sorted(OBJECTIVES), sorted(FORWARDS)):
        raise ValueError(f"objectives: {objectives!r} cannot be weighed; either {OBJECTIVES!r}, or {FORWARDS!r}")


def front(plan: Callable[[str, int | None], Plan], n: int) -> tuple[Plan, ...]:
    """Up to `n` plans, the fastest first, the leanest last (for `n` of at least 2).

    ``plan(objective, limit)`` is the best plan within a limit of bytes per device, None for the request's; it raises
    PlanInfeasible where there is none.
    """
    first = _leaner(plan, plan("time", None))
    if n == 1:
        return (first,)
    most, least = first.prediction.peak, plan("memory", None).prediction.peak
    found = [first]
    for step in range(1, n):
        limit = most - step * (most - least) // (n - 1)
        if limit < found[-1].prediction.peak:
            found.append(_leaner(plan, plan("time", limit)))
    return tuple(_filled(plan, found, n))


def _filled(plan: Callable[[str, int | None], Plan], found: list[Plan], n: int) -> list[Plan]:
    """Plans between neighbours, the fastest with less than the faster one needs, until there are `n` or no more."""
    at = 0
    while len(found) < n and at < len(found) - 1:
        between = _leaner(plan, plan("time", found[at].prediction.peak - 1))
        if between.prediction.peak > found[at + 1].prediction.peak:
            found = [*found[: at + 1], between, *found[at + 1 :]]
        at += 1
    return found


def _leaner(plan: Callable[[str, int | None], Plan], fast: Plan) -> Plan:
    """Of the plans that are as fast, the one that needs least."""
    while True:
        try:
            other = plan("time", fast.prediction.peak - 1)
        except (PlanInfeasible, ValueError):  # there is no plan with so little, or it is no memory at all
            return fast
        if other.prediction.step_seconds > fast.prediction.step_seconds * (1 + 1e-12):
            return fast
        fast = other


def undominated(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """The plans of which no other is as good in both and better in one, the fastest first, each once."""
    kept: list[Plan] = []
    for each in sorted(plans, key=lambda each: (each.prediction.step_seconds, each.prediction.peak)):
        if not kept or each.prediction.peak < kept[-1].prediction.peak:
            kept.append(each)
    return tuple(kept)
