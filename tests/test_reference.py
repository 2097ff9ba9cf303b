"""Random operations draw what one device draws, under every plan, at every call; generators stay where they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api import parallelize
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.errors import CaptureError, VerificationError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.runtime.batch import Batch
from autopart.testing import assert_parity, reference_random
from tests.launch import launch
from tests.random_models import RANDOM_MODELS, Dropping, Layer
from tests.tensor_axis import CHEAP
from tests.test_parity_faults import edited


@cache
def segmented(name: str, route: str) -> Any:
    model, args = RANDOM_MODELS[name]()
    return segment(captured_step(model, read(model, args), None, False, route))


def program(name: str, mesh: dict[str, int], microbatches: int, route: str = "direct") -> Program:
    step = segmented(name, route)
    return lower(step, solve(step, devices=Mesh.of(mesh).size, mesh=mesh, microbatches=microbatches))


ROWS = [
    ("dropping", {"pp": 2}, 3, "direct"),
    ("dropping", {"dp": 2}, 2, "direct"),
    ("dropping", {"pp": 2, "dp": 2}, 3, "direct"),
    ("checkpointed", {"pp": 2}, 2, "compile"),
    ("noise", {"pp": 2, "dp": 2}, 2, "compile"),
    ("encoder", {"dp": 3}, 2, "direct"),
    ("attention", {"pp": 2, "dp": 2}, 3, "direct"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{'x'.join(row[1])}-{row[3]}")
def test_parity(row: Any) -> None:
    model, args = RANDOM_MODELS[row[0]]()
    assert_parity(model, args, plan=program(*row), capture=row[3], steps=2, tolerance=1e-9)


def test_parity_of_gpt2_with_dropout() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    ids = torch.randint(0, 64, (5, 8))
    data = {"input_ids": ids, "labels": ids}
    assert_parity(GPT2LMHeadModel(config), (), data, mesh={"pp": 2, "dp": 2}, devices=4, microbatches=2, steps=2)


# ---- masks -----------------------------------------------------------------------------------------------------------


class Masks(nn.Module):
    """Ones dropped by equal layers: the results are the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        masks, loss = [], torch.zeros((), dtype=x.dtype)
        for layer in self.h:
            masks.append(layer.drop(torch.ones_like(x)))
            loss = loss + (layer(x) * masks[-1]).sum()
        return loss, *masks


def test_f010_f011_masks_do_not_depend_on_the_plan_and_differ_by_layer() -> None:
    torch.manual_seed(4)
    x = torch.randn(6, 8).double()
    with reference_random():
        expected = Masks().double()(x)[1:]
    split: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "cluster": CHEAP}
    for pins in (split, {"mesh": {"pp": 3}}, {"mesh": {"pp": 1}, "microbatches": 3}):
        torch.manual_seed(4)
        model = parallelize(Masks().double(), devices=Mesh.of(pins["mesh"]).size, capture="direct", **pins)
        found = model(x)[1:]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), pins
    halves = expected[0].chunk(2)
    assert not torch.equal(*halves), "the two data ranks drop alike"
    assert not torch.equal(expected[0], expected[1]) and not torch.equal(expected[1], expected[2])


def test_layers_that_draw_differently_share_a_body() -> None:
    made = program("dropping", {"pp": 1}, 1)
    source = made.ranks[0].source
    assert source.count("def h_forward(") == 1 and 'batch.random(f"h.{i}.drop#0", k)' in source
    assert "for i in range(1, 4):" in source  # the first layer has no gradient to hand on


# ---- calls and seeds -------------------------------------------------------------------------------------------------


def stepping(**pins: Any) -> tuple[Any, Callable[[], float]]:
    """A parallelised model, and a training call of it on always the same data."""
    plain, args = RANDOM_MODELS["dropping"]()
    model = parallelize(plain, devices=2, capture="direct", **pins)

    def step() -> float:
        return float(model(*args).detach())

    return model, step


def test_f071_a_new_seed_begins_at_call_0_and_eval_does_not_count() -> None:
    model, step = stepping(mesh={"dp": 2})
    plain, args = RANDOM_MODELS["dropping"]()
    torch.manual_seed(5)
    first, second = step(), step()
    with torch.no_grad():
        model(*args)
    model.eval(), plain.eval()
    quiet = [float(model(*args).detach()) for _ in range(2)]
    assert quiet[0] == quiet[1] and abs(quiet[0] - float(plain(*args).detach())) < 1e-12
    model.train()
    third = step()
    assert len({first, second, third, quiet[0]}) == 4
    torch.manual_seed(6)
    other = step()
    torch.manual_seed(5)
    assert [step(), step(), step()] == [first, second, third] and other not in (first, second, third)
    assert len(model._autopart.programs) == 3, "a new seed compiled a new program"
    plain.train()
    with reference_random(5):
        expected = [float(plain(*args).detach()) for _ in range(3)]
    with reference_random(5, call=2):
        assert float(plain(*args).detach()) == expected[2]
    assert max(abs(a - b) for a, b in zip(expected, (first, second, third), strict=True)) < 1e-12


