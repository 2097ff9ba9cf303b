"""Plans chosen from costs and pins: choices, refusals, ways out, predictions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.cluster import Cluster, parse_bytes
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost, Tied, batch_symbol
from autopart.ir.placement import PRESETS, Modes, Placement
from autopart.ir.plan import Plan
from autopart.solver import choose
from tests.oracle import every_split, stage_bytes, step_seconds

B = batch_symbol()
MIB = 2**20
CLUSTER = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6)
FAST = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e13, 1e-9)
"""With links so fast a data axis costs next to nothing, and a pipeline its bubble."""


def layer(
    name: str, *, parameters: int = 12 * MIB, saved: int = MIB, work: int = 10**6, **changes: object
) -> SegmentCost:
    """A segment whose trainable parameters and activations are simple numbers."""
    fields: dict[str, object] = {
        "name": name,
        "forward_flops": work * B,
        "backward_flops": 2 * work * B,
        "forward_bytes": work * B // 10,
        "backward_bytes": work * B // 10,
        "parameter_bytes": parameters,
        "trainable_bytes": parameters,
        "saved_bytes": saved * B,
        "boundary_bytes": 1000 * B,
    }
    return SegmentCost(**{**fields, **changes})


def gpt(layers: int = 8) -> list[SegmentCost]:
    """An embedding, equal layers and a heavy head that shares the embedding's table."""
    tied = (Tied("wte", 40 * MIB),)
    return [
        layer("embed", parameters=44 * MIB, saved=0, work=10**4, tied=tied),
        *(layer(f"h.{i}") for i in range(layers)),
        layer("head", parameters=40 * MIB, saved=2 * MIB, work=3 * 10**6, tied=tied),
    ]


def spans(plan: Plan) -> list[int]:
    return [len(stage.segments) for stage in plan.stages]


def preset(plan: Plan) -> str:
    return str(plan.placements[-1][1])


def test_costs_are_expressions_until_numbers_are_asked_for() -> None:
    numbers = layer("x", saved_bytes=B**2 + sympy.ceiling(B / 2), boundary_bytes=7).at(5)
    assert (numbers.saved_bytes, numbers.boundary_bytes, numbers.forward_flops) == (28, 7, 5 * 10**6)
    with pytest.raises(ValueError, match="saved_bytes depends on"):
        layer("x", saved_bytes=sympy.Symbol("s") * B)
    with pytest.raises(ValueError, match="trainable_bytes"):
        layer("x", parameter_bytes=3, trainable_bytes=4)
    with pytest.raises(ValueError, match="saved_bytes must not be negative"):
        layer("x", saved_bytes=-B).at(1)


def test_one_data_axis_if_it_fits() -> None:
    plan = choose(gpt(), batch=16, devices=4, cluster=FAST)
    assert dict(plan.mesh.axes) == {"pp": 1, "dp": 4}
    assert (preset(plan), plan.microbatches, plan.stages[0].ranks) == ("ddp", 1, (0, 1, 2, 3))
    memory = plan.prediction.memory[0]
    weights = (44 + 8 * 12) * MIB
    assert (memory.parameters, memory.optimizer, memory.gradients) == (weights, 2 * weights, weights)
    assert (memory.activations, memory.transient) == (4 * 10 * MIB, 0)
    assert plan.prediction.bubble == 0


@pytest.mark.parametrize(
    ("memory", "name"), [("610MiB", "ddp"), ("440MiB", "zero1"), ("375MiB", "zero2"), ("350MiB", "fsdp")]
)
def test_then_sharded_states(memory: str, name: str) -> None:
    plan = choose(gpt(), batch=16, devices=4, cluster=FAST, memory=memory)
    assert (plan.mesh.degree("pp"), preset(plan), plan.microbatches) == (1, name, 1)
    assert plan.prediction.memory[0].total <= parse_bytes(memory)


def test_then_smaller_microbatches_then_stages() -> None:
    finer = choose(gpt(), batch=16, devices=4, cluster=FAST, memory="320MiB")
    assert (finer.mesh.degree("pp"), preset(finer), finer.microbatches) == (1, "fsdp", 4)
    staged = choose(gpt(), batch=16, devices=4, cluster=FAST, memory="220MiB", placement="zero1")
    assert staged.mesh.degree("pp") == 4
    assert "searched jointly" in staged.notes[0]
    with pytest.raises(PlanInfeasible):
        choose(gpt(), batch=16, devices=4, cluster=CLUSTER, memory="220MiB", placement="zero1", stages=2)


