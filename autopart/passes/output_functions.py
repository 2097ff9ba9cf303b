"""output_functions: nodes -> Part. What one rank has of an output layer: the functions of S and T, and its segment.

before: the nodes of S and of T, in the local names of the whole layer
after:  head@pp1: logits(h, targets, w_1) -> sum     loss(sums of others, kept) -> loss, gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopart._torch import OpOverload
from autopart.ir.graph import Arg, Dim, Node, Ref, Value
from autopart.ir.names import fresh
from autopart.ir.placed import PlacedBody
from autopart.ir.segmented import Body, Function, Segment, Segmented, defined
from autopart.ir.sharded import Sharded
from autopart.ir.state import Parameter, Piece
from autopart.rules.split import span

aten = torch.ops.aten

Stages = tuple[tuple[Segment, ...], ...]

AXIS = "pp"
"""The mesh axis that the vocabulary is split on."""


def part_name(name: str, rank: int) -> str:
    """What the part of a segment, parameter or value that pipeline rank `rank` has is called."""
    return f"{name}@{AXIS}{rank}"


def part_of(target: str, whole: Value, rank: int, degree: int, dim: int = 0) -> Parameter:
    """The part of a parameter that one of `degree` pipeline ranks has: some rows (those of its classes), or columns."""
    shape = whole.at(1)
    piece = Piece(AXIS, shape, dim, 1, *span(shape[dim], 1, 1, degree, rank))
    return Parameter(part_name(target, rank), piece.local, whole.dtype, (piece,), target)


@dataclass(frozen=True, slots=True)
class Divided:
    """The step with a layer in parts, one more stage each behind the others, and their parameters by their targets."""

    sharded: Sharded
    stages: Stages
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part: its segment (whose body is numbered later), and the values that it tells other stages.

    `told` are these by their roles: ``sum``, the logarithm of its sum; ``gradient``, its part of the gradient of what
    comes in; or, in its stead, ``given`` and ``soft``, the products with g and with its softmax, and ``total``, c.
    """

    segment: Segment
    body: Body
    told: Mapping[str, Value]

    @property
    def values(self) -> tuple[Value, ...]:
        """The values that it makes for other stages, by their names in the whole graph."""
        return tuple(self.told.values())


