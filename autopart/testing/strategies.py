"""Hypothesis strategies: meshes, schedules, plans of a model, batches of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from hypothesis import strategies as st

from autopart import _torch
from autopart import schedules as families
from autopart.api.compiler import captured_step, solve
from autopart.capture import read
from autopart.errors import CaptureError
from autopart.ir.action import Schedule
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.placement import PRESETS
from autopart.ir.plan import Plan
from autopart.passes.segment import segment
from autopart.passes.split import undivided
from autopart.passes.tokens import depend


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 4, max_stages: int = 4) -> Mesh:
    """Meshes of pp x dp with at most `max_devices` ranks, an axis of size one left out now and then."""
    stages = draw(st.integers(1, min(max_devices, max_stages)))
    parts = draw(st.integers(1, max_devices // stages))
    axes = {"pp": stages, "dp": parts}
    if stages == 1 and draw(st.booleans()):
        del axes["pp"]
    elif parts == 1 and draw(st.booleans()):
        del axes["dp"]
    return Mesh.of(axes)


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 8) -> Schedule:
    """Schedules of every family that can be for the numbers drawn, up to a size."""
    ranks, microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    return draw(st.sampled_from(list(_built(ranks, microbatches))))


def _built(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """The schedule of each family that can be for these numbers."""
    for family in families.names():
        with contextlib.suppress(ValueError):
            yield families.build(family.name, ranks=ranks, microbatches=microbatches)


def _executed(schedule: Schedule) -> bool:
    """Whether programs are written for a schedule."""
    try:
        families.executable(schedule)
    except ValueError:
        return False
    return True


def _tokens(captured: Captured) -> int:
    """Into how many slices of the sequence a step can be cut."""
    try:
        return 1 if captured.updates() else depend(captured).length
    except CaptureError:
        return 1


@st.composite
def plans(
    draw: st.DrawFn,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_devices: int = 4,
) -> Plan:
    """Plans for a step of ``model(*args, **kwargs)``: any mesh, placement, schedule, microbatches, stage split.

    The schedules are those of the families that programs are written for, by name or as a table of actions; but for
    `vocab`, which asks for a certain output layer, and of slices of the sequence where the model has such.

    Hypothesis shrinks towards one device, ddp, one microbatch.
    """
    captured = captured_step(model, read(model, args, kwargs), None, False, "direct")
    segmented = segment(captured)
    names = [item.name for item in segmented.segments]
    mesh = draw(meshes(max_devices=min(max_devices, captured.batch), max_stages=len(names)))
    microbatches = draw(st.integers(1, captured.batch // mesh.parts))
    built = filter(_executed, _built(mesh.degree("pp"), microbatches))
    whole = bool(undivided(captured))
    tokens = _tokens(captured)
    able = [
        each
        for each in built
        if each.stages <= len(names)
        and not (each.mirrors and whole)
        and not each.barriers
        and each.slices in range(1, tokens + 1)
    ]
    schedule = draw(st.sampled_from(able))
    cuts = sorted(
        draw(st.sets(st.integers(1, len(names) - 1), min_size=schedule.stages - 1, max_size=schedule.stages - 1))
        if schedule.stages > 1
        else ()
    )
    return solve(
        segmented,
        devices=mesh.size,
        mesh=mesh,
        stages=[names[cut] for cut in cuts] if cuts else None,
        placement=draw(st.sampled_from(PRESETS)),
        schedule=draw(st.sampled_from([schedule.name, str(schedule)])),
        microbatches=microbatches,
    )


@st.composite
def batches(
    draw: st.DrawFn,
    model: torch.nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_samples: int = 8,
) -> Any:
    """Batches for a model: like a sample, with another number of samples and other values.

    The sample is `args` and `kwargs`; without them ``model.example_batch()`` is asked for the arguments (a tuple).
    Floating values are drawn anew, integers are those of the sample in another order. Gives the arguments, or
    ``(args, kwargs)`` if `kwargs` is given.
    """
    if args is None:
        if not hasattr(model, "example_batch"):
            raise ValueError(
                "batches: the shapes of a batch cannot be known from a module alone; pass a sample, "
                "batches(model, args), or give the module a method example_batch() that returns one"
            )
        args = cast(Any, model).example_batch()
    call = read(model, tuple(args), kwargs).resized(draw(st.integers(1, max_samples)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        order = torch.randperm(leaf.numel(), generator=generator)
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    made, keywords = _torch.pytree.tree_map(fresh, call.unflatten())
    return made if kwargs is None else (made, keywords)
