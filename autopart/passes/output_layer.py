"""The output layer: where in a step the product with the vocabulary begins, and the step from there on split along it.

before: head: logits = h @ w.t(); loss = nll(log_softmax(logits))         w: [V, D], logits: [b, V]
after:  at each of p places: logits = h @ w_r.t()                         w_r: [V/p, D], logits: [b, V/p]
        loss_r = nll of the targets among this place's                    the loss is the sum of the places'

What is split follows from the factor rules, node by node: the weight is split, the hidden states are whole, and every
operator goes on with what it is given. It is refused where one cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Ref, Value, descendants
from autopart.ir.names import fresh
from autopart.ir.placed import Cut, Move, PlacedBody, PlacedFunction, Strategy, collective_of
from autopart.ir.placement import Replicate, Shard, TensorPlacement
from autopart.ir.segmented import Body, Function, Segment, defined
from autopart.rules.alias import viewed
from autopart.rules.strategies import Ruled, strategies

MEAN = 1
"""The number of the reduction "mean" in the arguments of losses."""

PRODUCTS = frozenset(("mm", "addmm", "bmm", "matmul", "linear"))

ADVICE = "pin another schedule, such as schedule='1f1b', which keeps the output layer on the last stage"

Places = dict[str, TensorPlacement]


def begins(captured: Captured) -> int:
    """The place, among the forward's nodes, of the first one of the output layer.

    That is the product with a parameter which makes what the last log-softmax before the loss is of, with the views
    that lead to it; all nodes after it are the output layer's. Raises CaptureError where there is none.
    """
    forward = [node for node in captured.nodes if not node.backward]
    made = {name: node for node in forward for name in node.names()}
    at = next((i for i in reversed(range(len(forward))) if forward[i].aten == "_log_softmax"), -1)
    softmax = forward[at] if at >= 0 else None
    if softmax is None or captured.loss is None or captured.loss not in descendants(forward[at:], softmax.names()):
        raise CaptureError(
            "schedule: an output layer that is split over the pipeline ranks ends in a cross-entropy (a log_softmax "
            f"and the negative log-likelihood of targets), and this module's step has none; {ADVICE}"
        )
    parameters = {item.value.name for item in captured.of_kind("parameter")}
    weights = set(parameters)
    for node in forward:
        if node.refs() and weights.issuperset(node.refs()):
            weights.update(node.names())
    size, node = _wide(softmax, made, parameters), made[softmax.refs()[0]]
    while node.aten not in PRODUCTS:
        source = next((made[n] for n in node.refs() if n in made and _last(made[n], n) == size), None)
        if source is None:
            raise CaptureError(f"{node.place()}the logits are not the product of hidden states and a weight; {ADVICE}")
        node = source
    if weights.isdisjoint(node.refs()):
        raise CaptureError(f"{node.place()}the logits are a product without a parameter; {ADVICE}")
    return min(map(forward.index, _led_to(node, made, weights)))


def _last(node: Node, name: str) -> object:
    return next(out.shape[-1] if out.shape else None for out in node.outs if out is not None and out.name == name)


def _wide(softmax: Node, made: Mapping[str, Node], parameters: Iterable[str]) -> object:
    """The size of the vocabulary."""
    source, dim = softmax.refs()[0], softmax.args[1]
    out = softmax.outs[0]
    if out is not None and dim not in (-1, len(out.shape) - 1):
        raise CaptureError(
            f"{softmax.place()}the classes are dim {dim} of the logits, where an output layer that is split over the "
            f"pipeline ranks has them last; flatten the logits to [positions, classes], or {ADVICE}"
        )
    if source not in made:
        raise CaptureError(f"{softmax.place()}the logits are {'a parameter' if source in parameters else 'an input'}")
    return _last(made[source], source)


def _led_to(product: Node, made: Mapping[str, Node], weights: Iterable[str]) -> list[Node]:
    """A product, the views of parameters that it reads, and the view of the hidden states."""
    found = [product]
    for name in product.refs():
        while name in made and (name in weights or viewed(made[name]) is not None):
            found.append(made[name])
            if name not in weights:
                break
            name = made[name].refs()[0]
    return found


def along_vocabulary(body: Body, segment: Segment, axis: str, degree: int) -> PlacedBody:
    """The output layer's body on the places of an axis: its weight in pieces of the vocabulary, what comes in whole.

    Raises CaptureError for an operator that cannot go on with a piece of the logits, and for parameters that are not
    the weight, or a bias, of the vocabulary.
    """
    body = _without_weights(body)
    forward = _Walk(body.forward, degree, segment.name)
    count = len(segment.forward_parameters)
    inputs = _given(body.forward, count)
    formals = (value.name for value in body.forward.inputs[len(inputs) - count :])
    targets = dict(zip(formals, segment.forward_parameters, strict=True))
    _check_parameters(body.forward, targets, segment, degree)
    first = forward.through(inputs)
    saved = tuple(forward.places[name] for name in body.saved)
    if body.backward is None:
        return PlacedBody(body, axis, degree, first, saved, None)
    backward = _Walk(body.backward, degree, segment.name)
    kept = dict(zip(body.saved, saved, strict=True))
    given = _given(body.backward, len(segment.backward_parameters))
    second = backward.through([kept.get(v.name, how) for v, how in zip(body.backward.inputs, given, strict=True)])
    return PlacedBody(body, axis, degree, first, saved, second)


def _without_weights(body: Body) -> Body:
    """Without the number of valid targets that losses count beside, and that only a mean is divided by.

    The gradient of another loss is given it all the same; it is given zero.
    """
    if body.backward is None:
        return body
    losses = [n for n in body.forward.nodes if n.aten == "nll_loss_forward" and n.args[3] != MEAN]
    counts = {node.outs[1].name for node in losses if node.outs[1] is not None}
    nodes: list[Node] = []
    used = defined(body.forward) | defined(body.backward)
    for node in body.backward.nodes:
        if node.aten == "nll_loss_backward" and counts & {*node.refs()}:
            gradient = used[node.args[0].name]
            zero = Value(fresh("zero", used), (), gradient.dtype)
            used[zero.name] = zero
            op = torch.ops.aten.new_zeros.default
            nodes.append(replace(node, op=op, args=(node.args[0], ()), kwargs=(), outs=(zero,)))
            node = replace(node, args=(*node.args[:-1], Ref(zero.name)))
        nodes.append(node)
    read = {name for node in nodes for name in node.refs()} | {*body.backward.outputs}
    dead = counts - read
    forward = [
        replace(n, outs=(n.outs[0], None)) if n in losses and {*n.names()} & dead else n for n in body.forward.nodes
    ]
    inputs = tuple(value for value in body.backward.inputs if value.name not in dead)
    return replace(
        body,
        forward=replace(body.forward, nodes=tuple(forward)),
        saved=tuple(name for name in body.saved if name not in dead),
        backward=Function(inputs, tuple(nodes), body.backward.outputs),
    )


def _given(function: Function, parameters: int) -> list[TensorPlacement]:
    """How a function's inputs are placed: its last ones are parameters, in pieces of dim 0; others are whole."""
    whole = len(function.inputs) - parameters
    return [*[Replicate()] * whole, *[Shard(0)] * parameters]


