"""The programs of a parallelised module: one for each kind of call, all under one plan; the latest are kept."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart import capture as capturing
from autopart.api import compiler, coupled, loop_plans
from autopart.api.boundary import check_local
from autopart.api.checks import check_cut, check_fingerprint
from autopart.api.options import Options
from autopart.api.plain import constants
from autopart.api.ranks import Ranks
from autopart.capture import Patterns
from autopart.capture.call import Call
from autopart.ir import plan_text
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.normalise import normalise
from autopart.passes.schedule import check_deferred, forwards_first
from autopart.passes.segment import segment
from autopart.passes.slices import least_samples
from autopart.passes.verify import verify
from autopart.runtime.executor import Loaded
from autopart.runtime.residence import Residence
from autopart.schedules.stream import fits, overlaps, spelled

CACHED_PROGRAMS = 8
KEPT_PATTERNS = 4  # of training and evaluation, with and without optional arguments


Named = tuple[tuple[str, Hashable], ...]
"""What a program is made for, part by part, by what a person calls it."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a program is made for: the kind of call, equal on all ranks, and what the module's attributes are."""

    kind: Named
    constants: Named
    target: bool

    def named(self) -> Named:
        """All parts, by what a person calls them."""
        return *self.kind, *((f"the attribute {name}", value) for name, value in self.constants)


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a module, with the modes that it is made in.

    `target` says that `loss_fn` gets one; `samples` are those of each data rank, where each passes its own.
    """

    model: torch.nn.Module
    call: Call
    target: bool
    samples: tuple[int, ...] | None = None

    def kind(self) -> Named:
        """What the call and the modes of the moment make of a program, equal on all ranks."""
        modes = [(f"the mode of module {name!r}", part.training) for name, part in self.model.named_modules()]
        trained = [(f"requires_grad of parameter {name}", p.requires_grad) for name, p in self.model.named_parameters()]
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
        grad = torch.is_grad_enabled()
        return *self.call.named_key(), ("the use of no_grad()", grad), *modes, *trained, ("the autocast", casts)

    def made(self, ranks: Ranks) -> Made:
        """What a program for this call is made for."""
        return Made(self.kind(), constants(self.model, shapes=ranks.transport is None), self.target)

    def shares(self, plan: Plan) -> tuple[int, ...]:
        """The samples of each data rank: its own, or its part of the whole batch."""
        return self.samples or plan.mesh.dealt(self.call.batch)

    def microbatches(self, plan: Plan) -> int:
        """A forward-only program of a small batch has fewer microbatches than the plan; a training one never has.

        Where a batch has fewer samples than there are data ranks, some of these run on none.
        """
        return max(1, min(plan.microbatches, *self.shares(plan)))

    def fits(self, plan: Plan) -> bool:
        """Whether the microbatches of this call are those that the plan's places can have some samples of each."""
        return replace(plan, microbatches=self.microbatches(plan)).fits(self.shares(plan))


_Key = tuple[Made, int | None, bool]
"""What a program is made for, its microbatches, and whether they fit the plan's places (`Plan.fits`)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program, the texts of the ranks here, compiled, by rank, and the samples that each slice needs."""

    program: Program
    loaded: dict[int, Loaded]
    least: int


