"""`register_sharding_rule`: what the user says of an operator of their own, so that it may run in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopart import _torch
from autopart.rules import own
from autopart.rules.table import family


def register_sharding_rule(
    op: Any,
    rule: str,
    *,
    whole: str = "",
    linear: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
    reads: Mapping[int, str] | None = None,
    ends: Mapping[str, str] | None = None,
) -> None:
    """Say which loops an operator of your own has, and which dims they are: then it may run on parts of its operands.

    `op` is what ``torch.library.custom_op`` returned, an operator as ``torch.ops.mine.scale``, or its name,
    ``"mine::scale"``. `rule` has a term for each tensor operand, in the order of the schema, and one for each result; a
    term names the loop of every dim: ``"b s h, h k -> b s k"``. A loop that a result lacks is summed over, so pieces of
    it give parts of a sum. ``...`` stands for any leading dims, ``(g c)`` for a dim that merges two loops, ``1`` for a
    dim of size 1, ``_`` for a dim that no part can do without. The operators that its backward calls are operators of
    their own, and need a rule each.

    `whole` names loops that cannot be split, such as that of a softmax, separated by spaces. `linear` has sets of
    arguments, each as words, in which the operator is jointly linear while the others are fixed: ``("x bias", "w
    bias")``; a bias that is added to a sum must be in all of them. `sizes` names the whole numbers among the arguments
    that count loops, and so are smaller on a part: ``{"hidden": "h", "shape.0": "b"}``. `reads` says, by a result's
    number, which operands it depends on where these are not all: the gradient of a bias, third of a backward's results,
    is summed over the loops of the incoming gradient alone, ``{2: "grad"}``. `ends` says of a
    loop that is whole which operand has where its groups end, as those of the rows of a grouped product do, ``{"t":
    "offs"}``: the rows that a microbatch has of each group may be computed alone.

    ``autopart.testing.check_sharding_rule`` executes the operator to see whether the rule is right. Raises ValueError
    for a rule that does not fit the schema, for an operator that has a rule already, unless it is this one, and for one
    that writes to its arguments; TypeError for what is no operator.
    """
    found = _torch.operator(op)
    if found is None:
        raise TypeError(f"op: expected a custom op, torch.ops.<library>.<name> or its name, not {op!r}")
    if found._schema.is_mutable:
        raise ValueError(f"op: {found} writes to its arguments; return a new tensor instead")
    if own.own_rule(found) is None and family(found) is not None:
        raise ValueError(f"op: {found} has a rule of autopart's")
    own.keep(found, own.read(found, rule, whole=whole, linear=linear, sizes=sizes, reads=reads, ends=ends))
