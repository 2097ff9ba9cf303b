"""Predicted times: a roofline for segments, the simulated flush of a pipeline, alpha-beta for the data axis.

    segment    max(flops / F, bytes of its contractions / W) + bytes of its sweeps / W

with F and W the rates of a device: what has a product in it is computed or moved, whichever takes longer; what sweeps
through memory (norms, activations, sums) comes before or after it, on the same device.

Assumed, and stated so that a better model has something to beat: devices reach their rates; a message from rank to rank
takes latency and bytes over bandwidth, and delays only what waits for it; the collectives of the data axis delay all,
and so do those inside segments and what goes to the host and back: nothing is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.cost import PICO, SegmentNumbers
from autopart.ir.placement import Modes
from autopart.ir.traffic import sent_bytes
from autopart.schedules import Timeline, simulate
from autopart.solver.memory import exchanges, hosted


def segment_seconds(segment: SegmentNumbers, cluster: Cluster) -> tuple[float, float]:
    """Forward and backward seconds of one microbatch: products, sweeps and exchanges, one after the other."""
    forward = roofline(segment.forward_flops, segment.forward_bytes, segment.forward_swept, cluster)
    backward = roofline(segment.backward_flops, segment.backward_bytes, segment.backward_swept, cluster)
    return forward + segment.forward_exchange / PICO, backward + segment.backward_exchange / PICO


def roofline(flops: int, nbytes: int, swept: int, cluster: Cluster) -> float:
    """The time of so many FLOPs and of so many bytes, `swept` of which move while nothing is multiplied."""
    return max(flops / cluster.flops, (nbytes - swept) / cluster.bandwidth) + swept / cluster.bandwidth


Beside = Sequence[tuple[Sequence[SegmentNumbers], Cluster]]
"""The same segments at other places: with other samples, on other devices."""


def action_seconds(
    segments: Sequence[SegmentNumbers], cluster: Cluster, *, first: bool, beside: Beside = ()
) -> dict[str, float]:
    """Seconds of a forward (F), a backward (B) and its halves (I, W) of one microbatch on a stage of some segments.

    On the `first` stage, if no gradient goes on from it, I has nothing to do. With places `beside` this one a segment
    takes as long as at the place where that is longest.
    """
    known: dict[tuple[int, ...], tuple[float, ...]] = {}  # equal layers are one object
    rows = list(zip(segments, *(each for each, _ in beside), strict=True))
    clusters = (cluster, *(each for _, each in beside))
    for row in rows:
        key = tuple(map(id, row))
        if key not in known:
            pairs = list(zip(row, clusters, strict=True))
            taken = [(*segment_seconds(n, on), *halves_seconds(n, on)) for n, on in pairs]
            known[key] = tuple(map(max, zip(*taken, strict=True)))
    every = [known[tuple(map(id, row))] for row in rows]
    forward, backward, inputs, weights = (sum(each[at] for each in every) for at in range(4))
    return {
        "F": forward,
        "B": backward,
        "I": 0.0 if first else inputs,
        "W": backward if first else weights,
    }


def output_seconds(part: SegmentNumbers, cluster: Cluster, barriers: int) -> dict[str, float]:
    """Seconds of S and of T of one microbatch for a part of the output layer.

    With one barrier S has the backward for the inputs besides, with two T has all of the backward.
    """
    forward, backward = segment_seconds(part, cluster)
    inputs, weights = halves_seconds(part, cluster)
    return {"S": forward, "T": backward} if barriers == 2 else {"S": forward + inputs, "T": weights}


def halves_seconds(segment: SegmentNumbers, cluster: Cluster) -> tuple[float, float]:
    """Seconds of one microbatch's backward for the inputs, and of the rest of it."""
    flops, nbytes, swept = segment.input_flops, segment.input_bytes, segment.input_swept
    inputs, exchange = roofline(flops, nbytes, swept, cluster), segment.input_exchange
    weights = roofline(
        segment.backward_flops - flops, segment.backward_bytes - nbytes, segment.backward_swept - swept, cluster
    )
    return inputs + exchange / PICO, weights + (segment.backward_exchange - exchange) / PICO


def timeline(schedule: Schedule, seconds: Sequence[Mapping[str, float]], delay: float = 0.0) -> Timeline:
    """One flush of a pipeline from each stage's `action_seconds`; an edge between ranks takes `delay`."""
    kinds = "FBIW" + "ST" * bool(schedule.barriers) + "ED" * schedule.looks_up
    return simulate(schedule, costs={kind: tuple(each[kind] for each in seconds) for kind in kinds}, comm=delay)


def exchange_seconds(
    segments: Sequence[SegmentNumbers], modes: Sequence[Modes], degree: int, microbatches: int, cluster: Cluster
) -> float:
    """The time in a step of the collectives of some segments on `degree` data ranks, and of what hosts send and get."""
    pairs = list(zip(segments, modes, strict=True))
    moved = sum(times * size for s, m in pairs for _, size, times in hosted(s, m, degree, microbatches))
    away = moved / cluster.host if moved else 0.0
    if degree == 1:
        return away
    calls = [call for s, m in pairs for call in exchanges(s, m, microbatches)]
    return away + sum(
        times * (cluster.link_latency + sent_bytes(collective, payload, degree) / cluster.link_bandwidth)
        for collective, payload, times in calls
    )
