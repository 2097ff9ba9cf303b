"""dealing: Sharded + Plan -> edges, those between stages of unlike width with how each value is dealt among data ranks.

before: 0 -> 1: h (Shard(0)), scale (Replicate); 1 -> 0: d_h (Shard(0)), d_scale (Partial); widths 2, 1
after:  0 -> 1: h along dim 0, scale equal; 1 -> 0: d_h along dim 0, d_scale a part of a sum
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.dealing import EQUAL, SUM, How
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segmented
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Edge
from autopart.ir.state import State
from autopart.passes.shard import shard


def dealt(sharded: Sharded, plan: Plan, edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """The edges, those between stages of unlike width with how their values are dealt.

    Raises CaptureError for a value that cannot be: one that numbers the samples of a microbatch, whose samples lie
    apart from each other in it, or of which each slice of the batch has its own.
    """
    widths = [plan.mesh.width(column) for column in plan.place]
    return tuple(
        replace(edge, deal=tuple(_how(sharded, edge, value.name) for value in edge.values))
        if plan.mesh.widths and widths[edge.source] != widths[edge.target]
        else edge
        for edge in edges
    )


def _how(sharded: Sharded, edge: Edge, name: str) -> How:
    found = _dealing(sharded, name)
    if found is not None:
        return found
    what = "numbers the samples of a microbatch" if name in sharded.numbering else f"is {sharded.between[name]} on dp"
    raise CaptureError(
        f"{_place(sharded, name)}{name} {what}, and goes from stage {edge.source} to stage {edge.target}, which differ "
        "in their number of data ranks, so that its samples would have to be dealt anew; begin the stage elsewhere "
        "(stages=[...]), or pin a mesh with one number of data ranks"
    )


def _dealing(sharded: Sharded, name: str) -> How | None:
    """How a value is dealt, None for one that cannot be."""
    match sharded.between[name]:
        case Shard(dim, 1) if name not in sharded.numbering:
            return dim
        case Replicate():
            return EQUAL
        case Partial():
            return SUM
        case _:
            return None


def can_deal(segmented: Segmented) -> bool:
    """Whether a step can be on pipeline ranks of unlike width, wherever its stages begin."""
    captured = segmented.captured
    if captured.sliced or captured.coupled or captured.updates():
        return False
    layers: dict[str, set[str]] = {}
    for segment in segmented.segments:
        for target in segment.parameters:
            layers.setdefault(target, set()).add(segment.layer)
    if any(len(users) > 1 for users in layers.values()):
        return False
    sharded = shard(segmented)
    return all(_dealing(sharded, name) is not None for name in sharded.between)


def _place(sharded: Sharded, name: str) -> str:
    """Where a value is made, as errors begin with it."""
    nodes = sharded.segmented.captured.nodes
    return next((node.place() for node in nodes if name in node.names()), "")


def check_widths(captured: Captured, plan: Plan) -> None:
    """Refuse a step that cannot be dealt to pipeline ranks of unlike width, and what does not go beside them yet.

    Raises ValueError or CaptureError, naming the mesh and what is in the way.
    """
    mesh = plan.mesh
    if not mesh.widths:
        return
    if faults := [*_beside(plan)]:
        raise ValueError(
            f"mesh: {mesh} has pipeline ranks of unlike width, which is not done yet beside {faults[0]}; pin pp and dp "
            "as numbers, or leave that out"
        )
    if captured.sliced:
        raise ValueError(
            f"mesh: {mesh} has pipeline ranks of unlike width, so that a slice of the batch has no one data rank, as "
            "semantics='accumulate' asks for; pin pp and dp as numbers, or use semantics='exact'"
        )
    if updated := captured.updates():
        raise CaptureError(
            f"the forward updates the buffer {updated[0].target}, microbatch after microbatch on each data rank, which "
            f"is not done yet where pipeline ranks differ in width, as on {mesh}; pin pp and dp as numbers"
        )


def _beside(plan: Plan) -> Iterable[str]:
    if plan.inputs == "local":
        yield "inputs='local'"
    if plan.mirrors:
        yield "copies of the model"
    if plan.slices > 1:
        yield "slices of the sequence"
    if plan.barriers or plan.lookup:
        yield "an output layer split over the pipeline ranks"
    if plan.front or plan.helpers:
        yield "train_loop"


def check_shared(state: State, mesh: Mesh) -> None:
    """Refuse parameters that pipeline ranks of unlike width share. Raises CaptureError naming the first."""
    for unit in state.units:
        widths: Sequence[int] = [mesh.width(column) for column in unit.columns]
        if len(set(widths)) > 1:
            raise CaptureError(
                f"the parameter {unit.parameters[0].target} is used on the stages {', '.join(map(str, unit.stages))}, "
                f"whose pipeline ranks have {' and '.join(map(str, widths))} data ranks, which is not done yet; untie "
                "it, let both uses be on one stage (stages=[...]), or pin a mesh with one number of data ranks"
            )
