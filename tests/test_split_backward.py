"""Backwards in two: bit for bit the gradients of the whole ones, from the fewest bytes that I can hand to W."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart import parallelize, schedules
from autopart.api.compiler import captured_step, lower, predicted
from autopart.capture import read
from autopart.errors import VerificationError
from autopart.ir.action import Kind
from autopart.ir.captured import Captured
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory
from autopart.ir.program import Program
from autopart.ir.segmented import Function, Halves
from autopart.ir.staged import Staged
from autopart.ir.state import BUCKET
from autopart.passes.emit import emit
from autopart.passes.predict import predict_memory
from autopart.passes.recompute import recompute
from autopart.passes.schedule import schedule
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from autopart.passes.split_backward import split_backward
from autopart.passes.verify import verify
from autopart.testing import assert_parity
from tests.capture_cases import CASES, normalised
from tests.interpret import Values, bind, execute, microbatch_values, part_sizes, run_function
from tests.models import GPT, MLP
from tests.test_predict import Case, check, measure, sample


def plan_for(
    captured: Captured,
    mesh: dict[str, int],
    name: str,
    microbatches: int,
    placement: str = "ddp",
    again: tuple[str, ...] = (),
    cuts: tuple[str, ...] = (),
) -> Plan:
    """Stages of about equal numbers of segments, or those that begin at `cuts`."""
    sizes, names = Mesh.of(mesh), [item.name for item in segment(captured, cuts=cuts).segments]
    count = sizes.degree("pp")
    starts = [0, *map(names.index, cuts)] if cuts else [round(i * len(names) / count) for i in range(count)]
    return Plan(
        mesh=sizes,
        stages=tuple(
            Stage(tuple(names[a:b]), sizes.column(i)) for i, (a, b) in enumerate(pairwise([*starts, len(names)]))
        ),
        placements=(("*", Placement.preset(placement)),),
        schedule=name,
        microbatches=microbatches,
        recompute=tuple(names) if again == ("*",) else again,
        batch=captured.batch,
        prediction=Prediction(0.0, 0.0, (0.0,) * count, (StageMemory(),) * count),
        optimality="",
        notes=(),
        fingerprint="",
    )


def staged_by(captured: Captured, plan: Plan) -> tuple[Staged, Staged]:
    """The step with its backwards whole, and in two."""
    whole = split(shard(recompute(segment(captured, cuts=plan.cuts), plan.recompute)), plan)
    return whole, split_backward(whole, schedule(whole, plan).schedule, samples=2)


@cache
def captured_of(name: str) -> Captured:
    """The step of one of the models below."""
    return step_of(*MODELS[name]())


def step_of(model: nn.Module, args: tuple[Any, ...], semantics: str = "exact") -> Captured:
    return captured_step(model, read(model, args, {}), None, False, "direct", semantics)


def program(captured: Captured, bucket: int = BUCKET, **pins: Any) -> Program:
    """The program of a training step."""
    plan = replace(plan_for(captured, **pins), bucket=bucket)
    segmented = segment(captured, cuts=plan.cuts)
    return lower(segmented, predicted(segmented, plan))


# The pass by itself: what the halves compute, on graphs of every kind.


def gradients(staged: Staged, module: nn.Module, call: Any, microbatches: int) -> list[tuple[str, torch.Tensor]]:
    """Every gradient of a parameter that an action returns, in order: of a microbatch all F, all B or I, then all W."""
    captured = staged.segmented.captured
    values = bind(module, captured, call)
    once = execute(captured.prologue, values, call.batch, call.batch)
    fixed = {i.value.name for i in captured.of_kind("buffer", "constant", "prologue")}
    parameters = {item.target: values[item.value.name] for item in captured.of_kind("parameter")}
    returned: list[tuple[str, torch.Tensor]] = []
    count = len(staged.stages)
    for part in microbatch_values(captured, call, values, microbatches):
        held = {name: {**part, **once}[name] for name in fixed}
        flow = {item.value.name: part[item.value.name] for item in captured.of_kind("input", "tangent")}
        kept: dict[tuple[str, str], list[torch.Tensor]] = {}
        for kinds, stages in (({Kind.F}, range(count)), ({Kind.B, Kind.I}, reversed(range(count)))):
            for stage in stages:
                for kind in kinds & {*staged.kinds(stage)}:
                    perform(staged, stage, kind, flow, held, parameters, kept, returned, part_sizes(captured, part)[0])
        for stage in reversed(range(count)):
            if Kind.W in staged.kinds(stage):
                perform(staged, stage, Kind.W, flow, held, parameters, kept, returned, part_sizes(captured, part)[0])
        assert not kept, "everything that was kept was taken"
    return returned


def perform(
    staged: Staged,
    stage: int,
    kind: Kind,
    flow: Values,
    held: Values,
    parameters: Values,
    kept: dict[tuple[str, str], list[torch.Tensor]],
    returned: list[tuple[str, torch.Tensor]],
    size: int,
) -> None:
    """One action, from what its functions are said to take alone."""
    for item, phase in staged.phases(stage, kind):
        taken = "saved" if staged.enters(stage, kind) else "stash"
        given = [flow[name] for name in phase.takes]
        given += kept.pop((item.name, taken)) if kind is not Kind.F else []
        given += [*(held[name] for name in phase.fixed), *(parameters[target] for target in phase.parameters)]
        env = run_function(phase.function, given, size, staged.segmented.captured.batch)
        made = [env[name] for name in phase.function.outputs]
        flow.update(zip(phase.gives, made, strict=False))
        if phase.keeps is not None:
            kept[item.name, "saved" if kind is Kind.F else "stash"] = [env[name] for name in phase.keeps]
        returned += zip(phase.gradients, made[len(phase.gives) :], strict=False)


OFTEN = ("half_frozen", "custom_functions", "tied_by_storage", "unet", "called_twice", "tuples_between_blocks")
TRAINED = [name for name in CASES if not name.startswith(("gpt2", "llama", "no_grad"))]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * (n not in OFTEN)) for n in TRAINED])
def test_halves_make_the_gradients_of_the_whole_backward_bit_for_bit(name: str) -> None:
    """On the same stages, from the same values, saved or recomputed; W as late as can be."""
    module, call, captured = normalised(name)
    stages = min(3, len(segment(captured).segments))
    for again in ((), ("*",)):
        plan = plan_for(captured, {"pp": stages}, "zb-h1", min(2, call.batch), again=again)
        whole, halved = staged_by(captured, plan)
        expected, found = (gradients(each, module, call, plan.microbatches) for each in (whole, halved))
        assert expected
        by_name = [sorted(each, key=lambda pair: pair[0]) for each in (expected, found)]
        for (target, one), (other, two) in zip(*by_name, strict=True):
            assert target == other and torch.equal(one, two), target


# What is handed over, and where.


def halves_of(staged: Staged, name: str) -> Halves:
    found = next(item for item in staged.segmented.segments if item.name == name)
    halves = staged.segmented.bodies[found.body].halves
    assert halves is not None
    return halves


def ops(function: Function | None) -> list[str]:
    return [] if function is None else [node.opname.split(".")[1] for node in function.nodes]


def test_fused_operators_are_in_i_and_products_with_activations_in_w() -> None:
    captured = captured_of("gpt")
    staged = staged_by(captured, plan_for(captured, {"pp": 2}, "zb-h1", 2))[1]
    block = halves_of(staged, "blocks.2")
    first, second = ops(block.input), ops(block.weight)
    assert first.count("native_layer_norm_backward") == 2 and first.count("mm") == 4
    assert any("attention" in op for op in first)
    assert second.count("mm") == 4 and second.count("sum") == 4
    assert {*second} <= {"mm", "sum", "t", "view", "reshape"}
    assert not {value.name for value in block.weight.inputs if value.name.endswith("_weight")}, "nothing is gathered"
    assert halves_of(staged, "blocks.0").input is None, "no gradient leaves the first stage"
    assert len(ops(halves_of(staged, "blocks.0").weight)) > len(second)


def test_layers_of_a_first_stage_share_a_body_as_before() -> None:
    """Its whole backward is W, so it does not matter that the last one's gradients come from another stage."""
    captured = captured_of("mlp")
    plan = plan_for(captured, {"pp": 2}, "zb-h1", 2, cuts=("layers.4",))
    stages = (staged.stages[0] for staged in staged_by(captured, plan))
    whole, halved = ([segment.body for segment in stage] for stage in stages)
    assert len({*halved}) == len({*whole}) < len(whole)


