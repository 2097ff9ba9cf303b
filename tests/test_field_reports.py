"""What users of other systems reported, row by row: each test is named after its row (F004, F023, ...)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.ir.action import Kind
from autopart.passes.segment import segment
from autopart.testing import LocalWorld, assert_parity
from tests.tensor_axis import CHEAP

PP2: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 2}
PP3: dict[str, Any] = {"mesh": {"pp": 3}, "microbatches": 2}
DP2: dict[str, Any] = {"mesh": {"dp": 2}, "microbatches": 1, "placement": "fsdp"}
TP: dict[str, Any] = {"cluster": CHEAP, "microbatches": 1}


def parallel(plain: nn.Module, capture: str = "direct", **pins: Any) -> Any:
    """A parallelised copy, all of whose ranks run in this process."""
    return autopart.parallelize(copy.deepcopy(plain), capture=capture, **pins)


def same(found: Any, expected: Any) -> bool:
    """Equal structure, equal types, close tensors."""
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.shape == expected.shape and torch.allclose(found, expected)
    if isinstance(expected, Mapping):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected) and type(found) is type(expected)


def same_gradients(model: Any, plain: nn.Module) -> bool:
    found = model.full_grads()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return set(found) == set(expected) and all(torch.allclose(found[n], g, rtol=1e-9) for n, g in expected.items())


# ---- what all layers share -------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Blocks that take tables made once at the root: rotary angles from positions (F023), a mask, a buffer (F004)."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.register_buffer("inverse", 1.0 / 100 ** (torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("table", torch.randn(5, width))
        self.blocks = nn.ModuleList(RotaryBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.inverse
        cos, sin = angles.cos(), angles.sin()
        allowed = mask & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, cos, sin, allowed, self.table)
        logits = self.head(h)
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class RotaryBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, h: torch.Tensor, cos: Any, sin: Any, allowed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h + table).chunk(3, dim=-1)
        q, k = (
            (torch.cat([x[..., 0::2] * cos - x[..., 1::2] * sin, x[..., 0::2] * sin + x[..., 1::2] * cos], -1))
            for x in (q, k)
        )
        return h + self.proj(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], allowed).squeeze(1))


def rotary() -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    ids, labels = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    mask = torch.rand(4, 1, 5, 5) > 0.3
    mask[..., 0] = True
    return Rotary().double(), ids, {"labels": labels, "mask": mask}


def test_f004_f023_f024_f031_tables_and_masks_made_at_the_root_keywords_in_any_order() -> None:
    plain, ids, keywords = rotary()
    step = segment(captured_step(plain, read(plain, (ids,), keywords), None, False, "direct"))
    programs = [lower(step, solve(step, **pins)) for pins in (PP3, {**DP2, "microbatches": 2})]
    for program in programs:
        assert_parity(plain, (ids,), keywords, plan=program, steps=1)
    for edge in programs[0].staged.edges:  # tables of numbers go forward, buffers nowhere, gradients are of `h` alone
        shapes = [value.at(4) for value in edge.values]
        assert (5, 8) not in shapes and (edge.source < edge.target or set(shapes) == {(4, 5, 8)})
    model = parallel(plain, plan=programs[0])
    for kwargs in (keywords, dict(reversed(keywords.items()))):
        found, expected = model(ids, **kwargs), plain(ids, **kwargs)
        assert same(found[0].detach(), expected[0].detach())
    model.eval()
    assert same(model(ids, mask=keywords["mask"]), plain(ids, mask=keywords["mask"]).detach())


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


class Dicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, batch: Any) -> Any:
        logits = self.b(torch.tanh(self.a(batch["x"])))
        loss = (logits.square().mean(-1) * batch["meta"]["w"]).mean()
        return {"logits": logits, "loss": loss, "more": (None, 3, {"w": batch["meta"]["w"], "deep": [logits, "text"]})}


@pytest.mark.parametrize("pins", [PP2, DP2], ids=["pp2", "dp2"])
def test_f026_nested_containers_in_and_out(pins: dict[str, Any]) -> None:
    plain = Dicts().double()
    batch = {"x": torch.randn(6, 4).double(), "meta": {"w": torch.rand(6).double()}}
    model = parallel(plain, **pins)
    found, expected = model(batch), plain(batch)
    assert same({**found, "loss": found["loss"].detach()}, {**expected, "loss": expected["loss"].detach()})
    assert_parity(plain, (batch,), steps=1, **pins)
    if "dp" in pins["mesh"]:  # where outputs stay with the rank that makes them, each has made its half
        shapes = LocalWorld(2).run(lambda rank: parallel(plain, **pins)(batch)["logits"].shape)
        assert shapes == [(3, 3), (3, 3)]


class Passing(nn.Module):
    """Blocks that hand on (h, None, 3, ((a, b),)) (F027)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = (x, None, 3, ((x * 2, x.sum(-1)),))
        for layer in self.layers:
            h, nothing, number, ((a, b),) = state
            state = (torch.tanh(layer(h)) + a, nothing, number, ((a * number, b + 1),))
        h, nothing, number, pair = state
        return (h * pair[0][1][:, None]).square().mean(), nothing, number, pair


