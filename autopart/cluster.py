"""The devices that a plan is made for, how they are linked, and sizes in bytes as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from math import ceil, inf
from types import MappingProxyType

from autopart.ir.document import Document

VERSION = 2
"""The version of the schema of a cluster's file."""

LATENCY = 5e-6
"""Seconds per message over the links of presets: the order of what is measured, as the vendors publish none."""

HOST = 16e9
"""Bytes/s between a device and its host's memory, each way, where nothing else is said: 16 lanes of PCIe 3.0."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _kind(owner: str, field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{owner}: {field} must be of {kind.__name__}, not {value!r}")


def _whole(owner: str, field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{owner}: {field} must be a whole number of at least 1, not {value!r}")


def _positive(owner: str, field: str, value: object, *, or_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < inf or (value == 0 and not or_zero):  # type: ignore[operator]
        wanted = "at least 0 and finite" if or_zero else "positive and finite"
        raise ValueError(f"{owner}: {field} must be {wanted}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device: bytes of memory, FLOP/s, bytes/s of its memory, and bytes/s to its host's, each way.

    The last is 0 where the host's memory is the device's own. ValueError names the field that is wrong.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    host: float = HOST

    def __post_init__(self) -> None:
        _whole("Device", "memory", self.memory)
        _positive("Device", "flops", self.flops)
        _positive("Device", "bandwidth", self.bandwidth)
        _positive("Device", "host", self.host, or_zero=True)


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes/s that a device sends to another, in one direction, and seconds per message."""

    bandwidth: float
    latency: float = LATENCY

    def __post_init__(self) -> None:
        _positive("Link", "bandwidth", self.bandwidth)
        _positive("Link", "latency", self.latency, or_zero=True)


