"""An input embedding split over the pipeline ranks trains as one device does, and is held in parts by them."""

from __future__ import annotations

from collections.abc import Mapping
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
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.segment import segment
from autopart.schedules.lookups import with_lookups
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import adamw, compare, train
from tests.launch import launch
from tests.models import GPT
from tests.test_verify import refused

TOKENS, WIDTH = 13, 7
"""Neither is divided by the numbers of ranks here."""


class Net(nn.Module):
    """Embeddings of tokens, maybe of their types and places too, two layers, and a loss over the tokens."""

    def __init__(
        self, width: int = WIDTH, *, tied: bool = False, padding: int | None = None, dropout: float = 0.0,
        frozen: bool = False, more: bool = False, by_freq: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.table = nn.Embedding(TOKENS, width, padding_idx=padding, scale_grad_by_freq=by_freq)
        self.types, self.places = nn.Embedding(3, width), nn.Parameter(torch.randn(4, width))
        self.norm, self.drop, self.more = nn.LayerNorm(width), nn.Dropout(dropout), more
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.table.weight.requires_grad_(not frozen)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kinds = self.types(ids.view(-1, 4) % 3) if self.more else None
        x = self.table(ids)
        x = self.drop(x if kinds is None else self.norm(x + kinds + self.places))
        x = self.first(x).tanh() + x
        x = self.second(x).tanh() + x
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sample(batch: int, **options: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Net(**options).double()
    ids, targets = torch.randint(0, TOKENS, (2, batch, 4))
    targets[0, :2] = -100
    return model, (ids, targets)


@cache
def captured(options: tuple[tuple[str, Any], ...], semantics: str) -> Captured:
    model, args = sample(8, **dict(options))
    return captured_step(model, read(model, args, {}), None, False, "direct", semantics)


def program(options: Mapping[str, Any], *, semantics: str = "exact", **pins: Any) -> Program:
    """Of two ranks and three microbatches, and ``"vocab"``, unless it says otherwise."""
    step = captured((*options.items(),), semantics)
    mesh = {"pp": pins.pop("pp", 2), "dp": pins.pop("dp", 1)}
    plan = planned(step, mesh=mesh, **{"schedule": "vocab", "microbatches": 3, **pins})
    return lower(segment(step, cuts=plan.cuts), plan)


@cache
def plain(*, tied: bool) -> Program:
    return program({"tied": True} if tied else {})


def shapes(made: Program, name: str = "table.weight") -> list[tuple[int, ...]]:
    return [p.shape for unit in made.state.units for p in unit.parameters if p.name == name]


COLUMNS, ROWS = [(TOKENS, 4), (TOKENS, 3)], [(7, WIDTH), (6, WIDTH)]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, ...]]]] = {
    "columns": ({}, {}, COLUMNS),
    "rows of a tied one": ({"tied": True}, {"schedule": "vocab(barriers=2)"}, ROWS),
    "padding": ({"padding": 2}, {"schedule": "vocab(barriers=2)"}, COLUMNS),
    "dropout and more tables": ({"dropout": 0.3, "more": True}, {}, COLUMNS),
    "recomputed": ({"more": True, "dropout": 0.3}, {"recompute": True}, COLUMNS),
    "frozen": ({"frozen": True}, {}, COLUMNS),
    "fsdp": ({"more": True}, {"dp": 2, "microbatches": 2, "placement": "fsdp"}, COLUMNS),
    "fsdp of a tied one": ({"tied": True}, {"dp": 2, "microbatches": 2, "placement": "fsdp"}, ROWS),
}
SOAK: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, ...]]]] = {
    "padding of a tied one": ({"padding": 2, "tied": True}, {}, ROWS),
    "one rank": ({}, {"pp": 1}, [(TOKENS, WIDTH)]),
    "recomputed and tied": ({"more": True, "tied": True}, {"recompute": True}, ROWS),
    "frozen and tied": ({"frozen": True, "tied": True}, {"schedule": "vocab(barriers=2)"}, ROWS),
    "one microbatch": ({}, {"microbatches": 1}, COLUMNS),
    **{
        f"{placement} {'tied' if tied else ''}": (
            {"tied": tied},
            {"dp": 2, "microbatches": 2, "placement": placement},
            h,
        )
        for placement in ("ddp", "zero1", "zero2")
        for tied, h in ((False, COLUMNS), (True, ROWS))
    },
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
def test_trains_as_one_device(name: str) -> None:
    """Raw gradients, clipped norms, and parameters after two steps, on every rank with its own optimizer."""
    options, pins, held = (CASES | SOAK)[name]
    made = program(options, **pins)
    assert made.plan.lookup and made.staged.lookups == pins.get("pp", 2) and shapes(made) == held
    assert_parity(*sample(7, **options), plan=made, steps=2)


@pytest.mark.parametrize(
    ("options", "pins"),
    [
        pytest.param({"width": 1}, {}, id="fewer columns than ranks"),
        pytest.param({"more": True}, {"stages": ["table"]}, id="a first stage that ends before it"),
        pytest.param({"by_freq": True}, {"semantics": "accumulate"}, id="counts that scale its gradient"),
    ],
)
def test_what_cannot_be_split_is_whole_as_before(options: dict[str, Any], pins: dict[str, Any]) -> None:
    made = program(options, **pins)
    assert not made.plan.lookup and made.staged.lookups == 0 and len(shapes(made)) == 1
    if "semantics" not in pins:
        assert_parity(*sample(7, **options), plan=made, steps=1)


def test_a_plan_holds_for_calls_that_look_up_likewise(tmp_path: Path) -> None:
    """It says that the embedding is split, in a file too; a step that does not begin so is refused."""
    plain(tied=False).plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.lookup and "each of the 2 pipeline ranks has a part of its columns" in plan.explain()

    class Twice(Net):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.first(self.table(ids)).tanh() + self.table(ids)
            return F.cross_entropy(self.head(self.second(x).tanh()).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="does not begin with a lookup in an embedding of which each pipeline rank"):
        autopart.compile(Twice().double(), plan, sample(8)[1], capture="direct")


# ---- what the program says -------------------------------------------------------------------------------------------


def test_every_rank_looks_up_for_the_first_stage() -> None:
    """Pieces go to stage 0 ahead of its forward; gradients come back, to be added up once a microbatch."""
    made = program({}, pp=3, microbatches=4)
    for rank in made.ranks:
        part = 6 + rank.rank
        row = [action for action in rank.actions if part in (action.stage, action.peer)]
        assert [sum(a.kind is kind for a in row) for kind in (Kind.F, Kind.B)] == [4, 4]
        if rank.rank:
            at = row.index(Action(Kind.F, part, 0))
            assert row[at + 1] == Action(Kind.SEND, part, 0, peer=0)
            assert row.index(Action(Kind.RECV, part, 3, peer=0)) < row.index(Action(Kind.B, part, 3))
        else:
            first = rank.actions.index(Action(Kind.F, 0, 2))
            assert all(rank.actions.index(Action(Kind.RECV, 0, 2, peer=6 + peer)) < first for peer in (1, 2))
    assert "stage 6: table.lookup@pp0 (this rank's part of the input embedding, of 3)" in made.ranks[0].source
    assert "x = aten.cat.default([x_0, x_1, x_2], 2)" in made.ranks[0].source
    assert len(made.stages) == 9 and all(graphs.backward is not None for graphs in made.stages)
    timeline = autopart.simulate(made)
    assert {str(span.action.kind) for span in timeline.spans} == {*"FBSTED"}
    assert autopart.simulate(made.plan).makespan > 0


def test_a_table_with_lookups_of_its_own() -> None:
    """A pinned table may say when they come; without an embedding to split it is refused."""
    table = str(with_lookups(schedules.build("vocab", ranks=2, microbatches=3)))
    made = program({}, schedule=table)
    assert made.plan.schedule == table and made.plan.lookup
    with pytest.raises(
        ValueError, match=r"its table has E and D, of an input embedding that is split .* leave them out"
    ):
        program({"width": 1}, schedule=table)


def test_a_backward_in_two_hands_on_what_is_looked_up_early() -> None:
    """The first stage's I is not empty: the parts wait for its gradient."""
    rows = ["barriers: 1", "0F0,0S0,0T0,0F1,0S1,0I0,0T1,0W0,0I1,0W1", "1F0,1S0,1I0,1F1,1S1,1W0,1T0,1I1,1T1,1W1"]
    made = program({}, schedule="\n".join(rows), microbatches=2)
    assert Kind.I in made.staged.kinds(0) and made.staged.phases(0, Kind.I)
    assert_parity(*sample(7), plan=made, steps=2)


T1 = "    (table_lookup_pp1,) = from_5\n"


@pytest.mark.parametrize(
    ("rank", "tied", "changes", "message"),
    [
        pytest.param(
            1,
            False,
            [("world.send(acts_5_0.pop(k), stage=5, to=0, microbatch=k)", "acts_5_0.pop(k)")],
            r"rule transfers: .* it meets the receive of rank 0, stage 0, microbatch 0, action 0RECV0>5",
            id="a piece that is not sent",
        ),
        pytest.param(
            0,
            True,
            [(T1, T1.replace("from_5", "from_4"))],
            "rule values: rank 0, stage 0, microbatch 0, action 0F0.*given table.lookup@pp0 where table takes .*@pp1",
            id="a piece twice",
        ),
        pytest.param(
            0,
            False,
            [('world.accumulate("table.lookup@pp0", grads)', "pass")],
            'rule gradients: rank 0, stage 4, microbatch 0, action 4B0: gradients of "table.lookup@pp0" are added 0',
            id="a gradient dropped",
        ),
        pytest.param(
            1,
            True,
            [
                (
                    "stage5_backward(world, batch, 0, saved_5.pop(0), grads_0_5.pop(0))",
                    "saved_5.pop(0).clear(), grads_0_5.pop(0)",
                )
            ],
            "rule values: rank 1, stage 5, microbatch 0, action 5B0: 0 functions of layers are called",
            id="a gradient not made",
        ),
        pytest.param(
            0,
            False,
            [('ids = batch.input("args[0]", k)', 'ids = batch.input("args[0]", 0)')],
            r"rule text: rank 0, stage 4, microbatch 1, action 4F1.*values of microbatch 0",
            id="tokens of another microbatch",
        ),
        pytest.param(
            1,
            True,
            [('"table.weight@pp1"', '"table.weight@pp0"')],
            "rule (text|values|work): rank 1",
            id="the rows of another rank",
        ),
    ],
)
def test_planted_faults(rank: int, tied: bool, changes: list[tuple[str, str]], message: str) -> None:
    refused(plain(tied=tied), {rank: changes}, message)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_as_predicted_and_parts_make_up_the_module(tied: bool, tmp_path: Path) -> None:
    """Each rank's Parameter has its part; the whole is in `state_dict`, and another plan goes on from a checkpoint."""

    def first(rank: int) -> Any:
        model, args = sample(9, tied=tied)
        model = autopart.parallelize(model, mesh={"pp": 2}, schedule="vocab", microbatches=4, capture="direct")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(*args).backward()
        optimizer.step()
        (report,) = model.report().ranks
        assert report.bytes_sent == report.predicted_bytes
        assert report.peak_activations == report.predicted_activations
        autopart.save(tmp_path, model, optimizer)
        here = tuple(model.local_state_dict()["table.weight"].shape)
        evaluated = float(model.eval()(*args).detach())
        return here, model.state_dict()["table.weight"], float(model.train()(*args).detach()), evaluated

    def then(rank: int) -> Any:
        model, args = sample(9, tied=tied)
        model = autopart.parallelize(model, mesh={"pp": 2}, schedule="1f1b", microbatches=4, capture="direct")
        autopart.load(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return float(model(*args).detach()), float(model.eval()(*args).detach())

    made = LocalWorld(2).run(first)
    assert [here for here, *_ in made] == (ROWS if tied else COLUMNS)
    assert torch.equal(made[0][1], made[1][1]) and made[0][1].shape == (TOKENS, WIDTH)
    for losses in LocalWorld(2).run(then):
        assert losses == pytest.approx(made[0][2:], rel=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [32768, 262144])
def test_ranks_hold_equal_memory(vocabulary: int, tied: bool) -> None:
    """Two blocks of width 4096 a rank: the first has the positions besides, 2% of what it holds; parts are equal."""
    with torch.device("meta"):
        model = GPT(16, 4096, 32, vocabulary, 2048, skips=False, tied=tied).bfloat16()
    ids = torch.zeros(8, 2048, dtype=torch.long)
    step = captured_step(model, read(model, (ids, ids), {}), None, False, "direct")
    pins: dict[str, Any] = {"cluster": autopart.Cluster.preset("h100-80", per_node=8), "memory": "4TiB"}
    stages = [f"blocks.{2 * rank}" for rank in range(1, 8)]
    plan = planned(step, schedule="vocab", mesh={"pp": 8}, microbatches=8, stages=stages, **pins)
    held = [each.parameters + each.gradients + each.optimizer for each in plan.prediction.memory]
    assert plan.lookup and max(held) <= 1.05 * min(held)
    assert max(held) - min(held) <= 4 * 2 * 4096 * (2048 + 2)  # a parameter, its gradient, two moments of two bytes


def gloo_rank() -> Any:
    """Two training steps of a process."""
    model, args = sample(9)
    made = autopart.parallelize(model, mesh={"pp": 2}, schedule="vocab", microbatches=4, capture="direct")
    return train(made, lambda step: (args, {}), 2, adamw, 0.5)


@pytest.mark.soak
def test_over_gloo() -> None:
    model, args = sample(9)
    expected = train(model, lambda step: (args, {}), 2, adamw, 0.5)
    for rank, found in enumerate(launch(gloo_rank, 2, timeout=100).values):
        compare(found, expected, 1e-9, f"rank {rank}")
