"""Strategies: every one of every operator is run on all places of an axis, and makes up the whole."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.codec import decode, encode
from autopart.ir.graph import Node, Ref, Size, Value
from autopart.ir.placed import Cut, PlacedBody, PlacedFunction, Strategy
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.segmented import Body, Function
from autopart.passes.localise import localise
from autopart.rules.factor import Factor
from autopart.rules.split import cut_of, lengths, shard_of, takes_samples
from autopart.rules.strategies import Ruled, strategies
from autopart.testing.rules import Tensors, as_node, values
from tests import places
from tests.rule_cases import Sizes, aten
from tests.rule_cases_network import CASES
from tests.test_rules import _Fixed


def run_all(node: Node, tensors: Tensors, results: Any, degree: int, turns: Collection[int] = ()) -> list[Strategy]:
    """Run the node under each of its strategies on all places, and compare; returns the strategies."""
    known = values(tensors)
    ruled = Ruled.of(node, known)
    found = strategies(ruled, sorted(ruled.cuts(degree, turns), key=str), degree)
    outs = tuple(out.name for out in node.outs if out is not None)
    function = Function(tuple(known[o.value.name] for o in ruled.call.operands), (node,), outs)
    for strategy in found:
        inputs = tuple(how or Replicate() for _, how in strategy.needs)
        gives = tuple(how for how in strategy.gives if how is not None)
        part = PlacedFunction(function, inputs, (strategy,), gives)
        placed = PlacedBody(Body("", function, (), None), "tp", degree, part, (), None)
        local = [localise(placed, place).forward for place in range(degree)]
        given = [
            places.scattered(tensors[v.name], how, degree, 1) for v, how in zip(function.inputs, inputs, strict=True)
        ]
        envs, _ = places.run(local, [*zip(*given, strict=True)] or [()] * degree, 1, 1)
        wanted = [x for x, out in zip(results, node.outs, strict=True) if out is not None]
        for name, how, whole in zip(outs, gives, wanted, strict=True):
            made = places.gathered([env[name] for env in envs], how, 1)
            tolerance = 1e-4 if whole.dtype == torch.float32 else 1e-10
            torch.testing.assert_close(
                made, whole, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, s=strategy: f"{s}: {m}"
            )
    return list(found)


@pytest.mark.parametrize("degree", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_every_strategy_of_every_operator_makes_up_the_whole(degree: int) -> None:
    found = {name: run_all(*as_node(CASES[name](Sizes(_Fixed(4)))), degree) for name in CASES}
    assert sum(any(s.cut is not None for s in each) for each in found.values()) > 350
    assert sum(any(s.spread for s in each) for each in found.values()) >= 5


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_every_strategy_makes_up_the_whole_at_drawn_sizes(name: str, data: st.DataObject) -> None:
    run_all(*as_node(CASES[name](Sizes(data.draw))), 2)


def of(op: Any, *args: Any, degree: int = 2, **kwargs: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """From how operands are needed to how results are given, for each strategy; each is run, too."""
    found = run_all(*as_node((op, args, kwargs)), degree)
    return {tuple(how for _, how in s.needs): s.gives for s in found}


R, P = Replicate(), Partial()


def test_a_matrix_product_has_the_six_strategies_that_there_are() -> None:
    a, b = torch.randn(4, 6).double(), torch.randn(6, 8).double()
    assert of(aten.mm.default, a, b) == {
        (R, R): (R,), (Shard(0), R): (Shard(0),), (R, Shard(1)): (Shard(1),), (Shard(1), Shard(0)): (P,),
        (P, R): (P,), (R, P): (P,),
    }  # fmt: skip


def test_a_bias_is_part_of_the_sum() -> None:
    bias, a, b = (torch.randn(*shape).double() for shape in ((8,), (4, 6), (6, 8)))
    found = of(aten.addmm.default, bias, a, b)
    assert found[P, Shard(1), Shard(0)] == (P,) and (R, Shard(1), Shard(0)) not in found


def test_a_number_that_is_added_is_not_added_twice() -> None:
    x, mask = torch.randn(4).double(), torch.tensor([True, False, True, True])
    assert (P,) not in of(aten.add.Tensor, x, 1.0) and of(aten.add.Tensor, x, 0.0)[P,] == (P,)
    assert (P, R) in of(aten.masked_fill.Scalar, x, mask, 0.0) and (P, R) not in of(
        aten.masked_fill.Scalar, x, mask, 2.0
    )


def test_truth_values_do_not_add_up() -> None:
    assert (P,) not in of(aten.clone.default, torch.tensor([True, False]))


def test_a_vocabulary_may_be_split() -> None:
    weight, ids = torch.randn(7, 4).double(), torch.tensor([[0, 6, 3], [5, 1, 2]])
    assert of(aten.embedding.default, weight, ids, degree=3)[Shard(0), R] == (P,)
    scores, target = torch.randn(4, 7).double(), torch.tensor([6, 0, 3, -100])
    assert of(aten._log_softmax.default, scores, 1, False)[Shard(1),] == (Shard(1),)
    node, tensors, results = as_node((aten.nll_loss_forward.default, scores, target, None, 2, -100))
    used = Node(node.op, node.args, node.kwargs, (node.outs[0], None), False, False, "", "")
    assert any(s.gives == (P, None) and s.spread for s in run_all(used, tensors, results, 2))


def test_a_mean_and_a_maximum_over_a_split_dim_are_not_offered() -> None:
    for op in (aten.mean.dim, aten.amax.default):
        assert set(of(op, torch.randn(3, 4).double(), [1]).values()) <= {(R,), (Shard(0),), (P,)}
        assert (Shard(1),) not in of(op, torch.randn(3, 4).double(), [1])


def test_the_samples_of_a_norm_may_be_split_where_all_places_have_as_many() -> None:
    """Statistics are then known to all; gradients of parameters add up."""
    x, moved = torch.randn(4, 3, 2).double() * 3 + 5, (torch.randn(3).double(), torch.rand(3).double())
    weight, bias = torch.randn(3).double(), torch.randn(3).double()
    norm, settings = aten._native_batch_norm_legit_functional.default, (True, 0.1, 1e-5)
    assert of(norm, x, weight, bias, *moved, *settings)[Shard(0), R, R, R, R] == (Shard(0), R, R, R, R)
    assert (Shard(0), R, R, R, R) not in of(norm, x, weight, bias, *moved, *settings, degree=3)
    assert of(aten._native_batch_norm_legit.no_stats, x, None, None, *settings)[Shard(0),] == (Shard(0), R, R)
    _, mean, scale = aten._native_batch_norm_legit.no_stats(x, weight, bias, *settings)
    backward = (torch.randn_like(x), x, weight, None, None, mean, scale, True, 1e-5, [True] * 3)
    assert of(aten.native_batch_norm_backward.default, *backward)[Shard(0), Shard(0), R, R, R] == (Shard(0), P, P)


# ---- splits of merged dims -------------------------------------------------------------------------------------------

THREE = (Factor(3), Factor(6), Factor(4))


def test_a_split_of_heads_is_one_of_the_merged_dim_inside_three() -> None:
    shard = shard_of(((0, 1, 2),), THREE, Cut(1), 2)
    assert shard == Shard(0, 3) and cut_of(((0, 1, 2),), THREE, shard, 2) == Cut(1)
    assert lengths(72, 3, 1, 2) == (12, 12)


def test_heads_that_do_not_divide_are_cut_between_heads() -> None:
    shard = shard_of(((0, 1, 2),), THREE, Cut(1), 4)
    assert shard == Shard(0, 3, 4) and cut_of(((0, 1, 2),), THREE, shard, 4) == Cut(1)
    assert lengths(72, 3, 4, 4) == (8, 8, 4, 4)
    assert cut_of(((0, 1, 2),), THREE, Shard(0, 3), 4) is None  # 6 elements each: in the middle of a head


def test_a_split_that_crosses_loops_is_of_none() -> None:
    assert cut_of(((0, 1),), (Factor(3), Factor(8)), Shard(0), 2) is None
    assert cut_of(((0, 1),), (Factor(4), Factor(6)), Shard(0), 2) == Cut(0)
    assert cut_of(((0, 1),), (Factor(4), Factor(6)), Shard(0, 2), 2) == Cut(0, 2)
    assert cut_of(((0, 1),), (Factor(4), Factor(6)), Shard(0, 4), 3) == Cut(1)


def test_pieces_do_not_depend_on_what_the_batch_leaves() -> None:
    assert lengths(Size(12), 1, 1, 3) == (Size(4),) * 3
    assert lengths(Size(1, 1), 1, 1, 2) is None and lengths(3, 1, 1, 4) is None
    assert lengths(Size(12), Size(1), 1, 5) == (3, 3, 2, 2, 2)
    merged = (Factor(Size(1)), Factor(12))
    assert shard_of(((0, 1),), merged, Cut(1), 2) == Shard(0, Size(1))


def test_samples_are_split_evenly() -> None:
    """Of a microbatch that the axis divides; where it does not, that is an error and no rounding."""
    merged, half = (Factor(Size(1)), Factor(3)), Size(Fraction(1, 2))
    assert lengths(Size(1), 1, 1, 2) == (half, half) and lengths(Size(6), 1, 1, 2) == (Size(3), Size(3))
    assert shard_of(((0, 1),), merged, Cut(0), 2) == Shard(0) and cut_of(((0, 1),), merged, Shard(0), 2) == Cut(0)
    assert takes_samples(merged, Cut(0), 2) and not takes_samples(merged, Cut(1), 2)
    assert [each.text("b") for each in lengths(Size(3, 4), 1, 1, 2) or ()] == ["3 * b // 2 + 2"] * 2
    assert half.at(6) == 3 and decode(Size, encode(half), "") == half
    with pytest.raises(ValueError, match="5 samples cannot be split into equal parts"):
        half.at(5)


def test_a_size_among_the_arguments_is_cut_down() -> None:
    x = torch.randn(4, 12).double()
    assert of(aten.view.default, x, [4, 3, 4], degree=3)[Shard(1),] == (Shard(1),)
    assert of(aten.native_layer_norm.default, x, [12], None, None, 1e-5)[Shard(0),] == (Shard(0),) * 3
    out = Value("y", (Size(4), 3), x.dtype)
    node = Node(aten.view.default, (Ref("x"), (Size(4), 3)), (), (out,), True, False, "", "")
    ruled = Ruled.of(node, {"x": Value("x", (Size(1), 4, 3), x.dtype)})
    assert [s.gives for s in strategies(ruled, [Cut(1)], 2)][1] == (Shard(0, Size(1)),)
