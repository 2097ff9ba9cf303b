"""Peepholes: the same values with fewer nodes."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopart.ir.graph import Node, Ref, Size, Value
from autopart.passes.simplify import simplify
from tests.capture_cases import captured
from tests.interpret import whole_step

aten = torch.ops.aten
FLOAT = torch.float32


def node(op: torch._ops.OpOverload, name: str, shape: tuple[int | Size, ...], *args: object) -> Node:
    return Node(op, args, (), (Value(name, shape, FLOAT),), True, False, "", "")


def test_double_transpose_vanishes() -> None:
    x, w = Value("x", (Size(1), 3), FLOAT), Value("w", (3, 5), FLOAT)
    nodes = [
        node(aten.t.default, "t", (5, 3), Ref("w")),
        node(aten.t.default, "tt", (3, 5), Ref("t")),
        node(aten.t.default, "ttt", (5, 3), Ref("tt")),
        node(aten.mm.default, "y", (Size(1), 5), Ref("x"), Ref("tt")),
    ]
    made, alias = simplify(nodes, [x, w])
    assert alias == {"tt": "w"}
    assert [n.outs[0].name for n in made if n.outs[0]] == ["t", "ttt", "y"]
    assert made[1].args == (Ref("w"),) and made[2].args == (Ref("x"), Ref("w"))


def test_concatenation_with_nothing_vanishes() -> None:
    empty, k, other = Value("empty", (0,), FLOAT), Value("k", (2, 3), FLOAT), Value("other", (1, 3), FLOAT)
    nodes = [
        node(aten.cat.default, "one", (2, 3), (Ref("empty"), Ref("k")), 0),
        node(aten.cat.default, "two", (3, 3), (Ref("one"), Ref("other")), 0),
    ]
    made, alias = simplify(nodes, [empty, k, other])
    assert alias == {"one": "k"}
    assert [n.args for n in made] == [((Ref("k"), Ref("other")), 0)]


def test_concatenation_with_nothing_is_a_contiguous_copy_for_a_view() -> None:
    empty, k = Value("empty", (0,), FLOAT), Value("k", (2, 3), FLOAT)
    nodes = [
        node(aten.cat.default, "one", (2, 3), (Ref("empty"), Ref("k")), 0),
        node(aten.view.default, "two", (6,), Ref("one"), (6,)),
    ]
    made, alias = simplify(nodes, [empty, k])
    assert alias == {} and made[0].opname == "aten.clone.default" and made[0].args == (Ref("k"),)
    assert dict(made[0].kwargs) == {"memory_format": torch.contiguous_format}


def test_zero_rows_are_not_nothing() -> None:
    """Only the legacy empty tensor of shape (0,) is skipped: one of shape (0, 3) is a tensor like others."""
    none, k = Value("none", (0, 3), FLOAT), Value("k", (2, 3), FLOAT)
    made, alias = simplify([node(aten.cat.default, "one", (2, 3), (Ref("none"), Ref("k")), 0)], [none, k])
    assert alias == {} and len(made) == 1


def test_values_stay_bit_for_bit() -> None:
    module, call, made = captured("gpt", "direct")
    nodes, alias = simplify(made.nodes, (item.value for item in made.inputs))
    outputs = tuple(replace(out, name=alias.get(out.name, out.name)) for out in made.outputs)
    one = whole_step(module, made, call)
    two = whole_step(module, replace(made, nodes=nodes, outputs=outputs), call)
    assert all(torch.equal(one[0][key], two[0][key]) for key in one[0])
    assert all(torch.equal(one[1][key], two[1][key]) for key in one[1])
    assert len(nodes) < len(made.nodes)
