"""The text of one function: a body's nodes as Python a person could have written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from autopart.codegen import chunks
from autopart.collectives import collective_name, is_collective
from autopart.ir.graph import Arg, Node, Ref, Share, Size, Value
from autopart.ir.loop import Loop
from autopart.ir.segmented import Function

WIDTH = 120

PLAIN = {("outer", "1"), ("from_outer", "1")}
"""Arguments of collectives that are as one expects, and are left out."""


def function(
    name: str,
    formals: Sequence[str],
    nodes: Sequence[Node],
    result: str,
    *,
    doc: str,
    prefix: str = "",
    batch: str = "b",
    recomputes: bool = False,
    inputs: Sequence[Value] = (),
    loops: Sequence[Loop] = (),
) -> list[str]:
    """The lines of ``def name(formals)``.

    A comment names the module (its path after `prefix`) and the user's line where they change; values that are not
    needed any more are deleted at the end of such a group. `batch` is the source for the microbatch's size. Where a
    backward `recomputes`, a comment heads the forward's nodes in it, and what follows them. `loops` are those of the
    nodes that are run chunk after chunk; then `inputs` are the values behind the formals.
    """
    made = Function(tuple(inputs), tuple(nodes), (), tuple(loops))
    writer = _Writer(made, prefix, batch, recomputes)
    lines = [*call(f"def {name}", formals, ":"), f'    """{doc}"""', *indented(writer.lines(result))]
    return [*lines, *("    " + line for line in wrapped_return(result))]


class _Writer:
    """The lines of a function's nodes: groups of them, and loops, one behind the other."""

    def __init__(self, function: Function, prefix: str, batch: str, recomputes: bool) -> None:
        self.function, self.prefix, self.batch, self.recomputes = function, prefix, batch, recomputes

    def lines(self, result: str) -> Iterator[str]:
        """Those of all nodes; what the function returns, and what its end frees, is not deleted."""
        nodes, at = self.function.nodes, 0
        steps: list[_Step] = []
        for loop in self.function.loops:
            steps += self._groups(nodes[at : loop.start], backward=at == 0 or nodes[at - 1].backward)
            steps.append(_Step(tuple(self._loop(loop)), _read(nodes[loop.start : loop.stop]), loop.made))
            at = loop.stop
        steps += self._groups(nodes[at:], backward=at == 0 or nodes[at - 1].backward)
        return _freeing(steps, keep=set(re.findall(r"\w+", result)), last=False)

    def _groups(self, nodes: Sequence[Node], backward: bool = True) -> Iterator[_Step]:
        for group in _groups(nodes):
            lines = []
            if self.recomputes and backward != group[0].backward:
                backward = group[0].backward
                lines.append(f"# {'backward' if backward else 'recomputed'}")
            comment = _comment(group[0], self.prefix)
            lines += [comment] if comment else []
            lines += [line for node in group for line in statement(node, self.batch)]
            touched = dict.fromkeys(name for node in group for name in (*node.refs(), *node.names()))
            yield _Step(tuple(lines), tuple(touched), tuple(name for node in group for name in node.names()))

    def _loop(self, loop: Loop) -> Iterator[str]:
        """A loop, before it what it fills. Nothing of one chunk is there any more when the next begins."""
        made, batch = self.function, self.batch
        yield f"# {_within(loop.module, self.prefix) or 'all'}, in chunks: {loop.count} at most"
        yield from chunks.before(made, loop, batch)
        yield from chunks.head(loop, batch)
        parts = tuple(along.part for along in loop.cuts)
        ends = (*(part for _, part in loop.summed), *(along.part for along in loop.joined))
        steps = [
            _Step(tuple(chunks.cut(made, loop, batch)), (), parts),
            *self._groups(chunks.nodes_of(made, loop)),
            _Step(tuple(chunks.put(made, loop, batch)), ends, ()),
        ]
        yield from indented(_freeing(steps, keep=set(), last=True))


@dataclass(frozen=True, slots=True)
class _Step:
    """Some lines, with the names that they touch, and those of the values that they make."""

    lines: tuple[str, ...]
    touches: tuple[str, ...]
    makes: tuple[str, ...]


def _read(nodes: Sequence[Node]) -> tuple[str, ...]:
    """What nodes read, and do not make."""
    made = {name for node in nodes for name in node.names()}
    return tuple(dict.fromkeys(name for node in nodes for name in node.refs() if name not in made))


def _freeing(steps: Sequence[_Step], keep: Set[str], last: bool) -> Iterator[str]:
    """The lines of all steps; after the one that touches a value last, it is deleted, but for what to `keep`.

    Not after the `last` step, unless that is asked for: with the frame its values die anyway.
    """
    makers = {name: number for number, step in enumerate(steps) for name in step.makes}
    ends = makers | {n: i for i, step in enumerate(steps) for n in step.touches if makers.get(n, i + 1) <= i}
    for number, step in enumerate(steps):
        yield from step.lines
        dead = [n for n in dict.fromkeys((*step.touches, *step.makes)) if ends.get(n) == number and n not in keep]
        if dead and (last or number < len(steps) - 1):
            yield from wrapped("del ", dead)


def communicates(nodes: Iterable[Node]) -> bool:
    """Whether some of the nodes are collectives, which the world performs."""
    return any(is_collective(node.op) for node in nodes)


