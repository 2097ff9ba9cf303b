"""Hypothesis strategies for schedules: any placement, any order that ends, slices, pipes, pairs, split backwards."""

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
    slices = draw(st.sampled_from([1, 1, 2, 3]))
    pipes = min(draw(st.sampled_from([1, 1, 2])), microbatches)
    rng = random.Random(draw(st.integers(0, 10**9)))
    places = [_place(stages, ranks, rng) for _ in range(pipes)]
    travels = [*range(pipes), *(rng.randrange(pipes) for _ in range(microbatches - pipes))]
    trains = draw(st.booleans()) or draw(st.booleans())
    wanted = {}
    for microbatch, pipe in enumerate(travels):
        for stage in range(stages):
            split = rng.random() < 0.4
            for piece in range(slices):
                unit = (stage, microbatch, piece, pipe)
                wanted |= _needs(unit, stages, slices, split=split) if trains else {}
                before = [("F", stage - 1, *unit[1:])] if stage else []
                wanted[Action(Kind.F, *unit)] = before + ([("F", stage, microbatch, piece - 1, pipe)] if piece else [])
    order = []
    done = set()
    while wanted:
        ready = [action for action, needs in wanted.items() if done.issuperset(needs)]
        action = rng.choice(sorted(ready, key=str))
        del wanted[action]
        done.add((action.kind, action.stage, action.microbatch, action.slice, action.pipe))
        if action.kind in (Kind.B, Kind.I):
            done.add(("grad", action.stage, action.microbatch, action.slice, action.pipe))
        order.append(action)
    if draw(st.booleans()):
        order = _paired(order, places)
    table = tuple(tuple(a for a in order if places[a.pipe][a.stage] == rank) for rank in range(ranks))
    return Schedule("random", microbatches, places[0], table, slices, tuple(places[1:]))


@st.composite
def cases(draw):
    """A valid schedule and any set of edges between its stages, long skips among them."""
    schedule = draw(schedules())
    pairs = [(a, b) for a in range(schedule.stages) for b in range(schedule.stages) if a != b]
    return Case(schedule, frozenset(draw(st.sets(st.sampled_from(pairs))) if pairs else ()))


def _place(stages, ranks, rng):
    place = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(place)
    return tuple(place)


def _paired(order, places):
    """The order with each B that comes right after an F of its rank, and of another unit, made one with it."""
    made = []
    for action in order:
        last = made[-1] if made else None
        if (
            last is not None
            and (last.kind, action.kind) == (Kind.F, Kind.B)
            and places[last.pipe][last.stage] == places[action.pipe][action.stage]
            and (last.microbatch, last.slice) != (action.microbatch, action.slice)
        ):
            made[-1] = Action.pair(last, action)
        else:
            made.append(action)
    return made


def _needs(unit, stages, slices, *, split):
    stage, microbatch, piece, pipe = unit
    needs = [("F", *unit)]
    needs += [("grad", stage + 1, microbatch, piece, pipe)] if stage + 1 < stages else []
    needs += [("grad", stage, microbatch, piece + 1, pipe)] if piece + 1 < slices else []
    if not split:
        return {Action(Kind.B, *unit): needs}
    return {Action(Kind.I, *unit): needs, Action(Kind.W, *unit): [("I", *unit)]}
