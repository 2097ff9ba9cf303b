"""Where a step meets the user's autograd graph: modules without a loss, outputs on every rank, gradients of inputs."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.errors import CaptureError, VerificationError
from autopart.ir.program import Program
from autopart.testing import LocalWorld, assert_parity
from tests.launch import launch
from tests.test_parity_faults import edited

WORLDS: dict[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "pp2": {"mesh": {"pp": 2}, "microbatches": 3},
    "dp2 ddp": {"mesh": {"dp": 2}, "placement": "ddp", "microbatches": 2},
    "dp3 fsdp": {"mesh": {"dp": 3}, "placement": "fsdp", "microbatches": 1},
    "pp2 dp2 zero1": {"mesh": {"pp": 2, "dp": 2}, "placement": "zero1", "microbatches": 2},
    "pp2 dp2 fsdp": {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 1},
}


class Everything(nn.Module):
    """Outputs of every kind: split along dims 0 and 1, a mean and a sum over the batch, one that no sample enters,
    integers, None, a number; `x` is read by the first and by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down, self.side = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = torch.tanh(self.up(x))
        h = torch.tanh(self.mid(h))
        logits = self.down(h) * self.scale + x[:, :3]
        return {
            "logits": logits,
            "hidden": (h.unsqueeze(0), [h.t()]),
            "classes": logits.argmax(1),
            "nothing": None,
            "penalty": h.square().mean(),
            "total": h.sum(),
            "scale": self.scale * 2,
            "three": 3,
            "side": self.side(h),
        }


def everything(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Everything().double(), torch.randn(7, 4).double()


def loss_of(found: Mapping[str, Any]) -> torch.Tensor:
    """A loss that couples the samples: only whole outputs give the right one."""
    logits, (hidden, (turned,)) = found["logits"], found["hidden"]
    loss = torch.logsumexp(logits.flatten(), 0) ** 2 + 0.3 * (hidden**3).mean() + turned.std()
    return loss + found["penalty"] ** 2 * found["total"] + (found["scale"] * logits).sum() + found["classes"].sum()


def compare(mine: Any, plain: Any) -> None:
    """The same structure with equal tensors; every leaf asks for a gradient on both sides or on none."""
    leaves, tree = torch.utils._pytree.tree_flatten(mine)
    others, other = torch.utils._pytree.tree_flatten(plain)
    assert tree == other
    for a, b in zip(leaves, others, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        else:
            assert a == b


def same_gradients(mine: Mapping[str, torch.Tensor], plain: nn.Module) -> None:
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert set(mine) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def steps(model: Any, x: torch.Tensor, count: int = 2) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Outputs and gradients of the input of some steps of an ordinary loop."""
    outputs, grads = [], []
    for step in range(count):
        leaf = (x + step).requires_grad_()
        found = model(leaf * 1.5)
        loss_of(found).backward()
        outputs.append(found)
        grads.append(leaf.grad)
    return outputs, grads


@pytest.mark.parametrize(("world", "capture"), [("one", "direct"), ("pp2", "compile"), ("pp2 dp2 zero1", "direct")])
def test_an_ordinary_loop_with_a_loss_of_the_outputs(world: str, capture: str) -> None:
    plain, x = everything()
    model = autopart.parallelize(copy.deepcopy(plain), capture=capture, **WORLDS[world])
    (mine, grads), (wanted, others) = steps(model, x), steps(plain, x)
    compare(mine, wanted)
    for a, b in zip(grads, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    same_gradients(model.full_grads(), plain)
    assert "side.weight" not in model.full_grads(), "an output that the loss does not use has no gradient"
    assert model.plan.schedule == "gpipe" and model.report().bytes_sent == model.report().predicted_bytes
    model.eval(), plain.eval()
    with torch.no_grad():
        compare(model(x), plain(x))


def on_ranks(rank: int, plain: nn.Module, x: torch.Tensor, pins: dict[str, Any]) -> None:
    model, reference = autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins), copy.deepcopy(plain)
    (mine, grads), (wanted, others) = steps(model, x), steps(reference, x)
    compare(mine, wanted)
    for a, b in zip(grads, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    same_gradients(model.full_grads(), reference)
    assert model.report().bytes_sent == model.report().predicted_bytes


@pytest.mark.parametrize("world", ["pp2", "dp3 fsdp", "pp2 dp2 zero1"])
def test_every_rank_has_whole_outputs_and_gradients_of_inputs(world: str) -> None:
    plain, x = everything()
    size = autopart.plan(plain, (x,), capture="direct", **WORLDS[world]).mesh.size
    LocalWorld(size).run(on_ranks, plain, x, WORLDS[world])


class Plain(nn.Module):
    """Three layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


def plain_pair(**pins: Any) -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    plain = Plain().double()
    pins = pins or WORLDS["pp2"]
    return autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins), plain, torch.randn(6, 4).double()


def test_several_calls_before_one_backward_and_an_output_changed_in_place() -> None:
    model, plain, x = plain_pair()
    for each in (model, plain):
        first, second = each(x), each(2 * x)
        second.mul_(3)
        (first.square().sum() * second.mean()).backward()
    same_gradients(model.full_grads(), plain)


def test_gradients_accumulate_and_other_functions_of_autograd_work() -> None:
    model, plain, x = plain_pair()
    for each in (model, plain):
        each(x).sum().backward()
        each(x + 1).square().sum().backward()
    same_gradients(model.full_grads(), plain)
    before = model.full_grads()
    found = [torch.autograd.grad(each(x).square().sum(), [each.c.weight, each.a.bias]) for each in (model, plain)]
    leaf = x.clone().requires_grad_()
    found += [torch.autograd.grad(each(leaf).square().sum(), leaf) for each in (model, plain)]
    for a, b in zip((*found[0], *found[2]), (*found[1], *found[3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    assert all(torch.equal(value, before[name]) for name, value in model.full_grads().items()), "none was accumulated"


def waiting() -> int:
    gc.collect()
    return sum(type(item) is types.GeneratorType and item.__name__ == "step" for item in gc.get_objects())


def test_what_is_kept_for_a_backward_dies_with_the_graph() -> None:
    model, _, x = plain_pair()
    assert waiting() == 0
    loss = model(x).sum()
    assert waiting() == 2, "one a rank"
    del loss
    assert waiting() == 0
    loss = model(x).sum()
    loss.backward()
    assert waiting() == 0


def test_a_second_backward_and_second_derivatives_are_refused() -> None:
    model, _, x = plain_pair()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran in an earlier backward"):
        loss.backward()
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_what_the_backward_needs_may_not_change_before_it(what: str) -> None:
    model, _, x = plain_pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).sum()
    model(x).sum().backward()
    before = model.full_grads()
    if what == "parameter":
        optimizer.step()
    else:
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"b\.weight was changed" if what == "parameter" else r"the input args\[0\]"):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in model.full_grads().items())


def test_in_evaluation_outputs_have_no_gradient_unless_an_input_asks_for_one() -> None:
    model, plain, x = plain_pair()
    model.eval(), plain.eval()
    assert not model(x).requires_grad
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        assert not model(leaf).requires_grad


def test_a_frozen_module_gives_the_gradient_of_its_input_only() -> None:
    model, plain, x = plain_pair()
    for each in (model, plain):
        each.requires_grad_(False)
    assert not model(x).requires_grad, "nothing to train: plain outputs, as of any module"
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-10, atol=1e-13)
    assert model.full_grads() == {}