def test_what_both_halves_need_of_a_recomputed_forward_is_computed_once() -> None:
    captured = captured_of("gpt")
    staged = staged_by(captured, plan_for(captured, {"pp": 2}, "zb-h1", 2, again=("*",)))[1]
    block = halves_of(staged, "blocks.2")
    assert [ops(block.input).count(op) for op in ("addmm", "native_layer_norm")] == [3, 2]
    assert not {"addmm", "native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu"} & {*ops(block.weight)}


def test_what_no_gradient_that_leaves_needs_is_w() -> None:
    captured = captured_of("decoder")
    plan = plan_for(captured, {"pp": 2}, "zb-h1", 2, cuts=("embed",))
    staged = staged_by(captured, plan)[1]
    for name in ("embed", "mix"):
        assert ops(halves_of(staged, name).input) == [], "I passes on what comes in"
        assert "mm" in ops(halves_of(staged, name).weight)
    source = program(captured, mesh={"pp": 2}, name="zb-h1", microbatches=2, cuts=("embed",)).ranks[1].source
    assert re.search(r"d_mix, grads = mix_backward_weight\(b, B, \w+, \*stash.pop\(0\)", source)


def test_other_schedules_leave_the_step_as_it_is() -> None:
    captured = captured_of("mlp")
    for name in ("1f1b", "gpipe"):
        whole, halved = staged_by(captured, plan_for(captured, {"pp": 2}, name, 2))
        assert halved is whole


