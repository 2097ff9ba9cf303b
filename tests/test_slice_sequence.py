"""Token slices train causal models as one device does: keys and values are kept, their gradients handed back."""

from __future__ import annotations

import contextlib
import copy
import re
from dataclasses import replace
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
from autopart.errors import CaptureError, VerificationError
from autopart.ir.action import Action, Kind
from autopart.ir.captured import Captured
from autopart.ir.program import Program
from autopart.passes.schedule import schedule as scheduled
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import assert_parity, reference_random
from autopart.testing.parity import adamw, assert_close, compare, train
from tests.launch import launch
from tests.models import GPT, MODELS, Block
from tests.test_copies import gradients
from tests.test_verify import refused

LENGTH = 6


class Causal(nn.Module):
    """A small GPT; `kind` says what it returns, `positions` where it learns them."""

    def __init__(self, kind: str = "loss", positions: str = "table", dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.kind, self.positions, self.noise = kind, positions, dropout
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(LENGTH, 8)
        self.own = nn.Parameter(torch.randn(1, LENGTH + 3 * (positions == "longer"), 8))
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(layers))
        self.norm, self.head, self.dropout = nn.LayerNorm(8), nn.Linear(8, 11), nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        length = ids.shape[1]
        places = self.wpe(torch.arange(length)) if self.positions == "table" else self.own[:, :length]
        x = self.dropout((self.wte(ids) + places).flatten(0, 1)).unflatten(0, ids.shape)
        x = self.dropout(x) + self.noise * torch.rand_like(x) if self.noise else x
        for block in self.blocks:
            x = block(x)
        out = self.head(self.norm(x))
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=0)
        match self.kind:
            case "outputs":
                return loss, out
            case "no loss":
                return out
            case "shifted":
                return F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            case "weighted":
                weights = (labels > 3).to(out.dtype)
                each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
                return (each * weights.flatten()).sum() / weights.sum()
            case "decayed":
                return loss + 0.1 * self.wte.weight.square().sum() + 1.0
        return loss


def gpt() -> nn.Module:
    """Tied ends and long skips."""
    return GPT(layers=4, width=8, heads=2, vocabulary=11, length=LENGTH)


