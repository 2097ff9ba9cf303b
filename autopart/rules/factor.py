"""The types of the factor-rule table, and the arithmetic of sizes that its rules are written with.

An operator call is a nest of loops; each loop is a *factor*. A rule says, for one call, which factors every dim of
every tensor operand and result indexes. Splitting a factor splits exactly those dims. A factor that operands have and a
result lacks is contracted: each piece yields a part of the result, combined by the factor's `reduction`. A *blocked*
factor cannot be split at all. `linear` lists the operand sets through which a pending sum may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd

from autopart._torch import OpOverload
from autopart.ir.graph import Arg, Dim, Node, Ref, Size, Value

Product = tuple[int, ...]
"""The factors of one dim, outer to inner: () for size 1 or broadcast, usually one, several where a view merged dims."""

Dims = tuple[Product, ...]
"""The factors of every dim of one tensor."""

ArgPath = tuple[int | str, ...]
"""Where an argument is in a node: its position, or its name if a keyword; then places inside tuples."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop. `reduction`: how the pieces of a result that lacks it combine (sum, mean, max, min, prod).

    `name` is for messages: what the rule calls it, "" where it calls it nothing.
    """

    size: Dim
    blocked: bool = False
    reduction: str = "sum"
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument. `slot` is its name in the schema (``self``), with its place in a list (``tensors.0``)."""

    slot: str
    path: ArgPath
    value: Value


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call, its arguments bound to the names of the schema (defaults filled in)."""

    op: OpOverload
    args: Mapping[str, Arg]
    operands: tuple[Operand, ...]
    results: tuple[Value | None, ...]

    def has(self, slot: str) -> bool:
        """Whether `slot` is a tensor operand of this call."""
        return any(operand.slot == slot for operand in self.operands)

    def shape(self, slot: str) -> tuple[Dim, ...]:
        """The shape of the tensor operand `slot`."""
        return next(operand.value.shape for operand in self.operands if operand.slot == slot)

    def ndim(self, slot: str) -> int:
        """The number of dims of the tensor operand `slot`."""
        return len(self.shape(slot))


@dataclass(frozen=True, slots=True)
class Rule:
    """The factor rule of one call.

    `operands` and `results` give the factors of every dim (None for a result that nothing uses). `linear` holds sets of
    slots, tensors or numbers, in which the call is jointly linear while all else is fixed. `sizes` names the integer
    arguments that are products of factors, so a call on a piece passes smaller ones. Of operands in `shape_only` only
    the shape matters; a pair in `unread` is a result (by number) and an operand that it does not depend on. A pair in
    `ends` is a factor whose iterations lie group after group, and the operand that says where each group ends: though
    the factor is blocked, a call may be on some of each group's alone, with where those end.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[str, Dims], ...]
    results: tuple[Dims | None, ...]
    linear: tuple[frozenset[str], ...] = ()
    sizes: tuple[tuple[str, Product], ...] = ()
    shape_only: frozenset[str] = frozenset()
    unread: frozenset[tuple[int, str]] = frozenset()
    ends: tuple[tuple[int, str], ...] = ()

    def contracts(self, result: int, factor: int) -> bool:
        """Whether a result combines over a factor: it lacks the factor, and an operand that it depends on has it."""
        if any(factor in dim for dim in self.results[result] or ()):
            return False
        return any((result, slot) not in self.unread for slot in self.carriers(factor))

    def carriers(self, factor: int) -> frozenset[str]:
        """The operands that have a factor."""
        return frozenset(slot for slot, dims in self.operands if any(factor in dim for dim in dims))

    def additive(self, factor: int) -> frozenset[str]:
        """The slots that are added to a sum over a contracted factor without having it, such as the bias of ``addmm``.

        Only where they are parts of a sum themselves is the result the sum over the factor's pieces. They are the slots
        in which every linear set agrees.
        """
        kept = any(factor in dim for dims in self.results for dim in dims or ())
        if kept or not self.linear:
            return frozenset()
        return frozenset.intersection(*self.linear) - self.carriers(factor)


Family = Callable[[Call], Rule]
"""What the table holds for an operator."""


def each(names: str, family: Family) -> dict[str, Family]:
    """Entries of the table that hold the same family, for names separated by spaces."""
    return dict.fromkeys(names.split(), family)


def is_batch(size: Dim) -> bool:
    """Whether a size moves with the batch."""
    return isinstance(size, Size) and size.per_sample != 0


def _pair(size: Dim) -> tuple[int | Fraction, int]:
    """A size as (per sample, constant)."""
    if not isinstance(size, Size):
        return 0, size
    each = size.per_sample
    return each if isinstance(each, Fraction) else int(each), size.constant


def _dim(per_sample: int | Fraction, constant: int) -> Dim:
    each = int(per_sample) if per_sample.denominator == 1 else per_sample
    return Size(each, constant) if each else constant


def times(left: Dim, right: Dim) -> Dim | None:
    """The product of two sizes; None if both move with the batch."""
    (a, c), (b, d) = _pair(left), _pair(right)
    return None if a and b else _dim(a * d + b * c, c * d)


def plus(sizes: Iterable[Dim]) -> Dim:
    """The sum of sizes."""
    pairs = [_pair(size) for size in sizes]
    return _dim(sum((a for a, _ in pairs), 0), sum(c for _, c in pairs))


