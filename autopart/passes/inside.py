"""inside: Captured + Plan -> the modules at which the segments beside a stage boundary can be cut further.

before: stage 0: wte h.0 h.1   stage 1: h.2 h.3 norm
after:  h.1.norm2, h.2.norm2    (not h.1.mlp: the residual crosses beside the norm's result)

A cut is made where a module begins that reads a parameter. Others, such as a dropout, may compute nothing in evaluation
mode, where stages must begin at the same places.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from autopart.ir.captured import Captured
from autopart.ir.graph import Node
from autopart.ir.plan import Plan
from autopart.passes.segment import around, numbered


def inside(captured: Captured, cuts: tuple[str, ...], plan: Plan, *, most: int) -> tuple[str, ...]:
    """Where the segments on both sides of each stage boundary of `plan` can be cut so that at most `most` bytes cross.

    `plan` is one for the model segmented with `cuts`. Bytes are those of the forward, at the call's batch.
    """
    forward, names, number = numbered(captured, cuts)
    firsts = [names.index(stage.segments[0]) for stage in plan.stages[1:]]
    beside = {*firsts, *(first - 1 for first in firsts)}
    parameters = {item.value.name for item in captured.of_kind("parameter")}
    reading = {path for node in forward if not parameters.isdisjoint(node.refs()) for path in around(node.module)}
    found = []
    for i, bytes_over in enumerate(_crossing(captured, forward)):
        if i == 0 or number[i] not in beside or number[i] != number[i - 1] or bytes_over > most:
            continue
        known = {*around(forward[i - 1].module), *around(names[number[i]].split("@")[0])}
        found += [path for path in around(forward[i].module) if path not in known and path in reading][:1]
    return tuple(dict.fromkeys(found))


def crossing(captured: Captured, plan: Plan) -> int:
    """The most bytes that flow over one stage boundary in the forward, at the call's batch."""
    forward, names, number = numbered(captured, plan.cuts)
    over = _crossing(captured, forward)
    firsts = {names.index(stage.segments[0]) for stage in plan.stages[1:]}
    return max(over[i] for i, (a, b) in enumerate(pairwise(number), start=1) if a != b and b in firsts)


def _crossing(captured: Captured, forward: list[Node]) -> list[int]:
    """Before each forward node, the bytes of what earlier ones made and it or later ones read."""
    sizes = {out.name: out.nbytes(captured.batch) for node in forward for out in node.outs if out is not None}
    last = {name: i for i, node in enumerate(forward) for name in node.refs() if name in sizes}
    change = [0] * (len(forward) + 1)
    for i, node in enumerate(forward):
        for name in node.names():
            if name in last:
                change[i + 1] += sizes[name]
                change[last[name] + 1] -= sizes[name]
    return list(accumulate(change[:-1]))
