"""From a module to a plan and to a program: the order of processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Unpack

import torch

from autopart import capture as capturing
from autopart.api import chunks as chunking
from autopart.api import coupled, tensor
from autopart.api.checks import (
    check_chunked,
    check_cut,
    check_executable,
    check_fingerprint,
    check_patterns,
    fingerprint,
)
from autopart.api.options import SEMANTICS, one_of
from autopart.api.plain import check_hooks
from autopart.api.progress import shown
from autopart.capture import NO_TARGET
from autopart.capture.call import Call
from autopart.capture.guard import uncollected
from autopart.codegen.shapes import Bodies
from autopart.ir.action import Scheduled
from autopart.ir.captured import Captured
from autopart.ir.cost import PRECISIONS, optimizer_bytes
from autopart.ir.plan import INPUT, OUTPUT, Plan, around, pinned_chunks
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Staged
from autopart.ir.state import State
from autopart.passes.chunked import chunked
from autopart.passes.dealing import can_deal
from autopart.passes.emit import emit
from autopart.passes.inside import crossing, inside
from autopart.passes.judge import check_sums
from autopart.passes.normalise import normalise
from autopart.passes.overlap import check_recompute
from autopart.passes.predict import with_memory, with_traffic
from autopart.passes.recompute import with_regions
from autopart.passes.schedule import check_deferred
from autopart.passes.schedule import schedule as scheduled
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.slice_sequence import slice_sequence
from autopart.passes.slices import least_samples
from autopart.passes.split import split
from autopart.passes.split_backward import split_backward
from autopart.passes.split_input import can_split
from autopart.passes.unruled import unruled
from autopart.passes.verify import verify
from autopart.schedules.spell import splits_output
from autopart.solver.choose import choose
from autopart.solver.least import unproven
from autopart.solver.presets import Pinned
from autopart.solver.refine import reason, refine
from autopart.solver.request import FEW, Pins
from autopart.solver.variants import Costed, Degrees


def captured_step(
    model: torch.nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    target: bool,
    route: str,
    semantics: str = "exact",
    *,
    together: bool = False,
) -> Captured:
    """capture and normalise; all samples may compute `together` where there is one microbatch."""
    made = capturing.capture(model, call, loss_fn=loss_fn, target=target, route=route)
    return normalise(made, semantics=semantics, together=together)


def solve(segmented: Segmented, *, batch: int | None = None, inputs: str = "global", **pins: Unpack[Pins]) -> Plan:
    """solve: the plan for a segmented step, with its predictions. `batch` is the whole one, by default the call's."""
    captured = segmented.captured
    with coupled.told(captured):
        chosen = _best(segmented, batch or captured.batch, fitting(captured, pins, batch, inputs), inputs)
    return _counted_on(segmented, _spelled(segmented, chosen, pins.get("placement")), inputs)


def _spelled(segmented: Segmented, plan: Plan, pin: Pinned) -> Plan:
    """The plan with rules for all parameters of a segment that has one of its own, whatever module they are of."""
    pinned = set(pin) if isinstance(pin, Mapping) else set()
    own = {segment.name: segment.parameters for segment in segmented.segments if segment.name not in pinned}
    rules = [
        (name, placement)
        for pattern, placement in plan.placements
        for name in (pattern, *(target for target in own.get(pattern, ()) if pattern not in around(target)))
    ]
    return replace(plan, placements=tuple(rules))


def _counted_on(segmented: Segmented, chosen: Plan, inputs: str) -> Plan:
    noted = coupled.noted(segmented.captured, with_regions(chosen, segmented))
    return predicted(segmented, replace(noted, inputs=inputs))


def fitting(captured: Captured, pins: Pins, batch: int | None = None, inputs: str = "global") -> Pins:
    """The pins for a step. Raises ValueError where a pattern matches nothing, or its outputs rule a schedule out.

    What couples the samples of a batch has them on the mesh together.
    """
    check_patterns(pins.get("placement"), captured)
    check_chunked(pinned_chunks(pins.get("chunks")), captured)
    if captured.coupled:
        pins = coupled.together(pins, batch or captured.batch, inputs)
    if not captured.deferred:
        return pins
    check_deferred(pins.get("schedule"))
    return {**pins, "schedule": pins.get("schedule") or "gpipe"}


