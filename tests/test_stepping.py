"""`post_validated`: the program steps on each rank as soon as it can, and the numbers are those of one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.runtime import clipping, post_validation
from autopart.testing import LocalWorld
from tests.launch import launch


class Net(nn.Module):
    """Eight layers, the first and the last of which share their weight if `tied`; the first bias is frozen.

    `gain` is 0 and stays so, as no optimizer has it: what it is multiplied by decides its gradient and nothing else.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.layers[0].bias.requires_grad_(False)
        self.layers[5].gain = nn.Parameter(torch.zeros(4))
        if tied:
            self.layers[7].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
            if hasattr(layer, "gain"):
                x = x + layer.gain * extra
        return (x - y).square().mean()


def net(tied: bool = False) -> Any:
    torch.manual_seed(3)
    return Net(tied=tied).double()


def moving(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if not name.endswith("gain")]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps 1 and 4 have large gradients, which are clipped; in step 3 that of `gain` alone is not finite."""
    generator = torch.Generator().manual_seed(step)
    x, y, extra = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    if step == 3:
        extra.fill_(torch.finfo(torch.float64).max)
    return x, y * {1: 50.0, 3: 1000.0, 4: 9.0}.get(step, 1.0), extra


STEPS = 5
BOUND = 20.0
"""Between the norms of the steps that are clipped and those of the others."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}

Trained = tuple[list[float], list[float], dict[str, torch.Tensor], dict[int, dict[str, Any]]]
"""Losses, norms, the parameters at the end, the optimizer's state."""


def eager(optimizer: str, bound: float | None, tied: bool = False) -> Trained:
    model = net(tied)
    mine = OPTIMIZERS[optimizer](moving(model))
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if bound is None else bound)
        if norm.isfinite():
            mine.step()
        model.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}, mine.state_dict()["state"]


def trained(
    pins: dict[str, Any], optimizer: str, bound: float | None, tied: bool = False
) -> tuple[Trained, list[bool]]:
    """The same on a rank; and which of its steps it had to undo."""
    model = autopart.parallelize(net(tied), capture="direct", verify=False, **pins)
    mine = OPTIMIZERS[optimizer](moving(model))
    step = autopart.post_validated(mine, model, max_norm=bound)
    losses, norms, undone = [], [], []
    for number in range(STEPS):
        loss = step(*batch(number))
        assert not loss.requires_grad and all(p.grad is None for p in model.parameters())
        assert step.norm is not None and step.stepped == bool(step.norm.isfinite())
        losses.append(loss.item())
        norms.append(step.norm.item())
        undone.append(step.undone)
    state = model.full_state_dict()
    parameters = {name: state[name] for name, _ in model.named_parameters()}
    return (losses, norms, parameters, mine.state_dict()["state"]), undone


def assert_same(found: Trained, expected: Trained) -> None:
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, nan_ok=True)
    assert found[2].keys() == expected[2].keys() and found[3].keys() == expected[3].keys()
    pairs = [(found[2][name], value) for name, value in expected[2].items()]
    pairs += [(found[3][i][key], value) for i, state in expected[3].items() for key, value in state.items()]
    for mine, theirs in pairs:
        if theirs is None:
            assert mine is None
        else:
            torch.testing.assert_close(torch.as_tensor(mine), theirs, rtol=1e-9, atol=1e-12)


