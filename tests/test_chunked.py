"""Modules in chunks of their tokens: the numbers of one device with less memory, what is refused, what verify finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.api.chunks import COUNTS, ways_out
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.errors import CaptureError, VerificationError
from autopart.ir.plan import Plan, StageMemory
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.passes.chunked import chunked
from autopart.passes.costs import costs
from autopart.passes.predict import predict_memory
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.solver.request import Pins
from autopart.testing import LocalWorld, assert_parity
from tests.models import GPT
from tests.test_predict import case, check, lowered, measure, sample


class Mlp(nn.Module):
    """An MLP with gates, and with dropout."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.down, self.drop = nn.Linear(3 * width, width), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(F.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    """Every token sees those before it, on average; then an MLP, normed before it or after it."""

    def __init__(self, width: int, drop: float, post: bool) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp, self.post = nn.Linear(width, width), nn.LayerNorm(width), Mlp(width, drop), post

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).cumsum(1)
        return self.norm(x + self.mlp(x)) if self.post else x + self.mlp(self.norm(x))


class Placed(nn.Module):
    """An MLP of tokens that know their places, from a parameter, a lookup and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.wpe, self.mlp = nn.Parameter(torch.randn(7, 6)), nn.Embedding(9, 6), Mlp(6, 0.0)
        self.register_buffer("scale", torch.rand(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.place + self.wpe(torch.arange(x.shape[1]))) * self.scale


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Label smoothing over the valid targets, and a z-loss."""
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    return entropy + 1e-2 * logits.logsumexp(-1).square().mean()


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels shifted within the loss, as Hugging Face's losses do it."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=-100)


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 50


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Every token's loss against the mean of its sample's."""
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each - each.sum(1, keepdim=True)).square().sum() / 50