def _best(segmented: Segmented, batch: int, pins: Pins, inputs: str = "global") -> Plan:
    """The best plan, with tensors split inside segments where the mesh has an axis for that, or is free."""
    return choosing(segmented, batch, pins, inputs)(pins)


def costed(segmented: Segmented, batch: int, pins: Pins, inputs: str = "global") -> tuple[Sequence[Costed], Degrees]:
    """What segments cost on the mesh that is pinned, or with nothing split, and what finds that of tensor degrees."""
    asked = tensor.asked(segmented.captured, batch, pins, inputs)
    chunks = pinned_chunks(pins.get("chunks"))
    chunking.check_beside(pins)
    degrees = tensor.degrees(segmented, batch, pins, inputs)
    if asked:
        return tensor.placements(segmented, asked, chunks=chunks), degrees
    return ((None, *tensor.costs_of(segmented, chunks=chunks)),), degrees


def choosing(segmented: Segmented, batch: int, pins: Pins, inputs: str = "global") -> Callable[[Pins], Plan]:
    """What chooses a plan under these pins, or with another objective or memory; what segments cost is found once."""
    found, degrees = costed(segmented, batch, pins, inputs)
    free = pins.get("cluster") is not None and pins.get("mesh") is None and inputs == "global"
    few = (pins.get("devices") or pins["cluster"].devices) <= FEW if free and pins["cluster"] is not None else False
    widths = few and not splits_output(pins.get("schedule")) and can_deal(segmented)

    def chosen(pins: Pins) -> Plan:
        kept: Pins = {**pins, "placement": tensor.without_tensors(pins.get("placement"))}
        plan = _chosen(segmented, batch, kept, found, degrees, widths=widths)
        if plan.tensor is None:
            return plan
        return replace(plan, notes=(*plan.notes, *unruled(segmented), *unproven(segmented, plan.tensor)))

    return chosen


def _chosen(
    segmented: Segmented,
    batch: int,
    pins: Pins,
    found: Sequence[Costed] = (),
    degrees: Degrees = MappingProxyType({}),
    *,
    widths: bool = False,
) -> Plan:
    """The best plan for what segments cost as `found`, by default with nothing split inside them."""
    chunks = pinned_chunks(pins.get("chunks"))
    (decided, plain, again), *others = found or ((None, *tensor.costs_of(segmented, chunks=chunks)),)
    captured = segmented.captured
    return choose(
        plain,
        recomputed=again,
        batch=batch,
        forwards_first=captured.deferred,
        fingerprint=fingerprint(captured),
        tensor=decided,
        looks_up=segmented.lookup,
        optimizer_ratio=optimizer_ratio(captured, pins.get("precision")),
        others=others,
        degrees=degrees,
        chunked={} if decided is not None else chunking.ways_out(segmented, pins),
        families=True,
        widths=widths,
        **pins,
    )


def optimizer_ratio(captured: Captured, precision: str | None) -> float:
    """Bytes of AdamW's state per byte of trainable parameter. Raises ValueError for a precision that is not known."""
    one_of("precision", precision, PRECISIONS)
    trained = [item.value for item in captured.of_kind("parameter") if item.requires_grad]
    sizes = [(value.nbytes(1), value.dtype.itemsize) for value in trained]
    held = sum(optimizer_bytes(nbytes, itemsize, precision) for nbytes, itemsize in sizes)
    return held / sum(nbytes for nbytes, _ in sizes) if held else 2.0


