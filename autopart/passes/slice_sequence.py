"""slice_sequence: Segmented -> Segmented. The step with every layer written out once for each slice of the sequence.

before: h.0 | h.1                       each on all tokens
after:  h.0 | h.1 | slice1.h.0 | slice1.h.1
        each on the tokens of its slice; causal attention of slice 1 also reads the keys and values of slice 0, and its
        backward hands the gradients of those back

What `tokens` found of the step decides how `slice_nodes` and `causal` write it. The loss is added up from slice to
slice, so the last one makes it; outputs are put together there, too. A parameter has a gradient from each slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopart.errors import CaptureError
from autopart.ir.captured import Captured, dead_code_eliminated
from autopart.ir.graph import Node, Output, Ref
from autopart.ir.mesh import pieces
from autopart.ir.names import fresh
from autopart.ir.segmented import Segmented
from autopart.passes.bodies import build
from autopart.passes.causal import attention
from autopart.passes.slice_nodes import Slices
from autopart.passes.tokens import Dependence, Fact, How, depend

aten = torch.ops.aten


def slice_sequence(segmented: Segmented, slices: int, lengths: Sequence[int] = ()) -> Segmented:
    """The step in so many slices, of `lengths` tokens: by default as even as can be, the longer ones first.

    A step without a backward stays whole. Raises CaptureError for what `tokens.depend` refuses and for buffers that
    forwards update; ValueError for a sequence of fewer tokens than slices, or of others than the `lengths`.
    """
    captured = segmented.captured
    if slices == 1 or not captured.training:
        return segmented
    if updated := captured.updates():
        raise CaptureError(
            f"the forward updates the buffer {updated[0].target}, once for a whole sequence, but the schedule cuts it "
            f"into {slices} slices; pin one that does not, such as schedule='1f1b'"
        )
    known = depend(captured)
    if known.length < slices:
        raise ValueError(
            f"schedule: a sequence of {known.length} tokens cannot be cut into {slices} slices; pin at most "
            f"slices={known.length}"
        )
    if lengths and sum(lengths) != known.length:
        raise ValueError(
            f"schedule: slices of {', '.join(map(str, lengths))} tokens are {sum(lengths)} in all, but a sequence has "
            f"{known.length}; without lengths= they are as even as can be"
        )
    lengths = lengths or pieces(known.length, slices)
    _check_last(known, lengths)
    made = Slices(segmented, known, lengths)
    _write(made, captured, known)
    whole = dead_code_eliminated(_with_outputs(captured, made))
    names = [segment.name for segment in segmented.segments]
    built = build(whole, names * slices, made.homes)
    return _numbered(built, len(names))


def _check_last(known: Dependence, lengths: Sequence[int]) -> None:
    """Refuse a last slice without tokens where the model takes only the first so many."""
    shortest = min(fact.tokens.number for fact in known.facts.values() if fact.how is How.CUT and fact.tokens)
    if sum(lengths[:-1]) >= shortest:
        raise ValueError(
            f"schedule: the model goes on with the first {shortest} of {known.length} tokens, of which the last of "
            f"{len(lengths)} slices has none; pin fewer slices"
        )


def _numbered(built: Segmented, width: int) -> Segmented:
    """The segments of the slices, so many each, and bodies that later slices alone use, under names that say so."""
    bodies, first = list(built.bodies), {segment.body for segment in built.segments[:width]}
    names = {body.name for body in bodies}
    segments = []
    for i, segment in enumerate(built.segments):
        number, layer = divmod(i, width)
        mine, plain = segment.body, built.segments[layer].body
        if bodies[mine] is built.bodies[mine] and mine not in first:
            wish = fresh(f"{built.bodies[plain].name}_slice{number}", names)
            bodies[mine] = replace(bodies[mine], name=wish)
            names.add(wish)
        name = f"slice{number}.{segment.name}" if number else segment.name
        segments.append(replace(segment, name=name, slice=number))
    return replace(built, bodies=tuple(bodies), segments=tuple(segments))


def _write(made: Slices, captured: Captured, known: Dependence) -> None:
    """Forwards slice by slice, then backwards from the last slice to the first."""
    pairs = list(zip(captured.nodes, known.treatments, strict=True))
    order = range(len(made.lengths))
    for backward, numbers in ((False, order), (True, order[::-1])):
        for number in numbers:
            made.slice = number
            for node, treatment in pairs:
                if node.backward is not backward:
                    continue
                if treatment.causal:
                    attention(made, node)
                else:
                    made.write(node, treatment)


def _with_outputs(captured: Captured, made: Slices) -> Captured:
    """The step of all slices, its outputs put together."""
    found: dict[tuple[str, bool], tuple[str, ...]] = {}
    for out in captured.outputs:
        if (key := (out.name, out.kind == "grad")) not in found:
            found[key] = _output(made, out)
    outputs = (replace(o, name=name) for o in captured.outputs for name in found[o.name, o.kind == "grad"])
    result = tuple(found[item, False][0] if isinstance(item, str) else item for item in captured.result)
    return replace(captured, nodes=tuple(made.nodes), outputs=tuple(outputs), result=result)


def _output(made: Slices, out: Output) -> tuple[str, ...]:
    """The names of an output: of a gradient one a slice, of anything else one, made in the last slice that runs."""
    fact, node = made.known.facts[out.name], made.made.get(out.name)
    if node is None:
        return (out.name,)
    order = range(len(made.lengths))
    order = order[::-1] if node.backward else order
    made.slice = order[-1]
    if fact.how is How.WHOLE:
        return (made.name(out.name),)
    if out.kind == "grad":
        return tuple(_gradient(made, out.name, node, fact, number) for number in order)
    if fact.how is How.PART:
        return (_added(made, out.name, node, order),)
    parts = tuple(Ref(made.name(out.name, number)) for number in range(len(order)))
    dim = _own_dim(f"the output {out.target}", fact)
    return (made.call(aten.cat.default, (parts, dim), made.values[out.name], node),)


def _own_dim(what: str, fact: Fact) -> int:
    """The dim of a value that has the tokens and nothing else; refuses another."""
    assert fact.tokens is not None  # it is cut
    if fact.tokens.outer != 1:
        raise CaptureError(
            f"{what} has the tokens inside dim {fact.tokens.dim}, so those of the slices cannot be joined along it; "
            "keep samples and tokens in dims of their own there, or pin a schedule of whole sequences, such as "
            "schedule='1f1b'"
        )
    return fact.tokens.dim


def _gradient(made: Slices, name: str, node: Node, fact: Fact, number: int) -> str:
    """A slice's gradient of a parameter; of one that has its own part for each token, zeros for those of others."""
    made.slice = number
    if fact.how is How.PART:
        return made.name(name)
    dim, value = _own_dim(f"the gradient {name}", fact), made.values[name]
    assert fact.tokens is not None  # it is cut
    out = replace(value, name=made.new(f"{name}_whole"))
    start, end = made.span(fact.tokens)
    return made.call(aten.slice_backward.default, (Ref(made.name(name)), value.shape, dim, start, end, 1), out, node)


def _added(made: Slices, name: str, node: Node, order: Sequence[int]) -> str:
    """The sum over the slices, each of which adds its own to that of those before it."""
    total = made.name(name, order[0])
    for number in order[1:]:
        made.slice = number
        wish = name if number == order[-1] else made.new(f"{name}_sum")
        total = made.call(
            aten.add.Tensor, (Ref(total), Ref(made.name(name))), replace(made.values[name], name=wish), node
        )
    return total
