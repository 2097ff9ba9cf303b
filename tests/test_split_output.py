"""An output layer split over the pipeline ranks trains as one device does; what cannot be split is refused by line."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart import schedules
from autopart.api.compiler import captured_step, lower, planned
from autopart.capture import read
from autopart.errors import CaptureError
from autopart.ir.action import Action, Kind
from autopart.ir.captured import Captured
from autopart.ir.program import Program
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import adamw, assert_close, compare, train
from tests.launch import launch
from tests.models import GPT
from tests.test_copies import gradients
from tests.test_verify import refused

CLASSES = 33
"""No number of ranks here divides it."""


def sample(batch: int = 9, layers: int = 4, *, tied: bool = False) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A GPT, some targets ignored, the last microbatch's all; those of one sample are of the first rank's classes."""
    torch.manual_seed(0)
    model = GPT(layers, 16, 4, CLASSES, 8, skips=tied, tied=tied).double()
    ids = torch.randint(0, CLASSES, (batch, 8))
    labels = ids.roll(-1, 1).clone()
    labels[0, :3], labels[1], labels[-2:] = -100, 2, -100
    return model, (ids, labels)


@cache
def captured(*, tied: bool = False) -> Captured:
    model, args = sample(16, tied=tied)
    return captured_step(model, read(model, args, {}), None, False, "direct")


@cache
def program(
    schedule: str, pp: int, microbatches: int, dp: int = 1, placement: str = "ddp", *, tied: bool = False
) -> Program:
    pins: dict[str, Any] = {"mesh": {"pp": pp, "dp": dp}, "devices": pp * dp, "placement": placement}
    plan = planned(captured(tied=tied), schedule=schedule, microbatches=microbatches, **pins)
    return lower(segment(captured(tied=tied), cuts=plan.cuts), plan)


def vocab(barriers: int) -> str:
    return f"vocab(barriers={barriers})"


ROWS: list[tuple[Any, ...]] = [
    (vocab(1), 4, 3),
    (vocab(2), 4, 3),
    (vocab(1), 2, 2, 2, "fsdp"),
]
SOAK: list[tuple[Any, ...]] = [
    (vocab(1), 2, 4),
    (vocab(2), 2, 4),
    (vocab(1), 1, 2),
    (vocab(2), 4, 5),
    (vocab(2), 2, 3, 2, "zero1"),
    *(
        (vocab(barriers), pp, microbatches, dp, placement)
        for barriers in (1, 2)
        for pp, microbatches in ((2, 1), (3, 4), (4, 8))
        for dp, placement in ((1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "fsdp"))
    ),
]


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.soak) for row in SOAK)], ids=lambda r: "-".join(map(str, r))
)
def test_trains_as_one_device(row: tuple[Any, ...]) -> None:
    """Raw gradients, clipped norms, and parameters after three steps, on every rank with its own optimizer."""
    made = program(*row)
    pp = row[1]
    assert made.staged.parts == made.staged.lookups == pp and len(made.staged.stages) == 3 * pp
    shapes = [u.parameters[0].shape for u in made.state.units if u.parameters[0].part_of == "head.weight"]
    assert [rows for rows, _ in shapes] == [len(part) for part in torch.arange(CLASSES).tensor_split(pp)]
    assert_parity(*sample(17), plan=made, steps=3)


@pytest.mark.parametrize(
    "row",
    [
        (vocab(1), 2, 4),
        (vocab(2), 4, 3, 1, "ddp"),
        pytest.param((vocab(2), 2, 2, 2, "fsdp"), marks=pytest.mark.soak),
        pytest.param((vocab(1), 2, 2, 2, "zero1"), marks=pytest.mark.soak),
    ],
    ids=lambda r: "-".join(map(str, r)),
)
def test_tied_to_the_embedding(row: tuple[Any, ...]) -> None:
    """Each rank has some rows of the weight, in which it looks up tokens, too; both gradients of them are added up."""
    made = program(*row, tied=True)
    units = [unit for unit in made.state.units if unit.parameters[0].name == "wte.weight"]
    assert [unit.columns for unit in units] == [(rank,) for rank in range(row[1])]
    assert sum(unit.parameters[0].shape[0] for unit in units) == CLASSES and all(len(u.stages) == 2 for u in units)
    assert_parity(*sample(17, tied=True), plan=made, steps=3)


