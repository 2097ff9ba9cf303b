"""Small programs for capture and the passes after it, each with something that has gone wrong somewhere.

``CASES[name]`` has what is needed to capture it and to compare with eager; the models of `tests.models` are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopart.capture import capture, read
from autopart.capture.call import Call
from autopart.ir.captured import Captured
from autopart.passes.normalise import normalise
from tests.models import MODELS, Sample


@dataclass(frozen=True)
class Case:
    """One program. `routes_agree` is false where Hugging Face makes its masks otherwise under torch's export flags."""

    make: Callable[[], Sample]
    batch: Mapping[str, int | None] | None = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    target: bool = False
    grad: bool = True
    tolerance: float = 1e-12
    routes: tuple[str, ...] = ("compile", "direct")
    routes_agree: bool = True


CASES: dict[str, Case] = {name: Case(make) for name, make in MODELS.items()}
for _name in ("gpt2", "llama"):
    CASES[_name] = replace(CASES[_name], tolerance=1e-6, routes_agree=False)


@cache
def captured(name: str, route: str) -> tuple[nn.Module, Call, Captured]:
    """A case's module, its call and what capture makes of them, once for all tests."""
    case = CASES[name]
    module, args, kwargs = case.make()
    call = read(module, args, kwargs, batch=case.batch)
    with torch.set_grad_enabled(case.grad):
        return module, call, capture(module, call, loss_fn=case.loss_fn, target=case.target, route=route)


@cache
def normalised(name: str) -> tuple[nn.Module, Call, Captured]:
    """The same after `normalise`."""
    module, call, made = captured(name, "direct")
    return module, call, normalise(made)


def case(**options: Any) -> Callable[[Callable[[], Sample]], Callable[[], Sample]]:
    """Add the program that the function makes."""

    def add(make: Callable[[], Sample]) -> Callable[[], Sample]:
        def seeded() -> Sample:
            torch.manual_seed(0)
            return make()

        CASES[make.__name__] = Case(seeded, **options)
        return make

    return add


def normal(*shape: int) -> torch.Tensor:
    """Random float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64)


class Two(nn.Module):
    """Two linear layers, to be put together by a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.out(x).pow(2).mean()


def _stack() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _square_mean(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def _weighted(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    return (F.mse_loss(output, target["y"], reduction="none").mean(-1) * target["w"]).sum() / target["w"].sum()


@case(loss_fn=F.mse_loss, target=True)
def loss_fn_with_target() -> Sample:
    return _stack(), (normal(4, 4), normal(4, 3)), {}


@case(loss_fn=_square_mean)
def loss_fn_without_target() -> Sample:
    return _stack(), (normal(4, 4),), {}


@case(loss_fn=_weighted, target=True)
def loss_fn_nested_target() -> Sample:
    return _stack(), (normal(4, 4), {"y": normal(4, 3), "w": torch.rand(4).double()}), {}


class Nested(Two):
    """Nested containers in and out, an int and an optional argument."""

    def forward(self, batch: dict[str, Any], k: int = 2, extra: torch.Tensor | None = None) -> dict[str, Any]:
        h = self.lin(batch["x"]) * k
        if extra is not None:
            h = h + extra
        out = self.out(h)
        loss = (out**2 * batch["meta"]["w"][:, None]).mean()
        return {"logits": out, "loss": loss, "meta": (1, None, [h, ("a", 3.5, True)])}


@case()
def nested() -> Sample:
    return Nested(), ({"x": normal(4, 4), "meta": {"w": normal(4)}},), {}


@case()
def optional_given() -> Sample:
    return Nested(), ({"x": normal(4, 4), "meta": {"w": normal(4)}},), {"extra": normal(4, 4), "k": 5}


class KeywordOnly(Two):
    """Keywords in another order than the signature's; a tuple whose first element is the loss."""

    def forward(
        self, ids: torch.Tensor, *, mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.out(self.lin(ids))
        return ((out - labels) ** 2 * mask).sum() / mask.sum(), out


@case()
def keywords_shuffled() -> Sample:
    return KeywordOnly(), (), {"labels": normal(4, 3), "ids": normal(4, 4), "mask": torch.rand(4, 3).double()}


class Scaled(Two):
    """Something that is no sample scales the loss."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(x) * scale[:, None].sum(0))


@case(batch={"x": 1, "scale": None})
def batch_in_dim_1() -> Sample:
    return Scaled(), (normal(5, 4, 4), normal(4)), {}


@case(batch={"scale": None})
def one_input_not_split() -> Sample:
    return Scaled(), (normal(4, 4), normal(4)), {}


@case()
def single_sample() -> Sample:
    return Scaled(), (normal(1, 4), normal(5)), {}


@case()
def strided_input() -> Sample:
    return Scaled(), (normal(4, 6, 4).transpose(1, 2).flip(0).transpose(1, 2)[:, ::2], normal(5)), {}


class Dtypes(Two):
    """Integers, booleans and complex numbers among the inputs."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, keep: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        h = self.lin(x) + F.one_hot(index, 4).to(x.dtype)
        h = torch.where(keep[:, None], h, 2 * h) + (z * z.conj()).real.sum(-1, keepdim=True)
        return self.out(h).pow(2).sum()


@case()
def dtypes() -> Sample:
    z = torch.randn(4, 3, dtype=torch.complex128)
    return Dtypes(), (normal(4, 4), torch.randint(0, 4, (4,)), torch.rand(4) > 0.5, z), {}


class Twice(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(self.lin(x).tanh()).tanh())


@case()
def called_twice() -> Sample:
    return Twice(), (normal(4, 4),), {}


class Constants(Two):
    """A tensor that is neither parameter nor buffer, used twice, and literals."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = normal(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x) * self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        return self.head(h * torch.tensor(2.0, dtype=torch.float64) + self.plain)


@case()
def constants() -> Sample:
    return Constants(), (normal(4, 4),), {}


class Step(torch.autograd.Function):
    """A step with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Reverse(torch.autograd.Function):
    """The identity with a reversed gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class FlatSine(torch.autograd.Function):
    """A sine whose gradient is declared to be zero, by way of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x * 0 * grad


class Custom(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        h = Step.apply(h) + Reverse.apply(h * 2) + FlatSine.apply(3 * h)
        return self.head(h)


@case()
def custom_functions() -> Sample:
    return Custom(), (normal(4, 4),), {}


class Pair(nn.Module):
    """Two layers whose weights are one object, one storage, or merely equal."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.b = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        if how == "object":
            self.b.weight = self.a.weight
        elif how == "storage":
            self.b.weight = nn.Parameter(self.a.weight.data)
        else:
            self.b.weight.data.copy_(self.a.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).pow(2).mean()


@case()
def tied_by_object() -> Sample:
    return Pair("object"), (normal(4, 4),), {}


@case()
def tied_by_storage() -> Sample:
    return Pair("storage"), (normal(4, 4),), {}


@case()
def equal_values() -> Sample:
    return Pair("values"), (normal(4, 4),), {}


class Partly(Two):
    """A frozen layer in the middle, a layer and an input that are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4, dtype=torch.float64)
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.lin(x)))


@case()
def unused_and_frozen() -> Sample:
    return Partly(), (normal(4, 4), normal(4, 2)), {}


class Echo(Two):
    """Hands inputs back, and some results twice."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        out = self.out(self.lin(x))
        loss = out.pow(2).mean()
        return {"loss": loss, "same": loss, "x": x, "ids": [ids, x], "out": out, "again": out, "value": loss.detach()}


@case()
def results_twice() -> Sample:
    return Echo(), (normal(4, 4), torch.arange(4)), {}


class Masked(Two):
    """A mask that differs from row to row (B, 1, S, S)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, 0], -1e9)
        return self.head(self.lin(scores.softmax(-1) @ x))


