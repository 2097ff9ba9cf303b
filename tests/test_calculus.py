"""What placements cost against the published numbers, and as an algebra. Each test says in which convention these are.

Bytes unless a test says elements; GB is 1e9; the model states of mixed-precision Adam are 2 + 2 + 12 bytes a parameter,
masters among the 12; activations are apart.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopart
from autopart.ir.calculus import Costs, Precision
from autopart.ir.placement import STATES, Mode, Modes, Placement
from tests.placements import VALID

DATA = ("ddp", "zero1", "zero2", "fsdp")

# ZeRO (Rajbhandari et al. 2020), table 1: model states per device in GB, of 7.5B, 128B and 1T parameters at stages 1, 2
# and 3. Printed rounded for 7.5B and truncated for the others: right to less than 1 in the last printed digit.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


def costs(name: str, parameters: Any, devices: Any, **options: Any) -> Costs:
    return Placement.preset(name).costs(parameters=parameters, devices=devices, **options)


def same(found: Any, expected: Any) -> bool:
    return bool(sympy.simplify(found - expected) == 0)


@pytest.mark.parametrize("devices", TABLE_1)
def test_zero_table_1(devices: int) -> None:
    for size, row in zip((7.5e9, 128e9, 1e12), TABLE_1[devices], strict=True):
        for stage, printed in zip(DATA[1:], row.split(), strict=True):
            digit = 10 ** -len(printed.partition(".")[2])
            assert abs(costs(stage, size, devices).resident / 1e9 - float(printed)) < digit, (size, stage)
        assert costs("ddp", size, devices).resident == 16 * size


def test_zero_at_64_devices_exactly() -> None:
    found = [costs(name, 7_500_000_000, 64).resident / 1e9 for name in DATA]
    assert found == [120, 31.40625, 16.640625, 1.875]


def test_zero_formulas() -> None:
    """Sections 5.1 to 5.3, and what of them is in which state; single precision adds up to 16 too, split otherwise."""
    psi, n = sympy.symbols("Psi N", positive=True)
    expected = (16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n)
    for name, formula in zip(DATA, expected, strict=True):
        assert same(costs(name, psi, n).resident, formula)
    states = costs("zero1", psi, n).by_state
    assert [states[s] for s in STATES] == [2 * psi, 12 * psi / n, 2 * psi, 0]
    single = [costs(name, psi, n, precision="fp32").resident for name in DATA]
    assert same(single[0], 16 * psi) and same(single[2], 4 * psi + 12 * psi / n)


@pytest.mark.parametrize(("name", "published"), [("ddp", 2), ("zero1", 7.6), ("zero2", 14.4), ("fsdp", 128)])
def test_the_largest_model_that_fits(name: str, published: float) -> None:
    """ZeRO, table 2: billions of parameters in 32 GB at N = 64, for each of m model-parallel devices."""
    psi = sympy.Symbol("Psi", positive=True)
    for m in (1, 2, 16):
        placement = Placement.preset(name).over(Placement.tp())
        resident = placement.costs(parameters=psi, devices={"dp": 64, "tp": m}).resident
        (most,) = sympy.solve(resident - 32 * 10**9, psi)
        assert float(most) / 1e9 == pytest.approx(published * m, abs=0.1 * m)


@pytest.mark.parametrize(("name", "units"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 3)])
def test_zero_traffic(name: str, units: int) -> None:
    """ZeRO, section 7: elements sent per step and device, large N; the exact bytes have the factor (N-1)/N."""
    psi, n = sympy.symbols("Psi N", positive=True)
    assert same(costs(name, psi, n).traffic, units * 2 * psi * (n - 1) / n)
    elements = costs(name, psi, n, precision=Precision(1, 1, 1))
    assert sympy.limit(elements.traffic, n, sympy.oo) == units * psi
    assert costs(name, 7.5e9, 64).traffic / 1e9 == {2: 29.53125, 3: 44.296875}[units]


def test_zero_1_reduces_to_what_the_optimizer_needs() -> None:
    """Half in a reduce-scatter, half in a gather after the update: 2 units, not the 3 of an all-reduce and a gather."""
    assert costs("zero1", 8, 2).by_collective == {"reduce_scatter": 8, "all_gather": 8}
    assert costs("ddp", 8, 2).by_collective == {"all_reduce": 16}
    assert costs("fsdp", 8, 2).by_collective == {"reduce_scatter": 8, "all_gather": 16}


def test_what_repeats_with_microbatches() -> None:
    """Once a step where gradients are kept whole, with every microbatch where they are not, or parameters are not."""
    psi, n, m = sympy.symbols("Psi N m", positive=True)
    unit = 2 * psi * (n - 1) / n
    for name, times in {"ddp": 2, "zero1": 2, "zero2": m + 1, "fsdp": 3 * m}.items():
        assert same(costs(name, psi, n, microbatches=m).traffic, times * unit)


def test_the_ratios_of_the_papers() -> None:
    """Mehta (arXiv 2601.02311): 8x less at 1.5x the traffic, which is N = 8, resident. ZeRO: 8x at stage 2, large N."""
    psi, n = sympy.symbols("Psi N", positive=True)
    ddp, zero2, fsdp = (costs(name, psi, n) for name in ("ddp", "zero2", "fsdp"))
    assert same(ddp.resident / fsdp.resident, n) and same(fsdp.traffic / ddp.traffic, sympy.Rational(3, 2))
    assert sympy.limit(ddp.resident / zero2.resident, n, sympy.oo) == 8
    for devices, ratio in ((8, 4.27), (64, 7.21)):
        assert float((ddp.resident / zero2.resident).subs(n, devices)) == pytest.approx(ratio, abs=0.005)
    for devices, ratio in ((8, 1.875), (57, 8), (64, 8.875)):
        assert float((zero2.resident / fsdp.resident).subs(n, devices)) == ratio


@pytest.mark.parametrize(("billions", "devices", "gigabytes"), [(70, 1, 1120), (70, 8, 140), (1.5, 1, 24)])
def test_whole_model_states(billions: float, devices: int, gigabytes: float) -> None:
    """70B: 1120 GB, 140 GB a device at N = 8 (Mehta); GPT-2 of 1.5B: 24 GB, its weights 3 GB (ZeRO, section 3)."""
    found = costs("fsdp", billions * 1e9, devices)
    assert found.resident == gigabytes * 1e9
    if billions == 1.5:
        assert found.by_state["parameters"] == 3e9


def test_fsdp_parameters_at_their_peak() -> None:
    """Zhao et al. 2023 (arXiv 2304.11277): (K_full / F) sum psi + K_low max psi. Full precision is our optimizer's."""
    full, low, psi, unit, f = sympy.symbols("K_full K_low Psi u F", positive=True)
    precision = Precision(low, low, 0, master=full - low)  # one sharded copy: the masters, that the low one is cast of
    found = costs("fsdp", psi, f, precision=precision, optimizer="sgd", largest_unit=unit)
    parameters = found.by_state["parameters"] + found.by_state["optimizer"] + found.buffers["parameters"]
    assert same(parameters, full / f * psi + low * unit)
    assert same(found.peak - found.resident, 2 * low * unit)  # the unit's gradient too, until it is reduced
    ahead = costs("fsdp", psi, f, largest_unit=unit, prefetch=1)
    assert ahead.buffers["parameters"] == 2 * costs("fsdp", psi, f, largest_unit=unit).buffers["parameters"]