def test_tied_to_what_stays_whole() -> None:
    """Of a weight that a layer between them uses as well, each rank has all, and computes with its rows."""
    model, args = net("a table that is used between", 7)
    made = compiled("a table that is used between", 1)
    (unit,) = [unit for unit in made.state.units if unit.holds(["table.weight"])]
    assert unit.columns == (0, 1) and unit.parameters[0].shape == (11, 6) and not made.plan.lookup
    assert_parity(model, args, plan=made, steps=2)


def test_a_table_with_backwards_in_two() -> None:
    """The last stage's backward begins with the parts' gradients, be it whole or in two."""
    table = str(schedules.build("vocab", ranks=2, microbatches=3)).replace("0B", "0I")
    rows = [line.replace("1B0", "1I0,1W0").replace("0I0", "0I0,0W0") for line in table.splitlines()]
    table = "\n".join(rows).replace("0I1", "0I1,0W1").replace("0I2", "0I2,0W2")
    assert_parity(*sample(8), plan=program(table, 2, 3), steps=2)


# ---- what the program says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barriers", [1, 2])
def test_every_rank_performs_s_and_t_and_tells_the_others(barriers: int) -> None:
    """Sums go from each S to each T; with one barrier S, with two T gives the last backward its part."""
    made = program(vocab(barriers), 4, 3)
    assert "each of the 4 pipeline ranks has a part of its classes" in made.plan.explain()
    gives = Kind.S if barriers == 1 else Kind.T
    for rank in made.ranks:
        row, part = rank.actions, 4 + rank.rank
        assert [sum(a.kind is kind for a in row) for kind in (Kind.S, Kind.T)] == [3, 3]
        for k in range(3):
            told = [a.peer for a in row if a == Action(Kind.SEND, part, k, peer=a.peer)]
            assert sorted(told) == sorted({4, 5, 6, 7} - {part} | ({3} if rank.rank != 3 else set()))
            if rank.rank != 3:
                after = row.index(Action(Kind.SEND, part, k, peer=3))
                assert row.index(Action(gives, part, k)) < after
                assert gives is Kind.T or after < row.index(Action(Kind.T, part, k))
    assert len(made.stages) == 12 and all(graphs.backward is not None for graphs in made.stages)
    report = {item.rule: item.count for item in verify(made).checked}
    assert report["work"] == 4 * 3 * 6
    assert not any("all_reduce" in rank.source for rank in made.ranks)


@pytest.mark.parametrize(
    ("barriers", "placement", "tied"),
    [(1, "ddp", False), (2, "zero2", True), pytest.param(1, "fsdp", True, marks=pytest.mark.soak)],
)
def test_bytes_and_peaks_are_as_predicted(barriers: int, placement: str, tied: bool) -> None:
    """In one call, where ranks share the module; evaluation before and after a step, and gradients that wait."""
    plain, args = sample(9, layers=2, tied=tied)
    pins: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "schedule": vocab(barriers), "microbatches": 4}
    model = autopart.parallelize(copy.deepcopy(plain), placement=placement, capture="direct", **pins)
    evaluated(model, plain, args)
    for each in (model, plain):
        each.train()(*args).backward()
    assert_close(gradients(model), gradients(plain), 1e-9, "gradient of")
    for rank in model.report().ranks:
        assert rank.bytes_sent == rank.predicted_bytes
        # the plan is for the rank with the most samples and the largest parts
        assert rank.peak_activations <= rank.predicted_activations and rank.peak_memory <= rank.predicted_memory
    assert model.report().ranks[0].peak_activations == model.report().ranks[0].predicted_activations
    evaluated(model, plain, args)
    for each in (model, plain):
        with each.no_sync() if each is model else contextlib.nullcontext():
            each.train()(*args).backward()
        each(*args).backward()
    assert_close(gradients(model), gradients(plain), 1e-9, "gradient of")
    found, expected = model.full_state_dict(), plain.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def evaluated(model: nn.Module, plain: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*args), plain.eval()(*args), rtol=1e-12, atol=0)