def test_evaluation_draws_what_the_last_training_call_drew() -> None:
    plain, args = RANDOM_MODELS["noise"]()
    model = parallelize(RANDOM_MODELS["noise"]()[0], devices=2, mesh={"dp": 2}, capture="direct")

    def losses(module: Any) -> list[float]:
        made = []
        for training in (True, True, False, False):
            module.train(training)
            with torch.set_grad_enabled(training):
                made.append(float(module(*args).detach()))
        return made

    found = [losses(model)]
    with reference_random():
        found.append(losses(plain))
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-12
    assert found[0][0] != found[0][1] and found[0][2] == found[0][3]


def test_f012_generators_stay_where_they_are() -> None:
    _, step = stepping(mesh={"pp": 2})
    plain, args = RANDOM_MODELS["noise"]()

    def generators() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), torch.initial_seed(), random.getstate(), repr(numpy.random.get_state())

    before = generators()
    step()
    with reference_random(9):
        plain(*args).backward()
    assert generators() == before


def test_the_reference_leaves_other_draws_and_hooks_alone() -> None:
    from torch.nn.modules import module as hooks

    before = dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model, args = Dropping(2), (torch.randn(4, 8, generator=torch.Generator()), torch.zeros(4, 3))
    torch.manual_seed(3)
    with reference_random():
        model(*args)
        assert torch.equal(torch.rand(4), expected)
        with pytest.raises(NotImplementedError, match="randperm"):
            nn.Sequential(Shuffle())(args[0])
    assert (dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)) == before


class Shuffle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.randperm(len(x))]


def test_what_runs_again_draws_again() -> None:
    """A checkpointed module has the gradients of the plain one; a function that cannot be followed is refused."""
    found = []
    for name in ("dropping", "checkpointed"):
        model, args = RANDOM_MODELS[name]()
        with reference_random(1):
            model(*args).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=False).square().sum()

    x = torch.ones(4, requires_grad=True)
    with reference_random(), pytest.raises(NotImplementedError, match="checkpoint a module"):
        Function()(x).backward()


def test_a_packed_sequence_with_dropout_is_refused() -> None:
    lstm = nn.LSTM(4, 4, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    with reference_random(), pytest.raises(CaptureError, match="packed sequence"):
        lstm(packed)


def losses_of_ranks_seeded_apart() -> list[float]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    plain, args = RANDOM_MODELS["dropping"]()
    dist.init_process_group("gloo")
    model = parallelize(plain, mesh={"dp": 2}, capture="direct")
    torch.manual_seed(10 + dist.get_rank())
    return [float(model(*args).detach()) for _ in range(2)]


@pytest.mark.timeout(200)
def test_ranks_that_are_seeded_apart_draw_from_the_seed_of_the_first() -> None:
    found = launch(losses_of_ranks_seeded_apart, 2, timeout=180).values
    plain, args = RANDOM_MODELS["dropping"]()
    with reference_random(10):
        expected = [float(plain(*args).detach()) for _ in range(2)]
    for losses in found:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-12


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_mask_at_the_wrong_place_in_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = RANDOM_MODELS["dropping"]()
    made = program("dropping", {"dp": 2}, 2)
    right = Batch.random

    def shifted(self: Batch, name: str, k: int) -> torch.Tensor:
        draw = right(self, name, k)
        draw[3] = 0
        return draw

    monkeypatch.setattr(Batch, "random", shifted)
    with pytest.raises(AssertionError, match="loss of step 0"):
        assert_parity(model, args, plan=made, steps=1)


def test_a_text_that_draws_under_another_name_is_refused() -> None:
    made = program("dropping", {"dp": 2}, 2)
    assert "values" in {item.rule for item in verify(made).checked}
    with pytest.raises(VerificationError, match=r"rule values: rank 0, .*is given .* where .* takes"):
        verify(edited(made, r'"h\.\{i\}#0"', '"h.{i}.drop#0"'))
    with pytest.raises(VerificationError, match="no random operation is called"):
        verify(edited(made, r"h\.\{i\}\.drop#0", "h.{i}.drop#1"))
    wrong = replace(made.ranks[0], source=made.ranks[0].source.replace('.drop#0", k)', '.drop#0", 0)'))
    with pytest.raises(VerificationError, match="microbatch"):
        verify(replace(made, ranks=(wrong, *made.ranks[1:])))


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    golden("dropping_pp2_dp2_first.py", program("dropping", {"pp": 2, "dp": 2}, 3).ranks[0].source)
