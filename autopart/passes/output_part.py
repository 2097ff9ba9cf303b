"""output_part: what a pipeline rank runs of an output layer that is split over them, a function for S and one for T.

before: the layer as a place of the axis runs it, which gathers the logarithms of all places' sums on its way
after:  S: up to this place's sum       T: from all places' sums on

What the places would exchange besides is made by each for itself, or the layer is refused. See `passes.split_output`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autopart.collectives import collective_name, is_collective
from autopart.errors import CaptureError
from autopart.ir.graph import Dim, Node, Ref, ancestors, descendants
from autopart.ir.placed import PlacedBody
from autopart.ir.segmented import Function, Segment, Segmented, defined
from autopart.passes.localise import localise
from autopart.passes.output_functions import Names, Part, Writer, made_by
from autopart.passes.output_layer import ADVICE
from autopart.rules.alias import viewed
from autopart.rules.spread import NOWHERE

aten = torch.ops.aten

ROWWISE = frozenset(("view", "_unsafe_view", "reshape", "mm", "_to_copy", "mul", "div"))
"""Operators on the way from the gradient of the logits to that of the hidden states through which factors a row go."""


class Maker:
    """Makes one rank's part out of what the axis' place `rank` runs of the whole layer as it is placed."""

    def __init__(self, segmented: Segmented, layer: Segment, placed: PlacedBody, rank: int, barriers: int) -> None:
        local = localise(placed, rank)
        self.layer, self.local, self.rank, self.degree, self.barriers = layer, local, rank, placed.degree, barriers
        self.backward = local.backward or Function((), (), ())
        self.whole = placed.body.backward or self.backward
        self.names = Names({**defined(local.forward), **defined(self.backward)})
        self.values, self._value = self.names.values, self.names.new
        self.writer = Writer(segmented, layer, placed, local, rank, self.names)
        nodes = self._named((*local.forward.nodes, *self.backward.nodes))
        self.gather, self.own, self.logits = _exchange(nodes, layer)
        self.nodes = tuple(each for node in nodes for each in self._alone(node, nodes))
        if others := [node for node in self.nodes if is_collective(node.op) and node is not self.gather]:
            raise _refused(layer, others[0])

    def made(self) -> Part:
        """The part."""
        every, peers = self._every()
        rest = tuple(every if node is self.gather else node for node in self.nodes)
        told = {"sum": self.own}
        first = ancestors(self.nodes, [self.own])[0]
        results = self.backward.outputs
        if self.layer.backward_outputs and self.barriers == 1:
            more, names = self._early(results[0], first)
            first, told = (*first, *more), told | names
        results = results[len(self.layer.backward_outputs) * (self.barriers == 1) :]
        wanted = [*self.local.forward.outputs, *results]
        first = ancestors(first, told.values())[0]
        early = {name for node in first for name in node.names()}
        second = tuple(n for n in ancestors(rest, wanted)[0] if early.isdisjoint(n.names()))
        return self.writer.part(first, second, wanted, told, peers)

    def _named(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """The nodes, with what is exchanged called after what it is."""
        wishes = {"all_gather": "sums", "all_reduce": "total"}
        names = {
            out.name: self._value(wish, out.shape, out.dtype).name
            for node in nodes
            if is_collective(node.op) and (wish := wishes.get(collective_name(node.op)))
            for out in node.outs
            if out is not None
        }
        return tuple(node.renamed(names) for node in nodes)

    # ---- what the places need not tell each other --------------------------------------------------------------------

    def _alone(self, node: Node, nodes: Sequence[Node]) -> Iterable[Node]:
        """A node without what it does not need of others.

        The gradient of a loss over all classes needs the scores' shape alone. Its sum over all classes is what the loss
        of one class would have, as a target has one: no place needs that of others.
        """
        if node.aten == "nll_loss_backward":
            scores = self.values[node.args[1].name]
            view, name = self._as(node, self.logits, scores.shape)
            return (*view, replace(node, args=(node.args[0], Ref(name), *node.args[2:])))
        if not is_collective(node.op):
            return (node,)
        makers = {name: each for each in nodes for name in each.names()}
        source = makers.get(node.refs()[0])
        summed = _origin(source.refs()[0], makers) if source is not None and source.aten == "sum" else None
        if summed is None or summed.aten != "nll_loss_backward":
            return (node,)
        whole = next(each for each in self.whole.nodes if each.names() == summed.names())
        gradient, _, target, weight, how, ignored, *rest = whole.args
        shape, out = self.values[target.name].shape, node.outs[0]
        assert out is not None  # dead calls are not placed
        valid = self._value("valid", shape, torch.bool)
        one = self._value("single", shape, torch.int64)
        view, name = self._as(node, self.own, (*shape, 1))
        made = self._value("summed", (*shape, 1), out.dtype)
        args = (gradient, Ref(name), Ref(one.name), weight, how, NOWHERE, *rest)
        return (
            made_by(node, aten.ne.Scalar, (target, ignored), valid),
            made_by(node, aten.where.Scalar, (Ref(valid.name), 0, NOWHERE), one),
            *view,
            made_by(node, whole.op, args, made),
            made_by(node, aten.view.default, (Ref(made.name), out.shape), out),
        )

    def _as(self, like: Node, name: str, shape: tuple[Dim, ...]) -> tuple[tuple[Node, ...], str]:
        """A value in another shape: the view that makes it, if it takes one, and the name."""
        if self.values[name].shape == shape:
            return (), name
        view = self._value(name, shape, self.values[name].dtype)
        return (made_by(like, aten.view.default, (Ref(name), shape), view),), view.name

    # ---- what one barrier needs of S ---------------------------------------------------------------------------------

    def _early(self, result: str, first: Sequence[Node]) -> tuple[list[Node], dict[str, str]]:
        """The nodes beside `first` by which S makes what the gradient `result` follows from, and these by their roles.

        They are copies, where T makes the same again: to keep it would be to hold the logits twice.
        """
        scores = next(n for n in self.whole.nodes if n.aten == "_log_softmax_backward_data").names()[0]
        makers = {name: node for node in self.nodes for name in node.names()}
        cast = makers[scores]
        difference = makers[cast.refs()[0]]
        given, scaled = difference.refs()  # g - exp(y) c
        total, path = makers[scaled].refs()[1], self._path(scores, result)
        wide = self.values[given]
        shifted, soft = (self._value(wish, wide.shape, wide.dtype) for wish in ("shifted", "soft"))
        made = [
            made_by(difference, aten.sub.Tensor, (Ref(self.logits), Ref(self.own)), shifted),
            made_by(difference, aten.exp.default, (Ref(shifted.name),), soft),
        ]
        read = {name for node in path for name in node.refs()} - descendants(self.nodes, [scores])
        known = {name for node in first for name in node.names()}
        needed = ancestors(self.nodes, [given, total, *read])[0]
        copies, names = self._copied(node for node in needed if known.isdisjoint(node.names()))
        made += copies
        found = {"total": names.get(total, total)} if self.rank == self.degree - 1 else {}
        looked_up = self._looked_up(given, path)
        for role, start in (("given", names.get(given, given)), ("soft", soft.name)):
            begun = replace(cast, args=(Ref(start), *cast.args[1:]))
            nodes = looked_up if role == "given" and looked_up else (begun, *path)
            copies, renamed = self._copied(node.renamed(names) for node in nodes)
            made += copies
            found[role] = renamed[result]
        return made, found

    def _looked_up(self, given: str, path: Sequence[Node]) -> tuple[Node, ...]:
        """The path from the gradient of a loss of targets: rows of the weight in place of the product; () if it is not.

        The gradient has one number a position, at its target, so the product with the weight is that row times it.
        """
        makers = {name: node for node in self.nodes for name in node.names()}
        loss = _origin(given, makers)
        at = next((i for i, node in enumerate(path) if node.aten == "mm"), None)
        if loss is None or loss.aten != "nll_loss_backward" or at is None:
            return ()
        if any(viewed(node) is None and node.aten != "_to_copy" for node in path[:at]):
            return ()
        product, target = path[at], self.values[loss.args[2].name]
        out = product.outs[0]
        assert out is not None  # it is on a path
        here = self._value("here", target.shape, torch.bool)
        row, single = (self._value(wish, target.shape, torch.int64) for wish in ("row", "single"))
        view, name = self._as(loss, self.own, (*target.shape, 1))
        factor = self._value("factor", (*target.shape, 1), self.values[given].dtype)
        rows, scaled = self._value("rows", out.shape, out.dtype), self._value("scaled", out.shape, factor.dtype)
        gradient, _, _, *rest = loss.args
        nodes = (
            made_by(loss, aten.ne.Scalar, (Ref(target.name), NOWHERE), here),
            made_by(loss, aten.where.ScalarOther, (Ref(here.name), Ref(target.name), 0), row),
            made_by(loss, aten.where.Scalar, (Ref(here.name), 0, NOWHERE), single),
            *view,
            made_by(loss, loss.op, (gradient, Ref(name), Ref(single.name), *rest), factor),
            made_by(product, aten.embedding.default, (product.args[1], Ref(row.name)), rows),
            made_by(product, aten.mul.Tensor, (Ref(rows.name), Ref(factor.name)), scaled),
            replace(made_by(product, aten._to_copy.default, (Ref(scaled.name),), out), kwargs=(("dtype", out.dtype),)),
        )
        return (*nodes, *path[at + 1 :])

    def _path(self, scores: str, result: str) -> tuple[Node, ...]:
        """The nodes from the gradient of the logits to that of the hidden states, which go row by row."""
        after = descendants(self.nodes, [scores])
        path = tuple(node for node in ancestors(self.nodes, [result])[0] if after & {*node.refs()})
        reached = {scores}
        for node in path:
            on, *others = node.refs()
            source, out = self.values[on], node.outs[0]
            product = node.aten == "mm"
            even = out is not None and (product or source.shape[-1] == out.shape[-1])
            if node.aten not in ROWWISE or on not in reached or reached & {*others} or not even:
                raise CaptureError(
                    f"{node.place()}{node.opname} is between the gradient of the logits and that of the output layer's "
                    "input, where one barrier goes on before the softmax is known, by products with the weight alone; "
                    "pin schedule='vocab(barriers=2)'"
                )
            reached.update(node.names())
        return path

    def _copied(self, nodes: Iterable[Node]) -> tuple[list[Node], dict[str, str]]:
        """Copies of nodes, and the names of what they make by those of the originals."""
        names: dict[str, str] = {}
        copies = []
        for node in nodes:
            for out in node.outs:
                if out is not None:
                    names[out.name] = self._value(out.name, out.shape, out.dtype).name
            copies.append(node.renamed(names))
        return copies, names

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _every(self) -> tuple[Node, list[str]]:
        """What brings the parts' sums together, in place of the exchange, and the names of the others' in it."""
        own = self.values[self.own]
        each = [
            self.own if rank == self.rank else self._value(f"{self.own}_of_{rank}", own.shape, own.dtype).name
            for rank in range(self.degree)
        ]
        joined = replace(self.gather, op=aten.cat.default, args=(tuple(map(Ref, each)), self.gather.args[2]))
        return joined, [name for name in each if name != self.own]


def _origin(name: str, makers: Mapping[str, Node]) -> Node | None:
    """The node that makes what a value is a view of, or the value; None if it is given."""
    node = makers.get(name)
    while node is not None and viewed(node) is not None:
        node = makers.get(node.refs()[0])
    return node


def _exchange(nodes: Sequence[Node], layer: Segment) -> tuple[Node, str, str]:
    """The node by which the parts tell each other the logarithms of their sums, this part's, and what it is of."""
    makers = {name: node for node in nodes for name in node.names()}
    for node in nodes:
        if is_collective(node.op):
            source = makers.get(node.refs()[0])
            if source is None or source.aten != "logsumexp":
                raise _refused(layer, node)
            return node, node.refs()[0], source.refs()[0]
    raise AssertionError("a log-softmax over a split dim")


def _refused(layer: Segment, node: Node) -> CaptureError:
    return CaptureError(
        f"{node.place()}the output layer {layer.name!r}, split over the pipeline ranks, needs more of the other "
        f"ranks than the sums of their exponentials ({collective_name(node.op)} of {', '.join(node.refs())}); "
        f"a log_softmax with the negative log-likelihood of targets, without label smoothing, needs no more; {ADVICE}"
    )