def test_parts_of_the_weight_make_up_the_module_and_its_checkpoint(tmp_path: Path) -> None:
    """Each rank's Parameter has its rows; the whole is in `state_dict`, and another plan goes on from a checkpoint."""

    def first(rank: int) -> Any:
        model, args = sample(9, layers=2)
        model = autopart.parallelize(model, mesh={"pp": 2}, schedule="vocab", microbatches=4, capture="direct")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(*args).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        autopart.save(tmp_path, model, optimizer)
        here = tuple(model.local_state_dict()["head.weight"].shape)
        moments = [tuple(state["exp_avg"].shape) for state in optimizer.state_dict()["state"].values()]
        return here, model.state_dict()["head.weight"], moments[-1], float(model(*args).detach())

    def then(rank: int) -> Any:
        model, args = sample(9, layers=2)
        model = autopart.parallelize(model, mesh={"pp": 2}, schedule="1f1b", microbatches=4, capture="direct")
        autopart.load(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return float(model(*args).detach())

    made = LocalWorld(2).run(first)
    assert [here for here, *_ in made] == [(17, 16), (16, 16)]
    assert torch.equal(made[0][1], made[1][1]) and made[0][1].shape == (CLASSES, 16) == made[0][2]
    losses = LocalWorld(2).run(then)
    assert losses == pytest.approx([made[0][3]] * 2, rel=1e-12)


# ---- losses ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """An embedding, a residual layer, and a head whose loss is `loss`."""

    def __init__(self, loss: Callable[..., torch.Tensor], *, bias: bool = False) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=bias)
        self.loss = loss

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.first(self.table(ids)).tanh()
        return self.loss(self, self.second(x).tanh() + x, targets)


def entropy(scores: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), **options)


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda net, x, y: entropy(net.head(x), y),
    "sum": lambda net, x, y: entropy(net.head(x), y, reduction="sum"),
    "weighted by hand": lambda net, x, y: (entropy(net.head(x), y, reduction="none") * 0.5).sum(),
    "a class ignored": lambda net, x, y: entropy(net.head(x), y.where(y >= 0, 7), ignore_index=7),
    "log_softmax first": lambda net, x, y: F.nll_loss(F.log_softmax(net.head(x), -1).flatten(0, 1), y.flatten()),
    "a product outside of modules": lambda net, x, y: entropy(x @ net.head.weight.T, y),
    "scaled scores": lambda net, x, y: entropy(net.head(x) * 0.3, y),
    "in float32": lambda net, x, y: entropy(net.head(x).float(), y),
    "capped scores": lambda net, x, y: entropy((net.head(x) / 5).tanh() * 5, y),
    "shifted": lambda net, x, y: entropy(net.head(x)[:, :-1], y[:, 1:]),
    "an auxiliary loss of the same input": lambda net, x, y: entropy(net.head(x), y) + 0.1 * x.square().mean(),
    "smoothed": lambda net, x, y: entropy(net.head(x), y, label_smoothing=0.1),
    "a norm of the sums": lambda net, x, y: entropy(net.head(x), y) + net.head(x).logsumexp(-1).square().mean(),
    "gathered": lambda net, x, y: -net.head(x).log_softmax(-1).gather(-1, y.clamp(0)[..., None]).mean(),
    "weights of classes": lambda net, x, y: entropy(net.head(x), y, weight=torch.ones(11, dtype=x.dtype)),
    "classes in the middle": lambda net, x, y: F.cross_entropy(net.head(x).transpose(1, 2), y),
    "squares": lambda net, x, y: net.head(x).square().mean(),
    "logits too": lambda net, x, y: (entropy(logits := net.head(x), y), logits),
    "two products": lambda net, x, y: entropy(net.head(net.second(x)), y),
    "a table that is used between": lambda net, x, y: entropy((x * net.table.weight[0]) @ net.table.weight.T, y),
}


