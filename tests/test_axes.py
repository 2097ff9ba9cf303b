"""An axis of a sequence and one of experts: what the solver finds on them unaided, and that it trains as one device."""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

import pytest
import torch

from autopart.api import parallelize
from autopart.api.compiler import solve
from autopart.ir.placement import Replicate, Shard
from autopart.ir.program import Program
from autopart.solver.axis import PICO, Axis
from autopart.solver.eliminate import picks
from autopart.solver.eliminate import solve as least
from autopart.solver.layout import evaluate
from autopart.solver.place import TIE, place
from autopart.solver.tensor import layout_of
from autopart.testing import assert_parity
from tests.axis_models import EXPERTS, LONG, NEAR, WIDTH, made, program
from tests.tensor_axis import axes, close_gradients, drawn_cluster, soak

PP2 = {"microbatches": 2, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("name", "mesh", "pins"),
    [
        ("gpt", axes(cp=4), {}),
        ("routed", axes(ep=2), {}),
        soak("capacity", axes(ep=2), {}),
        soak("routed", axes(dp=2, ep=2), {"placement": "zero1"}),
        soak("gpt", axes(cp=2), {}),
        soak("gpt", axes(cp=3), {}),
        soak("gpt", axes(dp=2, cp=2), {"placement": "zero1"}),
        soak("gpt", axes(pp=2, cp=2), PP2),
        soak("dense", axes(ep=2), {}),
        soak("dense", axes(ep=4), {}),
        soak("dense", axes(dp=2, ep=2), {"placement": "fsdp"}),
        soak("capacity", axes(ep=3), {}),
        soak("capacity", axes(dp=2, ep=2), {"placement": "zero2"}),
        soak("capacity", axes(pp=2, ep=2), PP2),
    ],
)
def test_training_is_that_of_one_device(name: str, mesh: Any, pins: dict[str, Any]) -> None:
    model, args, _ = made(name)
    assert_parity(model, args, plan=program(name, mesh, **pins), capture="direct")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_any_cluster(seed: int) -> None:
    """What is fastest somewhere is right: of splits and exchanges nearly all come up."""
    draw = Random(seed)
    cluster = drawn_cluster(draw)
    name, mesh = (
        draw.choice(["gpt", "dense", "capacity", "routed"]),
        draw.choice([axes(cp=2), axes(cp=3), axes(ep=2), axes(ep=4)]),
    )
    model, args, _ = made(name)
    assert_parity(model, args, plan=program(name, mesh, cluster), capture="direct", steps=2)


@pytest.mark.soak
def test_evaluation_and_other_lengths() -> None:
    """Programs that the plan has not seen are placed around whole parameters."""
    plain = made("gpt")[0]
    mine = parallelize(copy.deepcopy(plain), mesh={"cp": 2}, cluster=NEAR, capture="direct")
    for length in (LONG, 31):
        ids = torch.arange(2 * length).view(2, length) % 24
        loss, expected = mine(ids, ids.roll(-1, 1)), plain(ids, ids.roll(-1, 1))
        close_gradients(mine, loss, plain, expected)
    mine.eval()
    with torch.no_grad():
        torch.testing.assert_close(mine(ids, ids), plain(ids, ids), rtol=1e-10, atol=1e-12)


def exchanges(found: Program, body: str) -> list[list[str]]:
    """The collectives of one body in the text, forward and backward; the sums of parameters' gradients left out."""
    text = found.ranks[1].source
    parts = [re.search(rf"^def {body}_{p}\(.*?(?=\n\n\n)", text, re.M | re.S) for p in ("forward", "backward")]
    return [re.findall(r"world\.(?!all_reduce)(\w+)_values", part[0]) for part in parts if part is not None]


def parameters(found: Program) -> dict[str, object]:
    assert found.plan.tensor is not None
    return dict(found.plan.tensor.parameters)


def test_a_long_sequence_changes_to_heads_around_attention() -> None:
    """Ulysses: two all-to-alls a layer and pass; all else on the pieces, and the loss a sum. Weights stay whole."""
    found = program("gpt", axes(cp=4))
    assert set(parameters(found).values()) == {Replicate()}
    assert found.plan.tensor is not None
    assert dict(found.plan.tensor.between)[made("gpt")[2].segments[-1].values[0]] == Shard(1)
    forward, backward = exchanges(found, "blocks_w2")
    assert forward == ["all_to_all"] * 2
    assert backward[:2] == ["all_to_all"] * 2
    text = found.ranks[1].source
    assert "permute: Shard(3) -> Shard(2) on cp" in text and "transpose: Shard(2) -> Shard(1) on cp" in text
    assert "nll_loss_forward: Partial(sum) -> Replicate() on cp" in text


