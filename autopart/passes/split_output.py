"""split_output: stages -> stages. The output layer, at the end of the last stage, split over all pipeline ranks.

before: stage 0: wte h.0   stage 1: h.1 head
after:  stage 0: wte h.0   stage 1: h.1   stage 2: head@pp0   stage 3: head@pp1          (2 on rank 0, 3 on rank 1)

Each part has some rows of the weight. Its S makes its logits and the logarithm of their sum, which all parts tell each
other; its T goes on from there to its part of the loss and its gradients. So each action ends where it needs what the
others bring, whatever the operators between the product and the loss are (`passes.output_layer`):

    S_r: x_r = h @ w_r.T   s_r = logsumexp(x_r)
    T_r: y_r = x_r - logsumexp(s_0 .. s_p)   loss_r   d_r = g_r - exp(y_r) c   dw_r = d_r.T @ h

where g_r is the gradient that comes to the log-softmax and c its sum over all classes. The last stage's backward begins
with the gradient of h. With two barriers, T makes the parts of its sum, and with one, S makes what they follow from
(Yeung et al., arXiv 2411.05288, section 4), as products with the weight go through sums and factors a row:

    2:  dh = sum of d_r @ w_r                                                                    of each T
    1:  dh = sum of g_r @ w_r - c exp(s_r - logsumexp(s_0 .. s_p)) (exp(x_r - s_r) @ w_r)        of each S
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from autopart.errors import CaptureError
from autopart.ir.graph import Dim, Node, Ref, Size, Value, map_arg
from autopart.ir.names import fresh
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, Segment, Segmented, defined
from autopart.ir.sharded import Sharded
from autopart.passes.output_functions import AXIS, Divided, Part, Stages, part_name, part_of
from autopart.passes.output_layer import ADVICE, along_vocabulary
from autopart.passes.output_part import Maker

aten = torch.ops.aten


def split_output(sharded: Sharded, stages: Stages, barriers: int) -> Divided:
    """The stages, a rank each, with the last segment split over them.

    Raises CaptureError where the layer cannot be split, or is not the one end of the step.
    """
    segmented, degree = sharded.segmented, len(stages)
    layer = stages[-1][-1]
    stages = (*stages[:-1], stages[-1][:-1])
    _check(segmented, layer, stages)
    body = segmented.bodies[layer.body]
    placed = along_vocabulary(body, layer, AXIS, degree)
    makers = [Maker(segmented, layer, placed, rank, barriers) for rank in range(degree)]
    parts = [maker.made() for maker in makers]
    bodies, values = list(segmented.bodies), [value for part in parts for value in part.values]
    segments = []
    for part in parts:
        segments.append(replace(part.segment, body=len(bodies)))
        bodies.append(part.body)
    if layer.backward_outputs:
        last, pieces = stages[-1][-1], _pieces(parts, barriers)
        shared = any({*layer.backward_outputs} & {*s.backward_inputs} for row in stages for s in row if s is not last)
        joined = replace(_joined(last, layer, pieces.values(), shared=shared), body=len(bodies))
        stages = (*stages[:-1], (*stages[-1][:-1], joined))
        bodies.append(_joining(bodies[last.body], last, segmented, layer, pieces, shared=shared))
    stages = (*stages, *((segment,) for segment in segments))
    between = {**sharded.between, **{value.name: _placed(value) for value in values}}
    inside = (*sharded.inside, *({} for _ in bodies[len(sharded.inside) :]))
    made = (*segmented.made, *values)
    whole = replace(segmented, bodies=tuple(bodies), segments=tuple(s for row in stages for s in row), made=made)
    known = {item.target: item.value for item in segmented.captured.of_kind("parameter")}
    elsewhere = {target for row in stages[:degree] for s in row for target in s.parameters}  # tied, and whole
    parameters = {
        part_name(target, rank): part_of(target, known[target], rank, degree)
        for target in layer.parameters
        if target not in elsewhere
        for rank in range(degree)
    }
    return Divided(replace(sharded, segmented=whole, between=between, inside=inside), stages, parameters)


def _placed(value: Value) -> TensorPlacement:
    dim = next((i for i, size in enumerate(value.shape) if isinstance(size, Size)), None)
    return Replicate() if dim is None else Shard(dim)


def _check(segmented: Segmented, layer: Segment, stages: Stages) -> None:
    """The layer makes the loss and nothing else, of what the last stage makes, with parameters of its own."""
    captured, where = segmented.captured, f"the output layer {layer.name!r}"
    if not stages[-1]:
        raise CaptureError(f"{where} is alone on the last stage; a stage needs a layer before it: fewer stages")
    others = [name for name in layer.outputs if name != captured.loss]
    if others:
        outs = [out.target for out in captured.outputs if out.name in others]
        raise CaptureError(
            f"{where} makes more than the loss ({', '.join(outs or others)}), such as logits, of which every pipeline "
            f"rank has the part of its classes only; return the loss alone, or {ADVICE}"
        )
    if layer.updates:
        raise CaptureError(f"{where} updates the buffer {layer.updates[0]}; {ADVICE}")
    makers = {name: segment for row in stages for segment in row for name in segment.outputs}
    late = {name for row in stages for segment in row for name in segment.outputs if captured.loss == name}
    hidden = [name for name in layer.values if name in makers]
    if late or len(hidden) != 1 or makers[hidden[0]] not in stages[-1]:
        told = ", ".join(sorted({makers[name].name for name in hidden})) or "no layer"
        raise CaptureError(
            f"{where} is given {len(hidden)} values, of {told}; split over the pipeline ranks, it can be given one, of "
            f"the last stage; {ADVICE}"
        )
    if layer.backward_outputs and segmented.bodies[stages[-1][-1].body].backward is None:
        raise CaptureError(f"{where} gives a gradient to layers before {stages[-1][-1].name}, which has none; {ADVICE}")


# ---- the last stage, whose backward begins with the gradient of the hidden states ------------------------------------


ROLES = {1: ("given", "soft", "sum", "total"), 2: ("gradient",)}
"""What the gradient of the hidden states is made of, by the number of barriers."""


def _pieces(parts: Sequence[Part], barriers: int) -> dict[tuple[str, int], Value]:
    """What each part tells the last stage, by role and rank."""
    return {
        (role, rank): part.told[role]
        for rank, part in enumerate(parts)
        for role in ROLES[barriers]
        if role in part.told
    }


def _joined(last: Segment, layer: Segment, pieces: Iterable[Value], *, shared: bool) -> Segment:
    """The last layer before the output layer, given what the parts tell in place of the gradient, which it hands on."""
    rest = tuple(name for name in last.backward_inputs if name not in layer.backward_outputs)
    return replace(
        last,
        backward_inputs=(*(value.name for value in pieces), *rest),
        backward_outputs=(*layer.backward_outputs * shared, *last.backward_outputs),
    )


def _joining(
    body: Body,
    last: Segment,
    segmented: Segmented,
    layer: Segment,
    pieces: Mapping[tuple[str, int], Value],
    *,
    shared: bool,
) -> Body:
    """The last layer's body, whose backward makes the gradient first."""
    backward, (gradient,) = body.backward, layer.backward_outputs
    assert backward is not None  # as has been checked
    used = {*defined(body.forward), *defined(backward)}
    inputs = dict(zip(last.backward_inputs, backward.inputs, strict=False))
    whole = next(value for value in segmented.captured.values() if value.name == gradient)
    wanted = inputs.get(gradient) or replace(whole, name=fresh("gradient", used))
    writer = _Writer(wanted, used | {wanted.name}, backward.nodes[0])
    local = {key: writer.value(f"{key[0]}_{key[1]}", value.shape, value.dtype) for key, value in pieces.items()}
    writer.write(local)
    rest = tuple(value for value in backward.inputs if value.name != wanted.name)
    nodes, outputs = (*writer.nodes, *backward.nodes), (*(wanted.name,) * shared, *backward.outputs)
    return replace(body, backward=Function((*local.values(), *rest), nodes, outputs))