def net(name: str, batch: int, **options: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Net(LOSSES[name], **options).double()
    ids, targets = torch.randint(0, 11, (2, batch, 4))
    targets[0, :2] = -100
    return model, (ids, targets)


def compiled(name: str, barriers: int, **options: bool) -> Program:
    model, args = net(name, 8, **options)
    step = captured_step(model, read(model, args, {}), None, False, "direct")
    plan = planned(step, schedule=vocab(barriers), microbatches=3, mesh={"pp": 2})
    return lower(segment(step, cuts=plan.cuts), plan)


BOTH = [
    ("mean", {"bias": True}),
    ("sum", {}),
    ("weighted by hand", {}),
    ("a class ignored", {}),
    ("log_softmax first", {}),
    ("a product outside of modules", {}),
    ("scaled scores", {}),
    ("in float32", {}),
    ("two products", {}),
]
TWO = ["capped scores", "shifted", "an auxiliary loss of the same input"]


@pytest.mark.parametrize(
    ("name", "options", "barriers"),
    [
        *((name, options, 1) for name, options in BOTH),
        *((name, {}, 2) for name in TWO),
        *(pytest.param(name, options, 2, marks=pytest.mark.soak) for name, options in BOTH),
    ],
)
def test_losses(name: str, options: dict[str, bool], barriers: int) -> None:
    tolerance = 1e-6 if name == "in float32" else 1e-9
    assert_parity(*net(name, 7, **options), plan=compiled(name, barriers, **options), steps=2, tolerance=tolerance)


def test_nothing_before_it_is_trained() -> None:
    def sample(batch: int) -> Any:
        model, args = net("mean", batch)
        for part in (model.table, model.first, model.second):
            part.requires_grad_(False)
        return model, args

    model, args = sample(8)
    step = captured_step(model, read(model, args, {}), None, False, "direct")
    plan = planned(step, schedule="vocab", microbatches=3, mesh={"pp": 2})
    made = lower(segment(step, cuts=plan.cuts), plan)
    edges = [(edge.source, edge.target) for edge in made.staged.edges if edge.target < 2]
    assert all(made.staged.onward(*edge) for edge in edges)
    assert_parity(*sample(7), plan=made, steps=2)


@pytest.mark.parametrize(
    ("name", "barriers", "message"),
    [
        ("smoothed", 2, r"test_split_output.py:\d+ .*needs more of the other ranks than the sums.*label smoothing"),
        ("a norm of the sums", 2, r"aten.logsumexp.default in the output layer 'head' needs all of .*Shard\(2\)"),
        ("gathered", 1, r"test_split_output.py:\d+ .*aten.gather.default in the output layer 'head' needs all of"),
        ("weights of classes", 1, r"aten.nll_loss_forward.default in the output layer 'head' needs all of"),
        ("classes in the middle", 1, r"the classes are dim 1 of the logits.*flatten the logits"),
        ("squares", 1, "ends in a cross-entropy .*this module's step has none"),
        ("logits too", 1, "the output layer 'head' makes more than the loss .*return the loss alone"),
        ("capped scores", 1, r"test_split_output.py:\d+ .*aten.tanh_backward.default is between .*barriers=2"),
        ("shifted", 1, r"aten.slice_backward.default is between .*pin schedule='vocab\(barriers=2\)'"),
    ],
)
def test_what_cannot_be_split_is_refused(name: str, barriers: int, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        compiled(name, barriers)
    assert "schedule='" in str(caught.value)


def test_fewer_classes_than_ranks_are_refused() -> None:
    model, args = net("mean", 8)
    model.head = nn.Linear(6, 2).double()
    step = captured_step(model, read(model, (args[0], args[1].clamp(-100, 1)), {}), None, False, "direct")
    with pytest.raises(CaptureError, match="the output layer 'head' has 2 classes, fewer than the 3 pipeline ranks"):
        planned(step, schedule="vocab", microbatches=3, mesh={"pp": 3})


# ---- faults ----------------------------------------------------------------------------------------------------------

T0 = '        with world.action("T", stage=3, microbatch=k):\n'


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        pytest.param(
            [0],
            [("    world.send(sums_2_3.pop(0), stage=2, to=3, microbatch=0)\n", "    sums_2_3.pop(0)\n")],
            r"rule transfers: rank 0, stage 0, .*0SEND2>1 .*it meets the receive of rank 1, stage 3, .*3RECV0>2",
            id="a sum that is not told",
        ),
        pytest.param(
            [1],
            [("b, B, head_sum_pp0, one, *saved.pop()", "b, B, saved[0][1], one, *saved.pop()")],
            "rule values: rank 1, stage 3, microbatch 0, action 3T0.*it is given logsumexp kept by head@pp1 where",
            id="its own sum twice",
        ),
        pytest.param(
            [0],
            [('    world.accumulate("head@pp0", grads)\n', "")],
            'rule gradients: rank 0, stage 2, microbatch 0, action 2T0: gradients of "head@pp0" are added 0 times',
            id="gradients dropped",
        ),
        pytest.param(
            [1],
            [("(head_gradient_pp0,) = from_2", "(head_gradient_pp0,) = from_3")],
            "rule values: rank 1, stage 1, microbatch 0, action 1B0.*it is given head.gradient@pp1 where norm takes",
            id="the parts of a gradient confused",
        ),
        pytest.param(
            [0],
            [('world.parameters("head@pp0")', 'world.parameters("head@pp1")')],
            "rule text: rank 0, stage 2, microbatch 0, action 2S0 .*is invalid for input",
            id="the rows of another rank's classes",
        ),
        pytest.param(
            [0],
            [("loss = world.total(list(loss.values())", "loss = world.total([]")],
            "rule outputs: rank 0",
            id="a part of the loss left out",
        ),
    ],
)
def test_planted_faults(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(program(vocab(2), 2, 4), dict.fromkeys(ranks, changes), message)


def gloo_rank() -> Any:
    """Two training steps of a process."""
    model, args = sample(9, layers=2)
    made = autopart.parallelize(model, mesh={"pp": 2}, schedule="vocab", microbatches=4, capture="direct")
    return train(made, lambda step: (args, {}), 2, adamw, 0.5)


@pytest.mark.soak
def test_over_gloo() -> None:
    model, args = sample(9, layers=2)
    expected = train(model, lambda step: (args, {}), 2, adamw, 0.5)
    for rank, found in enumerate(launch(gloo_rank, 2, timeout=100).values):
        compare(found, expected, 1e-9, f"rank {rank}")


def test_what_it_gains_and_how_even_memory_is() -> None:
    """Against the layer on the last stage, blocks dealt equally; the first rank has the positions besides."""
    with torch.device("meta"):
        model = GPT(4, 512, 8, 8192, 256, skips=False, tied=False).bfloat16()
    ids = torch.zeros(16, 256, dtype=torch.long)
    step = captured_step(model, read(model, (ids, ids), {}), None, False, "direct")
    pins: dict[str, Any] = {"cluster": autopart.Cluster.preset("h100-80", per_node=4), "microbatches": 16}
    pins |= {"mesh": {"pp": 4}, "stages": [f"blocks.{i}" for i in range(1, 4)]}
    naive = planned(step, schedule="1f1b", **pins).prediction
    for barriers in (1, 2):
        found = planned(step, schedule=vocab(barriers), **pins).prediction
        assert 1.05 <= naive.step_seconds / found.step_seconds <= 1.51
        held = [each.parameters + each.optimizer + each.gradients for each in found.memory]
        assert max(held) <= 1.05 * min(held)
