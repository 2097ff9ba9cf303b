"""The session behind a parallelised module: which world it runs in, its plan, its programs, and one call of it."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart import _torch
from autopart import capture as capturing
from autopart.api import compiler
from autopart.api.agreement import agree
from autopart.api.boundary import Gradients as InputGradients
from autopart.api.boundary import check_local, deferred_outputs, input_gradients
from autopart.api.copies import Copies
from autopart.api.options import Options
from autopart.api.plain import as_plain, check_hooks, constants
from autopart.capture.call import Call
from autopart.capture.pattern import Pattern
from autopart.draws import Draws, following
from autopart.ir.captured import Captured
from autopart.ir.mesh import pieces
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.state import Unit
from autopart.passes.normalise import normalise
from autopart.passes.schedule import FORWARDS_FIRST, check_deferred
from autopart.passes.segment import segment
from autopart.passes.slices import least_samples
from autopart.passes.verify import verify
from autopart.runtime import distributed, guards
from autopart.runtime.autograd import Later, Pairs, delivering
from autopart.runtime.construction import Construction
from autopart.runtime.executor import Loaded, StepResult, run
from autopart.runtime.local import current_transport, run_ranks
from autopart.runtime.materialise import Materials, make_whole, on_meta
from autopart.runtime.parts import Holder, Whole, agreed
from autopart.runtime.report import Report
from autopart.runtime.residence import Residence
from autopart.runtime.states import Gradients, States
from autopart.runtime.transport import Transport
from autopart.runtime.unreduced import Share, Unreduced
from autopart.runtime.weights import Files

NO_TARGET = capturing.NO_TARGET
CACHED_PROGRAMS = 8
KEPT_PATTERNS = 4  # of training and evaluation, with and without optional arguments


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and the texts of the ranks that run in this process, compiled; the samples that each slice needs."""

    program: Program
    loaded: tuple[Loaded, ...]
    least: int