# Programs.


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return MLP(layers=6).double(), (torch.randn(7, 8).double(), torch.randn(7, 3).double())


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Tied weights on the first and the last stage, skips over all of them."""
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (6, 6))
    return GPT(layers=4, vocabulary=30, width=8, heads=2, length=6).double(), (ids, ids.flip(0))


class Frozen(nn.Module):
    """Trained layers at both ends, frozen ones between: a stage in the middle has no W."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        for layer in self.layers[2:5]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class FrozenFirst(Frozen):
    """The first two of four stages have nothing to do in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:4].requires_grad_(False)


class Decoder(nn.Module):
    """A gradient leaves the second stage from `join` alone: the layers before it need none of their inputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.encode, self.embed, self.mix, self.join, self.out = (nn.Linear(width, width) for _ in range(5))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        e = torch.tanh(self.encode(x))
        d = torch.tanh(self.mix(torch.tanh(self.embed(z))))
        return self.out(torch.tanh(self.join(d) * e)).square().mean()


class Mixed(nn.Module):
    """Convolutions with norms, dropout, a weight used twice on a stage, a region of the user's to be recomputed."""

    def __init__(self, drop: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 4), nn.Dropout(drop)
        self.second = nn.Conv1d(4, 4, 3, padding=1)
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x[:, None]))))
        h = torch.tanh(self.second(h)).mean(1)
        h = self.drop(self.mix(torch.tanh(self.mix(h))))
        return F.mse_loss(self.out(h), y)