class Programs:
    """The plan of a module, once there is one, and the programs that were compiled for its calls."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plan: Plan | None = None
        self.training: Program | None = None  # that of the last training call
        self._patterns: tuple[Patterns, ...] = ()
        self._kept: OrderedDict[_Key, Compiled] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._kept)

    def copied(self) -> Programs:
        """Those of a copy of the module."""
        made = copy.copy(self)
        made._kept = self._kept.copy()
        return made

    @contextlib.contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Where an error refuses the call, keep neither the plan nor the program that were made for it."""
        plan, training, kept = self.plan, self.training, self._kept.copy()
        try:
            yield
        except Exception:
            self.plan, self.training, self._kept = plan, training, kept
            raise

    def knows(self, made: Made) -> bool:
        """Whether a program for such a call is kept."""
        return any(known == made for known, *_ in self._kept)

    def program_for(self, asked: Asked, made: Made, ranks: Ranks, residence: Residence | None) -> Compiled:
        """The program for a call, compiled unless it is kept; `made` is what it is made for.

        Raises ValueError where the call has too few samples for the plan, and what compiling raises.
        """
        key = self._key(made, asked)
        if key in self._kept:
            self._kept.move_to_end(key)
            compiled = self._kept[key]
        else:
            compiled = self._compile(asked, ranks, residence)
            self._keep(self._key(made, asked), compiled, type(asked.model).__name__)
        if compiled.program.captured.training:
            plan = compiled.program.plan
            check_cut(asked.shares(plan), plan, compiled.least)
            self.training = compiled.program
        return compiled

    def overlapping(self, asked: Asked, ranks: Ranks, residence: Residence | None, schedule: str) -> Compiled:
        """The program of a loop whose steps overlap under an asynchronous schedule, for calls like this one.

        The state is where the module's plan puts it. Without a plan yet, one is made: a stage a rank, parameters whole.
        A pinned program of such a loop is verified and run. Raises ValueError where the schedule cannot be, and what
        compiling raises.
        """
        if residence is not None:
            asked = replace(asked, model=residence.whole_copy(asked.model))
        pinned = self.options.given_plan
        known = self.plan or pinned
        mesh = known.mesh if known is not None else self.options.given_mesh() or Mesh.of({"pp": ranks.size})
        if mesh.widths:
            raise ValueError(
                f"mesh: {mesh} has pipeline ranks of unlike width, which loops whose steps overlap cannot be on yet; "
                "pin pp and dp as numbers, or train with an ordinary loop"
            )
        text, batch = spelled(schedule, mesh.degree("pp"), self.options.microbatches)
        if pinned is not None and overlaps(pinned.schedule) and not fits(pinned, text, batch):
            told = plan_text.schedule(pinned.schedule)
            raise ValueError(f"schedule: {text!r} is asked for, but the plan is of {told!r}; name that")
        program = self._given(asked, loop=True) or self._overlapped(asked, ranks, residence, mesh, text, batch)
        compiled = self._compiled(program, asked, ranks)
        check_cut(asked.shares(program.plan), program.plan, compiled.least)
        return compiled

    def _overlapped(
        self, asked: Asked, ranks: Ranks, residence: Residence | None, mesh: Mesh, schedule: str, batch: int
    ) -> Program:
        captured = self._captured(asked, together=False)
        if self.plan is None and self.options.given_plan is not None:
            self.plan = self._planned(captured, asked.call.batch, ranks.size)
        pins = self.options.pins(ranks.size)
        if self.plan is None:
            size = asked.call.batch
            self.plan = loop_plans.of_state(captured, schedule, mesh, batch, batch=size, pins=pins)
        segmented = segment(captured, cuts=self.plan.cuts)
        state = residence.state if residence is not None else None
        plan = loop_plans.of_loop(segmented, self.plan, schedule, batch, pins=pins, state=state)
        return compiler.lower(segmented, plan, state=state, check=self.options.verify)

    def _key(self, made: Made, asked: Asked) -> _Key:
        """What the program of a call is kept under: a training one has the plan's microbatches, whatever the batch."""
        if self.plan is None:
            return made, None, True
        fits = asked.fits(self.plan)
        training = self._kept.get((made, self.plan.microbatches, fits))
        if training is not None and training.program.captured.training:
            return made, self.plan.microbatches, fits
        return made, asked.microbatches(self.plan), fits

    def _keep(self, key: _Key, compiled: Compiled, name: str) -> None:
        """Keep a new program; of too many, forget that used longest ago, and say once what keeps changing."""
        self._kept[key] = compiled
        if len(self._kept) <= CACHED_PROGRAMS:
            return
        self._kept.popitem(last=False)
        if not self._warned:
            self._warned = True
            (before, *_), (after, *_) = list(self._kept)[-2:]
            names = [each for each, _ in sorted(set(after.constants) - set(before.constants), key=str)]
            warnings.warn(
                f"{len(self._kept) + 1} programs were compiled for {name}, as "
                f"{', '.join(names) or 'the shapes or values of its arguments'} keeps changing; each takes a while",
                stacklevel=2,
            )

    def _compile(self, asked: Asked, ranks: Ranks, residence: Residence | None) -> Compiled:
        if residence is not None:
            asked = replace(asked, model=residence.whole_copy(asked.model))
        return self._compiled(self._given(asked) or self._lowered(asked, ranks, residence), asked, ranks)

    def _compiled(self, program: Program, asked: Asked, ranks: Ranks) -> Compiled:
        """A program with the texts of the ranks here."""
        device = ranks.transport.device if ranks.transport is not None else asked.call.device
        loaded = {rank: Loaded.of(program, rank, device) for rank in ranks.here}
        return Compiled(program, loaded, least_samples(program.captured))

    def _given(self, asked: Asked, *, loop: bool = False) -> Program | None:
        """The pinned program, verified, if it is one for this call: same shapes, dtypes and other arguments.

        With `loop`, if it is of a loop whose steps overlap, else of a step.
        """
        program = self.options.given_program
        if program is None or overlaps(program.plan.schedule) != loop:
            return None
        if not torch.is_grad_enabled() or program.captured.call != asked.call.text or not asked.fits(program.plan):
            return None
        trained = {name: p.requires_grad for name, p in asked.model.named_parameters(remove_duplicate=False)}
        outputs = [out for out in program.captured.outputs if out.kind == "output"]
        if self.options.outputs == "all" and not all(out.everywhere for out in outputs):
            return None
        if any(item.requires_grad != trained.get(item.target) for item in program.captured.of_kind("parameter")):
            return None
        if self.options.verify:
            verify(program)
        self.plan = program.plan
        return program

    def _lowered(self, asked: Asked, ranks: Ranks, residence: Residence | None) -> Program:
        """Capture the call and compile it under the plan, which is solved for at the first call."""
        captured, batch = self._captured(asked), sum(asked.samples or (asked.call.batch,))
        if self.plan is None:
            self.plan = self._planned(captured, batch, ranks.size)
        elif captured.coupled and not coupled.on(self.plan):  # it was made for a call that couples nothing
            self.plan = self._planned(captured, batch, ranks.size, before=self.plan)
        plan = self.plan
        if captured.training:
            if overlaps(plan.schedule):
                told = "the schedule that it fills" if plan.front else repr(plan.schedule)
                raise ValueError(
                    f"plan: it is of a loop whose steps overlap (schedule {plan_text.schedule(plan.schedule)}); train "
                    f"with autopart.train_loop(model, optimizer, batches, schedule={told})"
                )
            check_cut(asked.shares(plan), plan, least_samples(captured))
        segmented = segment(captured, cuts=plan.cuts)
        if captured.deferred:
            plan = forwards_first(plan)
        elif not captured.training:  # checked at a batch that gives every data rank a sample
            shares, count = asked.shares(plan), asked.microbatches(plan)
            plan = replace(plan, microbatches=count, batch=max(sum(shares), plan.mesh.least(count)))
        state = residence.state if residence is not None else None
        return compiler.lower(segmented, plan, state=state, check=self.options.verify, fits=asked.fits(plan))

    def _captured(self, asked: Asked, *, together: bool = True) -> Captured:
        """capture and normalise, as the options say; refuses what they rule out.

        With `together`, the samples of a batch may be coupled where there is one microbatch.
        """
        options, pinned = self.options, self.options.given_plan
        loss_fn = options.loss_fn if asked.target or not _takes_two(options.loss_fn) else None
        captured, pattern = capturing.capture_again(
            asked.model, asked.call, self._patterns, loss_fn=loss_fn, target=asked.target, route=options.capture
        )
        self._patterns = (pattern, *(other for other in self._patterns if other is not pattern))[:KEPT_PATTERNS]
        together = together and coupled.may(options.microbatches if pinned is None else pinned.microbatches)
        captured = normalise(captured, semantics=options.meaning, outputs=options.outputs, together=together)
        if options.inputs == "local":
            check_local(captured)
        if captured.deferred:
            check_deferred(pinned.schedule if pinned is not None else options.schedule)
        return captured

    def _planned(self, captured: Captured, batch: int, devices: int, before: Plan | None = None) -> Plan:
        """The plan that is pinned, or that the solver finds for a whole batch of so many samples.

        Where parameters lie as the plan `before` says, it is with these places for them.
        """
        given, inputs = self.options.given_plan, self.options.inputs
        if given is None:
            pins = self.options.pins(devices)
            pins = coupled.over(before, pins) if before is not None else pins
            return compiler.planned(captured, batch=batch, inputs=inputs, **pins)
        check_fingerprint(given, captured)
        coupled.check(captured, given)
        if given.inputs == inputs:
            return given
        return compiler.predicted(segment(captured, cuts=given.cuts), replace(given, inputs=inputs))


def _takes_two(loss_fn: Any) -> bool:
    """Whether a loss function needs a target beside the output."""
    if loss_fn is None:
        return True
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return True
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) > 1
