"""Running a rank's text for one step. It decides nothing: it makes the world and calls ``step``.

A step without a loss is a generator: it stops where it has its outputs, and is resumed with their gradients.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.parsed import load
from autopart.draws import Draws
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.runtime.batch import Batch
from autopart.runtime.report import RankReport
from autopart.runtime.states import States
from autopart.runtime.transport import Transport
from autopart.runtime.world import World


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's text, compiled: its namespace."""

    namespace: dict[str, Any]
    program: Program
    rank: int

    @classmethod
    def of(cls, program: Program, rank: int, device: torch.device) -> Loaded:
        """Compile the text of one rank."""
        return cls(load(program.ranks[rank].source, f"<rank {rank}>", device), program, rank)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step of one rank gave: outputs by value name, gradients by unit, what was measured, the world it left.

    The world has the updated buffers, and reductions that wait, if the step held them. `rest` is there where the step
    waits: given a transport and the gradients of the outputs, whole and by name, it runs the backwards, once, and
    returns the result of the whole step.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, list[torch.Tensor | None]]
    report: RankReport
    world: World
    rest: Callable[[Transport, Mapping[str, torch.Tensor]], StepResult] | None = None


def run(
    loaded: Loaded,
    transport: Transport,
    states: States,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    shares: Sequence[int],
    draws: Draws,
    *,
    hold: bool = False,
) -> StepResult:
    """One step on this rank. `shares` are the samples of each data rank; `inputs` holds them (by path in the call).

    Its random numbers are those of `draws`. With `hold`, gradients stay as this rank made them: their reductions wait
    in the result's world.
    """
    program, plan = loaded.program, loaded.program.plan
    part = plan.mesh.coordinate(loaded.rank).get("dp", 0)
    dims = dict(program.captured.batch_dims)
    namespace, local = loaded.namespace, plan.inputs == "local"
    batch = Batch(inputs, dims, shares, part, namespace["MICROBATCHES"], draws, local=local)
    world = World(transport, plan.mesh, namespace["PLACE"], states, buffers, batch, hold=hold)
    sent: Counter[str] = Counter()
    outputs = _counted(world, sent, lambda: namespace["step"](world, batch))
    if not inspect.isgenerator(outputs):
        return StepResult(outputs, states.gradients, _report(plan, loaded.rank, sent, world), world)
    waiting = outputs

    def rest(transport: Transport, tangents: Mapping[str, torch.Tensor]) -> StepResult:
        world.transport = transport
        world.memory.given(tangents.values())
        outputs = _counted(world, sent, lambda: _last(waiting, tangents))
        return StepResult(outputs, states.gradients, _report(plan, loaded.rank, sent, world), world)

    outputs = _counted(world, sent, lambda: next(waiting))
    return StepResult(outputs, {}, _report(plan, loaded.rank, sent, world), world, rest)


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
        sent[kind] += count - before.get(kind, 0)
    return result


def _report(plan: Plan, rank: int, sent: Mapping[str, int], world: World) -> RankReport:
    stage = next(i for i, s in enumerate(plan.stages) if rank in s.ranks)
    memory = plan.prediction.memory[stage]
    return RankReport(
        rank=rank,
        stage=stage,
        bytes_sent=dict(sent),
        predicted_bytes=plan.prediction.sent_by(rank) if plan.prediction.sent else {},
        peak_memory=world.memory.peak,
        peak_activations=world.memory.activations,
        predicted_memory=memory.total - memory.optimizer,
        predicted_activations=memory.activations,
        log=tuple(world.log.entries),
    )
