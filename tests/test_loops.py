"""Training loops on parts: each line of an ordinary loop gives what it gives on one device, or is stopped.

Every test runs the same loop on a plain module and on a parallelised one, in float64, and compares raw gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.testing import LocalWorld
from tests.launch import launch


class Net(nn.Module):
    """Three layers; the last bias has one element, so that with two data ranks one of them has no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.down(torch.tanh(self.mid(torch.tanh(self.up(x))))) - y) ** 2).mean()


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.mid(torch.tanh(self.first(x))))).sum(1, keepdim=True) - y).square().mean()


PLACES: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2}},
    "ddp": {"mesh": {"dp": 2}, "placement": "ddp"},
    "zero1": {"mesh": {"dp": 2}, "placement": "zero1"},
    "zero2": {"mesh": {"dp": 2}, "placement": "zero2"},
    "fsdp": {"mesh": {"dp": 2}, "placement": "fsdp"},
}

Loop = Callable[[Any], list[dict[str, torch.Tensor]]]
"""A training loop: given a module, what it saw, by name; a parallelised module and a plain one must see the same."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(6, 4, generator=generator, dtype=torch.float64),
        torch.randn(6, 1, generator=generator, dtype=torch.float64),
    )


def plain(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(5)
    return kind().double()


def parallel(place: str, kind: type[nn.Module] = Net, **pins: Any) -> Any:
    pins = {"capture": "direct", "microbatches": 2, "verify": False, **PLACES[place], **pins}
    return autopart.parallelize(plain(kind), **pins)


def grads(model: Any) -> dict[str, torch.Tensor]:
    """Whole raw gradients."""
    if hasattr(model, "full_grads"):
        return dict(model.full_grads())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for step, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        assert set(mine) == set(reference), step
        for name, value in reference.items():
            a, b = torch.as_tensor(mine[name]).double(), torch.as_tensor(value).double()
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3), (step, name, a, b)


def compare(loop: Loop, place: str, kind: type[nn.Module] = Net, *, whole: bool = False, **pins: Any) -> None:
    """The loop on every rank of a world that holds parts (where `whole`, also in one process) equals REF."""
    expected = loop(plain(kind))
    assert expected
    for found in LocalWorld(2).run(lambda rank: loop(parallel(place, kind, **pins))):
        assert_same(found, expected)
    if whole:
        assert_same(loop(parallel(place, kind, **pins)), expected)


# Clipping


NORMS = {"two": 2.0, "one": 1.0, "three": 3.0, "inf": float("inf")}


@pytest.mark.parametrize(("place", "kind"), [("zero1", Net), ("fsdp", Tied), ("pp", Tied)])
def test_f046_f047_every_way_to_clip(place: str, kind: type[nn.Module]) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        seen = []
        beside = nn.Parameter(torch.ones(3, dtype=torch.float64))
        for step, order in enumerate(NORMS.values()):
            model.zero_grad()
            (model(*batch(step)) * 40 + (beside**2).sum() * 0).backward()
            beside.grad = torch.full((3,), 2.0, dtype=torch.float64)
            biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
            mixed = [*model.parameters(), beside]
            seen.append(
                {
                    "of gradients": torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order),
                    "detached": torch.nn.utils.get_total_norm([p.grad.detach() for p in model.parameters()], order),
                    "of parameters": torch.nn.utils.get_total_norm(list(model.parameters()), order),
                    "biases": torch.nn.utils.clip_grad_norm_(biases, 0.5, order, foreach=True),
                    "mixed": torch.nn.utils.clip_grad_norm_(mixed, 2.0, norm_type=order, error_if_nonfinite=True),
                    "beside": beside.grad.clone(),
                    "generator": torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 1.0, order),
                    "again": torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, foreach=False),
                    "one": torch.nn.utils.clip_grad_norm_(next(iter(model.parameters())), 0.1, order),
                }
            )
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
            seen.append(grads(model))
        return seen

    compare(loop, place, kind)


def test_a_norm_that_is_not_finite_and_orders_that_parts_do_not_have() -> None:
    def body(rank: int) -> None:
        model = parallel("fsdp")
        model(*batch(0)).backward()
        for order in (0, float("-inf")):
            with pytest.raises(ValueError, match="norm_type"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)
        if rank == 1:
            model.up.weight.grad[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="not finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        for order in NORMS.values():
            assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order).isnan()

    LocalWorld(2).run(body)


def test_two_models_in_one_clip() -> None:
    def loop(models: list[Any]) -> list[dict[str, torch.Tensor]]:
        for step, model in enumerate(models):
            model(*batch(step)).backward()
        parameters = [p for model in models for p in model.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        return [{"norm": norm}, *map(grads, models)]

    expected = loop([plain(), plain(Tied)])
    for found in LocalWorld(2).run(lambda rank: loop([parallel("pp"), parallel("fsdp", Tied)])):
        assert_same(found, expected)


# Optimizers


class Signs(torch.optim.Optimizer):
    """A user's optimizer that treats every element alone, which autopart cannot know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad.sign())


