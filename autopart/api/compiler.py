"""From a module to a plan and to a program: the order of processing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from autopart import capture as capturing
from autopart.api.plain import check_hooks
from autopart.capture.call import Call
from autopart.codegen.shapes import Bodies
from autopart.ir.captured import Captured
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.state import State
from autopart.passes.costs import costs
from autopart.passes.emit import emit
from autopart.passes.judge import check_sums
from autopart.passes.normalise import normalise
from autopart.passes.predict import with_memory, with_traffic
from autopart.passes.schedule import schedule as scheduled
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from autopart.passes.verify import verify
from autopart.solver.choose import choose
from autopart.solver.request import Pins

NO_TARGET = capturing.NO_TARGET


def captured_step(
    model: torch.nn.Module, call: Call, loss_fn: Callable[..., Any] | None, target: bool, route: str
) -> Captured:
    """capture and normalise."""
    return normalise(capturing.capture(model, call, loss_fn=loss_fn, target=target, route=route))


def solve(segmented: Segmented, *, batch: int | None = None, inputs: str = "global", **pins: Unpack[Pins]) -> Plan:
    """solve: the plan for a segmented step, with its predictions. `batch` is the whole one, by default the call's."""
    captured = segmented.captured
    _check_patterns(pins.get("placement"), captured)
    chosen = choose(costs(segmented), batch=batch or captured.batch, fingerprint=fingerprint(captured), **pins)
    return predicted(segmented, replace(chosen, inputs=inputs))


def predicted(segmented: Segmented, plan: Plan) -> Plan:
    """The plan with its traffic and memory counted on the graph."""
    staged = split(shard(segmented), plan)
    lowered = scheduled(staged, plan)
    return with_memory(with_traffic(plan, staged, lowered), staged, lowered)


def lower(segmented: Segmented, plan: Plan, *, state: State | None = None, check: bool = True) -> Program:
    """shard, split, schedule, emit and verify."""
    if plan.inputs == "local" and plan.mesh.degree("dp") > 1:
        check_sums(segmented.captured.inputs, segmented.captured.prologue)
    staged = split(shard(segmented), plan, state=state)
    bodies = Bodies()
    program = emit(staged, scheduled(staged, plan), plan, bodies=bodies)
    if check:
        verify(program, bodies=bodies)
    return program


def compile(
    model: torch.nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = NO_TARGET,
    batch: Mapping[str, int | None] | None = None,
    semantics: str = "exact",
    capture: str = "compile",
) -> Program:
    """The program of one training step of ``model(*args, **kwargs)`` under a plan; verified before it is returned.

    With `loss_fn`, the loss is ``loss_fn(output)``, or ``loss_fn(output, target)`` with `target`. No process group is
    needed and nothing is run. Raises CaptureError for a model that cannot be captured or split, ValueError for a plan
    of another model, VerificationError for a faulty program.
    """
    check_semantics(semantics)
    check_hooks(model, "refuse")
    call = capturing.read(model, args, kwargs, batch=batch, target=target)
    captured = captured_step(model, call, loss_fn, target is not NO_TARGET, capture)
    check_fingerprint(plan, captured)
    return lower(segment(captured, cuts=cuts(plan)), plan)


def plan(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = NO_TARGET,
    batch: Mapping[str, int | None] | None = None,
    semantics: str = "exact",
    capture: str = "compile",
    **pins: Unpack[Pins],
) -> Plan:
    """The plan for a training step of ``model(*args, **kwargs)``: what is not pinned is chosen.

    The pins are `cluster`, `devices`, `mesh`, `stages`, `placement`, `schedule`, `microbatches` and `memory`; see
    `solver.choose`. No process group and no memory for weights is needed: parameters may be fake (with
    ``capture="direct"``). Raises PlanInfeasible, with what binds and what would lift it, where nothing fits; ValueError
    or TypeError for a bad argument.
    """
    check_semantics(semantics)
    check_hooks(model, "refuse")
    call = capturing.read(model, args, kwargs, batch=batch, target=target)
    captured = captured_step(model, call, loss_fn, target is not NO_TARGET, capture)
    return solve(segment(captured, cuts=named(pins.get("stages"))), **pins)


def named(stages: int | Sequence[str] | None) -> tuple[str, ...]:
    """The module names in a `stages` pin."""
    return () if stages is None or isinstance(stages, int | str) else tuple(stages)


def cuts(plan: Plan) -> tuple[str, ...]:
    """The module names at which a plan's stages begin, but for the first."""
    return tuple(stage.segments[0].split("@")[0] for stage in plan.stages[1:])


def fingerprint(captured: Captured) -> str:
    """A hash of the parameters' names, shapes and dtypes."""
    text = "\n".join(sorted(f"{i.target} {i.value.at(1)} {i.value.dtype}" for i in captured.of_kind("parameter")))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fingerprint(plan: Plan, captured: Captured) -> None:
    """Refuse a plan that was made for another model."""
    if plan.fingerprint not in ("", fingerprint(captured)):
        raise ValueError("plan: it was made for another model (parameter names, shapes or dtypes differ); plan again")


def check_semantics(semantics: str) -> None:
    """Refuse what is not there."""
    if semantics != "exact":
        raise ValueError(f"semantics: {semantics!r} is not supported yet; only 'exact' is")


def _check_patterns(placement: object, captured: Captured) -> None:
    """Refuse a placement pattern that matches no parameter."""
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    if not isinstance(placement, Mapping):
        return
    names = [item.target for item in captured.of_kind("parameter")]
    around = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
    for pattern in placement:
        if not any(fnmatchcase(name, pattern) for name in around):
            close = get_close_matches(pattern, around, n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"placement: no parameter or module is called {pattern!r}{hint}")