class Norms(nn.Module):
    """Norms over the batch on several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 6)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def pairs(model: Callable[[], nn.Module], count: int = 7) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return model().double(), (torch.randn(count, 6).double(), torch.randn(count, 6).double())


def decoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return pairs(Decoder)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "mlp": mlp,
    "gpt": gpt,
    "frozen": lambda: pairs(Frozen),
    "frozen first": lambda: pairs(FrozenFirst),
    "decoder": decoder,
    "mixed": lambda: pairs(Mixed),
}

Row = tuple[str, dict[str, int], str, int, str]
ROWS: list[Row] = [
    ("mlp", {"pp": 1}, "zb-h1", 3, "ddp"),
    ("mlp", {"pp": 4}, "zb-h2", 7, "ddp"),
    ("gpt", {"pp": 2}, "zb-h1", 4, "ddp"),
    ("gpt", {"pp": 2}, "zb-h2", 4, "ddp"),
    ("gpt", {"pp": 4}, "zb-h1", 3, "ddp"),
    ("gpt", {"pp": 2, "dp": 2}, "zb-h1", 2, "fsdp"),
    ("mlp", {"pp": 2, "dp": 2}, "zb-h1", 3, "ddp"),
    ("mlp", {"pp": 2, "dp": 2}, "zb-h2", 3, "zero1"),
    ("mlp", {"pp": 2, "dp": 2}, "zb-h1", 2, "zero2"),
    ("frozen", {"pp": 4}, "zb-h2", 5, "ddp"),
    ("frozen first", {"pp": 4}, "zb-h1", 3, "ddp"),
    ("decoder", {"pp": 2}, "zb-h1", 3, "ddp"),
    ("mixed", {"pp": 2}, "zb-h1", 4, "ddp"),
    ("mixed", {"pp": 4}, "zb-h2", 4, "ddp"),
]


OFTEN_TRAINED = (2, 5, 8, 9, 11, 12)


def pinned(row: Row, **more: Any) -> Program:
    name, mesh, order, microbatches, placement = row
    cuts = ("embed",) if name == "decoder" else ()
    pins = {"mesh": mesh, "name": order, "microbatches": microbatches, "placement": placement, "cuts": cuts}
    return program(captured_of(name), **{**pins, **more})


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.soak] * (i not in OFTEN_TRAINED)) for i, row in enumerate(ROWS)],
    ids=str,
)
def test_training_equals_one_device(row: Row) -> None:
    """Losses, raw gradients, norms and parameters of two steps; 6 and 7 samples are cut unevenly."""
    assert_parity(*MODELS[row[0]](), plan=pinned(row), steps=2)


def test_recomputed_segments() -> None:
    row: Row = ("gpt", {"pp": 2}, "zb-h1", 3, "ddp")
    assert_parity(*gpt(), plan=pinned(row, again=("blocks.1", "blocks.2", "blocks.3")), steps=1)


def grads(made: Program, model: nn.Module, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Those of one step, with all ranks in this process."""
    parallel = parallelize(copy.deepcopy(model), plan=made, capture="direct")
    parallel(*args).backward()
    return dict(parallel.full_grads())


@pytest.mark.parametrize("row", [ROWS[i] for i in (2, 7, 11)], ids=str)
def test_gradients_are_bit_for_bit_those_of_whole_backwards(row: Row) -> None:
    """Microbatches are added up in the same order by 1f1b."""
    model, args = MODELS[row[0]]()
    halved, whole = (grads(pinned(row, name=name), model, args) for name in (row[2], "1f1b"))
    assert halved.keys() == whole.keys()
    assert all(torch.equal(halved[name], whole[name]) for name in whole)


MIXED_TABLE = "0F0,0F1,0F2,0B0,0I1,0I2,0W2,0W1\n1F0,1B0,1F1,1I1,1F2,1B2,1W1"
"""Microbatches that differ in how their backward is performed, and a W before that of an earlier microbatch."""


@pytest.mark.parametrize("placement", ["zero1", "fsdp"])
def test_a_table_with_whole_backwards_and_halves(placement: str) -> None:
    row: Row = ("mlp", {"pp": 2, "dp": 2}, MIXED_TABLE, 3, placement)
    made = pinned(row)
    assert "def stage1_backward(" in made.ranks[2].source and "def stage1_backward_weight(" in made.ranks[2].source
    if placement == "zero1":
        assert "last = k == 1 " in made.ranks[0].source, "gradients are complete after the last W of the row"
    assert_parity(*mlp(), plan=made, steps=2)


