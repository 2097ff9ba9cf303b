"""The session behind a parallelised module: which world it runs in, its plan, its programs, and one call of it."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart import _torch
from autopart import capture as capturing
from autopart.api import compiler
from autopart.api.agreement import agree
from autopart.api.options import Options
from autopart.api.plain import as_plain, check_hooks, constants
from autopart.capture.call import Call
from autopart.capture.pattern import Pattern
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.mesh import pieces
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.state import Unit
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.runtime import distributed
from autopart.runtime.autograd import delivering
from autopart.runtime.executor import Loaded, StepResult, run
from autopart.runtime.local import current_transport, run_ranks
from autopart.runtime.report import Report
from autopart.runtime.residence import Residence
from autopart.runtime.states import States
from autopart.runtime.transport import Transport

NO_TARGET = capturing.NO_TARGET
CACHED_PROGRAMS = 8
KEPT_PATTERNS = 4  # of training and evaluation, with and without optional arguments


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and the texts of the ranks that run in this process, compiled."""

    program: Program
    loaded: tuple[Loaded, ...]


class Session:
    """State of one parallelised module. `transport` is this rank's, None where all ranks live in this process."""

    def __init__(self, plain: type[torch.nn.Module], options: Options) -> None:
        self.plain, self.options = plain, options
        self.transport: Transport | None = None
        self.joined = False
        self.plan: Plan | None = None
        self.residence: Residence | None = None
        self.program: Program | None = None
        self.report: Report | None = None
        self.warned = False
        self.patterns: tuple[Pattern, ...] = ()
        self.programs: OrderedDict[Any, Compiled] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copy of the module: the same world, plan and programs, state of its own."""
        made = copy.copy(self)
        made.programs = self.programs.copy()
        made.residence = copy.deepcopy(self.residence, memo)
        return made

    def call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """One call of the module: the whole planned step when it trains, a forward otherwise."""
        check_hooks(model, self.options.hooks)
        self.join()
        if self.residence is not None:
            self.residence.check(model)
        moved_args, moved_kwargs, moved_target = self._moved((args, dict(kwargs), target))
        with as_plain(model, self.plain):
            call = capturing.read(model, moved_args, moved_kwargs, batch=self.options.batch, target=moved_target)
            local = self._agree(model, call)
            compiled, shares = self._compiled(model, call, target is not NO_TARGET, local)
        if self.transport is not None and self.residence is None:
            self._adopt(model, compiled.program)
        results = self._run(model, compiled, call, shares)
        self.report = Report(tuple(result.report for result in results))
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
    def size(self) -> int:
        """The number of ranks."""
        return self.options.world_size(self.transport.size if self.transport is not None else None)

    def _moved(self, values: Any) -> Any:
        if self.transport is None:
            return values
        device = self.transport.device
        return _torch.pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)

    def _agree(self, model: torch.nn.Module, call: Call) -> tuple[int, ...] | None:
        """Raise ValueError on every rank if the calls do not fit; the samples of each data rank that has its own."""
        if self.transport is None or self.transport.size == 1:
            return None
        mesh = self.options.given_mesh() if self.options.inputs == "local" else None
        return agree(self.transport, self._key(model, call), call, mesh)

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
            self._check_cut(shares)
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

    def _check_cut(self, shares: tuple[int, ...]) -> None:
        """Refuse a training batch of which some data rank has fewer samples than microbatches."""
        assert self.plan is not None
        degree, count = self.plan.mesh.degree("dp"), self.plan.microbatches
        if min(shares) < count:
            batch = (
                f"{sum(shares)} samples cannot be cut into {degree * count} pieces (dp x microbatches of the plan)"
                if self.options.inputs == "global"
                else f"the {min(shares)} samples of data rank {shares.index(min(shares))} cannot be cut into the "
                f"plan's {count} microbatches"
            )
            raise ValueError(
                f"batch: {batch}; pass more samples (a loader's last batch may be small: drop_last=True), or pin fewer "
                "microbatches"
            )

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
        return Compiled(program, tuple(Loaded.of(program, rank, device) for rank in ranks))

    def _given(self, model: torch.nn.Module, call: Call) -> Program | None:
        """The pinned program, verified, if it is one for this call: same shapes, dtypes and other arguments."""
        program = self.options.given_program
        if program is None or not torch.is_grad_enabled() or program.captured.call != call.text:
            return None
        trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        if any(item.requires_grad != trained.get(item.target) for item in program.captured.of_kind("parameter")):
            return None
        if self.options.verify:
            verify(program)
        self.plan = program.plan
        return program

    def _lowered(self, model: torch.nn.Module, call: Call, target: bool, local: tuple[int, ...] | None) -> Program:
        """Capture the call and compile it under the plan, which is solved for at the first call."""
        loss_fn = self.options.loss_fn if target or not _takes_two(self.options.loss_fn) else None
        route = self.options.capture
        captured, pattern = capturing.capture_again(
            model, call, self.patterns, loss_fn=loss_fn, target=target, route=route
        )
        self.patterns = (pattern, *(other for other in self.patterns if other is not pattern))[:KEPT_PATTERNS]
        captured = normalise(captured)
        if not captured.training and torch.is_grad_enabled() and model.training:
            raise CaptureError(
                f"{type(model).__name__} returns no loss that requires grad, so there is nothing to train: return the "
                "loss (or a dict or tuple that holds it), or pass loss_fn= and call model.train_step(args, target=y); "
                "for evaluation call model.eval() or use torch.no_grad()"
            )
        known = self.plan or self.options.given_plan
        segmented = segment(captured, cuts=compiler.cuts(known) if known else compiler.named(self.options.stages))
        self.plan = self.plan or self._plan(segmented, sum(local or (call.batch,)))
        shares = self._shares(call, local)
        plan = self.plan if captured.training else self._evaluating(shares)
        state = self.residence.state if self.residence is not None else None
        return compiler.lower(segmented, plan, state=state, check=self.options.verify)

    def _evaluating(self, shares: tuple[int, ...]) -> Plan:
        """The plan for a forward-only program; it is checked at a batch that gives every data rank a sample."""
        assert self.plan is not None
        count = self._microbatches(shares)
        return replace(self.plan, microbatches=count, batch=max(sum(shares), count * len(shares)))

    def _plan(self, segmented: Segmented, batch: int) -> Plan:
        given, inputs = self.options.given_plan, self.options.inputs
        if given is None:
            pins = self.options.pins()
            return compiler.solve(segmented, batch=batch, inputs=inputs, devices=self.size, **pins)
        compiler.check_fingerprint(given, segmented.captured)
        return given if given.inputs == inputs else compiler.predicted(segmented, replace(given, inputs=inputs))

    # Running

    def _adopt(self, model: torch.nn.Module, program: Program) -> None:
        """Cut the user's parameters to this rank's parts, from rank 0's initial values."""
        assert self.transport is not None
        self.residence = Residence(model, self.transport, program.plan.mesh, program.state, dict(program.captured.tied))

    def _run(
        self, model: torch.nn.Module, compiled: Compiled, call: Call, shares: tuple[int, ...]
    ) -> Sequence[StepResult]:
        program = compiled.program
        inputs = dict(call.tensors)
        buffers = dict(model.named_buffers(remove_duplicate=False))
        buffers |= {constant.name: constant.tensor for constant in program.captured.constants}
        if self.transport is not None:
            assert self.residence is not None
            return [run(compiled.loaded[0], self.transport, self.residence.states(), buffers, inputs, shares)]
        whole = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        mesh, state = program.plan.mesh, program.state

        def body(transport: Transport) -> StepResult:
            states = States.viewing(state, mesh, transport.rank, whole)
            return run(compiled.loaded[transport.rank], transport, states, buffers, inputs, shares)

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
                joined = _joined(out.name, out.dim if captured.training else None, results)
                outputs |= {} if joined is None else {out.name: joined}
        if self.options.inputs == "local" and self.transport is not None and not captured.training:
            part = program.plan.mesh.coordinate(self.transport.rank).get("dp", 0)
            outputs |= own_rows(captured, outputs, shares, part)
        if captured.training:
            assert captured.loss is not None
            outputs[captured.loss] = delivering(outputs[captured.loss], self._gradients(model, program, results))
        leaves = [
            item[1] if isinstance(item, tuple) else inputs[given[item]] if item in given else outputs.get(item)
            for item in captured.result
        ]
        return _torch.pytree.tree_unflatten(leaves, captured.tree)

    def _gradients(
        self, model: torch.nn.Module, program: Program, results: Sequence[StepResult]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, gradient) in what this process holds of each: parts, or whole ones where it has all ranks."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        graded = {out.target for out in program.captured.outputs if out.kind == "grad"}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for unit in program.staged.trained():
            owners = self._owners(unit, program) if self.transport is None else range(1)
            lists = [results[owner].gradients[unit.name] for owner in owners if unit.name in results[owner].gradients]
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