@uncollected()
def planned(captured: Captured, *, batch: int | None = None, inputs: str = "global", **pins: Unpack[Pins]) -> Plan:
    """segment and solve; where whole segments make uneven stages and no names are pinned, with finer cuts.

    Not where tensors are split inside segments: every other cut would be another problem to solve there.
    """
    wanted = named(pins.get("stages"))
    if splits_output(pins.get("schedule")):
        return _in_parts(captured, wanted, batch, inputs, pins)
    whole = solve(segment(captured, cuts=wanted), batch=batch, inputs=inputs, **pins)
    objective = pins.pop("objective", "time")
    if wanted or len(whole.stages) == 1 or whole.tensor is not None or objective != "time":
        return whole
    pins.pop("time_limit", None)
    pins.pop("offload", None)  # where states are is chosen with the placement
    kept: Pins = {
        **pins,
        "mesh": whole.mesh,
        "placement": dict(whole.placements),
        "schedule": whole.schedule,
        "microbatches": whole.microbatches,
    }
    most = crossing(captured, whole)
    cuts = refine(
        whole,
        parts=lambda cuts, plan: inside(captured, cuts, plan, most=most),
        choose=lambda cuts: _chosen(segment(captured, cuts=cuts), whole.batch, kept),
    )
    if not cuts:
        return whole
    finer = solve(segment(captured, cuts=cuts), batch=batch, inputs=inputs, **kept)
    # Mesh, placement and microbatches, and a schedule that was searched for, were chosen for the whole segments.
    where_from = takewhile(lambda note: not note.startswith("recompute "), whole.notes)
    notes = (*where_from, *finer.notes[3:], reason(whole, finer))
    return replace(finer, notes=notes, alternatives=whole.alternatives, took=whole.took + finer.took)


def _in_parts(captured: Captured, wanted: Sequence[str], batch: int | None, inputs: str, pins: Pins) -> Plan:
    """The plan with the output layer split over the pipeline ranks, and the input embedding too where it can be."""
    segmented = segment(captured, cuts=(*wanted, OUTPUT, INPUT))
    chosen = _best(segmented, batch or captured.batch, fitting(captured, pins, batch, inputs))
    if chosen.lookup and not can_split(segmented, chosen.mesh.degree("pp"), chosen.stages[0].segments):
        return solve(segment(captured, cuts=(*wanted, OUTPUT)), batch=batch, inputs=inputs, **pins)
    return _counted_on(segmented, chosen, inputs)


def predicted(segmented: Segmented, plan: Plan) -> Plan:
    """The plan with its traffic and memory counted on the graph."""
    _check_slices(segmented, plan)
    return _counted(*_staged(segmented, plan), plan)


def predicted_of(program: Program, shares: Sequence[int]) -> Plan:
    """The plan of a program, training or not, with the traffic and memory of a step on these samples a data rank."""
    return _counted(program.places, scheduled(program.staged, program.plan), program.plan, shares)


def _counted(places: Sequence[Staged], lowered: Scheduled, plan: Plan, shares: Sequence[int] | None = None) -> Plan:
    staged, *others = places
    return with_memory(with_traffic(plan, staged, lowered, shares, others=others), staged, lowered, shares)


def lower(
    segmented: Segmented, plan: Plan, *, state: State | None = None, check: bool = True, fits: bool | None = None
) -> Program:
    """recompute (and what is in chunks), shard, split, schedule, split_backward, emit and verify.

    `fits` says whether the calls that the program is for have the microbatches that the plan is for (`Plan.fits`), by
    default whether its own batch has.
    """
    check_executable(plan)
    _check_slices(segmented, plan)
    if plan.inputs == "local" and plan.mesh.parts > 1:
        check_sums(segmented.captured.inputs, segmented.captured.prologue)
    (staged, *others), lowered = _staged(segmented, plan, state, fits)
    bodies = Bodies()
    with uncollected():
        program = emit(staged, lowered, plan, others=others, bodies=bodies)
        if check:
            verify(program, bodies=bodies)
    return program


def _staged(
    segmented: Segmented, plan: Plan, state: State | None = None, fits: bool | None = None
) -> tuple[tuple[Staged, ...], Scheduled]:
    """slice_sequence, recompute, shard, split, schedule and split_backward.

    For every place where tensors are split inside segments.
    """
    check_recompute(segmented, plan)
    sliced = slice_sequence(segmented, plan.slices, plan.lengths)
    sharded = _sharded(sliced, plan, state, plan.fits() if fits is None else fits)
    made = [split(each, plan, state=state) for each in sharded]
    lowered = scheduled(made[0], plan)
    return tuple(split_backward(each, lowered.schedule, samples=plan.largest) for each in made), lowered