@pytest.mark.parametrize("pin", ["schedule", "plan"])
def test_a_schedule_that_begins_backwards_early_is_refused(pin: str) -> None:
    model, plain, x = plain_pair(mesh={"pp": 2}, microbatches=2, schedule="1f1b")
    if pin == "plan":
        made = autopart.plan(plain, (x,), capture="direct", mesh={"pp": 2}, microbatches=2)
        model = autopart.parallelize(copy.deepcopy(plain), plan=replace(made, schedule="1f1b"), capture="direct")
    with pytest.raises(ValueError, match=r"schedule: '1f1b' begins backwards .* returns no loss"):
        model(x)
    with pytest.raises(ValueError, match="schedule: '1f1b'"):
        autopart.plan(plain, (x,), capture="direct", mesh={"pp": 2}, schedule="1f1b")


def test_values_returned_with_and_without_their_gradient_are_refused() -> None:
    class Twice(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return out, out.detach()

    with pytest.raises(CaptureError, match=r"items 0 and 1 .*detach them outside"):
        autopart.parallelize(Twice(), devices=2, capture="direct")(torch.randn(4, 4))


class Aliases(nn.Module):
    """Tied weights; outputs that are views of others or of inputs, one of them twice, a transposed one from the first
    stage, the batch folded into a dim, the input itself, one that no gradient goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.free = nn.Parameter(torch.ones(2))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.a(self.embed(ids) + x))
        g = torch.tanh(self.b(h))
        logits = self.head(g)
        return logits.flatten(0, 1), g, g, x, x[:, :1], x * 1, h.transpose(0, 1), self.free.sum(), h.new_zeros(3)


def aliases_loss(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
    logits, g, again, x, first, same_x, turned, free, _ = found
    loss = logits.square().mean() + (g * again).sum() + x.pow(3).sum() + first.sum() ** 2 + same_x.mean()
    return loss + turned[0].square().sum() + free**2


@pytest.mark.parametrize("world", ["pp2", "pp2 dp2 zero1"])
def test_outputs_that_share_memory_and_tied_weights(world: str) -> None:
    torch.manual_seed(0)
    plain = Aliases().double()
    ids, x = torch.randint(0, 9, (5, 3)), torch.randn(5, 3, 4).double()
    model = autopart.parallelize(copy.deepcopy(plain), capture="direct", **WORLDS[world])
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = model(ids, mine), plain(ids, other)
    compare(found, wanted)
    aliases_loss(found).backward()
    aliases_loss(wanted).backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13)
    same_gradients(model.full_grads(), plain)
    for rank in model.report().ranks[:: model.plan.mesh.degree("dp")]:
        assert rank.peak_activations == rank.predicted_activations


# Gradients of inputs


class Sums(nn.Module):
    """The first input is read in both stages; the gradient of the second is that of the output; `scale` is not split;
    `unused` has none; with `y`, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, z: torch.Tensor, scale: torch.Tensor, unused: torch.Tensor, y: torch.Tensor | None = None
    ) -> Any:
        out = torch.tanh(self.b(torch.tanh(self.a(x * scale)) + x)) + x + z
        return out if y is None else {"loss": F.mse_loss(out, y), "out": out, "classes": out.argmax(1)}


