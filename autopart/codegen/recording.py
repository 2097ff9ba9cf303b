"""Recording: run a rank's text on shapes alone, and see everything that it would do.

Bodies are called on shapes (`shapes`); everything else about the text is executed as it stands, on a world that notes
what is asked of it (`recording_world`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from autopart.codegen.parsed import PROLOGUE, Body, Lines, executed
from autopart.codegen.recording_batch import RecordingBatch, RecordingBatches
from autopart.codegen.recording_world import Call, Event, RecordingWorld
from autopart.codegen.shapes import META, Bodies, Shape, Spec, made_by
from autopart.ir.action import Action


@dataclass(frozen=True, slots=True)
class Recording:
    """What a text did: its global names, the world's calls in order, what `step` returned.

    `yielded` is what a step that waits for the gradients of its outputs hands out before it goes on, else None; `early`
    counts the events before that.
    `calls` has every call of a body, in order; a result says which of them it comes from (`Spec.call`). `kept` has the
    line of everything put in a store and not taken out again, and of every list taken out and not emptied; `stored`
    counts what was put in. `unread` has what bodies that exchange values or have loops make and never read: line and
    name, by body; `draws` the statements of bodies that draw random numbers, with their lines.
    """

    names: Mapping[str, Any]
    events: tuple[Event, ...]
    calls: tuple[Call, ...]
    result: Any
    kept: tuple[int, ...]
    stored: int
    yielded: Any = None
    early: int = 0
    unread: Mapping[str, Lines] = field(default_factory=dict)
    draws: Mapping[str, Lines] = field(default_factory=dict)

    @property
    def handed_out(self) -> tuple[Any, ...]:
        """What was yielded and returned; of a loop, what each of its steps returned."""
        return self.result if isinstance(self.result, tuple) else (self.yielded, self.result)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of the row, as a schedule names them."""
        return tuple(event.action for event in self.events if event.action is not None)


def record(source: str, name: str, world: RecordingWorld, batch: RecordingBatch, bodies: Bodies) -> Recording:
    """Everything that a rank's text does, in order. Whatever the text raises comes through."""
    parsed = bodies.parsed(source, name)
    namespace = executed(parsed.code, source, name, META)
    names = dict(namespace)
    if not callable(names.get("step")):
        raise TypeError("the text defines no function step(world, batch)")
    for function, body in parsed.bodies.items():
        namespace[function] = _recorded(namespace[function], body, world, bodies)
    namespace["torch"] = _Torch()
    world.file, world.batch = name, batch
    try:
        if isinstance(batch, RecordingBatches):
            result, yielded, early = _through(names, world, batch), None, 0
        else:
            result, yielded, early = _completed(names["step"](world, batch), world)
    except Exception as error:
        if world.here is not None:
            error.add_note(f"stage {world.here.stage}, microbatch {world.here.microbatch}, action {world.here}")
        raise
    left = [line for store in world.stores for line in (store.lines[k] for k in store)]
    left += [line for line, values in world.lists if values]
    stored = sum(len(store.lines) for store in world.stores)
    unread = {function: _at(body.unread, parsed.first[function]) for function, body in parsed.bodies.items()}
    draws = {function: _at(body.draws, parsed.first[function]) for function, body in parsed.bodies.items()}
    events, calls = tuple(world.events), tuple(world.calls)
    return Recording(names, events, calls, result, tuple(left), stored, yielded, early, unread, draws)


def _at(found: Lines, first: int) -> Lines:
    """What lines of a body have, by line of the source, where the body begins with line `first`."""
    return tuple((line + first, name) for line, name in found)


def _through(names: Mapping[str, Any], world: RecordingWorld, batches: RecordingBatches) -> tuple[Any, ...]:
    """What the functions of a loop's text return for all batches, and at the end, but for nothing."""
    if not callable(names.get("drain")):
        raise TypeError("the text defines no function drain(world, batches)")
    made = [names["step"](world, batches) for _ in batches.coming()]
    made.append(names["drain"](world, batches))
    return tuple(found for found in made if found)


def _completed(running: Any, world: RecordingWorld) -> tuple[Any, Any, int]:
    """What a step returns, what it yields (None if it does not wait for gradients), and the events before that."""
    if not world.tangents:
        return running, None, 0
    if not inspect.isgenerator(running):
        raise TypeError("a step without a loss must yield its outputs, and go on with their gradients")
    yielded = next(running)
    early = len(world.events)
    try:
        cast(Generator[Any, Any, Any], running).send(world.tangents)
    except StopIteration as end:
        return end.value, yielded, early
    raise TypeError("a step yields once")


def _recorded(function: Callable[..., Any], body: Body, world: RecordingWorld, bodies: Bodies) -> Callable[..., Any]:
    """A body as a function of specs, whose results belong to the microbatch of what it is given."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        args = inspect.signature(function).bind(*args, **kwargs).args if kwargs else args
        if body.communicates:
            if args[:1] != (world,):
                raise TypeError(f"{function.__name__} exchanges values: its first argument is the world")
            args = args[1:]
        owner = world.owner(args)
        given = tuple([arg for arg in args if isinstance(arg, Spec)])
        own = any([arg.own for arg in given])
        if own and function.__name__ != PROLOGUE:
            raise TypeError(
                f"{function.__name__} is given what was computed from this data rank's samples alone; make it whole "
                'first, with world.summed(..., axis="dp")'
            )
        found, exchanged = bodies.call(function, body, args, world.places)
        made = made_by(found, owner, len(world.calls), own=own)
        world.calls.append(Call(function.__name__, world.here, given, world.line(), exchanged))
        world.exchanged(exchanged, function.__code__.co_firstlineno)
        return made

    return recorded


class _Torch:
    """The few names of torch that stage functions and steps use, on shapes; bodies keep the real torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def ones(shape: Shape, *, dtype: torch.dtype, device: Any) -> Spec:
        return Spec(tuple(shape), dtype, source=("tangent", "loss"))