class Layerwise(Signs):
    """One that scales each tensor by its norm."""

    autopart_scope = "tensor"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.numel(), "a tensor that this rank does not have is not looked at"
                    parameter.sub_(0.01 * parameter.norm() * parameter.grad / parameter.grad.norm())


class Declared(Signs):
    """The first one, having said so."""

    autopart_scope = "element"


class Averaging(torch.optim.SGD):
    """A known optimizer whose step was overridden."""

    def step(self, closure: Any = None) -> Any:
        total = sum(float(p.grad.sum()) for group in self.param_groups for p in group["params"])
        return None if total > 1e9 else super().step(closure)


class Renamed(torch.optim.AdamW):
    """A known optimizer with other defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02, betas=(0.8, 0.9))


def muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "user": (lambda m: Signs(m.parameters()), "Signs may look at.*Signs.autopart_scope"),
    "declared": (lambda m: Declared(m.parameters()), ""),
    "layerwise": (lambda m: Layerwise(m.parameters()), "Layerwise needs whole"),
    "overridden": (lambda m: Averaging(m.parameters(), lr=0.1), "Averaging may look at"),
    "renamed": (lambda m: Renamed(m.parameters()), ""),
    "muon": (muon, "Muon needs whole tensors, but each rank has a part of"),
    "adafactor": (lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02), "Adafactor needs whole tensors"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1), "LBFGS needs every tensor"),
    "fused": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True), ""),
    "rprop": (lambda m: torch.optim.Rprop(m.parameters()), ""),
}


STEPS = "user-ddp declared-zero1 layerwise-pp renamed-fsdp muon-pp adafactor-pp lbfgs-ddp fused-fsdp rprop-zero1"
STOPS = "user-fsdp user-pp layerwise-fsdp overridden-pp muon-zero1 adafactor-fsdp lbfgs-pp"


@pytest.mark.parametrize("case", [*STEPS.split(), *(f"{case}-stops" for case in STOPS.split())])
def test_an_optimizer_gets_what_it_looks_at_or_stops_before_it_changes_anything(case: str) -> None:
    name, place, *stops = case.split("-")
    make, refused = OPTIMIZERS[name]
    early = place in ("pp", "zero1")  # made before the first call, when the parameters are still whole

    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = make(model) if early else None
        for step in range(2):
            model.zero_grad()
            model(*batch(step)).backward()
            optimizer = optimizer or make(model)

            def closure(step: int = step, model: Any = model) -> torch.Tensor:
                model.zero_grad()
                loss = model(*batch(step))
                loss.backward()
                return loss

            optimizer.step(closure) if name == "lbfgs" else optimizer.step()
        return [grads(model), weights(model)]

    def stopped(rank: int) -> None:
        model = parallel(place)
        model(*batch(0))
        before = weights(model)
        with pytest.raises(ValueError, match=refused):
            loop(model)
        assert_same([weights(model)], [before])

    if stops:
        LocalWorld(2).run(stopped)
    else:
        compare(loop, place)


def test_a_scope_that_is_not_known() -> None:
    model = parallel("pp")
    optimizer = Declared(model.parameters())
    optimizer.autopart_scope = "layer"  # type: ignore[assignment]
    from autopart.runtime.guards import scope

    with pytest.raises(ValueError, match="autopart_scope: 'layer' is not known; one of element, tensor, model"):
        scope(optimizer)


@pytest.mark.parametrize("place", ["pp", "fsdp"])
def test_f068_groups_schedulers_and_lines_that_touch_gradients(place: str) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        decayed = [p for n, p in model.named_parameters() if n == "down.weight"]
        others = [p for n, p in model.named_parameters() if n != "down.weight"]
        groups = [{"params": decayed, "weight_decay": 0.3, "lr": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen = []
        for step in range(3):
            for each in range(2):
                (model(*batch(2 * step + each)) / 2).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            optimizer.step()
            scheduler.step()
            if step == 1:
                for group in optimizer.param_groups:
                    group["lr"] *= 3
            seen += [grads(model), {"lr": torch.tensor([g["lr"] for g in optimizer.param_groups])}]
            optimizer.zero_grad(set_to_none=step != 1)
        counters = {str(i): state["step"] for i, state in optimizer.state_dict()["state"].items()}
        return [*seen, weights(model), counters]

    compare(loop, place, whole=place == "fsdp")


@pytest.mark.parametrize("place", ["pp", "zero1"])
def test_f068_an_optimizer_over_the_head_only_and_a_scheduler_made_late(place: str) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.down.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = None
        for step in range(3):
            model(*batch(step)).backward()
            scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
            optimizer.step()
            scheduler.step()
        return [grads(model), weights(model), {"lr": torch.tensor(scheduler.get_last_lr())}]

    compare(loop, place)


@pytest.mark.parametrize("place", ["pp", "fsdp"])
def test_optimizer_state_loaded_before_the_first_call(place: str) -> None:
    trained = plain()
    before = torch.optim.AdamW(trained.parameters(), lr=0.1)
    for step in range(2):
        before.zero_grad()
        trained(*batch(step)).backward()
        before.step()
    states = copy.deepcopy((trained.state_dict(), before.state_dict()))

    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(copy.deepcopy(states[1]))
        for step in range(2, 4):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        return [grads(model), weights(model)]

    compare(loop, place)


# Loss scaling


@pytest.mark.parametrize(("place", "fused"), [("ddp", False), ("pp", True), ("zero1", True), ("fsdp", False)])
def test_f048_the_stock_scaler_steps_and_skips_everywhere_alike(place: str, fused: bool) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
        seen = []
        for step in range(6):
            scaler.scale(model(*batch(step))).backward()
            if step in (1, 4) and model.down.bias.grad.numel():  # on parts, on one rank only
                model.down.bias.grad[0] = float("inf") if step == 1 else float("nan")
            if step % 2 == 0:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if step != 4:
                    seen += [{"norm": norm}, grads(model)]
            scaler.step(optimizer)
            scaler.update()
            seen += [weights(model), {"scale": torch.tensor(scaler.get_scale())}]
            optimizer.zero_grad()
        return seen

    compare(loop, place)


def test_a_scaler_where_a_rank_has_no_gradient_of_the_optimizers() -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.down.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        for step in range(2):
            scaler.scale(model(*batch(step))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [weights(model), {"scale": torch.tensor(scaler.get_scale())}]

    compare(loop, "pp")


# no_sync


def accumulating(model: Any, sent: list[dict[str, int]] | None = None) -> list[dict[str, torch.Tensor]]:
    """Three calls a step, of which the first two reduce nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(2):
        for each in range(3):
            inside = each < 2 and hasattr(model, "no_sync")
            with model.no_sync() if inside else contextlib.nullcontext():
                loss = model(*batch(3 * step + each))
                (loss / (each + 1)).backward()
            if sent is not None:
                sent.append(dict(model.report().bytes_sent))
        seen.append(grads(model))
        seen.append({"norm": torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)})
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, weights(model)]


