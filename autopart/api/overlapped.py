"""A loop whose steps overlap, on the ranks of this process: batches enter one after the other, then it is drained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from autopart.api.agreement import alike
from autopart.api.module import Parallel
from autopart.api.plain import HOOKS, as_plain, check_hooks
from autopart.api.programs import Asked, Compiled, Made
from autopart.draws import following
from autopart.errors import CaptureError
from autopart.ir.action import stages_of
from autopart.runtime import optimizers
from autopart.runtime.batches import Batches, Numbered
from autopart.runtime.local import Standing
from autopart.runtime.looping import LoopWorld, Used
from autopart.runtime.states import States
from autopart.runtime.transport import Pending, Transport
from autopart.runtime.updates import Updates
from autopart.runtime.versions import Versions
from autopart.schedules.stream import stream_of

T = TypeVar("T")


class Overlapped:
    """What runs of one loop, from its first batch on."""

    def __init__(
        self,
        model: Parallel,
        optimizer: torch.optim.Optimizer,
        compiled: Compiled,
        asked: Asked,
        seed: int,
        *,
        compensates: bool,
    ) -> None:
        self.session, self.compiled = model._autopart, compiled
        self.stream, self.device = stream_of(compiled.program.plan), asked.call.device
        self.failed, self.entered, self.seed = False, 0, seed
        self._standing = Standing()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.updates = Updates(optimizer, parameters, 3 * self.stream.lag + 4, compensates=compensates)
        self.updates.note(0)
        self._worlds = self._made(model, parameters)

    @property
    def lag(self) -> int:
        """After how many further batches a batch's loss is there on every rank without waiting."""
        return self.stream.lag

    @property
    def used(self) -> tuple[tuple[Used, ...], ...]:
        """The latest actions of each rank here."""
        return tuple(tuple(world.used) for world in self._worlds)

    def enter(self, asked: Asked) -> Pending[torch.Tensor] | None:
        """Run what all ranks here do when a batch comes; the loss that they begin to sum then, if any.

        It is the next one in the order of the batches, and is there `lag` batches later.
        """
        captured, plan, stream = self.compiled.program.captured, self.compiled.program.plan, self.stream
        inputs, dims, shares = dict(asked.call.tensors), dict(captured.batch_dims), asked.shares(plan)
        draws = self.session.draws = following(self.session.draws, self.seed)
        first = self.entered * stream.batch
        self.entered += 1

        def step(transport: Transport, world: LoopWorld) -> Pending[torch.Tensor] | None:
            part = plan.mesh.part(transport.rank)
            batch = Numbered(inputs, dims, shares, part, stream.batch, draws, first=first)
            world.enter(batch, stream.unfinished)
            return _loss(world.run(self._function(transport, "step")))

        return self._each(step)[0]

    def drain(self) -> Pending[torch.Tensor] | None:
        """Finish all that is under way on the ranks here; the loss that was still to come, if any. Collective."""

        def drain(transport: Transport, world: LoopWorld) -> Pending[torch.Tensor] | None:
            loss = _loss(world.run(self._function(transport, "drain")))
            transport.flush()
            transport.barrier()
            return loss

        return self._each(drain)[0]

    def _made(self, model: Parallel, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[LoopWorld, ...]:
        """The world of each rank here. Ranks of one process that hold the same stage share its weights."""
        program, residence = self.compiled.program, self.session.residence
        mesh, buffers = program.plan.mesh, dict[str, torch.Tensor](model.named_buffers(remove_duplicate=False))
        buffers |= {constant.name: constant.tensor for constant in program.captured.constants}
        whole = {name: parameter.data for name, parameter in parameters.items()}
        trained = program.staged.trained()
        place = program.plan.places(1, helpers=program.staged.helpers)
        held: dict[int, Versions] = {}

        def world(transport: Transport) -> LoopWorld:
            states = residence.states() if residence else States.viewing(program.state, mesh, transport.rank, whole)
            versions = {}
            for stage in stages_of(place, mesh.coordinate(transport.rank).get("pp", 0)):
                names = frozenset(unit.name for unit in trained if stage in unit.stages)
                versions[stage] = held.setdefault(stage, Versions(states.whole, names))
            return LoopWorld(transport, mesh, place, states, buffers, versions, self.updates)

        return self._ranks(world)

    def _function(self, transport: Transport, name: str) -> Callable[[LoopWorld, Batches], Any]:
        function: Callable[[LoopWorld, Batches], Any] = self.compiled.loaded[transport.rank].namespace[name]
        return function

    def _each(self, fn: Callable[[Transport, LoopWorld], T]) -> tuple[T, ...]:
        """The results of ``fn(transport, world)`` on every rank here."""
        first = self.session.join().here.start
        try:
            return self._ranks(lambda transport: fn(transport, self._worlds[transport.rank - first]))
        except BaseException:
            self.failed = True
            raise

    def _ranks(self, fn: Callable[[Transport], T]) -> tuple[T, ...]:
        return self.session.join().each(fn, self.device, standing=self._standing)


def _loss(made: Mapping[str, Pending[torch.Tensor]] | None) -> Pending[torch.Tensor] | None:
    return next(iter(made.values()), None) if made is not None else None


def begin(
    model: Parallel,
    optimizer: torch.optim.Optimizer,
    schedule: str,
    asked: Asked,
    made: Made,
    *,
    compensates: bool,
) -> Overlapped:
    """Compile a loop for its first batch, and place the parameters. Collective.

    Raises what compiling raises, on every rank; ValueError where the ranks' batches differ.
    """
    session = model._autopart
    _check(model)
    ranks = session.join()
    if session.residence is not None:
        session.residence.check(model)
    materials = session._materials(model)
    with as_plain(model, session.plain):
        seed, asked, _ = session._agree(asked, made)

        def compiled() -> Compiled:
            return session.programs.overlapping(asked, ranks, session.residence, schedule)

        with session.programs.undone_by_errors():
            found = alike(session.transport, made.named(), compiled)
    session._place(model, found.program, materials, asked.call.device)
    if session.residence is not None:
        optimizers.settle(optimizer)
    return Overlapped(model, optimizer, found, asked, seed, compensates=compensates)


def _check(model: Parallel) -> None:
    """Refuse a model of which a loop cannot be made, whatever its graph."""
    options = model._autopart.options
    model._autopart.check_flushed()
    check_hooks(model, options.hooks)
    if options.hooks != "ignore" and any(model.__dict__.get(kind) for kind in HOOKS):
        raise CaptureError(
            f"{type(model).__name__} has hooks, which train_loop would not run; remove them, or pass hooks='ignore' "
            "to parallelize"
        )
    if options.inputs != "global":
        raise ValueError("inputs: train_loop takes the whole batch on every rank; leave inputs= of parallelize out")
    if not torch.is_grad_enabled():
        raise RuntimeError("train_loop: gradients are switched off (no_grad); take its losses outside of that")