class _Writer:
    """Writes the nodes that make the gradient `wanted` of the parts' pieces."""

    def __init__(self, wanted: Value, used: set[str], like: Node) -> None:
        self.wanted, self.used = wanted, used
        self.like = replace(like, backward=True, module="", source="", region=-1)
        self.nodes: list[Node] = []

    def value(self, wish: str, shape: tuple[Dim, ...], dtype: torch.dtype) -> Value:
        """A new value."""
        name = fresh(wish, self.used)
        self.used.add(name)
        return Value(name, shape, dtype)

    def write(self, pieces: Mapping[tuple[str, int], Value]) -> None:
        """Their sum; with the statistics of each part, of what each of them follows from."""
        count = 1 + max(rank for _, rank in pieces)
        if ("gradient", 0) in pieces:
            terms = [pieces["gradient", rank] for rank in range(count)]
        else:
            terms = self._terms(pieces, count)
        total = reduce(lambda a, b: self._put(aten.add.Tensor, a, b, like=a), terms)
        if total.dtype == self.wanted.dtype:
            self._put(aten.alias.default, total, like=self.wanted, name=self.wanted.name)
        else:
            self._put(aten._to_copy.default, total, like=self.wanted, name=self.wanted.name, dtype=self.wanted.dtype)

    def _terms(self, pieces: Mapping[tuple[str, int], Value], count: int) -> list[Value]:
        """``g_r @ w_r - c exp(s_r - logsumexp(s)) (soft_r @ w_r)`` of each part."""
        sums, total = [pieces["sum", rank] for rank in range(count)], pieces["total", count - 1]
        each = replace(sums[0], shape=(*sums[0].shape[:-1], count))
        every = self._put(aten.cat.default, tuple(sums), len(each.shape) - 1, like=each)
        whole = self._put(aten.logsumexp.default, every, (len(each.shape) - 1,), True, like=sums[0])
        rows = (*self.wanted.shape[:-1], 1)
        terms = []
        for rank, part in enumerate(sums):
            apart = self._put(aten.sub.Tensor, part, whole, like=part)
            factor = self._put(aten.mul.Tensor, self._put(aten.exp.default, apart, like=part), total, like=part)
            factor = self._put(aten.view.default, factor, rows, like=replace(factor, shape=rows))
            soft = pieces["soft", rank]
            wide = replace(soft, dtype=torch.promote_types(soft.dtype, factor.dtype))
            scaled = self._put(aten.mul.Tensor, soft, factor, like=wide)
            terms.append(self._put(aten.sub.Tensor, pieces["given", rank], scaled, like=wide))
        return terms

    def _put(self, op: Any, *args: Any, like: Value, name: str = "", **kwargs: Any) -> Value:
        """Append a call whose result has the shape and dtype of `like`; values among the arguments are referred to."""
        out = (
            Value(name, like.shape, like.dtype)
            if name
            else self.value(op.overloadpacket.__name__, like.shape, like.dtype)
        )
        given = map_arg(args, lambda arg: Ref(arg.name) if isinstance(arg, Value) else arg)
        self.nodes.append(replace(self.like, op=op, args=given, kwargs=tuple(kwargs.items()), outs=(out,), single=True))
        return out