@pytest.mark.parametrize(("place", "kind"), [("pp", Tied), ("ddp", Net), ("zero1", Tied), ("fsdp", Tied)])
def test_no_sync_equals_one_device_and_reduces_once(place: str, kind: type[nn.Module]) -> None:
    expected = accumulating(plain(kind))

    def body(rank: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, int]], dict[str, int]]:
        sent: list[dict[str, int]] = []
        found = accumulating(parallel(place, kind), sent)
        model = parallel("zero1" if place in ("zero2", "fsdp") else place, kind)
        model(*batch(0))
        return found, sent, dict(model.report().bytes_sent)

    loss = 8 * 2 * 1 // 2  # the loss itself is summed over two ranks
    in_one_process = [body(0)] if place == "fsdp" else []
    for found, sent, ordinary in [*LocalWorld(2).run(body), *in_one_process]:
        assert_same(found, expected)
        assert len(sent) == 6
        for k, bytes_sent in enumerate(sent):
            reduced = bytes_sent["all_reduce"] - loss + bytes_sent["reduce_scatter"]
            once = ordinary["all_reduce"] - loss + ordinary["reduce_scatter"]  # zero2 and fsdp too: not per microbatch
            assert reduced == (once if k % 3 == 2 else 0)


def test_two_axes_and_a_loss_added_up_over_calls() -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            first = model(*batch(0))
            (first * 0.3).backward()
            second = model(*batch(1))
        (second + 2 * model(*batch(2))).backward()
        return [grads(model)]

    pins = {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 1, "capture": "direct", "verify": False}

    def body(rank: int) -> Any:
        model = autopart.parallelize(plain(), **pins)
        with pytest.raises(RuntimeError, match=r"get_total_norm: gradients of .* are not reduced yet"):
            loop(model)  # the engine delivers the call made last first, so `second` still waits after it
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        model(*batch(3)).backward()
        return [grads(model)]

    reference = plain()
    loop(reference)
    reference(*batch(3)).backward()
    for found in LocalWorld(4).run(body):
        assert_same(found, [grads(reference)])


