"""A rank's source as what it defines: compiled, loaded, and which of its functions compute."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

PROLOGUE = "prologue"
"""The function that computes what a whole step needs of its inputs before the first microbatch."""

_WORD = re.compile(r"\w+")


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


def _unread(body: ast.FunctionDef) -> tuple[tuple[int, str], ...]:
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
class Body:
    """A body's text (with all that it calls), and whether what it returns may depend on the size of the whole batch.

    One that `communicates` takes the world before all else; `operands` are the names of what its collectives on values
    are given, by line of the body. `loops` are the first and last lines of those over chunks, by line of the body.
    `unread` has the names of values that it makes for nothing, by line of the source, if it has either.
    """

    text: str
    reads_whole: bool
    communicates: bool = False
    operands: tuple[tuple[int, str], ...] = ()
    unread: tuple[tuple[int, str], ...] = ()
    loops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A rank's source, compiled, with its bodies by name."""

    code: CodeType
    bodies: dict[str, Body]


def parse(source: str, name: str) -> Parsed:
    """Compile a source under a file name. Raises SyntaxError."""
    tree = ast.parse(source, name)
    lines = source.splitlines()
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    bodies = {}
    for node in _body_nodes(tree):
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        words = _WORD.findall(text)
        alone = functions.isdisjoint({*words} - {node.name})
        # Every body has B among its formals; the prologue begins with it.
        reads_whole = node.name == PROLOGUE or not alone or words.count("B") > 1
        loops = tuple((each.lineno - node.lineno, _last(each) - node.lineno) for each in _loops(node))
        operands = tuple(_operands(node)) if _communicates(node) else ()
        unread = _unread(node) if loops or _communicates(node) else ()
        bodies[node.name] = Body(text if alone else source, reads_whole, _communicates(node), operands, unread, loops)
    return Parsed(compile(tree, name, "exec"), bodies)


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
