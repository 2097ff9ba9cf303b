"""A tensor axis from plan to steps: parity with one device, the collectives in the text, the gate and its faults."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.api import parallelize
from autopart.api.compiler import captured_step, compile, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.codegen.shapes import Bodies
from autopart.errors import VerificationError
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.passes.verify_between import collectives
from autopart.passes.verify_texts import read as read_text
from autopart.testing import assert_parity, reference_random
from autopart.testing.parity import compare, train
from examples.gpt import GPT, Config
from tests.launch import launch
from tests.models import MODELS as SMALL

LATE = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-4)
"""Products take long, and so does each message: worth splitting are rows and columns of weights, not norms."""

CHEAP = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-8)
"""Messages cost nothing: all that can be split is."""

SAMPLES, LENGTH, WIDTH = 4, 8, 24


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Grouped(nn.Module):
    """A layer as in Llama: root mean square norms, rotary places, four query heads on two of keys, a gated MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        batch, length, width = h.shape
        q, k, v = (p(h).view(batch, length, -1, width // 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Grouped(width) for _ in range(2))
        self.head = nn.Linear(width, 32, bias=False)
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.3])).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Dropping(nn.Module):
    """A hidden layer with dropout, which counts its calls; it returns its output too, or that alone."""

    def __init__(self, *, loss: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.loss = nn.Linear(8, 30), nn.Linear(30, 8), nn.Dropout(0.3), loss
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        self.calls.add_(1)
        h = self.down(self.drop(torch.relu(self.up(x))))
        return h if y is None else (F.mse_loss(h, y), h)


def gpt(layers: int = 2) -> tuple[nn.Module, tuple[Any, ...]]:
    config = Config(layers=layers, width=WIDTH, heads=6, context=LENGTH, vocabulary=40)
    ids = torch.randint(40, (SAMPLES, LENGTH))
    return GPT(config), (ids, ids.roll(-1, 1))


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.randint(32, (SAMPLES, 8))
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100
    return Llama(), (ids, labels)


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = SMALL["mlp"]()
    return model, args


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": gpt, "gpt of one layer": lambda: gpt(1), "llama": llama, "mlp": mlp,
}  # fmt: skip


