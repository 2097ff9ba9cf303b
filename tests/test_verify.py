"""Valid programs pass `verify`; a text with a fault planted in it is refused, with a message that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopart.capture import capture, read
from autopart.errors import VerificationError
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory
from autopart.ir.program import Program
from autopart.passes.emit import emit
from autopart.passes.normalise import normalise
from autopart.passes.schedule import schedule
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from autopart.passes.verify import verify
from tests.models import MODELS

MLP = {"pp": 2, "dp": 2}
PLACEMENTS = ("ddp", "zero1", "zero2", "fsdp")


class Twice(nn.Module):
    """Two layers with one weight, and a head whose result is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.c(self.b(self.a(x).tanh()).tanh()).tanh()
        out = self.out(h)
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


@cache
def captured(name: str, *, training: bool = True) -> Captured:
    torch.manual_seed(0)
    twice = (Twice(), (torch.randn(6, 4), torch.randn(6, 4)), {})
    module, args, kwargs = twice if name == "twice" else MODELS[name]()
    call = read(module, args, kwargs)
    with torch.set_grad_enabled(training):
        return normalise(capture(module, call, route="direct"))


def plan_for(
    step: Captured, mesh: Mesh, placement: str, name: str, microbatches: int, cuts: Sequence[str], bucket: int
) -> Plan:
    names = [item.name for item in segment(step, cuts=cuts).segments]
    degree = mesh.degree("pp")
    starts = [0, *map(names.index, cuts)] if cuts else [round(i * len(names) / degree) for i in range(degree)]
    ends = [*starts[1:], len(names)]
    return Plan(
        mesh=mesh,
        stages=tuple(
            Stage(tuple(names[a:b]), mesh.column(i)) for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        ),
        placements=(("*", Placement.preset(placement)),),
        schedule=name,
        microbatches=microbatches,
        recompute=(),
        batch=step.batch,
        prediction=Prediction(0.0, 0.0, (0.0,) * degree, (StageMemory(),) * degree),
        optimality="",
        notes=(),
        fingerprint="",
        bucket=bucket,
    )


@cache
def program(
    name: str,
    axes: tuple[tuple[str, int], ...],
    placement: str = "ddp",
    schedule_name: str = "1f1b",
    microbatches: int = 2,
    *,
    training: bool = True,
    cuts: tuple[str, ...] = (),
    bucket: int = 0,
) -> Program:
    mesh, step = Mesh(axes), captured(name)
    plan = plan_for(step, mesh, placement, schedule_name, microbatches, cuts, bucket)
    staged = split(shard(segment(step, cuts=cuts)), plan)
    if not training:
        staged = split(shard(segment(captured(name, training=False), cuts=cuts)), plan, state=staged.state)
    return emit(staged, schedule(staged, plan), plan)


def mlp(placement: str, *, training: bool = True) -> Program:
    return program("mlp", tuple(MLP.items()), placement, training=training)


def gpt() -> Program:
    return program("gpt", (("pp", 3),))


def edited(whole: Program, changes: Mapping[int, Sequence[tuple[str, str]]]) -> Program:
    """The program with strings replaced in the texts of some ranks; each must be there."""
    ranks = list(whole.ranks)
    for rank, pairs in changes.items():
        for old, new in pairs:
            assert old in ranks[rank].source, f"{old!r} is not in the text:\n{ranks[rank].source}"
            ranks[rank] = replace(ranks[rank], source=ranks[rank].source.replace(old, new, 1))
    return replace(whole, ranks=tuple(ranks))


def refused(whole: Program, changes: Mapping[int, Sequence[tuple[str, str]]], pattern: str) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(edited(whole, changes))
    assert re.search(pattern, str(caught.value)), str(caught.value)


MESHES = [{"pp": p, "dp": d} for p in (1, 2, 3, 4) for d in (1, 2, 3)]