def _sharded(segmented: Segmented, plan: Plan, state: State | None, fits: bool) -> tuple[Sharded, ...]:
    """recompute and shard. What a place runs is a part of the whole step, which is what is judged over the batch."""
    if plan.tensor is None:
        again = plan.recompute
        if plan.barriers:  # an output layer in parts keeps its logits: to make them again takes as long as the rest
            again = tuple(name for name in again if name != plan.stages[-1].segments[-1])
        return (shard(chunked(segmented, plan.chunks, again)),)
    whole, here = shard(segmented), tensor.places(segmented, plan.tensor, state, fits=fits)
    return tuple(whole.of(chunked(each, plan.chunks, plan.recompute, whole=segmented)) for each in here)


def built(captured: Captured, **pins: Unpack[Pins]) -> Program:
    """The program under the plan that the pins leave: `planned`, then `lower`."""
    plan = planned(captured, **pins)
    return lower(segment(captured, cuts=plan.cuts), plan)


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

    With `loss_fn`, the loss is ``loss_fn(output)``, or ``loss_fn(output, target)`` with `target`. `semantics` is
    "exact" (the whole batch on one device) or "accumulate" (what couples samples sees a microbatch of one data rank, as
    in gradient accumulation). No process group is needed and nothing is run. Raises CaptureError for a model that
    cannot be captured or split, ValueError for a plan of another model or one that cuts the batch too small,
    VerificationError for a faulty program.
    """
    captured = sampled(model, args, kwargs, loss_fn, target, batch, semantics, capture, microbatches=plan.microbatches)
    check_fingerprint(plan, captured)
    coupled.check(captured, plan)
    return lower(segment(captured, cuts=plan.cuts), plan)


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

    The pins are `cluster`, `devices`, `mesh`, `stages`, `placement`, `schedule`, `microbatches`, `memory`, `recompute`
    and `chunks`. With ``offload=True`` the optimizer, or optimizer and gradients, may be on the hosts: to know what
    that would hold and take, as programs do not do it yet. ``precision="mixed"`` counts 32-bit copies and moments of
    16-bit parameters; `objective` is "time", "memory" or "throughput_per_cost", and after `time_limit` seconds of
    search the best plan so far is returned; see `solver.choose`. A free mesh may have an axis ``tp`` where a `cluster`
    is given. A search of more than a second shows its progress on a terminal.
    No process group and no memory for weights is needed: parameters may be fake (with ``capture="direct"``). Raises
    PlanInfeasible, with what binds and what would lift it, where nothing fits; ValueError or TypeError for a bad
    argument.
    """
    captured = sampled(
        model, args, kwargs, loss_fn, target, batch, semantics, capture, microbatches=pins.get("microbatches")
    )
    with shown("planning") as progress:
        pins.setdefault("progress", progress)
        return planned(captured, **pins)


def sampled(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = NO_TARGET,
    batch: Mapping[str, int | None] | None = None,
    semantics: str = "exact",
    capture: str = "compile",
    *,
    microbatches: int | None = None,
) -> Captured:
    """The step of a sample call, as `plan` and `compile` read it, for so many `microbatches` where that is known."""
    one_of("semantics", semantics, SEMANTICS)
    check_hooks(model, "refuse")
    call = capturing.read(model, args, kwargs, batch=batch, target=target)
    together = coupled.may(microbatches)
    return captured_step(model, call, loss_fn, target is not NO_TARGET, capture, semantics, together=together)


def named(stages: int | Sequence[str] | None) -> tuple[str, ...]:
    """The module names in a `stages` pin."""
    return () if stages is None or isinstance(stages, int | str) else tuple(stages)


def _check_slices(segmented: Segmented, plan: Plan) -> None:
    if segmented.captured.training:
        check_cut(plan.mesh.dealt(plan.batch), plan, least_samples(segmented.captured))
