"""Chunks: the nodes of a loop as they run on one chunk, and the text of what cuts values and puts them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopart.ir.graph import Dim, Node, Size, Value
from autopart.ir.loop import Along, Loop, Portion
from autopart.ir.segmented import Function, defined
from autopart.rules.factor import ArgPath, with_arguments
from autopart.rules.split import product


def nodes_of(function: Function, loop: Loop, length: int | None = None) -> tuple[Node, ...]:
    """The nodes of a loop on the chunk at hand, or one of some `length`, under the names and with the sizes there."""

    def portion(times: Dim) -> Dim:
        return Portion.of(loop, times) if length is None else product((times, length))

    names = {along.name: along.part for along in (*loop.cuts, *loop.joined)} | dict(loop.summed)
    shapes = {name: (dim, times) for name, dim, times in loop.inner}
    shapes |= {along.name: (along.dim, product((along.outer, along.rest))) for along in loop.joined}
    sizes: dict[int, dict[ArgPath, Dim]] = {}
    for sized in loop.sizes:
        sizes.setdefault(sized.node, {})[sized.path] = portion(sized.times)
    made = []
    for number in range(loop.start, loop.stop):
        node = function.nodes[number]
        node = with_arguments(node, sizes[number]) if number in sizes else node
        outs = tuple(
            out and _shaped(out, dim=shapes[out.name][0], size=portion(shapes[out.name][1]))
            if out and out.name in shapes
            else out
            for out in node.outs
        )
        made.append(replace(node, outs=outs).renamed(names))
    return tuple(made)


def _shaped(value: Value, *, dim: int, size: Dim) -> Value:
    """A value with the shape that it has for a chunk."""
    return replace(value, shape=(*value.shape[:dim], size, *value.shape[dim + 1 :]))


def in_chunks(function: Function) -> Iterator[Node]:
    """The nodes of a function, those of its loops on a chunk."""
    at = 0
    for loop in function.loops:
        yield from function.nodes[at : loop.start]
        yield from nodes_of(function, loop)
        at = loop.stop
    yield from function.nodes[at:]


def on_their_own(function: Function) -> Iterator[Node]:
    """The nodes of a function but those whose results a loop puts together, in storages of their own."""
    made = {name for loop in function.loops for name in loop.made}
    return (node for node in function.nodes if made.isdisjoint(node.names()))


# ---- text ------------------------------------------------------------------------------------------------------------


def head(loop: Loop, batch: str) -> list[str]:
    """The lines with which a loop begins, its first inner line among them."""
    start, length, most = loop.names
    if isinstance(loop.length, Size):
        whole = loop.length.text(batch)
        first, most = [f"{most} = max(1, -(-({whole}) // {loop.count}))"], most
    else:
        whole, first, most = str(loop.length), [], str(-(-loop.length // loop.count))
    return [
        *first,
        f"for {start} in range(0, {whole}, {most}):",
        f"    {length} = min({most}, {whole} - {start})",
    ]


def before(function: Function, loop: Loop, batch: str) -> Iterator[str]:
    """What is made before a loop: zeros to add to, and room for what is put together."""
    values = defined(function)
    like = loop.cuts[0].name
    for name, _ in loop.summed:
        value = values[name]
        yield f"{name} = aten.new_zeros.default({like}, {_shape(value.shape, batch)}, dtype={value.dtype})"
    for along in loop.joined:
        value = values[along.name]
        yield f"{along.name} = aten.new_empty.default({like}, {_shape(value.shape, batch)}, dtype={value.dtype})"


def cut(function: Function, loop: Loop, batch: str) -> Iterator[str]:
    """What takes the chunk of every value from before the loop. Dense, as the whole ones are."""
    values = defined(function)
    for along in loop.cuts:
        shape = values[along.name].shape
        part = _part(along.name, shape, along, loop, batch)
        own = [*shape]
        own[along.dim] = Portion.of(loop, product((along.outer, along.rest)))
        if along.outer != 1:
            yield f"{along.part} = aten.reshape.default({part}, {_shape(own, batch)})"
        elif all(size == 1 for size in shape[: along.dim]):
            yield f"{along.part} = {part}"
        else:
            yield f"{along.part} = {part}.contiguous()"


def put(function: Function, loop: Loop, batch: str) -> Iterator[str]:
    """What adds what a chunk adds, and puts its parts where they belong."""
    values = defined(function)
    for name, part in loop.summed:
        yield f"aten.add_.Tensor({name}, {part})"
    for along in loop.joined:
        shape, own = values[along.name].shape, along.part
        if along.outer != 1:
            apart = [*shape]
            apart[along.dim : along.dim + 1] = [along.outer, Portion.of(loop, along.rest)]
            own = f"aten.reshape.default({own}, {_shape(apart, batch)})"
        yield f"aten.copy_.default({_part(along.name, shape, along, loop, batch)}, {own})"


def _part(name: str, shape: Sequence[Dim], along: Along, loop: Loop, batch: str) -> str:
    """Source for the chunk of a value, a view of it."""
    dim, source = along.dim, name
    if along.outer != 1:
        apart = [*shape]
        apart[dim : dim + 1] = [along.outer, product((loop.length, along.rest))]
        source, dim = f"aten.view.default({name}, {_shape(apart, batch)})", dim + 1
    start, length, _ = loop.names
    if along.rest == 1:
        return f"aten.slice.Tensor({source}, {dim}, {start}, {start} + {length})"
    rest = along.rest.text(batch) if isinstance(along.rest, Size) else along.rest
    return f"aten.slice.Tensor({source}, {dim}, ({rest}) * {start}, ({rest}) * ({start} + {length}))"


def _shape(shape: Sequence[Dim], batch: str) -> str:
    return "[" + ", ".join(size.text(batch) if isinstance(size, Size) else str(size) for size in shape) + "]"
