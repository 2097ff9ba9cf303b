"""Two or three axes that split tensors at once: parity with one device, what lies where, and planted faults."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import autopart
from autopart.api import parallelize
from autopart.api.compiler import lower, solve
from autopart.api.tensor import asked, exchanged, nested, placements
from autopart.cluster import Cluster, Device, Group, Link
from autopart.errors import VerificationError
from autopart.ir.elements import Elements
from autopart.ir.graph import Node, Ref, Value
from autopart.ir.placement import Replicate, Shard
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.segmented import Body, Function, Segment
from autopart.passes.places import at_place
from autopart.passes.verify import verify
from autopart.solver.axis import Axis
from autopart.solver.place import place
from autopart.solver.tensor import layout_of
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import compare, train
from tests import axis_models
from tests.launch import launch
from tests.tensor_axis import (
    CHEAP,
    LATE,
    Dropping,
    adam,
    axes,
    close,
    close_gradients,
    drawn_cluster,
    dropping_is_that_of_one_device,
    made,
    program,
    soak,
)
from tests.test_verify import edited, refused

FAR = Cluster((Group(Device("far", 2**40, 1e9, 1e11), 2, 2, Link(1e9, 1e-8), Link(3e7, 1e-8)),))
"""Two nodes of two devices: what is sent between nodes takes thirty times as long."""

PP2 = {"microbatches": 2, "schedule": "1f1b"}

# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "pins"),
    [
        ("gpt", axes(tp=2, cp=2), {}),
        soak("llama", axes(ep=2, tp=2), {"placement": "zero1", "microbatches": 2}),
        ("mlp", axes(tp=3, ep=2), {}),
        soak("gpt", axes(tp=3, cp=2), {}),
        soak("gpt", axes(cp=2, ep=2), {}),
        soak("gpt", axes(tp=4, cp=2), {"recompute": True, "microbatches": 2}),
        soak("gpt", axes(pp=2, tp=2, cp=2), {"microbatches": 3, "schedule": "1f1b"}),
        soak("gpt", axes(cp=2, pp=2, tp=2), {"microbatches": 3, "schedule": "zb-h1"}),
        soak("gpt", axes(dp=2, tp=2, cp=2), {"placement": "zero1"}),
        soak("llama", axes(tp=2, cp=2), {}),
        soak("llama", axes(tp=3, cp=2), {}),
        soak("llama", axes(cp=2, dp=2, tp=2), {"placement": "fsdp"}),
        soak("llama", axes(tp=2, ep=2, cp=2), {}),
    ],
)
def test_training_is_that_of_one_device(name: str, mesh: Any, pins: dict[str, Any]) -> None:
    model, args, _ = made(name)
    assert_parity(model, args, plan=program(name, mesh, CHEAP, **pins), capture="direct")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        (axes(tp=2, ep=2), {}),
        (axes(tp=3, ep=2), {}),
        (axes(cp=2, ep=2), {}),
        (axes(tp=2, cp=2), {}),
        (axes(dp=2, ep=2, tp=2), {"placement": "zero2"}),
        (axes(pp=2, ep=2, tp=2), PP2),
    ],
)
def test_mixtures_of_experts(mesh: Any, pins: dict[str, Any]) -> None:
    model, args, _ = axis_models.made("routed")
    assert_parity(model, args, plan=axis_models.program("routed", mesh, **pins), capture="direct")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_any_cluster_and_any_pins(seed: int) -> None:
    """What is fastest somewhere is right: of splits on two axes, and exchanges between, nearly all come up."""
    draw = Random(seed)
    cluster = drawn_cluster(draw)
    name, models = draw.choice([("gpt", made), ("llama", made), ("routed", axis_models.made)])
    sizes = dict(zip(draw.sample(["tp", "cp", "ep"], 2), draw.choice([(2, 2), (2, 3), (3, 2)]), strict=True))
    model, args, segmented = models(name)
    drawn = draw.sample(segmented.captured.of_kind("parameter"), 3)
    split = [axis for axis in sizes if axis != "cp"]
    wish = {item.target: {axis: Shard(draw.randrange(len(item.value.shape))) for axis in split} for item in drawn}
    wanted = asked(segmented.captured, len(args[0]), {"mesh": sizes, "cluster": cluster, "placement": wish})
    try:
        placements(segmented, wanted)
    except ValueError:  # some cannot be
        wish = {}
    plan = solve(segmented, mesh=sizes, cluster=cluster, placement={**wish, "*": "ddp"})
    assert_parity(model, args, plan=lower(segmented, plan), capture="direct", steps=2)


@pytest.mark.parametrize("mesh", [{"ep": 2, "tp": 2}, pytest.param({"tp": 2, "cp": 3}, marks=pytest.mark.soak)])
def test_outputs_inputs_buffers_and_draws_are_those_of_one_device(mesh: dict[str, int]) -> None:
    """Dropout under a dim that is split on both axes, gradients of inputs, counters, bytes, evaluation."""
    dropping_is_that_of_one_device(mesh)


@pytest.mark.soak
def test_evaluation_and_other_lengths_are_placed_around_the_parameters() -> None:
    model, _, _ = made("gpt")
    mine, plain = parallelize(copy.deepcopy(model), mesh={"tp": 2, "cp": 2}, cluster=CHEAP, capture="direct"), model
    for length in (8, 5):
        ids = torch.arange(4 * length).view(4, length) % 40
        loss, expected = mine(ids, ids.roll(-1, 1)), plain(ids, ids.roll(-1, 1))
        close_gradients(mine, loss, plain, expected)
    mine.eval()
    with torch.no_grad():
        close(mine(ids, ids), plain(ids, ids))


def gloo_case() -> int:
    """One rank's part of a comparison, in its own process."""
    model, args, _ = made("mlp")
    whole = program("mlp", axes(ep=2, tp=2), CHEAP)
    data = lambda step: (args, {})  # noqa: E731
    expected = train(copy.deepcopy(model), data, 2, adam, 1.0)
    mine = parallelize(copy.deepcopy(model), plan=whole, capture="direct")
    compare(train(mine, data, 2, adam, 1.0), expected, 1e-9, "gloo")
    assert mine.report().bytes_sent == mine.report().predicted_bytes
    return 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_gloo_processes() -> None:
    assert launch(gloo_case, 4, timeout=240).values == (1, 1, 1, 1)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_checkpoint_of_one_mesh_is_read_by_another(tmp_path: Path) -> None:
    """Pieces of pieces, of parameters and of what Adam keeps, are cut anew; norms count every element once."""
    torch.manual_seed(0)
    model, x, y = Dropping().double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()
    model.drop.p = 0.0

    def trained(mine: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        norms = []
        for _ in range(steps):
            mine(x, y)[0].backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def main(rank: int, mesh: dict[str, int], *, last: bool) -> Any:
        mine = parallelize(copy.deepcopy(model), mesh=mesh, cluster=CHEAP, capture="direct")
        optimizer = adam(mine.parameters())
        if last:
            autopart.load(tmp_path, mine, optimizer)
        norms = trained(mine, optimizer, 2)
        if not last:
            autopart.save(tmp_path, mine, optimizer)
        return norms, mine.full_state_dict(), optimizer.state_dict()["state"]

    before = LocalWorld(4).run(lambda rank: main(rank, {"ep": 2, "tp": 2}, last=False))
    after = LocalWorld(6).run(lambda rank: main(rank, {"tp": 3, "cp": 2}, last=True))
    plain = adam(model.parameters())
    expected = trained(model, plain, 4)
    for rank in (0, 3):
        assert [*before[rank][0], *after[rank][0]] == pytest.approx(expected, rel=1e-10)
    for name, parameter in model.named_parameters():
        close(after[5][1][name], parameter.detach())
    for number, state in plain.state_dict()["state"].items():
        close(after[4][2][number]["exp_avg"], state["exp_avg"])


def test_a_dim_may_be_split_on_both_axes() -> None:
    """Rows of rows; what each place holds of a weight, and that the four make up all of it."""
    segmented = made("mlp")[2]
    pins = {"out.weight": {"tp": Shard(1), "ep": Shard(1)}, "layers.0": {"tp": Shard(0), "ep": Replicate()}}
    found = lower(segmented, solve(segmented, mesh={"ep": 2, "tp": 2}, cluster=LATE, placement=pins))
    units = [found.state_on(rank).homes() for rank in range(4)]

    def held(target: str) -> list[Elements]:
        return [next(p for p in unit[target].parameters if p.target == target).elements for unit in units]

    out, first = held("out.weight"), held("layers.0.0.weight")
    assert len(set(out)) == 4 and sum(each.count for each in out) == Elements.all(out[0].shape).count
    assert all(not list(a.shared(b)) for i, a in enumerate(out) for b in out[:i])
    starts = [each.runs[1][0][0] for each in out]
    assert found.plan.tensor is not None
    outer, inner = (1, 2) if found.plan.tensor.axis == "tp" else (2, 1)  # ep varies slowest over ranks
    assert starts[0] == 0 and starts[inner] < starts[outer], "the axis that is placed second cuts what the first leaves"
    assert first[0] == first[2] != first[1] == first[3]


@pytest.mark.parametrize("cluster", [LATE, CHEAP])
def test_steps_of_unlike_places_differ_in_numbers_only(cluster: Cluster) -> None:
    """Three places of six and of five: what the first one brings to a sum alone, others bring as nothing."""
    segmented = made("gpt")[2]
    placed = program("gpt", axes(tp=5), cluster).plan.tensor
    step = placed.step(segmented) if placed is not None else None
    assert step is not None
    steps = [at_place(segmented, step, number, alike=True) for number in range(5)]
    assert steps[0] != steps[4]
    for bodies in zip(*(step.bodies for step in steps), strict=True):
        for part in ("forward", "backward"):
            nodes = [[(n.opname, n.names(), n.refs()) for n in getattr(body, part).nodes] for body in bodies]
            assert all(each == nodes[0] for each in nodes)


# ---- what is found ---------------------------------------------------------------------------------------------------


def parameters(plan: Plan) -> dict[str, dict[str, object]]:
    return {each.axis: dict(each.parameters) for each in plan.axes_inside}


def test_heads_lie_on_one_axis_and_experts_on_the_other_where_that_pays() -> None:
    """Parallel folding: within a node heads are split; between nodes attention is whole, and each has its experts."""
    segmented = axis_models.made("routed")[2]
    first, *rest = asked(segmented.captured, axis_models.SAMPLES, {"mesh": {"ep": 2, "tp": 2}, "cluster": FAR})
    axis = first.on(axis_models.SAMPLES)
    plan = nested(segmented, axis, place(segmented, axis), rest)
    how = {each.axis: dict(each.parameters) for each in plan.axes}
    assert [how[axis]["layers.1.qkv.weight"] for axis in ("tp", "ep")] == [Shard(0, 3), Replicate()]
    assert [how[axis]["layers.1.out.weight"] for axis in ("tp", "ep")] == [Shard(1), Replicate()]
    assert [how["ep"][f"layers.1.experts.{name}"] for name in ("up", "down")] == [Shard(0)] * 2


def test_either_axis_may_come_first() -> None:
    """Both orders come into question, the fastest way of all is taken, and the other order is right, too."""
    model, args, segmented = made("mlp")
    wanted = asked(segmented.captured, len(args[0]), {"mesh": {"tp": 2, "ep": 2}, "cluster": LATE})
    ways = [tensor for tensor, *_ in placements(segmented, wanted)]
    assert {tuple(each.axis for each in way.axes) for way in ways} == {("tp", "ep"), ("ep", "tp")}
    plan = solve(segmented, mesh={"tp": 2, "ep": 2}, cluster=LATE)
    assert plan.tensor in ways
    other = next(way for way in ways if way.axis == "ep" and way != plan.tensor)
    assert_parity(model, args, plan=lower(segmented, replace(plan, tensor=other)), capture="direct", steps=2)


def test_attention_goes_in_no_ring_on_an_axis_before_another() -> None:
    """Its places would run different operators, of which the next axis could decide nothing in common."""

    def rings(**sizes: int) -> int:
        tensor = program("gpt of one layer", axes(**sizes), CHEAP).plan.tensor
        assert tensor is not None
        return sum(strategy.ring for choice in tensor.choices for strategy in choice.forward.strategies)

    assert (rings(tp=4), rings(tp=4, cp=2)) == (1, 0)


def test_on_cp_parameters_are_whole_of_what_tp_leaves() -> None:
    plan = program("gpt", axes(tp=2, cp=2), CHEAP).plan
    how = parameters(plan)
    assert set(how["cp"].values()) == {Replicate()}
    assert how["tp"]["blocks.0.qkv.weight"] == Shard(0, 3)
    for rank in program("gpt", axes(tp=2, cp=2), CHEAP).ranks:
        text = rank.source
        assert re.search(r"all_reduce_values\(\w+, axis=\"tp\"|reduce_scatter_values\(\w+, axis=\"tp\"", text)
        assert re.search(r"all_to_all_values\(\s*\w+, axis=\"cp\"", text), "heads for pieces of the sequence"


def test_what_stages_hand_on_passes_between_equal_places() -> None:
    found = program("mlp", axes(pp=2, ep=2, tp=2), CHEAP, **PP2)
    how = [
        re.findall(r"    # \w+: float64.*, (\S+ on tp, \S+ on ep)\n    \(\w+,\) = from_", r.source) for r in found.ranks
    ]
    assert how[:4] == how[:1] * 4 and how[4:] == how[4:5] * 4 and how[0] and how[4]


def test_axes_are_told(tmp_path: Path) -> None:
    plan = program("gpt", axes(tp=2, cp=2), CHEAP).plan
    summary, told = plan.summary(), plan.explain("blocks.1.up")
    assert "tp Shard(0): " in summary and "cp Replicate(): " in summary and "cp through token: from" in summary
    assert "\n- tp Shard(0): blocks.1.up.weight, blocks.1.up.bias\n- forward on tp: from " in told
    assert "\n- cp Replicate(): blocks.1.up.weight, blocks.1.up.bias\n- forward on cp: from " in told
    assert told.count(" a microbatch, with what is exchanged there") == 2
    assert told.count("before it is split on cp") == 1
    assert "cp blocks.1.up.weight" in plan.diff(program("gpt", axes(tp=4), CHEAP).plan)


def test_the_second_axis_pays_for_what_the_first_exchanges() -> None:
    """What the predicted stage takes is what both exchange at their own links, and the part that is left to compute."""
    plan = program("gpt", axes(tp=2, cp=2), CHEAP).plan
    assert plan.tensor is not None and plan.tensor.inner is not None
    tell = exchanged(plan.tensor)
    assert tell("tp", "all_reduce", 10**9) == tell("cp", "all_reduce", 10**9) > 0
    first, both = (sum(each.costs[i].chosen for i in each.segments) for each in plan.axes_inside)
    assert both < 0.6 * first
    assert both == pytest.approx(plan.prediction.stage_seconds[0], rel=0.05)
    slow = replace(plan.tensor, cluster=LATE)
    assert (
        exchanged(slow)("tp", "all_reduce", 8) > tell("tp", "all_reduce", 8) == exchanged(slow)("cp", "all_reduce", 8)
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "placement", "message"),
    [
        ({"tp": 2, "cp": 2}, {"out": {"ep": Shard(0)}}, "placed on 'ep', but tensors are split on 'tp' and 'cp'"),
        ({"tp": 2, "cp": 2}, {"out.weight": {"cp": Shard(0)}}, r"'out.weight' cannot be Shard\(0\) on this axis"),
        ({"tp": 2, "ep": 4}, {"out.bias": {"tp": Shard(0), "ep": Shard(0)}}, "'out.bias' cannot be Shard"),
    ],
)
def test_pins_that_cannot_be_are_refused_by_name(mesh: Any, placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(made("mlp")[2], mesh=mesh, cluster=LATE, placement=placement)


def test_an_axis_takes_what_the_next_one_cannot_divide() -> None:
    """Messages are dear, so nothing is split but for memory; parameters are whole on cp, so tp has to split them."""
    segmented, dear = made("mlp")[2], Cluster.uniform(4, 2**40, 1e12, 1e18, 1e9, 1e-4)
    wanted = asked(segmented.captured, 6, {"mesh": {"tp": 2, "cp": 2}, "cluster": dear})
    (free, *_), *_, (bound, *_) = placements(segmented, wanted)
    assert {str(how) for each in free.axes for _, how in each.parameters} == {"Replicate()"}
    assert bound.inner is not None and {str(how) for _, how in bound.inner.parameters} == {"Replicate()"}
    assert any(isinstance(how, Shard) for _, how in bound.parameters)


def test_sizes_that_fit_no_common_way_are_refused() -> None:
    """A tensor whose shape alone is read: of one element at one place, of two at the other."""
    op, bodies = torch.ops.aten.zeros_like.default, []
    for size in (2, 1):
        x, y = (Value(name, (size,), torch.float64) for name in "xy")
        node = Node(op, (Ref("x"),), (), (y,), True, False, "fill", "model.py:3  torch.zeros_like(x)")
        bodies.append(Body("fill", Function((x,), (node,), ("y",)), (), None))
    segment = Segment("fill", 0, ("x",), (), (), ("y",))
    with pytest.raises(
        ValueError, match=r"mesh: model\.py:3 .*in module 'fill': aten\.zeros_like.* axes before 'cp' make"
    ):
        layout_of(bodies[0], segment, Axis("cp", 2, CHEAP, 1), others=bodies[1:])


def test_a_plan_for_other_axes_is_refused(tmp_path: Path) -> None:
    whole = program("mlp", axes(tp=2, ep=2), CHEAP)
    data = json.loads(whole.plan.to_json())
    data["plan"]["tensor"]["inner"] = None
    with pytest.raises(ValueError, match=r"inside segments it is for tp=2, but its mesh is tp=2 x ep=2"):
        Plan.from_json(json.dumps(data))


def test_a_saved_plan_and_a_written_program_are_the_same_program(tmp_path: Path) -> None:
    whole = program("mlp", axes(tp=3, ep=2), CHEAP)
    whole.plan.save(tmp_path / "plan.json")
    again = lower(made("mlp")[2], Plan.load(tmp_path / "plan.json"))
    assert [rank.source for rank in again.ranks] == [rank.source for rank in whole.ranks]
    back = Program.read(whole.write(tmp_path / "program"))
    assert back.places == whole.places
    assert verify(back) == verify(whole)


# ---- planted faults --------------------------------------------------------------------------------------------------


def test_a_collective_over_the_other_axis_is_noticed() -> None:
    whole = program("gpt", axes(tp=2, cp=2), CHEAP)
    found = re.search(r"\w+ = world\.all_reduce_values\(\w+, axis=\"cp\", how=\"sum\"\)", whole.ranks[0].source)
    assert found is not None
    for ranks in ((0,), (0, 1, 2, 3)):
        changes = {rank: [(found[0], found[0].replace('"cp"', '"tp"'))] for rank in ranks}
        refused(whole, changes, r"rule values: rank 0, .* inside it comes all_reduce_values .* over 'tp'")


def test_a_decision_that_does_not_fit_is_noticed() -> None:
    whole = program("gpt", axes(tp=2, cp=2), CHEAP)
    tensor = whole.plan.tensor
    assert tensor is not None and tensor.inner is not None
    (name, _), *rest = tensor.inner.between
    wrong = replace(tensor, inner=replace(tensor.inner, between=((name, Shard(0)), *rest)))
    with pytest.raises(VerificationError, match=f"rule placements: between segments on cp: {name} is"):
        lower(made("gpt")[2], replace(whole.plan, tensor=wrong))


def test_the_text_of_another_place_is_noticed() -> None:
    """Of tp x ep = 3 x 2 the places 0 and 5 have pieces of other lengths, and 0 and 1 other classes."""
    whole = program("mlp", axes(tp=3, ep=2), CHEAP)
    for rank, other in ((5, 0), (1, 0)):
        text = whole.ranks[other].source.replace(f"RANK, MESH = {other}", f"RANK, MESH = {rank}")
        texts = tuple(replace(each, source=text) if each.rank == rank else each for each in whole.ranks)
        with pytest.raises(VerificationError, match=rf"rank {rank}"):
            verify(replace(whole, ranks=texts))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_place_that_adds_its_loss_too_is_noticed(rank: int) -> None:
    whole = program("gpt", axes(tp=2, cp=2), CHEAP)
    wrong = edited(whole, {rank: [("world.total([],", "world.total(list(loss.values()),")]})
    with pytest.raises(VerificationError, match=rf"rule outputs: rank {rank}.*it sums the parts of the microbatches"):
        verify(wrong)