@case()
def mask_per_row() -> Sample:
    return Masked(), (normal(4, 5, 4), torch.rand(4, 1, 5, 5) > 0.3), {}


def _part(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width)).double()


class UNet(nn.Module):
    """Encoder, middle and decoder without a numbered list, with skips between them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("enc1", "enc2", "enc3", "mid", "dec3", "dec2", "dec1"):
            setattr(self, name, _part())
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.enc1(x)
        b = self.enc2(a)
        c = self.enc3(b)
        d = self.dec3(self.mid(c) + c)
        return self.head(self.dec1(self.dec2(d + b) + a)).pow(2).mean()


@case(routes=("direct",))
def unet() -> Sample:
    return UNet(), (normal(4, 4),), {}


class Grouped(nn.Module):
    """Numbered lists in a numbered list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, dtype=torch.float64)
        self.groups = nn.ModuleList(nn.ModuleList(_part() for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for group in self.groups:
            for layer in group:
                x = x + layer(x)
        return self.head(x).pow(2).mean()


@case(routes=("direct",))
def lists_in_a_list() -> Sample:
    return Grouped(), (normal(4, 4),), {}


class Staged(nn.Module):
    """Numbered stages that are modules with numbered blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(*(_part() for _ in range(3))) for _ in range(3)))
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(x)).pow(2).mean()


@case(routes=("direct",))
def blocks_in_stages() -> Sample:
    return Staged(), (normal(4, 4),), {}


class Reused(nn.Module):
    """One block called again later, with another flag."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = _part(), _part()
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def step(self, x: torch.Tensor, plus: bool) -> torch.Tensor:
        return self.block(x) + (1 if plus else 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.step(self.other(self.step(x, True)), False)).pow(2).mean()


@case()
def reused_later() -> Sample:
    return Reused(), (normal(4, 4),), {}


class Rotary(nn.Module):
    """Tables made once from positions and a buffer, and used by every block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return h + self.lin(h * cos).tanh() * sin

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(4).double())
        self.register_buffer("unused", torch.rand(4))
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        angles = (positions[:, None] * self.frequencies).masked_fill(positions[:, None] == 0, 0.5)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x).pow(2).mean()


@case()
def shared_tables() -> Sample:
    return Rotary(), (normal(4, 5, 4),), {}


class Threaded(nn.Module):
    """Blocks that hand on (tensor, None, int, nested tuple)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, h: torch.Tensor, nothing: None, k: int, pair: Any) -> Any:
            return h * k + self.lin(h), nothing, k, ((pair[0][0] + h, h),)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: self.Block() for name in ("first", "second-one", "third")})
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = (x, None, 3, ((x, x),))
        for block in self.blocks.values():
            state = block(*state)
        return self.head(state[0]).pow(2).mean(), *state[1:]


@case()
def tuples_between_blocks() -> Sample:
    return Threaded(), (normal(4, 4),), {}


@case(grad=False)
def no_grad() -> Sample:
    return MODELS["half_frozen"]()


@case(grad=False)
def no_grad_without_loss() -> Sample:
    model, args, _ = MODELS["half_frozen"]()
    return model.eval(), args, {"mask": torch.rand(6, 4).double()}


@case(grad=False, routes=("direct",), tolerance=1e-6)
def no_grad_logits() -> Sample:
    model, _, kwargs = MODELS["gpt2"]()
    return model.eval(), (), {"input_ids": kwargs["input_ids"]}


@case(routes=("direct",), tolerance=1e-6)
def gpt2_padded() -> Sample:
    model, _, kwargs = MODELS["gpt2"]()
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, :3] = 0
    return model.eval(), (), {**kwargs, "attention_mask": mask, "return_dict": False}