def _check_parameters(function: Function, targets: Mapping[str, str], segment: Segment, degree: int) -> None:
    """The weight and biases of the vocabulary, as long as the largest of them in dim 0, and no others."""
    shapes = {v.name: v.shape for v in function.inputs if v.name in targets}
    rows = [shape[0] for shape in shapes.values() if len(shape) > 1]
    length = max((count for count in rows if isinstance(count, int)), default=0)
    if length < degree:
        raise CaptureError(
            f"the output layer {segment.name!r} has {length} classes, fewer than the {degree} pipeline ranks that "
            f"would have a part of them; have fewer pipeline ranks, or {ADVICE}"
        )
    other = [name for name, shape in shapes.items() if not shape or shape[0] != length]
    if other:
        where = next((node.place() for node in function.nodes if other[0] in node.refs()), "")
        raise CaptureError(
            f"{where}the output layer {segment.name!r} has the parameter {targets[other[0]]} of shape "
            f"{list(shapes[other[0]])} beside its weight of {length} rows, one for each class; only weights and biases "
            f"with a row (dim 0) for each class are split over the pipeline ranks; {ADVICE}"
        )


class _Walk:
    """One function, its nodes placed in order; `places` has what each value is made as."""

    def __init__(self, function: Function, degree: int, where: str) -> None:
        self.function, self.degree, self.where = function, degree, where
        self.values = defined(function)
        self.places: Places = {}
        self.moves: dict[tuple[str, TensorPlacement], Move] = {}

    def through(self, inputs: Sequence[TensorPlacement]) -> PlacedFunction:
        """The function with its inputs placed so."""
        self.places.update(zip((v.name for v in self.function.inputs), inputs, strict=True))
        taken = tuple(self._node(node) for node in self.function.nodes)
        outputs = tuple(self.places[name] for name in self.function.outputs)
        return PlacedFunction(self.function, tuple(inputs), taken, outputs, tuple(self.moves.values()))

    def _node(self, node: Node) -> Strategy:
        """The strategy of a node that takes its operands as they are, but for pieces of whole ones."""
        ruled = Ruled.of(node, self.values)
        names = [operand.value.name for operand in ruled.call.operands]
        cuts: list[Cut] = []
        for name in dict.fromkeys(names):
            how = self.places[name]
            if isinstance(how, Shard):
                cuts += ruled.cut_for(name, how, self.degree)
        fitting: list[tuple[int, int, Strategy, list[tuple[str, TensorPlacement]]]] = []
        for each in strategies(ruled, dict.fromkeys(cuts), self.degree):
            wanted = [(name, how) for name, (_, how) in zip(names, each.needs, strict=True) if how is not None]
            moved = [(name, how) for name, how in wanted if self.places[name] != how]
            if all(self.places[name] == Replicate() for name, _ in moved):
                fitting.append((len(moved), len(fitting), each, moved))
        if not fitting:
            raise self._refused(node, names)
        _, _, chosen, moved = min(fitting)
        for name, how in moved:
            assert collective_of(Replicate(), how) in ("slice", "first")
            self.moves[name, how] = Move(name, Replicate(), how)
        for out, given in zip(node.outs, chosen.gives, strict=True):
            if out is not None and given is not None:
                self.places[out.name] = given
        return chosen

    def _refused(self, node: Node, names: Sequence[str]) -> CaptureError:
        split = [name for name in names if self.places[name] != Replicate()]
        told = ", ".join(f"{_shown(self.values[name])} as {self.places[name]}" for name in split)
        return CaptureError(
            f"{node.place()}{node.opname} in the output layer {self.where!r} needs all of what a pipeline rank has a "
            f"part of ({told}), so the layer cannot be split along the vocabulary; {ADVICE}"
        )


def _shown(value: Value) -> str:
    return f"a tensor of [{', '.join(str(n) if isinstance(n, int) else n.text('b') for n in value.shape)}]"
