"""One step on the ranks of this process, and what it leaves to the caller: whole outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from autopart.api.programs import Compiled
from autopart.api.ranks import Ranks
from autopart.capture.call import Call
from autopart.draws import Draws
from autopart.ir.captured import Captured
from autopart.ir.program import Program
from autopart.runtime.autograd import Pairs
from autopart.runtime.dealing import in_order
from autopart.runtime.executor import Given, StepResult, run
from autopart.runtime.report import Report
from autopart.runtime.residence import Residence
from autopart.runtime.states import States, whole_gradients
from autopart.runtime.transport import Transport
from autopart.runtime.world import World

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has run, up to its outputs where it has no loss: a result for each rank of this process.

    `residence` says which parts of the module's parameters are here, None where they are whole. `shares` are the
    samples of each data rank.
    """

    model: torch.nn.Module
    program: Program
    call: Call
    shares: tuple[int, ...]
    ranks: Ranks
    residence: Residence | None
    results: tuple[StepResult, ...]

    @property
    def captured(self) -> Captured:
        """The step as it was captured."""
        return self.program.captured

    @property
    def report(self) -> Report:
        """What was measured so far."""
        return Report(tuple(result.report for result in self.results))

    @property
    def holds(self) -> bool:
        """Whether reductions of its gradients were held back."""
        return self.results[0].world.held is not None

    def resumed(self, tangents: Mapping[str, torch.Tensor]) -> Step:
        """The whole step, after its backwards; `tangents` are the gradients of its outputs, whole, by name."""

        def rest(transport: Transport, result: StepResult) -> StepResult:
            assert result.rest is not None
            return result.rest(transport, tangents)

        return replace(self, results=self.on_each(rest, self.results))

    def on_each(self, fn: Callable[[Transport, T], R], items: Sequence[T]) -> tuple[R, ...]:
        """The results of ``fn(transport, item)`` on the ranks here, an item for each."""
        first = self.ranks.here.start
        return self.ranks.each(lambda transport: fn(transport, items[transport.rank - first]), self.call.device)

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the caller gets, by value name: whole tensors, or this data rank's own samples of what is split."""
        found = dict(self.results[0].outputs)
        part = None
        if self.program.plan.inputs == "local" and self.residence is not None:
            part = self.residence.part
        for out in self.captured.outputs:
            if out.kind != "output" or out.name in self.passed_through:
                continue
            if self.residence is None:
                dim = None if out.everywhere else out.dim
                found |= self._joined(out.name, dim)
            elif part is not None and out.everywhere and out.dim is not None:
                each = found[out.name].shape[out.dim] // sum(self.shares)
                first, count = each * sum(self.shares[:part]), each * self.shares[part]
                found[out.name] = found[out.name].narrow(out.dim, first, count)
        return found

    def _joined(self, name: str, dim: int | None) -> dict[str, torch.Tensor]:
        """An output as the whole batch's, from the ranks that made it, by its name."""
        mesh, count = self.program.plan.mesh, self.program.plan.microbatches
        pairs = [(rank, result.outputs.get(name)) for rank, result in enumerate(self.results) if mesh.leads(rank)]
        made = {rank: tensor for rank, tensor in pairs if tensor is not None}
        if not made:
            return {}
        if dim is None or len(made) == 1:
            return {name: next(iter(made.values()))}
        spans = [mesh.spans(rank, self.shares, count) for rank in made]
        return {name: in_order([*made.values()], spans, dim)}

    @property
    def passed_through(self) -> dict[str, str]:
        """The paths of the inputs by the value's name; returned, they are the caller's own tensors."""
        return {item.value.name: item.target for item in self.captured.of_kind("input")}

    def gradients(self) -> Pairs:
        """The gradients that the step made of parameters, which are reduced."""
        return gradients(self.model, self.program, self.residence, [result.world.states for result in self.results])

    def write_buffers(self) -> None:
        """Give the module's buffers the values that the step left them with, which are alike on every rank."""
        updated = self.results[0].world.buffers.updated
        buffers = dict(self.model.named_buffers(remove_duplicate=False)) if updated else {}
        with torch.no_grad():
            for name, value in updated.items():
                buffers[name].copy_(value)


def run_step(
    model: torch.nn.Module,
    compiled: Compiled,
    call: Call,
    shares: tuple[int, ...],
    draws: Draws,
    ranks: Ranks,
    residence: Residence | None,
    *,
    hold: bool,
    ended: Callable[[World], None] | None = None,
) -> Step:
    """Run a program on a call; with `hold`, reductions of gradients are held back. `ended` is as `Given` has it."""
    program = compiled.program
    buffers = dict(model.named_buffers(remove_duplicate=False))
    buffers |= {constant.name: constant.tensor for constant in program.captured.constants}
    given = Given(dict(call.tensors), buffers, shares, draws, hold, ended)
    whole = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)} if residence is None else {}

    def body(transport: Transport) -> StepResult:
        rank, mesh = transport.rank, program.plan.mesh
        states = residence.states() if residence else States.viewing(program.state_on(rank), mesh, rank, whole)
        return run(compiled.loaded[rank], transport, states, given)

    return Step(model, program, call, shares, ranks, residence, ranks.each(body, call.device))


def gradients(
    model: torch.nn.Module, program: Program, residence: Residence | None, made: Sequence[States]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, gradient) in what this process holds of each: parts, or whole ones where it has all ranks.

    `made` has the states of each rank here, with reduced gradients.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    graded = {out.target for out in program.captured.outputs if out.kind == "grad"}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    found = whole_gradients(made) if residence is None else {p.name: grad for _, p, grad in made[0].made()}
    delivered: set[str] = set()
    for unit in program.staged.trained():
        names = [p.name for p in unit.parameters if p.name in graded and p.name not in delivered]
        if residence is not None and residence.column not in unit.columns:
            # `.grad` is None where one device has None, and nowhere else: loops and optimizers look at that.
            absent = [p.name for p in unit.parameters if p.target in graded]  # no part of it is here
            pairs += [(parameters[name], torch.zeros_like(parameters[name].data)) for name in absent]
            continue
        pairs += [(parameters[name], found[name]) for name in names if name in found]
        delivered.update(names)
    return pairs
