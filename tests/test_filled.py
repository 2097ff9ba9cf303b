"""`train_loop` with a frozen front: an ordinary loop's numbers, whoever computes the front, and what plans predict."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopart
from autopart.api import compiler
from autopart.errors import VerificationError
from autopart.ir.action import Action, Kind
from autopart.ir.mesh import pieces as pieces_of
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.testing import LocalWorld, reference_random
from tests.launch import launch

TOLERANCE = 1e-9

FAST = autopart.Cluster.uniform(4, 10**9, 1e12, 1e12, 1e15, 0.0)
"""Devices on which a layer takes longer than a message, as those of people do with larger layers."""


class Conditioned(nn.Module):
    """A frozen encoder with dropout and running statistics in front, whose output all later layers read."""

    def __init__(self, depth: int = 6, table: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(depth))
        self.encoder = nn.Sequential(nn.BatchNorm1d(6), *layers).requires_grad_(False)
        self.encoder[0].running_mean.fill_(0.2)
        self.encoder[0].eval()  # the others stay in training mode, so they drop
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 24), nn.Linear(24, 6)) for _ in range(4))
        if tied:
            self.h[3][0].weight = self.h[0][0].weight
        self.table = nn.Embedding(table, 6) if table else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = code = self.encoder(x)
        for block in self.h:
            x = torch.tanh(block(x)) + code
        return functional.cross_entropy(x if self.table is None else x + self.table(y), y, ignore_index=2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    """The last one is smaller, and cut unevenly."""
    torch.manual_seed(4)
    sizes = (8, 8, 8, 6)
    return [(torch.randn(n, 6).double(), torch.randint(0, 6, (n,))) for n in sizes]


def reference(depth: int, *, tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of an ordinary loop in one plain process."""
    torch.manual_seed(0)
    model, losses = Conditioned(depth, tied=tied).double(), []
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for call, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with reference_random(call=call):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(
    number: int, mesh: dict[str, int], pieces: int, schedule: str, depth: int, *, tied: bool = False
) -> tuple[list[float], dict[str, Tensor], Any]:
    """One rank's loop: losses, weights, the loop."""
    torch.manual_seed(number)
    model = Conditioned(depth, tied=tied).double()
    model = autopart.parallelize(model, mesh=mesh, microbatches=pieces, cluster=FAST)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    loop = autopart.train_loop(model, optimizer, batches(), schedule=schedule)
    losses = [loss.item() for loss in loop]
    return losses, model.full_state_dict(), loop


def check(every: Any, depth: int, *, tied: bool = False) -> None:
    losses, weights = reference(depth, tied=tied)
    for mine, state, *_ in every:
        assert mine == pytest.approx(losses, abs=TOLERANCE)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


def check_counted(loop: Any) -> None:
    """What the ranks of this process held, sent, and performed where, is what the plan says."""
    plan = loop.program.plan
    last = compiler.predicted_of(loop.program, pieces_of(6, plan.mesh.degree("dp"))).prediction
    for world in loop._running._worlds:
        here = plan.mesh.coordinate(world.transport.rank)
        memory = plan.prediction.memory[plan.place.index(here["pp"])]
        assert (world.memory.activations, sum(t.nbytes for u in world.states.whole.values() for t in u)) == (
            memory.activations,
            memory.parameters,
        )
        most, least = (each.sent_by(world.transport.rank) for each in (plan.prediction, last))
        sent = world.transport.bytes_sent()
        assert sent["send"] and all(3 * most[kind] + least[kind] == count for kind, count in sent.items())
    used = [[Action.parse(each.action) for each in rank] for rank in loop.used]
    fronts = [sum(a.kind is Kind.F and loop.program.staged.is_front(a.stage) for a in row) for row in used]
    columns = {plan.mesh.coordinate(rank)["pp"] for rank, count in enumerate(fronts) if count}
    assert columns == {*plan.helpers} | (columns & {plan.place[0]})
    assert sum(fronts) == 4 * plan.microbatches * plan.front * plan.mesh.degree("dp")


ROWS = [
    ({"pp": 3}, 4, "1f1b", 12, (1, 2)),
    ({"pp": 2}, 4, "zb-v", 6, (1,)),
]
SOAK = [
    ({"pp": 2}, 4, "interleaved", 12, (1,)),
    ({"pp": 2}, 4, "zb-h1", 12, (1,)),
    ({"pp": 2, "dp": 2}, 2, "gpipe", 12, (1,)),
]


@pytest.mark.parametrize(
    ("mesh", "pieces", "schedule", "depth", "helpers"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.soak) for row in SOAK)],
)
def test_all_ranks_of_one_process(
    mesh: dict[str, int], pieces: int, schedule: str, depth: int, helpers: tuple[int, ...]
) -> None:
    tied = schedule == "zb-v"  # whose first and last stage are on one rank
    losses, state, loop = trained(0, mesh, pieces, schedule, depth, tied=tied)
    check([(losses, state)], depth, tied=tied)
    assert loop.program.plan.helpers == helpers
    check_counted(loop)


GLOO = ({"pp": 2}, 4, "1f1b", 12)


def on_processes() -> Any:
    losses, state, loop = trained(int(os.environ["RANK"]), *GLOO)
    plan, row = loop.program.plan, loop.used[0]
    sent = loop._running._worlds[0].transport.bytes_sent()
    return losses, state, plan, [each.action for each in row], sent