WAITING: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "step": (lambda m, o, s: o.step(), "SGD.step: gradients of up.weight made under no_sync"),
    "clip": (lambda m, o, s: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), "clip_grad_norm_: gradients of"),
    "scaler": (lambda m, o, s: s.unscale_(o), "GradScaler: gradients of up.weight"),
    "changed": (lambda m, o, s: (m.up.weight.grad.mul_(2), m(*batch(1)).backward()), "gradient of up.weight was chang"),
    "zeroed": (lambda m, o, s: (o.zero_grad(set_to_none=False), m(*batch(1)).backward()), "was changed while"),
}


def test_lines_that_gradients_which_wait_would_make_wrong() -> None:
    reference = plain()
    reference(*batch(1)).backward()

    def body(rank: int) -> None:
        model = parallel("fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for line, message in WAITING.values():
            with model.no_sync():
                scaler.scale(model(*batch(0))).backward()
            with pytest.raises(RuntimeError, match=message):
                line(model, optimizer, scaler)
            model.zero_grad()  # drops what waits, as on one device
            model(*batch(1)).backward()
            assert_same([grads(model)], [grads(reference)])
            model.zero_grad()
        model(*batch(1)).backward()
        optimizer.step()

    LocalWorld(2).run(body)
    body(0)


def test_ranks_that_disagree_on_no_sync() -> None:
    def body(rank: int) -> None:
        model = parallel("ddp")
        with model.no_sync() if rank else contextlib.nullcontext(), pytest.raises(ValueError, match=r"use of no_sync"):
            model(*batch(0))

    LocalWorld(2).run(body)


def test_lengths_that_differ_within_an_accumulation_and_a_copy_in_the_middle() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).square().mean()

    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        data = [torch.randn(4, n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (2, 3, 2)]
        for k, x in enumerate(data):
            with model.no_sync() if k < 2 and hasattr(model, "no_sync") else contextlib.nullcontext():
                model(x).backward()
        twin = copy.deepcopy(model)
        twin(data[0]).backward()
        return [grads(model), grads(twin)]

    compare(loop, "zero1", Words, whole=True)


# Two models, averages of weights, reparametrisation


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-(2 * y - 1) * self.head(torch.tanh(self.body(x)))).mean()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> Any:
        made = self.second(torch.tanh(self.first(z)))
        return {"loss": (made.sum(1, keepdim=True) - y).square().mean(), "made": made}


