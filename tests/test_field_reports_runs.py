"""What users of other systems reported, row by row: about plans, loops and processes, each test named after its row."""

from __future__ import annotations

import copy
import os
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.capture import capture, read
from autopart.ir.placement import Shard
from autopart.ir.segmented import Segmented
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from autopart.runtime.executor import Loaded
from autopart.runtime.local import current_transport
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import compare, train
from tests.launch import launch
from tests.models import GPT
from tests.tensor_axis import CHEAP

PP2: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 2}


def parallel(plain: nn.Module, **pins: Any) -> Any:
    """A parallelised copy."""
    return autopart.parallelize(copy.deepcopy(plain), **{"capture": "direct", **pins})


class Layers(nn.Module):
    """Linear layers in a row."""

    def __init__(self, count: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def same_gradients(model: Any, plain: nn.Module) -> None:
    """Equal raw gradients, None where the plain module has none."""
    found = model.full_grads()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-14)


# ---- tied weights ----------------------------------------------------------------------------------------------------


def in_parts(rank: int, plain: nn.Module, x: torch.Tensor, pins: dict[str, Any]) -> tuple[Any, ...]:
    """What a rank holds of the parameters, what the plan says of it, and what three steps make of them."""
    model = parallel(plain, **pins)
    trajectory = train(model, lambda step: ((x,), {}), 3, lambda p: torch.optim.SGD(p, lr=0.1), 10.0)
    stage = next(number for number, stage in enumerate(model.plan.stages) if rank in stage.ranks)
    storages = {p.untyped_storage().data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return trajectory, sum(storages.values()), model.plan.prediction.memory[stage].parameters


TIES: dict[str, tuple[int, int, dict[str, Any], tuple[int, int]]] = {
    "on one stage": (3, 1, {"stages": ["layers.2"]}, (1, 1)),
    "on two ranks": (3, 2, {"stages": ["layers.2"]}, (2, 1)),
    "on the ends of a V": (4, 3, {"schedule": "v1f1b", "stages": [f"layers.{i}" for i in (1, 2, 3)]}, (1, 2)),
}
"""How many layers there are, which one has the weight of the first, the pins, and the weights that each rank holds."""


@pytest.mark.parametrize("tie", TIES)
def test_f002_a_tied_weight_is_one_where_its_uses_are_on_one_rank(tie: str) -> None:
    torch.manual_seed(0)
    count, last, pins, weights = TIES[tie]
    plain, x = Layers(count).double(), torch.randn(6, 8).double()
    plain.layers[last].weight = plain.layers[0].weight
    expected = train(copy.deepcopy(plain), lambda step: ((x,), {}), 3, lambda p: torch.optim.SGD(p, lr=0.1), 10.0)
    every = LocalWorld(2).run(in_parts, plain, x, {**PP2, **pins})
    for found, held, predicted in every:
        compare(found, expected, 1e-9, "tied")
        assert held == predicted
    weight, bias = 8 * 8 * 8, 8 * 8
    biases = (2, count - 2)
    assert [held for _, held, _ in every] == [w * weight + b * bias for w, b in zip(weights, biases, strict=True)]


@pytest.mark.parametrize("tied", [False, True])
def test_f003_ties_are_decided_by_identity_not_by_value(tied: bool) -> None:
    plain, x = Layers(2).double(), torch.randn(6, 8).double()
    if tied:
        plain.layers[1].weight = plain.layers[0].weight
    else:
        plain.layers[1].load_state_dict(plain.layers[0].state_dict())
    model = parallel(plain, **PP2)
    for each in (model, plain):
        each(x).backward()
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    first, second = (model.full_state_dict()[f"layers.{i}.weight"] for i in (0, 1))
    assert torch.equal(first, second) == tied
    for found, layer in ((first, plain.layers[0]), (second, plain.layers[1])):
        torch.testing.assert_close(found, layer.weight.detach(), rtol=1e-12, atol=0)


# ---- sizes that do not divide ----------------------------------------------------------------------------------------


def test_f016_a_batch_that_microbatches_do_not_divide() -> None:
    plain = Layers()
    assert_parity(plain, (torch.randn(8, 8),), mesh={"pp": 3}, microbatches=3)
    before = copy.deepcopy(plain.state_dict())
    model = parallel(plain, mesh={"pp": 2}, microbatches=4)
    with pytest.raises(ValueError, match="a batch of 2 over dp=1 allows at most 2, not 4"):
        model(torch.randn(2, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Words(nn.Module):
    """A vocabulary of 13, and a head over it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embed(ids))), labels)


ROWS = {f"{name}.weight": {"tp": Shard(0)} for name in ("embed", "head")}


@pytest.mark.parametrize(
    "pins", [{"mesh": {"dp": 4}, "placement": "fsdp"}, {"mesh": {"tp": 4}, "placement": ROWS}], ids=["dp4", "tp4"]
)
def test_f018_a_vocabulary_that_the_ranks_do_not_divide(pins: dict[str, Any]) -> None:
    """Rows of 13 over four ranks: 4, 3, 3, 3; the last token is used."""
    ids, labels = torch.tensor([12, 0, 5, 12, 7, 3, 9, 11]), torch.tensor([0, 12, 12, 4, 3, 8, 1, 12])
    assert_parity(Words(), (ids, labels), microbatches=1, **pins)


# ---- skips -----------------------------------------------------------------------------------------------------------


class LongSkip(nn.Module):
    """What the first layer makes is read by the last one only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:3]:
            h = torch.tanh(layer(h))
        return (self.layers[3](h) * first).square().mean()


@pytest.mark.parametrize(("ranks", "schedule"), [(4, "1f1b"), (2, "interleaved")])
def test_f021_a_skip_over_several_stages(ranks: int, schedule: str) -> None:
    """Also with two stages a rank, dealt out in turn: from the first of them to the last."""
    pins: dict[str, Any] = {"mesh": {"pp": ranks}, "microbatches": 4, "schedule": schedule}
    plain, x = LongSkip().double(), torch.randn(6, 6).double()
    assert_parity(plain, (x,), stages=[f"layers.{i}" for i in (1, 2, 3)], steps=2, **pins)


# ---- accumulation ----------------------------------------------------------------------------------------------------


def test_f040_several_calls_before_a_step_add_up_unscaled() -> None:
    plain = Layers().double()
    model = parallel(plain, mesh={"pp": 2}, microbatches=4, schedule="1f1b")
    data = [torch.randn(8, 8).double() for _ in range(3)]
    for x in data:
        for each in (model, plain):
            each(x).backward()
    same_gradients(model, plain)
    for each in (model, plain):
        each.zero_grad()
    for _ in range(3):
        model(data[0]).backward()
    (plain(data[0]) * 3).backward()
    same_gradients(model, plain)


# ---- frozen parameters -----------------------------------------------------------------------------------------------

PATTERNS = {
    "all": lambda name: True,
    "norms": lambda name: "norm" in name and name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "none but the table": lambda name: name == "wte.weight",
}


FROZEN_ON: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "dp2": {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 2},
    "tp2": {"mesh": {"tp": 2}, "cluster": CHEAP, "microbatches": 1},
}


@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        pytest.param("all", "pp2", marks=pytest.mark.soak),
        ("norms", "tp2"),
        ("biases", "tp2"),
        ("none but the table", "dp2"),
    ],
)
def test_f054_every_pattern_of_frozen_parameters(pattern: str, where: str) -> None:
    plain, ids = GPT(2, 8, 2, skips=False, tied=False), torch.randint(0, 32, (4, 5))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(PATTERNS[pattern](name))
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    assert_parity(plain, (ids, ids.flip(0)), steps=1, optimizer=sgd, **FROZEN_ON[where])