def test_traffic_between_hosts() -> None:
    """Zhao et al. 2023: W = 64 devices, G = 8 a host, of M bytes of parameters.

    Published: 2M(W-1)/W of replicas, 3M(W-1)/W of full shards, 2M(W-1)/(GW) of hybrid ones. The last is a bound; ours
    is what an all-reduce of a 1/G part over W/G replicas sends, 2M(W-G)/(GW).
    """
    m, bytes_each = sympy.Symbol("M", positive=True), Precision(1, 1, 0)
    assert costs("ddp", m, 64, precision=bytes_each).traffic == sympy.Rational("1.96875") * m
    assert costs("fsdp", m, 64, precision=bytes_each).traffic == sympy.Rational("2.953125") * m
    hybrid = costs("hsdp", m, {"dp_replicate": 8, "dp_shard": 8}, precision=bytes_each)
    assert hybrid.by_axis["dp_replicate"] == sympy.Rational("0.21875") * m < sympy.Rational("0.24609375") * m
    w, g = sympy.symbols("W G", positive=True)
    symbolic = costs("hsdp", m, {"dp_replicate": w / g, "dp_shard": g}, precision=bytes_each)
    assert same(symbolic.by_axis["dp_replicate"], 2 * m * (w - g) / (g * w))
    assert same(symbolic.resident, 2 * m / g), "parameters and gradients"