@pytest.mark.parametrize("place", ["pp", "fsdp"])
def test_two_models_with_two_optimizers(place: str) -> None:
    def loop(models: list[Any]) -> list[dict[str, torch.Tensor]]:
        score, generator = models
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.05, betas=(0.5, 0.9)) for m in models]
        seen = []
        for step in range(4):
            z, y = batch(step)
            generator.eval()
            with torch.no_grad():
                fake = generator(z, y)["made"]
            generator.train()
            half = torch.cat([fake, z]), torch.cat([torch.zeros_like(y), torch.ones_like(y)])
            score(*half).backward()
            optimizers[0].step()
            generator(z, y)["loss"].backward()
            optimizers[1].step()
            seen += [grads(score), grads(generator)]
            optimizers[0].zero_grad(), optimizers[1].zero_grad()
        return [*seen, weights(score), weights(generator)]

    expected = loop([plain(Score), plain(Generator)])
    for found in LocalWorld(2).run(lambda rank: loop([parallel(place, Score), parallel(place, Generator)])):
        assert_same(found, expected)


@pytest.mark.parametrize(("place", "early"), [("pp", True), ("zero1", True), ("fsdp", True), ("fsdp", False)])
def test_f114_averages_of_weights_made_before_and_after_the_first_call(place: str, early: bool) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averages: list[Any] = []
        for step in range(4):
            if step == (0 if early else 1):
                averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
                averages[1].requires_grad_(False)
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
            for average in averages:
                average.update_parameters(model)
        with torch.no_grad():
            losses = {str(i): average(*batch(9)) for i, average in enumerate(averages)}
        states = [{k: v.clone() for k, v in average.state_dict().items()} for average in averages]
        return [losses, *(weights(average.module) for average in averages), *states, weights(model)]

    compare(loop, place)


class Reparametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.b = nn.utils.parametrizations.orthogonal(nn.Linear(6, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.tanh(self.a(x))) - y).square().mean()


@pytest.mark.parametrize("place", ["ddp", "pp"])
def test_f115_parametrizations(place: str) -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        return [grads(model), weights(model)]

    compare(loop, place, Reparametrised)