# ---- names -----------------------------------------------------------------------------------------------------------


def named(rank: int, plain: nn.Module, x: torch.Tensor) -> tuple[list[str], Any, Any]:
    model = parallel(plain, mesh={"pp": 3}, microbatches=1)
    model(x)
    here = [name for name, tensor in model.local_state_dict().items() if tensor.numel()]
    whole = model.state_dict()
    torch.manual_seed(1)
    other = Layers(12, 4).double().state_dict()
    loaded = model.load_state_dict(other, strict=True)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    return here, whole, loaded


def test_f057_stages_keep_the_names_of_the_module() -> None:
    plain, x = Layers(12, 4).double(), torch.randn(3, 4).double()
    every = LocalWorld(3).run(named, plain, x)
    held = [name for here, _, _ in every for name in here]
    assert sorted(held) == sorted(plain.state_dict()) and all(here for here, _, _ in every)
    for _, whole, loaded in every:
        assert not loaded.missing_keys and not loaded.unexpected_keys
        assert list(whole) == list(plain.state_dict())
        Layers(12, 4).double().load_state_dict(whole, strict=True)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in whole.items())


# ---- capture ---------------------------------------------------------------------------------------------------------


class Constants(nn.Module):
    """A tensor in a plain attribute, and tensors made in forward; with `branch`, a condition on data."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.branch = nn.Linear(4, 4), nn.Linear(4, 4), branch
        self.shift = torch.linspace(0, 1, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.shift
        if self.branch and h.sum() > 0:  # here
            h = -h
        return (self.second(torch.tanh(h)) * torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=x.dtype)).square().mean()


def branching(rank: int, capture: str) -> str:
    model = parallel(Constants(True).double(), capture=capture, mesh={"dp": 2})
    with pytest.raises(autopart.CaptureError) as caught:
        model(torch.ones(4, 4).double())
    return str(caught.value)


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f084_a_condition_on_data_names_the_line_on_every_rank_and_constants_are_captured(capture: str) -> None:
    with open(__file__) as file:
        line = 1 + [line.endswith("  # here\n") for line in file].index(True)
    one, two = LocalWorld(2).run(branching, capture)
    assert one == two and f"test_field_reports_runs.py:{line}" in one and len(one.splitlines()) < 20
    assert_parity(Constants(), (torch.randn(6, 4),), capture=capture, steps=1, **PP2)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_f089_hooks_see_a_fresh_input_at_each_call_or_are_refused() -> None:
    """A hook on a submodule, which would fire for each microbatch, is refused; one on the root fires once a call."""
    plain = Layers().double()
    model = parallel(plain, mesh={"pp": 2}, microbatches=6, schedule="1f1b")
    fired: dict[str, list[torch.Tensor]] = {"model": [], "plain": []}
    for name, each in (("model", model), ("plain", plain)):

        def watch(module: nn.Module, args: tuple[torch.Tensor], name: str = name) -> None:
            args[0].register_hook(fired[name].append)

        each.register_forward_pre_hook(watch)
    for step in range(5):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double()
        for each in (model, plain):
            each(x.clone().requires_grad_()).backward()
        same_gradients(model, plain)
    assert len(fired["model"]) == len(fired["plain"]) == 5
    for mine, other in zip(fired["model"], fired["plain"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-14)
    model.layers[1].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(autopart.CaptureError, match=r"layers\.1 has hooks"):
        model(torch.randn(6, 8).double().requires_grad_())


# ---- compile time and memory, as counts ------------------------------------------------------------------------------


def segmented(layers: int) -> Segmented:
    model, x = Layers(layers), torch.zeros(2, 8)
    return segment(normalise(capture(model, read(model, (x,)), route="direct")))


def test_f099_repeated_layers_are_recognised_and_a_second_run_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are planned, printed and compiled once each; neither they nor the texts grow with depth."""
    few, many = segmented(4), segmented(32)
    assert len(many.segments) == len(few.segments) + 28 and len(many.bodies) == len(few.bodies)
    texts = []
    for layers in (6, 12):
        model = parallel(Layers(layers), mesh={"pp": 2}, microbatches=2)
        model(torch.ones(4, 8)).backward()
        texts.append(model.program.ranks[0].source)
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())
    calls: list[str] = []
    for name in ("autopart.api.compiler.planned", "autopart.api.compiler.lower", "autopart.capture.capture_again"):
        monkeypatch.setattr(name, lambda *args, name=name, **kwargs: calls.append(name))
    model(torch.zeros(4, 8)).backward()
    assert not calls


