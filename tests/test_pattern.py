"""Other lengths: a call that differs in its lengths alone is captured by one trace, and means what two traces say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import capture as capturing
from autopart.capture import capture, capture_again, read
from autopart.testing import LocalWorld, reference_random
from tests.models import MODELS


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes of the traces that are made from now on."""
    made: list[int] = []
    traced = capturing._trace

    def trace(route: str, module: Any, call: Any, sized: Any, *rest: Any) -> Any:
        made.append(sized.batch)
        return traced(route, module, call, sized, *rest)

    monkeypatch.setattr(capturing, "_trace", trace)
    return made


class Lengths(nn.Module):
    """Arithmetic with the length: a division by it, positions up to it, a mean over it, and attention."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.embed, self.out, self.kind = nn.Embedding(11, 8), nn.Linear(8, 11), kind

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        h = self.embed(ids) / length + torch.arange(length)[:, None] * 0.1
        h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        if self.kind == "dropout":
            h = nn.functional.dropout(h, 0.3, self.training)
        if self.kind == "branch" and length > 6:
            h = torch.tanh(h)
        if self.kind == "number":  # at 9 it is the batch alone
            h = h * (ids.shape[0] + length - 9.0)
        if self.kind == "rows":
            h = h.flatten(0, 1)[: ids.shape[0] + length - 9].sum() + h
        logits = self.out(h)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.mean() + each.view(labels.shape).sum(1).mean()


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 11, (batch, length)), torch.randint(0, 11, (batch, length))


ONE_TRACE = [
    pytest.param("gpt", "direct", marks=pytest.mark.soak),
    ("llama", "direct"),
    ("lengths plain", "compile"),
    ("lengths dropout", "direct"),
]


@pytest.mark.parametrize(("name", "route"), ONE_TRACE)
def test_one_trace_says_what_two_do(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("lengths"):
        model, args, kwargs = Lengths(name.split()[1]).double(), tokens(3, 9), {}
    else:
        model, args, kwargs = MODELS[name]()
    _, pattern = capture_again(model, read(model, args, kwargs), (), route=route)
    short = lambda x: x[:, :5].contiguous() if isinstance(x, torch.Tensor) and x.dim() == 2 else x  # noqa: E731
    args, kwargs = tuple(map(short, args)), {key: short(value) for key, value in kwargs.items()}
    call = read(model, args, kwargs)
    made = counted(monkeypatch)
    again, same = capture_again(model, call, (pattern,), route=route)
    assert made == [call.batch] and same is pattern
    fresh = capture(model, call, route=route)
    assert str(again) == str(fresh) and (again.inputs, again.outputs) == (fresh.inputs, fresh.outputs)


@pytest.mark.parametrize("kind", ["branch", "rows", "number"])
def test_what_lengths_change_otherwise_is_traced_twice_or_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that meets the length in one number doubles at one length and not at another."""
    model = Lengths(kind).double()
    try:
        _, pattern = capture_again(model, read(model, tokens(4, 9)), (), route="direct")
    except autopart.CaptureError:
        assert kind == "number"
        return
    made = counted(monkeypatch)
    call = read(model, tokens(4, 5 if kind == "branch" else 17))
    try:
        again, _ = capture_again(model, call, (pattern,), route="direct")
    except autopart.CaptureError:
        again = None
    assert made == [4, 8]
    if again is not None:
        assert str(again) == str(capture(model, call, route="direct"))


def trained(model: Any, batches: list[tuple[torch.Tensor, ...]]) -> list[Any]:
    """Losses and gradients of a loop over batches of any shapes; after each step one sample is evaluated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        grads = model.full_grads() if hasattr(model, "full_grads") else {n: p.grad for n, p in model.named_parameters()}
        found.append((loss.detach(), {name: grad.clone() for name, grad in grads.items()}))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append((model(*(part[:1] for part in batch)).detach(), {}))
        model.train()
    return found


SEQUENCES = {
    "alternating": [(8, 5), (8, 9), (8, 5), (8, 9)],
    "shrink after grow": [(8, 4), (8, 12), (8, 6)],
    "short last batch": [(8, 6), (8, 6), (6, 6)],
    "another length than compiled at": [(8, 8), (8, 5)],
}


def test_dropout_at_another_length() -> None:
    plain, batches = Lengths("dropout").double(), [tokens(8, 8), tokens(8, 5)]
    with reference_random():
        expected = trained(copy.deepcopy(plain), batches)
    parallel = autopart.parallelize(copy.deepcopy(plain), devices=2, mesh={"pp": 2}, microbatches=2, capture="direct")
    for (loss, grads), (reference, wanted) in zip(trained(parallel, batches), expected, strict=True):
        torch.testing.assert_close(loss, reference, rtol=1e-10, atol=0)
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("pins", [{"mesh": {"pp": 2}, "microbatches": 4}, {"mesh": {"dp": 2}, "microbatches": 2}])
def test_f036_f037_f038_lengths_and_batches_that_change(case: str, pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Lengths().double()
    batches = [tokens(*size) for size in SEQUENCES[case]]
    expected = trained(copy.deepcopy(plain), batches)

    def rank_main(rank: int) -> list[Any]:
        return trained(autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins), batches)

    for found in LocalWorld(2).run(rank_main):
        for (loss, grads), (reference, wanted) in zip(found, expected, strict=True):
            torch.testing.assert_close(loss, reference, rtol=1e-10, atol=0)
            assert set(grads) == set(wanted)
            for name, grad in wanted.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-13)
