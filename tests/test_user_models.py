"""Models and loops as people bring them, unlike those that the compiler was built with: each equals one device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.testing import LocalWorld, assert_parity

MESHES: dict[str, dict[str, Any]] = {
    "pp2": {"mesh": {"pp": 2}, "microbatches": 3, "devices": 2},
    "dp3 fsdp": {"mesh": {"dp": 3}, "placement": "fsdp", "microbatches": 1, "devices": 3},
    "pp2 dp2 zero1": {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1", "microbatches": 2, "devices": 4},
}
WORLDS: list[dict[str, Any]] = [
    {"mesh": {"pp": 2}, "microbatches": 2},
    {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 1},
    {"mesh": {"dp": 2}, "placement": "zero1", "microbatches": 2},
]


class Autoencoder(nn.Module):
    """Modules with names instead of numbers, sizes that nothing divides, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bottleneck = nn.Linear(3, 5), nn.Linear(5, 1)
        self.decoder, self.head = nn.Linear(1, 5), nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.bottleneck(torch.tanh(self.encoder(x)))
        return F.mse_loss(self.head(F.gelu(self.decoder(code))) * self.temperature.exp(), x) + 0.01 * code.pow(2).mean()


class Nested(nn.Module):
    """Nested tuples and a dict in, a loss in a tuple with nested outputs out, a parameter and a layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)
        self.never, self.extra = nn.Linear(4, 4), nn.Parameter(torch.zeros(3))

    def forward(self, data: Any, options: dict[str, float]) -> Any:
        (x, (y,)), target = data
        hidden = torch.tanh(self.left(x) + self.right(y) * options["scale"])
        out = self.out(hidden)
        return F.mse_loss(out, target), (out, {"hidden": hidden, "numbers": [3, None]})


class Heads(nn.Module):
    """Several losses in a dict, two of them for show."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.classes, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, label: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        first, second = F.cross_entropy(self.classes(h), label), F.l1_loss(self.value(h).squeeze(-1), y)
        return {"loss": first + 0.3 * second, "class": first, "regress": second}


class Shared(nn.Module):
    """One layer and one norm used twice, across a stage boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mid, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.tanh(self.lin(x)))
        h = self.norm(torch.tanh(self.mid(h)))
        return self.lin(h).pow(2).mean()


class Containers(nn.Module):
    """A ParameterList and a ParameterDict, buffers read in forward (one not persistent), a tensor as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(5, 5), nn.Linear(5, 2)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(5, 5) * 0.4) for _ in range(2)])
        self.affine = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(5)), "gain": nn.Parameter(torch.ones(5))})
        self.register_buffer("table", torch.randn(10, 5))
        self.register_buffer("divisor", torch.tensor(2.0), persistent=False)
        self.shift = torch.arange(2) * 0.1

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x) + self.table[index]
        for weight in self.weights:
            x = torch.sin(x @ weight)
        return ((self.outlet(x * self.affine["gain"] + self.affine["bias"]) + self.shift) / self.divisor).pow(2).mean()


class Tied(nn.Module):
    """A weight tied by using it as a function's argument, and a frozen embedding beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(9, 6), nn.Embedding(3, 6).requires_grad_(False)
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.g(torch.tanh(self.f(self.wte(ids) + self.wpe.weight)))
        return F.cross_entropy(F.linear(h, self.wte.weight).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """A GRU over time and a soft mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.gate = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 2)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.gru(x)[0][:, -1]
        gate = self.gate(h).softmax(-1)
        return F.mse_loss(sum(gate[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts)), y)


class Penalised(nn.Module):
    """A critic whose loss has the norm of its gradient, as of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        score = self.f(leaf)
        (slope,) = torch.autograd.grad(score.sum(), leaf, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()


class TimeFirst(nn.Module):
    """Its first input's batch is at dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.g(torch.tanh(self.f(x)).mean(0)), y)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