@pytest.mark.parametrize("policy", ["refuse", "ignore"])
def test_f115_weights_computed_in_hooks_are_refused_whatever_the_policy(policy: str) -> None:
    model = plain()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.up)
    model = autopart.parallelize(model, capture="direct", hooks=policy)
    with pytest.raises(autopart.CaptureError, match=r"up: WeightNorm .*parametrizations"):
        model(*batch(0))


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f115_sparse_gradients_are_refused_by_name(capture: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.fc(self.emb(ids)).square().mean()

    model = autopart.parallelize(Words(), mesh={"dp": 2}, capture=capture)
    with pytest.raises(autopart.CaptureError, match=r"test_loops.py:\d+.*gradient of parameter emb.weight is sparse"):
        model(torch.arange(6))
    assert all(p.grad is None for p in model.parameters())


# Hooks


def test_root_hooks_run_once_a_call_with_what_one_device_gives_them() -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        seen: list[dict[str, torch.Tensor]] = []
        model.register_forward_pre_hook(lambda m, args: (args[0] * 2, args[1]))
        model.register_forward_hook(lambda m, args, out: (seen.append({"x": args[0], "out": out.detach()}), out * 3)[1])
        model.register_full_backward_pre_hook(lambda m, g: (seen.append({"pre": g[0]}), (g[0] * 0.5,))[1])
        model.register_full_backward_hook(lambda m, gi, go: seen.append({"full": go[0]}))
        for step in range(2):
            (model(*batch(step)) * 5).backward()
        return [*seen, grads(model)]

    compare(loop, "fsdp", whole=True)


def test_hooks_that_would_not_run_are_refused_and_can_be_ignored() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    def on(model: Any, what: str) -> Any:
        def never(*_: Any) -> None:
            raise AssertionError("ignored hooks do not run")

        match what:
            case "submodule":
                return model.mid.register_full_backward_hook(never)
            case "parameter":
                return model.mid.weight.register_hook(never)
            case "accumulated":
                return model.mid.weight.register_post_accumulate_grad_hook(never)
            case _:
                return register_module_forward_hook(lambda m, *_: never() if m is model.mid else None)

    for what, name in {"submodule": "mid has hooks", "parameter": "mid.weight", "accumulated": "mid.weight"}.items():
        model = parallel("pp")
        on(model, what)
        with pytest.raises(autopart.CaptureError, match=f"{name}.*hooks='ignore'"):
            model(*batch(0))
    for what in ("submodule", "parameter", "accumulated", "all modules"):
        model, reference = parallel("pp", hooks="ignore"), plain()
        handle = on(model, what)
        try:
            model(*batch(0)).backward()
            if what == "all modules":
                with pytest.raises(autopart.CaptureError, match="hooks on all modules"):
                    parallel("pp")(*batch(0))
        finally:
            handle.remove()
        reference(*batch(0)).backward()
        assert_same([grads(model)], [grads(reference)])


def test_root_hooks_do_not_go_with_train_step() -> None:
    model = autopart.parallelize(nn.Linear(4, 1), capture="direct", loss_fn=nn.functional.mse_loss)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(autopart.CaptureError, match="train_step"):
        model.train_step((torch.ones(2, 4),), target=torch.ones(2, 1))
    handle.remove()
    model.train_step((torch.ones(2, 4),), target=torch.ones(2, 1)).backward()


# Autocast


class Casting(nn.Module):
    """One that casts by itself beside the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = torch.tanh(self.up(x))
        with torch.autocast("cpu", enabled=False):
            out = self.down(hidden.float())
        return {"loss": (out - y).square().mean(), "hidden": hidden}


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f050_the_callers_autocast_is_honoured_at_each_call(capture: str) -> None:
    reference = plain(Casting).float()
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    model = autopart.parallelize(copy.deepcopy(reference), mesh={"pp": 2}, microbatches=2, capture=capture)
    losses = []
    for enabled, dtype in ((False, None), (True, torch.bfloat16), (True, torch.float16), (False, None)):
        for each in (model, reference):
            each.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                found = each(x, y)
            found["loss"].backward()
            losses.append(found["loss"].detach())
            assert found["hidden"].dtype == (dtype or torch.float32)
        assert losses[-1].dtype == losses[-2].dtype == torch.float32
        assert torch.allclose(losses[-1], losses[-2], rtol=1e-3 if enabled else 1e-6)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            assert torch.allclose(mine.grad, other.grad, rtol=0, atol=(0.02 if enabled else 1e-6) * other.grad.norm())
    assert torch.equal(losses[0], losses[6]) and not torch.equal(losses[0], losses[2])
    assert len(model._autopart.programs) == 3


# Processes


def on_processes() -> list[dict[str, torch.Tensor]]:
    """The loops above that communicate outside of a call, on one process of several."""
    model = parallel("fsdp", Tied)
    found = accumulating(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(*batch(0))).backward()
    if model.last.bias.grad.numel() and model.program.ranks[0].rank == 0 and torch.distributed.get_rank() == 1:
        model.last.bias.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return [*found, {"scale": torch.tensor(scaler.get_scale())}, weights(model)]


def test_the_same_on_processes() -> None:
    reference = plain(Tied)
    expected = accumulating(reference)
    for found in launch(on_processes, 2, timeout=100).values:
        assert_same(found, [*expected, {"scale": torch.tensor(128.0)}, weights(reference)])


class Outputs(nn.Module):
    """A model that leaves the loss to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_no_sync_without_a_loss() -> None:
    def loop(model: Any) -> list[dict[str, torch.Tensor]]:
        for step in range(2):
            x, y = batch(step)
            with model.no_sync() if step == 0 and hasattr(model, "no_sync") else contextlib.nullcontext():
                ((model(x) - y) ** 2).mean().backward()
        return [grads(model)]

    compare(loop, "fsdp", Outputs, whole=True)


def test_no_sync_where_a_shared_weight_is_reduced_over_both_axes() -> None:
    pins: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}
    expected = accumulating(plain(Tied))
    for found in LocalWorld(4).run(
        lambda rank: accumulating(autopart.parallelize(plain(Tied), capture="direct", verify=False, **pins))
    ):
        assert_same(found, expected)