@cache
def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Segmented]:
    """A model in float64, its call, and its step in segments."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model = model.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return model, args, segment(captured_step(model, read(model, args, {}), None, False, "direct"))


@cache
def program(name: str, mesh: tuple[tuple[str, int], ...], cluster: Cluster = LATE, **pins: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=dict(mesh), cluster=cluster, **pins))


def axes(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


# ---- parity ----------------------------------------------------------------------------------------------------------

PP2 = {"microbatches": 3, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("name", "mesh", "pins"),
    [
        ("gpt", axes(tp=2), {}),
        ("gpt", axes(tp=4), {"cluster": CHEAP}),
        ("gpt", axes(dp=2, tp=2), {"placement": "fsdp"}),
        ("gpt", axes(pp=2, tp=2), PP2),
        ("llama", axes(tp=2), {}),
        ("llama", axes(dp=2, tp=2), {"placement": "zero1", "microbatches": 2}),
        ("mlp", axes(tp=3), {"cluster": CHEAP}),
        ("mlp", axes(tp=2, dp=2), {"placement": "ddp", "cluster": CHEAP}),
        soak("gpt", axes(tp=3), {}),
        soak("gpt", axes(tp=5), {"cluster": CHEAP}),
        soak("llama", axes(tp=3), {"cluster": CHEAP}),
        soak("llama", axes(tp=4), {}),
        soak("gpt", axes(dp=2, tp=2), {"placement": "ddp"}),
        soak("gpt", axes(dp=2, tp=2), {"placement": "zero2", "microbatches": 2, "cluster": CHEAP}),
        soak("llama", axes(dp=2, tp=2), {"placement": "fsdp", "cluster": CHEAP}),
        soak("llama", axes(pp=2, tp=2), {**PP2, "cluster": CHEAP}),
        soak("gpt", axes(pp=2, dp=2, tp=2), {"placement": "zero1"}),
        soak("gpt", axes(tp=2, pp=2), {"schedule": "zb-h1", "microbatches": 3}),
        soak("gpt", axes(pp=2, tp=2), {"recompute": True, "microbatches": 2}),
        soak("gpt", axes(pp=2, tp=2), {"schedule": "interleaved", "microbatches": 4}),
        soak("gpt", axes(pp=2, tp=2), {"schedule": "dualpipe", "microbatches": 4}),
    ],
)
def test_training_is_that_of_one_device(name: str, mesh: Any, pins: dict[str, Any]) -> None:
    model, args, _ = made(name)
    assert_parity(model, args, plan=program(name, mesh, **pins), capture="direct")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh", [{"tp": 3}, {"pp": 2, "tp": 2}])
def test_outputs_inputs_buffers_and_draws_are_those_of_one_device(mesh: dict[str, int]) -> None:
    """In one process that keeps the parameters whole: dropout under a split dim, gradients of inputs, evaluation."""
    torch.manual_seed(0)
    plain, x, y = Dropping().double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()
    model = parallelize(copy.deepcopy(plain), mesh=mesh, cluster=CHEAP, capture="direct", outputs="all")
    for call in range(2):
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        loss, out = model(mine, y)
        loss.backward()
        with reference_random(torch.initial_seed(), call):
            expected, whole = plain(theirs, y)
        expected.backward()
        close(loss, expected), close(out, whole), close(mine.grad, theirs.grad)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            close(found.grad, wanted.grad)
    assert float(model.calls) == 2 * model.plan.microbatches
    assert all(rank.bytes_sent == rank.predicted_bytes for rank in model.report().ranks)
    model.eval(), plain.eval()
    with torch.no_grad():
        close(model(x, y)[1], plain(x, y)[1])
    assert model.program.stages[0].forward.code


def test_a_step_without_a_loss() -> None:
    torch.manual_seed(0)
    plain, x = Dropping(loss=False).double(), torch.randn(6, 8).double()
    plain.drop.p = 0.0
    model = parallelize(copy.deepcopy(plain), mesh={"dp": 2, "tp": 2}, cluster=CHEAP, capture="direct")
    out, expected = model(x), plain(x)
    close(out, expected)
    (out * x).sum().backward(), (expected * x).sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        close(found.grad, wanted.grad)


def gloo_case() -> int:
    """One rank's part of a comparison, in its own process."""
    model, args, _ = made("mlp")
    whole = program("mlp", axes(tp=2), CHEAP)
    data = lambda step: (args, {})  # noqa: E731
    expected = train(copy.deepcopy(model), data, 2, adam, 1.0)
    mine = parallelize(copy.deepcopy(model), plan=whole, capture="direct")
    compare(train(mine, data, 2, adam, 1.0), expected, 1e-9, "gloo")
    assert mine.report().bytes_sent == mine.report().predicted_bytes
    return 1


@pytest.mark.timeout(200)
def test_gloo_processes() -> None:
    assert launch(gloo_case, 2, timeout=180).values == (1, 1)


# ---- what is written and sent ----------------------------------------------------------------------------------------


