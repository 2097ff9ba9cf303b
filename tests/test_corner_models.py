"""Small models that once went wrong, each the smallest of its kind: they train as on one device, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.testing import LocalWorld, assert_parity


class Module(nn.Module):
    """A module whose forward is given as a function of itself and the inputs."""

    def __init__(self, parts: dict[str, Any], function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def stack(m: Any, x: torch.Tensor, names: list[str]) -> torch.Tensor:
    for name in names:
        x = m.get_submodule(name)(x)
    return x


def recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return m.out(h).square().mean()


def masked_attention(m: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    gate, t = m.gate(x), m.table(ids)
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    t = m.attention(t, t, t, need_weights=False, attn_mask=mask)[0]
    return m.out(t * gate).pow(2).mean()


def layers(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4) for name in names}


MANY = [f"{i:02d}" for i in range(8, 13)]
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "one gradient for two parameters": lambda: (
        Module({"a": weight(4, 3), "b": weight(4, 3)}, lambda m, x: (x @ (m.a + m.b)).square().sum()),
        (torch.randn(6, 4),),
    ),
    "a gradient that is expanded": lambda: (
        Module({"fc": nn.Linear(4, 4), "w": weight(4)}, lambda m, x: m.fc(x).sum() + m.w.sum()),
        (torch.randn(6, 4),),
    ),
    "a divisor made of a count": lambda: (
        Module(layers("fc"), lambda m, x, w: (m.fc(x) * w).sum() / ((w.sum() + 1) * 2)),
        (torch.randn(6, 4), torch.rand(6, 4)),
    ),
    "a buffer that only the divisor reads": lambda: (
        Module({**layers("fc"), "c": torch.rand(4)}, lambda m, x, w: (m.fc(x) * w).sum() / (w * m.c).sum()),
        (torch.randn(6, 4), torch.rand(6, 4)),
    ),
    "a derived parameter that all layers use": lambda: (
        Module(
            {**layers("a", "b"), "q": weight(4)}, lambda m, x: (m.b(m.a(x) * (m.q + 1)) * (m.q + 1)).square().mean()
        ),
        (torch.randn(6, 4),),
    ),
    "a value of a parameter shared by layers": lambda: (
        Module(
            {"h": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "q": weight(4)},
            lambda m, x: [u := m.q + 1, [x := layer(x) * u for layer in m.h]][1][-1].square().mean(),
        ),
        (torch.randn(6, 4),),
    ),
    "names with zeros in front": lambda: (
        Module({"h": nn.ModuleDict(layers(*MANY))}, lambda m, x: stack(m, x, [f"h.{n}" for n in MANY]).square().mean()),
        (torch.randn(6, 4),),
    ),
    "a layer called stage0": lambda: (
        Module(layers("stage0", "stage1"), lambda m, x: stack(m, x, ["stage0", "stage1"]).square().mean()),
        (torch.randn(6, 4),),
    ),
    "a layer called as a body": lambda: (
        Module(
            {"h": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4)), **layers("h_v2")},
            lambda m, x: m.h_v2(m.h(x)).square().mean(),
        ),
        (torch.randn(6, 4),),
    ),
    "a cell in a loop": lambda: (
        Module({"cell": nn.RNNCell(4, 8), "out": nn.Linear(8, 1)}, recurrent),
        (torch.randn(6, 5, 4),),
    ),
    "convolution": lambda: (
        Module(
            {"conv": nn.Conv2d(1, 3, 3), "out": nn.Linear(12, 2)},
            lambda m, x: m.out(F.relu(m.conv(x)).flatten(1)).square().mean(),
        ),
        (torch.randn(6, 1, 4, 4),),
    ),
    "a mask made in attention": lambda: (
        Module(
            {
                "gate": nn.Linear(3, 4),
                "table": nn.Embedding(5, 4),
                "attention": nn.MultiheadAttention(4, 1, batch_first=True),
                "out": nn.Linear(4, 1),
            },
            masked_attention,
        ),
        (torch.randn(4, 3, 3), torch.randint(0, 5, (4, 3))),
    ),
    "an element of each parameter a rank, for a kernel that takes them for dense": lambda: (
        Module({"fc": nn.Linear(4, 2), "norm": nn.GroupNorm(1, 2)}, lambda m, x: m.norm(m.fc(x)).pow(3).sum()),
        (torch.randn(6, 4),),
    ),
    "squeeze": lambda: (
        Module({"fc": nn.Linear(4, 1)}, lambda m, x, y: (m.fc(x).squeeze() - y).square().mean()),
        (torch.randn(6, 4), torch.randn(6)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 1}], ids=["dp2", "one"])
def test_trains_as_on_one_device(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, args = CASES[name]()
    for placement in ("ddp", "fsdp") if "dp" in mesh else ("ddp",):
        assert_parity(model, args, mesh=mesh, microbatches=2, placement=placement)


def test_a_count_that_is_returned_too() -> None:
    plain = Module(layers("fc"), lambda m, x, w: ((m.fc(x) * w).sum() / w.sum(), w.sum())).double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=2, capture="direct")
    x, w = torch.randn(6, 4).double(), torch.rand(6, 4).double()
    for found, expected in zip(model(x, w), plain(x, w), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("capture", ["direct", "compile"])
@pytest.mark.parametrize("kind", ["number", "list", "buffer"])
def test_a_forward_that_changes_its_module_is_refused(kind: str, capture: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.number, self.list = nn.Linear(4, 4), 0, []
            self.register_buffer("buffer", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "number":
                self.number = self.number + 1
            elif kind == "list":
                self.list.append(x)
            else:
                self.buffer = self.buffer + 1
            return self.fc(x).sum()

    model = autopart.parallelize(Changing(), mesh={"dp": 2}, microbatches=1, capture=capture)
    with pytest.raises(autopart.CaptureError, match=f"changes .*{kind}"):
        model(torch.randn(4, 4))
    assert model.number == 0 and model.list == [] and float(model.buffer) == 0


def test_a_pinned_program_serves_only_calls_like_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, k: float = 1.0) -> torch.Tensor:
            return self.fc(x).square().mean() * k

    plain = Scaled().double()
    x = torch.randn(6, 4).double()
    program = autopart.compile(
        plain, autopart.plan(plain, (x,), mesh={"dp": 2}, capture="direct"), (x,), capture="direct"
    )
    model = autopart.parallelize(copy.deepcopy(plain), plan=program, capture="direct")
    for call in ((x,), (x, 3.0), (torch.randn(6, 2, 4).double(),)):
        assert torch.allclose(model(*call), plain(*call), rtol=1e-12)
    model.fc.bias.requires_grad_(False)
    model(x).backward()
    assert model.fc.bias.grad is None and model.fc.weight.grad is not None


def two_models(rank: int, plains: list[nn.Module], x: torch.Tensor) -> tuple[float, int]:
    models = [
        autopart.parallelize(copy.deepcopy(p), mesh={"dp": 2}, placement="fsdp", capture="direct") for p in plains
    ]
    for model in models:
        for _ in range(2):
            loss = model(x)
        loss.backward()
    parameters = [p for model in models for p in model.parameters()]
    return float(torch.nn.utils.clip_grad_norm_(parameters, 0.1)), len(models[0]._autopart.programs)


def test_two_models_clipped_together_and_equal_calls_compiled_once() -> None:
    plains = [Module(layers("fc"), lambda m, x: m.fc(x).square().mean()).double() for _ in range(2)]
    x = torch.randn(4, 4).double()
    for plain in plains:
        plain(x).backward()
    expected = float(torch.nn.utils.clip_grad_norm_([p for m in plains for p in m.parameters()], 0.1))
    for norm, programs in LocalWorld(2).run(two_models, plains, x):
        assert norm == pytest.approx(expected, rel=1e-12) and programs == 1


def test_layers_placed_differently_in_an_evaluation() -> None:
    plain = Module({"h": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))}, lambda m, x: m.h(x)).double()
    x = torch.randn(4, 4).double()

    def evaluate(rank: int) -> torch.Tensor:
        pins: dict[str, Any] = {"mesh": {"dp": 2}, "placement": {"h.1.weight": "fsdp", "*": "ddp"}}
        model = autopart.parallelize(copy.deepcopy(plain), capture="direct", microbatches=1, **pins)
        with torch.no_grad():
            return model(x)

    for found in LocalWorld(2).run(evaluate):
        assert torch.allclose(found, plain(x), rtol=1e-12)
