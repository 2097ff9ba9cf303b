"""Plans: what they refuse, their JSON, their text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart.ir.mesh import Mesh
from autopart.ir.placement import STRATEGIES, Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory, first_match
from tests.placements import VALID

PLACEMENTS = st.sampled_from(STRATEGIES).map(Placement.preset) | st.sampled_from(VALID).map(
    lambda modes: Placement((("dp", modes),))
)
BYTES = st.integers(0, 2**62)
SECONDS = st.floats(0, 1e6, allow_nan=False)
TEXT = st.text(max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp, dp, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    mesh = Mesh.of({"pp": pp, "dp": dp})
    memory = st.builds(StageMemory, BYTES, BYTES, BYTES, BYTES, BYTES)
    sent = tuple(((("all_reduce", draw(BYTES)), ("all_gather", draw(BYTES)))) for _ in range(mesh.size))
    return Plan(
        mesh=mesh,
        stages=tuple(Stage((f"a.{k}", f"b.{k}"), mesh.column(k)) for k in range(pp)),
        placements=((draw(TEXT), draw(PLACEMENTS)), ("*", draw(PLACEMENTS))),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        microbatches=microbatches,
        recompute=tuple(draw(st.lists(st.sampled_from([f"a.{k}" for k in range(pp)]), max_size=2, unique=True))),
        batch=dp * microbatches + draw(st.integers(0, 3)),
        prediction=Prediction(
            draw(SECONDS),
            draw(SECONDS),
            tuple(draw(SECONDS) for _ in range(pp)),
            tuple(draw(memory) for _ in range(pp)),
            draw(st.sampled_from([(), sent])),
        ),
        optimality=draw(TEXT),
        notes=tuple(draw(st.lists(TEXT, max_size=2))),
        fingerprint=draw(TEXT),
    )


def example() -> Plan:
    mesh = Mesh.of({"pp": 2, "dp": 2})
    return Plan(
        mesh=mesh,
        stages=(Stage(("embed", "h.0", "h.1"), mesh.column(0)), Stage(("h.2", "head"), mesh.column(1))),
        placements=(("h.*.mlp", Placement.fsdp()), ("*", Placement.zero1())),
        schedule="1f1b",
        microbatches=4,
        recompute=(),
        batch=8,
        prediction=Prediction(
            2.5e-3,
            0.2,
            (4e-4, 5e-4),
            (StageMemory(2**20, 2**21, 2**20, 3 * 2**20, 0), StageMemory(2**20, 2**20, 2**20, 2**20, 10)),
            ((("all_reduce", 100),), (("all_reduce", 100),), (("all_reduce", 60),), ()),
        ),
        optimality="optimal split",
        notes=("mesh pinned",),
        fingerprint="abc",
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.diff(Plan.from_json(plan.to_json())) == ""
    assert plan.summary() and plan.explain()


def test_files_round_trip(tmp_path: Path) -> None:
    example().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == example()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 2, "schema version 2"),
        (["version"], True, "schema version True"),
        (["schema"], "other", "expected an object with schema"),
        (["extra"], 1, "unknown field extra"),
        (["plan"], None, "plan: expected an object"),
        (["plan", "microbatches"], "4", "plan.microbatches: expected int, got '4'"),
        (["plan", "microbatches"], True, "plan.microbatches: expected int"),
        (["plan", "microbatches"], 4.0, "plan.microbatches: expected int"),
        (["plan", "microbatches"], 9, "batch of 8 cannot be cut"),
        (["plan", "microbatches"], 0, "batch of 8 cannot be cut"),
        (["plan", "schedule"], 1, "plan.schedule: expected str"),
        (["plan", "stages", 1, "ranks"], [0, "x"], r"plan.stages\[1\].ranks\[1\]: expected int, got 'x'"),
        (["plan", "stages", 1, "ranks"], [0, 3], r"stage 1 is on the ranks \(0, 3\)"),
        (["plan", "stages", 1, "segments"], [], "every stage needs a segment"),
        (["plan", "stages", 1, "segments"], ["h.0"], "exactly one stage"),
        (["plan", "stages", 0, "code"], "import os", r"plan.stages\[0\]: unknown field code"),
        (["plan", "mesh", "axes"], [["pp", 2], ["dp", -2]], "plan.mesh: mesh: the size of 'dp'"),
        (["plan", "mesh", "axes"], [["pp", 4]], r"stage 0 is on the ranks \(0, 1\); on a mesh of pp=4 a stage"),
        (["plan", "mesh", "axes"], [["pp", 2, 2]], "expected a list of 2 items, got 3"),
        (["plan", "recompute"], ["h.1", "h.3"], "recompute names 'h.3', but the segments are"),
        (["plan", "placements"], [], "last placement pattern"),
        (["plan", "placements", 1, 1, "axes", 0, 1, "optimizer"], "X", "expected one of R, S, S[*], M, O"),
        (["plan", "placements", 1, 1, "axes", 0, 1, "optimizer"], [], "expected one of R, S, S[*], M, O"),
        (["plan", "prediction", "memory"], [], "must speak of 2 stages"),
        (["plan", "prediction", "sent"], [[], []], "all 4 ranks"),
        (["plan", "prediction", "bubble"], "0.2", "plan.prediction.bubble: expected float"),
        (["plan", "prediction", "bubble"], float("nan"), "NaN is not a number"),
        (
            ["plan", "prediction", "bubble"],
            0.1,
            "changed since it was written: prediction.bubble; to change a plan, use",
        ),
        (["plan", "prediction", "memory", 1, "activations"], 1, "changed since it was written: prediction.memory;"),
        (["plan", "optimality"], "optimal", "changed since it was written: optimality;"),
        (["plan", "microbatches"], 2, "changed since it was written: microbatches;"),
        (["digests", "batch"], "0", "changed since it was written: batch;"),
        (
            ["digests"],
            None,
            "changed since it was written: mesh.axes, mesh.coupled, mesh.shares, mesh.widths, stages, ",
        ),
    ],
)
def test_tampered_files_are_refused(path: list[str | int], value: object, message: str, tmp_path: Path) -> None:
    data = json.loads(example().to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as refusal:
        Plan.load(file)
    assert str(file) in str(refusal.value)


def test_text_names_runs_of_recomputed_segments() -> None:
    plan = replace(example(), recompute=("embed", "h.1", "h.2", "head"))
    assert "recompute embed, h.1 .. head\n" in plan.summary()
    assert plan.diff(example()) == "recompute: embed, h.1, h.2, head -> nothing"


def test_missing_fields_and_other_files_are_refused(tmp_path: Path) -> None:
    data = json.loads(example().to_json())
    del data["plan"]["batch"]
    with pytest.raises(ValueError, match="plan: missing field batch"):
        Plan.from_json(json.dumps(data))
    for text in ("", "[]", "3", "{", "__import__('os')"):
        (tmp_path / "x").write_text(text)
        with pytest.raises(ValueError, match="x: "):
            Plan.load(tmp_path / "x")


def test_summary_shows_every_choice() -> None:
    text = example().summary()
    for part in (
        "pp=2 x dp=2",
        "1f1b",
        "4 microbatches",
        "h.*.mlp: fsdp; *: zero1",
        "embed .. h.1",
        "2,3",
        "3.0 MiB",
        "20.0%",
    ):
        assert part in text
    assert "rank 0,1 sends per step: all_reduce 100 B" in text
    assert "rank 3 sends per step: nothing" in text


def test_explain_names_what_binds() -> None:
    text = example().explain()
    assert "slowest is stage 1 (h.2 .. head): 500.00 us" in text
    assert "fullest is stage 0 (embed .. h.1): 7.0 MiB = 1.0 MiB parameters + 2.0 MiB optimizer" in text
    assert "- mesh pinned" in text


def test_diff_names_what_changes() -> None:
    plan = example()
    other = replace(plan, microbatches=2, placements=plan.placements[1:])
    assert plan.diff(other).splitlines() == ["microbatches: 4 -> 2", "placement: h.*.mlp: fsdp; *: zero1 -> *: zero1"]


def test_first_matching_pattern_holds_for_what_is_inside() -> None:
    rules = (
        ("h.*.mlp", Placement.fsdp()),
        ("head", Placement.zero2()),
        ("*.weight", Placement.zero1()),
        ("*", Placement.ddp()),
    )
    assert first_match(rules, "h.3.mlp.up.weight") == Placement.fsdp()
    assert first_match(rules, "head.weight") == Placement.zero2()
    assert first_match(rules, "header.weight") == Placement.zero1()
    assert first_match(rules, "header.bias") == Placement.ddp()
    assert example().placement_of("h.0.mlp") == Placement.fsdp()
    with pytest.raises(ValueError, match="no pattern matches 'x'"):
        first_match(rules[:2], "x")


def test_a_plan_of_another_model_is_refused_with_what_differs() -> None:
    x, pins = torch.randn(4, 8), {"loss_fn": torch.sum, "capture": "direct"}

    def model(width: int = 8, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, width if i else 8, dtype=dtype) for i in range(layers)))

    plan = autopart.plan(model(), (x,), **pins)
    assert autopart.compile(model(), plan, (x,), **pins)
    for other, sample, message in (
        (model(width=9), x, "another model: shapes differ; plan again"),
        (model(dtype=torch.float64), x.double(), "another model: dtypes differ; plan again"),
        (model(layers=3), x, "another model: names and shapes and dtypes differ; it has 4 parameters, this one 6;"),
    ):
        with pytest.raises(ValueError, match=message):
            autopart.compile(other, plan, (sample,), **pins)
