"""What each action waits for. Derived from the edges between stages, never stored in a schedule."""

from __future__ import annotations

from autopart.ir.action import Action, Kind, Schedule

Edges = frozenset[tuple[int, int]]
"""(source stage, target stage) pairs over which values flow: outputs if source < target, else gradients."""


def chain(stages: int) -> Edges:
    """The edges of a plain pipeline: each stage feeds the next one, and gets its gradient back."""
    forward = {(stage, stage + 1) for stage in range(stages - 1)}
    return frozenset(forward | {(target, source) for source, target in forward})


def dependencies(schedule: Schedule, edges: Edges | None = None) -> dict[Action, tuple[Action, ...]]:
    """The actions that each action waits for, all of the same microbatch; `edges` defaults to the chain of stages.

    F waits for F of the stages that feed it; B or I for its own F and for B or I of the stages that give it gradients;
    W for its own I. Needs a table in which every stage and microbatch has what `validate` asks for.
    """
    flows = chain(schedule.stages) if edges is None else edges
    feeders = [sorted(a for a, b in flows if b == stage and a < stage) for stage in range(schedule.stages)]
    givers = [sorted(a for a, b in flows if b == stage and a > stage) for stage in range(schedule.stages)]
    whole = {(action.stage, action.microbatch) for _, action in schedule.actions() if action.kind is Kind.B}

    def needs(action: Action) -> tuple[Action, ...]:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case Kind.F:
                return tuple(Action(Kind.F, feeder, microbatch) for feeder in feeders[stage])
            case Kind.B | Kind.I:
                gradients = (
                    Action(Kind.B if (giver, microbatch) in whole else Kind.I, giver, microbatch)
                    for giver in givers[stage]
                )
                return (Action(Kind.F, stage, microbatch), *gradients)
            case Kind.W:
                return (Action(Kind.I, stage, microbatch),)
            case _:
                raise ValueError(f"schedule {schedule.name!r}: {action} is not one of F, B, I and W")

    return {action: needs(action) for _, action in schedule.actions()}
