"""split_input: stages -> stages. The lookup in the input embedding, at the start of the first stage, over all ranks.

before: stage 0: wte.lookup wte h.0   stage 1: h.1
after:  stage 0: wte h.0              stage 1: h.1        and on each rank a part: wte.lookup@pp0, wte.lookup@pp1

    forward:   each part: x_r = table_r[ids]                    stage 0: x = cat(x_0 .. x_p)
    backward:  stage 0: dx_0 .. dx_p = split(dx)                each part: d_table_r, the dx_r added up by ids

Each part has some columns of the table, so every number of x and of dx is sent once at most. A table that is also the
weight of the output layer is split by rows, as that is: then x is the sum of what each part finds among its own rows,
zero elsewhere, and each is given all of dx. Neither way is anything rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autopart.errors import CaptureError
from autopart.ir.graph import Node, Ref, Value
from autopart.ir.names import fresh
from autopart.ir.placed import PlacedBody, PlacedFunction, Strategy
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, Segment, Segmented, defined
from autopart.ir.sharded import Sharded
from autopart.passes.localise import localise
from autopart.passes.output_functions import AXIS, Divided, Stages, made_by, part_name, part_of
from autopart.rules.split import local_shape, span
from autopart.rules.strategies import Ruled, split, strategies

aten = torch.ops.aten


def split_input(sharded: Sharded, stages: Stages) -> Divided:
    """The stages, a rank each, with the first segment, the lookup, split over them.

    Raises CaptureError where it cannot be (`can_split`).
    """
    segmented, degree = sharded.segmented, len(stages)
    (lookup, *own), *others = stages
    (target,), table, cut = lookup.parameters, _table(segmented), Shard(0 if tied(segmented) else 1)
    if not can_split(segmented, degree, [segment.name for segment in own]):
        raise CaptureError(
            f"the input embedding {target}, of shape {list(table.at(1))}, cannot be split over {degree} pipeline ranks "
            f"by dim {cut.dim}, for the first stage to begin with; plan again, for as many ranks and these stages"
        )
    at = [segment.name for segment in own].index(_user(segmented).name)
    first = own[at]
    passing = _Passing.of(segmented, lookup, cut, degree)
    placed = _placed(segmented.bodies[lookup.body], cut, degree)
    parts = [_part(lookup, target, passing, rank) for rank in range(degree)]
    number = len(segmented.bodies)
    bodies = [localise(placed, rank) for rank in range(degree)]
    bodies.append(_joining(segmented.bodies[first.body], first, passing))
    joined = replace(
        first,
        body=number + degree,
        values=_replaced(first.values, passing.looked, passing.pieces),
        backward_outputs=_replaced(first.backward_outputs, passing.gradient, passing.gradients),
    )
    numbered = ((replace(part, body=number + rank),) for rank, part in enumerate(parts))
    stages = ((*own[:at], joined, *own[at + 1 :]), *map(tuple, others), *numbered)
    whole = replace(
        segmented,
        bodies=(*segmented.bodies, *bodies),
        segments=tuple(segment for row in stages for segment in row),
        made=(*segmented.made, *passing.made()),
        lookup=False,
    )
    between = {**sharded.between, **{v.name: sharded.between[passing.looked] for v in passing.made()}}
    made = replace(sharded, segmented=whole, between=between, inside=(*sharded.inside, *({} for _ in bodies)))
    parameters = {part_name(target, rank): part_of(target, table, rank, degree, cut.dim) for rank in range(degree)}
    return Divided(made, stages, parameters)


def tied(segmented: Segmented) -> bool:
    """Whether the table of the first segment, the lookup, is the weight of the output layer, too."""
    lookup, *others = segmented.segments
    return any({*lookup.parameters} & {*segment.parameters} for segment in others)


def can_split(segmented: Segmented, ranks: int, stage: Sequence[str]) -> bool:
    """Whether there is a part of that table for each rank, and the segment that goes on from it is on the stage."""
    return _table(segmented).at(1)[0 if tied(segmented) else 1] >= ranks and _user(segmented).name in stage


def _user(segmented: Segmented) -> Segment:
    lookup, *others = segmented.segments
    return next(segment for segment in others if lookup.outputs[0] in segment.values)


def _table(segmented: Segmented) -> Value:
    (target,) = segmented.segments[0].parameters
    return next(item.value for item in segmented.captured.of_kind("parameter") if item.target == target)


def _replaced(names: Sequence[str], name: str, values: Sequence[Value]) -> tuple[str, ...]:
    """The names, those of the values in the place of one."""
    return tuple(each for known in names for each in ([v.name for v in values] if known == name else [known]))


# ---- what passes between the parts and the first stage ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Passing:
    """What is looked up and its gradient, by name ("" without one), and what each part makes and is given of them.

    By columns these are the `cuts` of the last dim; else terms of a sum, and one gradient for all parts.
    """

    looked: str
    gradient: str
    pieces: tuple[Value, ...]
    gradients: tuple[Value, ...]
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segmented: Segmented, lookup: Segment, cut: Shard, degree: int) -> _Passing:
        values, (looked,), gradient = segmented.values(), lookup.outputs, "".join(lookup.backward_inputs)
        known = {value.name for value in segmented.captured.values()}
        whole = values[looked]
        last = Shard(len(whole.shape) - 1)
        how = last if cut.dim else Replicate()

        def made(role: str) -> tuple[Value, ...]:
            names = (fresh(part_name(f"{role}{lookup.name}", rank), known) for rank in range(degree))
            return tuple(
                Value(name, local_shape(whole.shape, how, degree, rank), whole.dtype) for rank, name in enumerate(names)
            )

        whole_gradient = () if cut.dim or not gradient else (replace(whole, name=fresh(f"d_{lookup.name}", known)),)
        gradients = made("d_") if cut.dim and gradient else whole_gradient
        width = whole.at(1)[-1]
        cuts = tuple(span(width, 1, 1, degree, rank) for rank in range(degree)) if cut.dim else ()
        return cls(looked, gradient, made(""), gradients, cuts)

    def made(self) -> tuple[Value, ...]:
        """All of them, which are not in the whole graph."""
        return (*self.pieces, *self.gradients)

    def taken(self, rank: int) -> tuple[str, ...]:
        """The gradient that a part is given."""
        return tuple(value.name for value in (self.gradients[rank : rank + 1] if self.cuts else self.gradients))


# ---- a part ----------------------------------------------------------------------------------------------------------


def _part(lookup: Segment, target: str, passing: _Passing, rank: int) -> Segment:
    own = (part_name(target, rank),)
    return replace(
        lookup,
        name=part_name(lookup.name, rank),
        forward_parameters=own,
        outputs=(passing.pieces[rank].name,),
        backward_inputs=passing.taken(rank),
        gradients=own * len(lookup.gradients),
    )


def _placed(body: Body, cut: Shard, degree: int) -> PlacedBody:
    """The lookup on the places of the axis: the table and its gradient are cut, what makes the indices is not."""
    table = body.forward.inputs[-1].name  # of the segment's values, fixed ones and one parameter the last
    forward = _with(body.forward, table, cut, degree)
    whole = tuple(Replicate() for _ in body.saved)
    if body.backward is None:
        return PlacedBody(body, AXIS, degree, forward, whole, None)
    return PlacedBody(body, AXIS, degree, forward, whole, _with(body.backward, body.backward.outputs[-1], cut, degree))


def _with(function: Function, name: str, cut: Shard, degree: int) -> PlacedFunction:
    """The function with the node that reads, or makes, the value `name` cut so, and with all others whole."""
    values, chosen = defined(function), list[Strategy]()
    places: dict[str, TensorPlacement] = {v.name: cut if v.name == name else Replicate() for v in function.inputs}
    for node in function.nodes:
        ruled = Ruled.of(node, values)
        found = next((split(ruled, each, degree) for each in ruled.cut_for(name, cut, degree)), None)
        strategy = found or strategies(ruled, (), degree)[0]
        for operand, (_, how) in zip(ruled.call.operands, strategy.needs, strict=True):
            if found is not None and how is not None:
                places[operand.value.name] = how
        places.update((out.name, how) for out, how in zip(node.outs, strategy.gives, strict=True) if out and how)
        chosen.append(strategy)
    inputs = tuple(places[value.name] for value in function.inputs)
    return PlacedFunction(function, inputs, tuple(chosen), tuple(places[each] for each in function.outputs))


# ---- the first stage, which joins the pieces -------------------------------------------------------------------------


def _joining(body: Body, first: Segment, passing: _Passing) -> Body:
    """The first segment's body, which is given the pieces, and hands on those of the gradient."""
    formal = body.forward.inputs[first.values.index(passing.looked)]
    like = next(node for node in body.forward.nodes if _aliases(node, formal.name))
    used = {*defined(body.forward), *defined(body.backward or body.forward)}
    forward, pieces = _without_alias(body.forward, formal.name, like), _local(passing.pieces, "x", used)
    inputs = tuple(each for value in forward.inputs for each in (pieces if value.name == formal.name else (value,)))
    nodes = (*_joined(like, pieces, formal, used, apart=bool(passing.cuts)), *forward.nodes)
    saved = tuple(formal.name if name in like.names() else name for name in body.saved)
    made = replace(body, forward=Function(inputs, nodes, forward.outputs), saved=saved)
    if body.backward is None:
        return made
    backward = _without_alias(body.backward, formal.name, like)
    if passing.gradient in first.backward_outputs:
        at = first.backward_outputs.index(passing.gradient)
        backward = _parted(backward, at, passing, _local(passing.gradients, "dx", used))
    return replace(made, backward=backward)