def test_costs_as_text() -> None:
    assert str(costs("fsdp", 1000, 4, largest_unit=100)).splitlines() == [
        "resident 4,000 (parameters 500, optimizer 3,000, gradients 500)",
        "peak     4,400 (with parameters 200, gradients 200)",
        "host     0",
        "traffic  4,500 (all_gather 3,000, reduce_scatter 1,500)",
    ]
    psi = sympy.Symbol("Psi", positive=True)
    assert "resident 2*Psi" in str(costs("offload", psi, 1)) and "to_host 2*Psi" in str(costs("offload", psi, 1))


def test_offload() -> None:
    """ZeRO-Offload (arXiv 2101.06840), section 3: 16M bytes of states, 2M stay, 4M a step go between GPU and CPU."""
    found = costs("offload", 10e9, 1)
    assert (found.resident, found.host, found.traffic) == (20e9, 140e9, 40e9)
    assert costs("ddp", 10e9, 1).resident == 8 * found.resident == 160e9
    m, n = sympy.symbols("M N", positive=True)
    several = costs("offload", m, n)
    assert same(several.by_axis["host"], 4 * m / n), "4M over all devices, however many"
    assert same(several.by_axis["dp"], costs("zero2", m, n).traffic), "beside what ZeRO-2 sends"
    for size, gigabytes in ((8e9, 128), (11e9, 176)):
        found = costs("offload", size, 1)
        assert found.resident + found.host == gigabytes * 1e9


def test_offloading_gradients_and_optimizer_is_the_best_offload() -> None:
    """Section 3.3: whatever is offloaded, 4M bytes move at least; of what moves 4M, only one placement leaves 2M."""
    moved = {}
    for modes in VALID:
        if modes.optimizer is Mode.OFFLOADED and modes.activations is Mode.MATERIALIZED:
            found = Placement((("dp", modes),)).costs(parameters=1, devices=1)
            moved[modes] = found.by_axis["host"], found.resident
    assert moved and min(traffic for traffic, _ in moved.values()) == 4
    whole = {modes: cost for modes, cost in moved.items() if modes.parameters is Mode.REPLICATED and cost[0] == 4}
    best = min(resident for _, resident in whole.values())
    assert best == 2 and [m for m, (_, resident) in whole.items() if resident == best] == [Placement.offload().on("dp")]


def test_parameters_on_the_host() -> None:
    """They come to the device before every use and their gradients leave it: one unit is all there is of them."""
    host = Placement((("dp", Modes(Mode.OFFLOADED, Mode.OFFLOADED, Mode.OFFLOADED)),))
    found = host.costs(parameters=100, devices=4, largest_unit=10, microbatches=3)
    assert (found.resident, found.host, found.peak) == (0, 16 * 25, 2 * 10 + 2 * 10)
    assert found.by_collective == {
        "from_host": 6 * 50,
        "all_gather": 6 * 150,
        "reduce_scatter": 3 * 150,
        "to_host": 150,
    }