def sample(name: str, batch: int = 5) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module by name, and a batch that no number of microbatches here divides."""
    torch.manual_seed(0)
    made = {
        "gpt": gpt,
        "dropout": lambda: Causal(dropout=0.3),
        "longer": lambda: Causal("weighted", "longer"),
        "own": lambda: Causal("shifted", "own"),
        "deep": lambda: Causal(layers=4),
    }
    model = made[name]() if name in made else Causal(name)
    labels = torch.randint(1, 11, (batch, LENGTH))
    return model.double(), (torch.randint(0, 11, (batch, LENGTH)), labels * (torch.rand(batch, LENGTH) > 0.2))


@cache
def captured(name: str) -> Captured:
    model, args = sample(name)
    return captured_step(model, read(model, args, {}), None, False, "direct")


@cache
def program(
    name: str,
    schedule: str,
    pp: int,
    dp: int = 1,
    placement: str = "ddp",
    microbatches: int = 2,
    recompute: bool = False,
) -> Program:
    pins: dict[str, Any] = {"mesh": {"pp": pp, "dp": dp}, "devices": pp * dp, "recompute": recompute}
    plan = planned(captured(name), schedule=schedule, microbatches=microbatches, placement=placement, **pins)
    return lower(segment(captured(name), cuts=plan.cuts), plan)


def halved(name: str, behind: int) -> str:
    """A schedule of two microbatches on two ranks with backwards in two, W some actions behind I."""
    built = schedules.build(name, ranks=2, microbatches=2)
    table = []
    for row in built.table:
        made: list[Action] = []
        late: list[Action] = []
        for action in row:
            made.append(replace(action, kind=Kind.I) if action.kind is Kind.B else action)
            late += [replace(action, kind=Kind.W)] * (action.kind is Kind.B)
            made += [late.pop(0) for _ in range(len(late) - behind)]
        table.append((*made, *late))
    return str(replace(built, table=tuple(table)))


TWO_EACH = "0F0,0F0s1,2F0,2F0s1,2B0s1,2B0,0B0s1,0B0\n1F0,1F0s1,3F0,3F0s1,3B0s1,3B0,1B0s1,1B0"
"""Two stages on each of two ranks, on two slices."""

ROWS: list[tuple[Any, ...]] = [
    ("gpt", "seq1f1b(lengths=(3, 1, 2))", 2),
    ("gpt", "terapipe(slices=2)", 4),
    ("dropout", "seq1f1b(slices=2)", 2, 2, "fsdp", 1),
]
SOAK: list[tuple[Any, ...]] = [
    ("own", "terapipe(slices=3)", 2),
    ("longer", halved("seq1f1b(slices=3)", 1), 2),
    ("gpt", TWO_EACH, 2, 1, "ddp", 1),
    ("gpt", "seq1f1b(slices=6)", 2, 2, "zero1", 1),
    ("dropout", "terapipe(lengths=(1, 2, 3))", 2, 2, "zero2", 1),
    ("dropout", "seq1f1b(slices=3)", 2, 1, "ddp", 2, True),
    ("outputs", "seq1f1b", 3),
    ("decayed", "seq1f1b(slices=3)", 2),
    ("own", halved("terapipe(slices=2)", 3), 2, 2, "fsdp"),
    ("deep", "seq1f1b", 4, 1, "ddp", 4),
    ("loss", "terapipe(slices=3)", 1, 2, "ddp", 1),
]


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.soak) for row in SOAK)], ids=lambda r: "-".join(map(str, r))
)
def test_trains_as_one_device(row: tuple[Any, ...]) -> None:
    """Raw gradients, clipped norms, and parameters after three steps, on every rank with its own optimizer."""
    made = program(*row)
    slices = made.plan.slices
    assert slices > 1 and len(made.staged.stages) == slices * len(made.plan.stages) and made.staged.copies == 1
    assert_parity(*sample(row[0], 7), plan=made)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_a_library(name: str) -> None:
    """Their masks are tensors, made of numbers alone; one pads and shifts labels, one rotates keys by a table."""
    model, args, kwargs = MODELS[name]()
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "schedule": "seq1f1b(slices=3)", "microbatches": 2}
    assert_parity(model, args, kwargs, tolerance=1e-6, **pins)


@pytest.mark.parametrize(
    ("name", "schedule", "placement"),
    [
        ("loss", "seq1f1b(slices=3)", "zero2"),
        pytest.param("no loss", "terapipe(slices=2)", "ddp", marks=pytest.mark.soak),
    ],
)
def test_bytes_and_peaks_are_as_predicted(name: str, schedule: str, placement: str) -> None:
    """In one call, where ranks share the module; evaluation takes whole sequences, before a step and after it."""
    plain, args = sample(name, 4)
    pins: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "schedule": schedule, "microbatches": 2, "capture": "direct"}
    model = autopart.parallelize(copy.deepcopy(plain), placement=placement, **pins)
    evaluated(model, plain, args)
    for each in (model, plain):
        with reference_random() if each is plain else contextlib.nullcontext():
            made = each.train()(*args)
        (made.square().mean() if name == "no loss" else made).backward()
    assert_close(gradients(model), gradients(plain), 1e-9, "gradient of")
    for rank in model.report().ranks:
        assert rank.bytes_sent == rank.predicted_bytes
        assert rank.peak_activations == rank.predicted_activations
    evaluated(model, plain, args)


def evaluated(model: nn.Module, plain: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*args), plain.eval()(*args), rtol=1e-9, atol=1e-12)


def test_slices_keep_less_than_whole_sequences() -> None:
    """By the law of the family, (p - 1 - r + k) / k microbatches on rank r, of what is kept for each token."""
    pins: dict[str, Any] = {"mesh": {"pp": 2}, "devices": 2, "microbatches": 4}
    sliced, whole = (planned(captured("deep"), schedule=name, **pins) for name in ("seq1f1b(slices=6)", "1f1b"))
    peaks = [plan.prediction.memory[0].activations for plan in (sliced, whole)]
    assert peaks[0] < 0.75 * peaks[1]  # 7/6 of a microbatch instead of 2, and gradients on their way


def test_what_a_program_and_its_plan_say(tmp_path: Path) -> None:
    made = program("deep", "seq1f1b(lengths=(3, 1, 2))", 2)
    text = made.ranks[0].source
    assert "(stage 0 on slice 2 of the sequence)" in text and "PLACE = (0, 1, 0, 1, 0, 1)" in text
    # queries of slice 1, a token, see the three before it; layers of a slice share a function
    assert len(re.findall(r"full = aten.full.default\(\[1, 4\], float\(\"-inf\"\)", text)) == 1
    assert "def blocks_slice1_forward" in text and "    for i in range(2):\n" in text
    assert made.plan.slices == 3 and made.plan.lengths == (3, 1, 2)
    assert "seq1f1b(lengths=(3, 1, 2))" in made.plan.summary()
    with pytest.raises(ValueError, match=r"plan: 2 slices of the sequence cannot have the lengths \(3, 1, 2\)"):
        replace(made.plan, slices=2)
    again = autopart.Program.read(made.write(tmp_path / "made"))
    assert again.plan == made.plan and verify(again)
    assert len(made.stages) == 6 and "blocks_slice1_forward" in made.stages[2].forward.code
    timed = autopart.simulate(made)
    assert timed.makespan > 0 and timed.peak_activations == (9 / 6, 7 / 6)


def test_stages_of_slices_are_numbered_through() -> None:
    made = program("loss", "terapipe(slices=2)", 2, microbatches=1)
    lowered = scheduled(made.staged, made.plan)
    assert str(lowered).split("\n") == [
        "0F0,0SEND0>1,2F0,2SEND0>3,2RECV0>3,2B0,0RECV0>1,0B0",
        "1RECV0>0,1F0,3RECV0>2,3F0,3B0,3SEND0>2,1B0,1SEND0>0",
    ]
    within = {(edge.source, edge.target) for edge in made.staged.edges if edge.source % 2 == edge.target % 2}
    assert within == {(0, 2), (2, 0), (1, 3), (3, 1)}  # keys and values, and the loss; their gradients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            [("acts_0_2.pop(0)", "acts_0_2.pop(1)")],
            "rule text: rank 0, stage 2, .*acts_0_2.pop.1.*nothing is stored for microbatch 1",
            id="a cache that is not there yet",
        ),
        pytest.param(
            [("acts_0_2.pop(0)", "acts_0_2[0]")],
            "rule text: rank 0, stage 2, .*acts_0_2.0.*read without being taken",
            id="a cache kept",
        ),
        pytest.param(
            [("d_blocks_0, d_blocks_0_v2, d_blocks_0_v3, *saved", "d_blocks_0, d_blocks_0_v2, d_blocks_0_v2, *saved")],
            r"rule values: rank 0, stage 0, .*it is given (\w+)_rest1 where blocks.0 takes (?!\1)\w+_rest1",
            id="dK twice, no dV",
        ),
        pytest.param(
            [('    world.accumulate("wpe", grads)\n\n\ndef stage2_forward', "\n\ndef stage2_forward")],
            'rule gradients: rank 0, stage 0, .*"wpe"',
            id="the gradient of one slice missing",
        ),
        pytest.param(
            [("PLACE = (0, 1, 0, 1)", "PLACE = (0, 1, 1, 0)")], "rule text: rank 0: PLACE", id="a slice elsewhere"
        ),
    ],
)
def test_planted_faults(changes: list[tuple[str, str]], message: str) -> None:
    refused(program("loss", "terapipe(slices=2)", 2, microbatches=1), {0: changes}, message)


def test_a_slice_before_the_one_whose_keys_it_needs() -> None:
    made = program("loss", "terapipe(slices=2)", 2, microbatches=1)
    lines = made.ranks[0].source.split("\n")
    first = next(i for i, line in enumerate(lines) if 'world.action("F", stage=0' in line)
    swapped = [*lines[:first], *lines[first + 3 : first + 5], *lines[first : first + 3], *lines[first + 5 :]]
    text = "\n".join(swapped)
    ranks = (replace(made.ranks[0], source=text), *made.ranks[1:])
    with pytest.raises(
        VerificationError, match=r"action 2F0 .*acts_0_2.*nothing is stored for microbatch 0: it was never"
    ):
        verify(replace(made, ranks=ranks))


class Float(nn.Module):
    """Attends to features that are given; the first token's result may be all that counts."""

    def __init__(self, *, causal: bool = True, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.proj, self.causal, self.mask = nn.Linear(4, 12), causal, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.proj(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal).square().sum()


def test_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    plain = Float().double()
    model = autopart.parallelize(
        copy.deepcopy(plain), mesh={"pp": 1}, schedule="terapipe(slices=2)", microbatches=2, capture="direct"
    )
    x = torch.randn(4, 5, 4).double()
    found = []
    for each in (model, plain):
        given = x.clone().requires_grad_()
        each(given).backward()
        found.append(given.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Apart(nn.Module):
    """Keys and values come from before the layer that attends to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (part.unsqueeze(1) for part in self.first(x).chunk(2, dim=-1))
        q = self.second(k[:, 0] * v[:, 0]).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def test_keys_from_another_stage() -> None:
    torch.manual_seed(0)
    pins: dict[str, Any] = {"stages": ["second"], "mesh": {"pp": 2}, "devices": 2, "microbatches": 2}
    assert_parity(Apart().double(), (torch.randn(4, 5, 4).double(),), schedule="seq1f1b(slices=3)", steps=2, **pins)


def test_a_sequence_too_short_or_of_other_lengths_is_refused() -> None:
    for option, message in (
        ("slices=7", "a sequence of 6 tokens cannot be cut into 7 slices; pin at most slices=6"),
        ("lengths=(2, 3)", "slices of 2, 3 tokens are 5 in all, but a sequence has 6"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            program("loss", f"seq1f1b({option})", 2)
    with pytest.raises(
        ValueError, match="goes on with the first 5 of 6 tokens, of which the last of 6 slices has none"
    ):
        program("shifted", "seq1f1b(slices=6)", 2)


def test_tensors_split_inside_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="into 2 slices, which is not done yet where a mesh axis splits tensors"):
        planned(captured("loss"), schedule="seq1f1b(slices=2)", microbatches=2, mesh={"pp": 2, "tp": 2}, devices=4)


def test_steps_without_a_loss_need_all_forwards_first() -> None:
    model, args = sample("no loss")
    made = autopart.parallelize(model, mesh={"pp": 2}, schedule="seq1f1b(slices=2)", microbatches=2, capture="direct")
    with pytest.raises(ValueError, match="begins backwards before all forwards are done"):
        made(*args)


class Counting(Causal):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(ids, labels)


def test_updates_of_buffers_are_refused() -> None:
    model = autopart.parallelize(
        Counting(), mesh={"pp": 2}, schedule="seq1f1b(slices=2)", microbatches=2, capture="direct"
    )
    with pytest.raises(CaptureError, match=r"updates the buffer calls.*into 2 slices; pin one .*schedule='1f1b'"):
        model(*sample("loss")[1])


def gloo_rank() -> Any:
    """Three training steps of a process."""
    model, args = sample("gpt")
    made = autopart.parallelize(model, mesh={"pp": 2}, schedule="seq1f1b(slices=2)", microbatches=2, capture="direct")
    return train(made, lambda step: (args, {}), 3, adamw, 0.5)


@pytest.mark.soak
def test_over_gloo() -> None:
    model, args = sample("gpt")
    expected = train(model, lambda step: (args, {}), 3, adamw, 0.5)
    for rank, found in enumerate(launch(gloo_rank, 2, timeout=100).values):
        compare(found, expected, 1e-9, f"rank {rank}")
