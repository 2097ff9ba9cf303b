"""Running a rank's text for one step. It decides nothing: it makes the world and calls ``step``.

A step without a loss is a generator: it stops where it has its outputs, and is resumed with their gradients.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.parsed import load
from autopart.draws import Draws
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.traffic import COLLECTIVES
from autopart.runtime.batch import Batch
from autopart.runtime.custom import hold_operators
from autopart.runtime.report import RankReport
from autopart.runtime.states import States
from autopart.runtime.transport import Transport
from autopart.runtime.world import World

COUNTED = ("send", *COLLECTIVES)
"""The kinds of communication of which every report has an entry."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's text, compiled: its namespace."""

    namespace: dict[str, Any]
    program: Program
    rank: int

    @classmethod
    def of(cls, program: Program, rank: int, device: torch.device) -> Loaded:
        """Compile the text of one rank."""
        source = program.ranks[rank].source
        namespace = load(source, f"<rank {rank}>", device)
        hold_operators(namespace, source)
        return cls(namespace, program, rank)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step of one rank gave: outputs by value name, what was measured, and the world it left.

    The world has the gradients, the updated buffers, and reductions that wait, if the step held them. `rest` is there
    where the step waits: given a transport and the gradients of the outputs, whole and by name, it runs the backwards,
    once, and returns the result of the whole step.
    """

    outputs: Mapping[str, torch.Tensor]
    report: RankReport
    world: World
    rest: Rest | None = None


Rest = Callable[[Transport, Mapping[str, torch.Tensor]], StepResult]


@dataclass(frozen=True, slots=True)
class Given:
    """What a step is given, alike on every rank of this process.

    `inputs` are by path in the call, `buffers` (and constants) by name; `shares` are the samples of each data rank. Its
    random numbers are those of `draws`. With `hold`, gradients stay as a rank made them: their reductions wait in the
    result's world. `ended` is called on a rank once its gradients are there, before it waits for the others.
    """

    inputs: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    shares: tuple[int, ...]
    draws: Draws
    hold: bool = False
    ended: Callable[[World], None] | None = None


def run(loaded: Loaded, transport: Transport, states: States, given: Given) -> StepResult:
    """One step on this rank; without a loss, up to where it has its outputs."""
    world = _world(loaded, transport, states, given)
    sent: Counter[str] = Counter()

    def result(outputs: Any, rest: Rest | None = None) -> StepResult:
        return StepResult(outputs, _report(loaded.program.plan, loaded.rank, sent, world), world, rest)

    outputs = _counted(world, sent, lambda: _first(loaded, world))
    if not inspect.isgenerator(outputs):
        return result(outputs)
    waiting = outputs

    def rest(transport: Transport, tangents: Mapping[str, torch.Tensor]) -> StepResult:
        world.transport = transport
        world.memory.given(tangents.values())
        return result(_counted(world, sent, lambda: _last(waiting, tangents)))

    return result(_counted(world, sent, lambda: next(waiting)), rest)


def release(world: World, transport: Transport) -> Mapping[str, int]:
    """Perform the reductions that a step's world has held, on what its gradients are now; the bytes sent."""
    world.transport = transport
    sent: Counter[str] = Counter()
    _counted(world, sent, world.release)
    return sent


def _world(loaded: Loaded, transport: Transport, states: States, given: Given) -> World:
    program, plan, namespace = loaded.program, loaded.program.plan, loaded.namespace
    batch = Batch(
        given.inputs,
        dict(program.captured.batch_dims),
        given.shares,
        plan.mesh.part(loaded.rank),
        namespace["MICROBATCHES"],
        given.draws,
        local=plan.inputs == "local",
        spans=plan.mesh.spans(loaded.rank, given.shares, namespace["MICROBATCHES"]),
    )
    held, ended = given.hold, given.ended
    return World(transport, plan.mesh, namespace["PLACE"], states, given.buffers, batch, hold=held, ended=ended)


def _first(loaded: Loaded, world: World) -> Any:
    """What the text's step returns: the outputs, or the step itself where it waits for their gradients."""
    outputs = loaded.namespace["step"](world, world.batch)
    if not inspect.isgenerator(outputs):
        world.end()
    return outputs


def _last(waiting: Any, tangents: Mapping[str, torch.Tensor]) -> Any:
    try:
        waiting.send(tangents)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the step waits a second time")


def _counted(world: World, sent: Counter[str], part: Callable[[], Any]) -> Any:
    """Run a part of the step; the bytes that it sends are added to `sent`."""
    transport = world.transport
    before = transport.bytes_sent()
    try:
        # Casts and dropouts are in the text: the modes of the moment must not add to them.
        with torch.no_grad(), torch.autocast(transport.device.type, enabled=False):
            result = part()
        transport.flush()
    except BaseException as error:
        transport.fail(error)
        raise
    for kind, count in transport.bytes_sent().items():
        if kind in COUNTED or count > before.get(kind, 0):
            sent[kind] += count - before.get(kind, 0)
    return result


def _report(plan: Plan, rank: int, sent: Mapping[str, int], world: World) -> RankReport:
    stage = next(i for i, s in enumerate(plan.stages) if rank in s.ranks)
    return RankReport(
        rank=rank,
        stage=stage,
        bytes_sent=dict(sent),
        peak_memory=world.memory.peak,
        peak_activations=world.memory.activations,
        log=tuple(world.log.entries),
    )
