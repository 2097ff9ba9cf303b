"""Brute force for small instances, written from the definitions and sharing nothing with the solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import ceil

from autopart import schedules
from autopart.cluster import Cluster, Link
from autopart.ir.cost import SegmentNumbers


def every_split(segments: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to begin `stages` non-empty contiguous stages, earliest cuts first."""
    for cuts in combinations(range(1, segments), stages - 1):
        yield (0, *cuts)


def stage_bytes(segments: Sequence[SegmentNumbers], preset: str, dp: int, ratio: float, flight: int) -> int:
    """Peak bytes of one stage under one preset: the four tables of ZeRO written out."""
    names: set[str] = set()
    total, wires = 0, [0, 0]
    for segment in segments:
        pieces = [(segment.parameter_bytes, segment.trainable_bytes)]
        for tied in segment.tied:
            trained = tied.nbytes if tied.trainable else 0
            pieces[0] = (pieces[0][0] - tied.nbytes, pieces[0][1] - trained)
            if tied.name not in names:
                names.add(tied.name)
                pieces.append((tied.nbytes, trained))
        for parameters, trainable in pieces:
            states = {"p": parameters, "o": ceil(trainable * ratio), "g": trainable}
            split = {"ddp": "", "zero1": "o", "zero2": "og", "fsdp": "pog"}[preset]
            total += sum(ceil(size / dp) if state in split else size for state, size in states.items())
        if dp > 1:
            gathered = segment.parameter_bytes if preset == "fsdp" else 0
            wires.append(gathered + (segment.trainable_bytes if preset in ("zero2", "fsdp") else 0))
        total += flight * segment.saved_bytes
    again = max((segment.recomputed_bytes for segment in segments), default=0)
    return total + again + sum(sorted(wires)[-2:])  # one is gathered or reduced while another is used


def best_split(
    segments: Sequence[SegmentNumbers],
    times: Sequence[int],
    *,
    stages: int,
    schedule: str,
    microbatches: int,
    preset: str,
    dp: int,
    ratio: float,
    limit: int,
    pinned: Sequence[int] = (),
) -> tuple[int, int, tuple[int, ...]] | None:
    """The least (slowest stage, boundary bytes, starts) over all splits that keep the limit and the pins."""
    found = []
    for starts in every_split(len(segments), stages):
        ends = (*starts[1:], len(segments))
        if any(pin not in starts for pin in pinned):
            continue
        flights = [microbatches if schedule == "gpipe" else min(microbatches, stages - k) for k in range(stages)]
        runs = list(zip(starts, ends, flights, strict=True))
        if any(stage_bytes(segments[i:j], preset, dp, ratio, flight) > limit for i, j, flight in runs):
            continue
        slowest = max(sum(times[i:j]) for i, j, _ in runs)
        found.append((slowest, sum(segments[i].boundary_bytes for i in starts[1:]), starts))
    return min(found, default=None)


def best_dealt(
    segments: Sequence[SegmentNumbers],
    times: Sequence[int],
    *,
    table: Sequence[Sequence[str]],
    preset: str,
    dp: int,
    ratio: float,
    limit: int,
    pinned: Sequence[int] = (),
) -> tuple[int, int, int, tuple[int, ...]] | None:
    """The best (busiest rank, slowest stage, boundary bytes, starts) where ranks may hold several stages.

    Of equals, that with the first cut nearest to equal stages, then the second, and so on; of two, the earlier. `table`
    has a row of actions a rank, such as ``0F0``. A microbatch is kept from its F to its B or W.
    """
    rows = [[(int(text.split(kind)[0]), kind) for text in row for kind in "FBW" if kind in text] for row in table]
    stages = 1 + max(stage for row in rows for stage, _ in row)
    found = []
    for starts in every_split(len(segments), stages):
        runs = [slice(i, j) for i, j in zip(starts, (*starts[1:], len(segments)), strict=True)]
        if any(pin not in starts for pin in pinned):
            continue
        if any(_peak(row, runs, segments, preset, dp, ratio) > limit for row in rows):
            continue
        seconds = [sum(times[run]) for run in runs]
        busiest = max(sum(seconds[stage] for stage in {stage for stage, _ in row}) for row in rows)
        far = [(abs(sum(times[:cut]) * stages - sum(times) * k), cut) for k, cut in enumerate(starts)]
        found.append((busiest, max(seconds), sum(segments[i].boundary_bytes for i in starts[1:]), far, starts))
    best = min(found, default=None)
    return best and (*best[:3], best[4])


