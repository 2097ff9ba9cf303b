"""The user's own operators: registered with the loops that they have, they train in parts as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.ir.graph import Node, Ref, Size, Value
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.rules.dependence import makes_zero
from autopart.rules.factor import bind
from autopart.rules.flops import flops
from autopart.rules.own import own_rule
from autopart.rules.table import rule
from autopart.testing import assert_parity
from autopart.testing.rules import as_node, values
from tests.own_ops import (
    FUSED,
    FUSED_BACKWARD,
    fused,
    fused_backward,
    registered,
    sample_fused,
    share,
    stretch,
    total,
)  # fmt: skip
from tests.test_rule_strategies import of


class Fused(nn.Module):
    """The operator on samples, between layers, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(5, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(fused(self.first(x), self.weight, self.bias)).square().mean()


@pytest.mark.parametrize(
    ("capture", "pins"),
    [
        ("direct", {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2}),
        (
            "direct",
            {"mesh": {"tp": 2}, "placement": {"weight": {"tp": Shard(1)}}},
        ),  # a sum over h, its bias at one place
        pytest.param("compile", {"mesh": {"pp": 2}, "microbatches": 4}, marks=pytest.mark.soak),
    ],
)
def test_f093_a_registered_operator_trains_as_on_one_device(capture: str, pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with registered(FUSED, FUSED_BACKWARD):
        assert_parity(Fused(), (torch.randn(6, 3, 4),), capture=capture, steps=1, **pins)


def test_without_a_rule_the_refusal_names_the_way_out() -> None:
    model = autopart.parallelize(Fused(), devices=2, mesh={"dp": 2}, microbatches=2, capture="direct")
    with pytest.raises(autopart.CaptureError, match=r"autopart_tests.fused.default .*no factor rule") as error:
        model(torch.randn(6, 3, 4))
    assert "autopart.register_sharding_rule(" in str(error.value) and "test_register.py:" in str(error.value)
    with registered(FUSED), pytest.raises(autopart.CaptureError, match=r"fused_backward.default .*no factor rule"):
        model(torch.randn(6, 3, 4))  # the operator that its backward calls is one of its own


def test_without_a_rule_all_samples_are_computed_on_every_rank_of_one_microbatch() -> None:
    model = Fused()
    plan = autopart.plan(model, (torch.randn(6, 3, 4),), mesh={"dp": 2}, capture="direct")
    assert any(
        "autopart_tests.fused.default has no sharding rule, so every place computes all of it" in note
        for note in plan.notes
    )
    assert_parity(model, (torch.randn(6, 3, 4),), mesh={"dp": 2}, steps=1)


def test_a_rule_that_does_not_fit_is_refused_with_the_line() -> None:
    model = autopart.parallelize(Fused(), devices=2, mesh={"dp": 2}, capture="direct")
    with (
        registered((fused, "b s h, h k, k -> b s k"), FUSED_BACKWARD),
        pytest.raises(autopart.CaptureError, match="dim 0 of weight is 5, and by the rule 4") as error,
    ):
        model(torch.randn(6, 3, 4))
    assert "test_register.py:" in str(error.value) and "'b s h, h k, k -> b s k'" in str(error.value)
    with (
        registered((fused, "b h, k h, k -> b k"), FUSED_BACKWARD),
        pytest.raises(autopart.CaptureError, match="x has 3 dims, and by the rule 2"),
    ):
        model(torch.randn(6, 3, 4))


def test_a_coupled_batch_is_refused() -> None:
    model = autopart.parallelize(Fused(), devices=2, mesh={"dp": 2}, microbatches=2, capture="direct")
    with (
        registered((*FUSED[:2], {"whole": "b"}), FUSED_BACKWARD),
        pytest.raises(autopart.CaptureError, match="couples the samples of a batch"),
    ):
        model(torch.randn(6, 3, 4))


# ---- inside segments -------------------------------------------------------------------------------------------------

R, P = Replicate(), Partial()


def test_a_tensor_axis_splits_what_the_rule_allows() -> None:
    """Every strategy is run on 2 and 3 places: batch, sequence, the columns (5 of them) and the rows of the weight."""
    with registered(FUSED):
        for degree in (2, 3):
            found = of(torch.ops.autopart_tests.fused.default, *sample_fused(), degree=degree)
            assert found[Shard(0), R, R] == (Shard(0),)
            assert found[R, Shard(0), Shard(0)] == (Shard(2),)  # 5 columns
            assert found[Shard(2), Shard(1), P] == (P,)  # 4 rows, and the bias at one place
            assert found[R, P, P] == (P,)


def test_a_number_among_the_arguments_counts_a_loop() -> None:
    with registered((stretch, "b h -> b n h", {"sizes": {"count": "n"}, "linear": ("x",)})):
        found = of(torch.ops.autopart_tests.stretch.default, torch.randn(4, 6).double(), 6, degree=2)
        assert found == {  # of n, every place reads all of x
            (R,): (Shard(1),), (Shard(0),): (Shard(0),), (Shard(1),): (Shard(2),), (P,): (P,)
        }  # fmt: skip
        node, tensors, _ = as_node((torch.ops.autopart_tests.stretch.default, torch.randn(4, 6), 6))
        made = rule(node, values(tensors))
        assert made is not None and [(f.name, f.size) for f in made.factors] == [("n", 6), ("b", 4), ("h", 6)]
        assert made.sizes == (("count", (0,)),)


# ---- what a text says ------------------------------------------------------------------------------------------------


def test_leading_dims_merged_loops_and_dims_that_stay_whole() -> None:
    x = Value("x", (Size(1), 3, 6), torch.float64)
    node = Node(torch.ops.autopart_tests.share.default, (Ref("x"),), (), (x,), True, False, "", "")
    for text, options, names, blocked in (
        ("... h -> ... h", {"whole": "h"}, ["*0", "*1", "h"], [False, False, True]),
        ("... h -> ... h", {"whole": "..."}, ["*0", "*1", "h"], [True, True, False]),
        ("b _ h -> b _ h", {}, ["b", "_0", "h", "_1"], [False, True, False, True]),
    ):
        with registered((share, text, options)):
            made = rule(node, {"x": x})
        assert made is not None and [f.name for f in made.factors] == names
        assert [f.blocked for f in made.factors] == blocked
        assert made.factors[0].size == Size(1)
    with (
        registered((share, "b s (g c) -> b s (g c)")),
        pytest.raises(autopart.CaptureError, match="no shape tells the size of loop 'g'"),
    ):
        rule(node, {"x": x})


def test_a_result_of_size_1_is_no_sum_over_the_loop_that_it_is_said_to_be() -> None:
    x, y = Value("x", (Size(1), 6), torch.float64), Value("y", (Size(1), 1), torch.float64)
    node = Node(torch.ops.autopart_tests.share.default, (Ref("x"),), (), (y,), True, False, "", "")
    for text in ("b h -> b h", "... h -> ... h"):
        with (
            registered((share, text)),
            pytest.raises(autopart.CaptureError, match="dim 1 of result 0 is 1, and by the rule 6"),
        ):
            rule(node, {"x": x})
    with registered((share, "b h -> b 1")):
        found = rule(node, {"x": x})
    assert found is not None and found.contracts(0, 1) and not found.contracts(0, 0)


def test_a_term_holds_for_each_tensor_of_a_list_and_for_none() -> None:
    text = "b h, h -> b h"
    with registered((total, text, {"linear": ("xs*", "scale")})):
        op, xs = torch.ops.autopart_tests.total.default, [torch.randn(4, 6).double() for _ in range(3)]
        assert of(op, xs, None)[(Shard(1),) * 3] == (Shard(1),)
        assert of(op, xs, torch.randn(6).double())[P, P, P, R] == (P,)
        node, tensors, _ = as_node((op, xs, None))
        assert [o.slot for o in bind(node, values(tensors)).operands] == ["xs.0", "xs.1", "xs.2"]


def test_work_is_counted_by_the_loops() -> None:
    """Two operations an iteration that is summed over: b s k h of the product, and both products of its backward."""
    x, weight, bias = sample_fused()
    node, tensors, _ = as_node((torch.ops.autopart_tests.fused.default, x, weight, bias))
    back, given, _ = as_node(
        (torch.ops.autopart_tests.fused_backward.default, torch.randn(6, 3, 5).double(), x, weight)
    )
    assert flops(node, values(tensors)) == 6 * 3 * 5
    with registered(FUSED, FUSED_BACKWARD):
        assert flops(node, values(tensors)) == 2 * 6 * 3 * 5 * 4
        assert flops(back, values(given)) == 2 * (2 * 6 * 3 * 5 * 4) + 2 * 6 * 3 * 5


def test_a_name_of_torch_in_another_library_means_nothing() -> None:
    with torch.library._scoped_library("autopart_tests_names", "FRAGMENT") as library:
        library.define("zeros(Tensor x) -> Tensor")
        out = Value("y", (3,), torch.float64)
        node = Node(torch.ops.autopart_tests_names.zeros.default, (Ref("x"),), (), (out,), True, False, "", "")
        assert node.aten == "" and not makes_zero(node)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "text", "options", "message"),
    [
        (fused, "b s h, k h, k", {}, "expected operands -> results"),
        (fused, "b s h, k h -> b s k", {}, "has 2 tensor operands, but autopart_tests.fused.default has 3"),
        (fused, "b s h, k h, k -> b s k, k", {}, "has 2 results, but autopart_tests.fused.default has 1"),
        (fused, "b s s, k h, k -> b s k", {}, "'b s s' has a loop twice"),
        (fused, "b s h, k h, k -> b ... k", {}, "'...' after a dim"),
        (fused, "b s h, k h, k -> b s k+1", {}, "'k[+]1' names no loop"),
        (fused, "b s h, k h, k -> b s k", {"whole": "q"}, "whole: q: expected one of b, h, k, s"),
        (
            fused,
            "b s h, k h, k -> b s k",
            {"linear": ("weight bais",)},
            "linear: bais: expected one of bias, weight, x",
        ),
        (fused, "b s h, k h, k -> b s k", {"sizes": {"n": "b"}}, "sizes: n: expected one of"),
        (fused, "b s h, k h, k -> b s k", {"reads": {1: "x"}}, "reads: 1: expected one of 0"),
        (fused, "b s h, k h, k -> b s k", {"reads": {0: "y"}}, "reads: y: expected one of bias, weight, x"),
        (stretch, "b h -> b n h", {}, "n is in no operand .* name it in whole=, or"),
        ("autopart_tests::fused", "h -> h", {}, "has 1 tensor operand,"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {}, "aten.mm.default has a rule of autopart's"),
        (torch.ops.aten.add_.Tensor, "b, b -> b", {}, "writes to its arguments"),
    ],
)
def test_a_text_that_does_not_fit_the_operator(op: Any, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopart.register_sharding_rule(op, text, **options)
    assert own_rule(fused._opoverload) is None


@pytest.mark.parametrize("op", [torch.add, "no::such", "nothing", torch.ops.aten.add, None])
def test_what_is_no_operator(op: Any) -> None:
    with pytest.raises(TypeError, match="op: expected a custom op"):
        autopart.register_sharding_rule(op, "b -> b")


def test_one_operator_has_one_rule() -> None:
    with registered(FUSED):
        autopart.register_sharding_rule(torch.ops.autopart_tests.fused, FUSED[1], **FUSED[2])  # the same again
        with pytest.raises(ValueError, match="registered with another rule already: 'b s h, k h, k -> b s k'"):
            autopart.register_sharding_rule("autopart_tests::fused", FUSED[1])
    assert own_rule(fused_backward._opoverload) is None and own_rule(fused._opoverload) is None
