"""What a step must be for the steps of a loop to overlap: stages where it has them, whole parameters, no buffers."""

from __future__ import annotations

from collections.abc import Iterator

from autopart.errors import CaptureError
from autopart.ir.action import Weights
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segmented
from autopart.ir.staged import Staged
from autopart.passes.recompute import recompute
from autopart.schedules.build import build
from autopart.schedules.filling import Filled
from autopart.schedules.spell import is_table
from autopart.schedules.stream import overlaps, stream_of


def check_loop(staged: Staged, plan: Plan) -> None:
    """Raise CaptureError for a step of which a loop cannot be made, naming what is in the way."""
    fault = next(_faults(staged, plan), None)
    if fault is not None:
        raise CaptureError(f"train_loop: {fault}")


def _faults(staged: Staged, plan: Plan) -> Iterator[str]:
    captured, state, degree = staged.segmented.captured, staged.state, plan.mesh.degree("dp")
    found = stream_of(plan)
    place = found.place if isinstance(found, Filled) else tuple(range(plan.mesh.degree("pp")))
    if plan.mirrors or plan.places(1, helpers=len(plan.helpers)) != place:
        yield (
            f"the plan has its {len(plan.place)} stages on the pipeline ranks {plan.place}, but a loop needs one stage "
            "on each, in order; plan with schedule='1f1b', or use a model that has not been called yet"
        )
    if captured.deferred:
        yield (
            "the module returns no loss that requires grad, and the program takes the optimizer's steps; return the "
            "loss from forward, or pass loss_fn="
        )
    if plan.tensor is not None:
        axes = " and ".join(each.axis for each in plan.axes_inside)
        yield f"tensors inside layers are split on {axes}, which its programs cannot do; use pp and dp"
    for out in captured.outputs:
        if out.kind == "loss" and not out.partial:
            yield "the loss is no sum over the samples of a batch; make it depend on them"
        if out.kind == "input_grad":
            yield f"the input {out.target} requires grad, which nobody could use: the optimizer has stepped; detach it"
    for unit in state.units:
        first = unit.parameters[0].target
        if unit.held_in_parts(degree) or unit.reduced_at_once(degree):
            yield f"the parameter {first} is placed in parts; placement='ddp' keeps it whole on every rank of its stage"
        if len(unit.columns) > 1 and unit.trainable:
            yield (
                f"the parameter {first} is used on the stages {', '.join(map(str, unit.stages))}, whose steps come at "
                "different times; untie it, or let both uses be on one rank (stages=)"
            )
    for stage in range(len(staged.stages)):
        for target, _ in staged.updated(stage):
            yield (
                f"the buffer {target} is updated by forward, in a forward of which the weights may be older than those "
                "of the one before; keep it out of forward, or in eval() (a BatchNorm)"
            )


def check_recompute(segmented: Segmented, plan: Plan) -> None:
    """Raise CaptureError for a loop that recomputes with newer weights than its forwards used."""
    if not overlaps(plan.schedule) or is_table(plan.schedule):
        return
    made = build(plan.schedule, ranks=plan.mesh.degree("pp"), microbatches=plan.microbatches)
    again = plan.chunks or recompute(segmented, plan.recompute).bodies != segmented.bodies
    if made.weights is Weights.CURRENT and again:
        raise CaptureError(
            f"train_loop: {plan.schedule!r} keeps no older weights, so what a backward recomputes would not be what "
            "its forward computed; '2bw' and 'pipedream' keep them, or leave recomputation out (recompute=False, no "
            "torch.utils.checkpoint, no chunks)"
        )
