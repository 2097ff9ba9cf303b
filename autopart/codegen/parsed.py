"""A rank's source as what it defines: compiled, loaded, and which of its functions compute."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

PROLOGUE = "prologue"
"""The function that computes what a whole step needs of its inputs before the first microbatch."""

Lines = tuple[tuple[int, str], ...]
"""Something at some lines: a name, or a statement as Python writes it."""

_WORD = re.compile(r"\w+")

_DRAW = re.compile(r"\bautopart\.(uniform|normal|bernoulli)\b")


def _body_nodes(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that compute: those that take ``b`` and ``B``, maybe after the world, and the prologue."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            formals = [a.arg for a in node.args.args]
            if formals[_communicates(node) :][:2] == ["b", "B"] or node.name == PROLOGUE:
                yield node


def _communicates(node: ast.FunctionDef) -> bool:
    return [a.arg for a in node.args.args[:1]] == ["world"]


def _operands(body: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """The line of every call of the world with a name as its first argument, and that name."""
    for node in ast.walk(body):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="world")), args=[ast.Name(id=name), *_]):
                yield node.lineno - body.lineno, name


def draws(body: ast.AST) -> Lines:
    """The statements that draw random numbers, each with its line in the source, written as Python writes them."""
    made = [node for node in ast.walk(body) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    found = ((node.lineno, ast.unparse(node)) for node in made)
    return tuple(sorted((line, text) for line, text in found if _DRAW.search(text)))


def _unread(body: ast.FunctionDef) -> Lines:
    """The names that a function gives to values which it never reads, each with its line in the source."""
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)} | {"_"}
    stored = (node for node in names if isinstance(node.ctx, ast.Store))
    return tuple(sorted((node.lineno, node.id) for node in stored if node.id not in read))


def _loops(body: ast.FunctionDef) -> Iterator[ast.For]:
    return (node for node in ast.walk(body) if isinstance(node, ast.For))


def _last(node: ast.For) -> int:
    return node.end_lineno or node.lineno


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a body that calls one function at most, from its `first` line to its `last`.

    `targets` are the names that it gives, `function` is what it calls, as it is written, and `operand` the name that
    this is given first; "" for none.
    """

    first: int
    last: int
    targets: frozenset[str]
    function: str
    operand: str


def _statements(body: ast.FunctionDef) -> Iterator[Statement]:
    """Those that the body always performs, in order: those of its loops over chunks too, none of a condition."""
    for node in (each for outer in body.body for each in (outer.body if isinstance(outer, ast.For) else [outer])):
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) != "float"]
        if len(calls) > 1 or not isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        first = calls[0].args[0] if calls and calls[0].args else None
        yield Statement(
            node.lineno - body.lineno,
            (node.end_lineno or node.lineno) - body.lineno,
            frozenset(names),
            ast.unparse(calls[0].func) if calls else "",
            first.id if isinstance(first, ast.Name) else "",
        )


def _last_reads(body: ast.FunctionDef) -> dict[str, int]:
    """The last line on which each name is read."""
    last: dict[str, int] = {}
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            last[node.id] = max(last.get(node.id, 0), node.lineno - body.lineno)
    return last


@dataclass(frozen=True, slots=True)
class Body:
    """A body's text (with all that it calls), and whether what it returns may depend on the size of the whole batch.

    One that `communicates` takes the world before all else; `operands` are the names of what its collectives on values
    are given. `loops` are the first and last lines of those over chunks. `unread` has the names of values that it makes
    for nothing, if it has either. `statements` are its simple ones, `last_reads` where each name is read last, `draws`
    its statements that draw random numbers. Lines are counted from the body's first.
    """

    text: str
    reads_whole: bool
    communicates: bool = False
    operands: Lines = ()
    unread: Lines = ()
    loops: tuple[tuple[int, int], ...] = ()
    statements: tuple[Statement, ...] = ()
    last_reads: Mapping[str, int] = field(default_factory=dict)
    draws: Lines = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A rank's source, compiled, with its bodies and the lines where they begin, by name."""

    code: CodeType
    bodies: dict[str, Body]
    first: dict[str, int]


def parse(source: str, name: str, known: dict[str, Body] | None = None) -> Parsed:
    """Compile a source under a file name. Raises SyntaxError.

    `known` has bodies of other sources by their text, which are not looked into again; those found are added.
    """
    tree, known = ast.parse(source, name), {} if known is None else known
    lines = source.splitlines()
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    bodies, first = {}, {}
    for node in _body_nodes(tree):
        first[node.name] = node.lineno
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        words = _WORD.findall(text)
        if not functions.isdisjoint({*words} - {node.name}):
            bodies[node.name] = _body(node, source, reads_whole=True)
            continue
        if text not in known:
            # Every body has B among its formals; the prologue begins with it.
            known[text] = _body(node, text, reads_whole=node.name == PROLOGUE or words.count("B") > 1)
        bodies[node.name] = known[text]
    return Parsed(compile(tree, name, "exec"), bodies, first)


def _body(node: ast.FunctionDef, text: str, *, reads_whole: bool) -> Body:
    communicates, first = _communicates(node), node.lineno
    loops = tuple((each.lineno - first, _last(each) - first) for each in _loops(node))
    return Body(
        text,
        reads_whole,
        communicates,
        tuple(_operands(node)) if communicates else (),
        tuple((line - first, name) for line, name in _unread(node)) if loops or communicates else (),
        loops,
        tuple(_statements(node)),
        _last_reads(node),
        tuple((line - first, made) for line, made in draws(node)) if _DRAW.search(text) else (),
    )


def load(source: str, name: str, device: torch.device | None = None) -> dict[str, Any]:
    """The namespace of a rank's source, compiled under the file name `name` so that errors show its lines."""
    return executed(compile(source, name, "exec"), source, name, device)


def executed(code: CodeType, source: str, name: str, device: torch.device | None) -> dict[str, Any]:
    """`load` for a source that is compiled already."""
    import linecache

    namespace: dict[str, Any] = {"__name__": name}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(code, namespace)
    if device is not None:
        namespace["DEVICE"] = device
    return namespace


def executing(name: str) -> int:
    """The line that is being executed, the innermost, of the source compiled under the file name `name`; 0 if none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != name:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def body_names(source: str) -> tuple[str, ...]:
    """The functions of a rank's source that compute: those that take ``b`` and ``B``, and the prologue."""
    return tuple(parse(source, "<text>").bodies)