def test_processes() -> None:
    """Each rank has its parts alone; the helper has the front too, and steps on nothing of it."""
    found = launch(on_processes, 2, timeout=100).values
    check(found, 12)
    for rank, (*_, plan, actions, sent) in enumerate(found):
        assert plan.helpers == (1,) and plan.prediction.sent_by(rank)["send"] > 0 and sent["send"] > 0
        stage = 0 if rank == 0 else plan.front + 2
        assert f"{stage}OPT0" not in actions and any(each.startswith(f"{stage}F") for each in actions)


def after(number: int) -> Any:
    """Losses of a loop, of calls after it, and of another loop."""
    losses, _, loop = trained(number, {"pp": 2}, 4, "1f1b", 12)
    model = loop._model
    with torch.no_grad():
        evaluated = model(*batches()[0]).item()
    loss = model(*batches()[0])
    loss.backward()
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    again = [each.item() for each in autopart.train_loop(model, optimizer, batches()[:2], schedule="1f1b")]
    return losses, evaluated, loss.item(), again, loop.program.plan.helpers


@pytest.mark.soak
def test_calls_between_loops() -> None:
    """The plan of ordinary calls computes the front where it is needed, from the copy that rank 0 has."""
    one, two = LocalWorld(2).run(after)
    assert one == two and one[4] == (1,)
    _, weights = reference(12)
    plain = Conditioned(12).double()
    plain.load_state_dict(weights)
    with reference_random(call=3):
        evaluated = plain(*batches()[0]).item()
    losses = []
    optimizer = adamw(p for p in plain.parameters() if p.requires_grad)
    for call, (x, y) in ((4, batches()[0]), *enumerate(batches()[:2], 5)):
        with reference_random(call=call):
            loss = plain(x, y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step() if call > 4 else None
    assert [one[1], one[2], *one[3]] == pytest.approx([evaluated, *losses], abs=TOLERANCE)


@pytest.fixture(scope="module")
def program() -> Program:
    """Of two ranks, of which the second helps; a step of the front takes some of the time of one of all else."""
    torch.manual_seed(0)
    model = autopart.parallelize(Conditioned(12).double(), mesh={"pp": 2}, microbatches=4, cluster=FAST)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    loop = autopart.train_loop(model, optimizer, batches()[:1], schedule="1f1b")
    assert len(list(loop)) == 1
    return loop.program


def test_what_is_written_and_read(program: Program, tmp_path: Path) -> None:
    plan = program.plan
    assert Plan.from_json(plan.to_json()) == plan and plan.helpers == (1,)
    again = Program.read(program.write(tmp_path))
    assert str(autopart.verify(again)) == str(autopart.verify(program))
    text = again.ranks[1].source
    assert "(stage 0 again: where this rank would wait, it computes that a batch ahead)" in text
    assert "def frozen(world, batches, coming):" in text and "def arriving_0(world, batches, coming):" in text
    assert "def arriving_3(world, batches, coming):" in again.ranks[0].source
    shown = autopart.simulate(again, FAST)
    assert {span.rank for span in shown.spans if span.action.stage == 0} == {0, 1}
    assert "by a table of 2 rows" in plan.summary() and "helpers: (1,) -> ()" in plan.diff(replace(plan, helpers=()))
    assert "3 on rank 0, 1 on rank 1; 0 end after all else" in plan.notes[-1]


@pytest.mark.parametrize(
    ("rank", "before", "after", "message"),
    [
        (1, "stage=3, to=1", "stage=3, to=2", "rule transfers: .*stage 2 is not on another rank"),
        (1, "world.send(acts_0_1.pop(k), stage=3", "acts_0_1.pop(k) #", "rule transfers: .*it meets the receive of"),
        (1, "acts_0_1.pop(k), stage=3", "acts_0_2.pop(k), stage=3", "rule text: .*nothing is stored"),
        (0, "world.update(stage=1", "world.version(stage=1) #", "rule updates: .*1OPT0 does not come next"),
        (0, "world.update(stage=1", "world.update(stage=0, step=0, keep=0); world.update(stage=1", "no batch is left"),
        (1, 'action("F", stage=3', 'action("F", stage=0', "rule (work|values|text): "),
        (0, "source=3, microbatch=k)", "source=2, microbatch=k)", "rule transfers: .*it meets the receive of"),
        (0, "acts_0_1[k] = world.recv(", "acts_0_2[k] = world.recv(", "rule (text|stores): "),
        (0, "    frozen(world, batches, coming[1:4])\n    ", "    ", "rule (text|transfers): "),
    ],
)
def test_faults(program: Program, rank: int, before: str, after: str, message: str) -> None:
    source = program.ranks[rank].source
    assert before in source
    wrong = replace(program.ranks[rank], source=source.replace(before, after))
    ranks = tuple(wrong if each.rank == rank else each for each in program.ranks)
    with pytest.raises(VerificationError, match=message):
        autopart.verify(replace(program, ranks=ranks))


def test_the_front_computed_twice(program: Program) -> None:
    """Both ranks compute a microbatch, and what the second makes goes nowhere."""
    one, two = program.ranks
    both = one.source.replace("arriving_3(world, batches, coming[0:1])", "frozen(world, batches, coming[0:1])")
    assert both != one.source
    with pytest.raises(VerificationError, match=r"rule (transfers|work): "):
        autopart.verify(replace(program, ranks=(replace(one, source=both), two)))
