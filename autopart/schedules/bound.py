"""A time below which no schedule can come.

For a rank, with head the time at which its first forward can start:

* before its first backward a rank waits until a microbatch has been through the stages after it and back, and has no
  more work than the forwards that its memory can hold: the rest of that time it is idle;
* so it ends no earlier than head + idle + all its work (`_own`), and the rank of an earlier stage no earlier than
  head + idle + its forwards and backwards for inputs + those on the way + that stage's last W (`_upstream`);
* when its last forward starts, memory has room for it: all but `limit` microbatches are done with. Then that one has to
  go through the later stages and back, and on to the first stage (`_drained`);
* each microbatch is held for its way through the later stages and back: with room for few of them, that paces the rank
  (`_paced`).
"""

from __future__ import annotations

from autopart.ir.action import Kind
from autopart.schedules.problem import Problem


def lower_bound(problem: Problem) -> float:
    """A number that the length of no schedule of the problem is below (`Problem.length`)."""
    return max(
        max(_own(problem, rank), _paced(problem, rank), *_upstream(problem, rank), *_drained(problem, rank))
        for rank in range(problem.ranks)
    )


def offset(problem: Problem, rank: int) -> float:
    """When the time of a rank begins: at its first start where ranks step alone, else at 0."""
    return problem.head(problem.held[rank][0]) if problem.per_rank else 0.0


def cheapest(problem: Problem) -> tuple[list[float], list[float]]:
    """The least time of the part of a backward that others wait for, and of its rest, at each stage."""
    costs = problem.costs
    inputs = [min(i, b) for i, b in zip(costs[Kind.I], costs[Kind.B], strict=True)]
    rest = [min(w, max(0.0, b - i)) for w, b, i in zip(costs[Kind.W], costs[Kind.B], inputs, strict=True)]
    return inputs, rest


def _round_trip(problem: Problem, stage: int) -> float:
    """From the end of a forward at a stage to when its gradient can be there."""
    inputs, _ = cheapest(problem)
    later = range(stage + 1, len(problem.place))
    there_and_back = sum(problem.costs[Kind.F][s] + inputs[s] for s in later)
    return there_and_back + 2 * sum(problem.hop(s - 1) for s in later)


def _idle(problem: Problem, rank: int) -> float:
    """The time that a rank must wait before its first backward, which is one of its last stage."""
    stages, forward = problem.held[rank], problem.costs[Kind.F]
    last = stages[-1]
    wait = problem.head(last) + forward[last] + _round_trip(problem, last) - problem.head(stages[0])
    dearest = sorted((forward[stage] for stage in stages), reverse=True)
    room, work = problem.limit, 0.0
    for cost in dearest:
        count = min(room, problem.microbatches)
        room, work = room - count, work + count * cost
    return max(0.0, wait - work)


def _own(problem: Problem, rank: int) -> float:
    inputs, rest = cheapest(problem)
    stages = problem.held[rank]
    work = problem.microbatches * sum(problem.costs[Kind.F][s] + inputs[s] + rest[s] for s in stages)
    return problem.head(stages[0]) + _idle(problem, rank) + work - offset(problem, rank)


def _upstream(problem: Problem, rank: int) -> list[float]:
    inputs, _ = cheapest(problem)
    stages = problem.held[rank]
    chained = problem.microbatches * sum(problem.costs[Kind.F][s] + inputs[s] for s in stages)
    return _way_back(problem, stages[0], problem.head(stages[0]) + _idle(problem, rank) + chained)


def _drained(problem: Problem, rank: int) -> list[float]:
    inputs, rest = cheapest(problem)
    stages, forward = problem.held[rank], problem.costs[Kind.F]
    first = stages[0]
    done = max(0, problem.microbatches - problem.limit)
    end = problem.head(first) + problem.microbatches * forward[first]
    if done:  # then the first backward, and the wait for it, is before the last forward
        each = sum(forward[s] + inputs[s] for s in stages) - forward[first] + rest[first]
        end += _idle(problem, rank) + done * each
    return _way_back(problem, first, end + _round_trip(problem, first) + inputs[first])


def _way_back(problem: Problem, stage: int, end: float) -> list[float]:
    """When the ranks of a stage and those before it can end, if the last I of the stage ends at `end`."""
    inputs, rest = cheapest(problem)
    bounds = [end + rest[stage] - offset(problem, problem.place[stage])]
    for before in reversed(range(stage)):
        end += problem.hop(before) + inputs[before]
        bounds.append(end + rest[before] - offset(problem, problem.place[before]))
    return bounds


def _paced(problem: Problem, rank: int) -> float:
    inputs, rest = cheapest(problem)
    stages = problem.held[rank]
    kept = sum(problem.costs[Kind.F][s] + _round_trip(problem, s) + inputs[s] + rest[s] for s in stages)
    return problem.head(stages[0]) + problem.microbatches * kept / problem.limit - offset(problem, rank)
