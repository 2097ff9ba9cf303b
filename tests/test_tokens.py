"""How values depend on the tokens: what slices of the sequence can compute, and what is refused, with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Size
from autopart.passes.masks import hides_later
from autopart.passes.tokens import How, Tokens, depend
from tests.test_slice_sequence import Causal, Float

Forward = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Written(nn.Module):
    """A step that a function writes, with an embedding, a projection to queries, keys and values, and a buffer."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.wte, self.qkv, self.write = nn.Embedding(7, 4), nn.Linear(4, 12), forward
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1).double())

    def forward(self, ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.write(self, ids, given).square().sum()

    def parts(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, [samples, one head, tokens, width]."""
        return [part.unsqueeze(1) for part in self.qkv(self.wte(ids)).chunk(3, dim=-1)]


def step(model: nn.Module, *args: torch.Tensor, batch: dict[str, Any] | None = None) -> Captured:
    return captured_step(model.double(), read(model, args, {}, batch=batch), None, False, "direct")


def written(forward: Forward, **batch: Any) -> Captured:
    return step(Written(forward), torch.randint(0, 7, (4, 6)), torch.randn(4, 6).double(), **batch)


def masked(mask: Callable[[Any, torch.Tensor], torch.Tensor]) -> Forward:
    """Attention under a mask."""
    return lambda self, ids, given: F.scaled_dot_product_attention(*self.parts(ids), attn_mask=mask(self, given))


def causal(self: Written, ids: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*self.parts(ids), is_causal=True)


def by_hand(self: Written, ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    q, k, v = self.parts(ids)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf).softmax(-1) @ v


REFUSED: list[tuple[Forward, str]] = [
    (masked(lambda self, given: None), "lets tokens attend to later ones"),
    (masked(lambda self, given: given.view(-1, 1, 1, 6)), "or has a mask of which that is not known"),
    (masked(lambda self, given: self.mask), "or has a mask of which that is not known"),
    (by_hand, r"aten\.bmm\.default relates tokens to each other"),
    (lambda self, ids, given: causal(self, ids)[:, :, 1:], "needs all tokens at once"),
    (lambda self, ids, given: causal(self, ids).mean(2), "takes the mean over the tokens"),
    (lambda self, ids, given: causal(self, ids).sum(2).tanh(), "makes more than a sum of what is a sum over"),
    (lambda self, ids, given: self.qkv(self.wte(ids)), "but there is none here; tokens are dim 1"),
]
SOAK: list[tuple[Forward, str]] = [
    (masked(lambda self, given: self.bias), "relates tokens to each other"),
    (lambda self, ids, given: causal(self, ids).softmax(2), "needs all tokens at once"),
    (lambda self, ids, given: causal(self, ids).cumsum(2), "needs all tokens at once"),
    (lambda self, ids, given: causal(self, ids).amax(2), "takes the max over the tokens"),
    (lambda self, ids, given: causal(self, ids).reshape(-1, 3, 8), "(regroups|relates) (the )?tokens"),
    (lambda self, ids, given: F.conv1d(self.wte(ids).mT, self.qkv.weight[:, :, None]), "no causal attention"),
]


@pytest.mark.parametrize(
    ("forward", "message"), [*REFUSED, *(pytest.param(*row, marks=pytest.mark.soak) for row in SOAK)]
)
def test_refused(forward: Forward, message: str) -> None:
    """With the line, and what else to do."""
    with pytest.raises(CaptureError, match=message) as caught:
        depend(written(forward))
    assert "schedule='1f1b'" in str(caught.value)
    assert "test_tokens.py" in str(caught.value) or "there is none" in str(caught.value)


def test_the_module_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Float(causal=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    with pytest.raises(CaptureError, match=r"in module 'inner' lets tokens attend .*\n  test_slice_sequence.py:\d+"):
        depend(step(Outer(), torch.randn(4, 6, 4).double()))


def test_what_is_whole_cut_and_a_part() -> None:
    made = step(Causal("shifted", "own"), torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6)))
    known = depend(made)
    facts, names = known.facts, {item.target: item.value.name for item in made.inputs}
    assert known.length == 6
    assert facts[names["args[0]"]].how is How.WHOLE and facts[names["args[0]"]].tokens == Tokens(1, 6)
    assert facts[names["wte.weight"]].how is How.WHOLE and facts[names["wte.weight"]].tokens is None
    assert {facts[out.name].how for out in made.outputs if out.kind == "loss"} == {How.PART}
    hows = {out.target: facts[out.name].how for out in made.outputs if out.kind == "grad"}
    assert hows.pop("own") is How.CUT and set(hows.values()) == {How.PART}
    embedded = next(node for node in made.nodes if node.opname == "aten.embedding.default")
    assert facts[embedded.names()[0]].tokens == Tokens(1, 6)
    # samples and tokens share a dim in front of a linear layer, the tokens inside; the loss has one fewer
    folded = next(node for node in made.nodes if node.opname == "aten.addmm.default").refs()[1]
    assert facts[folded].tokens == Tokens(0, 6, Size(1))
    losses = next(node for node in made.nodes if node.op.overloadpacket is torch.ops.aten.nll_loss_forward).refs()
    assert facts[losses[0]].tokens == Tokens(0, 5, Size(1))


def test_shifted_inputs_are_as_long_as_what_is_made_of_them() -> None:
    """Of ``ids[:, :-1]`` and labels ``ids[:, 1:]`` there are fewer tokens than of the ids."""
    made = written(lambda self, ids, given: causal(self, ids[:, :-1]) * given[:, None, 1:, None])
    assert depend(made).length == 5


def test_tokens_are_the_first_dim_where_samples_are_not() -> None:
    class TokensFirst(Float):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1))

    made = step(TokensFirst(), torch.randn(5, 4, 4).double(), batch={"x": 1})
    assert depend(made).length == 5


@pytest.mark.parametrize(
    ("mask", "hides"),
    [
        (lambda: torch.full((6, 6), -torch.inf).triu(1), True),
        (lambda: torch.full((6, 6), -torch.inf).triu(2), False),
        (lambda: torch.full((6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1), True),
        (lambda: torch.full((6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(0), False),
        (lambda: torch.full((6, 6), -1e9).triu(1), False),
        (lambda: torch.where(torch.arange(6)[None] <= torch.arange(6)[:, None], 0.0, -torch.inf), True),
        (lambda: torch.where(torch.arange(6)[None] >= torch.arange(6)[:, None], 0.0, -torch.inf), False),
        (lambda: torch.full((6, 6), -torch.inf).triu(1) - torch.arange(6.0), True),
    ],
)  # fmt: skip
def test_masks_of_numbers_alone(mask: Callable[[], torch.Tensor], hides: bool) -> None:
    """One that hides too little, hides every key of a query by a finite number, or looks ahead does not pass."""
    made = written(masked(lambda self, given: mask().double()))
    attention = next(node for node in made.nodes if "attention" in node.opname)
    name = dict(attention.kwargs)["attn_mask"].name
    assert hides_later(made, name) is hides
    if hides:
        assert depend(made).length == 6
