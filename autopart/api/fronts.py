"""Fronts of plans: of step time against memory, and of a batch's latency against throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch

from autopart.api import tensor
from autopart.api.checks import fingerprint
from autopart.api.compiler import choosing, costed, fitting, named, predicted, sampled
from autopart.api.progress import shown
from autopart.capture import NO_TARGET
from autopart.ir.plan import Plan
from autopart.ir.segmented import Segmented
from autopart.passes.recompute import with_regions
from autopart.passes.segment import segment
from autopart.solver import pareto as front
from autopart.solver.request import Pins
from autopart.solver.serving import serve


def pareto(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n: int = 8,
    objectives: tuple[str, str] = front.OBJECTIVES,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = NO_TARGET,
    batch: Mapping[str, int | None] | None = None,
    semantics: str = "exact",
    capture: str = "compile",
    **pins: Unpack[Pins],
) -> tuple[Plan, ...]:
    """Up to `n` plans of which none is better than another in both predicted step time and peak memory, fastest first.

    With objectives ``("latency", "throughput")``, for a model in `eval()` mode: in both the time of a batch and the
    samples a second of batches that follow each other without a pause, the lowest latency first; nothing is held for
    training then (`solver.serving`).

    Everything else is as for `plan`, but that stages begin at whole segments. Raises what `plan` raises, and ValueError
    for other `objectives`, and for latency and throughput of a training step.
    """
    front.check(n, objectives)
    if "objective" in pins:
        raise ValueError("objective: a front has two, `objectives`")
    captured = sampled(
        model, args, kwargs, loss_fn, target, batch, semantics, capture, microbatches=pins.get("microbatches")
    )
    segmented = segment(captured, cuts=named(pins.get("stages")))
    kept = fitting(captured, pins)
    with shown("planning") as progress:
        kept.setdefault("progress", progress)
        return (_served if sorted(objectives) == sorted(front.FORWARDS) else _trained)(segmented, kept, n)


def _trained(segmented: Segmented, pins: Pins, n: int) -> tuple[Plan, ...]:
    """The front of time and memory, these counted on the graph."""
    chosen = choosing(segmented, segmented.captured.batch, pins)

    def best(objective: str, limit: int | None) -> Plan:
        memory = pins.get("memory") if limit is None else limit
        return chosen({**pins, "objective": objective, "memory": memory})

    found = (predicted(segmented, with_regions(each, segmented)) for each in front.front(best, n))
    return front.undominated(tuple(found))


def _served(segmented: Segmented, pins: Pins, n: int) -> tuple[Plan, ...]:
    """The front of latency and throughput, traffic and memory counted on the graph."""
    captured = segmented.captured
    if captured.training:
        raise ValueError(
            "objectives: latency and throughput are those of forwards alone, but this call is a training step; call "
            "model.eval(), and pass no loss_fn"
        )
    ((decided, plain, _), *others), degrees = costed(segmented, captured.batch, pins)
    kept: Pins = {**pins, "placement": tensor.without_tensors(pins.get("placement"))}
    plans = serve(
        plain,
        n=n,
        batch=captured.batch,
        tensor=decided,
        others=others,
        degrees=degrees,
        fingerprint=fingerprint(captured),
        **kept,
    )
    return tuple(_forward_only(predicted(segmented, plan)) for plan in plans)


def _forward_only(plan: Plan) -> Plan:
    """The plan without memory for training."""
    memory = tuple(replace(each, optimizer=0, gradients=0) for each in plan.prediction.memory)
    return replace(plan, prediction=replace(plan.prediction, memory=memory))