def stage_memory(rank: int, layers: int, schedule: str) -> tuple[Any, ...]:
    model = parallel(Layers(layers), mesh={"pp": 4}, microbatches=8, schedule=schedule)
    model(torch.ones(8, 8)).backward()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return model.plan, held, model.report().ranks[0], [name for name, p in model.named_parameters() if p.numel()]


@pytest.mark.parametrize(("layers", "schedule"), [(7, "1f1b"), (8, "gpipe")])
def test_f102_memory_is_that_of_each_stage_and_every_layer_is_placed_once(layers: int, schedule: str) -> None:
    found = LocalWorld(4).run(stage_memory, layers, schedule)
    plan = found[0][0]
    placed = [name for stage in plan.stages for name in stage.segments]
    assert [name for name in placed if name.startswith("layers.")] == [f"layers.{i}" for i in range(layers)]
    names = [name for _, _, _, here in found for name in here]
    assert sorted(names) == sorted(name for name, _ in Layers(layers).named_parameters())
    for rank, (_, held, report, _) in enumerate(found):
        memory = plan.prediction.memory[rank]
        assert held == memory.parameters
        assert report.peak_activations == memory.activations == report.predicted_activations
    peaks = [memory.activations for memory in plan.prediction.memory]
    assert schedule != "1f1b" or peaks[1] > peaks[2], "earlier stages hold more microbatches"


def preparing(rank: int, events: list[tuple[int, str]]) -> None:
    transport = current_transport()
    assert transport is not None
    received = transport.begin_recv

    def begin_recv(*args: Any) -> Any:
        events.append((rank, "input"))
        return received(*args)

    transport.begin_recv = begin_recv  # type: ignore[method-assign]
    parallel(Layers(4).double(), mesh={"pp": 4}, microbatches=2)(torch.ones(4, 8).double()).backward()


