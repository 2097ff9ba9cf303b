"""Factor rules held against what their operators do: a call is executed whole, and on the pieces of every loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from autopart.ir.graph import Node, Ref, Value
from autopart.ir.mesh import pieces
from autopart.rules.factor import Dims, Product, Rule, bind, slots

Tensors = Mapping[str, torch.Tensor]

Results = tuple[torch.Tensor | None, ...]


class RuleError(AssertionError):
    """A rule that does not describe its operator."""


# ---- a call with real tensors as a Node, and back --------------------------------------------------------------------


def as_node(case: Sequence[Any]) -> tuple[Node, Tensors, Results]:
    """The node of a call, the tensors that it reads, by name, and its results.

    A call is ``(op, *args)``, or ``(op, args, kwargs)``.
    """
    op, *rest = case
    args, kwargs = (rest[0], rest[1]) if len(rest) == 2 and isinstance(rest[1], dict) else (tuple(rest), {})
    tensors: dict[str, torch.Tensor] = {}

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            name = f"v{len(tensors)}"
            tensors[name] = arg
            return Ref(name)
        return tuple(map(convert, arg)) if isinstance(arg, list | tuple) else arg

    found = op(*args, **kwargs)
    results = tuple(found) if isinstance(found, list | tuple) else (found,)
    outs = tuple(value(f"o{i}", x) if isinstance(x, torch.Tensor) else None for i, x in enumerate(results))
    keywords = tuple((key, convert(arg)) for key, arg in kwargs.items())
    made = tuple(map(convert, args))
    return Node(op, made, keywords, outs, not isinstance(found, list | tuple), False, "", ""), tensors, results


def value(name: str, tensor: torch.Tensor) -> Value:
    """A tensor as a value of a graph."""
    return Value(name, tuple(tensor.shape), tensor.dtype)


def values(tensors: Tensors) -> dict[str, Value]:
    """Tensors as values of a graph, by name."""
    return {name: value(name, tensor) for name, tensor in tensors.items()}


def run(node: Node, by_slot: Mapping[str, Any]) -> Results:
    """Call the node's op with arguments replaced by slot: tensors, sizes and numbers."""
    given = {path: by_slot[slot] for slot, path, _ in slots(node) if slot in by_slot}

    def resolve(arg: Any, path: tuple[Any, ...]) -> Any:
        if path in given:
            return given[path]
        return [resolve(item, (*path, i)) for i, item in enumerate(arg)] if isinstance(arg, tuple) else arg

    args = [resolve(arg, (i,)) for i, arg in enumerate(node.args)]
    found = node.op(*args, **{key: resolve(arg, (key,)) for key, arg in node.kwargs})
    return tuple(found) if isinstance(found, list | tuple) else (found,)


# ---- splitting by a factor -------------------------------------------------------------------------------------------


def sizes_of(found: Rule) -> list[int]:
    """The size of every factor: plain numbers in a call that is executed."""
    return [factor.size for factor in found.factors if isinstance(factor.size, int)]


def elements(product: Product, sizes: Sequence[int]) -> int:
    """The elements of a dim, with the size of every factor."""
    return prod(sizes[factor] for factor in product)


