"""`train_loop`: each schedule trains as its defining equation says, with any optimizer, and says what it used."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopart
from autopart.errors import CaptureError
from autopart.ir.action import Action, Kind
from autopart.ir.program import Program
from autopart.schedules import build, versions
from autopart.testing import LocalWorld, reference_random
from tests.asynchronous import train
from tests.launch import launch

TOLERANCE = 1e-9


class Layers(nn.Module):
    """Blocks in a row, a mean loss that ignores some targets."""

    def __init__(self, depth: int, width: int = 6) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(depth)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(x, y)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def batches(count: int, samples: int, width: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(count)
    return [(torch.randn(samples, width).double(), torch.randint(0, width, (samples,))) for _ in range(count)]


ROWS = [
    ("2bw", 3, 4, adamw, {}),
    ("pipedream", 3, 1, adamw, {}),
    ("paci", 3, 2, momentum, {}),
    ("pb", 3, 1, momentum, {}),
]
SOAK = [
    ("2bw", 2, 2, momentum, {}),
    ("pipedream", 2, 1, momentum, {}),
    ("paci(accumulate=1)", 4, 1, adamw, {}),
    ("pb", 3, 1, adamw, {"compensate": False}),
]


@pytest.mark.parametrize(
    ("schedule", "ranks", "pieces", "optimizer", "more"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.soak) for row in SOAK)],
)
def test_trains_by_its_equation(
    schedule: str, ranks: int, pieces: int, optimizer: Callable[[Any], Any], more: dict[str, Any]
) -> None:
    """Losses and final weights are those of the oracle, and each action used the version that `versions` predicts."""
    torch.manual_seed(0)
    model = Layers(ranks).double()
    blocks, data = copy.deepcopy([*model.h]), batches(7, 4)
    name = schedule.partition("(")[0]
    compensate = name == "pb" and more.get("compensate", True)
    wanted = train(blocks, functional.cross_entropy, optimizer, data, name, pieces, compensate=compensate)
    stages = [f"h.{i}" for i in range(1, ranks)]
    loop = autopart.train_loop(
        model, optimizer, data, schedule=schedule, mesh={"pp": ranks}, stages=stages, microbatches=pieces, **more
    )
    losses = [loss.item() for loss in loop]
    assert losses == pytest.approx(wanted, abs=TOLERANCE)
    for mine, theirs in zip(model.h.parameters(), (p for b in blocks for p in b.parameters()), strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    _check_used(loop, schedule, ranks, pieces)


def _check_used(loop: Any, schedule: str, ranks: int, pieces: int) -> None:
    known = versions(build(loop.program.plan.schedule, ranks=ranks, microbatches=7 * pieces))
    found = {Action.parse(each.action): each.version for rank in loop.used for each in rank}
    assert {action: version for action, version in found.items() if action.kind is not Kind.OPT} == known
    steps = [action for action in found if action.kind is Kind.OPT]
    assert len(steps) == 7 * ranks and all(found[action] == action.microbatch + 1 for action in steps)


def rank(number: int, schedule: str, mesh: dict[str, int], pieces: int, kind: Any, data: Any) -> Any:
    """One rank's loop, with an optimizer of its own; ranks begin with weights of their own."""
    torch.manual_seed(number)
    stages = [f"h.{i}" for i in range(1, mesh["pp"])]
    model = autopart.parallelize(Layers(mesh["pp"]).double(), mesh=mesh, microbatches=pieces, stages=stages)
    optimizer = kind(model.parameters())
    loop = autopart.train_loop(model, optimizer, data, schedule=schedule)
    losses = [loss.item() for loss in loop]
    shapes = {k: v.shape for k, v in optimizer.state_dict()["state"][0].items() if v.dim()}
    return losses, model.full_state_dict(), shapes


def oracle(schedule: str, ranks: int, kind: Any, data: Any, pieces: int) -> Any:
    torch.manual_seed(0)
    model = Layers(ranks).double()
    losses = train([*model.h], functional.cross_entropy, kind, data, schedule, pieces, compensate=schedule == "pb")
    return losses, model.state_dict()


def check_ranks(found: Any, schedule: str, mesh: dict[str, int], pieces: int, kind: Any, data: Any) -> None:
    losses, weights = oracle(schedule, mesh["pp"], kind, data, pieces)
    for mine, state, shapes in found:
        assert mine == pytest.approx(losses, abs=TOLERANCE)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)
        assert shapes and all(shape == weights["h.0.0.weight"].shape for shape in shapes.values())


def test_data_ranks_each_with_their_own_weights() -> None:
    row = ("2bw", {"pp": 2, "dp": 2}, 2, momentum, batches(4, 8))
    check_ranks(LocalWorld(4).run(rank, *row), *row)


