"""Clusters and sizes in bytes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from autopart.cluster import Cluster, parse_bytes

PRESETS = ("h100-80", "h200", "b200", "a100-80", "a100-40", "l40s", "rtx4090", "mi250x", "mi300x", "t4", "cpu")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 16 * 2**30),
        ("24GB", 24 * 10**9),
        (" 1.5 TiB ", 3 * 2**39),
        ("0.1gib", 107374183),
        ("512mb", 512 * 10**6),
        ("7", 7),
        ("7B", 7),
        (7, 7),
    ],
)
def test_bytes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "16 gigs", "-1GB", "1e3", "nan", "0", 0, -5])
def test_wrong_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1GB"])
def test_wrong_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="memory"):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    one, many = Cluster.preset(name, per_node=4), Cluster.preset(name, nodes=2, per_node=4)
    assert (one.devices, many.devices, one.name) == (4, 8, name)
    assert one.memory == many.memory >= 16 * 10**9
    assert one.link_bandwidth > many.link_bandwidth, "the slower links between nodes bind"
    with pytest.raises(FrozenInstanceError):
        one.devices = 5  # type: ignore[misc]


def test_presets_agree_with_the_data_sheets() -> None:
    h100, a100 = Cluster.preset("h100-80"), Cluster.preset("a100-40")
    assert (h100.flops, h100.memory, h100.bandwidth) == (989.4e12, 80e9, 3.35e12)
    assert (a100.flops, a100.memory, a100.bandwidth) == (312e12, 40e9, 1.555e12)


def test_bad_clusters_name_the_field() -> None:
    with pytest.raises(ValueError, match="unknown device 'h100'; known are h100-80"):
        Cluster.preset("h100")
    with pytest.raises(ValueError, match="nodes"):
        Cluster.preset("cpu", nodes=0)
    good = {"devices": 2, "memory": 1, "flops": 1.0, "bandwidth": 1.0, "link_bandwidth": 1.0}
    Cluster(**good)
    for field, value in [
        ("devices", 0),
        ("memory", 1.5),
        ("flops", 0.0),
        ("bandwidth", -1.0),
        ("link_bandwidth", float("nan")),
    ]:
        with pytest.raises(ValueError, match=field):
            Cluster(**{**good, field: value})
    with pytest.raises(ValueError, match="link_latency"):
        Cluster(**good, link_latency=-1.0)
