"""Clusters and sizes in bytes."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from autopart import cluster
from autopart.cluster import Cluster, Device, Group, Joint, Link, parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost
from autopart.solver.choose import choose

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
        one.name = "other"  # type: ignore[misc]


def test_presets_agree_with_what_is_published() -> None:
    h100, a100 = Cluster.preset("h100-80"), Cluster.preset("a100-40")
    assert (h100.flops, h100.memory, h100.bandwidth) == (792.1e12, 80e9, 3.35e12)
    assert (a100.flops, a100.memory, a100.bandwidth) == (267.9e12, 40e9, 1.555e12)
    assert set(cluster.PRESETS) == set(PRESETS)
    for name in PRESETS:  # the docstring says where each comes from
        assert re.search(rf"^\* .*``{name}``", Path(cluster.__file__).read_text(), re.MULTILINE), name


GOOD = {"devices": 2, "memory": 1, "flops": 1.0, "bandwidth": 1.0, "link_bandwidth": 1.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices", 0),
        ("memory", 1.5),
        ("memory", True),
        ("flops", 0.0),
        ("flops", "fast"),
        ("bandwidth", -1.0),
        ("link_bandwidth", float("nan")),
        ("link_latency", -1.0),
        ("link_latency", float("inf")),
    ],
)
def test_bad_clusters_name_the_field(field: str, value: object) -> None:
    assert Cluster.uniform(**GOOD).devices == 2
    with pytest.raises(ValueError, match=f"{field} must be"):
        Cluster.uniform(**{**GOOD, field: value})


def test_bad_presets_name_the_field() -> None:
    with pytest.raises(ValueError, match="unknown device 'h100'; known are h100-80"):
        Cluster.preset("h100")
    with pytest.raises(ValueError, match="nodes"):
        Cluster.preset("cpu", nodes=0)


FAST, SLOW = Link(100.0, 1e-6), Link(10.0, 3e-6)
BIG, SMALL = Device("big", 80, 9.0, 5.0), Device("small", 24, 4.0, 6.0)


def mixed() -> Cluster:
    """Two nodes of two big devices and one of three small ones, over a slow link."""
    big = Cluster((Group(BIG, 2, 2, FAST, Link(50.0)),), name="big")
    return big.joined(Cluster((Group(SMALL, 1, 3, Link(20.0), SLOW),), name="small"), SLOW)


def test_groups_may_differ() -> None:
    made = mixed()
    assert made.devices == 7 and made.name == "big+small"
    assert [made.device(i).name for i in range(7)] == ["big"] * 4 + ["small"] * 3
    assert made.link(0, 1) == made.link(3, 2) == FAST
    assert made.link(1, 2) == Link(50.0) and made.link(4, 6) == Link(20.0)
    assert made.link(0, 4) == made.link(6, 3) == SLOW
    assert (made.memory, made.flops, made.bandwidth) == (24, 4.0, 5.0), "the weakest of each"
    assert (made.link_bandwidth, made.link_latency) == (10.0, cluster.LATENCY)
    assert str(made).count("\n") == 2 and "3 small: 4 FLOP/s" in str(made)
    for number in (7, -1, 1.0, True):
        with pytest.raises(ValueError, match=r"there is no device .*; the 7 count from 0"):
            made.device(number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device 2 has no link to itself"):
        made.link(2, 2)


def test_joining_is_associative() -> None:
    """Three clusters joined over one link, from the left or from the right."""
    one, two, three = (Cluster((Group(BIG, n, 1, FAST, FAST),), name=str(n)) for n in (1, 2, 3))
    assert one.joined(two, SLOW).joined(three, SLOW) == one.joined(two.joined(three, SLOW), SLOW)


def test_bad_groups_name_the_field() -> None:
    group = Group(BIG, 1, 2, FAST, FAST)
    for field, value in {"device": "h100-80", "nodes": 0, "per_node": 2.0, "inside": 5e9, "between": None}.items():
        with pytest.raises(ValueError, match=f"^Group: {field} must be"):
            replace(group, **{field: value})
    with pytest.raises(ValueError, match=r"^Cluster.joined: other must be of Cluster, not 't4'"):
        mixed().joined("t4", FAST)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Joint: link must be of Link, not 5"):
        mixed().joined(mixed(), 5e9)  # type: ignore[arg-type]
    for groups in ((), [group], (BIG,)):
        with pytest.raises(ValueError, match=r"^Cluster: groups must be"):
            Cluster(groups)  # type: ignore[arg-type]
    for joints in ((), (Joint(1, 0, SLOW),), (Joint(0, 1, SLOW),) * 2, (Joint(0, 2, SLOW),)):
        with pytest.raises(ValueError, match=r"^Cluster: joints must link every two of the 2 groups once"):
            Cluster((group, group), joints)
    with pytest.raises(ValueError, match=r"^Cluster: joints must be of Joint"):
        Cluster((group, group), (SLOW,))  # type: ignore[arg-type]


def test_clusters_are_saved_and_loaded(tmp_path: Path) -> None:
    for made in (mixed(), Cluster.preset("mi300x", nodes=4, per_node=8), Cluster.uniform(**GOOD)):
        made.save(tmp_path / "cluster.json")
        assert Cluster.load(tmp_path / "cluster.json") == made


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 1, "cluster: cannot read schema version 1; this autopart reads 2"),
        (["schema"], "autopart.plan", "not a cluster: expected an object with schema 'autopart.cluster'"),
        (["more"], 1, "cluster: unknown field more"),
        (["cluster", "groups", 0, "nodes"], 0, r"cluster.groups\[0\]: Group: nodes must be a whole number"),
        (["cluster", "groups", 0, "device", "flops"], "1e12", r"device.flops: expected float, got '1e12'"),
        (["cluster", "groups", 0, "device", "flops"], float("nan"), "NaN is not a number that a cluster can hold"),
        (["cluster", "joints"], [], "Cluster: joints must link every two"),
    ],
)
def test_other_files_are_refused(path: list[str | int], value: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    mixed().save(file)
    data = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as refusal:
        Cluster.load(file)
    assert str(file) in str(refusal.value)


def test_a_plan_counts_every_device_as_the_weakest() -> None:
    costs = [SegmentCost("layer", 100, 200, 30, 40, 8, 8, 50, 60)]
    pins = {"batch": 7, "mesh": {"dp": 7}, "placement": "ddp", "microbatches": 1}
    unlike = choose(costs, cluster=mixed(), memory="1MB", **pins)
    slowest = Cluster.uniform(7, 24, 4.0, 5.0, 10.0)
    assert unlike.prediction == choose(costs, cluster=slowest, memory="1MB", **pins).prediction
    with pytest.raises(PlanInfeasible):
        choose(costs, cluster=mixed(), **pins)  # 32 bytes of states, 24 on the small ones