def statement(node: Node, batch: str = "b") -> list[str]:
    """``out, _ = aten.op.overload(args)``; a collective is a call of the world, with a comment on what it makes."""
    if is_collective(node.op):
        return _exchange(node, batch)
    names = [out.name if out is not None else "_" for out in node.outs]
    target = names[0] if node.single else ", ".join(names) + ("," if len(names) == 1 else "")
    args = [argument(arg, batch) for arg in node.args]
    args += [f"{key}={argument(arg, batch)}" for key, arg in node.kwargs]
    return call(f"{target} = {operator(node)}", args, "")


def _exchange(node: Node, batch: str) -> list[str]:
    """``out = world.all_reduce_values(x, axis="tp", how="sum")``."""
    (out,), (x, *rest) = node.outs, node.args
    assert out is not None and isinstance(x, Ref)  # a collective that nothing reads is not written
    name, formals = collective_name(node.op), [argument.name for argument in node.op._schema.arguments[1:]]
    given = {key: argument(arg, batch) for key, arg in zip(formals, rest, strict=True)}
    given = {key: value.replace("'", '"') for key, value in given.items()}
    args = [x.name, *(f"{key}={value}" for key, value in given.items() if (key, value) not in PLAIN)]
    axis = given["axis"].strip('"')
    told = {
        "all_reduce": "Partial({}) -> Replicate()".format(given.get("how", "").strip('"')),
        "all_gather": f"Shard({given.get('dim')}) -> Replicate()",
        "reduce_scatter": f"Partial(sum) -> Shard({given.get('dim')})",
        "all_to_all": f"Shard({given.get('from_dim')}) -> Shard({given.get('dim')})",
        "shift": f"Shard({given.get('dim')}) -> that of the place {given.get('hops')} before,",
        "dispatch": "the rows of this place -> those of its groups",
        "combine": "the rows of its groups -> those of this place",
    }[name]
    return [f"# {x.name}: {told} on {axis}", *call(f"{out.name} = world.{name}_values", args, "")]


def operator(node: Node) -> str:
    """``aten.mm.default``; the full path for ops of other libraries."""
    return node.opname if node.opname.startswith("aten.") else f"torch.ops.{node.opname}"


def argument(arg: Arg, batch: str) -> str:
    """Source for an argument."""
    match arg:
        case Ref(name):
            return name
        case Size():
            return arg.text("B" if arg.whole else batch)
        case Share():
            return arg.text()
        case tuple():
            return "[" + ", ".join(argument(item, batch) for item in arg) + "]"
        case torch.device():
            return "DEVICE"
        case float() if arg != arg or arg in (float("inf"), float("-inf")):
            return f'float("{arg}")'
        case _:
            return repr(arg)


def call(head: str, args: Sequence[str], tail: str, brackets: str = "()") -> list[str]:
    """``head(args)tail`` on as many lines as it takes."""
    opening, closing = brackets[0], brackets[1]
    line = f"{head}{opening}{', '.join(args)}{closing}{tail}"
    if len(line) <= WIDTH - 4:
        return [line]
    return [f"{head}{opening}", *_filled(args, "    "), f"{closing}{tail}"]


def indented(lines: Iterable[str]) -> list[str]:
    """Lines one level further in."""
    return [f"    {line}" for line in lines]


def tuple_of(items: Iterable[str]) -> str:
    """Source for a tuple."""
    items = tuple(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def wrapped(head: str, names: Sequence[str]) -> list[str]:
    """``head a, b, c``, repeated on as many lines as it takes."""
    lines: list[str] = []
    row: list[str] = []
    for name in names:
        if row and len(head + ", ".join([*row, name])) > WIDTH - 4:
            lines.append(head + ", ".join(row))
            row = []
        row.append(name)
    return [*lines, head + ", ".join(row)]


def wrapped_return(result: str) -> list[str]:
    """``return result``, a long result in parentheses on several lines."""
    if len(result) <= WIDTH - 11:
        return [f"return {result}"]
    lines = _filled(result.split(", "), "    ")
    if not _several(result):  # a comma behind a single value would make a tuple of it
        lines[-1] = lines[-1].removesuffix(",")
    return ["return (", *lines, ")"]


def _several(result: str) -> bool:
    """Whether a comma stands outside of all parentheses."""
    depth = 0
    for character in result:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            return True
    return False


def _filled(items: Sequence[str], indent: str) -> list[str]:
    lines: list[str] = []
    row = indent
    for item in items:
        if len(row) > len(indent) and len(row) + len(item) + 2 > WIDTH - 8:
            lines.append(row.rstrip())
            row = indent
        row += item + ", "
    lines.append(row.rstrip().rstrip(",") + ("," if not row.strip().startswith("*") else ""))
    return lines


def _groups(nodes: Sequence[Node]) -> Iterable[list[Node]]:
    group: list[Node] = []
    for node in nodes:
        if group and _place(node) != _place(group[0]):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _place(node: Node) -> tuple[str, str, bool]:
    return node.module, node.source, node.backward


def _comment(node: Node, prefix: str) -> str:
    parts = [part for part in (_within(node.module, prefix), node.source) if part]
    return ("# " + " | ".join(parts))[: WIDTH - 4] if parts else ""


def _within(path: str, prefix: str) -> str:
    """A module's path after `prefix`, whatever its numbers: a shared body has the paths of the first of its layers."""
    names, outer = path.split("."), prefix.split(".")
    same = len(names) >= len(outer) and all(
        here == there or (here.isdigit() and there.isdigit()) for here, there in zip(names, outer, strict=False)
    )
    return ".".join(names[len(outer) :]) if prefix and same else path
