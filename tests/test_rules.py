"""Every factor rule is checked by executing its operator on whole and on split tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.graph import Node, Ref, Size, Value
from autopart.rules.factor import Rule, common, ratio, times
from autopart.rules.table import FAMILIES, TABLE, family, rule
from autopart.testing.rules import Results, RuleError, Tensors, as_node, check, unflatten, values
from tests.rule_cases import Sizes, aten
from tests.rule_cases_network import CASES, UNEXECUTED

# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_rule_describes_what_its_operator_does(name: str, data: st.DataObject) -> None:
    node, tensors, results = as_node(CASES[name](Sizes(data.draw)))
    found = rule(node, values(tensors))
    assert found is not None
    check(node, tensors, results, found)


def test_every_entry_of_the_table_is_executed() -> None:
    assert sum(map(len, FAMILIES)) == len(TABLE), "two families claim one operator"
    assert set(TABLE) - set(CASES) == UNEXECUTED


def test_an_operator_without_an_entry_has_no_rule() -> None:
    node, tensors, _ = as_node((aten.renorm.default, torch.rand(4, 2), 2, 0, 1.0))
    assert rule(node, values(tensors)) is None


DTENSOR_ALONE = """
    adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d clip contiguous diag is_same_size linalg_pinv max min mvlgamma
    max_pool1d_with_indices nll_loss2d_backward nll_loss2d_forward to true_divide view
    diagonal_copy diagonal_scatter expand_copy split_with_sizes_copy view_copy
    _linalg_check_errors _local_scalar_dense equal
    bernoulli fractional_max_pool2d fractional_max_pool3d multinomial normal_functional randint_like
    _batch_norm_with_update_functional _scaled_mm _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward
    frexp index_reduce max_unpool3d nanmedian
    cholesky cholesky_inverse geqrf linalg__powsum linalg_eig linalg_householder_product linalg_ldl_factor_ex
    linalg_ldl_solve lu_unpack ormqr
"""
"""Where DTensor has a rule and the table none: composites and copies of views, values and random numbers, the rest."""


def test_dtensor_knows_no_operator_that_models_are_made_of_and_the_table_does_not() -> None:
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    known = {*propagator.op_strategy_funcs, *getattr(propagator, "op_single_dim_strategy_funcs", ())}
    ops = {op for op in known if op.namespace == "aten" and not op._schema.is_mutable}
    names = {op.overloadpacket.__name__ for op in ops if family(op) is None and not op._overloadname.endswith("out")}
    names = {name for name in names if not name.startswith(("special_", "_foreach", "_fused_adam"))}
    assert len(ops) > 300 and names <= set(DTENSOR_ALONE.split())


# ---- rules that are wrong on purpose --------------------------------------------------------------------------------


def _of(name: str, seed: int = 3) -> tuple[Node, Tensors, Results, Rule]:
    """A call of a case with every size at 3 and every flag set, and its rule."""
    node, tensors, results = as_node(CASES[name](Sizes(_Fixed(seed))))
    found = rule(node, values(tensors))
    assert found is not None
    return node, tensors, results, found


class _Fixed:
    """Draws the number nearest to 3 that a strategy allows."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, strategy: Any) -> int:
        wrapped = getattr(strategy, "wrapped_strategy", strategy)
        return max(wrapped.start, min(wrapped.end, self.seed))


BLOCKED = """_softmax _log_softmax _softmax_backward_data cumsum cumprod flip roll native_layer_norm sort argmax topk
native_batch_norm std var logsumexp linalg_vector_norm triu embedding gather scatter.src slice_backward select cat
native_layer_norm_backward glu max_pool2d_with_indices constant_pad_nd _weight_norm_interface
_scaled_dot_product_flash_attention_for_cpu arange kthvalue"""


