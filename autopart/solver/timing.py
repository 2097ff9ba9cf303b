"""Predicted times: a roofline for segments, the simulated flush of a pipeline, alpha-beta for the data axis.

Assumed, and stated so that a better model has something to beat: devices reach their peak; p2p hides behind compute;
the collectives of the data axis do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.cost import SegmentNumbers
from autopart.ir.placement import Modes
from autopart.ir.traffic import sent_bytes
from autopart.schedules import simulate
from autopart.solver.memory import exchanges


def segment_seconds(segment: SegmentNumbers, cluster: Cluster) -> tuple[float, float]:
    """Forward and backward seconds of one microbatch: each the longer of computing and moving bytes."""
    return (
        max(segment.forward_flops / cluster.flops, segment.forward_bytes / cluster.bandwidth),
        max(segment.backward_flops / cluster.flops, segment.backward_bytes / cluster.bandwidth),
    )


def flush_seconds(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> float:
    """The time of one flush of a pipeline from each stage's forward and backward seconds of a microbatch."""
    half = tuple(seconds / 2 for seconds in backward)
    return simulate(schedule, costs={"F": tuple(forward), "B": tuple(backward), "I": half, "W": half}).makespan


def exchange_seconds(
    segments: Sequence[SegmentNumbers], modes: Sequence[Modes], degree: int, microbatches: int, cluster: Cluster
) -> float:
    """The time of the collectives of some segments on a data axis of `degree` ranks in a step."""
    if degree == 1:
        return 0.0
    calls = [call for s, m in zip(segments, modes, strict=True) for call in exchanges(s, m, microbatches)]
    return sum(
        times * (cluster.link_latency + sent_bytes(collective, payload, degree) / cluster.link_bandwidth)
        for collective, payload, times in calls
    )
