"""`check_sharding_rule`: wrong rules are reported with their loop, and legal splits that a rule misses are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopart.rules import attention, bags, conv, norm
from autopart.rules.table import rule
from autopart.testing import check_sharding_rule
from autopart.testing.rules import RuleError, as_node, cuts_of, values
from autopart.testing.sharding import missed
from tests.own_ops import (
    FUSED,
    FUSED_BACKWARD,
    fused,
    fused_backward,
    liar,
    noisy,
    registered,
    sample_fused,
    share,
    stretch,
    total,
)  # fmt: skip
from tests.rule_cases import Sizes
from tests.rule_cases_network import CASES
from tests.test_rules import _Fixed

X = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1)).double()


def sample_backward() -> tuple[torch.Tensor, ...]:
    x, weight, _ = sample_fused()
    return torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(2)).double(), x, weight


def test_right_rules_that_miss_nothing() -> None:
    with registered(FUSED, FUSED_BACKWARD):
        assert check_sharding_rule(fused, sample_fused()) == ()
        assert check_sharding_rule("autopart_tests::fused_backward", sample_backward()) == ()
    with registered((share, "b s h -> b s h", {"whole": "h"})):
        assert check_sharding_rule(share, (X,)) == ()
    with registered((stretch, "b h -> b n h", {"sizes": {"count": "n"}, "linear": ("x",)})):
        assert check_sharding_rule(stretch, (X[0],), {"count": 5}) == ()
    with registered((total, "b h, h -> b h", {"linear": ("xs*", "scale")})):
        found = check_sharding_rule(total, ([X[0], X[1]], X[0, 0]))
        assert found == ()  # all of a list together: that it is linear in one of them alone is not so


def test_a_loop_is_cut_evenly_and_unevenly_on_two_and_three_places() -> None:
    assert list(cuts_of(7, (2, 3))) == [(2, 5), (4, 3), (3, 2, 2)]
    assert list(cuts_of(2, (2, 3))) == [(1, 1)] and list(cuts_of(1, (2, 3))) == []


WHOLE = {"whole": "h"}


@pytest.mark.parametrize(
    ("op", "text", "options", "args", "message"),
    [
        (share, "b s h -> b s h", {}, (X,), "split by loop 'h': the pieces do not make up the whole"),
        (share, "b s h -> b h s", {}, (X,), "dim 1 of result 0 is 4, and by the rule 3"),
        (fused, FUSED[1], {}, sample_fused(), "split by loop 'h': the pieces do not make up the whole"),  # the bias
        (fused, FUSED[1], {"linear": ("x",), "whole": "h"}, sample_fused(), "as linear in .'x'.: the pieces do not"),
        (fused, "b s h, k h, k -> b s _", WHOLE, sample_fused(), r"pieces make up \[6, 3, 4\], the whole is \[6, 3, 5"),
        (fused_backward, FUSED_BACKWARD[1], {"linear": ("grad",)}, sample_backward(), "result 2, split by loop 'h'"),
        (fused_backward, "b s k, c s h, k h -> c s h, k h, k", {}, sample_backward(), "'b' in pieces of 2 . 4 do not"),
        (stretch, "b h -> b n h", {"sizes": {"count": "h"}, "whole": "n"}, (X[0], 3), "'h' in pieces of 1 . 2 do not"),
        (liar, "b h -> b h", {}, (X[0],), r"liar.default returned float64\[4, 1\], and its fake .* float64\[4, 3\]"),
        (noisy, "b h -> b h", {}, (X[0],), "result 0 is another one when it is called again"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_reported(
    op: Any, text: str, options: dict[str, Any], args: tuple[Any, ...], message: str
) -> None:
    with registered((op, text, options)), pytest.raises(RuleError, match=message):
        check_sharding_rule(op, args)


@pytest.mark.parametrize(
    ("op", "text", "options", "args", "missing"),
    [
        (share, "b s h -> b s h", {"whole": "s h"}, (X,), ("loop 's' can be split",)),
        (share, "_ s h -> _ s h", {"whole": "h"}, (X,), ("dim 0 of x with dim 0 of result 0 can be split",)),
        (fused, FUSED[1], {"whole": "h k", **FUSED[2]}, sample_fused(),
         ("loop 'h' can be split", "loop 'k' can be split")),
        (fused, FUSED[1], WHOLE, sample_fused(), ("linear in bias and weight together",)),
        (stretch, "b h -> b n h", {"whole": "n"}, (X[0], 3), ("linear in x",)),
        (stretch, "b h -> b n h", {"whole": "n", "sizes": {"count": "n"}, "linear": ("x",)}, (X[0], 3),
         ("loop 'n' can be split",)),
    ],
)  # fmt: skip
def test_a_legal_split_that_a_rule_misses_is_reported(
    op: Any, text: str, options: dict[str, Any], args: tuple[Any, ...], missing: tuple[str, ...]
) -> None:
    with registered((op, text, options)):
        assert check_sharding_rule(op, args) == missing
        assert check_sharding_rule(op, args, search=False) == ()


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="has no sharding rule; autopart"):
        check_sharding_rule(share, (X,))
    with pytest.raises(TypeError, match="op: expected a custom op"):
        check_sharding_rule(torch.tanh, (X,))
    with (
        registered((share, "b s h -> b s h", {"whole": "h"})),
        pytest.raises(ValueError, match="loop s has size 1, so there are no pieces of it to try"),
    ):
        check_sharding_rule(share, (X[:, :1],))


# ---- autopart's own table --------------------------------------------------------------------------------------------

USELESS = {
    "bucketize": "counts of smaller boundaries, of which there are few",
    "searchsorted": "counts of smaller boundaries",
    "new_full": "reads nothing of its operand",
    "new_zeros": "reads nothing of its operand",
    "new_ones": "reads nothing of its operand",
}
"""Splits that are legal and that nobody needs."""


def test_the_table_misses_no_legal_split() -> None:
    """Not of kernels that do not look whether their operands go together, and read or write beyond their ends."""
    careless = {*conv.RULES, *norm.RULES, *attention.RULES, *bags.RULES, "embedding_dense_backward"}
    found = {}
    for name, case in CASES.items():
        if name not in careless:
            node, tensors, results = as_node(case(Sizes(_Fixed(4))))
            described = rule(node, values(tensors))
            assert described is not None
            more = [what for what in missed(node, tensors, results, described) if what.endswith("can be split")]
            found |= {name: more} if more else {}
    assert found.keys() <= USELESS.keys() and "bucketize" in found, found