def unflatten(tensor: torch.Tensor, dims: Dims, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The tensor with a dim a factor, and which factor each dim is (-1 for a dim without)."""
    order = [factor for dim in dims for factor in (dim or (-1,))]
    flat = [n for dim, size in zip(dims, tensor.shape, strict=True) for n in ([sizes[f] for f in dim] or [size])]
    if any(elements(dim, sizes) != size for dim, size in zip(dims, tensor.shape, strict=True) if dim):
        raise RuleError(f"factors {dims} of sizes {sizes} do not make up the shape {tuple(tensor.shape)}")
    return tensor.reshape(flat), order


def piece(tensor: torch.Tensor, dims: Dims, sizes: Sequence[int], factor: int, start: int, length: int) -> torch.Tensor:
    """The part of a tensor that belongs to some iterations of a factor."""
    spread, order = unflatten(tensor, dims, sizes)
    if factor not in order:
        return tensor
    part = spread.narrow(order.index(factor), start, length)
    smaller = [length if i == factor else n for i, n in enumerate(sizes)]
    shape = [elements(dim, smaller) if dim else n for dim, n in zip(dims, tensor.shape, strict=True)]
    return part.reshape(shape).contiguous()


COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul
}  # fmt: skip


def combine(parts: Sequence[torch.Tensor], result: int, found: Rule, factor: int, cuts: Sequence[int]) -> torch.Tensor:
    """The whole of one result from what the pieces gave."""
    dims = found.results[result] or ()
    sizes = sizes_of(found)
    if any(factor in dim for dim in dims):
        spread = [
            unflatten(p, dims, [n if i == factor else s for i, s in enumerate(sizes)])
            for p, n in zip(parts, cuts, strict=True)
        ]
        joined = torch.cat([part for part, _ in spread], spread[0][1].index(factor))
        return joined.reshape([elements(dim, sizes) if dim else n for dim, n in zip(dims, parts[0].shape, strict=True)])
    how = found.factors[factor].reduction
    if how not in (*COMBINE, "mean"):
        raise RuleError(f"no way to combine the pieces of {label(found, factor)}: {how}")
    if not found.contracts(result, factor):
        return parts[0]
    total = parts[0] * cuts[0] if how == "mean" else parts[0]
    for part, n in zip(parts[1:], cuts[1:], strict=True):
        total = total + part * n if how == "mean" else COMBINE[how](total, part)
    return total / sum(cuts) if how == "mean" else total


def cuts_of(size: int, places: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Ways to cut a loop: in two pieces of unlike lengths, and as its owners would have it on so many places."""
    if size > 1:
        first = max(1, size // 3)
        yield first, size - first
    for count in places:
        if count <= size and pieces(size, count) != (1, 1):
            yield pieces(size, count)


def label(found: Rule, factor: int) -> str:
    """What a message calls a factor."""
    name = found.factors[factor].name
    return f"loop {name!r}" if name and name[0] not in "_*" else f"factor {factor}"


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(node: Node, tensors: Tensors, results: Results, found: Rule, places: Collection[int] = ()) -> None:
    """Raise RuleError unless every factor can be split as the rule says, and every linear set is linear.

    Each is split in two pieces of unlike lengths, and on each of so many `places`.
    """
    call = bind(node, values(tensors))
    whole = {operand.slot: tensors[operand.value.name] for operand in call.operands}
    if set(whole) != {slot for slot, _ in found.operands}:
        raise RuleError(f"the rule names operands {found.operands}, the call has {sorted(whole)}")
    sizes = sizes_of(found)
    for slot, dims in found.operands:
        unflatten(whole[slot], dims, sizes)
    for result, place in zip(results, found.results, strict=True):
        if isinstance(result, torch.Tensor) and place is not None:
            unflatten(result, place, sizes)
    for factor, about in enumerate(found.factors):
        if not about.blocked:
            check_split(node, whole, call.args, results, found, factor, places)
    for factor, ends in found.ends:
        check_groups(node, whole, results, found, factor, ends)
    for together in found.linear:
        check_linear(node, whole, call.args, results, together)


def check_split(
    node: Node,
    whole: Tensors,
    args: Mapping[str, Any],
    results: Results,
    found: Rule,
    factor: int,
    places: Collection[int] = (),
) -> None:
    """Raise RuleError unless the results come together from the pieces of a factor, however it is cut."""
    for cuts in cuts_of(sizes_of(found)[factor], places):
        what = f"{node.op}: {label(found, factor)} in pieces of {' + '.join(map(str, cuts))}"
        try:
            outs = [run(node, given) for given in _given(whole, args, found, factor, cuts)]
            made = {
                i: combine([out[i] for out in outs], i, found, factor, cuts)  # type: ignore[misc]
                for i, (result, place) in enumerate(zip(results, found.results, strict=True))
                if isinstance(result, torch.Tensor) and place is not None
            }
        except (RuleError, RuntimeError, IndexError, ValueError, TypeError) as error:
            raise RuleError(f"{what} do not fit: {error}") from error
        for i, whole_again in made.items():
            agree(f"{what}: result {i}, split by {label(found, factor)}", whole_again, results[i])


def _given(
    whole: Tensors, args: Mapping[str, Any], found: Rule, factor: int, cuts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The arguments, by slot, for each piece of a factor."""
    sizes = sizes_of(found)
    dims = dict(found.operands)
    start = 0
    for length in cuts:
        given: dict[str, Any] = {s: piece(t, dims[s], sizes, factor, start, length) for s, t in whole.items()}
        added = {s: given[s] if s in given else args[s] for s in found.additive(factor)}
        given |= {s: part * (length / sum(cuts)) for s, part in added.items()}
        smaller = [length if i == factor else n for i, n in enumerate(sizes)]
        yield given | {slot: elements(product, smaller) for slot, product in found.sizes}
        start += length


def check_groups(node: Node, whole: Tensors, results: Results, found: Rule, factor: int, ends: str) -> None:
    """Raise RuleError unless some iterations of every group give their part, with where just those end."""
    dims, what = dict(found.operands), f"{node.op}: {label(found, factor)} in groups that end at {ends}"
    groups = torch.arange(sizes_of(found)[factor]).tensor_split(whole[ends].tolist())[: len(whole[ends])]
    halves, made = [], []
    for half in zip(*(group.tensor_split(2) for group in groups), strict=True):
        rows, counts = torch.cat(half), torch.tensor([len(group) for group in half])
        given = {slot: _rows(tensor, dims[slot], factor, rows) for slot, tensor in whole.items()}
        try:
            made.append(run(node, {**given, ends: counts.cumsum(0).to(whole[ends])}))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise RuleError(f"{what} do not fit: {error}") from error
        halves.append(rows)
    for i, (result, own) in enumerate(zip(results, found.results, strict=True)):
        if result is None or own is None:
            continue
        first, second = (each[i] for each in made)
        if (factor,) in own:
            for rows, part in zip(halves, (first, second), strict=True):
                agree(f"{what}: result {i}", part, _rows(result, own, factor, rows))  # type: ignore[arg-type]
        else:
            agree(f"{what}: result {i}", first + second, result)  # type: ignore[operator]


def _rows(tensor: torch.Tensor, dims: Dims, factor: int, rows: torch.Tensor) -> torch.Tensor:
    """Some iterations of a factor, each of which lies together."""
    if (factor,) not in dims:
        return tensor
    dim = dims.index((factor,))
    return tensor.movedim(dim, 0)[rows].movedim(0, dim)


def check_linear(
    node: Node, whole: Tensors, args: Mapping[str, Any], results: Results, together: frozenset[str]
) -> None:
    """Write every member as a sum of two; raise RuleError unless the results add up likewise."""
    generator = torch.Generator().manual_seed(0)
    one, two = dict(whole), dict(whole)
    for slot in sorted(together):
        if slot in whole:
            part = (torch.rand(whole[slot].shape, generator=generator) * 4).to(whole[slot])
            one[slot], two[slot] = part, whole[slot] - part
        else:
            one[slot], two[slot] = args[slot] * 0.25, args[slot] * 0.75
    for i, (a, b, result) in enumerate(zip(run(node, one), run(node, two), results, strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and isinstance(result, torch.Tensor):
            agree(f"{node.op}: result {i} as linear in {sorted(together)}", a + b, result)


def agree(what: str, made: torch.Tensor, wanted: torch.Tensor | None) -> None:
    """Raise RuleError unless two tensors are alike, up to rounding."""
    assert wanted is not None  # a result that is there
    if made.shape != wanted.shape:
        raise RuleError(f"{what}: the pieces make up {list(made.shape)}, the whole is {list(wanted.shape)}")
    if not close(made, wanted):
        raise RuleError(f"{what}: the pieces do not make up the whole")


def close(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors are alike, up to rounding."""
    tolerance = {torch.float64: 1e-10, torch.complex128: 1e-10}.get(wanted.dtype, 1e-4)
    if wanted.dtype in (torch.float16, torch.bfloat16):
        tolerance = 2e-2
    return made.shape == wanted.shape and torch.allclose(
        made, wanted.to(made.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
    )
