"""Timelines as text, trace and picture: what is in them is what ran."""

import json
import xml.etree.ElementTree as tree

import pytest

from autopart.schedules import build, simulate
from autopart.schedules.drawing import COLOURS

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("1f1b", "dualpipe", "vocab", "seq1f1b", "paci")


def made(name):
    return simulate(build(name, ranks=4, microbatches=12), {"F": 1, "I": 1, "W": 1, "S": 0.4, "OPT": 0.5})


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_has_every_action_when_it_ran(name):
    timeline = made(name)
    events = json.loads(timeline.to_chrome())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {rank: f"rank {rank}" for rank in range(4)}
    ran = [(e["tid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    assert ran == [
        (span.rank, str(span.action), pytest.approx(span.start), pytest.approx(span.end)) for span in timeline.spans
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_has_a_box_for_every_action(name):
    timeline = made(name)
    picture = tree.fromstring(timeline.to_svg())
    boxes = [each for each in picture.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    parts = [(span, part) for span in timeline.spans for part in span.action.parts]
    assert len(boxes) == len(parts)
    scale = 1200 / timeline.makespan
    for box, (span, part) in zip(boxes, parts, strict=True):
        assert box.find(f"{SVG}title").text.startswith(f"{span.action}: ")
        assert box.get("fill") == COLOURS[part.kind][0]
        assert float(box.get("x")) == pytest.approx(60 + span.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((span.end - span.start) * scale, abs=0.01)
        assert span.rank * 32 < float(box.get("y")) < (span.rank + 1) * 32
    words = {each.text for each in picture.iter(f"{SVG}text")}
    assert {"rank 0", "rank 3", "F forward", "0", "11"} <= words
    assert all(0 <= float(box.get("x")) <= float(picture.get("width")) - 60 for box in boxes)


def test_numbers_that_do_not_fit_are_left_out():
    picture = tree.fromstring(simulate(build("gpipe", ranks=1, microbatches=600)).to_svg())
    assert "599" not in {each.text for each in picture.iter(f"{SVG}text")}


def test_text():
    assert str(simulate(build("1f1b", ranks=2, microbatches=2), {"F": 1, "B": 2})).splitlines() == [
        "makespan      9",
        "flush bubble  3 (33.3%)",
        "span bubble   3 (33.3%)",
        "rank 0    66.7% busy, 2 microbatches held",
        "         FFFFFFFFFFFFF.............BBBBBBBBBBBBBB......BBBBBBBBBBBBBB",
        "rank 1    66.7% busy, 1 microbatches held",
        "         ......FFFFFFFBBBBBBBBBBBBBFFFFFFFBBBBBBBBBBBBB..............",
    ]
    assert str(simulate(build("1f1b", ranks=1, microbatches=1), {"F": 0, "B": 0})).startswith("makespan      0\n")
