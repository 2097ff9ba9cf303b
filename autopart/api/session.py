"""The session behind a parallelised module: what lasts from call to call, and one call of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autopart import capture as capturing
from autopart.api.agreement import agree, alike
from autopart.api.copies import Copies
from autopart.api.delivery import Delivery
from autopart.api.options import Options
from autopart.api.plain import as_plain, check_hooks
from autopart.api.programs import Asked, Compiled, Made, Programs
from autopart.api.ranks import Ranks
from autopart.api.step import run_step
from autopart.capture import NO_TARGET
from autopart.draws import Draws, following
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.runtime import guards
from autopart.runtime.construction import Construction
from autopart.runtime.materialise import Materials, make_whole, on_meta
from autopart.runtime.parts import Holder, Whole, agreed
from autopart.runtime.residence import Residence
from autopart.runtime.transport import Transport
from autopart.runtime.weights import Files

if TYPE_CHECKING:
    from autopart.api.stepping import PostValidated


class UnderWay(Protocol):
    """A loop whose steps overlap; `failed` says that some of them were lost."""

    failed: bool


class Session:
    """State of one parallelised module: its world, its programs, where its parameters are, what is delivered next."""

    def __init__(
        self,
        plain: type[torch.nn.Module],
        options: Options,
        model: torch.nn.Module,
        construction: Construction | None = None,
    ) -> None:
        """For a module of class `plain`; `construction` is what its constructor did on meta."""
        self.plain, self.options, self.copies = plain, options, Copies(model)
        self.ranks: Ranks | None = None
        self.programs = Programs(options)
        self.residence: Residence | None = None
        self.construction = construction
        self.files: Files | None = None  # a checkpoint that parameters on meta are to be read from
        self.at_placement: list[Callable[[], None]] = []  # what waits for parameters to become parts
        self.draws: Draws | None = None  # of the last training call
        self.delivery = Delivery()
        self.stepping: PostValidated | None = None  # the optimizer that the program of a call is handed
        self.loop: UnderWay | None = None  # the `train_loop` of which steps are under way

    def check_flushed(self) -> None:
        """Raise RuntimeError while a `train_loop` has steps under way: stages have weights of different versions."""
        if self.loop is not None:
            raise RuntimeError(
                "train_loop: a loop over this model is not flushed; take all of its losses, or call its flush() on "
                "every rank" + ("; it has failed, so load a state dict first" if self.loop.failed else "")
            )

    def renewed(self) -> None:
        """All weights are about to be given anew, which is what a loop that failed needs."""
        if self.loop is not None and self.loop.failed:
            self.loop = None
        self.check_flushed()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copy of the module: the same world, plan and programs, state of its own."""
        self.check_flushed()
        made = copy.copy(self)
        made.programs, made.at_placement, made.delivery = self.programs.copied(), [], self.delivery.copied()
        made.construction = self.construction.copied(memo) if self.construction is not None else None
        made.residence = copy.deepcopy(self.residence, memo)
        made.copies = self.copies.copied(memo)
        if made.residence is not None:
            guards.watch(made.residence)
        return made

    def call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """One call of the module: the whole planned step when it trains, a forward otherwise.

        A forward draws the random numbers of the last training call.
        """
        check_hooks(model, self.options.hooks)
        self.check_flushed()
        ranks = self.join()
        self.delivery.unreduced.forget()
        if self.residence is not None:
            self.residence.check(model)
        materials = self._materials(model)
        args, kwargs, target = ranks.moved((args, dict(kwargs), target))
        with as_plain(model, self.plain):
            call = capturing.read(model, args, kwargs, batch=self.options.batch, target=target)
            asked = Asked(model, call, target is not NO_TARGET)
            made = asked.made(ranks)
            seed, asked, known = self._agree(asked, made)
            with self.programs.undone_by_errors():
                compiled = self._compiled(asked, made, known=known)
                if self.stepping is not None:
                    self.stepping.check(compiled.program, call)
        self._place(model, compiled.program, materials, call.device)
        counts = model.training and torch.is_grad_enabled()
        draws = following(self.draws, seed) if counts else self.draws or Draws(seed, 0)
        shares, hold = asked.shares(compiled.program.plan), self.delivery.holds
        ended = self.stepping.begin(compiled.program, self.residence) if self.stepping is not None else None
        step = run_step(model, compiled, call, shares, draws, ranks, self.residence, hold=hold, ended=ended)
        self.draws = draws if counts else self.draws
        step.write_buffers()
        if self.stepping is not None:
            self.stepping.settle(step)
        return self.delivery.returned(step, delivers=self.stepping is None)

    # The world

    def join(self) -> Ranks:
        """The ranks of the world, which is found, or made, the first time."""
        if self.ranks is None:
            self.ranks = Ranks.join(self.options)
        return self.ranks

    @property
    def transport(self) -> Transport | None:
        """This rank's, None where all ranks live in this process (and before the world is known)."""
        return self.ranks.transport if self.ranks is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan, None before the first call."""
        return self.programs.plan

    def _agree(self, asked: Asked, made: Made) -> tuple[int, Asked, bool]:
        """Torch's seed on rank 0, for all; the call with the samples of each data rank where each has its own; whether
        all ranks have its program.

        Raises ValueError on every rank if their calls do not fit.
        """
        known = self.programs.knows(made)
        if self.transport is None or self.transport.size == 1:
            return torch.initial_seed(), asked, known
        mesh = self.options.given_mesh() if self.options.inputs == "local" else None
        found = agree(self.transport, made.kind, asked.call, mesh, held=self.delivery.holds, known=known)
        return found.seed, replace(asked, samples=found.samples), found.known

    def _compiled(self, asked: Asked, made: Made, *, known: bool) -> Compiled:
        """The program for a call, the same on every rank; all have it already where it is `known`."""

        def compiled() -> Compiled:
            return self.programs.program_for(asked, made, self.join(), self.residence)

        return compiled() if known else alike(self.transport, made.named(), compiled)

    # Parameters

    def holder(self, model: torch.nn.Module) -> Holder:
        """What this rank holds of the module's parameters: parts, or everything while it has none."""
        return Whole(model, self.transport) if self.residence is None else self.residence

    def _materials(self, model: torch.nn.Module) -> Materials | None:
        """Where what is on meta will come from, None if nothing is. Raises on every rank where a value is missing."""
        unused = self.options.weights is not None and self.plan is None
        if self.residence is not None or not (on_meta(model) or unused):
            return None
        if not on_meta(model):
            raise ValueError("weights: nothing of the module is on meta; load what is real with load_state_dict")

        def made() -> Materials:
            files = self.files
            if files is None and self.options.weights is not None:
                files = Files.of(self.options.weights)
            return Materials(model, files, self.construction)

        return agreed(self.transport, made)

    def _place(
        self, model: torch.nn.Module, program: Program, materials: Materials | None, device: torch.device
    ) -> None:
        """At the first call, make parameters real, and parts where this rank has its own; do what waited for that."""
        if self.transport is not None and self.residence is None:
            self._adopt(model, program)
        if materials is not None:
            self._materialise(model, materials, device)
        while self.at_placement:
            self.at_placement.pop(0)()

    def _adopt(self, model: torch.nn.Module, program: Program) -> None:
        """Cut the user's parameters to this rank's parts, from rank 0's initial values; those of copies likewise."""
        assert self.transport is not None
        copies = self.copies.take(self.transport)
        self.residence = Residence(
            model, self.transport, program.plan.mesh, program.state_on(self.transport.rank), dict(program.captured.tied)
        )
        guards.watch(self.residence)
        for twin in copies:
            session: Session = twin._autopart  # type: ignore[assignment]
            session.ranks, session.programs.plan = self.ranks, self.plan
            session._adopt(twin, program)

    def _materialise(self, model: torch.nn.Module, materials: Materials, device: torch.device) -> None:
        if self.residence is None:
            make_whole(model, device)
        materials.fill(self.holder(model).slots(), device, self.transport)
        self.construction = self.files = None