def test_steps_are_clipped_finite_and_not() -> None:
    """What `batch` and `BOUND` promise, on one device."""
    norms = eager("adamw", BOUND)[1]
    assert [step for step, norm in enumerate(norms) if BOUND < norm < float("inf")] == [1, 4]
    assert [step for step, norm in enumerate(norms) if not math.isfinite(norm)] == [3]


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "zb-h1 on 2": (2, {"mesh": {"pp": 2}, "schedule": "zb-h1", "microbatches": 4}),
    "zb-v on 2": (2, {"mesh": {"pp": 2}, "schedule": "zb-v", "microbatches": 4}),
    "zb-h1 on 4": (4, {"mesh": {"pp": 4}, "schedule": "zb-h1", "microbatches": 4}),
    "zb-v on 4": (4, {"mesh": {"pp": 4}, "schedule": "zb-v", "microbatches": 4}),
    "dualpipe": (2, {"mesh": {"pp": 2}, "schedule": "dualpipe", "microbatches": 4}),
    "fsdp": (4, {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b", "microbatches": 2, "placement": "fsdp"}),
    "zero1": (4, {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b", "microbatches": 2, "placement": "zero1"}),
}


@functools.cache
def planned(place: str, tied: bool = False) -> dict[str, Any]:
    """The program of a place, made once for all ranks and tests."""
    model = net(tied)
    plan = autopart.plan(model, batch(0), capture="direct", **PLACES[place][1])
    return {"plan": autopart.compile(model, plan, batch(0), capture="direct")}


@pytest.mark.parametrize(
    ("place", "optimizer", "bound", "tied"),
    [
        ("zb-h1 on 2", "adamw", BOUND, False),
        ("zb-v on 2", "sgd", BOUND, True),
        ("zb-h1 on 4", "plain sgd", BOUND, True),
        ("zb-v on 4", "adamw", None, False),
        ("fsdp", "adamw", BOUND, True),
        pytest.param("zb-v on 4", "adamw", BOUND, True, marks=pytest.mark.soak),
        pytest.param("dualpipe", "sgd", BOUND, True, marks=pytest.mark.soak),
        pytest.param("zero1", "adamw", BOUND, False, marks=pytest.mark.soak),
    ],
)
def test_trains_as_one_device(place: str, optimizer: str, bound: float | None, tied: bool) -> None:
    pins, expected = planned(place, tied), eager(optimizer, bound, tied)
    found = LocalWorld(PLACES[place][0]).run(lambda rank: trained(pins, optimizer, bound, tied))
    for mine, _ in found:
        assert_same(mine, expected)
    # The first pipeline rank knows nothing of the others: it is wrong wherever they change the step, unless it has the
    # whole model, as with two copies on two ranks. What is right at once is not undone.
    wrong = {3} | ({1, 4} if bound is not None else set())
    assert found[0][1] == [step in wrong and place != "dualpipe" for step in range(STEPS)]
    assert not any(mine[step] for _, mine in found for step in (0, 2))


def test_all_ranks_in_this_process_step_once() -> None:
    expected = eager("adamw", BOUND, True)
    for devices in (1, 2):
        found, undone = trained({"devices": devices, "microbatches": 2}, "adamw", BOUND, True)
        assert_same(found, expected)
        assert undone == [False] * STEPS


def on_processes() -> tuple[Trained, list[bool]]:
    return trained(PLACES["zb-h1 on 2"][1], "adamw", BOUND)


def test_the_same_on_processes() -> None:
    for found, _ in launch(on_processes, 2, timeout=100).values:
        assert_same(found, eager("adamw", BOUND))


def test_a_step_that_is_not_undone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_validation.Before, "restore", lambda self: None)
    pins = planned("zb-h1 on 2")
    for mine, _ in LocalWorld(2).run(lambda rank: trained(pins, "adamw", BOUND)):
        with pytest.raises(AssertionError):
            assert_same(mine, eager("adamw", BOUND))


def test_every_rank_steps_before_the_norm_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    original = clipping.norm_of
    monkeypatch.setattr(clipping, "norm_of", lambda pairs: events.append("norm") or original(pairs))

    pins = planned("zb-h1 on 2")

    def body(rank: int) -> None:
        model = autopart.parallelize(net(), capture="direct", verify=False, **pins)
        optimizer = torch.optim.SGD(moving(model), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: events.append("step"))
        step = autopart.post_validated(optimizer, model, max_norm=BOUND)
        step(*batch(0))

    LocalWorld(2).run(body)
    assert events == ["step", "step", "norm", "norm"]


def test_a_call_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(pairs: Any) -> torch.Tensor:
        raise RuntimeError("the network is gone")

    pins = planned("zb-h1 on 2")

    def body(rank: int) -> None:
        model = autopart.parallelize(net(), capture="direct", verify=False, **pins)
        optimizer = torch.optim.AdamW(moving(model), lr=1e-2)
        step = autopart.post_validated(optimizer, model, max_norm=BOUND)
        step(*batch(0))
        parts = [p for p in moving(model) if p.requires_grad]
        before = [(p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in parts]
        monkeypatch.setattr(clipping, "norm_of", failing)
        with pytest.raises(RuntimeError, match="the network is gone"):
            step(*batch(2))
        for parameter, (value, state) in zip(parts, before, strict=True):
            assert torch.equal(parameter, value) and parameter.grad is None
            assert optimizer.state[parameter].keys() == state.keys()
            assert all(torch.equal(optimizer.state[parameter][key], kept) for key, kept in state.items())

    LocalWorld(2).run(body)


class Outputs(nn.Module):
    """Returns outputs, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def outputs(**options: Any) -> Any:
    torch.manual_seed(0)
    return autopart.parallelize(Outputs().double(), devices=2, capture="direct", verify=False, **options)


def test_a_loss_function() -> None:
    model, plain = outputs(loss_fn=nn.functional.mse_loss), Outputs().double()
    plain.load_state_dict(model.full_state_dict())
    step = autopart.post_validated(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y, _ = batch(0)
    loss = nn.functional.mse_loss(plain(x), y)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert step.train_step((x,), target=y).item() == pytest.approx(loss.item(), rel=1e-9)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


class Together(torch.optim.SGD):
    """Overrides `step`, so it may look at everything."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_is_refused_at_once() -> None:
    model = outputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer: expected a torch.optim.Optimizer, not str"):
        autopart.post_validated("adamw", model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: expected a module that autopart.parallelize made, not Outputs"):
        autopart.post_validated(optimizer, Outputs())
    for bad in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="max_norm must be a number above 0, or None"):
            autopart.post_validated(optimizer, model, max_norm=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LBFGS\.step needs a closure"):
        autopart.post_validated(torch.optim.LBFGS(model.parameters()), model)


def test_calls_that_are_refused_change_nothing() -> None:
    model = outputs()
    step = autopart.post_validated(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="this call returns none; return it, or give parallelize"):
        step(batch(0)[0])
    model = autopart.parallelize(net(), devices=2, capture="direct", verify=False)
    step = autopart.post_validated(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), pytest.raises(ValueError, match="this call trains nothing"):
        step(*batch(0))
    x, y, extra = batch(0)
    with pytest.raises(ValueError, match=r"input args\[0\] requires grad, but gradients go to parameters alone"):
        step(x.requires_grad_(), y, extra)
    model(*batch(0)).backward()
    with pytest.raises(ValueError, match=r"layers.0.weight has a gradient of an earlier call"):
        step(*batch(0))
    model.zero_grad()
    with model.no_sync():
        model(*batch(0)).backward()
    with pytest.raises(ValueError, match="has a gradient of an earlier call"):
        step(*batch(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_optimizer_that_needs_more_than_a_rank_has() -> None:
    pins = planned("zb-h1 on 2")

    def body(rank: int) -> None:
        model = autopart.parallelize(net(), capture="direct", verify=False, **pins)
        before = model.local_state_dict()["layers.0.weight"].clone()
        step = autopart.post_validated(Together(moving(model), lr=0.1), model)
        with pytest.raises(ValueError, match="optimizer: Together may look at more than single elements"):
            step(*batch(0))
        assert rank or torch.equal(model.local_state_dict()["layers.0.weight"], before)

    LocalWorld(2).run(body)