def test_layers_in_parts_and_layers_elsewhere() -> None:
    """A unit is in parts on a tensor axis, and whole on the device that has it on a pipeline axis."""
    sizes = {"parameters": 120, "largest_unit": 12}
    tensor = Placement.fsdp().over(Placement.tp()).costs(devices={"dp": 2, "tp": 3}, **sizes)
    pipeline = Placement.pp().over(Placement.fsdp()).costs(devices={"dp": 2, "pp": 3}, **sizes)
    assert tensor.resident == pipeline.resident == 16 * 120 / 6 and tensor.traffic == pipeline.traffic
    assert (tensor.peak - tensor.resident, pipeline.peak - pipeline.resident) == (4 * 12 / 3, 4 * 12)


def test_replicas_that_compute_the_same_reduce_nothing() -> None:
    """Norms under tensor parallelism: whole, equal inputs. With sequence parallelism inputs differ: a sum is due."""
    same_inputs = Placement((("tp", Modes(activations=Mode.REPLICATED)),))
    assert same_inputs.costs(parameters=8, devices=2).traffic == 0
    sequence = Placement((("tp", Modes(activations=Mode.SHARDED)),))
    assert sequence.costs(parameters=8, devices=2).by_collective == {"all_reduce": 16}
    updated_in_parts = Placement((("tp", Modes(optimizer=Mode.SHARDED, activations=Mode.REPLICATED)),))
    assert updated_in_parts.costs(parameters=8, devices=2).by_collective == {"all_gather": 8}


def test_the_inner_axis_carries_more() -> None:
    """Of 2 x 3 devices that shard, groups of 3 exchange what there is, and the two groups a third of it."""
    shards = Modes(Mode.GATHERED, Mode.SHARDED, Mode.SHARDED)
    found = Placement((("out", shards), ("in", shards))).costs(parameters=600, devices={"out": 2, "in": 3})
    assert found.by_axis == {"out": 3 * 1200 / 3 / 2, "in": 3 * 1200 * 2 / 3}
    replicas = Placement((("out", Modes()), ("in", Modes()))).costs(parameters=600, devices={"out": 2, "in": 3})
    assert replicas.by_axis == {"out": 2 * 1200 / 3 / 2, "in": 2 * 1200 * 2 / 3}


def test_what_leaves_for_the_host_is_reduced_before() -> None:
    """Gradients that go to the host with every microbatch are summed over all axes with every microbatch."""
    replicas = Placement((("dp_replicate", Modes()),)).over(Placement.offload())
    sizes = {"parameters": 100, "microbatches": 3, "largest_unit": 10, "activations": 7}
    found = replicas.costs(devices={"dp_replicate": 2, "dp": 4}, **sizes)
    assert found.by_axis["dp_replicate"] == 3 * 200 / 4
    assert found.by_axis["dp"] == 3 * 150 + 150 and found.by_axis["host"] == 3 * 50 + 50
    assert found.buffers == {"parameters": 0, "gradients": 20, "activations": 0}
    both = replicas.over(Placement((("cp", Modes(optimizer=Mode.SHARDED)),)))
    assert (
        both.costs(devices={"dp_replicate": 2, "dp": 4, "cp": 5}, **sizes).by_axis["cp"] == 3 * 50 / 5 * 4 + 200 / 5 * 4
    )


def test_activations_on_the_host_are_a_devices_own() -> None:
    host = Placement((("dp", Modes(activations=Mode.OFFLOADED)),))
    found = host.costs(parameters=0, devices=4, activations=100, largest_activation=8, microbatches=2)
    assert (found.resident, found.host, found.peak, found.by_axis["host"]) == (0, 100, 8, 400)


