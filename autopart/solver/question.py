"""What a caller asks, as arguments: the request behind them, and the same with some of the pins only."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from autopart.ir.cost import SegmentCost
from autopart.solver.joint import Progress
from autopart.solver.request import Pins, Request
from autopart.solver.resolve import resolve
from autopart.solver.search import meshes
from autopart.solver.space import Space

PINS = ("mesh", "stages", "placement", "schedule", "microbatches", "recompute")
"""The arguments that take choices from the solver, beside the memory limit."""


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of `resolve`: `pins` are those of `PINS`, None where one is not given, `rest` the others."""

    costs: Sequence[SegmentCost]
    devices: int | None
    pins: Mapping[str, Any]
    rest: Mapping[str, Any]

    @classmethod
    def of(cls, costs: Sequence[SegmentCost], pins: Pins, **rest: Any) -> Question:
        """The question that a caller's arguments ask, beside which `resolve` takes the `rest`.

        Raises TypeError for an argument that is not known.
        """
        if unknown := sorted(pins.keys() - Pins.__annotations__.keys()):
            raise TypeError(f"{unknown[0]}: no such argument; a plan takes {', '.join(Pins.__annotations__)}")
        more = {"cluster": pins.get("cluster"), "memory": pins.get("memory"), "offload": pins.get("offload", False)}
        return cls(costs, pins.get("devices"), {pin: pins.get(pin) for pin in PINS}, more | rest)

    def request(self) -> Request:
        """The request; ValueError or TypeError names the argument that is wrong."""
        return resolve(self.costs, devices=self.devices, **self.pins, **self.rest)

    @property
    def given(self) -> dict[str, Any]:
        """The pins that are given, and can be left out.

        A mesh that splits tensors inside segments cannot, as the costs are for that and say nothing of other meshes.
        """
        fixed = {"mesh"} if self.rest.get("tensor") is not None else set()
        return {pin: value for pin, value in self.pins.items() if value is not None and pin not in fixed}

    def keeping(self, kept: Collection[str], devices: int) -> Request:
        """The request for so many devices with some of the pins, as if the others had not been given."""
        left_out = self.given.keys() - kept
        pins: dict[str, Any] = {pin: None if pin in left_out else value for pin, value in self.pins.items()}
        request = resolve(self.costs, devices=devices, **pins, **self.rest)
        return with_degrees(request, inf, lambda done, count: None) if Space(request).joint else request


def deadline(began: float, time_limit: float | None) -> float:
    """When a search that began then has to end; ValueError for a limit that is none."""
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit: must be more than 0 seconds, not {time_limit}")
    return began + (inf if time_limit is None else time_limit)


def with_degrees(request: Request, until: float, progress: Progress) -> Request:
    """The request with what there is on all axes inside segments that are looked at, or as many as time allows."""
    for done, inner in enumerate(request.degrees if request.wide else ()):
        progress(done, len(request.degrees))
        if time.monotonic() > until and next(meshes(request), None) is not None:
            break
        request = request.with_inner(inner)
    return request
