"""draws: Captured -> Captured. Every draw gets a name and an input that says what it is computed from.

before:  ``m = bernoulli(None, 0.9, [b, 8])``            in module h.3.drop
after:   ``m = bernoulli(draw, 0.9, [b, 8], 0)``         input draw: random h.3.drop#0

The name is the module's (first) path and how many draws this module made before in the same call, whether they are used
or not: it depends on nothing that a plan decides. The last argument is the dim that holds the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopart._torch import OpOverload
from autopart.errors import CaptureError
from autopart.ir.captured import Captured, unnamed
from autopart.ir.graph import Input, Node, Ref, Value
from autopart.ir.names import fresh, identifier
from autopart.rules.dependence import batch_dims

WORDS = 6
"""The numbers of a draw's state (`autopart.draws.Draws.of`)."""


def with_draws(captured: Captured) -> Captured:
    """Name the draws. Raises CaptureError for a draw in the backward, and for random operators that are no draws."""
    ops = {node.opname: node.op for node in captured.nodes}
    drawing = {name for name, op in ops.items() if torch.Tag.nondeterministic_seeded in op.tags}
    if not drawing:
        return captured
    seen: Counter[str] = Counter()
    taken = {value.name for value in captured.values()}
    inputs: list[Input] = []
    nodes = []
    first = dict(captured.modules)
    for node in captured.nodes:
        if node.opname in drawing:
            _refuse(node)
        if unnamed(node):
            path = first.get(node.module, node.module)
            target = f"{path}#{seen[path]}"
            seen[path] += 1
            name = fresh(identifier(f"{target}_draw"), taken)
            taken.add(name)
            inputs.append(Input(Value(name, (WORDS,), torch.int64), "random", target))
            node = _named(node, name)
        nodes.append(node)
    return replace(captured, inputs=(*captured.inputs, *inputs), nodes=tuple(nodes))


def _named(node: Node, name: str) -> Node:
    (out,) = node.outs
    assert out is not None  # nothing is dead yet
    dim = next(iter(batch_dims(out)), None)
    return replace(node, args=(Ref(name), *node.args[1:], dim))


def _refuse(node: Node) -> None:
    if without_dropout(node.op, node.args, dict(node.kwargs)):
        return
    if not unnamed(node):
        raise CaptureError(
            f"{node.place()}{node.opname} draws random numbers in a way that cannot be repeated piece by piece on "
            "other ranks; make them of torch.rand, randn, randint, bernoulli, exponential_ or a dropout, or draw them "
            "outside and pass them in as an input"
        )
    if node.backward:
        raise CaptureError(
            f"{node.place()}{node.opname} draws random numbers during the backward; draw them in the forward and save "
            "them for it"
        )


def without_dropout(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is an attention kernel, called with a dropout probability of zero: it draws nothing."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and bool(given.get("dropout_p", 0.0) == 0.0)