@pytest.mark.parametrize(
    "preset", ["zero1", "fsdp", *(pytest.param(p, marks=pytest.mark.soak) for p in ("ddp", "zero2"))]
)
def test_programs_hold_and_send_what_the_closed_forms_say(preset: str) -> None:
    """A real graph whose sizes the ranks share evenly, in float32: states and collectives, to the byte.

    (What the runtime counts is compared with what a program is predicted to hold and send in its own tests.)
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    call: dict[str, Any] = {"args": (torch.randn(4, 8),), "loss_fn": lambda out: (out**2).sum()}
    call["capture"] = "direct"
    plan = autopart.plan(model, **call, mesh={"dp": 2}, placement=preset, microbatches=2)
    predicted = autopart.compile(model, plan, **call).plan.prediction
    found = costs(preset, 3 * 72, 2, precision="fp32", microbatches=2)
    held = predicted.memory[0]
    assert [found.by_state[s] for s in STATES[:3]] == [held.parameters, held.optimizer, held.gradients]
    sent = {name: count for name, count in predicted.sent_by(0).items() if count}
    sent["all_reduce"] -= 4  # the loss, which every rank gets
    assert {name: count for name, count in sent.items() if count} == found.by_collective


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": -1}, "parameters: must be a finite number of at least 0, not -1"),
        ({"parameters": float("nan")}, "parameters: must be a finite number"),
        ({"parameters": float("inf")}, "parameters: must be a finite number"),
        ({"parameters": sympy.Symbol("P", negative=True)}, "parameters: must be a finite number"),
        ({"devices": 0}, r"devices\['dp'\]: must be a whole number of at least 1, not 0"),
        ({"devices": 2.5}, r"devices\['dp'\]: must be a whole number"),
        ({"devices": {"dp": 2, "tp": 2}}, "devices: speaks of dp, tp, but the placement of dp"),
        ({"microbatches": 0}, "microbatches: must be a whole number of at least 1"),
        ({"largest_unit": 11}, "largest_unit: 11 is more than parameters, 10"),
        ({"largest_activation": 1}, "largest_activation: 1 is more than activations, 0"),
        ({"precision": "fp12"}, "precision: unknown 'fp12'; known are mixed, fp32"),
        ({"optimizer": "lbfgs"}, "optimizer: unknown 'lbfgs'; known are sgd"),
    ],
)
def test_bad_amounts_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Placement.ddp().costs(**{"parameters": 10, "devices": 2, **options})


def test_wrong_types_are_named() -> None:
    for value in ("10", True, None, [1]):
        with pytest.raises(TypeError, match=r"^parameters: expected a number or a sympy expression"):
            Placement.ddp().costs(parameters=value, devices=2)
    with pytest.raises(
        ValueError, match="devices: the placement is on dp_replicate, dp_shard; give the degree of each"
    ):
        Placement.hsdp().costs(parameters=1, devices=4)


modes = st.sampled_from(VALID)
degrees = st.integers(1, 6)
sizes = st.integers(1, 10**6)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, dict[str, int]]:
    """Placements on up to three axes, with the degrees of these."""
    axes = draw(st.lists(modes, min_size=1, max_size=3))
    try:
        made = Placement(tuple((f"axis{i}", m) for i, m in enumerate(axes)))
    except ValueError:  # parameters on the host that another axis has whole: drop that axis
        made = Placement((("axis0", axes[0]),))
    return made, {axis: draw(degrees) for axis, _ in made.axes}


def exact(value: int) -> Fraction:
    return Fraction(value)


@given(placed(), sizes, st.integers(1, 4))
def test_parts_add_up(case: tuple[Placement, dict[str, int]], size: int, microbatches: int) -> None:
    placement, devices = case
    options = {"microbatches": microbatches, "largest_unit": exact(size) / 4, "activations": exact(size) * 3}
    found = placement.costs(parameters=exact(size), devices=devices, **options)
    assert sum(found.by_state.values()) == found.resident <= found.peak
    assert sum(found.by_collective.values()) == found.traffic == sum(found.by_axis.values())
    assert min(*found.by_state.values(), *found.buffers.values(), found.traffic) >= 0
    # Scaling: with everything twice as large, everything costs twice as much.
    twice = {key: value if key == "microbatches" else 2 * value for key, value in options.items()}
    larger = placement.costs(parameters=exact(2 * size), devices=devices, **twice)
    assert (larger.peak, larger.host, larger.traffic) == (2 * found.peak, 2 * found.host, 2 * found.traffic)
    # What is on devices and hosts is all there is, and no more than a whole copy each.
    total = found.resident + found.host
    assert 0 <= total <= 16 * size + 3 * size


@given(placed(), sizes, st.data())
def test_more_devices_never_hold_more_each(case: tuple[Placement, dict[str, int]], size: int, data: Any) -> None:
    placement, devices = case
    axis = data.draw(st.sampled_from(sorted(devices)))
    more = {**devices, axis: devices[axis] + data.draw(st.integers(1, 3))}
    few, many = (placement.costs(parameters=exact(size), devices=d, largest_unit=size) for d in (devices, more))
    assert many.resident <= few.resident and many.peak <= few.peak and many.host <= few.host


@given(placed(), sizes)
def test_symbols_filled_in_later_are_the_numbers(case: tuple[Placement, dict[str, int]], size: int) -> None:
    placement, devices = case
    psi, m, u = sympy.symbols("Psi m u", positive=True)
    named = {axis: sympy.Symbol(axis, positive=True) for axis in devices}
    formula = placement.costs(parameters=psi, devices=named, microbatches=m, largest_unit=u)
    numbers = placement.costs(parameters=exact(size), devices=devices, microbatches=3, largest_unit=exact(size) / 2)
    values = {psi: size, m: 3, u: sympy.Rational(size, 2), **{named[axis]: n for axis, n in devices.items()}}
    for field in ("resident", "peak", "host", "traffic"):
        found, expected = sympy.sympify(getattr(formula, field)).subs(values), getattr(numbers, field)
        assert found == sympy.Rational(Fraction(expected).numerator, Fraction(expected).denominator), field


@given(placed(), sizes)
def test_alone_on_every_axis_nothing_is_split_or_sent(case: tuple[Placement, dict[str, int]], size: int) -> None:
    placement, devices = case
    found = placement.costs(parameters=size, devices=dict.fromkeys(devices, 1))
    assert found.resident + found.host == 16 * size
    assert all(sent == 0 for axis, sent in found.by_axis.items() if axis != "host")


@pytest.mark.parametrize("one", VALID, ids=str)
@given(degrees, degrees, sizes)
@settings(max_examples=5)
def test_an_axis_may_be_written_as_two(one: Modes, outer: int, inner: int, size: int) -> None:
    """The composition of axes: what two axes of the same modes cost is what one of both their devices does."""
    options = {"parameters": exact(size), "microbatches": 2, "largest_unit": exact(size), "activations": exact(size)}
    joint = Placement((("dp", one),)).costs(devices=outer * inner, **options)
    apart = Placement((("a", one), ("b", one))).costs(devices={"a": outer, "b": inner}, **options)
    assert apart.by_state == joint.by_state and apart.on_host == joint.on_host and apart.buffers == joint.buffers
    assert apart.by_collective == joint.by_collective


@pytest.mark.parametrize("inner", [Placement.tp(), Placement.pp(), Placement.ep()])
@given(st.sampled_from((*DATA, "hsdp", "offload")), degrees, degrees, sizes)
def test_an_outer_axis_sees_what_the_inner_one_left(
    inner: Placement, name: str, outer: int, parts: int, size: int
) -> None:
    """ZeRO over model parallelism moves 2 or 3 Psi / (t p), not Psi."""
    placement = Placement.preset(name)
    devices = {axis: outer for axis, _ in placement.axes}
    local = placement.costs(parameters=exact(size) / parts, devices=devices, microbatches=2)
    ((axis, _),) = inner.axes
    for nested in (placement.over(inner), inner.over(placement)):
        found = nested.costs(parameters=exact(size), devices={**devices, axis: parts}, microbatches=2)
        assert (found.resident, found.host, found.traffic) == (local.resident, local.host, local.traffic)


def test_less_memory_is_never_less_traffic_on_data_axes() -> None:
    """Of the placements of one data axis, none is better in both than another that is not offloaded."""
    found = [(costs(name, 1e9, 8).resident, costs(name, 1e9, 8).traffic) for name in DATA]
    for (more, less_sent), (less, more_sent) in itertools.pairwise(found):
        assert less < more and more_sent >= less_sent
