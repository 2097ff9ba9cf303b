"""What the loss of a slice weighs: on the graph alone, slice by slice, against eager terms weighted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopart.capture import capture, read
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.passes.normalise import normalise
from autopart.passes.weights import counts
from autopart.testing.parity import assert_close
from tests.interpret import microbatched_step
from tests.test_accumulate_semantics import model_of, vectors


def step_of(forward: Callable[..., Any]) -> tuple[Any, Any, Captured]:
    """A model of `forward`, its call on 13 samples, and the step as captured."""
    model = model_of(forward)
    call = read(model, tuple(t.double() for t in vectors()))
    return model, call, capture(model, call, route="direct")


def weighed(forward: Callable[..., Any], terms: Callable[..., Any], weights: Callable[..., Any]) -> None:
    """The step in three slices equals the sum of the slices' terms, each with its weight of (slice, whole batch)."""
    model, call, made = step_of(forward)
    outputs, grads = microbatched_step(model, normalise(made, semantics="accumulate"), call, 3)
    x, y = call.unflatten()[0]
    total = torch.zeros(())
    for piece in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        total = total + sum(w * t for w, t in zip(weights(piece, (x, y)), terms(model, *piece), strict=True))
    total.backward()
    assert torch.allclose(outputs[0], total, rtol=1e-12)
    assert_close(grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, 1e-9, "gradient of")


def squared(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By sample, coupled to the others of its slice."""
    h = self.one(x)
    return (self.out(self.two(h - h.mean(0)).tanh()) - y).pow(2).sum(-1)


def valid(y: torch.Tensor) -> torch.Tensor:
    return (y[:, 0] > 0).to(y.dtype)


def samples(piece: Any, whole: Any) -> float:
    return len(piece[0]) / len(whole[0])


def targets(piece: Any, whole: Any) -> float:
    return float(valid(piece[1]).sum() / valid(whole[1]).sum())


def balance(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (self.out(self.one(x).tanh()).softmax(-1).mean(0) ** 2).sum()


def test_a_mean_has_the_weight_of_its_samples() -> None:
    for forward in (
        lambda self, x, y: squared(self, x, y).mean(),
        lambda self, x, y: squared(self, x, y).sum() / len(x),
        lambda self, x, y: (squared(self, x, y) / len(x)).sum(),
    ):
        weighed(forward, lambda m, x, y: (squared(m, x, y).mean(),), lambda p, w: (samples(p, w),))


def test_a_sum_has_weight_one() -> None:
    weighed(
        lambda self, x, y: squared(self, x, y).sum() * 0.5 + squared(self, x, y).sum(),
        lambda self, x, y: (1.5 * squared(self, x, y).sum(),),
        lambda piece, whole: (1.0,),
    )


def test_a_mean_over_valid_targets_has_their_weight() -> None:
    for forward in (
        lambda self, x, y: (squared(self, x, y) * valid(y)).sum() / valid(y).sum(),
        lambda self, x, y: (squared(self, x, y) * valid(y) / valid(y).sum()).sum(),
        lambda self, x, y: (squared(self, x, y) * valid(y)).sum() / valid(y).long().sum(),
    ):
        terms = lambda m, x, y: ((squared(m, x, y) * valid(y)).sum() / valid(y).sum(),)  # noqa: E731
        weighed(forward, terms, lambda p, w: (targets(p, w),))


def test_each_term_has_the_weight_of_its_own_reduction() -> None:
    """Targets count for the term that they normalise, samples for a router's balance and what is alike everywhere."""

    def terms(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fit = (squared(self, x, y) * valid(y)).sum() / valid(y).sum()
        return fit, 0.3 * balance(self, x), (self.two.weight**2).sum()

    weighed(
        lambda self, x, y: sum(terms(self, x, y)),
        terms,
        lambda piece, whole: (targets(piece, whole), samples(piece, whole), samples(piece, whole)),
    )


def test_a_slice_without_valid_targets_contributes_zero() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.out(self.two(self.one(x))), y[:, 0].long()) + balance(self, x)

    model = model_of(forward)
    x, labels = vectors()[0].double(), torch.arange(13)[:, None] % 3
    labels[:5] = -100  # the whole first slice
    call = read(model, (x, labels))
    step = normalise(capture(model, call, route="direct"), semantics="accumulate")
    outputs, grads = microbatched_step(model, step, call, 3)
    assert all(torch.isfinite(value).all() for value in (*outputs.values(), *grads.values()))


def test_counts_are_told_from_other_divisors() -> None:
    masked = step_of(lambda self, x, y: (squared(self, x, y) * valid(y)).sum() / valid(y).sum())[2]
    assert len(counts(masked.inputs, masked.nodes, masked.outputs)) == 1
    scaled = step_of(lambda self, x, y: squared(self, x / x.abs().sum(), y).mean())[2]
    assert counts(scaled.inputs, scaled.nodes, scaled.outputs) == frozenset()


# What is refused


def _mixed(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.hidden(x)
    return (self.out(h) - y).pow(2).sum() + (h.mean(0) ** 2).sum()


def _count_used_twice(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h, count = self.hidden(x), (y > 0).sum()
    return (self.out(h - h.mean(0) * count) - y).pow(2).sum() / count


def _whole_number(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = self.hidden(x)
    return (self.out(h) - y).pow(2).sum() / (y > 0).sum() + (h.mean(0) ** 2).sum()


def _statistic_in_whole_numbers(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    h = self.hidden(x)
    return (self.out(h - h.mean(0)) - y).pow(2).mean(), h.argmax()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_mixed, "adds a sum over the batch .* to what is no sum over it"),
        (_count_used_twice, "divides the loss.* and is used at .* too"),
        (_whole_number, r"whole number divides a term of the loss.*count.to\(loss.dtype\)"),
        (_statistic_in_whole_numbers, "output_1 is a whole number of each microbatch"),
    ],
)
def test_losses_without_one_weight_are_refused(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        normalise(step_of(forward)[2], semantics="accumulate")
