"""Columns: which devices of a cluster of unlike ones the stages of a pipeline are on, and what each stage has there.

The groups of a cluster are dealt in some order to the columns of a mesh (the ranks of one pipeline rank), column after
column, so that data and tensor axes lie among like devices as far as the numbers allow. A column counts as the weakest
of its devices, unless the data ranks of a mesh take unequal shares of the batch: then each of these counts as the
weakest of its own. Axes count as the slowest of the links between a column's groups; a message from column to column
takes the slowest link that one of them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from autopart.cluster import Cluster
from autopart.ir.mesh import Mesh

Order = tuple[int, ...]
"""Groups of a cluster, by number, in the order in which their devices are dealt; empty where all count alike."""

MOST = 4
"""With more groups than these only the order of the cluster and the reverse of it are looked at."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the stages of a mesh run on: of every column the cluster of its devices' groups, and what edges take."""

    clusters: tuple[Cluster, ...]
    places: tuple[tuple[Cluster, ...], ...]  # of every column those of each of its places on dp
    devices: tuple[int, ...]  # the device of every rank
    latency: float
    bandwidth: float

    @property
    def uneven(self) -> bool:
        """Whether some column has unlike devices at its places on dp."""
        return any(len(set(each)) > 1 for each in self.places)

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, order: Order) -> Columns:
        """Those of a mesh on a cluster whose groups are dealt in some order."""
        pp = mesh.degree("pp")
        if not order:
            places = tuple((cluster,) * mesh.width(column) for column in range(pp))
            links = cluster.link_latency, cluster.link_bandwidth
            return cls((cluster,) * pp, places, tuple(range(mesh.size)), *links)
        ranks = [mesh.column(column) for column in range(pp)]
        dealt = dict(zip((rank for column in ranks for rank in column), _numbers(cluster, order), strict=False))
        clusters = tuple(part(cluster, [dealt[rank] for rank in column]) for column in ranks)
        places = tuple(
            tuple(
                part(cluster, [dealt[rank] for rank in column if mesh.coordinate(rank).get("dp", 0) == place])
                for place in range(mesh.width(at))
            )
            for at, column in enumerate(ranks)
        )
        crossed = {
            cluster.link(dealt[a], dealt[b]) for one, other in pairwise(ranks) for a, b in zip(one, other, strict=True)
        }
        return cls(
            clusters,
            places,
            tuple(dealt[rank] for rank in range(mesh.size)),
            max((link.latency for link in crossed), default=0.0),
            min((link.bandwidth for link in crossed), default=cluster.link_bandwidth),
        )


def orders(cluster: Cluster, devices: int) -> tuple[Order, ...]:
    """The orders of a cluster's groups that give so many devices in different ways; one, empty, where all are alike."""
    count = len(cluster.groups)
    if count == 1 or devices > cluster.devices:
        return ((),)
    every = tuple(range(count))
    known: dict[object, Order] = {}
    for order in permutations(every) if count <= MOST else (every, every[::-1]):
        used = [cluster.group_of(number) for number in _numbers(cluster, order)[:devices]]
        groups = list(dict.fromkeys(used))
        links = [cluster.between(a, b) for i, a in enumerate(groups) for b in groups[i + 1 :]]
        key = tuple((cluster.groups[group], used.count(group)) for group in groups), tuple(links)
        known.setdefault(key, order)
    return tuple(known.values())


def part(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The groups of a cluster in which some devices are, with the joints between them."""
    groups = sorted({cluster.group_of(number) for number in devices})
    at = {group: place for place, group in enumerate(groups)}
    joints = tuple(
        replace(joint, first=at[joint.first], second=at[joint.second])
        for joint in cluster.joints
        if joint.first in at and joint.second in at
    )
    return Cluster(tuple(cluster.groups[group] for group in groups), joints, cluster.name)


def alike(cluster: Cluster) -> Cluster:
    """A cluster whose devices all count as the weakest, and all links as the slowest."""
    if len(cluster.groups) == 1:
        return cluster
    rates = cluster.memory, cluster.flops, cluster.bandwidth, cluster.link_bandwidth, cluster.link_latency
    return Cluster.uniform(cluster.devices, *rates, name=cluster.name, host=cluster.host)


def _numbers(cluster: Cluster, order: Order) -> list[int]:
    """The devices of a cluster, group after group."""
    starts, at = [], 0
    for group in cluster.groups:
        starts.append(at)
        at += group.devices
    return [starts[group] + i for group in order for i in range(cluster.groups[group].devices)]