def test_unequal_ends_are_balanced() -> None:
    plan = choose(gpt(9), batch=16, mesh={"pp": 4}, devices=4, cluster=CLUSTER)
    assert spans(plan) == [4, 3, 3, 1]
    assert plan.microbatches == 16
    assert plan.stages[3].ranks == (3,)


def test_predicted_time_of_a_pipeline() -> None:
    segments = [layer(f"h.{i}") for i in range(4)]
    for schedule in ("gpipe", "1f1b"):
        plan = choose(segments, batch=8, mesh={"pp": 4}, devices=4, cluster=CLUSTER, schedule=schedule, microbatches=8)
        assert plan.prediction.stage_seconds == pytest.approx((3e-3,) * 4)
        # a message takes 1e-6 s and 1000 bytes of 1e8 a second; under 1f1b ranks wait for more of them
        step = (8 + 4 - 1) * 3e-3 + {"gpipe": 6, "1f1b": 16}[schedule] * 1.1e-5
        assert plan.prediction.step_seconds == pytest.approx(step)
        assert plan.prediction.bubble == pytest.approx(1 - 8 * 3e-3 / step)
        flights = [8] * 4 if schedule == "gpipe" else [4, 3, 2, 1]
        assert [m.activations for m in plan.prediction.memory] == [flight * MIB for flight in flights]


def test_stages_by_name() -> None:
    plan = choose(gpt(), batch=16, stages=["h.1", "h.6"], devices=3, cluster=CLUSTER)
    assert [stage.segments[0] for stage in plan.stages] == ["embed", "h.1", "h.6"]
    some = choose(gpt(), batch=16, stages=["h.7"], mesh={"pp": 3, "dp": 2}, devices=6, cluster=CLUSTER)
    assert len(some.stages) == 3 and "h.7" in [stage.segments[0] for stage in some.stages]
    inside = choose([layer("a.x"), layer("a.y"), layer("b.x")], batch=2, stages=["a", "b"], devices=2, cluster=CLUSTER)
    assert spans(inside) == [2, 1]