@dataclass(frozen=True, slots=True)
class Group:
    """Equal nodes of equal devices: what links the devices of a node, and what a device has to those of other nodes."""

    device: Device
    nodes: int
    per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        _kind("Group", "device", self.device, Device)
        _kind("Group", "inside", self.inside, Link)
        _kind("Group", "between", self.between, Link)
        _whole("Group", "nodes", self.nodes)
        _whole("Group", "per_node", self.per_node)

    @property
    def devices(self) -> int:
        """How many devices the group has."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Joint:
    """The link between devices of two groups, by their places in the cluster, the lower first.

    ValueError names the field that is wrong.
    """

    first: int
    second: int
    link: Link

    def __post_init__(self) -> None:
        _kind("Joint", "first", self.first, int)
        _kind("Joint", "second", self.second, int)
        _kind("Joint", "link", self.link, Link)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of devices, which may differ from each other, and a joint between every two groups.

    ``Cluster.preset("h100-80", nodes=8, per_node=8)`` is one group; ``Cluster.preset("a100-40", per_node=8).joined(
    Cluster.preset("t4", per_node=4), Link(1.25e9))`` are two, over 10 Gb/s; `Cluster.load` reads what
    `autopart profile` measured.

    Devices are numbered from 0, group by group and node by node. Groups of one node each give every pair of nodes a
    link of its own. `memory`, `flops`, `bandwidth`, `host`, `link_bandwidth` and `link_latency` are those of the
    weakest device and the slowest link: where a plan does not tell devices apart, each counts as such.

    Raises ValueError, naming the field, for what cannot be.
    """

    groups: tuple[Group, ...]
    joints: tuple[Joint, ...] = ()
    name: str = "custom"

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not self.groups:
            raise ValueError(f"Cluster: groups must be a tuple of at least one Group, not {self.groups!r}")
        for group in self.groups:
            _kind("Cluster", "groups", group, Group)
        for joint in self.joints:
            _kind("Cluster", "joints", joint, Joint)
        wanted = list(combinations(range(len(self.groups)), 2))
        given = sorted((joint.first, joint.second) for joint in self.joints)
        if given != wanted:
            raise ValueError(
                f"Cluster: joints must link every two of the {len(self.groups)} groups once, the lower first: "
                f"{wanted}, not {given}"
            )

    @classmethod
    def uniform(
        cls,
        devices: int,
        memory: int,
        flops: float,
        bandwidth: float,
        link_bandwidth: float,
        link_latency: float = LATENCY,
        name: str = "custom",
        host: float = HOST,
    ) -> Cluster:
        """Equal devices, each linked to each alike, and by `host` bytes/s to the memory of its host."""
        _whole("Cluster", "devices", devices)
        _positive("Cluster", "link_bandwidth", link_bandwidth)
        _positive("Cluster", "link_latency", link_latency, or_zero=True)
        link = Link(link_bandwidth, link_latency)
        return cls((Group(Device(name, memory, flops, bandwidth, host), 1, devices, link, link),), name=name)

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1, per_node: int = 1) -> Cluster:
        """A cluster of `nodes` nodes with `per_node` devices each; ValueError for a name that `PRESETS` lacks."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"Cluster.preset: unknown device {name!r}; known are {', '.join(PRESETS)}")
        _whole("Cluster.preset", "nodes", nodes)
        _whole("Cluster.preset", "per_node", per_node)
        return cls((replace(PRESETS[name], nodes=nodes, per_node=per_node),), name=name)

    def joined(self, other: Cluster, link: Link) -> Cluster:
        """This cluster and another one, whose devices come after, with `link` from each device to each of the other.

        ValueError for what is no Cluster or no Link.
        """
        _kind("Cluster.joined", "other", other, Cluster)
        here, there = len(self.groups), len(other.groups)
        moved = (replace(joint, first=joint.first + here, second=joint.second + here) for joint in other.joints)
        across = (Joint(i, here + k, link) for i in range(here) for k in range(there))
        joints = sorted((*self.joints, *moved, *across), key=lambda joint: (joint.first, joint.second))
        return Cluster((*self.groups, *other.groups), tuple(joints), f"{self.name}+{other.name}")

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return sum(group.devices for group in self.groups)

    @property
    def memory(self) -> int:
        """Bytes of the device that has least."""
        return min(group.device.memory for group in self.groups)

    @property
    def flops(self) -> float:
        """FLOP/s of the slowest device."""
        return min(group.device.flops for group in self.groups)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the slowest memory."""
        return min(group.device.bandwidth for group in self.groups)

    @property
    def host(self) -> float:
        """Bytes/s of the slowest link between a device and its host's memory; 0 where some device has none apart."""
        return min(group.device.host for group in self.groups)

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s of the slowest link that a ring over all devices has to cross."""
        return min(link.bandwidth for link in self._links())

    @property
    def link_latency(self) -> float:
        """Seconds per message over the link that takes longest."""
        return max(link.latency for link in self._links())

    def device(self, number: int) -> Device:
        """The device of that number; ValueError if there is none."""
        return self.groups[self._place(number)[0]].device

    def link(self, first: int, second: int) -> Link:
        """The link from one device to another; ValueError if they are the same, or there is none of a number."""
        places = self._place(first), self._place(second)
        if first == second:
            raise ValueError(f"Cluster.link: device {first} has no link to itself")
        (group, node), (other, far) = sorted(places)
        if group == other:
            return self.groups[group].inside if node == far else self.groups[group].between
        return self.between(group, other)

    def group_of(self, number: int) -> int:
        """The group, by number, of the device of that number; ValueError if there is none."""
        return self._place(number)[0]

    def between(self, group: int, other: int) -> Link:
        """The link from each device of one group to each of another."""
        pair = min(group, other), max(group, other)
        return next(joint.link for joint in self.joints if (joint.first, joint.second) == pair)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to a JSON file."""
        _document().save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster from a JSON file; ValueError names the file and what is wrong with it."""
        return _document().load(path)

    def __str__(self) -> str:
        """A line a group and a line a joint."""
        lines = [
            f"{group.nodes} x {group.per_node} {group.device.name}: {group.device.flops:.4g} FLOP/s, "
            f"{group.device.memory / 1e9:.4g} GB at {group.device.bandwidth:.4g} B/s, "
            f"{group.inside.bandwidth:.4g} B/s in a node"
            + (f", {group.between.bandwidth:.4g} B/s between nodes" if group.nodes > 1 else "")
            for group in self.groups
        ]
        lines += [f"groups {j.first} and {j.second}: {j.link.bandwidth:.4g} B/s" for j in self.joints]
        return "\n".join(lines)

    def _place(self, number: int) -> tuple[int, int]:
        """The group and the node in it that a device is in."""
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            left = number
            for place, group in enumerate(self.groups):
                if left < group.devices:
                    return place, left // group.per_node
                left -= group.devices
        raise ValueError(f"Cluster: there is no device {number!r}; the {self.devices} count from 0")

    def _links(self) -> list[Link]:
        """The links in use: those between the nodes of a group only where it has several."""
        links = [group.inside if group.nodes == 1 else group.between for group in self.groups]
        return links + [joint.link for joint in self.joints]


def _document() -> Document[Cluster]:
    return Document(Cluster, "cluster", VERSION)


def _preset(
    name: str, flops: float, memory: int, bandwidth: float, host: float, inside: float, between: float
) -> Group:
    return Group(Device(name, memory, flops, bandwidth, host), 1, 1, Link(inside), Link(between))


PRESETS: Mapping[str, Group] = MappingProxyType(
    {
        group.device.name: group
        for group in (
            _preset("h100-80", 792.1e12, 80 * 10**9, 3.35e12, 64e9, 450e9, 50e9),
            _preset("h200", 794.5e12, 141 * 10**9, 4.8e12, 64e9, 450e9, 50e9),
            _preset("b200", 1745e12, 180 * 10**9, 7.7e12, 64e9, 900e9, 50e9),
            _preset("a100-80", 267.9e12, 80 * 10**9, 2.039e12, 32e9, 300e9, 25e9),
            _preset("a100-40", 267.9e12, 40 * 10**9, 1.555e12, 32e9, 300e9, 25e9),
            _preset("l40s", 362e12, 48 * 10**9, 864e9, 32e9, 32e9, 25e9),
            _preset("rtx4090", 165.2e12, 24 * 10**9, 1.008e12, 32e9, 32e9, 12.5e9),
            _preset("mi250x", 147e12, 64 * 10**9, 1.638e12, 36e9, 50e9, 12.5e9),
            _preset("mi300x", 781.9e12, 192 * 10**9, 5.3e12, 64e9, 448e9, 50e9),
            _preset("t4", 65e12, 16 * 10**9, 320e9, 16e9, 16e9, 6.25e9),
            _preset("cpu", 5e10, 16 * 2**30, 1e10, 0.0, 2e9, 1e9),
        )
    }
)
"""The devices of `Cluster.preset`, as a node of one: figures as the vendors publish them, rounded, but for FLOP/s.