def _peak(
    row: Sequence[tuple[int, str]],
    runs: Sequence[slice],
    segments: Sequence[SegmentNumbers],
    preset: str,
    dp: int,
    ratio: float,
) -> int:
    """The most bytes of a rank over all moments of its row."""
    kept = most = 0
    for stage, kind in row:
        saved = sum(segment.saved_bytes for segment in segments[runs[stage]])
        kept += saved if kind == "F" else -saved
        most = max(most, kept)
    return most + sum(stage_bytes(segments[runs[stage]], preset, dp, ratio, 0) for stage in {stage for stage, _ in row})


def step_seconds(
    segments: Sequence[SegmentNumbers],
    starts: Sequence[int],
    *,
    schedule: str,
    microbatches: int,
    preset: str,
    dp: int,
    cluster: Cluster | Sequence[Cluster],
    link: Link | None = None,
    places: Sequence[Sequence[tuple[Sequence[SegmentNumbers], Cluster]]] = (),
) -> float:
    """The step of one split, a stage a rank: a simulated flush, then the collectives of the rank that has most.

    `cluster` is what all stages run on, or what each does; `link`, then, is what messages between them take. For each
    stage `places` are what its data ranks compute and on what: a segment takes as long as where that is longest.
    """
    runs = list(zip(starts, [*starts[1:], len(segments)], strict=True))
    stages = [segments[i:j] for i, j in runs]
    clusters = [cluster] * len(stages) if isinstance(cluster, Cluster) else cluster
    places = places or [[(segments, on)] for on in clusters]
    forward, backward = (
        [
            sum(max(time(each[s], on) for each, on in k) for s in range(i, j))
            for k, (i, j) in zip(places, runs, strict=True)
        ]
        for time in (_forward, _backward)
    )
    crossing = max((segments[i].boundary_bytes for i in starts[1:]), default=0)
    link = link or Link(clusters[0].link_bandwidth, clusters[0].link_latency)
    edge = link.latency + crossing / link.bandwidth
    built = schedules.build(schedule, ranks=len(starts), microbatches=microbatches)
    length = schedules.simulate(built, {"F": forward, "B": backward}, edge).makespan
    return length + max(
        sum(_exchange(s, preset, dp, microbatches, on) for s in k) for k, on in zip(stages, clusters, strict=True)
    )


def _forward(segment: SegmentNumbers, cluster: Cluster) -> float:
    computing = max(segment.forward_flops / cluster.flops, segment.forward_bytes / cluster.bandwidth)
    return computing + segment.forward_exchange / 1e12


def _backward(segment: SegmentNumbers, cluster: Cluster) -> float:
    computing = max(segment.backward_flops / cluster.flops, segment.backward_bytes / cluster.bandwidth)
    return computing + segment.backward_exchange / 1e12


def _exchange(segment: SegmentNumbers, preset: str, dp: int, microbatches: int, cluster: Cluster) -> float:
    """Seconds of the collectives of a segment, by ZeRO's table: (bytes over the ring, how often)."""
    trained, held = segment.trainable_bytes, segment.parameter_bytes
    reduced, gathered = (trained, 1), (trained, 1)
    calls = {
        "ddp": [(2 * trained, 1)],
        "zero1": [reduced, gathered],
        "zero2": [(trained, microbatches), gathered],
        "fsdp": [(trained, microbatches), (held, 2 * microbatches)],
    }[preset]
    if dp == 1:
        return 0.0
    return sum(n * (cluster.link_latency + (dp - 1) * size // dp / cluster.link_bandwidth) for size, n in calls if size)
