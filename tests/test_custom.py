"""Operators whose fake implementations tell other shapes than they return are stopped at their first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopart
from autopart.runtime.custom import hold_operators, told
from tests.own_ops import fused, liar, sample_fused


class Lying(nn.Module):
    """Eager code would go on with one column, which broadcasts; a program is made for as many as are told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * liar(self.weight.detach())).square().mean()


def test_a_custom_operator_that_lies_about_its_shape_is_named_with_the_line() -> None:
    model = autopart.parallelize(Lying(), devices=2, mesh={"dp": 2}, capture="direct")
    with pytest.raises(autopart.RankFailure, match=r"autopart_tests.liar.default returned float32\[1, 1\]") as error:
        model(torch.randn(4, 4))
    assert "its fake implementation says float32[1, 4]" in str(error.value)
    assert "(at test_custom.py:" in str(error.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_operators_of_other_libraries_are_held_to_their_word() -> None:
    source = "a = torch.ops.autopart_tests.fused.default"
    namespace = {"torch": torch}
    hold_operators(namespace, source)
    exec(source, namespace)
    args = sample_fused()
    torch.testing.assert_close(namespace["a"](*args), fused(*args), rtol=0, atol=0)
    assert told(torch.ops.autopart_tests.fused.default, args, {}) == (((6, 3, 5), torch.float64),)
    assert namespace["torch"].float64 is torch.float64


@pytest.mark.parametrize("source", ["aten = torch.ops.aten", "torch.ops.autopart.all_reduce.default(x)", "x = torch"])
def test_programs_of_torch_alone_call_torch(source: str) -> None:
    namespace = {"torch": torch}
    hold_operators(namespace, source)
    assert namespace["torch"] is torch


def test_shapes_are_told_once_for_alike_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, asked = {"torch": torch}, []
    hold_operators(namespace, "torch.ops.autopart_tests.fused.default")
    op = namespace["torch"].ops.autopart_tests.fused.default
    monkeypatch.setattr("autopart.runtime.custom.told", lambda *given: asked.append(given) or told(*given))
    x, weight, bias = sample_fused()
    for given in (x, x + 1, x[:2], x[:2].float()):
        op(given, weight.to(given.dtype), bias.to(given.dtype))
    assert len(asked) == 3