MODELS: list[tuple[type[nn.Module], Callable[[], tuple[Any, ...]]]] = [
    (Autoencoder, lambda: (torch.randn(6, 3),)),
    (Nested, lambda: (((torch.randn(6, 4), (torch.randn(6, 3),)), torch.randn(6, 2)), {"scale": 2.5})),
    (Heads, lambda: (torch.randn(6, 4), integers(3, 6), torch.randn(6))),
    (Shared, lambda: (torch.randn(6, 6),)),
    (Containers, lambda: (torch.randn(6, 5), integers(10, 6))),
    (Tied, lambda: (integers(9, 6, 3), integers(9, 6, 3))),
    (Penalised, lambda: (torch.randn(6, 5),)),
    (Recurrent, lambda: (torch.randn(6, 4, 3), torch.randn(6, 2))),
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("model", "args"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_trains_as_on_one_device(
    model: type[nn.Module], args: Callable[[], tuple[Any, ...]], mesh: str
) -> None:
    assert_parity(model(), args(), steps=2, **MESHES[mesh])


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def in_both_worlds(model: type[nn.Module], body: Callable[[Any, Any], Any], **pins: Any) -> None:
    """Run ``body(parallelised, plain)`` in one process with all ranks inside, and as each of two ranks."""
    prototype = model().double()
    for world in WORLDS:

        def once(rank: int, world: dict[str, Any] = world) -> None:
            mine = autopart.parallelize(copy.deepcopy(prototype), capture="direct", **world, **pins)
            body(mine, copy.deepcopy(prototype))

        once(0)
        LocalWorld(2).run(once)


def same_step(model: Any, plain: Any, *args: Any) -> None:
    """The same loss and the same gradients, None where the plain module has none."""
    mine, reference = model(*args), plain(*args)
    mine.backward()
    reference.backward()
    assert close(mine.detach(), reference.detach())
    found, expected = model.full_grads(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    assert all(close(found[name], gradient) for name, gradient in expected.items())


def same_parameters(model: Any, plain: Any) -> None:
    found = model.full_state_dict()
    assert all(close(found[name], value) for name, value in plain.state_dict().items())


def test_parameter_groups_a_scheduler_changing_batch_sizes_and_eval_between_steps() -> None:
    def optimizer(model: Any) -> tuple[Any, Any]:
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        made = torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
        return made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 5)

    def body(model: Any, plain: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        pairs = [optimizer(model), optimizer(plain)]
        for size in (6, 8, 5):
            x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
            same_step(model, plain, x)
            for stepping, scheduler in pairs:
                stepping.step()
                scheduler.step()
                stepping.zero_grad()
            model.eval(), plain.eval()
            with torch.no_grad():
                assert close(model(x[:2]), plain(x[:2]))
            model.train(), plain.train()
        same_parameters(model, plain)

    in_both_worlds(Autoencoder, body)


def test_the_batch_at_dim_1() -> None:
    x, y = torch.randn(3, 6, 4).double(), torch.randn(6, 2).double()
    in_both_worlds(TimeFirst, lambda model, plain: same_step(model, plain, x, y), batch={"x": 1, "y": 0})


def test_loading_and_scaling_in_place_after_the_first_call() -> None:
    x = torch.randn(6, 6).double()

    def body(model: Any, plain: Any) -> None:
        model(x)
        state = {name: value * 1.5 for name, value in plain.state_dict().items()}
        model.load_state_dict(state)
        plain.load_state_dict(state)
        same_step(model, plain, x)
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(0.5)
        model.zero_grad(), plain.zero_grad()
        same_step(model, plain, x)

    in_both_worlds(Shared, body)


def test_a_deep_copy_is_a_model_of_its_own_before_and_after_the_first_call() -> None:
    x = torch.randn(6, 6).double()

    def body(model: Any, plain: Any) -> None:
        for _ in range(2):
            twin, other = copy.deepcopy(model), copy.deepcopy(plain)
            with torch.no_grad():
                for parameter in (*twin.parameters(), *other.parameters()):
                    parameter.mul_(1.1)
            same_step(twin, other, x)
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (twin, other)]
            assert close(*norms)
            same_step(model, plain, x)
            model.zero_grad(), plain.zero_grad()

    in_both_worlds(Shared, body)


def test_f054_requires_grad_changes_between_calls() -> None:
    x = torch.randn(6, 6).double()
    plain = Shared().double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, placement="zero1", capture="direct")
    for trained in (True, False, True):
        for each in (model, plain):
            each.zero_grad()
            each.mid.requires_grad_(trained)
        same_step(model, plain, x)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen": (lambda model: model.mid.requires_grad_(False), "parameter mid.weight does not require grad"),
    "dtype": (lambda model: model.float(), "parameter lin.weight is torch.float32"),
    "replaced": (lambda model: setattr(model, "mid", nn.Linear(6, 6).double()), "parameter mid.weight is another"),
    "added": (lambda model: setattr(model, "more", nn.Linear(6, 6).double()), "parameter more.weight is another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_change_once_parameters_are_parts(change: str) -> None:
    alter, message = CHANGES[change]

    def body(rank: int) -> None:
        model = autopart.parallelize(Shared().double(), mesh={"dp": 2}, placement="zero1", capture="direct")
        model(torch.ones(6, 6).double())
        alter(model)
        with pytest.raises(ValueError, match=message):
            model(torch.ones(6, 6, dtype=model.lin.weight.dtype))

    LocalWorld(2).run(body)


class Knobs(nn.Module):
    """Plain attributes that forward reads, as schedules of a coefficient do, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.act = nn.Linear(4, 4), nn.Tanh()
        self.factor, self.powers, self.seen = 2.0, {"p": [2]}, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act(self.f(x)) * self.factor).abs().pow(self.powers["p"][0]).mean()


@pytest.mark.parametrize("capture", ["compile", "direct"])
def test_a_changed_attribute_is_never_the_old_constant(capture: str) -> None:
    plain, x = Knobs().double(), torch.randn(6, 4).double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=1, capture=capture)
    same_step(model, plain, x)
    changes: list[Callable[[Any], Any]] = [
        lambda m: setattr(m, "factor", 5.0),
        lambda m: m.powers["p"].__setitem__(0, 3),
        lambda m: setattr(m, "act", nn.Sigmoid()),
    ]
    for change in changes:
        for each in (model, plain):
            change(each)
            each.zero_grad()
        same_step(model, plain, x)


def test_an_attribute_that_always_changes_is_named_once() -> None:
    model = autopart.parallelize(Knobs(), capture="direct")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(11):
            model.seen = step
            model(torch.ones(2, 4))
    assert [str(w.message) for w in caught if "programs were compiled for Knobs, as seen keeps" in str(w.message)]
    assert len([w for w in caught if "programs were compiled" in str(w.message)]) == 1


def test_double_after_the_first_backward() -> None:
    plain, x = Autoencoder(), torch.randn(6, 3)
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, placement="fsdp", capture="direct")
    model(x).backward()
    model.double(), plain.double()
    model.zero_grad(set_to_none=False)
    plain(x.double()).backward()
    loss = model(x.double())
    loss.backward()
    assert loss.dtype == torch.float64
    assert all(close(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    plain, x = Autoencoder().to(dtype), torch.randn(6, 3).to(dtype)
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"pp": 2}, microbatches=2, capture="direct")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        losses = [each(x) for each in (model, plain)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0].dtype == losses[1].dtype == dtype
        assert float(losses[0].detach() - losses[1].detach()) == pytest.approx(0, abs=0.05)


def test_a_last_batch_too_small_says_what_to_do_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = autopart.parallelize(Shared(), mesh={"dp": 2}, microbatches=2, capture="direct")
    model(torch.ones(6, 6))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a batch that is refused is not compiled")

    monkeypatch.setattr("autopart.api.compiler.lower", never)
    monkeypatch.setattr("autopart.capture.capture_again", never)
    with pytest.raises(ValueError, match=r"batch: 3 samples .* 4 pieces .*drop_last=True"):
        model(torch.ones(3, 6))
    with pytest.raises(ValueError, match=r"batch: 1 samples .* 4 pieces .*drop_last=True"):
        model(torch.ones(1, 6))
