"""Means over the batch as sums and divisors, and squeezes that keep a batch of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopart.ir.graph import Input, Node, Ref, Size, Value
from autopart.passes.decompose import decompose_means, explicit_squeezes

aten = torch.ops.aten
X = Input(Value("x", (Size(1), 4), torch.float64), "input", "args[0]")


def node(op: Any, args: tuple[Any, ...], name: str, shape: tuple[Any, ...]) -> Node:
    return Node(op, args, (), (Value(name, shape, torch.float64),), True, False, "", "")


def test_a_mean_over_the_batch_is_a_sum_by_the_whole_size() -> None:
    total, quotient = decompose_means([X], [node(aten.mean.default, (Ref("x"),), "m", ())])
    assert (total.op, total.args[:2]) == (aten.sum.dim_IntList, (Ref("x"), (0, 1)))
    assert (quotient.op, quotient.args) == (aten.div.Tensor, (Ref("m_sum"), Size(4, whole=True)))
    assert list(quotient.names()) == ["m"]


def test_new_names_avoid_those_in_use() -> None:
    nodes = [
        node(aten.neg.default, (Ref("x"),), "m_sum", (Size(1), 4)),
        node(aten.mean.default, (Ref("m_sum"),), "m", ()),
    ]
    names = [name for made in decompose_means([X], nodes) for name in made.names()]
    assert len(set(names)) == 3


def test_a_mean_over_other_dims_stays() -> None:
    nodes = [node(aten.mean.dim, (Ref("x"), (1,)), "m", (Size(1),))]
    assert decompose_means([X], nodes) == tuple(nodes)


def test_a_mean_in_half_precision_is_summed_in_single() -> None:
    half = replace(X, value=Value("x", (Size(1), 4), torch.bfloat16))
    mean = Node(aten.mean.dim, (Ref("x"), (0,), True), (), (Value("m", (1, 4), torch.bfloat16),), True, False, "a", "b")
    total, quotient, cast = decompose_means([half], [mean])
    assert total.args == (Ref("x"), (0,), True) and dict(total.kwargs) == {"dtype": torch.float32}
    assert quotient.args[1] == Size(1, whole=True) and cast.outs == mean.outs
    assert (cast.module, cast.source) == ("a", "b")


def test_a_squeeze_keeps_a_batch_of_one() -> None:
    column = replace(X, value=Value("x", (Size(1), 1, 4), torch.float64))
    (made,) = explicit_squeezes([column], [node(aten.squeeze.default, (Ref("x"),), "y", (Size(1), 4))])
    assert made.op is aten.squeeze.dims and made.args == (Ref("x"), (1,))
