"""Predictions against what the runtime counts, on real ranks of a local world: equal to the byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import autopart
from autopart.capture import capture, read
from autopart.capture.call import Call
from autopart.codegen.parsed import load
from autopart.draws import Draws
from autopart.ir.action import Scheduled
from autopart.ir.mesh import Mesh, pieces
from autopart.ir.placement import PRESETS, Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.staged import Staged
from autopart.ir.traffic import sent_bytes
from autopart.passes.chunked import chunked
from autopart.passes.costs import costs, recomputed
from autopart.passes.emit import emit
from autopart.passes.normalise import normalise
from autopart.passes.predict import predict_memory, predict_traffic, with_memory, with_traffic
from autopart.passes.schedule import schedule
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from autopart.passes.verify import verify
from autopart.runtime.batch import Batch
from autopart.runtime.local import run_ranks
from autopart.runtime.measure import Memory
from autopart.runtime.states import States
from autopart.runtime.transport import Transport
from autopart.runtime.world import World
from autopart.schedules import make
from autopart.solver.choose import choose
from tests.models import GPT, MLP, HalfFrozen
from tests.test_several_stages import V


class Square(nn.Module):
    """All sizes are the same, so that 8 ranks can share everything evenly; the loss is a sum of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) ** 2).sum()


class Across(nn.Module):
    """A batch along dim 1, so that a microbatch's input is a copy, and an input that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.c(self.b(self.a(x) * x * scale) * scale) ** 2).mean()


@dataclass(frozen=True)
class Sample:
    """A module with a call of it, and its segments."""

    module: nn.Module
    call: Call
    segmented: Segmented


@cache
def sample(name: str) -> Sample:
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (6, 6))
    module, args, kwargs = {
        "mlp": (MLP(width=7, layers=4), (torch.randn(7, 7).double(), torch.randn(7, 3).double()), {}),
        "gpt": (GPT(layers=4, vocabulary=30, width=8, heads=2, length=6), (ids, ids.flip(0)), {}),
        "half frozen": (
            HalfFrozen(width=10),
            (torch.randn(6, 8).double(),),
            {"labels": torch.randn(6, 4).double(), "mask": torch.rand(6, 4).double()},
        ),
        "square": (Square(), (torch.randn(8, 8).double(),), {}),
        "across": (Across(), (torch.randn(3, 4, 5).double(), torch.randn(5).double()), {}),
    }[name.removesuffix(" evaluated")]
    module = module.double()
    call = read(module, args, kwargs, batch={"x": 1, "scale": None} if name == "across" else None)
    with torch.set_grad_enabled(not name.endswith(" evaluated")):
        return Sample(module, call, segment(normalise(capture(module, call, route="direct"))))


@dataclass(frozen=True)
class Case:
    """A sample with a plan, and everything that follows from it."""

    sample: Sample
    plan: Plan
    staged: Staged
    scheduled: Scheduled
    program: Program


def case(
    name: str,
    mesh: dict[str, int],
    placement: str,
    order: str = "1f1b",
    microbatches: int = 1,
    again: tuple[str, ...] = (),
) -> Case:
    found = sample(name)
    sizes, names = Mesh.of(mesh), [s.name for s in found.segmented.segments]
    place = make(order, ranks=sizes.degree("pp"), microbatches=microbatches).place
    stages = len(place)
    cuts = [round(i * len(names) / stages) for i in range(stages + 1)]
    runs = (tuple(names[a:b]) for a, b in pairwise(cuts))
    plan = Plan(
        mesh=sizes,
        stages=tuple(Stage(run, sizes.column(at)) for run, at in zip(runs, place, strict=True)),
        placements=(("*", Placement.preset(placement)),),
        schedule=order,
        microbatches=microbatches,
        recompute=again,
        batch=found.call.batch,
        prediction=Prediction(0.0, 0.0, (0.0,) * stages, (StageMemory(),) * stages),
        optimality="",
        notes=(),
        fingerprint="",
    )
    return lowered(found, plan)


def lowered(found: Sample, plan: Plan) -> Case:
    staged = split(shard(chunked(found.segmented, plan.chunks, plan.recompute)), plan)
    scheduled = schedule(staged, plan)
    return Case(found, plan, staged, scheduled, emit(staged, scheduled, plan))


@dataclass(frozen=True)
class Measured:
    """What one rank counted."""

    sent: dict[str, int]
    resident: dict[str, int]
    memory: Memory


def measure(made: Case, edit: Callable[[str], str] = lambda source: source) -> list[Measured]:
    """Run one step of the (edited) programs on local ranks."""
    call, captured, mesh = made.sample.call, made.sample.segmented.captured, made.plan.mesh
    whole = {name: p.detach() for name, p in made.sample.module.named_parameters()}
    buffers = {constant.name: constant.tensor for constant in captured.constants}
    sources = [edit(rank.source) for rank in made.program.ranks]

    def step(transport: Transport) -> Measured:
        rank = transport.rank
        program = load(sources[rank], f"<rank {rank}>", torch.device("cpu"))
        states = States.viewing(made.program.state, mesh, rank, whole)
        part = mesh.coordinate(rank).get("dp", 0)
        parts = mesh.degree("dp")
        batch = Batch(
            dict(call.tensors),
            dict(captured.batch_dims),
            pieces(call.batch, parts),
            part,
            made.plan.microbatches,
            Draws(0, 0),
        )
        world = World(transport, mesh, program["PLACE"], states, buffers, batch)
        with torch.no_grad():
            program["step"](world, batch)
        return Measured(transport.bytes_sent(), states.resident_bytes(), world.memory)

    return run_ranks(mesh.size, step)


def predicted_traffic(made: Case) -> list[dict[str, int]]:
    return [dict(row) for row in predict_traffic(made.staged, made.scheduled, made.plan)]


def check(made: Case) -> None:
    """Traffic, parameters, gradients and activations of every rank are as predicted."""
    mesh = made.plan.mesh
    found = measure(made)
    assert [rank.sent for rank in found] == predicted_traffic(made)
    for rank, seen in enumerate(found):
        here = mesh.coordinate(rank)
        stage = made.plan.place.index(here.get("pp", 0))
        memory = predict_memory(made.staged, made.scheduled, made.plan, part=here.get("dp", 0))[stage]
        assert seen.resident["parameters"] == memory.parameters
        assert seen.memory.gradients == memory.gradients
        assert seen.memory.activations == memory.activations
        assert seen.memory.peak <= memory.total - memory.optimizer


MESHES = ({"pp": 2}, {"pp": 3}, {"dp": 2}, {"dp": 3}, {"pp": 2, "dp": 2})
CASES = [
    (name, mesh, placement, ("gpipe", "1f1b")[(i + j) % 2], 1 if k == 3 else 2 + (i + j + k) % 2 * ("dp" not in mesh))
    for i, name in enumerate(("mlp", "gpt", "half frozen"))
    for j, mesh in enumerate(MESHES)
    for k, placement in enumerate(PRESETS if "dp" in mesh else ("ddp",))
]


@pytest.mark.parametrize(("name", "mesh", "placement", "order", "microbatches"), CASES, ids=str)
def test_counted_and_predicted_are_equal(
    name: str, mesh: dict[str, int], placement: str, order: str, microbatches: int
) -> None:
    check(case(name, mesh, placement, order, microbatches))


# On the V the loss is on rank 0, whose stages are not neighbours.
SEVERAL = [
    ("mlp", {"pp": 2}, "ddp", "interleaved", 3),
    ("gpt", {"pp": 2}, "ddp", V, 3),
    ("gpt", {"pp": 2, "dp": 2}, "zero1", "interleaved", 3),
    ("gpt", {"pp": 2, "dp": 2}, "fsdp", V, 3),
    ("mlp", {"pp": 2, "dp": 2}, "ddp", "bfs", 2),
    ("mlp", {"pp": 1, "dp": 2}, "zero2", "bfs(chunks=3)", 2),
    ("half frozen", {"pp": 2, "dp": 2}, "zero2", "bfs", 2),
    ("half frozen", {"pp": 2}, "ddp", V, 3),
]


@pytest.mark.parametrize(("name", "mesh", "placement", "order", "microbatches"), SEVERAL, ids=str)
def test_ranks_of_several_stages(
    name: str, mesh: dict[str, int], placement: str, order: str, microbatches: int
) -> None:
    made = case(name, mesh, placement, order, microbatches)
    assert made.scheduled.schedule.stages > made.plan.mesh.degree("pp")
    check(made)
    verify(made.program)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("name", "mesh", "placement", "every"),
    [("gpt", {"pp": 2}, "ddp", 1), ("gpt", {"pp": 2, "dp": 2}, "fsdp", 2), ("half frozen", {"pp": 3}, "ddp", 1)],
)
def test_what_is_recomputed_is_not_kept(
    name: str, mesh: dict[str, int], placement: str, every: int, order: str
) -> None:
    """All segments, or every second one; what the backward makes again counts as transient, for the largest segment."""
    again = tuple(item.name for item in sample(name).segmented.segments)[::every]
    made, plain = case(name, mesh, placement, order, 3, again), case(name, mesh, placement, order, 3)
    check(made)
    before, after = (predict_memory(c.staged, c.scheduled, c.plan) for c in (plain, made))
    assert predicted_traffic(made) == predicted_traffic(plain)
    assert after[0].activations < before[0].activations or name == "half frozen"
    extra = [
        max(sum(v.nbytes(size) for v in recomputed(made.staged.segmented.bodies[s.body])) for s in stage)
        for stage in made.staged.stages
        for size in (-(-made.plan.batch // (3 * made.plan.mesh.degree("dp"))),)
    ]
    assert max(extra) > 0
    if placement == "ddp":
        assert [stage.transient for stage in after] == extra


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("placement", PRESETS)
def test_ragged_microbatches_on_a_pipeline(order: str, placement: str) -> None:
    """7 samples are 4 + 3 on two data ranks, and 2 + 1 + 1 and 1 + 1 + 1 in microbatches."""
    made = case("mlp", {"pp": 2, "dp": 2}, placement, order, 3)
    sent = predicted_traffic(made)
    assert sent[0]["send"] != sent[1]["send"]
    check(made)


@pytest.mark.parametrize(("mesh", "microbatches"), [({"dp": 1}, 1), ({"dp": 1}, 2), ({"pp": 2, "dp": 2}, 2)])
def test_slices_of_the_batch_count_only_where_they_are_copies(mesh: dict[str, int], microbatches: int) -> None:
    check(case("across", mesh, "ddp", "gpipe", microbatches))


@pytest.mark.parametrize("mesh", [{"pp": 1}, {"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("placement", ["zero1", "fsdp"])
def test_programs_without_a_backward(mesh: dict[str, int], placement: str) -> None:
    """Outputs are made whole on every rank: broadcast in pieces, or summed."""
    made = case("half frozen evaluated", mesh, placement, microbatches=2)
    assert not made.sample.segmented.captured.training
    assert [rank.sent for rank in measure(made)] == predicted_traffic(made)
    assert (predicted_traffic(made)[0]["broadcast"] > 0) == (made.plan.mesh.size > 1)


def test_fsdp_holds_an_eighth_of_ddp_at_one_and_a_half_times_its_traffic() -> None:
    """8 data ranks, one microbatch, all sizes divisible by 8; counted, the sum of the loss over the world left out."""
    resident, traffic = {}, {}
    loss = sent_bytes("all_reduce", torch.float64.itemsize, 8)
    for placement in PRESETS:
        made = case("square", {"dp": 8}, placement)
        found = measure(made)
        assert [rank.sent for rank in found] == predicted_traffic(made)
        resident[placement] = {(rank.resident["parameters"], rank.resident["gradients"]) for rank in found}
        traffic[placement] = {sum(rank.sent.values()) - loss for rank in found}
    state = 8 * sum(p.numel() for p in sample("square").module.parameters())
    assert resident["ddp"] == {(state, state)}
    assert resident["fsdp"] == {(state // 8, state // 8)}
    assert traffic["ddp"] == {2 * state * 7 // 8} == traffic["zero1"] == traffic["zero2"]
    assert traffic["fsdp"] == {3 * state * 7 // 8}


def test_gathers_and_reductions_repeat_with_microbatches_as_the_placement_says() -> None:
    one, three = ({p: predicted_traffic(case("square", {"dp": 2}, p, "gpipe", m))[0] for p in PRESETS} for m in (1, 3))
    assert three["ddp"] == one["ddp"] and three["zero1"] == one["zero1"]
    assert three["zero2"] == one["zero2"] | {"reduce_scatter": 3 * one["zero2"]["reduce_scatter"]}
    assert three["fsdp"]["all_gather"] == 3 * one["fsdp"]["all_gather"]


def test_tied_parameters_on_two_stages_are_summed_over_both() -> None:
    """The part of the embedding that a data rank holds, unpadded: 30 rows are 15 + 15."""
    replicated = predicted_traffic(case("gpt", {"pp": 2}, "ddp"))
    loss = sent_bytes("all_reduce", 8, 2)
    assert {row["all_reduce"] - loss for row in replicated} == {30 * 8 * 8}
    sharded = predicted_traffic(case("gpt", {"pp": 2, "dp": 2}, "fsdp"))
    assert {row["all_reduce"] - sent_bytes("all_reduce", 8, 4) for row in sharded} == {15 * 8 * 8}


@pytest.mark.parametrize(
    ("placement", "line", "kind"),
    [
        ("zero1", "world.regather(", "all_gather"),
        ("ddp", "world.all_reduce(", "all_reduce"),
        ("fsdp", "world.reduce_scatter(", "reduce_scatter"),
    ],
)
def test_a_program_that_drops_a_collective_is_caught(placement: str, line: str, kind: str) -> None:
    def without(source: str) -> str:
        lines = source.split("\n")
        at = next(i for i, text in enumerate(lines) if text.lstrip().startswith(line))
        return "\n".join([*lines[:at], lines[at][: -len(lines[at].lstrip())] + "pass", *lines[at + 1 :]])

    made = case("half frozen", {"dp": 2}, placement)
    for seen, expected in zip(measure(made, without), predicted_traffic(made), strict=True):
        assert {key for key in expected if seen.sent[key] != expected[key]} == {kind}
        assert seen.sent[kind] < expected[kind]


def test_a_program_that_frees_nothing_is_caught() -> None:
    made = case("mlp", {"pp": 2}, "ddp", "1f1b", 3)
    predicted = predict_memory(made.staged, made.scheduled, made.plan)
    leaky = measure(made, lambda source: re.sub(r"acts_0_1\.pop\((.*?)\)", r"acts_0_1[\1]", source))
    assert all(rank.memory.activations > stage.activations for rank, stage in zip(leaky, predicted, strict=True))


def test_a_batch_that_is_a_view_of_a_data_set_is_not_counted() -> None:
    made = case("mlp", {"dp": 1}, "ddp")
    call = made.sample.call
    leaves = tuple(torch.cat([leaf, leaf.new_zeros(1000, *leaf.shape[1:])])[: len(leaf)] for leaf in call.leaves)
    wide = replace(made, sample=replace(made.sample, call=replace(call, leaves=leaves)))
    assert measure(wide)[0].memory.activations == measure(made)[0].memory.activations > 0


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("placement", PRESETS)
def test_a_chosen_plan_tells_memory_and_traffic_of_the_run(order: str, placement: str) -> None:
    found = sample("gpt")
    pins = {"mesh": {"pp": 2, "dp": 2}, "placement": placement, "schedule": order, "microbatches": 3}
    chosen = choose(costs(found.segmented), batch=found.call.batch, devices=4, **pins)
    made = lowered(found, chosen)
    plan = with_memory(with_traffic(chosen, made.staged, made.scheduled), made.staged, made.scheduled)
    assert replace(plan, prediction=chosen.prediction) == chosen
    counted = measure(made)
    for stage, (memory, rough) in enumerate(zip(plan.prediction.memory, chosen.prediction.memory, strict=True)):
        first = plan.stages[stage].ranks[0]  # the data rank with the larger parts
        assert counted[first].sent == plan.prediction.sent_by(first)
        assert counted[first].memory.activations == memory.activations == pytest.approx(rough.activations, rel=0.05)
        assert counted[first].resident["parameters"] == memory.parameters
        assert (rough.parameters, rough.gradients, rough.optimizer) == pytest.approx(
            (memory.parameters, memory.gradients, memory.optimizer), rel=0.02
        )


def test_mixed_precision_counts_masters_and_moments_of_16_bit_parameters() -> None:
    module, args = MLP().bfloat16(), (torch.randn(6, 8).bfloat16(), torch.randn(6, 3).bfloat16())
    made = {
        precision: autopart.plan(module, args, capture="direct", precision=precision, devices=1)
        for precision in (None, "mixed")
    }
    (plain,), (mixed,) = (plan.prediction.memory for plan in made.values())
    assert (plain.optimizer, mixed.optimizer) == (2 * plain.parameters, 6 * plain.parameters)
    assert replace(mixed, optimizer=plain.optimizer) == plain
    again = Plan.from_json(made["mixed"].to_json())
    assert again.precision == "mixed" and again == made["mixed"]
    pins = {"capture": "direct", "devices": 1, "memory": mixed.parameters + mixed.gradients + mixed.optimizer}
    autopart.plan(module, args, **pins)
    with pytest.raises(autopart.PlanInfeasible):
        autopart.plan(module, args, precision="mixed", **pins)
    whole = autopart.plan(module.double(), tuple(each.double() for each in args), capture="direct", precision="mixed")
    assert whole.prediction.memory[0].optimizer == 2 * whole.prediction.memory[0].parameters
    with pytest.raises(ValueError, match="precision: 'half'"):
        autopart.plan(module, args, capture="direct", precision="half")