def ratio(size: Dim, by: Dim) -> Dim | None:
    """The exact quotient of two sizes, None if there is none."""
    if by == 1:
        return size
    (a, c), (b, d) = _pair(size), _pair(by)
    if b == 0:
        return _dim(a // d, c // d) if d and a % d == 0 and c % d == 0 else None
    if a % b or a * d != b * c:
        return None
    return a // b


def samples_over(size: Dim, degree: int) -> Dim | None:
    """One of `degree` equal parts of a size that moves with the batch, which they divide; None if there is none."""
    each, constant = _pair(size)
    return _dim(Fraction(each) / degree, constant // degree) if each and constant % degree == 0 else None


def common(left: Dim, right: Dim) -> Dim:
    """A common divisor of two sizes: one of them if it divides the other, else a number."""
    if ratio(left, right) is not None:
        return right
    if ratio(right, left) is not None:
        return left
    return gcd(*(int(number) for size in (left, right) for number in _pair(size)))


def wrap(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def slots(node: Node) -> Iterator[tuple[str, ArgPath, Arg]]:
    """Every argument that is given, as (slot, path, argument); tuples are opened one level."""
    names = [argument.name for argument in node.op._schema.arguments]
    given: list[tuple[str, int | str, Arg]] = [(names[i], i, arg) for i, arg in enumerate(node.args)]
    given += [(name, name, arg) for name, arg in node.kwargs]
    for name, place, arg in given:
        if isinstance(arg, tuple | list):
            yield from ((f"{name}.{i}", (place, i), item) for i, item in enumerate(arg))
        else:
            yield name, (place,), arg


def argument(node: Node, path: ArgPath) -> Arg:
    """The argument at a path."""
    first, *rest = path
    arg = dict(node.kwargs)[first] if isinstance(first, str) else node.args[first]
    for step in rest:
        arg = arg[step]
    return arg


def with_argument(node: Node, path: ArgPath, new: Arg) -> Node:
    """The node with another argument at a path."""
    return with_arguments(node, {path: new})


def with_arguments(node: Node, new: Mapping[ArgPath, Arg]) -> Node:
    """The node with other arguments at some paths."""

    def put(arg: Arg, path: ArgPath) -> Arg:
        if path in new:
            return new[path]
        return tuple([put(item, (*path, i)) for i, item in enumerate(arg)]) if isinstance(arg, tuple | list) else arg

    kwargs = tuple([(key, put(arg, (key,))) for key, arg in node.kwargs])
    return replace(node, args=tuple([put(arg, (i,)) for i, arg in enumerate(node.args)]), kwargs=kwargs)


def bind(node: Node, values: Mapping[str, Value]) -> Call:
    """The node's call, with `values` giving the tensors that it reads."""
    schema = node.op._schema.arguments
    args: dict[str, Arg] = {a.name: a.default_value for a in schema}
    args.update(zip((a.name for a in schema), node.args, strict=False))
    args.update(node.kwargs)
    operands = tuple(Operand(slot, path, values[arg.name]) for slot, path, arg in slots(node) if isinstance(arg, Ref))
    return Call(node.op, args, operands, node.outs)


class Draft:
    """The factors of one rule, collected while it is written."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: Dim, *, blocked: bool = False, reduction: str = "sum", name: str = "") -> Product:
        """A dim that is one new factor, or () if its size is 1."""
        if size == 1:
            return ()
        self.factors.append(Factor(size, blocked, reduction, name))
        return (len(self.factors) - 1,)

    def dims(self, shape: Sequence[Dim], *, blocked: Sequence[int] = (), reduction: str = "sum") -> Dims:
        """A new factor for every dim; `blocked` are dims counted from the front."""
        return tuple(self.new(size, blocked=i in blocked, reduction=reduction) for i, size in enumerate(shape))

    def fixed(self, shape: Sequence[Dim]) -> Dims:
        """A new blocked factor for every dim."""
        return self.dims(shape, blocked=range(len(shape)))

    def rule(
        self,
        call: Call,
        operands: Mapping[str, Dims],
        results: Sequence[Dims | None],
        *,
        linear: Sequence[str] = (),
        sizes: Mapping[str, Product] | None = None,
        shape_only: Sequence[str] = (),
        unread: Sequence[tuple[int, str]] = (),
        ends: Sequence[tuple[int, str]] = (),
    ) -> Rule:
        """The finished rule; `linear` holds sets of slots, each as words in a string."""
        return Rule(
            tuple(self.factors),
            tuple(operands.items()),
            tuple(dims if out is not None else None for dims, out in zip(results, call.results, strict=False)),
            linear_sets(call, linear),
            tuple((sizes or {}).items()),
            frozenset(shape_only),
            frozenset(unread),
            tuple(ends),
        )


def linear_sets(call: Call, linear: Sequence[str]) -> tuple[frozenset[str], ...]:
    """The sets of slots, each as words in a string, without the slots that this call does not have.

    A word with a star stands for every operand of a list argument: ``tensors*``.
    """
    sets = []
    for words in linear:
        named: set[str] = set()
        for word in words.split():
            if word.endswith("*"):
                named |= {o.slot for o in call.operands if o.slot.startswith(f"{word[:-1]}.")}
            elif call.has(word) or isinstance(call.args.get(word), int | float | complex | Size):
                named.add(word)
        if named:
            sets.append(frozenset(named))
    return tuple(dict.fromkeys(sets))


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The shape that `shapes` broadcast to."""
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in column if size != 1), 1) for column in zip(*padded, strict=True))


def align(shape: tuple[Dim, ...], dims: Dims) -> Dims:
    """The factors of a tensor of `shape` that broadcasts, from the right, to a tensor whose factors are `dims`."""
    tail = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, tail, strict=True))