def bodies(source: str, name: str) -> str:
    """The forward and the backward of one body."""
    found = re.findall(rf"^def {name}_(?:forward|backward)\(.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    return "\n".join(found)


@pytest.mark.parametrize(
    ("name", "body", "degree"), [("gpt", "blocks", 2), ("gpt", "blocks", 3), ("llama", "layers_0", 2)]
)
def test_megatron_four_all_reduces_a_layer(name: str, body: str, degree: int) -> None:
    for rank in program(name, axes(tp=degree)).ranks:
        found = re.findall(r"world\.(\w+)_values", bodies(rank.source, body))
        assert found == ["all_reduce"] * 4
        assert rank.source.count(": Partial(sum) -> Replicate() on tp") >= 4


def test_bytes_of_a_layer_are_megatrons() -> None:
    """8bsh(t-1)/t elements, as the runtime counts them: what one more layer sends."""
    sent = []
    for name in ("gpt of one layer", "gpt"):
        model, args, _ = made(name)
        mine = parallelize(copy.deepcopy(model), plan=program(name, axes(tp=2)), capture="direct")
        mine(*args).backward()
        report = mine.report()
        assert all(rank.bytes_sent == rank.predicted_bytes for rank in report.ranks)
        sent.append(report.bytes_sent["all_reduce"])
    assert sent[1] - sent[0] == 8 * SAMPLES * LENGTH * WIDTH * (2 - 1) // 2 * 8


def test_uneven_heads_stay_whole() -> None:
    """Six heads of four on four places: two places have two, two have one."""
    placed = solved("gpt", {"tp": 4}, {"*.qkv.weight": {"tp": Shard(0)}})
    units = [placed.state_on(rank).homes()["blocks.0.out.weight"] for rank in range(4)]
    shapes = [next(p.shape for p in unit.parameters if p.target == "blocks.0.out.weight") for unit in units]
    assert shapes == [(WIDTH, 8), (WIDTH, 8), (WIDTH, 4), (WIDTH, 4)]


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    golden("mlp_tp2_last.py", program("mlp", axes(tp=2), CHEAP).ranks[1].source)


def test_places_are_told(tmp_path: Path) -> None:
    summary = program("gpt", axes(tp=2)).plan.summary()
    assert "tp Shard(0): blocks.*.up.weight, blocks.*.up.bias" in summary
    assert "tp Shard(1): blocks.*.out.weight, blocks.*.down.weight" in summary
    assert "through blocks.0 .. norm: from Replicate() to Replicate()" in program("gpt", axes(tp=2)).plan.explain()
    changed = program("gpt", axes(tp=2)).plan.diff(program("gpt", axes(tp=2), CHEAP).plan)
    assert re.search(r"tp blocks\.0\.\S+: \S+ -> ", changed)


# ---- the plan on file ------------------------------------------------------------------------------------------------


def test_a_saved_plan_and_a_written_program_are_the_same_program(tmp_path: Path) -> None:
    whole = program("llama", axes(tp=2))
    whole.plan.save(tmp_path / "plan.json")
    again = lower(made("llama")[2], Plan.load(tmp_path / "plan.json"))
    assert [rank.source for rank in again.ranks] == [rank.source for rank in whole.ranks]
    back = Program.read(whole.write(tmp_path / "program"))
    assert back.others == whole.others
    assert verify(back) == verify(whole)


Path_ = tuple[str | int, ...]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("choices", 1, "forward", "outputs", 0),
            {"is": "Shard", "dim": 1, "outer": 1, "unit": 1},
            "is needed as Shard",
        ),
        (("choices", 1, "forward", "moves"), [], "is needed as .*, and is never made that"),
        (("choices", 1, "saved", 0), {"is": "Partial"}, "is needed as Partial|is saved as"),
        (("choices", 1, "forward", "strategies"), [], "choices for .* inputs, operators and outputs"),
        (("segments", 1), 0, ""),
        (("segments", 1), 9, "there are"),
        (("degree",), 3, "its mesh is"),
        (("parameters", 0, 1), {"is": "Shard", "dim": 0, "outer": 1, "unit": 1}, "token.weight is Shard"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(path: Path_, value: Any, message: str) -> None:
    segmented = made("gpt")[2]
    data = json.loads(program("gpt", axes(tp=2)).plan.to_json())
    inner: Any = data["plan"]["tensor"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if not message:  # choices of another body: the step is placed anew
        assert verify(lower(segmented, Plan.from_json(json.dumps(data))))
        return
    with pytest.raises((VerificationError, ValueError), match=message):
        lower(segmented, Plan.from_json(json.dumps(data)))


def test_what_passes_between_segments_is_held_to_the_plan() -> None:
    whole = program("gpt", axes(tp=2))
    tensor = whole.plan.tensor
    assert tensor is not None
    for name, how in ((tensor.between[0][0], Shard(1)), (whole.captured.loss or "", Partial())):
        wrong = replace(tensor, between=((name, how), *tensor.between[1:]))
        with pytest.raises(VerificationError, match=f"between segments on tp: {name} is"):
            lower(made("gpt")[2], replace(whole.plan, tensor=wrong))


# ---- pins ------------------------------------------------------------------------------------------------------------


def how(found: Program, target: str) -> Any:
    assert found.plan.tensor is not None
    return dict(found.plan.tensor.parameters)[target]


def solved(name: str, mesh: dict[str, int], placement: Any) -> Program:
    segmented = made(name)[2]
    return lower(segmented, solve(segmented, mesh=mesh, cluster=LATE, placement=placement))


def test_pins_are_kept() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    found = solved(
        "mlp", {"dp": 2, "tp": 2}, {"out.weight": {"tp": Shard(1)}, "layers.0": {"tp": Replicate()}, "*": "zero1"}
    )
    assert how(found, "out.weight") == Shard(1)
    assert how(found, "layers.0.0.weight") == how(found, "layers.0.0.bias") == Replicate()
    assert str(found.plan.placements[-1][1]) == "zero1"
    placed = solved("gpt", {"tp": 2}, {"*.qkv.weight": {"tp": TorchShard(0)}, "*.up.weight": {"tp": Shard(-1)}})
    assert how(placed, "blocks.1.qkv.weight") == Shard(0, 3)  # in each of query, key and value
    assert how(placed, "blocks.0.up.weight") == Shard(1)


@pytest.mark.parametrize(
    ("mesh", "placement", "error", "message"),
    [
        ({"tp": 2}, {"*.gone": {"tp": Shard(0)}}, ValueError, "'[*].gone'"),
        ({"dp": 2}, {"out": {"tp": Shard(0)}}, ValueError, "'out' is placed on 'tp', but the mesh has no axis"),
        ({"tp": 2}, {"out": {"dp": Shard(0)}}, ValueError, "'out' is placed on 'dp', but tensors are split on 'tp'"),
        ({"tp": 2}, {"out.bias": {"tp": Shard(1)}}, ValueError, "'out.bias' is to be split along dim 1, but it has 1"),
        ({"tp": 2}, {"out": {"tp": "ddp"}}, TypeError, "'out' has 'ddp'; on an axis it is autopart.Shard"),
        ({"tp": 2}, {"out": {"tp": Partial()}}, TypeError, "autopart.Shard"),
        ({"tp": 6}, {"out.bias": {"tp": Shard(0)}}, ValueError, "'out.bias' cannot be Shard.0. on this axis"),
        ({"tp": 2}, {"out.bias": {"tp": Shard(0, 3)}}, ValueError, "'out.bias' cannot be Shard.0, inside 3"),
        ({"ep": 2}, None, ValueError, "axis 'ep' is not planned yet; use pp, dp and tp"),
    ],
)
def test_pins_that_cannot_be_are_refused_by_name(mesh: Any, placement: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        solved("mlp", mesh, placement)


def test_names_are_public() -> None:
    assert autopart.Shard is Shard and autopart.Replicate is Replicate and autopart.Partial is Partial


# ---- planted faults --------------------------------------------------------------------------------------------------


def edited(whole: Program, ranks: Sequence[int], old: str, new: str, count: int = 1) -> Program:
    texts = []
    for rank in whole.ranks:
        assert old in rank.source
        source = rank.source.replace(old, new, count) if rank.rank in ranks else rank.source
        texts.append(replace(rank, source=source))
    return replace(whole, ranks=tuple(texts))


SUM = 'addmm_1_sum = world.all_reduce_values(addmm_1, axis="tp", how="sum")'


@pytest.mark.parametrize(
    ("ranks", "old", "new", "message"),
    [
        ((1,), SUM, "addmm_1_sum = addmm_1", "rule values: rank 1, stage 0, .* inside it comes"),
        ((0, 1), SUM, "addmm_1_sum = addmm_1", "rule values: rank 0, .* where all_reduce_values of .* is due"),
        ((0, 1), SUM, SUM.replace("sum", "max").replace("_max", "_sum"), r"comes .* by \('max',\) where"),
        ((1,), SUM, f"{SUM}\n    {SUM}", "inside it comes all_reduce_values"),
        (
            (0,),
            SUM,
            SUM.replace('"tp"', '"dp"'),
            "TypeError: the mesh has no axis 'dp' to exchange values on; it has tp",
        ),
        ((0,), SUM, SUM.replace("all_reduce", "all_sum"), "no attribute 'all_sum_values'"),
        ((1,), "blocks_forward(world, b, B,", "blocks_forward(batch, b, B,", "its first argument is the world"),
    ],
)
def test_a_collective_that_is_missing_or_wrong_is_noticed(
    ranks: Sequence[int], old: str, new: str, message: str
) -> None:
    whole = program("gpt", axes(tp=2))
    assert verify(whole)
    with pytest.raises(VerificationError, match=message):
        verify(edited(whole, ranks, old, new))


def test_the_order_of_collectives_is_that_of_the_graph() -> None:
    """Gradients of keys and values, of one shape, are summed the other way about at one place."""
    whole = program("llama", axes(tp=2), CHEAP)
    sums = r"( +\w+ = world\.reduce_scatter_values\(.*\)\n)"
    changed, count = re.subn(rf"{sums}( +#.*\n){sums}", r"\3\2\1", whole.ranks[1].source, count=1)
    assert count == 1
    wrong = replace(whole, ranks=(whole.ranks[0], replace(whole.ranks[1], source=changed)))
    with pytest.raises(VerificationError, match=r"rule values: rank 1, .* inside it comes reduce_scatter_values of"):
        verify(wrong)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SUM, "addmm_1_sum = addmm_1", r"rule collectives: rank 0, .* at that point rank 1,"),
        (SUM, f"{SUM}\n    {SUM}", r"rule collectives: rank 0, .* at that point rank 1,"),
        (
            "view_3 = aten.view.default(addmm_1_sum",
            f"{SUM}\n    view_3 = aten.view.default(addmm_1_sum",
            "rule collectives",
        ),
    ],
)
def test_places_that_do_not_meet_are_noticed(old: str, new: str, message: str) -> None:
    """By what they do together alone, whatever their graphs say."""
    wrong = edited(program("gpt", axes(tp=2)), (1,), old, new)
    texts = [read_text(wrong, rank, wrong.plan.batch, Bodies()) for rank in range(2)]
    with pytest.raises(VerificationError, match=message):
        collectives(texts)