class Names:
    """The values of a rank's part by their local names, to which new ones are added."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values

    def new(self, wish: str, shape: tuple[Dim, ...], dtype: torch.dtype) -> Value:
        """A new local value."""
        value = Value(fresh(wish, self.values), shape, dtype)
        self.values[value.name] = value
        return value


def made_by(like: Node, op: OpOverload, args: tuple[Arg, ...], out: Value) -> Node:
    """A call that makes one value, where `like` is."""
    return replace(like, op=op, args=args, kwargs=(), outs=(out,), single=True)


class Writer:
    """Writes the functions of one rank's part, which are given what the layer is (`formals`, by local name)."""

    def __init__(
        self, segmented: Segmented, layer: Segment, placed: PlacedBody, local: Body, rank: int, names: Names
    ) -> None:
        self.layer, self.local, self.rank, self.degree, self.names = layer, local, rank, placed.degree, names
        self.wholes = defined(placed.body.forward) | defined(placed.body.backward or placed.body.forward)
        users = (s for s in segmented.segments if s.name != layer.name)
        self.tied = {*layer.parameters}.intersection(target for s in users for target in s.parameters)
        self.given: dict[str, Value] = {}  # such parameters, whole, by the local names of what is taken of them
        self.outside = {value.name for value in segmented.captured.values()}
        self.formals = self._formals()

    def part(
        self,
        first: Sequence[Node],
        second: Sequence[Node],
        wanted: Sequence[str],
        told: Mapping[str, str],
        peers: Sequence[str],
    ) -> Part:
        """The part with the nodes `first` in S and `second` in T.

        S returns what is `told`, by role; T, which is given the sums of `peers`, returns `wanted`: the loss, the
        gradient of what comes in if it makes that, and the gradients of parameters.
        """
        layer, count = self.layer, len(wanted) - len(self.layer.gradients)
        padded = [self._padded(*each, second) for each in zip(wanted[count:], layer.gradients, strict=True)]
        second = (*second, *(node for node, _ in padded if node is not None))
        wanted = (*wanted[:count], *(name for _, name in padded))
        made = {name for node in first for name in node.names()}
        read, reread = _outside(first, told.values()), _outside(second, wanted)
        values = [name for name, (kind, _) in self.formals.items() if kind == "value" and name in {*read, *reread}]
        saved = tuple(name for name in reread if name in made or name in values)
        taken, given = [*values, *self._of("tangent", read)], [*peers, *self._of("tangent", reread)]
        names = {role: self._global(role) for role in (*told, *["gradient"] * (count > len(layer.outputs)))}
        local = {**told, "gradient": wanted[count - 1]}
        segment = replace(
            layer,
            name=part_name(layer.name, self.rank),
            values=self._outer(taken),
            forward_fixed=self._outer(self._of("fixed", read)),
            forward_parameters=self._parts(read),
            outputs=tuple(names[role] for role in told),
            backward_inputs=(*self._sums(), *self._outer(self._of("tangent", reread))),
            backward_fixed=self._outer(self._of("fixed", reread)),
            backward_parameters=self._parts(reread),
            backward_outputs=(*layer.outputs, *(names[role] for role in names if role not in told)),
            gradients=tuple(map(self._target, layer.gradients)),
        )
        logits = self._function(taken, read, first, told.values())
        loss = self._function([*given, *saved], reread, second, wanted)
        known = {role: replace(self.names.values[local[role]], name=name) for role, name in names.items()}
        return Part(segment, Body(self.local.name, logits, saved, loss), known)

    def _function(
        self, taken: Sequence[str], read: Sequence[str], nodes: Sequence[Node], results: Iterable[str]
    ) -> Function:
        """The function of some nodes; of parameters that other layers use too it is given all, and takes its rows."""
        formals = (*taken, *self._of("fixed", read), *self._of("parameter", read))
        inputs, rows = [], []
        for value in (self.names.values[name] for name in formals):
            whole = self._whole(value)
            if whole is not None:
                args = (Ref(whole.name), 0, *self._rows(value.name))
                rows.append(made_by(nodes[0], aten.slice.Tensor, args, value))
            inputs.append(whole or value)
        return Function(tuple(inputs), (*rows, *nodes), tuple(results))

    def _formals(self) -> dict[str, tuple[str, str]]:
        """What each formal of the layer is: ("value", "tangent", "fixed" or "parameter", its name or target)."""
        layer, found = self.layer, {}
        names = (layer.values, layer.forward_fixed, layer.forward_parameters)
        kinds = [kind for kind, each in zip(("value", "fixed", "parameter"), names, strict=True) for _ in each]
        outside = [name for each in names for name in each]
        for value, kind, name in zip(self.local.forward.inputs, kinds, outside, strict=True):
            found[value.name] = kind, name
        kept, backward = {*self.local.saved}, self.local.backward or Function((), (), ())
        rest = [value.name for value in backward.inputs if value.name not in kept]
        names = (layer.backward_inputs, layer.backward_fixed, layer.backward_parameters)
        kinds = [kind for kind, each in zip(("tangent", "fixed", "parameter"), names, strict=True) for _ in each]
        for local, kind, name in zip(rest, kinds, [n for each in names for n in each], strict=True):
            found.setdefault(local, (kind, name))
        return found

    def _of(self, kind: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.formals.get(name, ("", ""))[0] == kind]

    def _outer(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.formals[name][1] for name in names)

    def _parts(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self._target, self._outer(self._of("parameter", names))))

    def _sums(self) -> tuple[str, ...]:
        """The other ranks' sums, by their names in the whole graph."""
        return tuple(self._global("sum", rank) for rank in range(self.degree) if rank != self.rank)

    def _global(self, role: str, rank: int | None = None) -> str:
        """The name in the whole graph of what a part tells others."""
        return fresh(part_name(f"{self.layer.name}.{role}", self.rank if rank is None else rank), self.outside)

    # ---- parameters that other layers use too: every rank has all of them --------------------------------------------

    def _target(self, target: str) -> str:
        """The parameter that the part has in place of one of the layer's."""
        return target if target in self.tied else part_name(target, self.rank)

    def _rows(self, name: str) -> tuple[int, int]:
        """The first of this rank's rows of a parameter, and the one after the last."""
        return span(self.wholes[name].shape[0], 1, 1, self.degree, self.rank)

    def _whole(self, value: Value) -> Value | None:
        """All of such a parameter, None for any other formal."""
        kind, target = self.formals.get(value.name, ("", ""))
        if kind != "parameter" or target not in self.tied:
            return None
        if value.name not in self.given:
            shape = self.wholes[value.name].shape
            self.given[value.name] = self.names.new(f"{value.name}_whole", shape, value.dtype)
        return self.given[value.name]

    def _padded(self, gradient: str, target: str, nodes: Sequence[Node]) -> tuple[Node | None, str]:
        """The gradient of all rows of such a parameter, and the node that makes it."""
        if target not in self.tied:
            return None, gradient
        name = next(n for n, (kind, known) in self.formals.items() if kind == "parameter" and known == target)
        shape, like = self.wholes[name].shape, next(node for node in nodes if gradient in node.names())
        value = self.names.new(f"{gradient}_whole", shape, self.names.values[gradient].dtype)
        args = (Ref(gradient), shape, 0, *self._rows(name), 1)
        return made_by(like, aten.slice_backward.default, args, value), value.name


def _outside(nodes: Iterable[Node], results: Iterable[str]) -> list[str]:
    """The names that nodes and results read and no node makes, in order."""
    nodes = tuple(nodes)
    made = {name for node in nodes for name in node.names()}
    read = (*(name for node in nodes for name in node.refs()), *results)
    return [name for name in dict.fromkeys(read) if name not in made]