def test_experts_lie_apart_and_tokens_travel() -> None:
    """Each place has its experts' weights; what tokens send them and get back are two all-to-alls a layer and pass.

    Attention before them is split by its heads, as on `tp`, between pieces of the sequence.
    """
    found = program("routed", axes(ep=2))
    how = parameters(found)
    assert {how[f"layers.{i}.experts.{name}"] for i in range(2) for name in ("up", "down")} == {Shard(0)}
    assert (how["layers.1.qkv.weight"], how["layers.1.out.weight"]) == (Shard(0, 3), Shard(1))
    forward, backward = exchanges(found, "layers_w2")  # of the second layer, which is handed pieces
    assert forward == ["all_gather", "all_gather", "reduce_scatter", "all_to_all", "all_to_all"]
    assert backward.count("all_to_all") == 2
    unit = found.state_on(1).homes()["layers.0.experts.up"]
    held = next(p.shape for p in unit.parameters if p.target == "layers.0.experts.up")
    assert held == (EXPERTS // 2, WIDTH, 3 * WIDTH)


@pytest.mark.soak
def test_experts_lie_apart_where_all_see_every_token() -> None:
    found = program("dense", axes(ep=4))
    how = parameters(found)
    assert {how[f"layers.{i}.{name}"] for i in range(2) for name in ("up", "down")} == {Shard(0)}
    assert any(
        "all_to_all" in part for i in range(2) for part in exchanges(program("dense", axes(ep=4)), f"layers_{i}")
    )


def test_what_cannot_be_is_refused() -> None:
    segmented = made("gpt")[2]
    with pytest.raises(ValueError, match=r"'head.weight' cannot be Shard\(0\) on this axis; it can be Replicate\(\)"):
        solve(segmented, mesh={"cp": 2}, placement={"head.weight": {"cp": Shard(0)}})


def test_a_module_is_explained_with_what_others_would_take() -> None:
    found = program("gpt", axes(cp=4)).plan
    assert found.tensor is not None
    told = found.explain("blocks.1.up")
    assert told.startswith("blocks.1: in stage 0 (token .. norm), on ranks 0, 1, 2, 3\n")
    assert "- cp Replicate(): blocks.1.up.weight, blocks.1.up.bias\n" in told
    assert "- forward: from Shard(1) to Shard(1), 2 all_to_all exchanged\n" in told
    assert re.search(r"with nothing split it would take .* \(\+\d+", told)
    assert "with Replicate() passing" in told
    assert found.explain("blocks").count("in stage 0") == 2
    with pytest.raises(ValueError, match=r"no segment is called 'block'; .* blocks\.0"):
        found.explain("block")


def test_costs_are_those_of_the_placements_that_they_name() -> None:
    """Recomputed: the sum that the solver found, the work of one device, the best body between whole values."""
    segmented, axis = made("routed")[2], Axis("ep", 2, NEAR, 2)
    found = place(segmented, axis)
    assert sum(cost.chosen for cost in found.costs) * PICO == pytest.approx(found.time)
    for segment, cost in zip(segmented.segments, found.costs, strict=True):
        whole = layout_of(segmented.bodies[segment.body], segment, axis, split=False)
        alone = evaluate(whole.layout, [0] * len(whole.layout.units))
        assert dict(cost.others)["with nothing split"] * PICO == pytest.approx(alone)
    body, segment = segmented.bodies[segmented.segments[1].body], segmented.segments[1]
    assert body.backward is not None
    ends = {value.name for value in (*body.forward.inputs, *body.backward.inputs)} - {*body.saved}
    layout = layout_of(body, segment, axis, {*ends, *body.forward.outputs, *body.backward.outputs}).layout
    values = least(layout, (), TIE).best()
    assert values is not None
    between = dict(found.costs[1].others)["with Replicate() passing"] * PICO
    assert between == pytest.approx(evaluate(layout, picks(layout, values)), rel=1e-4)
