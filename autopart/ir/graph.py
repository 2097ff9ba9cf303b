"""The graph that every pass reads and returns: frozen nodes in execution order, sizes affine in the batch.

FX ends at the frontier: `capture` converts the joint forward+backward FX graph once into this form. Three things
differ from FX. A node with several results names them all (no ``getitem`` nodes). A size that moves with the batch is
a :class:`Size`, so one graph serves every batch. Nothing is kept in a ``meta`` dictionary: what is known about a node
is a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from autopart._torch import OpOverload

Arg = Any
"""An argument of a node: `Ref`, `Size`, `Share`, a plain Python or torch constant, or a tuple of arguments."""


@dataclass(frozen=True, slots=True)
class Size:
    """The number ``per_sample * batch + constant``; its reciprocal-like form ``per_sample / batch`` if `inverse`.

    With ``whole=False`` the batch is that of the microbatch at hand (a size in a shape); with ``whole=True`` it is
    the whole global batch (a number that enters the arithmetic, such as the divisor of a mean). A fraction of the batch
    is what a place has whose axis splits the samples.
    """

    per_sample: int | float | Fraction
    constant: int = 0
    whole: bool = False
    inverse: bool = False

    def at(self, batch: int) -> int | float:
        """The number at a batch of `batch` samples. Raises ValueError for a fraction of it that is not whole."""
        if self.inverse:
            return float(self.per_sample / batch)
        found = self.per_sample * batch + self.constant
        if not isinstance(found, Fraction):
            return found
        if found.denominator > 1:
            raise ValueError(f"{batch} samples cannot be split into equal parts: {self.text('b')} is {found}")
        return int(found)

    @property
    def over(self) -> int:
        """What the batch is divided by."""
        return self.per_sample.denominator if isinstance(self.per_sample, Fraction) else 1

    def text(self, batch: str) -> str:
        """Python source for the number, with `batch` the source for the batch size."""
        if self.inverse:
            return f"{self.per_sample} / {batch}"
        each = self.per_sample.numerator if isinstance(self.per_sample, Fraction) else self.per_sample
        product = batch if each == 1 else f"{each} * {batch}"
        product += f" // {self.over}" if self.over > 1 else ""
        if self.constant == 0:
            return product
        return f"{product} {'+' if self.constant > 0 else '-'} {abs(self.constant)}"


@dataclass(frozen=True, slots=True)
class Share:
    """``factor`` times the microbatch's share of the whole batch, ``b / B``.

    A value that is equal on all microbatches is scaled by it where it joins a sum over microbatches.
    """

    factor: int | float = 1

    def text(self) -> str:
        """Python source for the number."""
        return "b / B" if self.factor == 1 else f"{self.factor} * b / B"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another node's result, or an input, by name."""

    name: str


Dim = int | Size


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: defined once, used by name."""

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape at a (micro)batch of `batch` samples."""
        return tuple(int(d.at(batch)) if isinstance(d, Size) else d for d in self.shape)

    def sized(self, size: Callable[[Size], Dim]) -> Value:
        """The value with `size` applied to every dim that moves with the batch."""
        return replace(self, shape=tuple([size(d) if isinstance(d, Size) else d for d in self.shape]))

    def nbytes(self, batch: int) -> int:
        """The bytes of the tensor at a (micro)batch of `batch` samples."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= int(size.at(batch)) if isinstance(size, Size) else size
        return count


class Form:
    """A call without the names of what it reads and makes: equal for equal calls; it remembers its hash."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Arg) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._hash == other._hash and self._key == other._key)


