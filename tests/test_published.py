"""The script of published runs: their formulas and layouts, and a small run from module to table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autopart.ir.captured import Captured
from autopart.passes.costs import costs
from autopart.passes.recompute import recompute
from autopart.passes.segment import segment

ROOT = Path(__file__).parent.parent
PUBLISHED = (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The module, with the other benchmarks beside it; their names are not left behind."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import published  # type: ignore[import-not-found]

    yield published
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in {"published", "planner"} - before:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def small(script: ModuleType) -> Any:
    """A run of few layers whose products are large beside all else, with the layout of the larger ones."""
    shape = replace(script.gpt(2, 1024, 8), vocabulary=4096, length=256)
    return script.Run("small", shape, 8, 16, tensor=2, pipeline=2, microbatch=2, teraflops=1.0)


@pytest.fixture(scope="module")
def step(script: ModuleType, small: Any) -> Captured:
    return script.captured(small.shape, small.batch)  # type: ignore[no-any-return]


def test_the_ten_models_have_the_parameters_of_the_paper(script: ModuleType) -> None:
    found = [script.parameters(run.shape) / 1e9 for run in script.MEGATRON]
    assert found == pytest.approx(PUBLISHED, abs=0.051)
    names = [run.name for run in script.MEGATRON]
    assert names == ["1.7B", "3.6B", "7.5B", "18B", "39B", "76B", "145B", "310B", "530B", "1T"]
    assert script.parameters(script.FRONTIER[0].shape) == pytest.approx(22e9, rel=0.01)
    assert script.parameters(script.FRONTIER[1].shape) == pytest.approx(175e9, rel=0.01)


def test_the_layouts_use_all_devices_and_the_whole_batch(script: ModuleType) -> None:
    for run in (*script.MEGATRON, *script.FRONTIER):
        assert run.tensor * run.pipeline * run.data == run.devices == run.cluster.devices, run.name
        assert run.data * run.microbatches * run.microbatch == run.batch, run.name
        assert run.shape.layers % (run.pipeline * run.chunks) == 0, run.name
        assert run.chunks == 1 or run.microbatches % run.pipeline == 0, f"{run.name}: interleaving takes whole rounds"
        stages = script.theirs(run)["stages"] or []
        assert len(stages) == run.pipeline * run.chunks - 1, run.name


def test_the_papers_flops_of_a_step_are_those_of_the_published_rate(script: ModuleType) -> None:
    """Of 145B: 24.8 s a step by rate, batch and devices; of 1T 84 days for 450e9 tokens, by the paper's equation 4."""
    run = script.MEGATRON[6]
    assert script.flops(run.shape, run.batch) / run.devices / run.teraflops / 1e12 == pytest.approx(24.8, abs=0.05)
    last = script.MEGATRON[-1]
    seconds = script.flops(last.shape, last.batch) / last.devices / last.teraflops / 1e12
    assert seconds * 450e9 / (last.batch * last.shape.length) / 86400 == pytest.approx(84, abs=1.5)


def test_the_formulas_count_what_the_graph_has(script: ModuleType, small: Any, step: Captured) -> None:
    segmented = segment(step)
    sizes = {item.target: item.value.nbytes(1) // 2 for item in step.of_kind("parameter")}
    assert sum(sizes.values()) == pytest.approx(script.parameters(small.shape), rel=1e-3)
    again = costs(recompute(segmented, script.theirs(small)["recompute"]))
    numbers = [cost.at(small.batch) for cost in again]
    counted = sum(each.forward_flops + each.backward_flops for each in numbers)
    shape = small.shape
    last = 2 * small.batch * shape.length * shape.width * shape.inner  # its result is not needed again
    expected = script.flops(shape, small.batch) - shape.layers * last
    assert 1 < counted / expected < 1.02, "products, and little beside them"


def test_a_run_from_module_to_table(
    script: ModuleType, small: Any, step: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, *pinned_meshes = script.attempts(small)
    assert free == {} and [each["mesh"]["pp"] for each in pinned_meshes] == [2, 1, 2]
    monkeypatch.setattr(script, "attempts", lambda run: pinned_meshes[-1:])  # the free search has tests of its own
    found = script.outcome(small, step, quick=True)
    pinned, ours = found.pinned, found.ours
    assert (dict(pinned.mesh.axes), pinned.microbatches) == ({"pp": 2, "dp": 2, "tp": 2}, 4)
    assert [stage.segments[0] for stage in pinned.stages] == ["token", "blocks.1"]
    assert [name for name in pinned.recompute if name.startswith("blocks")] == ["blocks.0", "blocks.1"]
    assert ours.prediction.step_seconds < pinned.prediction.step_seconds and not ours.recompute
    assert found.ratio == pytest.approx(1 / found.reached(pinned))

    asked = dict(script.changes(small, ours))
    lighter = "recomputation of no more than memory asks for"
    assert {lighter, "stages that begin anywhere"} <= set(asked) and not any("mesh" in name for name in asked)
    plan = script.planned(step, small, asked[lighter])
    assert (plan.mesh, plan.microbatches, plan.recompute) == (pinned.mesh, pinned.microbatches, ())
    told = replace(found, changed=((lighter, plan), ("nothing", None)))
    assert told.choice.startswith(lighter) and "does not fit" in str(told)
    assert told.row.startswith("| small | 1 |") and told.choice in told.row


def test_what_does_not_fit_is_no_plan(script: ModuleType, small: Any, step: Captured) -> None:
    assert script.planned(step, small, {**script.theirs(small), "memory": "10MiB"}) is None


def test_a_llama_counts_six_a_parameter_and_token(script: ModuleType) -> None:
    """26.5 s a step at 70.57% of the peak of 64 A100, as published of Llama-13B with 128,000 words."""
    work = script.model_flops(script.LLAMA, script.LLAMA_BATCH)
    assert work / script.LLAMA_DEVICES / script.A100 / 0.7057 == pytest.approx(26.5, abs=0.05)
