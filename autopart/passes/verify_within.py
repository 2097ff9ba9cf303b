"""Rules within a rank: the work is done, parameters are read as placed, gradients are added and reduced once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopart.codegen.recording_world import Event
from autopart.errors import VerificationError
from autopart.ir.action import COMPLETES, SHARED, Action, Kind
from autopart.ir.staged import Staged
from autopart.ir.state import State, Unit
from autopart.passes.verify_texts import Text, fault

GATHERED = ("all_gather", "gathered")
READS = ("parameters", *GATHERED)

Reduction: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Of a unit's gradients: the call, the axis, and the stages that take part where they are named."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the graph needs of one microbatch on one stage.

    `reads`: the units that are read, by the kinds of actions that the stage performs. `contributions`: by unit, how
    many segments make gradients for it, in a B or W. `graded`: by unit, the places of the parameters that get one.
    """

    reads: Mapping[Kind, frozenset[str]]
    contributions: Mapping[str, int]
    graded: Mapping[str, frozenset[int]]


def needs(staged: Staged, stage: int) -> Needs:
    """What the segments of a stage read and contribute to."""
    homes = {p.target: (unit.name, i) for unit in staged.state.units for i, p in enumerate(unit.parameters)}
    contributions: Counter[str] = Counter()
    graded: dict[str, frozenset[int]] = {}
    reads = {
        kind: frozenset(homes[target][0] for _, phase in staged.phases(stage, kind) for target in phase.parameters)
        for kind in staged.kinds(stage)
    }
    for _, phase in staged.phases(stage, staged.kinds(stage)[-1]):
        contributions.update({homes[target][0] for target in phase.gradients})
        for unit, position in (homes[target] for target in phase.gradients):
            graded[unit] = graded.get(unit, frozenset()) | {position}
    return Needs(reads, contributions, graded)