def test_f027_none_numbers_and_tuples_between_layers() -> None:
    plain, x = Passing().double(), torch.randn(6, 4).double()
    found, expected = parallel(plain, **PP2)(x), plain(x)
    assert same((found[0].detach(), *found[1:]), (expected[0].detach(), *expected[1:]))
    assert_parity(plain, (x,), steps=1, **PP2)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, k: int = 2) -> torch.Tensor:
        h = self.b(torch.tanh(self.a(x)) * k)
        return (h if mask is None else h * mask).pow(k).mean()


def test_f030_another_optional_argument_is_never_the_old_constant() -> None:
    plain, x, mask = Optional().double(), torch.randn(6, 4).double(), torch.rand(6, 4).double()
    model = parallel(plain, **PP2)
    for kwargs in ({}, {"mask": mask}, {"k": 5}, {"mask": mask, "k": 3}, {}):
        assert same(model(x, **kwargs).detach(), plain(x, **kwargs).detach())


class Offsets(nn.Module):
    """Tokens packed into rows; `cu` says where documents begin, in the whole batch."""

    def __init__(self, document: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.document = document
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(self.out(self.embed(tokens)))
        document = self.document(extra["cu"], torch.arange(tokens.shape[1]))
        return (h * document[None, :, None]).square().mean()


def counting(cu: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return (at[:, None] >= cu[1:][None, :]).sum(-1)


def searching(cu: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(cu, at, right=True)


def test_f032_cumulative_offsets_are_split_only_if_declared() -> None:
    tokens, extra = torch.randint(0, 9, (4, 10)), {"cu": torch.tensor([0, 3, 7, 10])}
    with pytest.raises(autopart.CaptureError, match=r"(?s)couples the samples.*batch=.*extra_cu \[batch\]"):
        parallel(Offsets(counting), **PP2)(tokens, extra)
    assert_parity(Offsets(counting), (tokens, extra), steps=1, batch={"extra": None}, **PP2)
    # what no parameter enters and has no samples in the end is computed over the whole batch, so the split is no matter
    assert_parity(Offsets(searching), (tokens, extra), steps=1, **PP2)


# ---- shapes ----------------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.f, self.g = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.f(self.embed(ids) + torch.arange(ids.shape[1])[:, None] / ids.shape[1])
        return (self.g(torch.tanh(h / h.shape[1])).sum(1) / h.shape[1]).square().mean()


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f038_arithmetic_with_the_length_follows_the_length(capture: str) -> None:
    plain = Shapes().double()
    model = parallel(plain, capture, **PP2)
    for length in (8, 5, 8):
        ids = torch.randint(0, 9, (4, length))
        assert same(model(ids).detach(), plain(ids).detach())


# ---- frozen and reused -----------------------------------------------------------------------------------------------


def test_f053_stages_that_are_all_frozen_send_no_gradient() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
            self.layers[:4].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    plain, x = Stack().double(), torch.randn(6, 4).double()
    plan = autopart.plan(plain, (x,), capture="direct", stages=["layers.2", "layers.4"], **PP3)
    program = autopart.compile(plain, plan, (x,), capture="direct")
    assert_parity(plain, (x,), plan=program, steps=2)
    gradients = [a for rank in program.ranks for a in rank.actions if a.kind is Kind.SEND and a.peer < a.stage]
    assert len(program.ranks) == 3 and not gradients


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
        return self.fc(x) + (1 if flag else 2)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.block = nn.Linear(4, 4), Flagged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.lin(self.lin(x)))
        return self.block(torch.tanh(self.block(y, True)), False).square().mean()


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f082_a_module_called_twice_keeps_two_graphs_and_one_weight(capture: str) -> None:
    assert_parity(Twice(), (torch.randn(6, 4),), capture=capture, **PP2)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


class Boundary(nn.Module):
    """The first half makes tensors of every dtype that only the second half reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        kinds = [(h > 0), (h.detach() * 9).abs().to(torch.uint8), (h.detach() * 9).to(torch.int8)]
        kinds += [(h.detach() * 9).to(torch.int32), h.to(torch.bfloat16), h.to(torch.float16)]
        z = torch.complex(h, h * 2)
        number, empty = self.first.weight.detach().mean(), h.new_zeros(0, 4)
        out = self.second(torch.tanh(h)) + (z * z.conj()).real + (z * (1 + 2j)).imag
        out = out + sum(kind.to(h.dtype) for kind in kinds) * 1e-2 + empty.sum()
        return (out * number).square().mean(), [*kinds, z]


def test_f087_every_dtype_crosses_a_boundary() -> None:
    plain, x = Boundary().double(), torch.randn(6, 4).double()
    assert_parity(plain, (x,), steps=1, **PP2)


# ---- effects and aliases ---------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ids[ids < 0] = 0
        return self.fc(x + self.embed(ids)).square().mean()


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f090_a_forward_that_changes_its_input_is_refused_and_changes_nothing(capture: str) -> None:
    model, x, ids = parallel(InPlace(), capture, **PP2), torch.ones(4, 4), torch.tensor([0, -1, 2, -3])
    with pytest.raises(autopart.CaptureError, match=r"input args\[\d\] is changed in place .* work on a copy"):
        model(x, ids)
    assert torch.equal(x, torch.ones(4, 4)) and ids.tolist() == [0, -1, 2, -3]


class Views(nn.Module):
    """Returns (h, a view of h, h, the input); what comes next changes one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        one, flat, two, again = h, h.view(-1), h, x
        flat = flat * 1
        flat.mul_(3)
        two.add_(1)
        return (self.second(torch.tanh(one)) + flat.view_as(one) * again + two).square().mean()


def test_f091_views_and_duplicates_count_once() -> None:
    assert_parity(Views(), (torch.randn(6, 4),), steps=1, **PP2)


# ---- hand-written operators ------------------------------------------------------------------------------------------


class Step(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Still(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class Custom(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.function(self.second(torch.tanh(self.first(x))))
        return (self.third(h) + x).square().mean()


@pytest.mark.parametrize("capture", ["direct", "compile"])
@pytest.mark.parametrize("function", [Step, Reverse, Still], ids=lambda f: f.__name__)
def test_f092_hand_written_backwards(function: type[torch.autograd.Function], capture: str) -> None:
    assert_parity(Custom(function.apply), (torch.randn(6, 4),), capture=capture, steps=1, **PP2)


@torch.library.custom_op("autopart_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def scaled_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, by = ctx.saved_tensors
    return grad * by, grad * x


scaled.register_autograd(scaled_backward, setup_context=keep)


@pytest.mark.parametrize("capture", ["direct", "compile"])
def test_f093_a_custom_operator_on_samples_is_refused_with_its_name(capture: str) -> None:
    plain = Custom(lambda x: scaled(x, by=x.detach()))
    with pytest.raises(autopart.CaptureError, match=r"autopart_tests.scaled.default .* no factor rule"):
        parallel(plain, capture, **PP2)(torch.randn(6, 4))


def test_f093_a_custom_operator_that_reads_no_samples_runs_as_it_is() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.by = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                self.second(torch.tanh(self.first(x)) * scaled(self.by, by=torch.ones(4, dtype=x.dtype)))
                .square()
                .mean()
            )

    assert_parity(Scaled(), (torch.randn(6, 4),), steps=1, **PP2)


# ---- indexing, convolutions, views -----------------------------------------------------------------------------------


class Indexing(nn.Module):
    """List indexing and a gather (F096)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 4))
        h = qkv[..., [-2], :].squeeze(-2) + qkv[..., [0, 2], :].sum(-2)
        return self.out(torch.tanh(h).gather(1, where[..., None].expand(-1, -1, 4))).square().mean()


@pytest.mark.parametrize("pins", [PP2, {**TP, "mesh": {"dp": 2, "tp": 2}}], ids=["pp2", "dp2 tp2"])
def test_f096_list_indexing_and_gather(pins: dict[str, Any]) -> None:
    plain, args = Indexing().double(), (torch.randn(6, 3, 4).double(), torch.randint(0, 3, (6, 2)))
    model = parallel(plain, **pins)
    for each in (model, plain):
        each(*args).backward()
    assert same_gradients(model, plain)
    for rank in model.report().ranks:  # the program makes the exchanges that were planned, and no others
        assert rank.bytes_sent == rank.predicted_bytes


class Convolutions(nn.Module):
    """Convolutions with stride as wide as the kernel and with padding, and a view of 12 x 8 as 16 x 6 (F103)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.padded = nn.Conv2d(2, 3, 4, stride=4), nn.Conv2d(3, 2, 3, padding=1)
        self.wide, self.out = nn.Linear(4, 96), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.padded(F.relu(self.patches(x))).flatten(1)
        h = torch.tanh(self.wide(h[:, :4])).view(-1, 12, 8).view(-1, 16, 6)
        return F.mse_loss(self.out(h).mean(1), y)


@pytest.mark.parametrize(
    "pins", [PP2, DP2, {**TP, "mesh": {"tp": 2}}, {**TP, "mesh": {"tp": 4}}], ids=["pp2", "dp2", "tp2", "tp4"]
)
def test_f103_convolutions_and_views_of_unlike_factors(pins: dict[str, Any]) -> None:
    assert_parity(Convolutions(), (torch.randn(6, 2, 8, 8), torch.randn(6, 2)), steps=1, **pins)


class Heads(nn.Module):
    """Two heads: an argument, or an attribute, says which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.choice, self.label = "a", ""

    def forward(self, x: torch.Tensor, head: str | None = None) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        return (self.a if (head or self.choice) == "a" else self.b)(h).square().mean()


def other_heads(rank: int, how: str, inputs: str) -> list[str]:
    model, x = parallel(Heads(), mesh={"dp": 2}, placement="fsdp", inputs=inputs), torch.ones(4, 4)
    model.label = f"of rank {rank}"  # read by nothing in forward, so no matter
    messages = []
    for calls in range(2):
        if calls:
            model(x).backward()
        mine = "ab"[rank]
        model.choice = mine if how == "attribute" else "a"
        with pytest.raises(ValueError) as caught:
            model(x, mine if how != "attribute" else None)
        messages.append(str(caught.value))
        model.choice = "a"
    model.zero_grad()
    model(x, "a").backward()
    assert set(model.full_grads()) == {"body.weight", "body.bias", "a.weight", "a.bias"}
    return messages


@pytest.mark.parametrize(
    ("how", "what", "inputs"),
    [("argument", "the value of head", "global"), ("attribute", "the attribute choice", "local")],
)
def test_f081_another_head_on_another_rank_is_an_error_on_both_that_names_what_chose_it(
    how: str, what: str, inputs: str
) -> None:
    torch.manual_seed(0)
    one, two = LocalWorld(2).run(other_heads, how, inputs)
    assert one == two
    for message in one:
        assert f"rank 1 and rank 0 differ in {what} ('b' and 'a')" in message