@pytest.mark.parametrize("order", [pytest.param("interleaved-zb", marks=pytest.mark.soak), "zb-v"])
def test_several_stages_a_rank(order: str) -> None:
    """The weight that the first and the last stage share is on one rank with zb-v, on two otherwise."""
    (model, args), captured = gpt(), captured_of("gpt")
    names = [item.name for item in segment(captured).segments]
    starts = [0, 2, 3, 5, len(names)]
    place = (0, 1, 1, 0) if order == "zb-v" else (0, 1, 0, 1)
    base = plan_for(captured, {"pp": 2}, "1f1b", 4)
    plan = replace(
        base,
        stages=tuple(Stage(tuple(names[a:b]), (r,)) for (a, b), r in zip(pairwise(starts), place, strict=True)),
        schedule=order,
        prediction=Prediction(0.0, 0.0, (0.0,) * 4, (StageMemory(),) * 4),
    )
    segmented = segment(captured)
    assert_parity(model, args, plan=lower(segmented, predicted(segmented, plan)), steps=1)


def families() -> list[str]:
    """Every family whose backwards are in two, of whole microbatches."""
    made = [schedules.build(family.name, ranks=2, microbatches=4) for family in schedules.names()]
    whole = [each for each in made if not any(action.slice or action.pipe for _, action in each.actions())]
    return [each.name for each in whole if any(action.kind is Kind.I for _, action in each.actions())]


@pytest.mark.parametrize("order", families())
def test_every_family_with_backwards_in_two_has_a_program(order: str) -> None:
    """It is verified before it is returned, with all stages on their ranks."""
    model, args = mlp()
    captured = captured_of("mlp")
    built = schedules.build(order, ranks=2, microbatches=4)
    names = [item.name for item in segment(captured).segments]
    starts = [round(i * len(names) / built.stages) for i in range(built.stages + 1)]
    runs = zip(pairwise(starts), built.place, strict=True)
    plan = replace(
        plan_for(captured, {"pp": 2}, "1f1b", 4),
        stages=tuple(Stage(tuple(names[a:b]), (rank,)) for (a, b), rank in runs),
        schedule=order,
        prediction=Prediction(0.0, 0.0, (0.0,) * built.stages, (StageMemory(),) * built.stages),
    )
    made = lower(segment(captured), plan)
    assert all("_backward_weight(" in rank.source for rank in made.ranks)
    assert_parity(model, args, plan=made, steps=1)


def test_slices_with_statistics_of_their_own() -> None:
    model, args = pairs(Norms, 8)
    captured = step_of(model, args, "accumulate")
    plan = plan_for(captured, {"pp": 2, "dp": 2}, "zb-h1", 2)
    assert_parity(model, args, plan=plan, semantics="accumulate", steps=2)