@dataclass(frozen=True, slots=True)
class Node:
    """One aten operator call. `outs` has an entry a result, None if unused; `single`: the op returns one tensor."""

    op: OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[Value | None, ...]
    single: bool
    backward: bool
    module: str  # dotted path of the user's module whose call made this node, "" at the root
    source: str  # 'file.py:12  code', or "" when unknown
    sequence: int = -1  # autograd's sequence number: a backward node carries that of its forward node
    region: int = -1  # the user's checkpoint call that it, or for a backward node its forward, was made in; -1: none
    opname: str = field(init=False, repr=False, compare=False)  # the operator as ``aten.mm.default``
    form: Form = field(init=False, repr=False, compare=False)
    _reads: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _makes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reads: list[str] = []
        object.__setattr__(self, "opname", str(self.op))
        unused = tuple([out is None for out in self.outs])
        object.__setattr__(self, "form", Form((self.op, _form(self.args, reads), _form(self.kwargs, reads), unused)))
        object.__setattr__(self, "_reads", tuple(reads))
        object.__setattr__(self, "_makes", tuple([out.name for out in self.outs if out is not None]))

    def refs(self) -> tuple[str, ...]:
        """The names of the values that this node reads, in order, with repetitions."""
        return self._reads

    def renamed(self, names: Mapping[str, str]) -> Node:
        """The node with the values that it reads and makes renamed by `names` (those absent keep theirs)."""
        if names.keys().isdisjoint(self._reads) and names.keys().isdisjoint(self._makes):
            return self
        return replace(
            self,
            args=rename(self.args, names),
            kwargs=tuple((key, rename(arg, names)) for key, arg in self.kwargs),
            outs=tuple(o if o is None or o.name not in names else replace(o, name=names[o.name]) for o in self.outs),
        )

    def mapped(self, leaf: Callable[[Arg], Arg]) -> Node:
        """The node with `leaf` applied to everything in its arguments that is not a tuple."""
        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in self.kwargs)
        return replace(self, args=map_arg(self.args, leaf), kwargs=kwargs)

    def sized(self, size: Callable[[Size], Dim]) -> Node:
        """The node with `size` applied to every size in its arguments, by keyword too, and in its results' shapes."""
        made = self.mapped(lambda arg: size(arg) if isinstance(arg, Size) else arg)
        return replace(made, outs=tuple([None if out is None else out.sized(size) for out in self.outs]))

    def names(self) -> tuple[str, ...]:
        """The names of the values that this node defines."""
        return self._makes

    @property
    def aten(self) -> str:
        """The name of an operator of aten, without its overload; "" for any other, whatever its name."""
        return self.opname.split(".")[1] if self.opname.startswith("aten.") else ""

    def place(self) -> str:
        """The user's line and the module, as far as they are known, to begin a message with."""
        known = (self.source, f"in module {self.module!r}" if self.module else "")
        return "".join(f"{part}: " for part in known if part)


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input. `kind`: parameter, buffer, input, constant, tangent, prologue or random; `target`: outside name.

    The target is the dotted name for parameters, buffers and constants, the path in the call (``args[0]``,
    ``kwargs['mask']['a']``) for inputs, the target of the output whose gradient it is for tangents, the value's own
    name for prologue values, module path and occurrence for random ones (``h.3.drop#0``).
    """

    value: Value
    kind: str
    target: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output. `kind`: loss, output, grad, input_grad or mutation; `target`: outside name.

    The target is the place in the flat result (``0``) for outputs, for the loss too, whose tangent is called ``loss``;
    the parameter for grads, of which there are several where it is used in several places; the input's path for
    gradients of inputs; the buffer for mutations, which are its new values.

    How microbatches combine (known after `normalise`): concatenated along `dim`; else summed if `partial`; else all
    equal. `everywhere`: every rank gets the whole of it, as of all that is `partial`; else it stays where it is made.
    """

    name: str
    kind: str
    target: str
    dim: int | None = None
    partial: bool = False
    everywhere: bool = False


def _form(arg: Arg, reads: list[str]) -> Arg:
    """The argument with a mark for each reference, whose name goes to `reads`; the type tells 1, 1.0 and True apart."""
    if isinstance(arg, tuple | list):
        return tuple([_form(item, reads) for item in arg])
    if isinstance(arg, Ref):
        reads.append(arg.name)
        return Ref
    return type(arg), arg


def ancestors(nodes: Sequence[Node], wanted: Iterable[str]) -> tuple[tuple[Node, ...], set[str]]:
    """The nodes that some values need, in order, and every name that is needed on the way, theirs among them."""
    needed, found = set(wanted), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.names()):
            needed.update(node.refs())
            found.append(node)
    return tuple(reversed(found)), needed


def descendants(nodes: Iterable[Node], names: Iterable[str]) -> set[str]:
    """Every name that depends on some values, theirs among them; `nodes` are in execution order."""
    reached = set(names)
    for node in nodes:
        if not reached.isdisjoint(node.refs()):
            reached.update(node.names())
    return reached


def refs(arg: Arg) -> Iterator[str]:
    """The names referred to anywhere inside an argument."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from refs(item)


def map_arg(arg: Arg, leaf: Callable[[Arg], Arg]) -> Arg:
    """The argument with `leaf` applied to everything in it that is not a tuple."""
    if isinstance(arg, tuple | list):
        return tuple(map_arg(item, leaf) for item in arg)
    return leaf(arg)


def rename(arg: Arg, names: Mapping[str, str]) -> Arg:
    """The argument with every reference renamed by `names` (those absent keep theirs)."""
    return map_arg(arg, lambda a: Ref(names.get(a.name, a.name)) if isinstance(a, Ref) else a)
