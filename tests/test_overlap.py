"""Steps that cannot overlap are refused, naming what is in the way, before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopart
from autopart.errors import CaptureError


class Net(nn.Module):
    """Two layers, with whatever is in between."""

    def __init__(self, between: nn.Module | None = None, *, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between or nn.Identity()
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.b(self.between(torch.tanh(self.a(x)))), y)


class Again(nn.Linear):
    """A layer in a region that is recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(super(Again, self).forward(x)), x, use_reentrant=False
        )


DATA = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))]
PINS: dict[str, Any] = {"mesh": {"pp": 2}, "stages": ["b"]}


@pytest.mark.parametrize(
    ("model", "pins", "message"),
    [
        (lambda: Net(tied=True), {}, "parameter a.weight is used on the stages 0, 1, whose steps come at different"),
        (
            lambda: Net(nn.BatchNorm1d(4)),
            {"semantics": "accumulate"},
            "buffer between.num_batches_tracked is",
        ),
        (
            lambda: Net(),
            {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1"},
            "parameter a.weight is placed in parts; placement='ddp'",
        ),
        (lambda: Net(Again(4, 4)), {"schedule": "pb"}, "'pb' keeps no older weights, so what a backward recomputes"),
    ],
)
def test_refused_at_the_first_batch(model: Any, pins: dict[str, Any], message: str) -> None:
    found = model()
    before = copy.deepcopy(found.state_dict())
    schedule = {"schedule": pins.get("schedule", "2bw")}
    optimizer = torch.optim.SGD(found.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(CaptureError, match=f"train_loop: .*{message}"):
        list(autopart.train_loop(found, optimizer, DATA, **PINS | pins | schedule))
    torch.testing.assert_close(found.state_dict(), before)


def test_calls_and_batches_that_are_refused() -> None:
    model = autopart.parallelize(Net(), **PINS)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = autopart.train_loop

    def run(optimizer: Any, batches: Any, **more: Any) -> list[Tensor]:
        return list(loop(model, optimizer, batches, **more))

    longer = [*DATA, (torch.ones(4, 2, 4), torch.zeros(4, 2, dtype=torch.long))]
    few = [*DATA, (DATA[0][0][:1], DATA[0][1][:1])]
    for error, message, call in (
        (TypeError, "model: expected an nn.Module", lambda: loop(3, sgd, DATA)),
        (TypeError, "mesh: the model is parallelised already", lambda: loop(model, sgd, DATA, mesh={"pp": 2})),
        (TypeError, "batches: expected an iterable of batches", lambda: loop(model, sgd, DATA[0][0])),
        (TypeError, "optimizer: expected a torch Optimizer", lambda: loop(model, None, DATA)),
        (ValueError, "SGD with momentum.*compensate=False", lambda: loop(model, sgd, DATA, schedule="pb")),
        (ValueError, "has none of the model's", lambda: loop(model, torch.optim.SGD(Net().parameters()), DATA)),
        (ValueError, "LBFGS may look at all parameters", lambda: loop(model, torch.optim.LBFGS, DATA)),
        (ValueError, "'dualpipe' is none of a train_loop", lambda: loop(model, sgd, DATA, schedule="dualpipe")),
        (ValueError, "batch 1 differs from the first one in the sizes or dtype of x", lambda: run(sgd, longer)),
        (ValueError, "1 samples cannot be cut into 2 pieces", lambda: run(sgd, few)),
    ):
        with pytest.raises(error, match=message):
            call()
        if model._autopart.loop is not None:
            model._autopart.loop.drain()
            model._autopart.loop = None
    with pytest.raises(ValueError, match="no layers in front of the model are frozen, so there is nothing to fill"):
        list(loop(Net(), torch.optim.SGD, DATA, schedule="1f1b", mesh={"pp": 2}))
    with pytest.raises(ValueError, match="the model's plan has no stage of frozen layers in front that 'gpipe' goes"):
        run(sgd, DATA, schedule="gpipe")
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are switched off"):
        run(sgd, DATA)
    with pytest.raises(ValueError, match=r"'2bw' takes the optimizer's steps .*autopart.train_loop\(model"):
        autopart.parallelize(Net(), mesh={"pp": 2}, schedule="2bw")(*DATA[0])


class Counting(torch.optim.SGD):
    """Keeps in its groups what its steps change, as optimizers with a schedule of their own do."""

    autopart_scope = "element"

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_optimizers_that_count_in_their_groups_are_stopped() -> None:
    """And after a failure the model waits for a state dict."""
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Exception, match="Counting changes 'count' of its groups when it steps"):
        list(autopart.train_loop(model, Counting(model.parameters(), lr=0.1), DATA, **PINS))
    with pytest.raises(RuntimeError, match="it has failed, so load a state dict first"):
        model(*DATA[0])
    model.load_state_dict(before)
    model(*DATA[0]).backward()