class Outputs(nn.Module):
    """No loss: outputs whose gradients the caller makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


def test_without_a_loss_backwards_in_two_come_after_all_forwards() -> None:
    """So does 2bp-gpipe; zb-h1 begins backwards before, and is refused."""
    model, (x, y) = pairs(Outputs)
    captured = step_of(model, (x,))
    made = program(captured, mesh={"pp": 2}, name="2bp-gpipe", microbatches=3)
    assert made.captured.deferred and "stage1_backward_weight(world, batch, k, stash_1.pop(k)" in made.ranks[1].source
    assert_parity(model, (x,), plan=made, loss=lambda out: (out - y).square().mean(), steps=2)
    with pytest.raises(ValueError, match=r"zb-h1.*before all forwards are done.*return the loss"):
        program(captured, mesh={"pp": 2}, name="zb-h1", microbatches=3)


def test_gradients_of_inputs_come_from_i() -> None:
    model, args = mlp()
    args[0].requires_grad_()
    made = program(step_of(model, args), mesh={"pp": 2}, name="zb-h1", microbatches=3)
    assert "stage0_backward_input" in made.ranks[0].source
    plain, parallel = copy.deepcopy(model), parallelize(copy.deepcopy(model), plan=made, capture="direct")
    found = []
    for each in (plain, parallel):
        x = args[0].detach().clone().requires_grad_()
        each(x, args[1]).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_a_written_program_is_read_back_with_its_halves(tmp_path: Path) -> None:
    made = pinned(ROWS[2])
    read_back = Program.read(made.write(tmp_path))
    assert read_back.staged == made.staged
    verify(read_back)
    graphs = read_back.stages[1]
    assert graphs.backward is None and graphs.backward_input is not None and graphs.backward_weight is not None
    assert read_back.stages[0].backward_input is None and read_back.stages[0].backward_weight is not None


# What verify finds in an edited text.

LINE = re.compile(r"^( *)(.*)$")


def without(source: str, text: str, count: int = 1) -> str:
    """The source with the last lines that contain some text replaced by ``pass``."""
    lines = source.split("\n")
    at = [i for i, line in enumerate(lines) if text in line][-count:]
    assert at, f"{text!r} is not in the text:\n{source}"
    for i in at:
        lines[i] = LINE.sub(r"\1pass", lines[i])
    return "\n".join(lines)


def action(source: str, kind: str, stage: int) -> re.Match[str]:
    """The first action of a kind on a stage, with its body."""
    found = re.search(rf'\n +with world.action\("{kind}", stage={stage}, .*\n .*(?=\n)', source)
    assert found is not None, source
    return found


def refused(made: Program, rank: int, edit: Callable[[str], str], pattern: str) -> None:
    ranks = list(made.ranks)
    changed = edit(ranks[rank].source)
    assert changed != ranks[rank].source
    ranks[rank] = replace(ranks[rank], source=changed)
    with pytest.raises(VerificationError) as caught:
        verify(replace(made, ranks=tuple(ranks)))
    assert re.search(pattern, str(caught.value)), str(caught.value)


@cache
def small(placement: str = "ddp", dp: int = 1) -> Program:
    return pinned(("mlp", {"pp": 2, **({"dp": dp} if dp > 1 else {})}, "zb-h1", 2, placement), bucket=0)


def swapped(source: str, stage: int) -> str:
    """The first I of a stage after the W that follows it."""
    first = action(source, "I", stage)
    second = action(source[first.end() :], "W", stage)
    between = source[first.end() : first.end() + second.start()]
    return source[: first.start()] + between + second[0] + first[0] + source[first.end() + second.end() :]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_w_that_is_dropped_is_found(stage: int) -> None:
    def dropped(source: str) -> str:
        found = action(source, "W", stage)[0]
        return source.replace(found, re.sub(r"^\n( +).*", r"\n\1pass", found, flags=re.DOTALL))

    refused(small(), stage, dropped, rf"rule stores: rank {stage}: {4 - 2 * stage} stored values are never")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_w_before_its_i_is_found(stage: int) -> None:
    """Where I does nothing, too."""
    refused(small(), stage, lambda s: swapped(s, stage), "rule work: .*comes before|nothing is stored for microbatch")


def test_a_stash_that_is_used_twice_is_found() -> None:
    def twice(source: str) -> str:
        return re.sub(r"stash_1\.pop\((k|1)\)", "stash_1.pop(0)", source)

    refused(small(), 1, twice, "nothing is stored for microbatch 0|used together")


def test_a_stash_that_is_not_used_is_found() -> None:
    refused(
        small(), 1, lambda s: without(s, "*stash.pop(0)"), "rule text: .*1W0 .*gradients of layers.5 have the shapes"
    )


def test_a_stash_of_another_layer_is_found() -> None:
    """All layers but the last have equal shapes."""
    refused(small(), 1, lambda s: s.replace("*stash.pop(0)", "*stash.pop(1)", 2), "rule (values|text)")


def test_an_i_that_is_done_twice_is_found() -> None:
    refused(small(), 0, lambda s: s.replace(action(s, "I", 0)[0], 2 * action(s, "I", 0)[0]), "rule work: .*2 times")


def test_gradients_that_i_adds_are_found() -> None:
    def moved(source: str) -> str:
        return source.replace("stash = []", 'stash = []\n    world.accumulate("out", (None, None))', 1)

    refused(small(), 1, moved, "rule gradients: .*outside of a backward")


def test_a_gradient_that_w_does_not_add_is_found() -> None:
    refused(small(), 0, lambda s: without(s, "world.accumulate("), "rule gradients: .*are added 0 times")


def test_a_reduction_before_the_last_w_is_found() -> None:
    made = small("zero1", 2)
    refused(made, 0, lambda s: s.replace("last = k == 1 ", "last = k == 0 "), "rule gradients: .*added after it")


def test_parameters_that_i_does_not_read_as_placed_are_found() -> None:
    made = small("fsdp", 2)
    assert "all_gather" not in made.ranks[2].source.partition("def stage1_backward_weight")[2].partition("def step")[0]

    def whole(source: str) -> str:
        head, name, text = source.partition("def stage1_backward_input")
        text = text.replace(', then="layers.4"', "", 1)
        return head + name + text.replace('all_gather("layers.4", axis="dp")', 'parameters("layers.4")', 1)

    refused(made, 2, whole, r"rule work: .*1I0.*each rank keeps it in parts; read it with world\.all_gather")


def test_a_gradient_sent_before_it_is_made_is_found() -> None:
    def early(source: str) -> str:
        line = next(x for x in source.split("\n") if "world.send(grads_1_0.pop(0)" in x)
        at = action(source, "I", 1)
        rest = source[at.start() :].replace(line + "\n", "", 1)
        return source[: at.start()] + "\n" + line + rest

    refused(small(), 1, early, "nothing is stored for microbatch 0")


# What is kept and sent, against what the runtime counts.


def predicted_case(name: str, mesh: dict[str, int], order: str, microbatches: int, placement: str, again: Any) -> Case:
    found = sample(name)
    plan = plan_for(found.segmented.captured, mesh, order, microbatches, placement, again=again)
    whole = split(shard(recompute(found.segmented, plan.recompute)), plan)
    lowered = schedule(whole, plan)
    staged = split_backward(whole, lowered.schedule, samples=2)
    return Case(found, plan, staged, lowered, emit(staged, lowered, plan))


@pytest.mark.parametrize(
    ("name", "mesh", "order", "microbatches", "placement", "again"),
    [
        ("gpt", {"pp": 3}, "zb-h2", 6, "ddp", ()),
        ("gpt", {"pp": 2, "dp": 2}, "zb-h1", 3, "fsdp", ()),
        ("gpt", {"pp": 2}, "zb-h1", 3, "ddp", ("*",)),
        ("mlp", {"pp": 2, "dp": 2}, "zb-h2", 3, "zero2", ()),
        ("mlp", {"pp": 3}, "2bp-1f1b", 4, "ddp", ()),
        ("half frozen", {"pp": 3}, "zb-h1", 4, "ddp", ()),
        ("across", {"pp": 2, "dp": 2}, "zb-h1", 2, "zero1", ()),
        ("gpt", {"pp": 2}, MIXED_TABLE, 3, "ddp", ()),
    ],
    ids=str,
)
def test_counted_and_predicted_are_equal(
    name: str, mesh: dict[str, int], order: str, microbatches: int, placement: str, again: tuple[str, ...]
) -> None:
    """Bytes sent, parameters, gradients and the peak of activations, the stash among them, to the byte."""
    check(predicted_case(name, mesh, order, microbatches, placement, again))


def test_what_i_hands_over_is_kept_instead_of_what_the_forward_saved() -> None:
    """With all W at the end, one that keeps everything that its I has would be seen to."""
    made = predicted_case("gpt", {"pp": 2}, "2bp-1f1b", 4, "ddp", ())
    peaks = predict_memory(made.staged, made.scheduled, made.plan)

    def hoarding(source: str) -> str:
        return source.replace("    return (d_", "    stash.append(tuple(hoard))\n    return (d_").replace(
            "    stash = []\n", "    hoard = [x for kept in saved for x in kept]\n    stash = []\n"
        )

    assert hoarding(made.program.ranks[1].source) != made.program.ranks[1].source
    greedy = measure(made, hoarding)
    assert greedy[1].memory.activations > peaks[1].activations