def sums_step(model: Any, with_loss: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(2)
    x, z, unused, y = (torch.randn(5, 4).double() for _ in range(4))
    leaves = [t.requires_grad_() for t in (x, z, torch.randn(4).double(), unused)]
    if with_loss:
        (3 * model(*leaves, y)["loss"]).backward()
    else:
        model(*leaves).pow(3).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "no loss"])
@pytest.mark.parametrize("world", ["pp2", "pp2 dp2 fsdp"])
def test_gradients_of_inputs(world: str, with_loss: bool) -> None:
    torch.manual_seed(0)
    plain = Sums().double()
    model = autopart.parallelize(copy.deepcopy(plain), capture="direct", batch={"scale": None}, **WORLDS[world])
    found, wanted = sums_step(model, with_loss), sums_step(plain, with_loss)
    assert found[3] is None and wanted[3] is None
    for a, b in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    same_gradients(model.full_grads(), plain)
    assert model.report().bytes_sent == model.report().predicted_bytes


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(z)))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.leaky_relu(self.a(x)))


def adversarial(make: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    """Four rounds of a GAN; both models' parameters afterwards."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(5)
    g, d = make(Generator().double()), make(Discriminator().double())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (g, d)]
    for _ in range(4):
        real, z = (torch.randn(6, size, generator=data, dtype=torch.float64) for size in (4, 3))
        fake = g(z)
        optimizers[1].zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-d(fake)).mean().backward()
        optimizers[0].step()
    states = [each.full_state_dict() if hasattr(each, "full_state_dict") else each.state_dict() for each in (g, d)]
    return {f"{i} {name}": value for i, state in enumerate(states) for name, value in state.items()}


def gan_on_ranks(rank: int, pins: dict[str, Any]) -> dict[str, torch.Tensor]:
    return adversarial(lambda model: autopart.parallelize(model, capture="direct", **pins))


@pytest.mark.parametrize("pins", [{"mesh": {"pp": 2}, "microbatches": 2}, {"mesh": {"dp": 2}, "placement": "fsdp"}])
def test_f067_two_models_and_two_optimizers(pins: dict[str, Any]) -> None:
    wanted = adversarial(lambda model: model)
    for found in [gan_on_ranks(0, pins), *LocalWorld(2).run(gan_on_ranks, pins)]:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


# Outputs beside the loss


def rank_outputs(rank: int, plain: nn.Module, batch: tuple[torch.Tensor, ...], outputs: str | None) -> Any:
    pins = WORLDS["pp2 dp2 fsdp"]
    model = autopart.parallelize(copy.deepcopy(plain), capture="direct", outputs=outputs, **pins)
    found = model(*batch)
    found["loss"].backward()
    assert model.report().bytes_sent == model.report().predicted_bytes
    return found["out"], found["classes"]


def test_outputs_beside_the_loss_on_every_rank_if_asked() -> None:
    torch.manual_seed(0)
    plain = Sums().double()
    batch = tuple(torch.randn(4, 4).double() for _ in range(5))
    wanted = plain(*batch)
    for out, classes in LocalWorld(4).run(rank_outputs, plain, batch, "all"):
        torch.testing.assert_close(out, wanted["out"].detach(), rtol=1e-11, atol=1e-13)
        assert torch.equal(classes, wanted["classes"])
    where_made = LocalWorld(4).run(rank_outputs, plain, batch, None)
    assert [out is not None for out, _ in where_made] == [False, False, True, True]
    torch.testing.assert_close(where_made[3][0], wanted["out"][2:].detach(), rtol=1e-11, atol=1e-13)
    with pytest.raises(ValueError, match="outputs: 'some' is not known"):
        autopart.parallelize(Sums(), outputs="some")


# Real models, processes


def test_a_language_model_without_labels() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))
    ids = torch.randint(0, 32, (5, 6))

    def loss(found: Any) -> torch.Tensor:
        return F.cross_entropy(found["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    pins = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "placement": "zero1"}
    assert_parity(model, (), {"input_ids": ids}, loss=loss, steps=2, **pins)


def process_body(worlds: list[str], pins: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    plain, x = everything()
    for world in worlds:
        on_ranks(0, plain, x, WORLDS[world])
    return gan_on_ranks(0, pins)


@pytest.mark.timeout(200)
def test_processes() -> None:
    pins = {"mesh": {"pp": 2}, "microbatches": 2}
    result = launch(process_body, 2, args=(["pp2", "dp2 ddp"], pins), timeout=120)
    for found in result.values:
        torch.testing.assert_close(found, adversarial(lambda model: model), rtol=1e-9, atol=1e-12)


def different_losses(rank: int) -> str:
    model, _, x = plain_pair(mesh={"dp": 2})
    loss = model(x).sum() * (1 + rank)
    with pytest.raises(ValueError) as caught:
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


def test_ranks_that_compute_different_losses_are_told_so() -> None:
    messages = LocalWorld(2).run(different_losses)
    assert messages[0] == messages[1] and "rank 1's gradient of the module's output_0" in messages[0]


# Faults


def program(**pins: Any) -> Program:
    _, plain, x = plain_pair()
    return autopart.compile(plain, autopart.plan(plain, (x,), capture="direct", **pins), (x,), capture="direct")


FAULTS = {
    "not cut": (r"batch\.cut\((.*), k, dim=0\)", r"\1", "of the whole batch is used for a microbatch"),
    "another microbatch": (r"(batch\.cut\(.*), k,", r"\1, (k + 1) % 2,", "used together|belong|microbatch"),
    "another dim": (r"(batch\.cut\(.*), dim=0", r"\1, dim=1", "cut along dim 1"),
    "no outputs": (r"yield \{.*\}", "yield {}", "step yields a NoneType as 'output_0'"),
    "returns early": (r"tangents = yield (.*)", r"return \1", "must yield its outputs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_verify_sees_faults(name: str) -> None:
    pattern, replacement, message = FAULTS[name]
    good = program(mesh={"dp": 2}, microbatches=2, placement="ddp")
    autopart.verify(good)
    with pytest.raises(VerificationError, match=message):
        autopart.verify(edited(good, pattern, replacement))


def test_verify_sees_a_transfer_across_the_yield() -> None:
    good = program(mesh={"pp": 2}, microbatches=1)
    send = r"^    (world\.send\(.*)$"
    late = edited(good, rf"{send}((?:\n.*)*?\n    tangents = yield .*)$", r"\2\n    \1", ranks=(0,))
    with pytest.raises(VerificationError, match=r"0SEND0>1 with 1RECV0>0 .* is on both sides of the yield"):
        autopart.verify(late)


@pytest.mark.parametrize("pattern", [r"(batch\.cut\(.*\))", r"(tangents\[\"d_output_0\"\])"])
def test_parity_sees_a_gradient_scaled_twice(pattern: str) -> None:
    _, plain, x = plain_pair()
    good = program(mesh={"dp": 2}, microbatches=2, placement="ddp")
    assert_parity(plain, (x,), plan=good, loss=torch.Tensor.sum, steps=1)
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(plain, (x,), plan=edited(good, pattern, r"\1 / 2"), loss=torch.Tensor.sum, steps=1)


def test_stage_graphs_and_text_of_a_step_without_a_loss() -> None:
    made = program(mesh={"pp": 2}, microbatches=2)
    first, last = made.stages
    assert [n.name for n in last.backward.graph.nodes if n.op == "placeholder"].count("tangents") == 1
    assert "tangents" not in [n.name for n in first.backward.graph.nodes]
    text = made.ranks[1].source
    assert 'tangents = yield {"output_0": output_0}' in text and "2 forwards, then 2 backwards." in text