def test_placements_by_pattern() -> None:
    rules = {"embed": "fsdp", "*": "ddp", "h.?": Placement.zero1()}
    plan = choose(gpt(), batch=16, devices=4, cluster=FAST, placement=rules)
    assert [pattern for pattern, _ in plan.placements] == ["embed", "h.?", "*"]
    memory = plan.prediction.memory[0]
    assert memory.parameters == (44 // 4 + 8 * 12) * MIB
    assert memory.optimizer == 2 * (44 // 4 + 8 * 3) * MIB
    open_end = choose(gpt(), batch=16, devices=4, cluster=FAST, placement={"embed": "fsdp"}, memory="500MiB")
    assert preset(open_end) == "zero1"


def test_frozen_parameters_cost_no_gradient_and_no_optimizer() -> None:
    segments = [layer("a", trainable_bytes=0), layer("b", trainable_bytes=4 * MIB)]
    memory = choose(segments, batch=2, mesh={"dp": 2}, cluster=CLUSTER, optimizer_ratio=1).prediction.memory[0]
    assert (memory.parameters, memory.optimizer, memory.gradients) == (24 * MIB, 4 * MIB, 4 * MIB)


def test_communication_costs_time() -> None:
    times = {
        name: choose(
            gpt(), batch=16, mesh={"dp": 4}, devices=4, cluster=CLUSTER, placement=name
        ).prediction.step_seconds
        for name in PRESETS
    }
    assert times["ddp"] < times["fsdp"]
    assert times["ddp"] == pytest.approx(times["zero1"], rel=1e-3)
    alone = choose(gpt(), batch=4, devices=1, cluster=CLUSTER).prediction.step_seconds
    sent = (44 + 40 + 8 * 12) * MIB * 2 * 3 / 4
    assert times["ddp"] - alone == pytest.approx(sent / 1e8, rel=1e-3)


BAD = [
    ({"mesh": {"pp": 2, "dp": 3}}, ValueError, r"mesh: pp=2 x dp=3 has 6 ranks, but there are 4 devices"),
    ({"mesh": {"dp": 2, "ep": 2}}, ValueError, "mesh: dp=2 x ep=2 splits tensors .*autopart.plan"),
    ({"mesh": {"xp": 4}}, ValueError, "mesh: unknown axis 'xp'"),
    ({"mesh": 4}, TypeError, "mesh: expected axis sizes"),
    ({"mehs": {"pp": 2}}, TypeError, "mehs: no such argument; a plan takes cluster, devices, mesh"),
    (
        {"mesh": {"pp": 4}, "costs": gpt(1)[:3]},
        ValueError,
        "mesh: 4 stages need 4 segments, but the model has 3: embed, h.0",
    ),
    ({"stages": 3}, ValueError, "stages: 4 devices cannot be divided into 3 equal stages"),
    ({"stages": 2, "mesh": {"pp": 4}}, ValueError, "stages: 2 stages contradict the mesh of pp=4"),
    ({"stages": ["h.9"]}, ValueError, "stages: no stage can begin at 'h.9'.* h.7"),
    ({"stages": ["h.1", "h.1"]}, ValueError, "stages: two of"),
    ({"stages": ["h.1", "h.2"], "mesh": {"pp": 2, "dp": 2}}, ValueError, "make 3 stages contradict the mesh of pp=2"),
    ({"stages": "h.1"}, TypeError, "stages: expected a count or the module names"),
    ({"stages": 0}, ValueError, "stages: must be at least 1"),
    ({"devices": 9}, ValueError, "devices: 9 asked for, but the cluster has 8"),
    ({"devices": 0}, ValueError, "devices: must be at least 1"),
    (
        {"devices": 10**15, "cluster": None},
        ValueError,
        "devices: 1,000,000,000,000,000 are more than the 1,000,000 that",
    ),
    ({"mesh": {"dp": 10**9}, "devices": None}, ValueError, "devices: 1,000,000,000 are more than"),
    ({"memory": -1}, ValueError, "memory: must be at least 1 byte"),
    ({"batch": -4}, ValueError, "batch: must be at least 1"),
    ({"devices": "4"}, TypeError, "devices: expected a whole number"),
    ({"batch": 0}, ValueError, "batch: must be at least 1"),
    (
        {"microbatches": 5, "mesh": {"dp": 4}},
        ValueError,
        "microbatches: a batch of 16 over dp=4 allows at most 4, not 5",
    ),
    ({"microbatches": 17}, ValueError, "microbatches: a batch of 16 over dp=1 allows at most 16, not 17"),
    ({"microbatches": True}, TypeError, "microbatches: expected a whole number"),
    ({"batch": 3, "mesh": {"dp": 4}}, ValueError, "batch: 3 samples are too few for dp=4"),
    ({"placement": "zero9"}, ValueError, "placement: unknown preset 'zero9'"),
    ({"placement": 3}, TypeError, "placement: expected one of ddp"),
    ({"placement": {"h.*": {"tp": 1}}}, TypeError, "placement: expected one of ddp"),
    ({"placement": Placement.hsdp()}, ValueError, "placement: hsdp is not planned yet"),
    ({"placement": Placement((("tp", Modes()),))}, ValueError, "placement: tp:R/R/R/M is not planned yet"),
    ({"placement": "tp"}, ValueError, "placement: tp is not planned yet: .* known from Placement.costs"),
    (
        {"schedule": "zbv"},
        ValueError,
        "schedule: 'zbv' is not known, did you mean 'zb-v'. one of gpipe, 1f1b, .* a table of actions has",
    ),
    ({"memory": "lots"}, ValueError, "memory: cannot read 'lots'"),
    ({"recompute": "h.3"}, TypeError, "recompute: expected True, False or a list of module names, not 'h.3'"),
    ({"recompute": 3}, TypeError, "recompute: expected True, False"),
    ({"recompute": ["h.33"]}, ValueError, r"recompute: no segment is called 'h\.33'.*, such as h\.3"),
    ({"recomputed": gpt(3)}, ValueError, "recomputed: expected the costs of"),
    ({"optimizer_ratio": -1}, ValueError, "optimizer_ratio"),
    ({"optimizer_ratio": "adamw"}, TypeError, "optimizer_ratio"),
    ({"costs": []}, ValueError, "costs: at least one segment"),
    ({"costs": [layer("a"), layer("a")]}, ValueError, "costs: .* own name"),
]


@pytest.mark.parametrize(("pins", "error", "message"), BAD)
def test_bad_arguments_are_named(pins: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"costs": gpt(), "batch": 16, "devices": 4, "cluster": CLUSTER, **pins}
    with pytest.raises(error, match=message):
        choose(**arguments)


def test_small_batches_take_stages() -> None:
    plan = choose(gpt(), batch=1, devices=4, cluster=CLUSTER)
    assert (dict(plan.mesh.axes), plan.microbatches) == ({"pp": 4, "dp": 1}, 1)


def frugal() -> list[SegmentCost]:
    """The segments of `gpt` when recomputed: layers keep an eighth and take longer, the ends keep no less."""
    return [
        layer(c.name, saved=MIB // 8, backward_flops=3 * 10**6 * B, recomputed_bytes=MIB * B) if "h." in c.name else c
        for c in gpt()
    ]


def test_recomputation_by_name_or_where_nothing_fits_without() -> None:
    layers = tuple(f"h.{i}" for i in range(8))
    pins = {"batch": 16, "devices": 2, "mesh": {"pp": 2}, "cluster": CLUSTER, "microbatches": 2, "schedule": "gpipe"}

    def chosen(**more: object) -> Plan:
        return choose(gpt(), recomputed=frugal(), **pins, **more)

    free, everything, named = chosen(), chosen(recompute=True), chosen(recompute=["h.2", "head"])
    assert (free.recompute, everything.recompute, named.recompute) == ((), layers, ("h.2", "head"))
    assert free.prediction.step_seconds < named.prediction.step_seconds < everything.prediction.step_seconds
    peak = [max(stage.total for stage in plan.prediction.memory) for plan in (free, everything)]
    assert [stage.transient for stage in everything.prediction.memory] == [8 * MIB, 8 * MIB]
    assert peak[1] < peak[0]
    assert chosen(memory=peak[0]).recompute == ()
    some = chosen(memory=peak[1])
    assert 0 < len(some.recompute) < len(layers), "no more than memory asks for"
    assert free.prediction.step_seconds < some.prediction.step_seconds < everything.prediction.step_seconds
    assert all(stage.total <= peak[1] for stage in some.prediction.memory)
    with pytest.raises(PlanInfeasible, match=r"without recomputing: .* It fits with: recompute=\['h\.\d', ") as refusal:
        chosen(memory=peak[1], recompute=False)
    assert chosen(memory=peak[1], recompute=eval(refusal.value.ways[0].removeprefix("recompute="))).recompute == (
        some.recompute
    )
    with pytest.raises(PlanInfeasible) as refusal:
        chosen(memory=peak[1] // 2)
    assert re.search(r"recomputing h\.0 [^:]*: stage", str(refusal.value))
    assert "recompute=True" not in str(refusal.value)


def test_infeasible_says_what_needs_what_and_what_would_fit() -> None:
    pins: dict[str, object] = {
        "batch": 16,
        "devices": 4,
        "cluster": CLUSTER,
        "mesh": {"pp": 2, "dp": 2},
        "placement": "ddp",
        "schedule": "gpipe",
        "microbatches": 2,
        "memory": "340MiB",
    }
    with pytest.raises(PlanInfeasible) as refusal:
        choose(gpt(), **pins)
    message = str(refusal.value)
    assert "no plan fits 340.0 MiB per device" in message
    stage = re.search(r"stage (\d) \((\S+) \.\. (\S+)\) needs at least ([\d.]+) MiB = (.*)\. It fits", message)
    assert stage is not None
    assert float(stage[4]) > 340
    parts = [float(size) for size in re.findall(r"([\d.]+) MiB", stage[5])]
    assert sum(parts) == pytest.approx(float(stage[4]), abs=0.3)
    assert "activations of 2 in-flight microbatches" in stage[5]
    ways = re.findall(
        r"(placement|microbatches|schedule|mesh|memory)=('[^']*'|\d+|\{[^}]*\})", message.split("It fits with")[1]
    )
    assert {"placement", "memory"} <= {name for name, _ in ways}
    for name, text in ways:
        value = eval(text)
        assert choose(gpt(), **{**pins, name: value})


def test_infeasible_even_when_everything_is_free() -> None:
    with pytest.raises(PlanInfeasible, match=r"h\.0.* needs at least .* It fits with: memory='[\d.]+MiB'"):
        choose(gpt(), batch=4, devices=4, cluster=CLUSTER, memory="20MiB")


@st.composite
def small_models(draw: st.DrawFn) -> list[SegmentCost]:
    return [
        layer(
            f"s{i}",
            parameters=draw(st.integers(1, 30)),
            saved=draw(st.integers(0, 9)),
            work=draw(st.integers(0, 9)) * 100,
            boundary_bytes=draw(st.integers(0, 9)) * B,
        )
        for i in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    small_models(),
    st.sampled_from(PRESETS),
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 4),
    st.integers(50, 500),
)
def test_pinned_plans_equal_brute_force(
    costs: list[SegmentCost], name: str, schedule: str, microbatches: int, limit: int
) -> None:
    for pp, dp in product((1, 2, 3), (1, 2)):
        if pp > len(costs):
            continue
        numbers = [cost.at(2) for cost in costs]
        flights = [microbatches if schedule == "gpipe" else min(microbatches, pp - k) for k in range(pp)]

        def needs(
            starts: tuple[int, ...], dp: int = dp, flights: list[int] = flights, numbers: Sequence[Any] = numbers
        ) -> list[int]:
            ends = (*starts[1:], len(costs))
            runs = [numbers[i:j] for i, j in zip(starts, ends, strict=True)]
            return [stage_bytes(run, name, dp, 2, flight) for run, flight in zip(runs, flights, strict=True)]

        setting = {"schedule": schedule, "microbatches": microbatches, "preset": name, "dp": dp, "cluster": CLUSTER}
        steps = [step_seconds(numbers, s, **setting) for s in every_split(len(costs), pp) if max(needs(s)) <= limit]
        pins = {"mesh": {"pp": pp, "dp": dp}, "devices": pp * dp, "placement": name, "schedule": schedule}
        try:
            plan = choose(
                costs, batch=2 * dp * microbatches, cluster=CLUSTER, microbatches=microbatches, memory=limit, **pins
            )
        except PlanInfeasible:
            assert not steps
            continue
        assert plan.prediction.step_seconds == pytest.approx(min(steps), rel=1e-9)
        starts = tuple(sum(spans(plan)[:k]) for k in range(pp))
        assert [memory.total for memory in plan.prediction.memory] == needs(starts)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(small_models(), st.integers(20, 300), st.integers(1, 300), st.sampled_from(["gpipe", "1f1b"]))
def test_more_memory_is_never_worse(costs: list[SegmentCost], limit: int, more: int, schedule: str) -> None:
    pins = {"mesh": {"pp": min(2, len(costs)), "dp": 2}, "schedule": schedule, "microbatches": 2, "placement": "zero1"}
    devices = 2 * min(2, len(costs))

    def step(memory: int) -> float:
        try:
            plan = choose(costs, batch=8, devices=devices, cluster=CLUSTER, memory=memory, **pins)
        except PlanInfeasible:
            return float("inf")
        return plan.prediction.step_seconds

    assert step(limit + more) <= step(limit) * (1 + 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    small_models(),
    st.integers(10, 200),
    st.sampled_from([None, *PRESETS]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, {"dp": 2}]),
)
def test_every_way_out_is_one(
    costs: list[SegmentCost],
    limit: int,
    placement: str | None,
    microbatches: int | None,
    mesh: dict[str, int] | None,
) -> None:
    again = [replace(cost, saved_bytes=0, backward_flops=cost.backward_flops + cost.forward_flops) for cost in costs]
    pins = {"placement": placement, "microbatches": microbatches, "memory": limit, "schedule": "gpipe"}
    pins |= {"mesh": mesh, "recompute": False, "recomputed": again, "batch": 8, "devices": 2, "cluster": CLUSTER}
    try:
        plan = choose(costs, **pins)
    except PlanInfeasible as refusal:
        for way in refusal.ways:
            if count := re.match(r"(\d+) such devices", way):
                more = {
                    "devices": int(count[1]),
                    "cluster": Cluster.uniform(int(count[1]), 1000 * MIB, 1e9, 1e9, 1e8, 1e-6),
                }
            else:
                name, value = way.removesuffix(" (to plan with; programs do not do it yet)").split("=", 1)
                more = {name: eval(value)}
            choose(costs, **{**pins, **more})
    else:
        assert all(memory.total <= limit for memory in plan.prediction.memory)


def test_the_same_plan_every_time() -> None:
    plans = {
        choose(gpt(), batch=16, mesh={"pp": 4}, devices=4, cluster=CLUSTER, fingerprint="m").to_json() for _ in range(2)
    }
    assert len(plans) == 1
    plan = Plan.from_json(plans.pop())
    assert plan.fingerprint == "m" and plan.optimality.startswith("optimal: ")


def test_import_is_light() -> None:
    code = (
        "import sys, autopart.solver, autopart.ir.cost; print([m for m in ('z3', 'sympy', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
