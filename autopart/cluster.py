"""The devices that a plan is made for, and sizes in bytes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

# name: (FLOP/s, memory bytes, memory bytes/s, bytes/s to a device of the node, bytes/s per device between nodes).
# Nominal figures as the vendors publish them, rounded: dense peaks (bfloat16 tensor cores; RTX 4090 with fp32
# accumulation, T4 fp16; MI250X is one of its two dies), one direction of a link. Between nodes: the adapter usual with
# each. "cpu": the order of magnitude of one desktop core in float32, with shared memory as the link.
_PRESETS = {
    "h100-80": (989.4e12, 80 * 10**9, 3.35e12, 450e9, 50e9),
    "h200": (989.4e12, 141 * 10**9, 4.8e12, 450e9, 50e9),
    "b200": (2250e12, 180 * 10**9, 7.7e12, 900e9, 50e9),
    "a100-80": (312e12, 80 * 10**9, 2.039e12, 300e9, 25e9),
    "a100-40": (312e12, 40 * 10**9, 1.555e12, 300e9, 25e9),
    "l40s": (362e12, 48 * 10**9, 864e9, 32e9, 25e9),
    "rtx4090": (165.2e12, 24 * 10**9, 1.008e12, 32e9, 12.5e9),
    "mi250x": (191.5e12, 64 * 10**9, 1.638e12, 50e9, 12.5e9),
    "mi300x": (1307.4e12, 192 * 10**9, 5.3e12, 448e9, 50e9),
    "t4": (65e12, 16 * 10**9, 320e9, 16e9, 6.25e9),
    "cpu": (5e10, 16 * 2**30, 1e10, 2e9, 1e9),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices joined by equal links (the slowest link a ring over all of them has to cross)."""

    devices: int
    memory: int  # bytes per device
    flops: float  # FLOP/s per device
    bandwidth: float  # bytes/s of device memory
    link_bandwidth: float  # bytes/s that a device sends to its neighbour
    link_latency: float = 5e-6  # seconds per message
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("devices", "memory"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Cluster: {field} must be a whole number of at least 1, not {value!r}")
        for field in ("flops", "bandwidth", "link_bandwidth"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"Cluster: {field} must be positive and finite, not {getattr(self, field)!r}")
        if not 0 <= self.link_latency < float("inf"):
            raise ValueError(f"Cluster: link_latency must be at least 0 and finite, not {self.link_latency!r}")

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1, per_node: int = 1) -> Cluster:
        """A cluster of `nodes` nodes with `per_node` devices each; ValueError for an unknown name."""
        if name not in _PRESETS:
            raise ValueError(f"Cluster.preset: unknown device {name!r}; known are {', '.join(_PRESETS)}")
        for field, value in (("nodes", nodes), ("per_node", per_node)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Cluster.preset: {field} must be a whole number of at least 1, not {value!r}")
        flops, memory, bandwidth, inside, between = _PRESETS[name]
        return cls(nodes * per_node, memory, flops, bandwidth, inside if nodes == 1 else between, name=name)


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