def test_a_place_that_adds_its_loss_twice_is_noticed() -> None:
    whole = program("gpt", axes(tp=2))
    text = whole.ranks[1].source.replace("world.total([],", "world.total(list(loss.values()),")
    wrong = replace(whole, ranks=(whole.ranks[0], replace(whole.ranks[1], source=text)))
    with pytest.raises(VerificationError, match=r"rule outputs: rank 1.*it sums the parts of the microbatches"):
        verify(wrong)


def test_the_text_of_another_place_is_noticed() -> None:
    """Uneven places: the first one's text computes with its own pieces."""
    whole = program("mlp", axes(tp=3), CHEAP)
    text = whole.ranks[0].source.replace("RANK, MESH = 0", "RANK, MESH = 2")
    with pytest.raises(VerificationError, match=r"rule (outputs|values|text): rank 2"):
        verify(replace(whole, ranks=(*whole.ranks[:2], replace(whole.ranks[2], source=text))))


def test_compile_takes_a_plan_of_a_tensor_axis() -> None:
    model, args, _ = made("mlp")
    plan = autopart.plan(model, args, mesh={"tp": 2}, cluster=LATE, capture="direct")
    assert compile(model, plan, args, capture="direct").ranks[0].source == program("mlp", axes(tp=2)).ranks[0].source
