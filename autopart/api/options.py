"""The arguments of `parallelize`, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopart.api.checks import check_executable
from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.mesh import Mesh, Sizes
from autopart.ir.placement import Placement, executable
from autopart.ir.plan import INPUTS, Plan, pinned_chunks
from autopart.ir.program import Program
from autopart.schedules import spell
from autopart.solver.presets import PER_LAYER, Pinned
from autopart.solver.request import Pins

SEMANTICS = ("exact", "accumulate")
"""What a step means: the whole batch on one device, or that in slices whose losses are weighted and added up."""


@dataclass(frozen=True, slots=True)
class Options:
    """See `autopart.parallelize`, whose arguments these are."""

    devices: int | None = None
    cluster: Cluster | None = None
    loss_fn: Callable[..., Any] | None = None
    batch: Mapping[str, int | None] | None = None
    semantics: str = "exact"
    inputs: str = "global"
    capture: str = "compile"
    hooks: str = "refuse"
    outputs: str | None = None
    weights: str | os.PathLike[str] | None = None
    plan: Plan | Program | None = None
    verify: bool = True
    mesh: Sizes | Mesh | None = None
    stages: int | Sequence[str] | None = None
    placement: Pinned = None
    schedule: str | Schedule | None = None
    microbatches: int | None = None
    memory: str | int | None = None
    recompute: bool | Sequence[str] | None = None
    offload: bool = False
    chunks: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        _whole("devices", self.devices)
        _whole("microbatches", self.microbatches)
        one_of("semantics", self.semantics, SEMANTICS)
        one_of("inputs", self.inputs, INPUTS)
        one_of("capture", self.capture, ("compile", "direct"))
        one_of("hooks", self.hooks, ("refuse", "ignore"))
        one_of("outputs", self.outputs, (None, "all"))
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(f"loss_fn: expected a function of (output) or (output, target), not {self.loss_fn!r}")
        if self.weights is not None and not isinstance(self.weights, str | os.PathLike):
            raise TypeError(f"weights: expected the path of a safetensors file or folder, not {self.weights!r}")
        if self.plan is not None and not isinstance(self.plan, Plan | Program):
            raise TypeError(f"plan: expected an autopart.Plan or autopart.Program, not {type(self.plan).__name__}")
        if isinstance(self.plan, Program) and self.plan.plan.inputs != self.inputs:
            raise ValueError(
                f"inputs: the program was made for inputs={self.plan.plan.inputs!r}, not {self.inputs!r}; pass the same"
            )
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise TypeError(f"cluster: expected an autopart.Cluster, not {type(self.cluster).__name__}")
        if self.batch is not None and not isinstance(self.batch, Mapping):
            raise TypeError("batch: expected a mapping from input names to their batch dim, such as {'mask': None}")
        if self.mesh is not None and not isinstance(self.mesh, Mapping | Mesh):
            raise TypeError(f"mesh: expected a mapping such as {{'pp': 2, 'dp': 2}}, not {self.mesh!r}")
        if self.mesh is not None:
            self.axes()  # refuses unknown axes and sizes
        if self.mesh is not None and self.devices is not None and self.axes().size != self.devices:
            raise ValueError(f"mesh: {self.axes()} is {self.axes().size} devices, but devices={self.devices}")
        values = self.placement.values() if isinstance(self.placement, Mapping) else (self.placement,)
        for value in values:
            if isinstance(value, str | Placement) and value != PER_LAYER:
                executable(Placement.preset(value) if isinstance(value, str) else value)
        if self.given_plan is not None:
            check_executable(self.given_plan)
        if self.offload:
            raise ValueError(
                "offload: programs do not keep states on the host yet; autopart.plan(..., offload=True) says what that "
                "would hold and take"
            )
        if self.schedule is not None:
            spell(self.schedule)  # refuses what is neither a name nor a table
        if isinstance(self.stages, str | bool):
            raise TypeError(f"stages: expected a count or module names where a stage begins, not {self.stages!r}")
        if isinstance(self.recompute, str):
            raise TypeError(f"recompute: expected True, False or a list of module names, not {self.recompute!r}")
        pinned_chunks(self.chunks)  # refuses what is none

    def axes(self) -> Mesh:
        """The pinned mesh."""
        assert self.mesh is not None
        return self.mesh if isinstance(self.mesh, Mesh) else Mesh.of(self.mesh)

    @property
    def given_plan(self) -> Plan | None:
        """The pinned plan, also that of a pinned program."""
        return self.plan.plan if isinstance(self.plan, Program) else self.plan

    @property
    def given_program(self) -> Program | None:
        """The pinned program."""
        return self.plan if isinstance(self.plan, Program) else None

    @property
    def meaning(self) -> str:
        """The semantics, which a pinned program has its own of."""
        given = self.given_program.captured if self.given_program is not None else None
        return "accumulate" if given is not None and given.sliced and not given.coupled else self.semantics

    def world_size(self, found: int | None) -> int:
        """How many ranks to plan for, given the size of the world that is there, if any.

        Raises ValueError where `devices`, the mesh or the plan asks for another number than the world has.
        """
        asked = {
            "devices": self.devices,
            "mesh": self.axes().size if self.mesh is not None else None,
            "plan": self.given_plan.mesh.size if self.given_plan is not None else None,
        }
        for name, count in asked.items():
            if count is not None and found is not None and count != found:
                raise ValueError(f"{name}: asks for {count} ranks, but the world has {found}")
        wanted = next((count for count in asked.values() if count is not None), None)
        if wanted is None and self.cluster is not None:
            wanted = self.cluster.devices
        return found or wanted or 1

    def given_mesh(self) -> Mesh | None:
        """The mesh, as far as an argument says it."""
        return self.given_plan.mesh if self.given_plan is not None else self.axes() if self.mesh is not None else None

    def check_inputs(self, size: int, *, separate: bool) -> None:
        """Refuse inputs="local" where it cannot be; `separate` says that each rank makes a call of its own.

        Raises ValueError.
        """
        if self.inputs == "global" or size == 1:
            return
        if not separate:
            raise ValueError(
                f"inputs: 'local' needs a call by each rank, but all {size} ranks run inside this one call; start the "
                "script with torchrun (or use autopart.testing.LocalWorld), or pass the whole batch, inputs='global'"
            )
        if self.given_mesh() is None:
            raise ValueError(
                "inputs: with 'local' the mesh must be given, as it says which ranks pass the same samples: for one "
                f"share of the batch a rank, parallelize(mesh={{'dp': {size}}}, inputs='local')"
            )

    def pins(self, devices: int) -> Pins:
        """What `solve` takes, for so many devices."""
        return {
            "cluster": self.cluster,
            "devices": devices,
            "mesh": self.mesh,
            "stages": self.stages,
            "placement": self.placement,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "memory": self.memory,
            "recompute": self.recompute,
            "chunks": self.chunks,
        }


def _whole(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, not {value}")


def one_of(name: str, value: object, known: Sequence[str | None]) -> None:
    """Raise ValueError for the argument `name` unless its value is known."""
    if value not in known:
        raise ValueError(f"{name}: {value!r} is not known; one of {', '.join(map(str, known))}")
