"""Hypothesis strategies for schedules: any placement, any order that terminates, fused or split backwards."""

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from autopart.ir.action import Action, Kind, Schedule


@dataclass(frozen=True)
class Case:
    """A schedule with the edges over which its stages exchange values."""

    schedule: Schedule
    edges: frozenset[tuple[int, int]]


@st.composite
def schedules(draw, most_stages=5, most_microbatches=4):
    """Any valid schedule: a random topological order of its actions, dealt to the ranks of their stages."""
    stages = draw(st.integers(1, most_stages))
    ranks = draw(st.integers(1, min(stages, 4)))
    microbatches = draw(st.integers(1, most_microbatches))
    rng = random.Random(draw(st.integers(0, 10**9)))
    place = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(place)
    trains = draw(st.booleans()) or draw(st.booleans())
    wanted = {}
    for stage in range(stages):
        for microbatch in range(microbatches):
            wanted |= _needs(stage, microbatch, stages, split=rng.random() < 0.4) if trains else {}
            wanted[Action(Kind.F, stage, microbatch)] = [(Kind.F, stage - 1, microbatch)] if stage else []
    table = [[] for _ in range(ranks)]
    done = set()
    while wanted:
        ready = [action for action, needs in wanted.items() if done.issuperset(needs)]
        action = rng.choice(sorted(ready, key=str))
        del wanted[action]
        done |= {(action.kind, action.stage, action.microbatch)}
        done |= {("grad", action.stage, action.microbatch)} if action.kind in (Kind.B, Kind.I) else set()
        table[place[action.stage]].append(action)
    return Schedule("random", microbatches, tuple(place), tuple(map(tuple, table)))


@st.composite
def cases(draw):
    """A valid schedule and any set of edges between its stages, long skips among them."""
    schedule = draw(schedules())
    pairs = [(a, b) for a in range(schedule.stages) for b in range(schedule.stages) if a != b]
    return Case(schedule, frozenset(draw(st.sets(st.sampled_from(pairs))) if pairs else ()))


def _needs(stage, microbatch, stages, *, split):
    own = (Kind.F, stage, microbatch)
    needs = [own, *([("grad", stage + 1, microbatch)] if stage + 1 < stages else [])]
    if not split:
        return {Action(Kind.B, stage, microbatch): needs}
    return {Action(Kind.I, stage, microbatch): needs, Action(Kind.W, stage, microbatch): [(Kind.I, stage, microbatch)]}