class Model(nn.Module):
    def __init__(self, loss: Loss = smoothed, *, drop: float = 0.0, post: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(11, 6), nn.ModuleList(Layer(6, drop, post) for _ in range(layers))
        self.norm, self.lm_head, self.loss = nn.LayerNorm(6), nn.Linear(6, 11), loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return self.loss(self.lm_head(self.norm(x)), labels)


def batch(samples: int = 5, tokens: int = 7, classes: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Uneven in chunks of two and three tokens."""
    ids = torch.randint(0, classes, (samples, tokens))
    return ids, ids.flip(1).clone()


def step(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Segmented:
    return segment(captured_step(model.double(), read(model, args, {}), None, False, "direct"))


BOTH = {"h.*.mlp": 3, "lm_head": 4}


@cache
def gpt() -> Segmented:
    """A GPT most of which is its logits."""
    ids = torch.zeros(2, 64, dtype=torch.long)
    return step(GPT(layers=1, vocabulary=512, width=8, heads=2, length=64, skips=False), (ids, ids))


@cache
def program() -> Program:
    found = step(Model(summed), batch())
    return lower(found, solve(found, devices=1, chunks=BOTH))


def test_an_output_layer_in_chunks_counts_valid_targets_of_the_whole_batch() -> None:
    ids, labels = batch(6, 7, 30)
    labels[0, :5] = labels[3] = -100  # a sample without any
    model = GPT(layers=1, vocabulary=30, width=8, heads=2, length=7, skips=False)
    assert_parity(model, (ids, labels), devices=1, microbatches=2, chunks={"head": 8})


def test_mlps_and_output_layer_on_stages_and_parts_of_parameters() -> None:
    """Ragged: 5 samples are 3 + 2 on data ranks, in microbatches of 2, 1 and 1, 1. Masks are drawn whole."""
    mesh = {"pp": 2, "dp": 2}
    assert_parity(Model(drop=0.3), batch(), mesh=mesh, microbatches=2, placement="fsdp", chunks=BOTH)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (Model(padded), {"mesh": {"pp": 2}, "chunks": {"lm_head": 2}}),
        (Model(summed), {"mesh": {"dp": 2}, "placement": "zero1", "chunks": BOTH}),
        (Model(summed, post=True), {"devices": 1, "chunks": BOTH, "recompute": True}),
        (Model(post=True), {"mesh": {"pp": 2}, "schedule": "interleaved", "microbatches": 2, "chunks": BOTH}),
        (Model(layers=3), {"mesh": {"pp": 2}, "microbatches": 2, "chunks": {"h.1.mlp": 2}}),
        (Model(), {"mesh": {"pp": 2}, "microbatches": 4, "schedule": "bitpipe", "chunks": BOTH}),
        (Model(), {"devices": 1, "capture": "compile", "chunks": {"h.*.mlp.up": 3, "norm": 2}}),
    ],
)
def test_parity(model: Model, pins: dict[str, Any]) -> None:
    assert_parity(model, batch(), **pins)


class Positions(Model):
    def __init__(self) -> None:
        super().__init__()
        self.placed = Placed()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.lm_head(self.placed(self.wte(ids))), labels)


@pytest.mark.soak
def test_what_is_read_for_each_token_is_cut_and_its_gradient_put_together() -> None:
    """The module lies in two segments; a gradient from the one is added within the other's loop."""
    assert_parity(Positions(), batch(), devices=1, chunks={"placed": 3})


class Several(Model):
    """Two uses of the output layer, one beside another layer's logits, all of which meet in one loss; checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.loss(self.lm_head(self.norm(x)) + self.other(x), labels) + padded(self.lm_head(x), labels)


@pytest.mark.soak
def test_several_output_layers_and_checkpointed_layers() -> None:
    chunks = {**BOTH, "other": 2}
    assert_parity(Several(), batch(), devices=1, capture="compile", chunks=chunks)


@pytest.mark.soak
def test_a_published_model() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 31, "n_positions": 16, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    ids = torch.randint(0, 31, (4, 9))
    chunks = {"lm_head": 4, "transformer.h.*.mlp": 2}
    inputs = {"input_ids": ids, "labels": ids.clone()}
    assert_parity(model, (), inputs, mesh={"pp": 2}, microbatches=2, capture="compile", chunks=chunks)


class Rows(nn.Module):
    """Samples that are rows, or tokens of samples that are rows before they come to the layers in chunks."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.first, self.mlp, self.head, self.flat = nn.Linear(6, 6), Mlp(6, 0.0), nn.Linear(6, 5), flat

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x.view(-1, 6) if self.flat else x)
        return F.cross_entropy(self.head(self.mlp(x)), y.view(-1) if self.flat else y)


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_rows_are_cut_where_values_have_nothing_else(flat: bool) -> None:
    shape = (7, 3) if flat else (7,)
    args = torch.randn(*shape, 6), torch.randint(0, 5, shape)
    assert_parity(Rows(flat), args, devices=1, microbatches=2, chunks={"mlp": 3, "head": 2})


@pytest.mark.soak
def test_labels_in_rows_of_tokens_are_cut_too() -> None:
    """They are views made before the layers of which the last goes with the loss, in another segment."""

    class Early(Rows):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weights = (y.view(-1) + 1.0).log()
            x = self.first(x) * weights.view(y.shape).unsqueeze(-1)
            logits = self.head(self.mlp(x)).view(-1, 5)
            return (F.cross_entropy(logits, y.view(-1), reduction="none") * weights).sum()

    args = torch.randn(4, 3, 6), torch.randint(0, 5, (4, 3))
    assert_parity(Early(False), args, mesh={"pp": 2}, microbatches=2, chunks={"mlp": 3, "head": 2})


@pytest.mark.soak
def test_evaluation_is_in_chunks_too_and_may_have_fewer_samples_than_ranks() -> None:
    model, args = Model().double(), batch()
    with torch.no_grad():
        expected = [model(*(each[:count] for each in args)) for count in (5, 1)]

    def run(rank: int) -> list[torch.Tensor]:
        mine = autopart.parallelize(model_of(model), mesh={"dp": 2}, capture="direct", chunks=BOTH)
        mine(*args)
        with torch.no_grad():
            return [mine(*(each[:count] for each in args)) for count in (5, 1)]

    for found in LocalWorld(2).run(run):
        assert [float(each) for each in found] == pytest.approx([float(each) for each in expected], rel=1e-12)


def model_of(model: Model) -> Model:
    made = Model().double()
    made.load_state_dict(model.state_dict())
    return made


# ---- text and plan ---------------------------------------------------------------------------------------------------


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    """The output layer of a GPT with its loss; a loop in the forward, and one in the backward."""
    text = lower(gpt(), solve(gpt(), devices=1, chunks={"head": 6})).ranks[0].source
    start = text.index("def norm_forward")
    golden("head_in_chunks.py", text[start : text.index("\n\n\ndef stage0", start)] + "\n")


def test_a_plan_has_its_chunks_in_its_file_and_says_them() -> None:
    found = step(Model(), batch())
    plan = solve(found, devices=1, chunks=BOTH)
    assert plan.chunks == (("h.*.mlp", 3), ("lm_head", 4)) and Plan.from_json(plan.to_json()) == plan
    assert "in chunks h.*.mlp: 3, lm_head: 4" in plan.summary() and "lm_head: 4: pinned" in plan.explain()
    assert "chunks: none -> h.*.mlp: 3, lm_head: 4" in solve(found, devices=1).diff(plan)


def test_layers_share_a_body_unless_some_are_in_chunks_and_some_not() -> None:
    found = step(Model(layers=3), batch())
    every, one = (chunked(found, ((name, 2),)) for name in ("h.*.mlp", "h.1.mlp"))
    assert len(every.bodies) == len(found.bodies) and len(one.bodies) == len(found.bodies) + 1
    assert [bool(one.bodies[s.body].forward.loops) for s in one.segments if s.name.startswith("h.")] == [0, 1, 0]
    assert chunked(found, ()) == found


def test_a_program_can_be_read_back(tmp_path: Any) -> None:
    program().write(tmp_path)
    again = Program.read(tmp_path)
    assert again.staged == program().staged and verify(again)
    loops = sum(node.op == "call_module" for node in again.stages[0].forward.graph.nodes)
    assert loops == len(program().plan.segments)  # in which the loops are written out


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "placement", "microbatches"),
    [({"pp": 2}, "ddp", 2), pytest.param({"pp": 2, "dp": 2}, "fsdp", 3, marks=pytest.mark.soak)],
)
def test_what_is_kept_is_as_predicted(mesh: dict[str, int], placement: str, microbatches: int) -> None:
    plain = case("gpt", mesh, placement, "1f1b", microbatches)
    made = lowered(sample("gpt"), replace(plain.plan, chunks=(("head", 3), ("blocks.*.up", 2))))
    check(made)
    before, after = (predict_memory(c.staged, c.scheduled, c.plan)[-1] for c in (plain, made))
    assert after.activations < before.activations