@pytest.mark.parametrize("schedule_name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(f"{k}{v}" for k, v in axes.items()))
def test_valid_programs_pass(axes: dict[str, int], schedule_name: str) -> None:
    for placement in PLACEMENTS if axes["dp"] > 1 else ("ddp",):
        report = verify(program("mlp", tuple(axes.items()), placement, schedule_name))
        counts = {item.rule: item.count for item in report.checked}
        size, stages = axes["pp"] * axes["dp"], axes["pp"]
        assert counts["text"] == size
        assert counts["transfers"] == 2 * 2 * (stages - 1) * axes["dp"]
        assert counts["work"] == size * 4
        assert counts["gradients"] == 5 * 2 * axes["dp"]  # layers x microbatches on each data rank


@pytest.mark.parametrize("name", ["gpt", "half_frozen"])
@pytest.mark.parametrize("training", [True, False])
def test_other_models_and_forward_only_programs_pass(name: str, training: bool) -> None:
    axes = (("pp", 2), ("dp", 2)) if name == "half_frozen" else (("pp", 3),)
    report = verify(program(name, axes, "fsdp", training=training))
    assert {item.rule: item.count for item in report.checked}["outputs"] > 0


def test_pinned_stages_and_a_weight_used_twice_in_a_stage_pass() -> None:
    verify(program("twice", (("pp", 2), ("dp", 2)), "zero1", cuts=("out",)))
    verify(program("gpt", (("pp", 2),), cuts=("blocks.1.up",)))


def test_the_report_is_a_table() -> None:
    report = verify(mlp("ddp"))
    assert str(report).splitlines()[0] == "text              4 texts"
    assert "gradients        20 contributions, 10 reductions" in str(report)
    assert str(report).splitlines()[-1] == "checked at batches of 6 and 8 samples"


SEND = "        world.send(acts_0_1.pop(k), stage=0, to=1, microbatch=k)\n"
RECV = "        grads_1_0[k] = world.recv(edge_1_0(batch.sizes[k]), stage=0, source=1, microbatch=k)\n"
SEND_BACK = "    world.send(grads_1_0.pop(0), stage=1, to=0, microbatch=0)\n"
SEND_LAST = "    world.send(grads_1_0.pop(1), stage=1, to=0, microbatch=1)\n"
TAKE_NEXT = "    acts_0_1[1] = world.recv(edge_0_1(batch.sizes[1]), stage=1, source=0, microbatch=1)\n"
REDUCE_0 = '    if last:\n        world.all_reduce("layers.0", axis="dp")\n'
REDUCE_1 = '    if last:\n        world.all_reduce("layers.1", axis="dp")\n'
SCATTER_0 = '    if last:\n        world.reduce_scatter("layers.0", axis="dp")\n'
SCATTER_LATE = '    world.reduce_scatter("layers.0", axis="dp")\n'
WAIT = "    world.wait()  # until the gradients that are being reduced are there\n"
ADD_0 = '    world.accumulate("layers.0", grads)\n'
ADD_1 = '    world.accumulate("layers.1", grads)\n'
LAST_BACKWARD = "        grads_1_0[1] = stage1_backward(world, batch, 1, saved_1.pop(1))\n"
BEGIN_LAST = '    with world.action("B", stage=1, microbatch=1):\n'
OTHER_HALF = "(world, batch, 0, saved_1.pop(1))"


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        pytest.param(
            [0], [(SEND, "")], "rule transfers: rank 2, stage 1, microbatch 0, .*rank 0 never sends", id="send"
        ),
        pytest.param(
            [0], [(RECV, "")], "rule text: rank 0, stage 0, microbatch 0, action 0B0 .*nothing is stored", id="recv"
        ),
        pytest.param(
            [2],
            [(SEND_BACK, ""), (SEND_LAST, SEND_LAST + SEND_BACK)],
            "rule transfers: rank 2, stage 1, microbatch 1, action 1SEND1>0.*meets the receive of rank 0.*microbatch 0",
            id="sends swapped",
        ),
        pytest.param(
            [0], [(SEND, SEND.replace("to=1", "to=0"))], "rule transfers: rank 0.*stage 0 is not on another", id="to"
        ),
        pytest.param(
            [0], [(REDUCE_0, "")], 'rule gradients: rank 0, .*"layers.0" .* 0 times', id="one rank's all_reduce"
        ),
        pytest.param([0, 1], [(REDUCE_0, "")], 'rule gradients: rank 0, .*"layers.0" .* 0 times', id="all_reduce"),
        pytest.param([0, 1], [(REDUCE_0, REDUCE_0 * 2)], 'rule gradients: rank 0.*"layers.0" .* 2 times', id="twice"),
        pytest.param(
            [0],
            [(REDUCE_0, REDUCE_0.replace("dp", "pp"))],
            'rule gradients: rank 0.*"layers.0" go through all_reduce over dp 0 times .*"pp"',
            id="axis",
        ),
        pytest.param(
            [0, 1],
            [(REDUCE_0, REDUCE_0.replace("dp", "tp"))],
            'rule gradients: rank 0, .*over dp 0 times .*"tp"',
            id="no axis",
        ),
        pytest.param(
            [0],
            [(REDUCE_1, ""), (REDUCE_0, REDUCE_0 + REDUCE_1)],
            'all_reduce of "layers.0".*at that point rank 1',
            id="order",
        ),
        pytest.param(
            [0],
            [(ADD_1, "")],
            'rule gradients: rank 0, stage 0, microbatch 0, action 0B0: .*"layers.1" .* 0 times',
            id="add",
        ),
        pytest.param(
            [1], [(ADD_1, ADD_1 * 2)], 'rule gradients: rank 1, .*"layers.1" are added 2 times', id="added twice"
        ),
        pytest.param(
            [0],
            [(ADD_1, ADD_0), (ADD_0 + REDUCE_0, ADD_1 + REDUCE_0)],
            r"rule values: rank 0, .*gradient of layers.1.0.weight is passed where the gradient of layers.0.0.weight",
            id="added to another",
        ),
        pytest.param([0, 1], [(ADD_0 + REDUCE_0, REDUCE_0 + ADD_0)], "gradients are added after it", id="early"),
        pytest.param([0], [(WAIT, "")], "rule gradients: rank 0, .*not waited for before the end", id="wait"),
        pytest.param([0], [("return (((b, 8)", "return (((b, 9)")], "rule text: rank 0, .*action 0B0", id="shape"),
        pytest.param([2], [("float64),)", "float32),)")], "rule (text|transfers): ", id="dtype"),
        pytest.param(
            [2],
            [("(world, batch, 1, saved_1.pop(1))", OTHER_HALF)],
            "microbatch 0 and 1 are used together in 1B1",
            id="k",
        ),
        pytest.param(
            [2],
            [(BEGIN_LAST, BEGIN_LAST.replace("=1)", "=0)"))],
            "rule text: .*used together in 1B0",
            id="labelled wrong",
        ),
        pytest.param(
            [1], [("PLACE = (0, 1)", "PLACE = (0, 1")], r"rule text: rank 1 \(line \d+.*SyntaxError", id="syntax"
        ),
        pytest.param(
            [1], [("RANK, MESH = 1", "RANK, MESH = 0")], "rule text: rank 1: RANK is 0; the plan's is 1", id="rank"
        ),
        pytest.param([1], [("PLACE = (0, 1)", "PLACE = (1, 0)")], r"rule text: rank 1: PLACE is \(1, 0\)", id="place"),
        pytest.param(
            [1], [("MICROBATCHES = 2", "")], "rule text: rank 1: .*not define MICROBATCHES; define it as 2", id="names"
        ),
        pytest.param(
            [3], [("def step(", "def stop(")], r"rule text: rank 3: .*no function step\(world, batch\)", id="step"
        ),
        pytest.param(
            [2],
            [(SEND_BACK, ""), (TAKE_NEXT, SEND_BACK + TAKE_NEXT)],
            "rule deadlock: pp ranks 0 to 1 at dp 0 .*in the world 0, 2.* deadlock under the pairfifo model",
            id="block",
        ),
        pytest.param(
            [2], [("list(loss.values())", "list(loss.values())[:1]")], "rule outputs: .*microbatches.*0", id="part"
        ),
        pytest.param([2], [('return {"loss": loss}', "return {}")], "rule outputs: rank 2: .*'loss'", id="returned"),
    ],
)
def test_faults_in_a_ddp_program(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(mlp("ddp"), dict.fromkeys(ranks, changes), message)


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        ("zero1", [(SCATTER_0, "")], 'rule gradients: rank 0, .*"layers.0" go through reduce_scatter over dp 0 times'),
        ("zero1", [(SCATTER_0, REDUCE_0)], 'rule gradients: rank 0, .*"layers.0" .*reduce_scatter over dp 0 times'),
        (
            "zero1",
            [('    world.regather("layers.0", axis="dp")\n', "")],
            'rule work: .*"layers.0" are made whole 0 times',
        ),
        (
            "zero1",
            [('world.regather("layers.0"', 'world.regather("layers.1"')],
            'rule work: .*"layers.0" .*whole 0 times',
        ),
        ("zero2", [('reduce_scatter("layers.1", grads, axis="dp")', 'accumulate("layers.1", grads)')], "kept in parts"),
        ("zero2", [('    world.reduce_scatter("layers.1", grads, axis="dp")\n', "")], '"layers.1" are added 0 times'),
        (
            "zero2",
            [("    loss = world.total", SCATTER_LATE + "    loss = world.total")],
            '"layers.0" .* 1 times .*not 0',
        ),
        (
            "fsdp",
            [('all_gather("layers.0", axis="dp", then="layers.1")', 'parameters("layers.0")')],
            "rule work: .*each rank keeps it in parts",
        ),
        (
            "fsdp",
            [('"dp", then="layers.1")', '"dp", then="layers.0")')],
            "'layers.1' is gathered where 'layers.0' was begun",
        ),
        (
            "fsdp",
            [('all_gather("layers.1", axis="dp"', 'all_gather("layers.1", axis="dp", then="layers.0"')],
            "not used",
        ),
        ("fsdp", [(WAIT, "")], "not waited for before the end"),
        ("fsdp", [('    world.reduce_scatter("layers.1", grads, axis="dp")\n', "")], '"layers.1" are added 0 times'),
        (
            "ddp",
            [('parameters("layers.1")', 'all_gather("layers.1", axis="dp")')],
            "rule work: .*each rank keeps it whole",
        ),
        ("ddp", [('parameters("layers.1")', 'parameters("layers.2")')], r"rule work: .*it is on stages \(1,\)"),
        (
            "ddp",
            [('parameters("layers.1")', 'parameters("layers.0")')],
            'rule work: .*parameters of "layers.1" are not read',
        ),
    ],
)
def test_faults_in_whole_groups(placement: str, changes: list[tuple[str, str]], message: str) -> None:
    refused(mlp(placement), {0: changes, 1: changes}, message)