def _aliases(node: Node, name: str) -> bool:
    return node.op is aten.alias.default and node.refs() == (name,)


def _without_alias(function: Function, name: str, alias: Node) -> Function:
    """The function in which what is looked up is read itself, not by the alias that stood for its pieces."""
    names = dict.fromkeys(alias.names(), name)
    inputs = tuple(replace(value, name=names.get(value.name, value.name)) for value in function.inputs)
    nodes = tuple(node.renamed(names) for node in function.nodes if not _aliases(node, name))
    return Function(inputs, nodes, tuple(names.get(each, each) for each in function.outputs))


def _local(values: Sequence[Value], wish: str, used: set[str]) -> tuple[Value, ...]:
    """The values under local names."""
    made = []
    for number, value in enumerate(values):
        made.append(replace(value, name=fresh(f"{wish}_{number}", used)))
        used.add(made[-1].name)
    return tuple(made)


def _joined(like: Node, pieces: Sequence[Value], whole: Value, used: set[str], *, apart: bool) -> Sequence[Node]:
    """What makes the whole of its pieces: side by side if they are columns (`apart`), else their sum."""
    if apart or len(pieces) == 1:
        columns = tuple(Ref(piece.name) for piece in pieces)
        return [made_by(like, aten.cat.default, (columns, len(whole.shape) - 1), whole)]
    total, nodes = pieces[0].name, list[Node]()
    for piece in pieces[1:]:
        out = whole if piece is pieces[-1] else replace(whole, name=fresh(f"{whole.name}_{len(nodes)}", used))
        used.add(out.name)
        nodes.append(made_by(like, aten.add.Tensor, (Ref(total), Ref(piece.name)), out))
        total = out.name
    return nodes


def _parted(backward: Function, at: int, passing: _Passing, pieces: Sequence[Value]) -> Function:
    """The backward that hands on the gradient number `at` as its pieces."""
    alias = next(node for node in backward.nodes if backward.outputs[at] in node.names())
    nodes = [node for node in backward.nodes if node is not alias]
    (source,), last = alias.refs(), len(pieces[0].shape) - 1
    if not passing.cuts:
        pieces = [replace(pieces[0], name=source)]  # as it is, for all parts
    else:
        each = zip(pieces, passing.cuts, strict=True)
        nodes += [made_by(alias, aten.slice.Tensor, (Ref(source), last, *cut), piece) for piece, cut in each]
    outputs = (*backward.outputs[:at], *(piece.name for piece in pieces), *backward.outputs[at + 1 :])
    return Function(backward.inputs, tuple(nodes), outputs)