def test_data_ranks_that_share_one_process() -> None:
    """The first rank of a stage to step does it for all; each loss is that of the whole batch."""
    losses, weights = oracle("pipedream", 2, adamw, data := batches(5, 4), 1)
    torch.manual_seed(0)
    model, mesh = Layers(2).double(), {"pp": 2, "dp": 2}
    loop = autopart.train_loop(model, adamw, data, schedule="pipedream", mesh=mesh, stages=["h.1"])
    assert [loss.item() for loss in loop] == pytest.approx(losses, abs=TOLERANCE)
    for name, tensor in weights.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


GLOO = ("2bw", {"pp": 2}, 2, adamw, batches(5, 4))


def on_processes() -> Any:
    number = int(os.environ["RANK"])
    found = rank(number, *GLOO)
    data = batches(4, 4)
    data[2] = data[3] if number else data[2]
    model = autopart.parallelize(Layers(2).double(), mesh={"pp": 2}, stages=["h.1"])
    loop = autopart.train_loop(model, momentum, data[: 4 - number], schedule="pipedream")
    with pytest.raises(ValueError, match="batches: batch 2 of rank 1 is not rank 0's"):
        list(loop)
    loop.flush()
    for count in (2, 1):
        loop = autopart.train_loop(model, momentum, data[: count - number], schedule="pipedream")
        with pytest.raises(ValueError, match=f"batches: rank 1 has no batch {count - 1}"):
            list(loop)
        loop.flush()
    return found


def test_processes() -> None:
    """Each rank a process, nobody waiting for the others but for what it needs; batches that differ are told."""
    found = launch(on_processes, 2, timeout=100).values
    check_ranks(found, *GLOO)


