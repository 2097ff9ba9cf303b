"""Rules of loops whose steps overlap: when the optimizer steps, on what, and which version of the weights is used."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.codegen.loop import loss_of
from autopart.codegen.recording_world import Event
from autopart.codegen.shapes import Spec
from autopart.codegen.stages import stage_outputs
from autopart.ir.action import Action, Kind
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.ir.state import State
from autopart.passes.verify_texts import Text, fault
from autopart.passes.verify_within import Needs, check_contributions, contributes, reduces
from autopart.schedules import versions
from autopart.schedules.filling import Filled
from autopart.schedules.stream import Stream, table_of


def used(text: Text, plan: Plan, stream: Stream | Filled) -> int:
    """Check that every action uses the version of the weights that the schedule says; the number of actions."""
    wanted = versions(stream.numbered() if isinstance(stream, Filled) else table_of(plan))
    checked = 0
    for event in text.events:
        if event.call != "version" or event.within is None:
            continue
        due, delay = wanted[event.within], stream.delay[event.within.stage] * (event.within.kind is Kind.F)
        if event.version != due:
            problem = f"it uses version {event.version} of the weights"
            raise fault("versions", text.at(event), problem, f"{stream.name} uses version {due} there")
        _check_delay(text, event, delay)
        checked += 1
    return checked


def updates(text: Text, needed: Sequence[Needs], state: State, stream: Stream | Filled) -> tuple[int, int]:
    """Check gradients and the optimizer's steps; the number of contributions and of steps.

    Each stage steps once after the backwards of each batch, before those of the next one add to gradients, on what is
    reduced over the data ranks, where there are several; one that trains nothing by design (of a front) never does.
    """
    contributions = check_contributions(text, needed, state)
    degree, steps = text.mesh.degree("dp"), 0
    for stage in text.stages:
        units = sorted(needed[stage].contributions)
        events = [e for e in text.events if _concerns(e, stage, units)]
        for number in range(stream.shown if len(needed[stage].reads) > 1 else 0):
            place = next((i for i, event in enumerate(events) if event.call == "update"), len(events))
            _check_step(text, events[:place], events[place : place + 1], stage, number, stream)
            for unit in units if degree > 1 else ():
                _check_reduced(text, events[:place], unit)
            events = events[place + 1 :]
            steps += 1
        if events := [event for event in events if event.call != "wait"]:
            raise fault("updates", text.at(events[0]), "no batch is left", "step once after each batch's last backward")
    return contributions, steps


def losses(text: Text, staged: Staged, stream: Stream | Filled) -> int:
    """Check that each step hands out the loss of its batch, from all of its microbatches; the number of losses."""
    loss = loss_of(staged)
    here = any(loss.name in stage_outputs(staged, stage) for stage in text.stages)
    for number, result in enumerate(text.recording.handed_out):
        batch = tuple(range(number * stream.batch, (number + 1) * stream.batch)) if here else ()
        found = result.get(loss.name) if isinstance(result, dict) else None
        given = tuple(part.microbatch for part in found.parts) if isinstance(found, Spec) else None
        if found != Spec(loss.at(1), loss.dtype) or given != batch:
            problem = f"step returns as {loss.name!r} for batch {number} the sum of the microbatches {given}"
            raise fault("outputs", f"rank {text.rank}", problem, f"pass those of {batch} to world.begin_total")
    return len(text.recording.handed_out)


def _concerns(event: Event, stage: int, units: Sequence[str]) -> bool:
    if event.call == "update":
        return event.action is not None and event.action.stage == stage
    return event.call == "wait" or (event.unit in units and (contributes(event) or reduces(event)))


def _check_step(
    text: Text, before: Sequence[Event], step: Sequence[Event], stage: int, number: int, stream: Stream | Filled
) -> None:
    """The step of a batch is the next one, and what was added up before it are the gradients of that batch."""
    due = Action(Kind.OPT, stage, number)
    if not step or step[0].action != due:
        found = text.at(step[0]) if step else text.during(due)
        remedy = f"call world.update(stage={stage}, step={number}) after the last backward of batch {number}"
        raise fault("updates", found, f"the step {due} does not come next", remedy)
    _check_delay(text, step[0], stream.delay[stage])
    batch = set(range(number * stream.batch, (number + 1) * stream.batch))
    added = {event.within.microbatch for event in before if contributes(event) and event.within is not None}
    if any(map(contributes, before)) and added != batch:
        problem = f"the gradients of the microbatches {sorted(added)} are added up by then"
        raise fault("updates", text.at(step[0]), problem, f"step after those of {sorted(batch)}")


def _check_reduced(text: Text, before: Sequence[Event], unit: str) -> None:
    """The gradients of a unit are summed over dp once between the last contribution of a batch and its step."""
    calls = [i for i, event in enumerate(before) if event.unit == unit and reduces(event)]
    last = max((i for i, event in enumerate(before) if event.unit == unit and contributes(event)), default=-1)
    right = [i for i in calls if before[i].call == "all_reduce" and before[i].axis == "dp" and i > last]
    if len(calls) != 1 or right != calls:
        where = text.at(before[calls[0]]) if calls else f"rank {text.rank}"
        problem = f'the gradients of "{unit}" are reduced {len(calls)} times before a step'
        raise fault("updates", where, problem, f'call world.all_reduce("{unit}", axis="dp") once, before each step')
    if not any(event.call == "wait" for event in before[calls[0] :]):
        raise fault("updates", text.at(before[calls[0]]), "it is not waited for before the step", "call world.wait()")


def _check_delay(text: Text, event: Event, delay: int) -> None:
    if event.delay != delay:
        problem = f"it makes up for a delay of {event.delay} steps"
        raise fault("versions", text.at(event), problem, f"there are {delay}; name delay={delay}")