@pytest.mark.parametrize("name", BLOCKED.split())
def test_unblocking_a_factor_is_noticed(name: str) -> None:
    node, tensors, results, found = _of(name)
    assert any(factor.blocked for factor in found.factors)
    free = replace(found, factors=tuple(replace(factor, blocked=False) for factor in found.factors))
    with pytest.raises(RuleError):
        check(node, tensors, results, free)


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("mul", "self other"), ("add", "self"), ("div", "other"), ("mm", "self mat2"), ("addmm", "self"),
        ("exp", "self"),
        ("gelu_backward", "self"), ("where.self", "other"), ("native_layer_norm", "input"), ("amax", "self"),
        ("_softmax_backward_data", "output"), ("add number", "self"), ("convolution", "input"), ("relu", "self"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "query"), ("_to_copy to int", "self"),
    ],
)  # fmt: skip
def test_a_false_claim_of_linearity_is_noticed(name: str, claim: str) -> None:
    node, tensors, results, found = _of(name)
    with pytest.raises(RuleError):
        check(node, tensors, results, replace(found, linear=(frozenset(claim.split()),)))


def test_a_wrong_reduction_is_noticed() -> None:
    node, tensors, results, found = _of("amax")
    wrong = replace(found, factors=tuple(replace(factor, reduction="sum") for factor in found.factors))
    with pytest.raises(RuleError, match="do not make up the whole"):
        check(node, tensors, results, wrong)


def test_a_swapped_dim_is_noticed() -> None:
    node, tensors, results, found = _of("mm")
    (left, (m, k)), right = found.operands
    with pytest.raises(RuleError):
        check(node, tensors, results, replace(found, operands=((left, (k, m)), right)))


def test_an_added_operand_must_take_its_share() -> None:
    """Without linear sets nothing says that the bias is part of the sum, and the pieces add it twice."""
    node, tensors, results, found = _of("addmm")
    with pytest.raises(RuleError, match="split by loop 'k'"):
        check(node, tensors, results, replace(found, linear=()))


# ---- sizes that move with the batch ---------------------------------------------------------------------------------


def view_rule(source: tuple[Any, ...], target: tuple[Any, ...]) -> Rule:
    out = Value("y", target, torch.float64)
    node = Node(aten.view.default, (Ref("x"), target), (), (out,), True, False, "", "")
    found = rule(node, {"x": Value("x", source, torch.float64)})
    assert found is not None
    return found


def test_views_follow_the_batch_through_merged_dims() -> None:
    merged = view_rule((5, Size(1), 8), (Size(5), 8))
    assert merged.results == (((0, 1), (2,)),) and merged.factors[1].size == Size(1)
    parted = view_rule((Size(5), 8), (Size(1), 5, 2, 4))
    assert dict(parted.operands)["self"] == ((0, 1), (2, 3))
    mixed = view_rule((8, Size(1)), (Size(4), 2))
    assert [factor.size for factor in mixed.factors if not factor.blocked] == [4]


def test_arithmetic_of_sizes() -> None:
    assert times(Size(2, 1), 3) == Size(6, 3)
    assert times(Size(1), Size(1)) is None
    assert ratio(Size(6, 3), 3) == Size(2, 1)
    assert ratio(Size(6), Size(2)) == 3
    assert ratio(Size(6, 1), Size(2)) is None and ratio(6, 4) is None and ratio(4, Size(1)) is None
    assert (
        common(6, 4) == 2
        and common(Size(6), 4) == 2
        and common(Size(6), 3) == 3
        and common(Size(6), Size(2)) == Size(2)
    )


# ---- kernels of other devices: shapes only --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_kernels_of_other_devices_have_shapes_that_their_rules_fit(kernel: str) -> None:
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    query, key = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 4, 5, 8, device="meta")
    more = () if kernel == "flash" else (torch.empty(2, 4, 6, 5, device="meta"), True)
    node, tensors, results = as_node((op, query, key, key, *more))
    found = rule(node, values(tensors))
    assert found is not None
    sizes = [int(factor.size) for factor in found.factors]
    for result, dims in zip(results, found.results, strict=True):
        if isinstance(result, torch.Tensor) and dims is not None:
            unflatten(result, dims, sizes)
    (batch,), (head,) = dict(found.operands)["query"][:2]
    assert not found.factors[batch].blocked and not found.factors[head].blocked
    assert all(dims[:2] == ((batch,), (head,)) for dims in found.results[:2] if dims is not None)
