"""Closed forms of a transformer layer against the published numbers. Each test says in which convention these are."""

from __future__ import annotations

import pytest
import sympy

from autopart.ir.placement import Mode, Modes, Placement
from autopart.ir.transformer import (
    activation_bytes,
    expert_parallel_bytes,
    pipeline_activation_bytes,
    pipeline_bubble,
    pipeline_bytes,
    sequence_parallel_bytes,
    tensor_parallel_bytes,
    ulysses_bytes,
)
from autopart.schedules import build, simulate

GPT3 = {"sequence": 2048, "batch": 1, "hidden": 12288, "heads": 96}
MT_NLG = {"sequence": 2048, "batch": 1, "hidden": 20480, "heads": 128}
WAYS = (
    {},
    {"tp": 8},
    {"tp": 8, "sequence_parallel": True},
    {"tp": 8, "recompute": "selective"},
    {"tp": 8, "sequence_parallel": True, "recompute": "selective"},
    {"tp": 8, "recompute": "full"},
)


def test_activations_are_the_published_formulas() -> None:
    """Korthikanti et al. 2022, equations 1 to 6 and table 2: bytes per layer and microbatch."""
    s, b, h, a, t = sympy.symbols("s b h a t", positive=True)
    sizes = {"sequence": s, "batch": b, "hidden": h, "heads": a}
    expected = (
        s * b * h * (34 + 5 * a * s / h),
        s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        s * b * h / t * (34 + 5 * a * s / h),
        s * b * h * (10 + 24 / t),
        34 * s * b * h / t,
        2 * s * b * h,
    )
    for way, formula in zip(WAYS, expected, strict=True):
        found = activation_bytes(**sizes, **{**way, **({"tp": t} if "tp" in way else {})})
        assert sympy.simplify(found - formula) == 0, way


@pytest.mark.parametrize(
    ("shape", "mebibytes"), [(GPT3, (2736, 552, 342, 312, 102, 48)), (MT_NLG, (3920, 840, 490, 520, 170, 80))]
)
def test_activations_of_published_shapes(shape: dict[str, int], mebibytes: tuple[int, ...]) -> None:
    """GPT-3 and MT-NLG, t = 8: MiB (2**20) per layer, batch 1."""
    assert tuple(activation_bytes(**shape, **way) / 2**20 for way in WAYS) == mebibytes


def test_activations_of_a_7b_layer() -> None:
    assert activation_bytes(sequence=4096, batch=1, hidden=4096, heads=32) == 3_254_779_904


@pytest.mark.parametrize(("shape", "ratio", "saved"), [(GPT3, 80, 0.70), (MT_NLG, 64, 0.65)])
def test_what_selective_recomputation_saves(shape: dict[str, int], ratio: int, saved: float) -> None:
    """5 a s / h, and the share of a layer that is the scores: printed as 70% and 65%."""
    whole, selective = (activation_bytes(**shape, recompute=way) for way in ("none", "selective"))
    assert (whole - selective) / (shape["sequence"] * shape["hidden"]) == ratio
    assert 1 - selective / whole == pytest.approx(saved, abs=0.01)


def test_the_first_stage_of_a_pipeline() -> None:
    """Korthikanti et al. 2022, equation 5: 1F1B keeps L layers' worth on the first stage, whatever p is."""
    layer = activation_bytes(**GPT3, tp=8, sequence_parallel=True)
    for stages in (1, 4, 16):
        assert pipeline_activation_bytes(layer, layers=96, stages=stages) == 96 * layer
    p, v = sympy.symbols("p v", positive=True)
    found = pipeline_activation_bytes(sympy.Integer(1), layers=sympy.Integer(96), stages=p, chunks=v)
    assert sympy.simplify(found - 96 * (1 + (p - 1) / (p * v))) == 0


