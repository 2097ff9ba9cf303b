"""Attention in a ring: one call on all places, whole models beside one device, planted faults, and what it costs."""

from __future__ import annotations

import copy
import re
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from autopart.api import parallelize
from autopart.api.compiler import solve
from autopart.capture import read
from autopart.codegen.exchange import exchanges
from autopart.codegen.shapes import Bodies
from autopart.errors import VerificationError
from autopart.ir.placement import Shard
from autopart.ir.segmented import Body, Function, Segment
from autopart.passes.predict import predict_memory
from autopart.passes.schedule import schedule
from autopart.passes.verify_between import collectives
from autopart.passes.verify_texts import read as read_text
from autopart.rules import ring
from autopart.solver.axis import PICO, Axis
from autopart.solver.body_layout import BodyLayout
from autopart.solver.eliminate import solve as least
from autopart.solver.tensor import layout_of
from autopart.testing import assert_parity
from autopart.testing.parity import compare, train
from autopart.testing.rules import as_node, values
from tests.launch import launch
from tests.ring_models import CASES, CLASSES, NEAR, SAMPLES, WIDTH, forced, made, program, route
from tests.tensor_axis import LATE, adam, axes, close_gradients, drawn_cluster, soak
from tests.test_eliminate import oracle
from tests.test_predict import Case, Sample, measure
from tests.test_rule_strategies import run_all
from tests.test_verify import edited, refused

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# ---- one call --------------------------------------------------------------------------------------------------------


def call(heads: int, shared: int, rows: int, keys: int, *, causal: bool = False, mask: bool = False) -> tuple[Any, ...]:
    """The forward and the backward of one attention: operator, arguments, keywords."""
    torch.manual_seed(0)
    query = torch.randn(2, heads, rows, 6).double()
    key, value = (torch.randn(2, shared, keys, 6).double() for _ in range(2))
    keywords = {"scale": 0.3, **({"attn_mask": torch.randn(2, 1, rows, keys).double()} if mask else {})}
    args = (query, key, value, 0.0, causal)
    out, lse = FORWARD(*args, **keywords)
    back = (torch.randn_like(out), query, key, value, out, lse, 0.0, causal)
    return (FORWARD, args, keywords), (BACKWARD, back, keywords)


