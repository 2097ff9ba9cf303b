"""consistent: PlacedBody + Segment -> what is wrong with it. The gate that placements pass before they are written out.

Nothing is taken on trust: every strategy must be one that the node's factor rule allows, every operand must be there in
the placement that it is needed in, every move must start from what is there, be one that a collective makes, and be
made once. Between segments, values and parameters must have one placement for all, and what the caller passes and gets
must be whole at every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopart.ir.graph import Value
from autopart.ir.placed import PlacedBody, PlacedFunction, PlacedStep, collective_of, of_gradient
from autopart.ir.placement import Dispatched, Own, Partial, Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Segment, Segmented, defined
from autopart.rules.dispatch import Ways, ways_by_rows
from autopart.rules.split import fits
from autopart.rules.strategies import Ruled, allowed


def faults(placed: PlacedBody, segment: Segment) -> tuple[str, ...]:
    """What is wrong, a sentence each; nothing for a body whose places together compute what one device does."""
    first, second = ways_by_rows(placed.body, placed.degree)
    found = [f"forward: {fault}" for fault in _function(placed.forward, placed.degree, placed.wanted(), first)]
    if placed.backward is not None:
        found += [f"backward: {fault}" for fault in _function(placed.backward, placed.degree, {}, second)]
        found += _kept(placed, segment)
        found += _gradients(placed, segment)
    return tuple(found)


def _function(part: PlacedFunction, degree: int, kept: dict[str, TensorPlacement], by_rows: Ways) -> Iterator[str]:
    values = defined(part.function)
    given = {v.name: how for v, how in zip(part.function.inputs, part.inputs, strict=True)}
    needed: list[tuple[str, TensorPlacement]] = []
    for node, strategy, ways in zip(part.function.nodes, part.strategies, by_rows, strict=True):
        ruled = Ruled.of(node, values, ways)
        slots = [operand.slot for operand in ruled.call.operands]
        if [slot for slot, _ in strategy.needs] != slots or len(strategy.gives) != len(node.outs):
            yield f"{node.opname} -> {', '.join(node.names())} has other operands or results than {strategy}"
            continue
        operands = zip(ruled.call.operands, strategy.needs, strict=True)
        needed += [(operand.value.name, how) for operand, (_, how) in operands if how is not None]
        if not allowed(ruled, strategy, degree):
            yield f"{node.opname} -> {', '.join(node.names())} cannot run as {strategy}"
        outs = zip(node.outs, strategy.gives, strict=True)
        given |= {out.name: how for out, how in outs if out is not None and how is not None}
    there: dict[str, set[TensorPlacement]] = {name: {how} for name, how in given.items()}
    for move in part.moves:
        yield from _move(move.value, move.source, move.target, there, values, degree)
    needed += zip(part.function.outputs, part.outputs, strict=True)
    for name, how in (*needed, *kept.items()):
        if how not in there.get(name, ()):
            yield f"{name} is needed as {how}, and is never made that"


def _move(
    name: str,
    source: TensorPlacement,
    target: TensorPlacement,
    there: dict[str, set[TensorPlacement]],
    values: dict[str, Value],
    degree: int,
) -> Iterator[str]:
    held = there.setdefault(name, set())
    if source not in held:
        yield f"{name} is moved from {source}, which it is not"
    if target in held:
        yield f"{name} is made {target} twice"
    if collective_of(source, target) is None:
        yield f"{name} is {source}: nothing makes it {target}"
    for how in (source, target):
        if isinstance(how, Dispatched) and Own() not in there.get(how.ends, ()):
            yield f"{name} cannot be {how}: {how.ends} is not there for each place's own rows"
        if isinstance(how, Shard) and not fits(values[name], how, degree):
            yield f"{name} cannot be {how}"
    held.add(target)


def _kept(placed: PlacedBody, segment: Segment) -> Iterator[str]:
    """What the backward takes over must be as the forward kept it."""
    assert placed.backward is not None  # there is something to take over
    start = len(segment.backward_inputs)
    for name, kept, taken in zip(placed.body.saved, placed.saved, placed.backward.inputs[start:], strict=False):
        if kept != taken:
            yield f"{name} is saved as {kept}, and the backward takes it for {taken}"


def _gradients(placed: PlacedBody, segment: Segment) -> Iterator[str]:
    """A gradient is placed as that of its parameter must be, which is one in the forward and in the backward."""
    assert placed.backward is not None and placed.body.backward is not None  # gradients come from it
    owners: dict[str, TensorPlacement] = {}
    for part, targets in (
        (placed.forward, segment.forward_parameters),
        (placed.backward, segment.backward_parameters),
    ):
        places = part.inputs[len(part.inputs) - len(targets) :]
        for target, how in zip(targets, places, strict=True):
            if owners.setdefault(target, how) != how:
                yield f"{target} is {owners[target]} in the forward and {how} in the backward"
    results = placed.backward.outputs[len(segment.backward_outputs) :]
    for target, how in zip(segment.gradients, results, strict=True):
        lies = owners.get(target, Replicate() if isinstance(how, Partial) else how)
        if how != (wanted := of_gradient(placed.axis, lies)):
            yield f"the gradient of {target} is {how}, where {wanted} is wanted for one that is {lies}"


def step_faults(placed: PlacedStep, segmented: Segmented) -> tuple[str, ...]:
    """What is wrong between segments, whose bodies are right by themselves."""
    captured, how, lie = segmented.captured, dict(placed.between), dict(placed.parameters)
    outside = [item.value.name for item in captured.of_kind("input", "tangent")]
    outside += [out.name for out in captured.outputs if out.kind in ("loss", "output", "input_grad")]
    found = [
        f"{name} is {how[name]}, where the caller has all of it"
        for name in dict.fromkeys(outside)
        if how.get(name, Replicate()) != Replicate()
    ]
    for segment, body in zip(segmented.segments, placed.bodies, strict=True):
        found += [
            f"{name} is {wanted}, and {here} in {segment.name}"
            for name, wanted, here in _boundary(segment, body, how, lie)
            if here != wanted
        ]
    return tuple(found)


def _boundary(
    segment: Segment,
    body: PlacedBody,
    how: Mapping[str, TensorPlacement],
    lie: Mapping[str, TensorPlacement],
) -> Iterator[tuple[str, TensorPlacement, TensorPlacement]]:
    """What comes into a segment and goes out: its name, how it is outside, how the segment has it."""
    whole = Replicate()

    def rows(values: Sequence[str], fixed: Sequence[str], targets: Sequence[str]) -> list[tuple[str, TensorPlacement]]:
        found = [(name, how.get(name, whole)) for name in values] + [(name, whole) for name in fixed]
        return found + [(target, lie.get(target, whole)) for target in targets]

    forward, backward, saved = body.forward, body.backward, len(body.saved)
    pairs = [(rows(segment.values, segment.forward_fixed, segment.forward_parameters), forward.inputs)]
    pairs.append((rows(segment.outputs, segment.updates, ()), forward.outputs))
    if backward is not None:
        first = len(segment.backward_inputs)
        taken = (*backward.inputs[:first], *backward.inputs[first + saved :])
        pairs.append((rows(segment.backward_inputs, segment.backward_fixed, segment.backward_parameters), taken))
        made = [(target, of_gradient(body.axis, lie.get(target, whole))) for target in segment.gradients]
        pairs.append(([*rows(segment.backward_outputs, (), ()), *made], backward.outputs))
    for outside, inside in pairs:
        yield from ((name, wanted, here) for (name, wanted), here in zip(outside, inside, strict=True))