GATHER = '    world.all_gather(("layers.0", "layers.1"), axis="dp")\n'
SCATTER = '    world.reduce_scatter(("layers.1", "layers.0"), axis="dp")\n'


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        ([0, 1], [(GATHER, "")], "'layers.0' is used and was not gathered"),
        ([0, 1], [('*world.gathered("layers.1")', '*world.gathered("layers.0")')], "'layers.0' is used and was not"),
        ([0, 1], [('gathered("layers.1")', 'parameters("layers.1")')], "'layers.1' is gathered and not used"),
        ([0, 1], [(SCATTER, "")], "gradients of 'layers.1' are kept and not reduced"),
        ([0, 1], [('    world.keep("layers.0", grads)\n', "")], 'gradients.*"layers.0" are added 0 times'),
        ([0, 1], [('world.keep("layers.0"', 'world.keep("layers.1"')], "'layers.1' are kept again before they"),
        (
            [0],
            [
                (
                    SCATTER,
                    SCATTER.replace('("layers.1", "layers.0")', '"layers.1"') + SCATTER.replace('"layers.1", ', ""),
                )
            ],
            "rule collectives: .*must call the same collectives",
        ),
    ],
)
def test_faults_where_units_travel_together(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    whole = program("mlp", tuple(MLP.items()), "fsdp", bucket=4096)
    verify(whole)
    refused(whole, dict.fromkeys(ranks, changes), message)


def test_accumulated_gradients_that_travel_together_are_reduced_once() -> None:
    whole = program("mlp", tuple(MLP.items()), "ddp", bucket=4096)
    verify(whole)
    last = '    if last:\n        world.all_reduce(("layers.1", "layers.0"), axis="dp")\n'
    refused(whole, {0: [(last, "")], 1: [(last, "")]}, '"layers.0" go through all_reduce over dp 0 times')


TIED = '    world.all_reduce("wte.weight", axis="pp", stages=(0, 2))\n'


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        ([0, 2], [(TIED, "")], 'rule gradients: rank 0, .*"wte.weight" go through all_reduce over pp among stages'),
        ([0, 2], [(TIED, TIED * 2)], '"wte.weight" .* 2 times .*line'),
        ([0, 2], [(TIED + "    world.wait()\n", TIED)], "not waited for before the end"),
        ([0], [(TIED, TIED.replace("2", "1"))], "rule gradients: rank 0, .* over pp among stages .* 0 times .*0, 1"),
        (
            [0],
            [('    world.accumulate("wte.weight", grads_0)\n', "")],
            'microbatch 0, .*"wte.weight" are added 0 times',
        ),
        (
            [0],
            [("(all_blocks[1], all_blocks[0]), saved", "(all_blocks[1],), saved")],
            r"rule transfers: rank 0.*0SEND0>2.*it sends",
        ),
        ([1], [("acts_1_2.pop(k), stage=1", "acts_1_2[k], stage=1")], "rule text: rank 1.*read without being taken"),
        (
            [1],
            [("    saved.append(kept)\n", "")],
            "rule text: rank 1, stage 1, microbatch 0, action 1B0 ",
        ),
    ],
)
def test_faults_in_a_tied_gpt_with_skips(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(gpt(), dict.fromkeys(ranks, changes), message)


def test_a_backward_that_is_missing_is_named() -> None:
    whole = program("mlp", (("pp", 1),))
    block = re.search(r'( +)with world.action\("B", stage=0, microbatch=k\):\n', whole.ranks[0].source)
    assert block is not None
    call = "stage0_backward(world, batch, k, saved_0.pop(k))"
    refused(
        whole,
        {0: [(block[0] + block[1] + f"    {call}\n", "")]},
        "rule stores: rank 0: .* stored values are never taken",
    )
    gone = [(block[0] + block[1] + f"    {call}\n", f"{block[1]}saved_0.pop(k).clear()\n")]
    refused(whole, {0: gone}, "rule work: rank 0, stage 0, microbatch 0, action 0B0: performed 0 times, not 1")


def test_a_saved_value_that_a_backward_leaves_is_named() -> None:
    changes = [("    saved.append(kept)\n", "    saved.append(kept)\n    saved.insert(0, kept)\n")]
    refused(mlp("ddp"), {0: changes}, "rule stores: rank 0")


TOTAL = "    loss = world.total([], shape=(), dtype=torch.float64)\n"


def test_a_deadlock_of_transfers_and_collectives_shows_the_cycle() -> None:
    backwards = "    for k in range(2):\n        grads_1_0"
    early = {0: [(TOTAL, ""), (backwards, TOTAL + backwards)]}
    refused(
        mlp("ddp"),
        early,
        r"rule deadlock: (?s:.*)total \(rank 0 line \d+, .*\n  waits for (?s:.*)1SEND0>0 with 0RECV0>1 \(rank 2 line",
    )


def test_groups_must_agree_on_their_collectives() -> None:
    refused(
        mlp("ddp"), {0: [(TOTAL, "    loss = None\n")]}, "rule collectives: .*total .*: rank [03] does not take part"
    )
    shape = {0: [(TOTAL, TOTAL.replace("()", "(1,)"))]}
    refused(mlp("ddp"), shape, "rule collectives: rank 0, total .*: at that point rank 1, total")
    foreign = {0: [(TOTAL, TOTAL + '    world.all_reduce("layers.2", axis="dp")\n')]}
    refused(mlp("ddp"), foreign, r"rule gradients: rank 0, all_reduce of \"layers.2\" .*it is on stages \(1,\)")


def test_an_output_that_every_rank_needs_is_brought_to_all() -> None:
    whole = program("half_frozen", tuple(MLP.items()), "ddp", microbatches=1, training=False)
    line = next(line for line in whole.ranks[0].source.splitlines() if "world.everywhere" in line)
    refused(whole, {0: [(line, "    output_1 = None")]}, "rule collectives: .*everywhere")
    everywhere = {
        rank: [(next(t for t in r.source.splitlines() if "everywhere" in t), "")] for rank, r in enumerate(whole.ranks)
    }
    refused(whole, everywhere, "rule (text|outputs): ")


def test_the_ranks_must_be_those_of_the_mesh() -> None:
    whole = mlp("ddp")
    with pytest.raises(VerificationError, match=r"rule text: program: its ranks are \[0, 1, 2\]"):
        verify(replace(whole, ranks=whole.ranks[:3]))


def test_edits_that_keep_the_rules_pass() -> None:
    whole = mlp("ddp")
    verify(
        edited(
            whole, {0: [(SEND, SEND + "        print(end='')\n")], 1: [("    saved = []\n", "    saved = list()\n")]}
        )
    )
    verify(edited(whole, {rank: [(REDUCE_1, ""), (REDUCE_0, REDUCE_0 + REDUCE_1)] for rank in (0, 1)}))


PROGRAMS = {
    **{name: lambda name=name: mlp(name) for name in PLACEMENTS},
    "forward only": lambda: mlp("zero1", training=False),
    "gpt": gpt,
    "one rank": lambda: program("mlp", (("pp", 1),)),
}


@given(st.sampled_from(sorted(PROGRAMS)), st.randoms(use_true_random=False))
def test_a_text_without_one_of_its_world_lines_is_refused(name: str, random: Random) -> None:
    whole: Program = PROGRAMS[name]()
    rank = random.choice(whole.ranks)
    lines = rank.source.splitlines(keepends=True)
    gone = random.choice([n for n, line in enumerate(lines) if "world." in line])
    text = "".join(lines[:gone] + lines[gone + 1 :])
    ranks = tuple(replace(r, source=text) if r is rank else r for r in whole.ranks)
    with pytest.raises(VerificationError, match=r"rule [a-z]+: "):
        verify(replace(whole, ranks=ranks))
        pytest.fail(f"passes without line {gone + 1} of rank {rank.rank}: {lines[gone]}")