class Session:
    """State of one parallelised module. `transport` is this rank's, None where all ranks live in this process."""

    def __init__(self, plain: type[torch.nn.Module], options: Options, model: torch.nn.Module) -> None:
        self.plain, self.options, self.copies = plain, options, Copies(model)
        self.transport: Transport | None = None
        self.joined = False
        self.plan: Plan | None = None
        self.residence: Residence | None = None
        self.program: Program | None = None
        self.report: Report | None = None
        self.draws: Draws | None = None  # of the last training call
        self.construction: Construction | None = None
        self.files: Files | None = None  # a checkpoint that parameters on meta are to be read from
        self.at_placement: list[Callable[[], None]] = []  # what waits for parameters to become parts
        self.warned = False
        self.waiting = False  # inside no_sync()
        self.unreduced = Unreduced()
        self.patterns: tuple[Pattern, ...] = ()
        self.programs: OrderedDict[Any, Compiled] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copy of the module: the same world, plan and programs, state of its own."""
        made = Session.__new__(Session)
        made.__dict__.update(self.__dict__)
        made.programs, made.at_placement = self.programs.copy(), []
        made.construction = self.construction.copied(memo) if self.construction is not None else None
        made.residence = copy.deepcopy(self.residence, memo)
        made.unreduced, made.copies = Unreduced(), self.copies.copied(memo)
        return made

    def call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """One call of the module: the whole planned step when it trains, a forward otherwise.

        A forward draws the random numbers of the last training call.
        """
        check_hooks(model, self.options.hooks)
        self.join()
        self.unreduced.forget()
        if self.residence is not None:
            self.residence.check(model)
        materials = self._materials(model)
        moved_args, moved_kwargs, moved_target = self._moved((args, dict(kwargs), target))
        with as_plain(model, self.plain):
            call = capturing.read(model, moved_args, moved_kwargs, batch=self.options.batch, target=moved_target)
            seed, local = self._agree(model, call)
            compiled, shares = self._compiled(model, call, target is not NO_TARGET, local)
        if self.transport is not None and self.residence is None:
            self._adopt(model, compiled.program)
        if materials is not None:
            self._materialise(model, materials, next(iter(call.tensors))[1].device)
        while self.at_placement:
            self.at_placement.pop(0)()
        counts = model.training and torch.is_grad_enabled()
        draws = following(self.draws, seed) if counts else self.draws or Draws(seed, 0)
        results = self._run(model, compiled, call, shares, draws)
        self.draws = draws if counts else self.draws
        self.report = Report(tuple(result.report for result in results))
        _write_buffers(model, results[0].world.updated)
        return self._result(model, compiled.program, call, results, shares)

    # The world

    def join(self) -> None:
        """Find the world: a local rank's, a process group or torchrun's, else all ranks in this process."""
        if self.joined:
            return
        self.transport = current_transport()
        if self.transport is None and distributed.launched():
            self.transport = distributed.join()
        self.options.world_size(self.transport.size if self.transport is not None else None)
        self.options.check_inputs(self.size, separate=self.transport is not None)
        self.joined = True

    @property
    def holds(self) -> bool:
        """Whether a training call now holds its reductions: under `no_sync`, and to go with those of such calls."""
        return self.waiting or self.unreduced.waits()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.options.world_size(self.transport.size if self.transport is not None else None)

    def _moved(self, values: Any) -> Any:
        if self.transport is None:
            return values
        device = self.transport.device
        return _torch.pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)

    def _agree(self, model: torch.nn.Module, call: Call) -> tuple[int, tuple[int, ...] | None]:
        """Torch's seed on rank 0, for all, and the samples of each data rank where each has its own.

        Raises ValueError on every rank if their calls do not fit.
        """
        if self.transport is None or self.transport.size == 1:
            return torch.initial_seed(), None
        mesh = self.options.given_mesh() if self.options.inputs == "local" else None
        return agree(self.transport, self._key(model, call), call, mesh, held=self.holds)

    # Plan and programs

    def _key(self, model: torch.nn.Module, call: Call) -> Any:
        modes = tuple(part.training for part in model.modules())
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
        return call.key(), torch.is_grad_enabled(), modes, trained, casts

    def _compiled(
        self, model: torch.nn.Module, call: Call, target: bool, local: tuple[int, ...] | None
    ) -> tuple[Compiled, tuple[int, ...]]:
        """The program for a call, and the samples of each data rank (`local` where each passes its own)."""
        made_of = (self._key(model, call), constants(model, shapes=self.transport is None), target)
        key = (made_of, self._microbatches(self._shares(call, local)) if self.plan is not None else None)
        if key in self.programs:
            self.programs.move_to_end(key)
        else:
            if self.residence is not None:
                model = self.residence.whole_copy(model)
            compiled = self._compile(model, call, target, local)
            key = (made_of, self._microbatches(self._shares(call, local)))
            self._keep(key, compiled)
        compiled = self.programs[key]
        shares = self._shares(call, local)
        if compiled.program.captured.training:
            compiler.check_cut(shares, compiled.program.plan, compiled.least)
            self.program = compiled.program
        return compiled, shares

    def _keep(self, key: Any, compiled: Compiled) -> None:
        """Keep a new program; of too many, forget that used longest ago, and say once what keeps changing."""
        self.programs[key] = compiled
        if len(self.programs) <= CACHED_PROGRAMS:
            return
        self.programs.popitem(last=False)
        if not self.warned:
            self.warned = True
            ((_, before, _), _), ((_, after, _), _) = list(self.programs)[-2:]
            names = [name for name, _ in sorted(set(after) - set(before), key=str)]
            warnings.warn(
                f"{len(self.programs) + 1} programs were compiled for {self.plain.__name__}, as "
                f"{', '.join(names) or 'the shapes or values of its arguments'} keeps changing; each takes a while",
                stacklevel=2,
            )

    def _shares(self, call: Call, local: tuple[int, ...] | None) -> tuple[int, ...]:
        """The samples of each data rank: its own, or its part of the whole batch."""
        assert self.plan is not None
        degree = self.plan.mesh.degree("dp")
        return local or pieces(call.batch, degree)

    def _microbatches(self, shares: tuple[int, ...]) -> int:
        """A forward-only program of a small batch has fewer microbatches than the plan; a training one never has.

        Where a batch has fewer samples than there are data ranks, some of these run on none.
        """
        assert self.plan is not None
        return max(1, min(self.plan.microbatches, *shares))

    def _compile(self, model: torch.nn.Module, call: Call, target: bool, local: tuple[int, ...] | None) -> Compiled:
        program = self._given(model, call) or self._lowered(model, call, target, local)
        device = self.transport.device if self.transport is not None else next(iter(call.tensors))[1].device
        ranks = range(self.size) if self.transport is None else (self.transport.rank,)
        loaded = tuple(Loaded.of(program, rank, device) for rank in ranks)
        return Compiled(program, loaded, least_samples(program.captured))

    def _given(self, model: torch.nn.Module, call: Call) -> Program | None:
        """The pinned program, verified, if it is one for this call: same shapes, dtypes and other arguments."""
        program = self.options.given_program
        if program is None or not torch.is_grad_enabled() or program.captured.call != call.text:
            return None
        trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        outputs = [out for out in program.captured.outputs if out.kind == "output"]
        if self.options.outputs == "all" and not all(out.everywhere for out in outputs):
            return None
        if any(item.requires_grad != trained.get(item.target) for item in program.captured.of_kind("parameter")):
            return None
        if self.options.verify:
            verify(program)
        self.plan = program.plan
        return program

    def _lowered(self, model: torch.nn.Module, call: Call, target: bool, local: tuple[int, ...] | None) -> Program:
        """Capture the call and compile it under the plan, which is solved for at the first call."""
        loss_fn = self.options.loss_fn if target or not _takes_two(self.options.loss_fn) else None
        asked = self.options
        captured, pattern = capturing.capture_again(
            model, call, self.patterns, loss_fn=loss_fn, target=target, route=asked.capture
        )
        self.patterns = (pattern, *(other for other in self.patterns if other is not pattern))[:KEPT_PATTERNS]
        captured = normalise(captured, semantics=asked.meaning, outputs=asked.outputs)
        if asked.inputs == "local":
            check_local(captured)
        pinned = asked.given_plan
        if captured.deferred:
            check_deferred(pinned.schedule if pinned is not None else asked.schedule)
        plan = self.plan = self.plan or self._plan(captured, sum(local or (call.batch,)))
        segmented = segment(captured, cuts=plan.cuts)
        if captured.deferred:
            plan = replace(plan, schedule=FORWARDS_FIRST)
        elif not captured.training:
            plan = self._evaluating(self._shares(call, local))
        state = self.residence.state if self.residence is not None else None
        return compiler.lower(segmented, plan, state=state, check=self.options.verify)

    def _evaluating(self, shares: tuple[int, ...]) -> Plan:
        """The plan for a forward-only program; it is checked at a batch that gives every data rank a sample."""
        assert self.plan is not None
        count = self._microbatches(shares)
        return replace(self.plan, microbatches=count, batch=max(sum(shares), count * len(shares)))

    def _plan(self, captured: Captured, batch: int) -> Plan:
        given, inputs = self.options.given_plan, self.options.inputs
        if given is None:
            pins = self.options.pins()
            return compiler.planned(captured, batch=batch, inputs=inputs, devices=self.size, **pins)
        compiler.check_fingerprint(given, captured)
        if given.inputs == inputs:
            return given
        return compiler.predicted(segment(captured, cuts=given.cuts), replace(given, inputs=inputs))

    # Parameters

    def holder(self, model: torch.nn.Module) -> Holder:
        """What this rank holds of the module's parameters: parts, or everything while it has none."""
        return Whole(model, self.transport) if self.residence is None else self.residence

    def _materials(self, model: torch.nn.Module) -> Materials | None:
        """Where what is on meta will come from, None if nothing is. Raises on every rank where a value is missing."""
        if self.residence is not None or not (on_meta(model) or self._weighted()):
            return None
        if not on_meta(model):
            raise ValueError("weights: nothing of the module is on meta; load what is real with load_state_dict")

        def made() -> Materials:
            files = self.files
            if files is None and self.options.weights is not None:
                files = Files.of(self.options.weights)
            return Materials(model, files, self.construction)

        return agreed(self.transport, made)

    def _weighted(self) -> bool:
        """Whether `weights` is still to be used."""
        return self.options.weights is not None and self.plan is None

    def _materialise(self, model: torch.nn.Module, materials: Materials, device: torch.device) -> None:
        if self.residence is None:
            make_whole(model, device)
        materials.fill(self.holder(model).slots(), device, self.transport)
        self.construction = self.files = None

    # Running

    def _adopt(self, model: torch.nn.Module, program: Program) -> None:
        """Cut the user's parameters to this rank's parts, from rank 0's initial values; those of copies likewise."""
        assert self.transport is not None
        copies = self.copies.take(self.transport)
        self.residence = Residence(model, self.transport, program.plan.mesh, program.state, dict(program.captured.tied))
        for twin in copies:
            session: Session = twin._autopart  # type: ignore[assignment]
            session.joined, session.transport, session.plan = self.joined, self.transport, self.plan
            session._adopt(twin, program)

    def _run(
        self, model: torch.nn.Module, compiled: Compiled, call: Call, shares: tuple[int, ...], draws: Draws
    ) -> Sequence[StepResult]:
        program = compiled.program
        inputs, hold = dict(call.tensors), self.holds
        buffers = dict(model.named_buffers(remove_duplicate=False))
        buffers |= {constant.name: constant.tensor for constant in program.captured.constants}
        if self.transport is not None:
            assert self.residence is not None
            states = self.residence.states()
            return [run(compiled.loaded[0], self.transport, states, buffers, inputs, shares, draws, hold=hold)]
        whole = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        mesh, state = program.plan.mesh, program.state

        def body(transport: Transport) -> StepResult:
            states = States.viewing(state, mesh, transport.rank, whole)
            loaded = compiled.loaded[transport.rank]
            return run(loaded, transport, states, buffers, inputs, shares, draws, hold=hold)

        return run_ranks(mesh.size, body, device=next(iter(inputs.values())).device)

    def _result(
        self,
        model: torch.nn.Module,
        program: Program,
        call: Call,
        results: Sequence[StepResult],
        shares: tuple[int, ...],
    ) -> Any:
        captured = program.captured
        outputs = dict(results[0].outputs)
        given = {item.value.name: item.target for item in captured.of_kind("input")}
        inputs = dict(call.tensors)
        for out in captured.outputs:
            if out.kind == "output" and out.name not in given and self.transport is None:
                joined = _joined(out.name, None if out.everywhere else out.dim, results)
                outputs |= {} if joined is None else {out.name: joined}
        if self.options.inputs == "local" and self.transport is not None and not captured.training:
            part = program.plan.mesh.coordinate(self.transport.rank).get("dp", 0)
            outputs |= own_rows(captured, outputs, shares, part)
        if captured.deferred:
            outputs |= self._deferred(model, program, call, results)
        elif captured.training:
            assert captured.loss is not None
            grads = input_gradients(captured, call, results[0].outputs)
            pairs = self._delivery(model, program, results, wait=self.waiting)
            outputs[captured.loss] = delivering(outputs[captured.loss], pairs, grads)
        leaves = [
            item[1] if isinstance(item, tuple) else inputs[given[item]] if item in given else outputs.get(item)
            for item in captured.result
        ]
        return _torch.pytree.tree_unflatten(leaves, captured.tree)

    def _deferred(
        self, model: torch.nn.Module, program: Program, call: Call, results: Sequence[StepResult]
    ) -> dict[str, torch.Tensor]:
        """The outputs of a step without a loss, whose backward runs the rest of it on the ranks of this process."""
        wait = self.waiting

        def on(transport: Transport, result: StepResult, tangents: Mapping[str, torch.Tensor]) -> StepResult:
            assert result.rest is not None
            return result.rest(transport, tangents)

        def rest(tangents: Mapping[str, torch.Tensor]) -> InputGradients:
            if self.transport is not None:
                found = [on(self.transport, results[0], tangents)]
            else:
                device = next(iter(tangents.values())).device
                found = run_ranks(len(results), lambda t: on(t, results[t.rank], tangents), device=device)
            self.report = Report(tuple(result.report for result in found))
            pairs = self._delivery(model, program, found, wait=wait)
            grads = input_gradients(program.captured, call, found[0].outputs)
            return [*(pairs(torch.ones(())) if callable(pairs) else pairs), *grads]

        return deferred_outputs(model, program, call, results[0].outputs, self.transport, rest)

    def _delivery(
        self, model: torch.nn.Module, program: Program, results: Sequence[StepResult], *, wait: bool
    ) -> Pairs | Later:
        """The gradients of a step; where its reductions are held, what adds them to those that wait.

        With `wait`, the call was inside ``no_sync()``.
        """
        if results[0].world.held is None:
            return self._gradients(model, program, [result.gradients for result in results])
        share = Share(program, tuple(result.world for result in results))

        def added(factor: torch.Tensor) -> Pairs:
            self.unreduced.add(share, factor, dict(model.named_parameters(remove_duplicate=False)))
            guards.watch()
            return [] if wait else [pair for each in self.unreduced.take() for pair in self._reduced(model, each)]

        return added

    def _reduced(self, model: torch.nn.Module, share: Share) -> Pairs:
        """The gradients of a share, reduced."""
        worlds = share.worlds
        if self.transport is not None:
            sent = [worlds[0].release(self.transport)]
        else:
            sent = run_ranks(len(worlds), lambda transport: worlds[transport.rank].release(transport))
        self.report = self.report.plus(sent) if self.report is not None else None
        return self._gradients(model, share.program, [world.states.gradients for world in worlds])

    def _gradients(
        self, model: torch.nn.Module, program: Program, gradients: Sequence[Gradients]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, gradient) in what this process holds of each: parts, or whole ones where it has all ranks."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        graded = {out.target for out in program.captured.outputs if out.kind == "grad"}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for unit in program.staged.trained():
            if self.residence is not None and self.residence.column not in unit.stages:
                # `.grad` is None where one device has None, and nowhere else: loops and optimizers look at that.
                absent = [parameters[p.target] for p in unit.parameters if p.target in graded]
                pairs += [(parameter, torch.zeros_like(parameter.data)) for parameter in absent]
                continue
            owners = self._owners(unit, program) if self.transport is None else range(1)
            lists = [gradients[owner][unit.name] for owner in owners if unit.name in gradients[owner]]
            for parameter, parts in zip(unit.parameters, zip(*lists, strict=True), strict=False):
                found = [part for part in parts if part is not None]
                if found and parameter.target in graded:
                    shape = found[0].shape if self.transport is not None else parameter.shape
                    pairs.append((parameters[parameter.target], _whole(found, shape)))
        return pairs

    @staticmethod
    def _owners(unit: Unit, program: Program) -> list[int]:
        """The ranks whose gradients make up a unit's, in order."""
        mesh = program.plan.mesh
        parts = mesh.degree("dp") if unit.held_in_parts(mesh.degree("dp")) else 1
        return [mesh.rank({"pp": unit.stages[0], "dp": part}) for part in range(parts)]


