"""shard: Segmented -> Sharded. Place every value on the data axis, once a distinct body.

before: h: float32[b, 128, 384]                  after: h: Shard(0) on dp; a loss, a weight's gradient: Partial(sum)

The factor rules give each result's placement from its operands'. `normalise` made the graph such that nothing has to be
scaled or gathered on the way; this pass holds it to that, so what it accepts adds up over ranks and microbatches. Where
each slice of the batch computes as if it were the whole (`Captured.sliced`), all that has to add up are the loss and
the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopart.errors import CaptureError
from autopart.ir.graph import Share
from autopart.ir.placement import Partial, PerSlice, TensorPlacement
from autopart.ir.segmented import Function, Segment, Segmented
from autopart.ir.sharded import Sharded
from autopart.passes.slices import given, in_slice
from autopart.rules.dependence import depend
from autopart.rules.fact import Fact
from autopart.rules.factor import argument

AXIS = "dp"


def shard(segmented: Segmented) -> Sharded:
    """Place every value. Raises CaptureError, naming the layer, for a step that does not add up over the batch."""
    walk = _Walk(segmented)
    forward = [walk.forward(segment) for segment in segmented.segments]
    for segment, local in zip(reversed(segmented.segments), reversed(forward), strict=True):
        walk.backward(segment, local)
    for out in segmented.captured.outputs:
        placed = walk.facts.get(out.name)
        if out.kind == "loss" and placed is not None and not walk.adds_up(placed):
            raise CaptureError(f"the loss is {placed.place} over microbatches, where it must be a part of a sum")
    between = {name: walk.facts[name].place for segment in segmented.segments for name in _passing(segment)}
    numbering = tuple(
        name for name in between if walk.facts[name].picks is not None or walk.facts[name].order is not None
    )
    return Sharded(segmented, AXIS, between, tuple(walk.inside), numbering)


class _Walk:
    """One pass over the segments. `facts` are those of values between them; equal calls of a body are judged once."""

    def __init__(self, segmented: Segmented) -> None:
        captured = segmented.captured
        self.bodies, self.sliced, self.alone = segmented.bodies, captured.sliced, bool(captured.coupled)
        updated = {out.target for out in captured.updates()} if captured.sliced else set()
        alike: dict[object, Fact] = {}
        self.facts: dict[str, Fact] = {}
        for item in captured.inputs:
            key = item.kind, item.value.shape, item.target in updated
            if key not in alike:
                alike[key] = given(item, key[2])
            self.facts[item.value.name] = alike[key]
        self.names = {item.target: item.value.name for item in captured.of_kind("parameter")}
        self.inside: list[Mapping[str, TensorPlacement]] = [{} for _ in segmented.bodies]
        self._known: dict[object, dict[str, Fact]] = {}
        self._sound: set[int] = set()  # backwards whose gradients were looked at
        self._same: dict[object, dict[str, Fact]] = {}  # by the very facts, which equal layers share

    def forward(self, segment: Segment) -> dict[str, Fact]:
        """Place what a segment's forward makes; returns the facts of its local values."""
        parameters = (self.names[target] for target in segment.forward_parameters)
        given = tuple(self.facts[name] for name in (*segment.values, *segment.forward_fixed, *parameters))
        function = self.bodies[segment.body].forward
        found = self._call(segment, function, given)
        self.facts.update(zip(segment.outputs, (found[name] for name in function.outputs), strict=False))
        return found

    def backward(self, segment: Segment, local: Mapping[str, Fact]) -> None:
        """Place what a segment's backward makes, and hold every parameter's gradient to be a part of a sum."""
        body = self.bodies[segment.body]
        if body.backward is None:
            return
        parameters = (self.names[target] for target in segment.backward_parameters)
        given = (
            *(self.facts[name] for name in segment.backward_inputs),
            *(local[name] for name in body.saved),
            *(self.facts[name] for name in (*segment.backward_fixed, *parameters)),
        )
        found = self._call(segment, body.backward, given)
        results = [found[name] for name in body.backward.outputs]
        self.facts.update(zip(segment.backward_outputs, results, strict=False))
        if id(found) in self._sound:
            return
        self._sound.add(id(found))
        for target, fact in zip(segment.gradients, results[len(segment.backward_outputs) :], strict=True):
            if not self.adds_up(fact):
                raise CaptureError(
                    f"{segment.name}: the gradient of {target} is {fact.place}, where it must be a part of a sum"
                )

    def adds_up(self, fact: Fact) -> bool:
        """Whether the slices' values add up to the whole batch's; one of a slice's own has its weight by then.

        Where there is one slice, all do.
        """
        return self.alone or isinstance(fact.place, Partial | PerSlice) or fact.zero

    def _call(self, segment: Segment, function: Function, given: tuple[Fact, ...]) -> dict[str, Fact]:
        same = segment.body, id(function), *map(id, given)
        if same not in self._same:
            self._same[same] = self._judged(segment, function, given)
        return self._same[same]

    def _judged(self, segment: Segment, function: Function, given: tuple[Fact, ...]) -> dict[str, Fact]:
        key = (segment.body, id(function), given)
        if key not in self._known:
            inside = _inside_slice if self.sliced else _inside
            found = self._known[key] = inside(function, given, segment.name)
            placed = {name: fact.place for name, fact in found.items()}
            self.inside[segment.body] = {**self.inside[segment.body], **placed}
        return self._known[key]


def _inside(function: Function, given: Sequence[Fact], where: str) -> dict[str, Fact]:
    """The facts of every local value of a body's function."""
    values = {value.name: value for value in function.inputs}
    facts = dict(zip(values, given, strict=True))
    for node in function.nodes:
        values |= {out.name: out for out in node.outs if out is not None}
        found = depend(node, values, facts)
        if any(not isinstance(argument(node, path), Share) for path in found.shares):
            raise CaptureError(f"{where}: {node.opname} adds what is equal on all microbatches to a part of a sum")
        facts |= found.facts
        if node.op.overloadpacket is torch.ops.aten.mul and isinstance(node.args[1], Share):
            facts |= {name: replace(fact, place=Partial()) for name, fact in found.facts.items()}
    return facts


def _inside_slice(function: Function, given: Sequence[Fact], where: str) -> dict[str, Fact]:
    """The same where each slice computes as if it were the whole batch."""
    values = {value.name: value for value in function.inputs}
    facts = dict(zip(values, given, strict=True))
    for node in function.nodes:
        values |= {out.name: out for out in node.outs if out is not None}
        facts |= in_slice(node, values, facts)
    return facts


def _passing(segment: Segment) -> tuple[str, ...]:
    return (*segment.values, *segment.outputs, *segment.backward_inputs, *segment.backward_outputs)
