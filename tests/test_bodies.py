"""Bodies: local names that a person would give, and what two uses of one body must agree on."""

from __future__ import annotations

import keyword

import pytest
import torch
from torch import nn

from autopart.capture import capture, read
from autopart.ir.names import RESERVED
from autopart.ir.segmented import Function, Segmented
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from tests.capture_cases import CASES, normalised


def segmented(name: str) -> Segmented:
    return segment(normalised(name)[2])


def defined(function: Function) -> list[str]:
    return [v.name for v in function.inputs] + [name for node in function.nodes for name in node.names()]


@pytest.mark.parametrize("name", CASES)
def test_names_are_python_and_unique_and_what_is_saved_is_the_forwards_own(name: str) -> None:
    made = segmented(name)
    assert len({body.name for body in made.bodies}) == len(made.bodies)
    for body in made.bodies:
        assert body.name.isidentifier()
        assert set(body.saved) <= set(defined(body.forward))
        assert body.backward is not None or body.saved == ()
        for function in (body.forward, body.backward):
            if function is None:
                continue
            found = defined(function)
            assert len(set(found)) == len(found)
            assert all(n.isidentifier() and not keyword.iskeyword(n) and n not in RESERVED for n in found)
            read_so_far = {value.name for value in function.inputs}
            for node in function.nodes:
                assert set(node.refs()) <= read_so_far
                read_so_far |= set(node.names())
            assert set(function.outputs) <= read_so_far


def test_locals_are_named_after_the_layer() -> None:
    made = segmented("gpt")
    body = made.bodies[made.segments[1].body]
    assert [value.name for value in body.forward.inputs][:4] == ["x", "norm1_weight", "norm1_bias", "qkv_weight"]
    assert "attention" in " ".join(defined(body.forward))
    assert "labels" in [value.name for value in made.bodies[made.segments[-1].body].forward.inputs]


def test_reserved_words_are_renamed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterDict({"in": torch.ones(3, 3), "torch": torch.ones(3), "b": torch.ones(3)})

        def forward(self, world: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return ((world @ self.parts["in"] + self.parts["torch"]) * self.parts["b"] - batch).pow(2).mean()

    module = Odd()
    call = read(module, (torch.randn(4, 3), torch.randn(4, 3)))
    for body in segment(normalise(capture(module, call, route="direct"))).bodies:
        names = defined(body.forward)
        assert not set(names) & {*RESERVED, "in"}


def test_parts_in_another_order_are_another_body() -> None:
    """Two layers with the same operations on the same shapes, but with their two weights in exchanged places."""

    class Layer(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
            self.turned = turned

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = (self.q, self.p) if self.turned else (self.p, self.q)
            return (x @ one).tanh() @ two

    module = nn.Sequential(*(Layer(turned) for turned in (False, False, True, True, False)))
    call = read(module, (torch.randn(4, 4),))
    made = segment(normalise(capture(module, call, loss_fn=lambda o: o.pow(2).mean(), route="direct")))
    kinds = [piece.body for piece in made.segments[:5]]
    assert kinds[2] == kinds[3] and kinds[1] != kinds[2]
    assert [piece.forward_parameters for piece in made.segments[1:3]] == [("1.p", "1.q"), ("2.q", "2.p")]