def copies_travelled(texts: Sequence[Text], staged: Staged, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The microbatches that each stage has to do with: all, or those that travel its copy of the model or the front.

    Raises VerificationError where one has actions in several copies.
    """
    found: dict[int, Action] = {}
    fronts: dict[int, Action] = {}
    for text in texts:
        for action in text.performed:
            if staged.is_front(action.stage):
                other = fronts.setdefault(action.microbatch, action)
                if staged.helper(action.stage) != staged.helper(other.stage):
                    problem = f"{other} is of another copy of the frozen layers"
                    raise fault("work", text.during(action), problem, "compute them once, on one rank")
                continue
            other = found.setdefault(action.microbatch, action)
            if staged.copy_of(action.stage) != staged.copy_of(other.stage):
                problem = f"{other} is in another copy of the model"
                raise fault("work", text.during(action), problem, "a microbatch travels one copy, from end to end")
    copies = [staged.copy_of(found[k].stage) if k in found else 0 for k in range(microbatches)]
    helpers = [staged.helper(fronts[k].stage) if k in fronts else -1 for k in range(microbatches)]

    def passes(k: int, stage: int) -> bool:
        if staged.is_front(stage):
            return helpers[k] == staged.helper(stage)
        return copies[k] == staged.copy_of(stage)

    return tuple(tuple(k for k in range(microbatches) if passes(k, stage)) for stage in range(len(staged.stages)))


def work(text: Text, needed: Sequence[Needs], state: State, travelled: Sequence[Sequence[int]], training: bool) -> int:
    """Check the rank's actions and what they read; the number of actions. `travelled`: `copies_travelled`."""
    done = Counter(text.performed)
    due = dict.fromkeys(
        Action(kind, stage, k)
        for stage in text.stages
        for k in travelled[stage]
        for kind in _due(done, needed[stage], stage, k, training)
    )
    for action in dict.fromkeys([*due, *done]):
        count, wanted = done[action], int(action in due)
        if count != wanted:
            each = "one forward and one backward" if training else "one forward"
            halves = ", whole (B) or in two (I, then W)" if Kind.I in needed[action.stage].reads else ""
            remedy = f"each microbatch needs {each} on each stage that the rank holds{halves}"
            remedy = "each microbatch needs one S and one T on every rank" if action.kind in SHARED else remedy
            raise fault("work", text.during(action), f"performed {count} times, not {wanted}", remedy)
    _check_halves(text)
    _check_reads(text, needed, state)
    return len(due)


def _due(done: Mapping[Action, int], need: Needs, stage: int, k: int, training: bool) -> tuple[Kind, ...]:
    """The kinds of actions that a stage owes a microbatch: where it may do either, B if it does that."""
    if Kind.S in need.reads:
        return Kind.S, Kind.T
    if not training or need.reads.keys() == {Kind.F}:
        return (Kind.F,)
    if Kind.I not in need.reads or (Kind.B in need.reads and done.get(Action(Kind.B, stage, k))):
        return Kind.F, Kind.B
    return Kind.F, Kind.I, Kind.W


def _check_halves(text: Text) -> None:
    """The backward for the weights comes after that for the inputs."""
    done: set[Action] = set()
    for action in text.performed:
        done.add(action)
        first = replace(action, kind=Kind.I)
        if action.kind is Kind.W and first not in done:
            raise fault("work", text.during(action), f"it comes before {first}", "let I come first: W goes on from it")


def _check_reads(text: Text, needed: Sequence[Needs], state: State) -> None:
    degree = text.degree
    seen: dict[Action, set[str]] = {}
    for event in text.events:
        if event.call == "action" and event.action is not None:
            seen[event.action] = set()
        if event.call not in READS:
            continue
        unit = state.unit(event.unit)
        holders = set(unit.stages) & ({event.within.stage} if event.within else set(text.stages))
        if not holders:
            raise fault("work", text.at(event), f"it is on stages {unit.stages}", "read the units of this stage")
        if unit.gathered(degree) != (event.call in GATHERED):
            kept, call = ("in parts", "all_gather") if unit.gathered(degree) else ("whole", "parameters")
            raise fault("work", text.at(event), f"each rank keeps it {kept}", f"read it with world.{call}")
        if event.call in GATHERED and event.axis != "dp":
            raise fault("work", text.at(event), "its parts are on dp", 'name axis="dp"')
        if event.within is not None:
            seen[event.within].add(unit.name)
    for action, names in seen.items():
        wanted = needed[action.stage].reads.get(action.kind, frozenset())
        if missing := sorted(wanted - names):
            problem = f'the parameters of "{missing[0]}" are not read'
            raise fault("work", text.during(action), problem, "call the layer, with the parameters from the world")


def gradients(text: Text, needed: Sequence[Needs], state: State) -> tuple[int, int]:
    """Check contributions, reductions and gathers of the step; the number of contributions and of reductions."""
    contributions = check_contributions(text, needed, state)
    trained = {name for stage in needed for name in stage.contributions}
    of_unit: dict[str, list[int]] = defaultdict(list)
    for i, event in enumerate(text.events):
        of_unit[event.unit].append(i)
    here = {name for stage in text.stages for name in needed[stage].contributions}
    held = state.on(text.mesh.coordinate(text.rank).get("pp", 0))
    reductions = sum(
        _check_reduced(text, unit, of_unit[unit.name], trained=unit.name in trained, here=unit.name in here)
        for unit in held
    )
    _check_foreign(text, state, held)
    waits = [i for i, event in enumerate(text.events) if event.call == "wait"]
    for unit in held:
        _check_waited(text, of_unit[unit.name], waits)
        _check_regathered(text, unit, of_unit[unit.name])
    return contributions, reductions


def contributes(event: Event) -> bool:
    """Whether a call adds gradients of one microbatch."""
    return event.call == "accumulate" or (event.call == "reduce_scatter" and bool(event.what))


def reduces(event: Event) -> bool:
    """Whether a call reduces what the step accumulated."""
    return event.call == "all_reduce" or (event.call == "reduce_scatter" and not event.what)


def check_contributions(text: Text, needed: Sequence[Needs], state: State) -> int:
    """Check that each backward adds every gradient that it makes, once; the number of contributions."""
    degree = text.degree
    found: dict[Action, Counter[str]] = {}
    places: dict[tuple[Action, str], set[int]] = {}
    for event in text.events:
        if event.call == "action" and event.action is not None and event.action.kind in COMPLETES:
            found[event.action] = Counter()
        if not contributes(event):
            continue
        unit, action = state.unit(event.unit), event.within
        if action is None or action.kind not in COMPLETES:
            problem = "it is outside of a backward (W, where it is in two)"
            raise fault("gradients", text.at(event), problem, "add gradients where they are made")
        at_once = unit.reduced_at_once(degree)
        if at_once != (event.call == "reduce_scatter") or (at_once and event.axis != "dp"):
            call = 'reduce_scatter(..., axis="dp")' if at_once else "accumulate(...)"
            kept = "in parts" if at_once else "whole until the end of the step"
            raise fault("gradients", text.at(event), f"its gradients are kept {kept}", f"pass them to world.{call}")
        found[action][unit.name] += 1
        places.setdefault((action, unit.name), set()).update(i for i, g in enumerate(event.what) if g is not None)
    for action, counted in found.items():
        _check_backward(text, action, counted, needed[action.stage], places)
    return sum(counted.total() for counted in found.values())


def _check_backward(
    text: Text, action: Action, found: Counter[str], need: Needs, places: Mapping[tuple[Action, str], set[int]]
) -> None:
    for name in dict.fromkeys([*need.contributions, *found]):
        wanted = need.contributions.get(name, 0)
        if found[name] != wanted:
            problem = f'gradients of "{name}" are added {found[name]} times, but {wanted} layers make some'
            raise fault("gradients", text.during(action), problem, "add what each layer's backward returns, once")
        if wanted and places[action, name] != need.graded[name]:
            problem = f'"{name}" gets gradients for its parameters {sorted(places[action, name])}'
            remedy = f"the graph makes them for {sorted(need.graded[name])}, counted from 0"
            raise fault("gradients", text.during(action), problem, remedy)


def _check_reduced(text: Text, unit: Unit, events: Sequence[int], *, trained: bool, here: bool) -> int:
    """Each reduction of a unit that the plan needs is there once, after the last contribution; their number.

    `events` are the places of the unit's events in the text's; `here` is whether this rank contributes.
    """
    degree = text.degree
    added = [i for i in events if contributes(text.events[i])]
    calls = [(i, text.events[i]) for i in events if reduces(text.events[i])]
    for i, event in calls:
        if not trained:
            raise fault("gradients", text.at(event), "it has no gradients", "do not reduce it")
        if added and i < added[-1]:
            problem = f"gradients are added after it ({text.where(text.events[added[-1]].line)})"
            raise fault("gradients", text.at(event), problem, "reduce after the last backward")
    over_dp = "reduce_scatter" if unit.updated_in_parts(degree) else "all_reduce"
    wanted: list[Reduction] = [(over_dp, "dp", ())] if here and degree > 1 and not unit.reduced_at_once(degree) else []
    wanted += [("all_reduce", "pp", unit.stages)] if trained and len({text.place[s] for s in unit.stages}) > 1 else []
    counted = Counter((event.call, event.axis, event.stages) for _, event in calls)
    for key in dict.fromkeys([*wanted, *counted]):
        if counted[key] != (key in wanted):
            raise _wrongly_reduced(text, unit, key, counted[key], wanted)
    return len(calls)


def _check_waited(text: Text, events: Sequence[int], waits: Sequence[int]) -> None:
    """Every reduction that is begun is waited for, before the unit's next one and before the end."""
    for i in events:
        if not reduces(text.events[i]) and text.events[i].call != "reduce_scatter":
            continue
        until = next((j for j in events if j > i and reduces(text.events[j])), len(text.events))
        if not any(i < place < until for place in waits):
            before = f"before {text.where(text.events[until].line)}" if until < len(text.events) else "before the end"
            raise fault("gradients", text.at(text.events[i]), f"it is not waited for {before}", "call world.wait()")


def _wrongly_reduced(
    text: Text, unit: Unit, key: Reduction, count: int, wanted: Sequence[Reduction]
) -> VerificationError:
    lines = [text.where(event.line) for event in text.events if event.unit == unit.name and reduces(event)]
    at = f" ({', '.join(dict.fromkeys(lines))})" if lines else ""
    problem = f'the gradients of "{unit.name}" go through {_told(key)} {count} times{at}, not {int(key in wanted)}'
    remedy = f"they need {' and '.join(map(_told, wanted))}, once" if wanted else "they need no reduction at the end"
    return fault("gradients", _rank(text), problem, remedy)


def _told(reduction: Reduction) -> str:
    call, axis, stages = reduction
    return f"{call} over {axis}" + (f" among stages {stages}" if stages else "")


def _rank(text: Text) -> str:
    return f"rank {text.rank}, stage {', '.join(map(str, text.stages))}"


def _check_foreign(text: Text, state: State, held: Sequence[Unit]) -> None:
    """Nothing is done to a unit that the rank does not hold."""
    names = {unit.name for unit in held}
    for event in text.events:
        if event.unit and event.unit not in names:
            where = f"it is on stages {state.unit(event.unit).stages}"
            raise fault("gradients", text.at(event), where, f"this rank has stages {text.stages} only")


def _check_regathered(text: Text, unit: Unit, events: Sequence[int]) -> None:
    """Parameters that an optimizer updated in parts are made whole once, before they are first read."""
    degree = text.degree
    calls = [i for i in events if text.events[i].call == "regather"]
    wanted = int(unit.updated_in_parts(degree))
    if len(calls) != wanted:
        problem = f'the parameters of "{unit.name}" are made whole {len(calls)} times, not {wanted}'
        remedy = "regather, once, at the start of the step, the units that the optimizer updates in parts"
        raise fault("work", _rank(text), problem, remedy)
    if calls and text.events[calls[0]].axis != "dp":
        raise fault("work", text.at(text.events[calls[0]]), "its parts are on dp", 'name axis="dp"')
    first = next((i for i in events if text.events[i].call in READS), len(text.events))
    if calls and first < calls[0]:
        problem = f"it was read before ({text.where(text.events[first].line)})"
        raise fault("work", text.at(text.events[calls[0]]), problem, "regather at the start of the step")
