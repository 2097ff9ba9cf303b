"""Schedules with two copies of the model train as one device does: a microbatch travels one, gradients are summed."""

from __future__ import annotations

import contextlib
import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import schedules
from autopart.api.compiler import captured_step, lower, planned
from autopart.capture import read
from autopart.errors import CaptureError, PlanInfeasible
from autopart.ir.action import Action
from autopart.ir.captured import Captured
from autopart.ir.program import Program
from autopart.passes.schedule import schedule as scheduled
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import LocalWorld, assert_parity, reference_random
from autopart.testing.parity import adamw, assert_close, compare, train
from tests.launch import launch
from tests.models import MLP
from tests.test_several_stages import Ends, Mixed, Net
from tests.test_verify import refused

ONE_RANK = "0F0,0F1p1,0B0,0B1p1"
"""Both copies on the only rank."""


def sample(name: str, batch: int = 9) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module by name, and a batch that no number of microbatches here divides."""
    torch.manual_seed(0)
    if name == "mixed":  # tied ends, long skips, dropout, a frozen layer, a loss that counts valid targets
        ids = torch.randint(1, 5, (batch, 3))
        return Mixed().double(), (ids, ids.flip(1) * (torch.rand(batch, 3) > 0.3))
    if name == "ends":  # the first half is frozen
        return Ends().double(), (torch.randn(batch, 6).double(), torch.randn(batch, 6).double())
    return MLP().double(), (torch.randn(batch, 8).double(), torch.randn(batch, 3).double())


@cache
def captured(name: str) -> Captured:
    model, args = sample(name, 18)
    return captured_step(model, read(model, args, {}), None, False, "direct")


@cache
def program(name: str, schedule: str, pp: int, microbatches: int, dp: int = 1, placement: str = "ddp") -> Program:
    pins: dict[str, Any] = {"mesh": {"pp": pp, "dp": dp}, "devices": pp * dp, "placement": placement}
    plan = planned(captured(name), schedule=schedule, microbatches=microbatches, **pins)
    return lower(segment(captured(name), cuts=plan.cuts), plan)


ROWS: list[tuple[Any, ...]] = [
    ("mixed", "dualpipe", 2, 4),
    ("mixed", "dualpipe", 4, 8),
    ("mixed", "bitpipe", 2, 4),
    ("mixed", "bitpipe", 4, 4),
    ("ends", "dualpipe", 2, 4),
    ("ends", "bitpipe", 2, 2),
    ("mlp", ONE_RANK, 1, 2),
    ("mixed", "bitpipe", 2, 4, 2, "zero1"),
    ("mixed", "dualpipe", 2, 4, 2, "zero2"),
    ("mixed", "dualpipe", 2, 4, 2, "fsdp"),
]
SOAK: list[tuple[Any, ...]] = [
    (name, schedule, pp, microbatches, dp, placement)
    for name in ("mixed", "ends")
    for schedule, pp, microbatches in (("dualpipe", 2, 6), ("dualpipe", 4, 8), ("bitpipe", 2, 8), ("bitpipe", 2, 6))
    for dp, placement in ((1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "fsdp"))
]


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.soak) for row in SOAK)], ids=lambda r: "-".join(map(str, r))
)
def test_trains_as_one_device(row: tuple[Any, ...]) -> None:
    """Raw gradients, clipped norms, and parameters after two steps, on every rank with its own optimizer."""
    made = program(*row)
    assert made.staged.copies == 2 and len(made.staged.stages) == 2 * len(made.plan.stages)
    assert_parity(*sample(row[0], 19), plan=made, steps=2)


@pytest.mark.parametrize(
    ("name", "schedule", "placement"),
    [
        ("mlp", "dualpipe", "zero2"),
        ("mlp", "bitpipe", "zero1"),
        ("mixed", "dualpipe", "fsdp"),  # of a stage's microbatches some have B, some I and W, which gather less
        ("ends", "bitpipe", "ddp"),
    ],
)
def test_bytes_and_peaks_are_as_predicted(name: str, schedule: str, placement: str) -> None:
    """In one call, where ranks share the module; evaluation goes through the first copy, before and after a step."""
    plain, args = sample(name, 17)
    pins: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "schedule": schedule, "microbatches": 4, "capture": "direct"}
    model = autopart.parallelize(copy.deepcopy(plain), placement=placement, **pins)
    evaluated(model, plain, args)
    for each in (model, plain):
        optimizer = torch.optim.Adam(each.parameters())
        with reference_random() if each is plain else contextlib.nullcontext():
            each.train()(*args).backward()
        optimizer.step()
    assert_close(gradients(model), gradients(plain), 1e-9, "gradient of")
    for rank in model.report().ranks:
        assert rank.bytes_sent == rank.predicted_bytes
        # the plan is for the rank with the most samples and the largest parts
        assert rank.peak_activations <= rank.predicted_activations and rank.peak_memory <= rank.predicted_memory
    assert model.report().ranks[0].peak_activations == model.report().ranks[0].predicted_activations
    evaluated(model, plain, args)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def evaluated(model: nn.Module, plain: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*args), plain.eval()(*args), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("placement", "dp"),
    [("ddp", 1), pytest.param("zero1", 2, marks=pytest.mark.soak), pytest.param("fsdp", 2, marks=pytest.mark.soak)],
)
def test_evaluation_first_and_a_checkpoint_for_another_schedule(placement: str, dp: int, tmp_path: Path) -> None:
    """Where an evaluation places a module, both copies have their parameters; 1f1b goes on from what they saved."""

    def trained(model: Any, first: int, last: int) -> Any:
        _, args = sample("mlp")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = [float(model.eval()(*args).detach())]
        if first:
            autopart.load(tmp_path, model, optimizer)
        for _ in range(first, last):
            optimizer.zero_grad()
            model.train()(*args).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(float(model.eval()(*args).detach()))
        if last == 2:
            autopart.save(tmp_path, model, optimizer)
        return (model.full_state_dict if hasattr(model, "full_state_dict") else model.state_dict)(), losses

    def on_ranks(rank: int, schedule: str, first: int, last: int) -> Any:
        pins: dict[str, Any] = {"mesh": {"pp": 2, "dp": dp}, "schedule": schedule, "placement": placement}
        model = autopart.parallelize(sample("mlp")[0], microbatches=4, capture="direct", **pins)
        return trained(model, first, last)

    expected, losses = trained(sample("mlp")[0], 0, 4)
    for _, found in LocalWorld(2 * dp).run(on_ranks, "dualpipe", 0, 2):
        assert found == pytest.approx(losses[:3], rel=1e-9)
    for state, found in LocalWorld(2 * dp).run(on_ranks, "1f1b", 2, 4):
        assert found[1:] == pytest.approx(losses[3:], rel=1e-9)
        assert_close(state, expected, 1e-8, "parameter")


def test_gradients_that_wait() -> None:
    plain, args = sample("mlp", 12)
    model = autopart.parallelize(
        copy.deepcopy(plain), mesh={"pp": 2}, schedule="dualpipe", microbatches=4, capture="direct"
    )
    with model.no_sync():
        model(*args).backward()
    model(*args).backward()
    (2 * plain(*args)).backward()
    assert_close(gradients(model), gradients(plain), 1e-9, "gradient of")


def test_what_a_program_and_its_plan_say(tmp_path: Path) -> None:
    made = program("mlp", "dualpipe", 2, 4)
    text = made.ranks[0].source
    assert re.search(r"stage 0: .* \(stage 0 of copy 0 of the model\)\nstage 3: .* \(stage 1 of copy 1", text)
    assert "PLACE = (0, 1, 1, 0)" in text and "stage1_forward" not in text and "stage2_forward" not in text
    assert made.plan.mirrors == ((1, 0),) and made.plan.place == (0, 1)
    assert "another copy of the model has its stages on the pipeline ranks (1, 0)" in made.plan.summary()
    assert "fullest are the ranks of stages 0 and 1" in made.plan.explain()
    again = autopart.Program.read(made.write(tmp_path / "made"))
    assert again.plan == made.plan and verify(again)
    assert len(made.stages) == 2 and made.stages[1].forward is not None
    built = schedules.build("dualpipe", ranks=2, microbatches=4)
    timed = autopart.simulate(made)
    assert timed.makespan > 0 and len(timed.peak_activations) == built.ranks


def test_stages_of_copies_are_numbered_through() -> None:
    made = program("mlp", "bitpipe", 2, 2)
    lowered = scheduled(made.staged, made.plan)
    assert lowered.schedule.place == (0, 1, 1, 0, 1, 0, 0, 1)
    assert str(lowered).split("\n") == [
        "0F0,5RECV1>4,0SEND0>1,5F1,6F1,3RECV0>2,6SEND1>7,3F0,3B0,6RECV1>7,3SEND0>2,6B1,5B1,0RECV0>1,5SEND1>4,0B0",
        "4F1,4SEND1>5,1RECV0>0,1F0,2F0,2SEND0>3,7RECV1>6,7F1,7B1,7SEND1>6,2RECV0>3,2B0,1B0,1SEND0>0,4RECV1>5,4B1",
    ]
    built = schedules.lower(
        schedules.executable(schedules.build("bitpipe", ranks=2, microbatches=2)),
        frozenset((edge.source, edge.target) for edge in made.staged.edges if edge.source < 4),
    )
    for row, plain in zip(lowered.table, built.table, strict=True):
        for action, before in zip(row, plain, strict=True):
            first = 4 * before.pipe
            peer = before.peer + first if before.peer >= 0 else -1
            assert action == Action(before.kind, before.stage + first, before.microbatch, peer=peer)


LOSS = "loss = world.total(list(loss.values())"
F0 = '    with world.action("F", stage=0, microbatch=0):\n'


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        pytest.param(
            [0, 1],
            [('    world.all_reduce("h.6", axis="pp", stages=(1, 3))\n', "")],
            r'rule gradients: rank 0, stage 0, 3: the gradients of "h.6" go through all_reduce over pp among stages '
            r"\(1, 3\) 0 times",
            id="a reduction dropped",
        ),
        pytest.param(
            [0],
            [('    world.all_reduce("h.6", axis="pp", stages=(1, 3))\n', "")],
            "rule (gradients|collectives): rank",
            id="dropped on one rank",
        ),
        pytest.param(
            [0, 1],
            [('"h.6", axis="pp", stages=(1, 3)', '"h.6", axis="pp", stages=(0, 2)')],
            "rule gradients: rank 0",
            id="among other stages",
        ),
        pytest.param([0], [("PLACE = (0, 1, 1, 0)", "PLACE = (0, 1, 0, 1)")], "rule text: rank 0: PLACE", id="place"),
        pytest.param([0], [(LOSS, LOSS.replace("list(loss.values())", "[]"))], "rule outputs: rank 0", id="no loss"),
        pytest.param(
            [0],
            [(F0, F0.replace("stage=0", "stage=3") + "        pass\n" + F0)],
            "rule work: rank 0, stage 0, microbatch 0, action 0F0: 3F0 is in another copy of the model",
            id="a microbatch in both copies",
        ),
    ],
)
def test_planted_faults(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(program("mixed", "dualpipe", 2, 4), dict.fromkeys(ranks, changes), message)


class Both(nn.Module):
    """Returns its outputs beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.b(self.a(x).tanh())
        return y.square().mean(), y