class Tiny(nn.Module):
    """Three layers with dropout; some targets are ignored, so what a batch's losses are divided by differs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.c(torch.tanh(self.b(self.drop(torch.tanh(self.a(x))))))
        return x if y is None else functional.cross_entropy(x, y, ignore_index=0)


def delayed(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, rates: Any = None) -> list[float]:
    """w[t+1] = w[t] - lr * g(w[t-1]) on whole batches, with the draws of each call."""
    before, losses = copy.deepcopy(model), []
    for t, (x, y) in enumerate(data):
        before.zero_grad()
        with reference_random(call=t):
            loss = before(x, y)
        loss.backward()
        losses.append(loss.item())
        for mine, old in zip(model.parameters(), before.parameters(), strict=True):
            mine.grad = None if old.grad is None else old.grad.clone()
        before = copy.deepcopy(model)
        optimizer.param_groups[0]["lr"] = rates(t) if rates else optimizer.param_groups[0]["lr"]
        optimizer.step()
    return losses


def test_whole_batches_dropout_uneven_batches_and_rates() -> None:
    """2BW is its equation on whole batches: microbatches share one divisor, and step n goes by the rate of batch n."""
    torch.manual_seed(3)
    model = Tiny().double()
    plain, data = copy.deepcopy(model), batches(5, 6) + batches(1, 4)
    rates = [0.1, 0.05, 0.2, 0.01, 0.1, 0.3]
    torch.manual_seed(11)
    wanted = delayed(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), data, rates.__getitem__)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def stream() -> Any:
        for rate, batch in zip(rates, data, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            yield batch

    torch.manual_seed(11)
    loop = autopart.train_loop(model, optimizer, stream(), schedule="2bw(accumulate=4)", mesh={"pp": 3})
    assert [loss.item() for loss in loop] == pytest.approx(wanted, abs=TOLERANCE)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
        assert mine.grad is None, "the program's gradients are its own"


def test_frozen_stages_targets_and_loops_after_each_other() -> None:
    """A stage that trains nothing steps on nothing; each loop begins from the weights of the one before."""
    torch.manual_seed(4)
    model = Tiny().double().eval()
    model.a.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.1) for m in (model, plain)]
    autopart.parallelize(model, mesh={"pp": 3}, microbatches=3, loss_fn=functional.cross_entropy)
    plain_loss = copy.deepcopy(plain)
    for data in (batches(1, 6), batches(3, 6)):
        loop = autopart.train_loop(model, optimizers[0], [({"x": x}, y) for x, y in data], schedule="2bw")
        before, wanted = copy.deepcopy(plain), []
        for x, y in data:
            before.zero_grad()
            loss = functional.cross_entropy(before(x), y)
            loss.backward()
            wanted.append(loss.item())
            for mine, old in zip(plain.parameters(), before.parameters(), strict=True):
                mine.grad = None if old.grad is None else old.grad.clone()
            before = copy.deepcopy(plain)
            optimizers[1].step()
        assert [loss.item() for loss in loop] == pytest.approx(wanted, abs=TOLERANCE)
    for mine, theirs, old in zip(model.parameters(), plain.parameters(), plain_loss.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
        assert mine.requires_grad != torch.equal(mine, old)


def test_stopping_early() -> None:
    """Until it is flushed the model refuses other calls; then it is as after the batches that were read."""
    torch.manual_seed(0)
    model, data = Layers(2).double(), batches(6, 4)
    blocks = copy.deepcopy([*model.h])
    loop = autopart.train_loop(model, momentum, data, schedule="pipedream", mesh={"pp": 2}, stages=["h.1"])
    first = next(loop)
    for use in (model.state_dict, lambda: copy.deepcopy(model), lambda: model(*data[0])):
        with pytest.raises(RuntimeError, match=r"a loop over this model is not flushed.* call its flush\(\)"):
            use()
    with loop:
        pass
    losses = [first.item(), *(loss.item() for loss in loop)]
    assert len(losses) == 2, "one batch was read ahead of the loss that was taken"
    assert losses == pytest.approx(train(blocks, functional.cross_entropy, momentum, data[:2], "pipedream"))
    torch.testing.assert_close([*model.h.parameters()], [p for b in blocks for p in b.parameters()])
    model(*data[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_no_batches() -> None:
    model = Layers(2)
    assert list(autopart.train_loop(model, momentum, [], mesh={"pp": 2})) == []
    model(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)).backward()


def test_texts_are_run_as_they_are(tmp_path: Path) -> None:
    """A written program is read, edited and run; its stage graphs, timeline and memory are those of any program."""
    torch.manual_seed(0)
    model, data = Layers(2).double(), batches(5, 4)
    weights = copy.deepcopy(model.state_dict())
    loop = autopart.train_loop(model, momentum, data, schedule="2bw(accumulate=4)", mesh={"pp": 2}, stages=["h.1"])
    wanted = [loss.item() for loss in loop]
    program = Program.read(loop.program.write(tmp_path))
    text = program.ranks[0].source
    assert '"""A batch of 4 microbatches comes: w[t+1] = w[t] - lr * g(w[t-1])."""' in text
    assert len(program.stages) == 2 and autopart.simulate(program).makespan > 0
    for world, memory in zip(loop._running._worlds, program.plan.prediction.memory, strict=True):
        assert world.memory.activations == memory.activations
        sent, predicted = world.transport.bytes_sent(), program.plan.prediction.sent_by(world.transport.rank)
        assert {kind: 5 * count for kind, count in predicted.items()} == sent
        assert sum(v.nbytes() for v in world.versions.values()) == sum(
            t.nbytes for u in world.states.whole.values() for t in u
        )
    renamed = replace(program.ranks[0], source=text.replace("saved_0", "kept_0"))
    again = autopart.parallelize(Layers(2).double(), plan=replace(program, ranks=(renamed, program.ranks[1])))
    again.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"schedule: '2bw' is asked for, but the plan is of '2bw\(accumulate=4\)'"):
        list(autopart.train_loop(again, momentum, data))
    loop = autopart.train_loop(again, momentum, data, schedule="2bw(accumulate=4)")
    assert [loss.item() for loss in loop] == wanted and "kept_0" in loop.program.ranks[0].source
    with pytest.raises(ValueError, match=r"plan: it is of a loop whose steps overlap .* autopart.train_loop\("):
        again(*data[0])
    with torch.no_grad():
        assert again(*data[0]) == pytest.approx(model(*data[0]).item())


def test_several_stages_a_rank() -> None:
    """A plan of an ordinary call is kept if it has one stage a rank, and refused if it has more."""
    model, data = autopart.parallelize(Layers(4), mesh={"pp": 2}, schedule="interleaved"), batches(2, 4)
    model.float()(data[0][0].float(), data[0][1]).backward()
    with pytest.raises(CaptureError, match=r"4 stages on the pipeline ranks \(0, 1, 0, 1\), but a loop needs"):
        list(autopart.train_loop(model, momentum, [(x.float(), y) for x, y in data]))
    model = autopart.parallelize(Layers(3), mesh={"pp": 2}, stages=["h.2"], microbatches=4)
    model(data[0][0].float(), data[0][1]).backward()
    loop = autopart.train_loop(model, momentum, [(x.float(), y) for x, y in data])
    assert len(list(loop)) == 2
    assert loop.program.plan.stages == model.plan.stages and model.plan.schedule == "1f1b"
