"""Rules about buffers that forwards update: each update once a microbatch, then one value for the whole world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopart.codegen.recording_world import Event
from autopart.ir.action import Action, Kind
from autopart.ir.graph import Value
from autopart.ir.staged import Staged, averaged
from autopart.passes.verify_between import BUFFERS
from autopart.passes.verify_texts import Text, fault

Way = tuple[str, str, tuple[int, ...]]
"""A buffer, the call that makes it one, and the stage that it comes from where that is named."""


def buffers(text: Text, staged: Staged, values: Sequence[Sequence[tuple[str, Value]]]) -> int:
    """Check what a rank does to buffers; the number of updates. `values` are, by stage, those that it updates."""
    count = _check_updates(text, [[segment.updates for segment in stage] for stage in staged.stages])
    degree = text.mesh.parts
    wanted: list[Way] = []
    for stage, updated in enumerate(values):
        for target, value in updated:
            if degree > 1 and stage in text.stages:
                wanted.append((target, "average_buffers" if averaged(value) else "maximum_buffers", ()))
            if len(set(text.place)) > 1:
                wanted.append((target, "broadcast_buffers", (stage,)))
    _check_made_one(text, wanted)
    return count


def _check_updates(text: Text, updates: Sequence[Sequence[tuple[str, ...]]]) -> int:
    """Each forward updates each buffer that a layer of its stage does, once; `updates` are, by stage, each layer's."""
    found: dict[Action, Counter[str]] = {}
    last: dict[str, int] = {}
    for event in text.events:
        if event.call == "action" and event.action is not None and event.action.kind is Kind.F:
            found[event.action] = Counter()
        if event.call != "update_buffer":
            continue
        (target,), action = event.buffers, event.within
        if action is None or action.kind is not Kind.F:
            raise fault("buffers", text.at(event), "it is outside of a forward", "update buffers in the forward")
        if action.microbatch < last.get(target, -1):
            problem = f"microbatch {last[target]} updated it before"
            raise fault("buffers", text.at(event), problem, "run the forwards in the order of their microbatches")
        found[action][target] += 1
        last[target] = action.microbatch
    for action, counted in found.items():
        due = [target for layer in updates[action.stage] for target in layer]
        for target in dict.fromkeys([*due, *counted]):
            if counted[target] != (target in due):
                problem = f'the buffer "{target}" is updated {counted[target]} times, not {int(target in due)}'
                raise fault("buffers", text.during(action), problem, "update each buffer with its layer's result, once")
    return sum(counted.total() for counted in found.values())


def _check_made_one(text: Text, wanted: Sequence[Way]) -> None:
    """After the last update each buffer is averaged (or made the largest) over dp once, and then broadcast once."""
    found: Counter[Way] = Counter()
    done: set[str] = set()
    updates = [i for i, event in enumerate(text.events) if event.call == "update_buffer"]
    for i, event in enumerate(text.events):
        if event.call not in BUFFERS:
            continue
        _check_place(text, event, updates[-1] if updates else -1, i, done)
        done.update(event.buffers if event.call == "broadcast_buffers" else ())
        found.update((target, event.call, event.stages) for target in event.buffers)
    for target, call, stages in dict.fromkeys([*wanted, *found]):
        key = target, call, stages
        if found[key] != (key in wanted):
            of = f" from stage {stages[0]}" if stages else ""
            problem = f'the buffer "{target}" goes through {call}{of} {found[key]} times, not {int(key in wanted)}'
            raise fault("buffers", f"rank {text.rank}", problem, "make each buffer that forwards update one, once")


def _check_place(text: Text, event: Event, last: int, place: int, done: set[str]) -> None:
    """`last` is the place of the last update; `done` are the buffers that were broadcast before."""
    if place < last:
        problem = f"a buffer is updated after it ({text.where(text.events[last].line)})"
        raise fault("buffers", text.at(event), problem, "make buffers one after the last forward")
    if event.call != "broadcast_buffers" and (event.axis != "dp" or done.intersection(event.buffers)):
        raise fault(
            "buffers", text.at(event), "the data ranks' own values are wanted", 'name axis="dp", before broadcasts'
        )