@pytest.mark.parametrize(
    ("model", "args", "semantics", "what"),
    [
        (Both(), (torch.randn(8, 4),), "exact", "the step makes the output .* beside its loss"),
        (Net(), (torch.randn(16, 4), torch.randn(16, 4)), "accumulate", "the forward updates the buffer forwards"),
        (MLP(), (torch.randn(8, 8, requires_grad=True), torch.randn(8, 3)), "exact", "the gradient of the input"),
    ],
    ids=["outputs", "buffers", "inputs"],
)
def test_what_copies_cannot_do_is_refused(model: nn.Module, args: Any, semantics: str, what: str) -> None:
    model = autopart.parallelize(
        model, mesh={"pp": 2}, schedule="dualpipe", microbatches=4, capture="direct", semantics=semantics
    )
    with pytest.raises(CaptureError, match=rf"{what}.*dualpipe, has 2 copies .*schedule='1f1b'"):
        model(*args)


def test_memory_is_that_of_both_copies() -> None:
    made = program("mlp", "dualpipe", 2, 4).plan
    whole = sum(item.value.nbytes(1) for item in captured("mlp").of_kind("parameter"))
    assert [memory.parameters for memory in made.prediction.memory] == [whole, whole]
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "schedule": "dualpipe", "microbatches": 4}
    with pytest.raises(PlanInfeasible, match=r"the rank of stages 0 and 1 .* needs at least .*other stages= may fit"):
        planned(captured("mlp"), memory=made.prediction.memory[0].total // 2, recompute=False, **pins)
    with pytest.raises(ValueError, match="plan: a further copy of the model is on the pp ranks"):
        type(made)(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, "mirrors": ((1, 2),)})


def gloo_rank() -> Any:
    """Three training steps of a process."""
    model, args = sample("mlp")
    made = autopart.parallelize(model, mesh={"pp": 2}, schedule="dualpipe", microbatches=4, capture="direct")
    return train(made, lambda step: (args, {}), 3, adamw, 0.5)


@pytest.mark.soak
def test_over_gloo() -> None:
    model, args = sample("mlp")
    expected = train(model, lambda step: (args, {}), 3, adamw, 0.5)
    for rank, found in enumerate(launch(gloo_rank, 2, timeout=100).values):
        compare(found, expected, 1e-9, f"rank {rank}")