def _write_buffers(model: torch.nn.Module, updated: Mapping[str, torch.Tensor]) -> None:
    """Give the module's buffers the values that a step left them with, which are alike on every rank."""
    buffers = dict(model.named_buffers(remove_duplicate=False)) if updated else {}
    with torch.no_grad():
        for name, value in updated.items():
            buffers[name].copy_(value)


def _whole(pieces: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if shape else next(piece for piece in pieces if piece.numel())


def _joined(name: str, dim: int | None, results: Sequence[StepResult]) -> torch.Tensor | None:
    """An output as the whole batch's, from the ranks that made it."""
    found = [result.outputs[name] for result in results if result.outputs.get(name) is not None]
    if not found:
        return None
    return found[0] if dim is None or len(found) == 1 else torch.cat(found, dim=dim)


def own_rows(
    captured: Captured, outputs: Mapping[str, torch.Tensor], shares: Sequence[int], part: int
) -> dict[str, torch.Tensor]:
    """Of outputs for the samples of all data ranks, those of data rank `part`."""
    found: dict[str, torch.Tensor] = {}
    for out in captured.outputs:
        if out.kind == "output" and out.dim is not None and outputs.get(out.name) is not None:
            each = outputs[out.name].shape[out.dim] // sum(shares)
            found[out.name] = outputs[out.name].narrow(out.dim, each * sum(shares[:part]), each * shares[part])
    return found


def _takes_two(loss_fn: Any) -> bool:
    """Whether a loss function needs a target beside the output."""
    import inspect

    if loss_fn is None:
        return True
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return True
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) > 1