def test_f108_every_stage_is_prepared_before_it_waits_for_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compiles its own text, once, and has done so when its first input comes; nothing is left for later."""
    events: list[tuple[int, str]] = []
    prepared = Loaded.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, program: Any, rank: int, device: torch.device) -> Any:
        events.append((rank, "prepared"))
        return prepared(cls, program, rank, device)

    monkeypatch.setattr(Loaded, "of", classmethod(of))
    LocalWorld(4).run(preparing, events)
    for rank in range(4):
        mine = [what for other, what in events if other == rank]
        assert mine[0] == "prepared" and mine.count("prepared") == 1 and mine.count("input") >= 2


# ---- the module stays itself -----------------------------------------------------------------------------------------


class Configured(Layers):
    """What a library adds to its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.config["width"]

    @property
    def missing(self) -> Any:
        raise LookupError("no such thing")

    @property
    def broken(self) -> Any:
        return self.config.no_such_thing


def test_f112_methods_attributes_and_properties_stay() -> None:
    plain, x = Configured().double(), torch.randn(4, 8).double()
    model = parallel(plain, **PP2)
    for _ in range(2):
        assert isinstance(model, Configured) and model.config == {"width": 8}
        assert torch.equal(model.encode(x), plain.encode(x))
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        with pytest.raises(AttributeError) as expected:
            _ = plain.broken
        with pytest.raises(AttributeError) as found:
            _ = model.broken
        assert str(found.value) == str(expected.value)
        with pytest.raises(LookupError, match="no such thing"):
            _ = model.missing
        model(x).backward()


# ---- processes -------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Three stages; tensors of unlike sizes go from each to the next, one of them `wide` numbers a sample."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.wide = wide
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, total, big = torch.tanh(self.layers[0](x)), x.sum(1), x[:, :1].expand(-1, self.wide)
        for layer in self.layers[1:]:
            big = big * h.mean(1, keepdim=True) + total[:, None]
            h, total = torch.tanh(layer(h)) + big.mean(1, keepdim=True), total + h.sum(1)
        return (h * total[:, None]).square().mean() + big.mean()


def on_processes(wide: int, repeats: int) -> list[Any]:
    """Three processes: a pipeline with pauses at random, then a call that differs between data ranks."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    plain = wide_model(wide)
    model = parallel(plain, mesh={"pp": 3}, microbatches=8, schedule="1f1b", stages=["layers.1", "layers.2"])
    pause, total = random.Random(rank), 0.0
    losses: list[Any] = []
    for step in range(repeats):
        loss = model(wide_input(step))
        if step == 0:
            slowly(model, pause)
        loss.backward()
        total += loss.item()
        losses.append(loss.detach())
    heads = parallel(Choosing().double(), mesh={"dp": 3})
    with pytest.raises(ValueError) as caught:
        heads(torch.ones(6, 4).double(), "b" if rank == 1 else "a")
    return [losses, total, model.full_grads(), str(caught.value)]


def slowly(model: Any, pause: random.Random) -> None:
    """Have this process pause before it sends and receives."""
    transport = model._autopart.transport
    for name in ("send", "recv"):
        method = getattr(transport, name)

        def late(*args: Any, method: Any = method) -> Any:
            time.sleep(pause.random() * 2e-3)
            return method(*args)

        setattr(transport, name, late)


class Choosing(nn.Module):
    """An argument says which head is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return (self.a if head == "a" else self.b)(x).square().mean()


def wide_model(wide: int) -> Wide:
    torch.manual_seed(0)
    return Wide(wide).double()


def wide_input(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()


@pytest.mark.parametrize(
    ("wide", "repeats"), [(20_000, 20), pytest.param(8_000_000, 2, marks=pytest.mark.soak)], ids=["small", "64 MB"]
)
def test_f073_f075_f081_f105_pipelines_on_processes_that_run_unevenly(wide: int, repeats: int) -> None:
    """Many and large messages, pauses at random: the same loss on every rank, no deadlock; other calls are refused."""
    plain, losses = wide_model(wide), []
    for step in range(repeats):
        loss = plain(wide_input(step))
        loss.backward()
        losses.append(loss.detach())
    for found, total, grads, message in launch(on_processes, 3, [wide, repeats], timeout=110).values:
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)
        assert total == pytest.approx(sum(float(loss) for loss in losses), rel=1e-9)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
        assert "rank 1 and rank 0 differ in the value of head ('b' and 'a')" in message
