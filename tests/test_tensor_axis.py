"""A tensor axis from plan to steps: parity with one device, the collectives in the text, the bytes that are sent."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import autopart
from autopart.api import parallelize
from autopart.api.compiler import lower, solve
from autopart.ir.placement import Shard
from autopart.testing import LocalWorld, assert_parity, reference_random
from autopart.testing.parity import compare, train
from tests.launch import launch
from tests.tensor_axis import (
    CHEAP,
    LENGTH,
    SAMPLES,
    WIDTH,
    Dropping,
    adam,
    axes,
    close,
    close_calls,
    drawn_cluster,
    dropping_is_that_of_one_device,
    made,
    program,
    soak,
    solved,
)
from tests.zoo import VARIANTS, ZOO

# ---- parity ----------------------------------------------------------------------------------------------------------

PP2 = {"microbatches": 3, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("name", "mesh", "pins"),
    [
        soak("gpt", axes(tp=2), {}),
        soak("gpt", axes(tp=4), {"cluster": CHEAP}),
        ("gpt", axes(dp=2, tp=2), {"placement": "fsdp"}),
        ("gpt", axes(pp=2, tp=2), PP2),
        soak("llama", axes(tp=2), {}),
        soak("llama", axes(dp=2, tp=2), {"placement": "zero1", "microbatches": 2}),
        ("mlp", axes(tp=3), {"cluster": CHEAP}),
        ("mlp", axes(tp=2, dp=2), {"placement": "zero1", "cluster": CHEAP}),
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


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_any_cluster_and_any_pins(seed: int) -> None:
    """What is fastest somewhere, around some pins: of strategies and exchanges nearly all come up."""
    draw = Random(seed)
    cluster = drawn_cluster(draw)
    name = draw.choice(["gpt", "llama", "mlp"])
    mesh = draw.choice([{"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}])
    pins: dict[str, Any] = {"recompute": draw.random() < 0.3, "microbatches": draw.choice([1, 2])}
    rest = draw.choice(["ddp", "zero1", "zero2", "fsdp"])
    if "pp" in mesh:
        pins |= {"schedule": draw.choice(["1f1b", "gpipe", "zb-h1", "zb-v"]), "microbatches": draw.choice([2, 3])}
    model, args, segmented = made(name)
    placement: dict[str, Any] = {"*": rest}
    parameters = segmented.captured.of_kind("parameter")
    for item in draw.sample(parameters, 3):
        wish = {item.target: {"tp": Shard(draw.randrange(len(item.value.shape)))}, **placement}
        with contextlib.suppress(ValueError):  # some cannot be
            solve(segmented, mesh=mesh, cluster=cluster, placement=wish, **pins)
            placement = wish
    plan = solve(segmented, mesh=mesh, cluster=cluster, placement=placement, **pins)
    assert_parity(model, args, plan=lower(segmented, plan), capture="direct", steps=2)


ZOO_ROWS = [
    ("resnet-batchnorm", {"dp": 2, "tp": 2}),
    ("unet-transposed", {"tp": 3}),
    ("vit-dropout", {"pp": 2, "tp": 2}),
    ("bert", {"dp": 2, "tp": 2}),
    ("t5", {"pp": 2, "tp": 2}),
    ("lora", {"dp": 2, "tp": 2}),
    ("mixture", {"tp": 2}),
    ("lstm", {"tp": 2}),
    ("einsum", {"tp": 2}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "mesh"), ZOO_ROWS)
def test_ordinary_models(name: str, mesh: dict[str, int]) -> None:
    specimen = {**ZOO, **VARIANTS}[name]()
    kinds = {"batch": specimen.batch, "semantics": specimen.semantics, "capture": specimen.capture}
    assert_parity(specimen.model, specimen.args, specimen.kwargs, mesh=mesh, cluster=CHEAP, steps=2, **kinds)


@pytest.mark.soak
def test_other_lengths_and_evaluation_keep_the_parameters_where_they_are() -> None:
    model, _, _ = made("gpt")

    def main(rank: int) -> None:
        mine, plain = (
            parallelize(copy.deepcopy(model), mesh={"tp": 2}, cluster=CHEAP, capture="direct"),
            copy.deepcopy(model),
        )
        for length in (8, 5, 7):
            ids = torch.arange(4 * length).view(4, length) % 40
            close_calls(mine, plain, ids, ids.roll(-1, 1))
        mine.eval(), plain.eval()
        with torch.no_grad():
            close(mine(ids), plain(ids))

    LocalWorld(2).run(main)


@pytest.mark.soak
def test_each_data_rank_its_own_samples() -> None:
    torch.manual_seed(0)
    model, x, y = Dropping().double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()

    def main(rank: int) -> None:
        pins: dict[str, Any] = {"cluster": CHEAP, "capture": "direct", "inputs": "local", "outputs": "all"}
        mine, plain = parallelize(copy.deepcopy(model), mesh={"dp": 2, "tp": 2}, **pins), copy.deepcopy(model)
        own = slice(3 * (rank // 2), 3 * (rank // 2) + 3)
        with reference_random(torch.initial_seed(), 0):
            expected, whole = plain(x, y)
        loss, out = mine(x[own], y[own])
        close(loss, expected), close(out, whole[own])
        loss.backward(), expected.backward()
        grads = mine.full_grads()
        for name, parameter in plain.named_parameters():
            close(grads[name], parameter.grad)

    LocalWorld(4).run(main)


@pytest.mark.soak
def test_a_checkpoint_of_one_mesh_is_read_by_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Dropping().double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()
    model.drop.p = 0.0

    def trained(mine: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            mine(x, y)[0].backward()
            optimizer.step()
            optimizer.zero_grad()

    def main(rank: int, mesh: dict[str, int], *, last: bool) -> Any:
        mine = parallelize(copy.deepcopy(model), mesh=mesh, cluster=CHEAP, capture="direct")
        optimizer = adam(mine.parameters())
        if last:
            autopart.load(tmp_path, mine, optimizer)
        trained(mine, optimizer, 2)
        if not last:
            autopart.save(tmp_path, mine, optimizer)
        return mine.full_state_dict()

    LocalWorld(3).run(lambda rank: main(rank, {"tp": 3}, last=False))
    found = LocalWorld(4).run(lambda rank: main(rank, {"dp": 2, "tp": 2}, last=True))
    trained(model, adam(model.parameters()), 4)
    for name, parameter in model.named_parameters():
        close(found[0][name], parameter.detach())


@pytest.mark.parametrize("mesh", [{"tp": 3}, {"pp": 2, "tp": 2}])
def test_f010_outputs_inputs_buffers_and_draws_are_those_of_one_device(mesh: dict[str, int]) -> None:
    """In one process that keeps the parameters whole: dropout under a split dim, gradients of inputs, evaluation."""
    model = dropping_is_that_of_one_device(mesh)
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


@pytest.mark.soak
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
    assert all(rank.peak_activations == rank.predicted_activations for rank in report.ranks)
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
