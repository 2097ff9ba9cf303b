"""Running a rank's text for one step. It decides nothing: it makes the world and calls ``step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.recording import load
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
    """What one step of one rank gave: outputs by value name, gradients by unit, and what was measured."""

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, list[torch.Tensor | None]]
    report: RankReport


def run(
    loaded: Loaded,
    transport: Transport,
    states: States,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    shares: Sequence[int],
) -> StepResult:
    """One step on this rank. `shares` are the samples of each data rank; `inputs` holds them (by path in the call)."""
    program, plan = loaded.program, loaded.program.plan
    part = plan.mesh.coordinate(loaded.rank).get("dp", 0)
    dims = dict(program.captured.batch_dims)
    batch = Batch(inputs, dims, shares, part, loaded.namespace["MICROBATCHES"], local=plan.inputs == "local")
    world = World(transport, plan.mesh, loaded.namespace["PLACE"], states, buffers, batch)
    before = transport.bytes_sent()
    try:
        # Casts and dropouts are in the text: the modes of the moment must not add to them.
        with torch.no_grad(), torch.autocast(transport.device.type, enabled=False):
            outputs = loaded.namespace["step"](world, batch)
        transport.flush()
    except BaseException as error:
        transport.fail(error)
        raise
    sent = {kind: count - before.get(kind, 0) for kind, count in transport.bytes_sent().items()}
    return StepResult(outputs, states.gradients, _report(plan, loaded.rank, sent, world))


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
