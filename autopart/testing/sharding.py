"""`check_sharding_rule`: an operator's rule, held against what the operator does on pieces of a sample call.

What a rule claims must be so. What may be so, and the rule does not claim, is tried in the same way: that a loop which
is said to stay whole can be split, that several such loops are one, that an operator is linear in some operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopart import _torch
from autopart.errors import CaptureError
from autopart.ir.graph import Node, Ref
from autopart.rules.factor import Dims, Rule, bind
from autopart.rules.own import own_rule
from autopart.rules.table import rule
from autopart.runtime.custom import hold, told
from autopart.testing.rules import (
    Results,
    RuleError,
    Tensors,
    as_node,
    check,
    check_linear,
    check_split,
    close,
    label,
    run,
    sizes_of,
    values,
)

PLACES = (2, 3)
"""The numbers of places that a loop is split over."""

MOST = 1024
"""The most sets of loops that are tried."""


def check_sharding_rule(
    op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, search: bool = True
) -> tuple[str, ...]:
    """Execute an operator whole and on pieces of every loop of its rule; return the legal splits that the rule misses.

    `op` is as `autopart.register_sharding_rule` takes it, `args` and `kwargs` are those of a sample call: float64
    tensors of random numbers show the most, and every loop should have a size of 3 or more. Raises `RuleError` (an
    AssertionError), naming the loop, for a rule that claims what is not so, for results that differ from call to call,
    and for a fake implementation that tells other shapes than the operator returns; ValueError for an operator without
    a rule, or a loop of which the sample has no pieces.

    What a rule misses is no error: such splits are not used. To find it the operator is called on pieces of loops that
    the rule keeps whole, which it may have to refuse; with ``search=False`` only what the rule claims is executed.
    """
    found = _torch.operator(op)
    if found is None:
        raise TypeError(f"op: expected a custom op, torch.ops.<library>.<name> or its name, not {op!r}")
    with torch.no_grad():
        node, tensors, results = as_node((found, *_plain(args, dict(kwargs or {}))))
        _check_whole(node, tensors, results)
        described = _rule_of(node, tensors)
        check(node, tensors, results, described, PLACES)
        return tuple(missed(node, tensors, results, described)) if search else ()


def _plain(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: tuple[Any, Any] = _torch.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), kwargs))
    return made


def _rule_of(node: Node, tensors: Tensors) -> Rule:
    try:
        found = rule(node, values(tensors))
    except CaptureError as error:
        raise RuleError(str(error)) from None
    if found is None:
        raise ValueError(f"op: {node.op} has no sharding rule; autopart.register_sharding_rule gives it one")
    own = own_rule(node.op)
    if own is not None:
        terms = [term for _, term in own.operands] + list(own.results)
        named = {loop for term in terms for token in term for loop in token} - own.whole - {"*", "1"}
        alone = sorted(named - {factor.name for factor in found.factors})
        if alone:
            raise ValueError(f"args: loop {', '.join(alone)} has size 1, so there are no pieces of it to try; take 3")
    return found


def _check_whole(node: Node, tensors: Tensors, results: Results) -> None:
    """What must hold before anything is split."""
    given = {operand.slot: tensors[operand.value.name] for operand in bind(node, values(tensors)).operands}
    for number, (again, result) in enumerate(zip(run(node, given), results, strict=True)):
        if isinstance(again, torch.Tensor) and isinstance(result, torch.Tensor) and not close(again, result):
            raise RuleError(f"{node.op}: result {number} is another one when it is called again, so nothing is known")
    args = _torch.pytree.tree_map_only(Ref, lambda ref: tensors[ref.name], (list(node.args), dict(node.kwargs)))
    try:
        hold(node.op, results if not node.single else results[0], told(node.op, *args))
    except RuntimeError as error:
        raise RuleError(str(error)) from None


# ---- what a rule misses ----------------------------------------------------------------------------------------------


def missed(node: Node, tensors: Tensors, results: Results, found: Rule) -> Iterator[str]:
    """What is so of a call and a right rule does not claim: loops that can be split, operands that it is linear in."""
    call = bind(node, values(tensors))
    whole = {operand.slot: tensors[operand.value.name] for operand in call.operands}
    free: list[set[int]] = []
    for together in itertools.islice(_candidates(found), MOST):
        if any(less <= together for less in free):
            continue
        one = min(together)
        try:
            check_split(node, whole, call.args, results, _merged(found, together), one, PLACES)
        except RuleError:
            continue
        free.append(together)
        yield f"{_named(found, together)} can be split"
    for operands in _summable(whole, results):
        if operands not in found.linear and _is_linear(node, whole, call.args, results, operands):
            yield f"linear in {' and '.join(sorted(operands))}{' together' if len(operands) > 1 else ''}"


def _candidates(found: Rule) -> Iterator[set[int]]:
    """Blocked loops that may be one, the fewest first: those of one size, of which no tensor has two."""
    sizes: dict[int, list[int]] = {}
    for factor, size in enumerate(sizes_of(found)):
        if found.factors[factor].blocked and size > 1:
            sizes.setdefault(size, []).append(factor)
    tensors = [{factor for dim in dims for factor in dim} for dims in _tensors(found)]
    for count in range(1, len(tensors) + 1):
        for alike in sizes.values():
            for together in map(set, itertools.combinations(alike, count)):
                if all(len(together & own) < 2 for own in tensors):
                    yield together


def _tensors(found: Rule) -> list[Dims]:
    return [dims for _, dims in found.operands] + [dims for dims in found.results if dims is not None]


def _merged(found: Rule, together: set[int]) -> Rule:
    """The rule with some loops made one, the first of them."""
    one = min(together)

    def dims_of(dims: Dims) -> Dims:
        return tuple(tuple(one if factor in together else factor for factor in dim) for dim in dims)

    return replace(
        found,
        operands=tuple((slot, dims_of(dims)) for slot, dims in found.operands),
        results=tuple(None if dims is None else dims_of(dims) for dims in found.results),
        sizes=tuple((slot, dims_of((product,))[0]) for slot, product in found.sizes),
    )


def _named(found: Rule, together: set[int]) -> str:
    """Loops by their names, else by the dims that they are."""
    names = [label(found, factor) for factor in sorted(together)]
    if all(name.startswith("loop") for name in names):
        return " as one with ".join(names)
    tensors = [slot for slot, _ in found.operands]
    tensors += [f"result {i}" for i, dims in enumerate(found.results) if dims is not None]
    places = zip(tensors, _tensors(found), strict=True)
    dims = [f"dim {i} of {name}" for name, own in places for i, dim in enumerate(own) if not together.isdisjoint(dim)]
    return " with ".join(dims)


def _summable(whole: Tensors, results: Results) -> Iterator[frozenset[str]]:
    """Sets of at most three operands that may be parts of sums, the smallest first."""
    if all(_has_fractions(result) for result in results if isinstance(result, torch.Tensor)):
        numbers = [slot for slot, tensor in whole.items() if _has_fractions(tensor)]
        for count in range(1, min(len(numbers), 3) + 1):
            yield from map(frozenset, itertools.combinations(numbers, count))


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_linear(node: Node, whole: Tensors, args: Mapping[str, Any], results: Results, together: frozenset[str]) -> bool:
    try:
        check_linear(node, whole, args, results, together)
    except Exception:  # the check's own, and whatever the operator says of other numbers
        return False
    return True