class Live(TorchDispatchMode):
    """The bytes of all storages that operators made and that are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.seen:
                key, size = storage.data_ptr(), storage.nbytes()
                self.seen.add(key)
                self.now += size
                weakref.finalize(storage, self._freed, key, size)
        self.most = max(self.most, self.now)
        return made

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak(**pins: Any) -> tuple[int, StageMemory]:
    """The most bytes that a step of the GPT really has at once, and what is predicted."""
    made = lower(gpt(), solve(gpt(), devices=1, **pins))
    model = GPT(layers=1, vocabulary=512, width=8, heads=2, length=64, skips=False).double()
    mine, ids = autopart.parallelize(model, plan=made, capture="direct"), torch.randint(0, 512, (2, 64))
    mine(ids, ids).backward()
    with Live() as live:
        mine(ids, ids).backward()
    return live.most, made.plan.prediction.memory[0]


def test_peak_memory_falls_as_predicted() -> None:
    """Logits, under their log-softmax, and its gradient; in chunks there is an eighth of them at a time."""
    plain, predicted = peak()
    less, fewer = peak(chunks={"head": 8})
    logits = 2 * 64 * 512 * 8
    assert predicted.activations - fewer.activations > 0.9 * logits
    assert fewer.transient == logits // 8
    assert plain - less >= (predicted.activations - fewer.activations) - fewer.transient
    assert less < plain - 1.7 * logits


def test_where_nothing_fits_chunks_of_the_output_layer_are_a_way_out() -> None:
    limit = solve(gpt(), devices=1, chunks={"head": 4}).prediction.peak
    with pytest.raises(autopart.PlanInfeasible, match=r"It fits with: chunks=\{'head': (2|4)\}"):
        solve(gpt(), devices=1, memory=limit)
    assert set(ways_out(gpt(), {})) == {f"chunks={{'head': {count}}}" for count in COUNTS}
    pins: list[Pins] = [{"schedule": name} for name in ("zb-h1", "auto", "vocab", "seq1f1b(slices=2)")]
    for each in [*pins, Pins(chunks={})]:
        assert not ways_out(gpt(), each)


def test_costs_count_what_a_chunk_makes_again() -> None:
    found = step(Model(), batch())
    plain, made = costs(found), costs(chunked(found, tuple(BOTH.items())))
    layers = [i for i, cost in enumerate(plain) if cost.name.startswith("h.")]
    for i in layers:
        one, other = plain[i].at(4), made[i].at(4)
        assert other.saved_bytes < one.saved_bytes and one.recomputed_bytes == 0 < other.recomputed_bytes
        assert other.forward_flops == one.forward_flops and other.backward_flops > one.backward_flops


# ---- refusals and faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({"h.0": 2}, r"chunks: h.0 cannot.*cumsum.*module 'h.0' needs all tokens at once.*test_chunked.py:\d+"),
        ({"wte": 4, "h": 2}, r"chunks: h cannot be computed in chunks: aten.cumsum"),
    ],
)
def test_modules_whose_tokens_meet_are_refused(chunks: dict[str, int], message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        chunked(step(Model(), batch()), tuple(chunks.items()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (shifted, r"aten.slice.Tensor needs all tokens at once.*shift the labels"),
        (squared, r"aten.sub.Tensor needs a sum over all tokens before it can go on with each of them"),
    ],
)
def test_losses_whose_tokens_meet_are_refused(loss: Loss, message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s)chunks: lm_head .*{message}"):
        chunked(step(Model(loss), batch()), (("lm_head", 2),))


@pytest.mark.parametrize(
    ("pins", "error", "message"),
    [
        ({"chunks": {"lm_haed": 2}}, ValueError, "chunks: no module .* 'lm_haed'; did you mean 'lm_head'"),
        ({"chunks": {"lm_head": 1}}, ValueError, "chunks: 'lm_head' in 1 chunks; pin at least 2"),
        ({"chunks": {"lm_head": "8"}}, TypeError, "chunks: expected module names with how many"),
        ({"chunks": ["lm_head"]}, TypeError, "chunks: expected a mapping"),
        ({"mesh": {"pp": 2}, "schedule": "zb-h1"}, ValueError, "chunks: lm_head .*'zb-h1' has its backward in two"),
        ({"mesh": {"pp": 2}, "schedule": "vocab"}, ValueError, "chunks: .*not done yet beside vocab"),
        ({"mesh": {"pp": 2}, "schedule": "auto"}, ValueError, "chunks: schedule='auto' .*pin one of whole backwards"),
    ],
)
def test_pins_that_do_not_go_with_it_are_refused(pins: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autopart.plan(Model(padded), batch(), capture="direct", **{"chunks": {"lm_head": 2}, **pins})
    if error is TypeError:
        with pytest.raises(error, match=message):
            autopart.parallelize(Model(), **pins)


def test_faults_in_loops_are_found() -> None:
    """A chunk that is left out or comes twice; a sum or a part that is not put where it belongs."""
    source = program().ranks[0].source
    assert source.count("range(0, 7, 2)") == 2

    def verified(text: str) -> None:
        verify(replace(program(), ranks=(replace(program().ranks[0], source=text),)))

    for old, new, message in (
        ("range(0, 7, 2)", "range(2, 7, 2)", "leave out 0 to 2 of the 7 in dim 1"),
        ("range(0, 7, 2)", "range(0, 6, 2)", "leave out 6 to 7 of the 7 in dim 1"),
        ("range(0, 7, 2)", "range(0, 7, 1)", "have 1 to 2 twice of the 7 in dim 1"),
    ):
        for text in (source.replace(old, new, 1), new.join(source.rsplit(old, 1))):
            with pytest.raises(
                VerificationError, match=rf"rule text: .*the chunks of line \d+, `\w+_part = .*{message}"
            ):
                verified(text)
    needed = "nll_loss_backward = ", "div_1 = aten.mul_.Tensor(div_1, 2)\n        nll_loss_backward = "
    with pytest.raises(VerificationError, match="div_1 is written over in a loop, the next turn of which needs it"):
        verified(source.replace(*needed, 1))
    lines = source.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("def norm_forward"))
    puts = [i for i in range(first, len(lines)) if lines[i].lstrip().startswith(("aten.add_.", "aten.copy_."))]
    assert len(puts) == 4  # the loss; the gradients of weight, bias and input
    for i in puts:
        with pytest.raises(VerificationError, match=r"rule values: .*_part is never read"):
            verified("".join([*lines[:i], *lines[i + 1 :]]))
    verified(source)


def test_a_step_with_chunks_keeps_nothing_more_between_actions() -> None:
    """What is measured at the end of every action of a rank, with and without."""
    plain = case("gpt", {"dp": 1}, "ddp", microbatches=2)
    made = lowered(sample("gpt"), replace(plain.plan, chunks=(("head", 3),)))
    before, after = (measure(each)[0].memory for each in (plain, made))
    assert after.activations < before.activations and after.peak < before.peak
