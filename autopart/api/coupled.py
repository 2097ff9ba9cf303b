"""Steps that couple the samples of the batch, exactly: one microbatch, which ``dp`` splits inside segments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.plan import Plan
from autopart.solver.presets import Pinned
from autopart.solver.request import Pins
from autopart.solver.resolve import pinned_mesh


def may(microbatches: int | None) -> bool:
    """Whether samples may compute together, given the pinned number of microbatches."""
    return microbatches in (None, 1)


def on(plan: Plan) -> bool:
    """Whether a plan has the samples of each batch together."""
    return plan.microbatches == 1 and plan.mesh.parts == 1


def check(captured: Captured, plan: Plan) -> None:
    """Refuse a plan that cuts the batch for a step that couples its samples. Raises ValueError."""
    if captured.coupled and not on(plan):
        raise ValueError(
            f"plan: it cuts the batch into {plan.mesh.parts * plan.microbatches} pieces, and this call couples its "
            f"samples; make the plan for a call like this one, with one microbatch. What couples them: "
            f"{captured.coupled}"
        )


def together(pins: Pins, batch: int, inputs: str) -> Pins:
    """The pins under which all samples compute together: one microbatch, and a mesh whose ``dp`` is inside segments.

    On a free mesh all devices are on ``dp``, beside the pipeline ranks that the pinned stages take. Raises ValueError
    where each rank passes its own samples, ``dp`` does not divide the batch, or pipeline ranks differ in width.
    """
    mesh = pinned_mesh(pins.get("mesh")) or _mesh(pins)
    if mesh.widths:
        mesh = replace(mesh, coupled=True)  # which refuses it
    size = mesh.degree("dp")
    if size == 1:
        return {**pins, "microbatches": 1}
    if inputs == "local":
        raise ValueError(
            "inputs: the call couples the samples of the batch, which is to be known on every rank then; pass the "
            "whole batch on each, inputs='global', or let each data rank compute on its own, semantics=\"accumulate\""
        )
    if batch % size:
        raise ValueError(
            f"batch: the call couples its {batch} samples, of which dp={size} is to have equal parts; make the plan "
            f"for a batch of {batch - batch % size or size} (the loader's drop_last=True), or pin another mesh"
        )
    return {**pins, "mesh": replace(mesh, coupled=True), "microbatches": 1}


def _mesh(pins: Pins) -> Mesh:
    cluster, stages = pins.get("cluster"), pins.get("stages")
    devices = pins.get("devices") or (cluster.devices if cluster is not None else 1)
    count = stages if isinstance(stages, int) else len(stages or ()) + 1
    if devices % count:
        raise ValueError(f"stages: {devices} devices cannot be divided into {count} equal stages; pin a mesh")
    return Mesh.of({"pp": count, "dp": devices // count} if count > 1 else {"dp": devices})


def over(plan: Plan, pins: Pins) -> Pins:
    """The pins of a plan for a call that couples samples, where parameters lie as another plan has them."""
    tensors: dict[str, dict[str, object]] = {}
    for each in plan.axes_inside:
        for target, how in each.parameters:
            tensors.setdefault(target, {})[each.axis] = how
    placement: Pinned = {**tensors, **dict(plan.placements)}
    return {**pins, "mesh": plan.mesh, "stages": plan.cuts or None, "placement": placement}


def noted(captured: Captured, plan: Plan) -> Plan:
    """The plan, saying why it has one microbatch, and what its ``dp`` does."""
    if not captured.coupled:
        return plan
    why = f"microbatches 1: {_first_line(captured)}"
    notes = tuple(why if note.startswith("microbatches 1:") else note for note in plan.notes)
    more = ("dp splits samples inside layers: they compute together",) if plan.mesh.coupled else ()
    return replace(plan, notes=(*notes, *more))


@contextlib.contextmanager
def told(captured: Captured) -> Iterator[None]:
    """Errors of a search say why there is one microbatch."""
    try:
        yield
    except Exception as error:
        if captured.coupled:
            error.add_note(f"There is one microbatch, as {_first_line(captured)}.")
        raise


def _first_line(captured: Captured) -> str:
    return captured.coupled.partition("\n")[0].rstrip(".")
