"""What a plan was chosen over, and what it goes by: the runner-up of each choice, and what segments cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan with another choice of one kind, the rest chosen anew as far as that leaves it open."""

    choice: str  # "mesh", "tensor degree", "placement", "microbatches", "devices", "schedule", ...
    option: str  # what is chosen instead, to read
    step_seconds: float | None  # predicted; None where it does not fit
    peak: int  # bytes of the fullest rank; where it does not fit, the fewest that it needs


@dataclass(frozen=True, slots=True)
class SegmentFact:
    """What one microbatch costs in each of some equal segments, and what recomputing one would change."""

    segments: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int  # before any sharding
    saved_bytes: int  # kept from forward to backward
    again_seconds: float = 0.0  # that the backward takes more where the forward runs again in it
    again_saved_bytes: int = -1  # kept then; -1 where recomputing keeps no less
    again_transient: int = 0  # alive while the backward runs
