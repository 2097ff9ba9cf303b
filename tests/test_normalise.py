"""After `normalise` the microbatches add up to the whole batch; what cannot is refused with module and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.capture import capture, read
from autopart.capture.call import Call
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Share, Size, map_arg
from autopart.passes.normalise import normalise
from tests.capture_cases import CASES, Two, captured, normal, normalised
from tests.interpret import assert_same, eager, microbatched_step

SPLITS = ((4, 1), (5, 2), (6, 3), (7, 7))
"""(batch, microbatches): whole, uneven, even, single samples."""


@pytest.mark.parametrize("name", CASES)
def test_microbatches_add_up_to_the_whole(name: str) -> None:
    case = CASES[name]
    module, call, made = normalised(name)
    for batch, microbatches in SPLITS if len(made.nodes) < 250 else SPLITS[1:2]:
        sized = call.resized(batch)
        expected = eager(module, sized, case.loss_fn, case.target, grad=case.grad)
        assert_same(made, sized, microbatched_step(module, made, sized, microbatches), expected, 10 * case.tolerance)


def made_from(forward: Callable[..., Any], *args: Any, batch: Any = None) -> tuple[nn.Module, Call, Captured]:
    module = type("Model", (Two,), {"forward": forward})()
    call = read(module, args, batch=batch)
    return module, call, normalise(capture(module, call, route="direct"))


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda o, y, w: F.mse_loss(o, y),
    "sum": lambda o, y, w: F.mse_loss(o, y, reduction="sum"),
    "per sample": lambda o, y, w: F.smooth_l1_loss(o, y, reduction="none").sum(-1).mean(),
    "huber": lambda o, y, w: F.huber_loss(o, y, delta=0.5),
    "binary": lambda o, y, w: F.binary_cross_entropy_with_logits(o, y.sigmoid()),
    "classes": lambda o, y, w: F.cross_entropy(o, y.argmax(-1)),
    "soft classes": lambda o, y, w: F.cross_entropy(o, y.softmax(-1)),
    "smoothed": lambda o, y, w: F.cross_entropy(o, y.argmax(-1), label_smoothing=0.1),
    "class weights": lambda o, y, w: F.cross_entropy(o, y.argmax(-1), weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "ignored": lambda o, y, w: F.cross_entropy(o, torch.where(w > 0.4, y.argmax(-1), -100)),
    "weighted": lambda o, y, w: ((o - y) ** 2 * w[:, None]).sum() / w.sum(),
    "clamped count": lambda o, y, w: ((o - y).abs() * (w > 0.5)[:, None]).sum() / (w > 0.5).sum().clamp(min=1),
    "divergence": lambda o, y, w: F.kl_div(o.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "two terms": lambda o, y, w: F.mse_loss(o, y) + 0.1 * o.abs().sum(-1).mean() + 3.0,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss = LOSSES[name]

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return loss(self.out(self.lin(x)), y, w)

    module, call, made = made_from(forward, normal(6, 4), normal(6, 3), torch.rand(6).double())
    for microbatches in (1, 2, 4, 6):
        found = microbatched_step(module, made, call, microbatches)
        assert_same(made, call, found, eager(module, call), 1e-11)


def test_a_microbatch_without_targets_contributes_nothing() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.lin(x)), y)

    y = torch.tensor([-100, -100, 1, 2, -100, 0])
    module, call, made = made_from(forward, normal(6, 4), y)
    found = microbatched_step(module, made, call, 3)
    assert_same(made, call, found, eager(module, call), 1e-12)


def test_penalty_on_parameters_counts_once() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(x)) + 0.3 * self.lin.weight.pow(2).sum() + self.out.bias.mean()

    module, call, made = made_from(forward, normal(6, 4))
    for microbatches in (1, 4):
        assert_same(made, call, microbatched_step(module, made, call, microbatches), eager(module, call), 1e-12)


def test_shares_and_whole_sizes_are_needed() -> None:
    """Without the share of a constant, or with a microbatch's size for the whole, the sum is wrong."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(x)) + 0.3 * self.lin.weight.pow(2).sum()

    module, call, made = made_from(forward, normal(6, 4))
    expected = eager(module, call)

    def changed(leaf: Callable[[Any], Any]) -> Captured:
        nodes = (replace(n, args=tuple(map_arg(a, leaf) for a in n.args)) for n in made.nodes)
        return replace(made, nodes=tuple(nodes))

    faults = [
        changed(lambda a: 1 if isinstance(a, Share) else a),
        changed(lambda a: replace(a, whole=False) if isinstance(a, Size) else a),
    ]
    for broken in faults:
        assert_same(broken, call, microbatched_step(module, broken, call, 1), expected, 1e-12)
        with pytest.raises(AssertionError):
            assert_same(broken, call, microbatched_step(module, broken, call, 3), expected, 1e-6)


