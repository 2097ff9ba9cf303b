"""The session behind a parallelised module: which world it runs in, its plan, its programs, and one call of it."""

from __future__ import annotations

import copy
import hashlib
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart import _torch
from autopart import capture as capturing
from autopart.api import compiler
from autopart.api.options import Options
from autopart.api.plain import as_plain, check_hooks, constants
from autopart.capture.call import Call
from autopart.errors import CaptureError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.state import Unit
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.runtime import distributed
from autopart.runtime.autograd import delivering
from autopart.runtime.construction import Construction
from autopart.runtime.executor import Loaded, StepResult, run
from autopart.runtime.local import current_transport, run_ranks
from autopart.runtime.materialise import Materials, make_whole, on_meta
from autopart.runtime.parts import Holder, Whole, agreed
from autopart.runtime.report import Report
from autopart.runtime.residence import Residence
from autopart.runtime.states import States
from autopart.runtime.transport import Transport
from autopart.runtime.weights import Files

NO_TARGET = capturing.NO_TARGET
CACHED_PROGRAMS = 8


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
        self.construction: Construction | None = None
        self.files: Files | None = None  # a checkpoint that parameters on meta are to be read from
        self.at_placement: list[Callable[[], None]] = []  # what waits for parameters to become parts
        self.warned = False
        self.programs: OrderedDict[Any, Compiled] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copy of the module: the same world, plan and programs, state of its own."""
        made = Session.__new__(Session)
        made.__dict__.update(self.__dict__)
        made.programs, made.at_placement = self.programs.copy(), []
        made.construction = self.construction.copied(memo) if self.construction is not None else None
        made.residence = copy.deepcopy(self.residence, memo)
        return made

    def call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """One call of the module: the whole planned step when it trains, a forward otherwise."""
        check_hooks(model, self.options.hooks)
        self.join()
        if self.residence is not None:
            self.residence.check(model)
        materials = self._materials(model)
        moved_args, moved_kwargs, moved_target = self._moved((args, dict(kwargs), target))
        with as_plain(model, self.plain):
            call = capturing.read(model, moved_args, moved_kwargs, batch=self.options.batch, target=moved_target)
            self._agree(model, call)
            compiled = self._compiled(model, call, target is not NO_TARGET)
        if self.transport is not None and self.residence is None:
            self._adopt(model, compiled.program)
        if materials is not None:
            self._materialise(model, materials, next(iter(call.tensors))[1].device)
        while self.at_placement:
            self.at_placement.pop(0)()
        results = self._run(model, compiled, call)
        self.report = Report(tuple(result.report for result in results))
        return self._result(model, compiled.program, call, results)

    # The world

    def join(self) -> None:
        """Find the world: a local rank's, a process group or torchrun's, else all ranks in this process."""
        if self.joined:
            return
        self.transport = current_transport()
        if self.transport is None and distributed.launched():
            self.transport = distributed.join()
        self.options.world_size(self.transport.size if self.transport is not None else None)
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

    def _agree(self, model: torch.nn.Module, call: Call) -> None:
        """Raise ValueError on every rank if the ranks do not make the same call."""
        if self.transport is None or self.transport.size == 1:
            return
        shapes = hashlib.sha256(repr(self._key(model, call)).encode()).hexdigest()
        mine = {
            "inputs' shapes, dtypes or values of other arguments, or the model's modes": shapes,
            "batch size": call.batch,
        }
        mine["inputs' contents"] = tuple(_checksum(tensor) for _, tensor in call.tensors)
        every = self.transport.all_gather_object(mine, tuple(range(self.transport.size)))
        for what in mine:
            odd = [rank for rank, other in enumerate(every) if other[what] != every[0][what]]
            if odd:
                raise ValueError(
                    f"the ranks make different calls: the {what} of rank {odd[0]} differ from rank 0's; every rank "
                    "passes the same whole batch (seed the loader alike on every rank, without a distributed sampler)"
                )

    # Plan and programs

    def _key(self, model: torch.nn.Module, call: Call) -> Any:
        modes = tuple(part.training for part in model.modules())
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
        return call.key(), torch.is_grad_enabled(), modes, trained, casts

    def _compiled(self, model: torch.nn.Module, call: Call, target: bool) -> Compiled:
        made_of = (self._key(model, call), constants(model, shapes=self.transport is None), target)
        key = (made_of, self._microbatches(call) if self.plan is not None else None)
        if key in self.programs:
            self.programs.move_to_end(key)
        else:
            if self.residence is not None:
                model = self.residence.whole_copy(model)
            compiled = self._compile(model, call, target)
            key = (made_of, self._microbatches(call))
            self._keep(key, compiled)
        compiled = self.programs[key]
        training = compiled.program.captured.training
        if training and call.batch < self._cut():
            raise ValueError(
                f"batch: {call.batch} samples cannot be cut into {self._cut()} pieces (dp x microbatches of the plan); "
                "pass more samples (a loader's last batch may be small: drop_last=True), or pin fewer microbatches"
            )
        if training:
            self.program = compiled.program
        return compiled

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

    def _cut(self) -> int:
        assert self.plan is not None
        return self.plan.mesh.degree("dp") * self.plan.microbatches

    def _microbatches(self, call: Call) -> int:
        """A forward-only program of a small batch has fewer microbatches than the plan; a training one never has."""
        assert self.plan is not None
        degree = self.plan.mesh.degree("dp")
        if call.batch < degree:
            raise ValueError(
                f"batch: {call.batch} samples cannot be cut over dp={degree} data ranks; pass at least {degree} samples"
            )
        return min(self.plan.microbatches, call.batch // degree)

    def _compile(self, model: torch.nn.Module, call: Call, target: bool) -> Compiled:
        program = self._given(model, call) or self._lowered(model, call, target)
        device = self.transport.device if self.transport is not None else next(iter(call.tensors))[1].device
        ranks = range(self.size) if self.transport is None else (self.transport.rank,)
        return Compiled(program, tuple(Loaded.of(program, rank, device) for rank in ranks))

    def _given(self, model: torch.nn.Module, call: Call) -> Program | None:
        """The pinned program, verified, if it is one for this call: same shapes, dtypes and other arguments."""
        program = self.options.given_program
        if program is None or not torch.is_grad_enabled() or program.captured.call != call.key():
            return None
        trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        if any(item.requires_grad != trained.get(item.target) for item in program.captured.of_kind("parameter")):
            return None
        if self.options.verify:
            verify(program)
        self.plan = program.plan
        return program

    def _lowered(self, model: torch.nn.Module, call: Call, target: bool) -> Program:
        """Capture the call and compile it under the plan, which is solved for at the first call."""
        loss_fn = self.options.loss_fn if target or not _takes_two(self.options.loss_fn) else None
        captured = compiler.captured_step(model, call, loss_fn, target, self.options.capture)
        if not captured.training and torch.is_grad_enabled() and model.training:
            raise CaptureError(
                f"{type(model).__name__} returns no loss that requires grad, so there is nothing to train: return the "
                "loss (or a dict or tuple that holds it), or pass loss_fn= and call model.train_step(args, target=y); "
                "for evaluation call model.eval() or use torch.no_grad()"
            )
        known = self.plan or self.options.given_plan
        segmented = segment(captured, cuts=compiler.cuts(known) if known else compiler.named(self.options.stages))
        self.plan = self.plan or self._plan(segmented)
        plan = (
            self.plan
            if captured.training
            else replace(self.plan, microbatches=self._microbatches(call), batch=call.batch)
        )
        state = self.residence.state if self.residence is not None else None
        return compiler.lower(segmented, plan, state=state, check=self.options.verify)

    def _plan(self, segmented: Segmented) -> Plan:
        given = self.options.given_plan
        if given is None:
            return compiler.solve(segmented, devices=self.size, **self.options.pins())
        compiler.check_fingerprint(given, segmented.captured)
        return given

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
        """Cut the user's parameters to this rank's parts, from rank 0's initial values."""
        assert self.transport is not None
        self.residence = Residence(model, self.transport, program.plan.mesh, program.state, dict(program.captured.tied))

    def _run(self, model: torch.nn.Module, compiled: Compiled, call: Call) -> Sequence[StepResult]:
        program = compiled.program
        inputs = dict(call.tensors)
        buffers = dict(model.named_buffers(remove_duplicate=False))
        buffers |= {constant.name: constant.tensor for constant in program.captured.constants}
        if self.transport is not None:
            assert self.residence is not None
            return [run(compiled.loaded[0], self.transport, self.residence.states(), buffers, inputs, call.batch)]
        whole = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        mesh, state = program.plan.mesh, program.state

        def body(transport: Transport) -> StepResult:
            states = States.viewing(state, mesh, transport.rank, whole)
            return run(compiled.loaded[transport.rank], transport, states, buffers, inputs, call.batch)

        return run_ranks(mesh.size, body, device=next(iter(inputs.values())).device)

    def _result(self, model: torch.nn.Module, program: Program, call: Call, results: Sequence[StepResult]) -> Any:
        captured = program.captured
        outputs = dict(results[0].outputs)
        given = {item.value.name: item.target for item in captured.of_kind("input")}
        inputs = dict(call.tensors)
        for out in captured.outputs:
            if out.kind == "output" and out.name not in given and self.transport is None:
                joined = _joined(out.name, out.dim if captured.training else None, results)
                outputs |= {} if joined is None else {out.name: joined}
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
            for parameter, pieces in zip(unit.parameters, zip(*lists, strict=True), strict=False):
                found = [piece for piece in pieces if piece is not None]
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


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of at most 64 Ki elements spread over a tensor."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 65536)
    sample = flat[::step].contiguous().cpu()
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes()) if sample.numel() else 0


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