@pytest.mark.parametrize(
    ("degree", "sizes", "options"),
    [
        (2, (4, 4, 7, 5), {}),
        (3, (4, 2, 6, 9), {}),
        (4, (4, 1, 9, 9), {}),
        (2, (2, 2, 8, 8), {"causal": True}),
        (3, (4, 1, 12, 12), {"causal": True}),
        (4, (2, 2, 16, 16), {"causal": True}),
    ],
)
def test_the_places_together_attend_to_everything(degree: int, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    for each in call(*sizes, **options):
        found = run_all(*as_node(each), degree, {sizes[2]} if options.get("causal") else ())
        assert sum(strategy.ring for strategy in found) == 1


@pytest.mark.parametrize(
    ("degree", "sizes", "options"),
    [
        (3, (2, 2, 8, 8), {"causal": True}),  # not as many tokens for each place
        (4, (2, 2, 4, 4), {"causal": True}),  # a token each: no place sees a later one's
        (2, (2, 2, 4, 8), {"causal": True}),  # other queries than keys
        (2, (2, 2, 8, 8), {"mask": True}),  # which may hide all keys
    ],
)
def test_what_cannot_go_in_a_ring_is_not_offered(degree: int, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    for each in call(*sizes, **options):
        found = run_all(*as_node(each), degree, {sizes[2], sizes[3]})
        assert not any(strategy.ring for strategy in found)


def test_a_block_that_is_not_merged_shows_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_merged", lambda w, one, other: one)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_all(*as_node(call(2, 2, 8, 8)[0]), 2)


# ---- whole models ----------------------------------------------------------------------------------------------------

PP2 = {"microbatches": 2, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("name", "mesh", "pins"),
    [
        ("grouped", axes(cp=4), {}),
        soak("again", axes(cp=2), {}),
        soak("causal", axes(pp=2, cp=2), PP2),
        soak("causal", axes(cp=2), {}),
        soak("causal", axes(cp=3), {"recompute": True}),
        soak("causal", axes(cp=4), {}),
        soak("causal", axes(dp=2, cp=2), {"placement": "zero1"}),
        soak("causal", axes(pp=2, cp=2), {"microbatches": 2, "schedule": "zb-h1"}),
        soak("causal", axes(tp=2), {}),
        soak("grouped", axes(dp=2, cp=2), {"placement": "fsdp"}),
        soak("all", axes(cp=4), {}),
        soak("all", axes(pp=2, cp=2), PP2),
        soak("uneven", axes(cp=2), {}),
        soak("uneven", axes(cp=3), {}),
        soak("uneven", axes(tp=4), {}),
        soak("pairs", axes(cp=4), {}),
        soak("heads", axes(cp=2), {}),
        soak("uneven", axes(cp=4), {"recompute": True}),
    ],
)
def test_training_is_that_of_one_device(name: str, mesh: Any, pins: dict[str, Any]) -> None:
    whole = forced(name, mesh, **pins)
    assert "shift_values" in whole.ranks[1].source
    assert_parity(*made(name)[:2], plan=whole, capture=route(name))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_any_cluster(seed: int) -> None:
    """What is fastest somewhere is right, beside whatever else is split."""
    draw = Random(seed)
    cluster = drawn_cluster(draw)
    name, mesh = (
        draw.choice(["causal", "grouped", "pairs", "uneven"]),
        draw.choice([axes(cp=2), axes(cp=3), axes(tp=4)]),
    )
    whole = draw.choice([program, forced])(name, mesh, cluster=cluster)
    assert_parity(*made(name)[:2], plan=whole, capture="direct", steps=2)


@pytest.mark.soak
def test_other_lengths_and_evaluation() -> None:
    """Programs that the plan has not seen go in a ring where the tokens can be dealt out."""
    plain = made("grouped")[0]
    mine = parallelize(copy.deepcopy(plain), mesh={"cp": 2}, cluster=NEAR, capture="direct")
    for length, round_trips in ((24, True), (23, False), (12, True)):
        ids = torch.arange(2 * length).view(2, length) % CLASSES
        loss, expected = mine(ids, ids.roll(-1, 1)), plain(ids, ids.roll(-1, 1))
        assert ("shift_values" in mine.program.ranks[0].source) == round_trips
        close_gradients(mine, loss, plain, expected)
    mine.eval()
    with torch.no_grad():
        torch.testing.assert_close(mine(ids, ids), plain(ids, ids), rtol=1e-10, atol=1e-12)


def test_linear_attention_adds_up_states() -> None:
    """Of keys and values a place has the tokens that it has: what all queries need of them are two sums, no tokens."""
    whole = program("linear", axes(cp=3))
    text = whole.ranks[1].source
    (forward,) = re.findall(r"^def layers_1_forward\(.*?(?=\n\n\n)", text, re.M | re.S)
    (backward,) = re.findall(r"^def layers_1_backward\(.*?(?=\n\n\n)", text, re.M | re.S)
    assert re.findall(r"world\.(\w+)_values", forward) == ["all_reduce"] * 2
    assert {*re.findall(r"world\.(\w+)_values", backward)} == {"all_reduce"}
    assert_parity(*made("linear")[:2], plan=whole, capture="direct", steps=1)


def test_what_linear_attention_exchanges_does_not_grow_with_the_sequence() -> None:
    """States of [heads, width, width] and sums of [heads, width]; the gradients of weights besides."""

    def sent(name: str) -> list[list[tuple[str, tuple[int, ...]]]]:
        step = program(name, axes(cp=3)).staged.segmented
        bodies = [step.bodies[s.body] for s in step.segments if s.name.startswith("layers")]
        functions = [f for body in bodies for f in (body.forward, body.backward) if f is not None]
        return [[(each.kind, each.shape) for each in exchanges(function, SAMPLES)] for function in functions]

    found = sent("linear")
    assert found == sent("linear, half as long")
    assert found[0] == [("all_reduce", (2 * SAMPLES, 6, 6)), ("all_reduce", (SAMPLES, 2, 1, 6))]


def test_a_place_keeps_what_is_predicted() -> None:
    """A piece of flattened targets, which is part of each sequence, is no view of the caller's."""
    (model, args, segmented), whole = made("linear"), program("linear", axes(cp=3))
    rows = schedule(whole.staged, whole.plan)
    each = Case(Sample(model, read(model, args, {}), segmented), whole.plan, whole.staged, rows, whole)
    for rank, seen in enumerate(measure(each)):
        (memory,) = predict_memory(whole.staged_on(rank), rows, whole.plan)
        assert seen.memory.activations == memory.activations


def gloo_case() -> dict[str, int]:
    """One process of two: training in a ring, and the bytes that it sent."""
    model, args, _ = made("causal")
    data = lambda step: (args, {})  # noqa: E731
    expected = train(copy.deepcopy(model), data, 2, adam, 1.0)
    mine = parallelize(copy.deepcopy(model), plan=forced("causal", axes(cp=2)), capture="direct")
    compare(train(mine, data, 2, adam, 1.0), expected, 1e-9, "gloo")
    assert mine.report().bytes_sent == mine.report().predicted_bytes
    return dict(mine.report().bytes_sent)


@pytest.mark.timeout(200)
def test_gloo_processes() -> None:
    """Per layer and turn: keys and values forward; keys, values and the gradients of both backward."""
    length = CASES["causal"]["length"]
    block = SAMPLES * length // 2 * WIDTH * 8
    for sent in launch(gloo_case, 2, timeout=180).values:
        assert sent["shift"] == 2 * (2 + 4) * block


# ---- what is chosen, and what it takes -------------------------------------------------------------------------------


def lone(degree: int, cluster: Any) -> tuple[BodyLayout, Axis]:
    """One causal attention, its queries of four heads and its keys and values of one, as a layout."""
    node, tensors, _ = as_node(call(4, 1, 32, 32, causal=True)[0])
    inputs = tuple(values(tensors).values())
    outs = tuple(out.name for out in node.outs if out is not None)
    body = Body("attention", Function(inputs, (node,), outs), (), None)
    segment = Segment("attention", 0, tuple(v.name for v in inputs), (), (), outs)
    axis = Axis("cp", degree, cluster, 1)
    return layout_of(body, segment, axis, turns={32}), axis


@pytest.mark.parametrize("cluster", [NEAR, LATE])
def test_brute_force_finds_nothing_cheaper_between_any_placements(cluster: Any) -> None:
    found, _ = lone(4, cluster)
    layout = found.layout
    ends = [unit for unit in layout.units if not unit.name.startswith("node")]
    keep = tuple(unit.name for unit in ends)
    solved = least(layout, keep)
    node = next(unit for unit in layout.units if unit.name.startswith("node"))
    for picked in product(*(range(len(unit.options)) for unit in ends)):
        given = dict(zip(keep, picked, strict=True))
        costs = [
            oracle(layout, [given.get(unit.name, option) for unit in layout.units], 0.0)
            for option in range(len(node.options))
        ]
        best = min(costs)
        assert solved.least({f"u:{name}": pick for name, pick in given.items()}) == best


def test_a_ring_takes_its_share_of_the_work_and_every_shift() -> None:
    """Between pieces that are dealt out in turn it is what is chosen, and takes what is counted by hand."""
    found, axis = lone(4, NEAR)
    units = [unit for unit in found.layout.units if not unit.name.startswith("node")]
    dealt = Shard(2, 8)
    given = {f"u:{unit.name}": found.choices(unit.name).index(dealt) for unit in units}
    work = 2 * 2 * 4 * 32 * 32 * (6 + 6) / 4 / NEAR.flops
    block = 2 * 1 * 8 * 6 * 8
    shifts = 2 * 3 * (NEAR.link_latency + block / NEAR.link_bandwidth)
    assert least(found.layout, tuple(unit.name for unit in units)).least(given) == pytest.approx(
        (work + shifts) * PICO, rel=1e-6
    )
    assert axis.collective("shift", 4 * block) == pytest.approx(shifts / 6 * PICO)


def test_heads_are_split_where_there_are_enough_and_a_ring_runs_where_not() -> None:
    few, many = (solve(made(name)[2], mesh={"cp": 2}, cluster=NEAR) for name in ("causal", "heads"))
    assert few.tensor is not None and many.tensor is not None
    assert any(strategy.ring for choice in few.tensor.choices for strategy in choice.forward.strategies)
    assert not any(strategy.ring for choice in many.tensor.choices for strategy in choice.forward.strategies)
    told = few.explain("layers.1.query")
    assert "keys and values in a ring (tokens dealt out in turn) exchanged\n- backward" in told
    assert dict(few.tensor.between)[made("causal")[2].segments[-1].values[0]] == Shard(1, 12)
    other = many.explain("layers.1.query")
    assert "all_to_all exchanged" in other and "ring" not in other


# ---- planted faults --------------------------------------------------------------------------------------------------

KEYS = 'key_1 = world.shift_values(transpose_1, axis="cp", hops=1, dim=2, outer=12, pieces=[1, 1])'
MERGED = "attention = aten.lerp.Tensor(out_0, out_1, unsqueeze)"


@pytest.mark.parametrize(
    ("ranks", "old", "new", "message"),
    [
        ((1,), KEYS, KEYS.replace("hops=1", "hops=2"), r"rule values: rank 1, .* inside it comes shift_values of tr"),
        ((0, 1), KEYS, KEYS.replace("hops=1", "hops=2"), r"by \(2, 2, 12, \(1, 1\)\) where shift_values of .* is due"),
        ((0, 1), KEYS, "key_1 = transpose_1", r"where shift_values of transpose_1: .* by \(1, 2, 12, .* is due"),
        (
            (0,),
            KEYS,
            KEYS.replace("transpose_1", "transpose_2"),
            r"comes shift_values of transpose_2: .* where",
        ),
        ((1,), MERGED, "attention = out_0", r"rule values: rank 1, .*lse_1 = .*: out_1 is never read"),
        ((1,), MERGED, MERGED.replace("out_1", "out_0"), r"out_1 is never read; use what is exchanged"),
    ],
)
def test_a_step_of_the_ring_that_is_missing_or_wrong_is_noticed(
    ranks: tuple[int, ...], old: str, new: str, message: str
) -> None:
    refused(program("causal", axes(cp=2)), {rank: [(old, new)] for rank in ranks}, message)


def test_a_place_that_hands_nothing_on_is_noticed() -> None:
    """By what the places do together alone, whatever their graphs say."""
    wrong = edited(program("causal", axes(cp=2)), {1: [(KEYS, "key_1 = transpose_1")]})
    texts = [read_text(wrong, rank, wrong.plan.batch, Bodies()) for rank in range(2)]
    with pytest.raises(VerificationError, match=r"rule collectives: rank 0, .* at that point rank 1,"):
        collectives(texts)


@pytest.mark.soak
def test_what_is_handed_on_is_as_large_as_the_largest_piece() -> None:
    """Uneven pieces are padded on their way, so every place sends equally much."""
    whole = forced("uneven", axes(cp=3))
    rings = 0
    for body in whole.staged.segmented.bodies:
        parts = [part for part in (body.forward, body.backward) if part is not None]
        shifts = [one for part in parts for one in exchanges(part, SAMPLES) if one.kind == "shift"]
        rings += bool(shifts)
        assert len(shifts) in (0, 2 * (2 + 4))
        assert {one.payload for one in shifts} <= {3 * SAMPLES * 8 * WIDTH * 8}
    assert rings