def test_counts_are_a_prologue() -> None:
    made = normalised("gpt")[2]
    assert [item.kind for item in made.inputs if item.kind == "prologue"] == ["prologue"]
    assert {name for node in made.prologue for name in node.refs()} & {"labels"}
    assert not any(node.backward for node in made.prologue)
    assert normalised("mlp")[2].prologue == ()


def test_one_gradient_output_a_use() -> None:
    made = normalised("gpt")[2]
    assert [out.target for out in made.outputs if out.kind == "grad"].count("wte.weight") == 2
    targets = [out.target for out in made.outputs if out.kind == "grad"]
    assert targets == sorted(targets, key=[i.target for i in made.of_kind("parameter")].index)
    assert all(out.partial for out in made.outputs if out.kind == "grad")


def test_no_view_of_a_parameter_is_saved() -> None:
    made = normalised("gpt")[2]
    parameters = {item.value.name for item in made.of_kind("parameter")}
    produced = {name: node for node in made.nodes for name in node.names()}
    for node in made.nodes:
        if node.backward:
            for name in node.refs():
                source = produced.get(name)
                saved = source is not None and not source.backward
                read = set(source.refs()) if saved else set()
                assert not (read and read <= parameters), f"{node.opname} saves {name}"


def test_outputs_say_how_microbatches_join() -> None:
    made = normalised("half_frozen")[2]
    ways = {out.kind: (out.dim, out.partial) for out in made.outputs}
    assert ways == {"loss": (None, True), "output": (0, False), "grad": (None, True)}


# Refusals


def _leaky(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.noise(self.lin(x)))  # here


def _shuffle(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x)[:, torch.randperm(4)])  # here


def _poisson(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x) + torch.poisson(x.abs()))  # here


def _reads_counter(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1  # here
    return self.head(self.lin(x) * self.count)


def _overwrites_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # here
    return self.head(self.lin(x))


def _clamps(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.lin.weight.clamp_(-1, 1)  # here
    return self.head(self.lin(x))


def _contrastive(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return F.cross_entropy(h @ h.T, torch.arange(len(h)))  # here


def _centred(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return self.head(h - h.mean(0, keepdim=True))  # here


def _root_of_the_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x)).sqrt()  # here


def _shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x).roll(1, 0))  # here


def _normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.batch_norm(self.lin(x)))  # here


def _norm_statistics(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.running_norm(self.lin(x)))  # here


@pytest.mark.parametrize("route", ["compile", "direct"])
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_leaky, "'noise'.*rrelu.*draws random numbers in a way"),
        (_shuffle, "randperm.*draws random numbers in a way"),
        (_poisson, "poisson.*draws random numbers in a way"),
        (_reads_counter, 'the buffer count is updated by every microbatch.*semantics="accumulate"'),
        (_overwrites_input, r"the input args\[0\] is changed in place"),
        (_clamps, "the parameter lin.weight is changed in place"),
        (_contrastive, "couples the samples of a batch"),
        (_centred, "couples the samples of a batch"),
        (_root_of_the_mean, "couples the samples of a batch"),
        (_shifted, "couples the samples of a batch"),
        (_normalised, "'batch_norm'.*couples the samples of a batch"),
        (_norm_statistics, "'running_norm' couples the samples of a batch.*semantics=\"accumulate\""),
    ],
)
def test_refused_with_module_and_line(forward: Callable[..., Any], message: str, route: str) -> None:
    module = type("Model", (Two,), {"forward": forward})()
    module.noise = nn.RReLU()
    module.register_buffer("count", torch.zeros(()))
    module.batch_norm = nn.BatchNorm1d(4, track_running_stats=False, dtype=torch.float64)
    module.running_norm = nn.BatchNorm1d(4, dtype=torch.float64)
    made = capture(module, read(module, (normal(4, 4),)), route=route)
    with pytest.raises(CaptureError, match=rf"(?s){message}") as caught:
        normalise(made)
    lines, start = inspect.getsourcelines(forward)
    number = next(start + i for i, line in enumerate(lines) if "# here" in line)
    assert f"test_normalise.py:{number}" in str(caught.value)


def test_dropout_is_accepted_where_it_does_nothing() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.lin(x), 0.0)[:, None]
        return self.head(F.dropout(F.scaled_dot_product_attention(h, h, h), 0.5, training=False))

    module, call, made = made_from(forward, normal(4, 4))
    assert_same(made, call, microbatched_step(module, made, call, 2), eager(module, call), 1e-12)


def test_output_with_the_batch_inside_a_dim_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.lin(x)
        return self.head(h), h.transpose(0, 1).reshape(-1)

    with pytest.raises(CaptureError, match="output_1 has the batch inside dim 0"):
        made_from(forward, normal(4, 4))


def test_normalise_is_a_pure_function() -> None:
    made = captured("half_frozen", "direct")[2]
    once = normalise(made)
    assert normalise(made) == once