def test_tensor_parallel_traffic() -> None:
    """Narayanan et al. 2021, section 3.2: elements sent per layer, device and microbatch, exact (t-1)/t."""
    sizes = {"sequence": 2048, "batch": 1, "hidden": 12288}
    assert tensor_parallel_bytes(**sizes, tp=8, itemsize=1) == 176_160_768
    assert tensor_parallel_bytes(**sizes, tp=8) == 352_321_536
    assert pipeline_bytes(**sizes, itemsize=1) == 25_165_824
    assert pipeline_bytes(**sizes) == 50_331_648
    b, s, h, t = sympy.symbols("b s h t", positive=True)
    found = tensor_parallel_bytes(batch=b, sequence=s, hidden=h, tp=t, itemsize=1)
    assert sympy.simplify(found - 8 * b * s * h * (t - 1) / t) == 0


def test_partitioned_checkpoints_add_a_twelfth() -> None:
    """ZeRO (Rajbhandari et al. 2020), section 8: 12 b s h elements with full recomputation, P_a adds b s h; large t.

    P_a keeps each layer's input in parts on the tensor axis and gathers it in the backward: activations S*.
    """
    b, s, h, t = sympy.symbols("b s h t", positive=True)
    block = tensor_parallel_bytes(batch=b, sequence=s, hidden=h, tp=t, itemsize=1, recompute=True)
    assert sympy.limit(block, t, sympy.oo) == 12 * b * s * h
    partitioned = Placement((("tp", Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED, Mode.GATHERED)),))
    costs = partitioned.costs(parameters=0, devices=t, activations=b * s * h, largest_activation=b * s * h)
    assert sympy.limit(costs.traffic, t, sympy.oo) == b * s * h and costs.resident == b * s * h / t
    assert sympy.simplify(costs.traffic / block) == sympy.Rational(1, 12)  # 8.3%, exactly, at every t
    # With the part on the host there is none on the device, and twice a part goes over the host link.
    offloaded = Placement((("dp", Modes(activations=Mode.OFFLOADED)),)).over(partitioned)
    moved = offloaded.costs(parameters=0, devices={"dp": 1, "tp": t}, activations=b * s * h)
    assert moved.resident == 0 and moved.host == b * s * h / t and moved.by_axis["host"] == 2 * b * s * h / t
    assert moved.by_axis["tp"] == costs.by_axis["tp"]


def test_sequence_traffic_of_ulysses() -> None:
    """Jacobs et al. 2023: elements per layer and link, without (P-1)/P; constant if N and P grow together."""
    sizes = {"hidden": 4096, "itemsize": 1}
    assert ulysses_bytes(sequence=131072, cp=64, **sizes) == 33_554_432
    assert sequence_parallel_bytes(sequence=131072, **sizes) == 2_147_483_648
    assert ulysses_bytes(sequence=2 * 131072, cp=128, **sizes) == 33_554_432


def test_expert_traffic() -> None:
    """Elements per layer of experts, device and step, balanced, exact (E-1)/E."""
    sizes = {"tokens": 4096, "hidden": 4096, "top_k": 2, "ep": 8, "itemsize": 1}
    assert expert_parallel_bytes(**sizes) == 117_440_512
    assert expert_parallel_bytes(**sizes, capacity=1.25) == 1.25 * 117_440_512


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "over_ideal", "over_total"),
    [(4, 8, 1, 0.375, 0.2727), (4, 8, 2, 0.1875, 0.1579), (8, 32, 1, 0.21875, 7 / 39)],
)
def test_bubbles(stages: int, microbatches: int, chunks: int, over_ideal: float, over_total: float) -> None:
    """Narayanan et al. 2021, 2.2: idle over ideal time; GPipe's paper has idle over total time, r / (1 + r)."""
    ratio = pipeline_bubble(stages=stages, microbatches=microbatches, chunks=chunks)
    assert ratio == over_ideal and ratio / (1 + ratio) == pytest.approx(over_total, abs=5e-5)
    for name in ("gpipe", "1f1b") if chunks == 1 else ():
        timeline = simulate(build(name, ranks=stages, microbatches=microbatches), costs={"F": 1, "B": 2})
        assert timeline.makespan == pytest.approx(3 * microbatches * (1 + ratio))


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="hidden: must be"):
        pipeline_bytes(sequence=1, batch=1, hidden=0)
    with pytest.raises(ValueError, match="recompute: unknown 'some'; one of none, selective, full"):
        activation_bytes(**GPT3, recompute="some")
    with pytest.raises(TypeError, match="tp: expected a number"):
        activation_bytes(**GPT3, tp="8")