FLOP/s are what large products of 16-bit matrices were measured to reach, where that is published: "maximum achievable
matmul FLOPS" in S. Bekman, Machine Learning Engineering (accelerators), 60% to 86% of the vendors' dense peaks, which
are 312e12 for an A100, 989.4e12 for H100 and H200, 2250e12, 191.5e12 (MI250X) and 1307.4e12 (MI300X). Those of the
others are peaks. Bytes/s of a link are one direction. In order: FLOP/s, memory, its bandwidth, to the host's memory
(x16 of the PCIe of the data sheet), to a device of the node, to one of another node. Where a vendor's system has no
adapter a device, that last one is assumed.

* ``h100-80``, ``h200``: NVIDIA's data sheets of the H100 SXM and H200 SXM (NVLink 4: 900 GB/s, both directions); DGX
  H100 user guide: one 400 Gb/s port of InfiniBand a GPU.
* ``b200``: NVIDIA's HGX B200 data sheet, an eighth of the board (NVLink 5: 1.8 TB/s); 400 Gb/s a GPU (DGX B200).
* ``a100-80``, ``a100-40``: NVIDIA's A100 SXM data sheet (NVLink 3: 600 GB/s); DGX A100 user guide: 200 Gb/s a GPU.
* ``l40s``: NVIDIA's L40S data sheet (PCIe 4.0 x16); 200 Gb/s assumed.
* ``rtx4090``: NVIDIA's Ada architecture paper, 16-bit with 32-bit accumulation (PCIe 4.0 x16); 100 Gb/s assumed.
* ``mi250x``: one of the two dies that an AMD MI250X shows as devices: half of AMD's data sheet; 50 GB/s is one Infinity
  Fabric link to a neighbour, 36 GB/s that to the processor, 12.5 GB/s an eighth of the four Slingshot ports of a
  Frontier node (OLCF's user guide).
* ``mi300x``: AMD's MI300X data sheet (seven Infinity Fabric links of 128 GB/s, both directions); 400 Gb/s a device.
* ``t4``: NVIDIA's T4 data sheet, 16-bit (PCIe 3.0 x16); 50 Gb/s assumed.
* ``cpu``: the order of magnitude of one desktop core in 32 bits, with shared memory as the link, and no host apart;
  `autopart profile` measures the machine at hand.
"""


def parse_bytes(size: str | int) -> int:
    """Bytes from ``"16GiB"``, ``"24 GB"``, ``"1.5TiB"`` or a number of bytes. GB is 1e9, GiB 2**30."""
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise TypeError(f"memory: expected bytes such as '16GiB' or a whole number, not {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or (match[2] or "B").upper() not in _UNITS:
            raise ValueError(f"memory: cannot read {size!r}; write for example '16GiB', '24GB' or a number of bytes")
        size = ceil(Fraction(match[1]) * _UNITS[(match[2] or "B").upper()])
    if size < 1:
        raise ValueError(f"memory: must be at least 1 byte, not {size}")
    return size
