"""reuse: Staged -> Staged. A result that takes the place of an operand which nothing needs any more is written over it.

before: add = aten.add.Tensor(x, view)        where view is a view of all of mm, which was made here and is read no more
after:  add = aten.add.out(x, view, out=view)

A step then holds less at a time, and touches less. Values stay bit for bit, and so do strides: the operand
is as large as the result, of its dtype, and both are row-major. Memory that was given to a function, that it keeps or
returns under another name, or that a collective has been handed, is not written over; nor is what does not grow with
the batch, which is small.

Values that pass between functions are row-major where every function makes them so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from autopart.collectives import is_collective
from autopart.ir.action import Kind
from autopart.ir.graph import Node, Size, Value
from autopart.ir.segmented import Body, Function, Halves, Phase, Segment, defined
from autopart.ir.staged import Staged
from autopart.rules.alias import roots
from autopart.rules.memory import WHOLE, makes, overwriting, row_major

Use = tuple[int, Kind]
"""A function: the number of its body, and the action that it is of."""

_SAME = {Kind.S: Kind.F, Kind.T: Kind.B}


def reuse(staged: Staged) -> Staged:
    """The step in which results take over the memory of dead values, in every function that its stages call."""
    ordered = ordered_formals(staged)
    bodies = tuple(_written(body, number, ordered) for number, body in enumerate(staged.segmented.bodies))
    return replace(staged, sharded=replace(staged.sharded, segmented=replace(staged.segmented, bodies=bodies)))


def _written(body: Body, number: int, ordered: Mapping[Use, frozenset[str]]) -> Body:
    def over(function: Function | None, kind: Kind, kept: Iterable[str] = ()) -> Function | None:
        known = ordered.get((number, kind))
        return function if function is None or known is None else in_place(function, kept, known)

    forward = over(body.forward, Kind.F, body.saved)
    assert forward is not None
    halves = body.halves
    if halves is not None:
        halves = Halves(over(halves.input, Kind.I, halves.stash), halves.stash, over(halves.weight, Kind.W))
    return replace(body, forward=forward, backward=over(body.backward, Kind.B), halves=halves)


def in_place(function: Function, kept: Iterable[str], ordered: Set[str]) -> Function:
    """The function with results in the memory of dead values; what it has `kept` it returns beside its outputs.

    Of its inputs those in `ordered` are row-major.
    """
    values, known, root = defined(function), _row_majors(function, ordered), roots(function.nodes)
    last = _last_uses(function, (*function.outputs, *kept), root)
    whole, turn = _whole(function, root), _turns(function)
    born = {name: turn[place] for place, node in enumerate(function.nodes) for name in node.names()}

    def free(name: str, place: int, node: Node, out: Value) -> bool:
        """Whether a value is the whole of memory made here that dies at this place, and the result has its form."""
        storage, value = root.get(name, name), values[name]
        alike = value.shape == out.shape and value.dtype == out.dtype and known >= {name, out.name}
        alone = {other for other in node.refs() if root.get(other, other) == storage} == {name}
        return alike and alone and name in whole and last[storage] == place and born[storage] == turn[place]

    nodes = []
    for place, node in enumerate(function.nodes):
        out = node.outs[0]
        if node.single and out is not None and any(isinstance(size, Size) for size in out.shape):
            found = (overwriting(node, name) for name in dict.fromkeys(node.refs()) if free(name, place, node, out))
            node = next((made for made in found if made is not None), node)
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))


def _turns(function: Function) -> list[int]:
    """For each node the loop that it is in, -1 for none: what is there before a loop, its next turn reads again."""
    turns = [-1] * len(function.nodes)
    for number, loop in enumerate(function.loops):
        turns[loop.start : loop.stop] = [number] * (loop.stop - loop.start)
    return turns


def _last_uses(function: Function, returned: Iterable[str], root: Mapping[str, str]) -> dict[str, int]:
    """For each storage the last node that reads it; none for what is returned, or handed to a collective."""
    last: dict[str, int] = {}
    for place, node in enumerate(function.nodes):
        last.update(dict.fromkeys((root.get(name, name) for name in node.refs()), place))
    exchanged = (name for node in function.nodes if is_collective(node.op) for name in node.refs())
    return last | dict.fromkeys((root.get(name, name) for name in (*returned, *exchanged)), -1)


def _whole(function: Function, root: Mapping[str, str]) -> set[str]:
    """The values that are all of some new memory: what nodes make, and views of all of that."""
    whole: set[str] = set()
    for node in function.nodes:
        if makes(node) or (node.aten in WHOLE and node.refs()[0] in whole):
            whole.update(node.names())
    return whole


def _row_majors(function: Function, ordered: Iterable[str]) -> set[str]:
    """The values of a function that are row-major if its inputs `ordered` are."""
    known, values = set(ordered), defined(function)
    for node in function.nodes:
        if row_major(node, known, values):
            known.update(node.names())
    return known


Passed = str | tuple[str, str]
"""What passes between functions: a value of the whole graph, or what a segment keeps for a later action of its own."""


def ordered_formals(staged: Staged) -> dict[Use, frozenset[str]]:
    """For each function the inputs that are row-major wherever it is called.

    What passes between functions is taken to be so, until a function is found that makes it otherwise. Nothing is known
    of what the caller passes, parameters and buffers.
    """
    stages = range(len(staged.stages))
    calls = [(kind, *each) for stage in stages for kind in staged.kinds(stage) for each in staged.phases(stage, kind)]
    uses = [((segment.body, _SAME.get(kind, kind)), segment, phase) for kind, segment, phase in calls]
    functions = {use: phase.function for use, _, phase in uses}
    ordered = {passed for _, segment, phase in uses for passed, _ in _handed_on(segment, phase)}
    while True:
        formals: dict[Use, frozenset[str]] = {}
        for use, segment, phase in uses:
            here = frozenset(local for passed, local in _taken(segment, phase) if passed in ordered)
            formals[use] = formals.get(use, here) & here
        known = {use: _row_majors(function, formals[use]) for use, function in functions.items()}
        strided = {
            passed
            for use, segment, phase in uses
            for passed, local in _handed_on(segment, phase)
            if local not in known[use]
        }
        if ordered.isdisjoint(strided):
            return formals
        ordered -= strided


def _taken(segment: Segment, phase: Phase) -> Iterator[tuple[Passed, str]]:
    """What a function takes of others, each with the name of its formal."""
    passed: tuple[Passed, ...] = (*phase.takes, *((segment.name, name) for name in phase.kept))
    return zip(passed, (value.name for value in phase.function.inputs), strict=False)


def _handed_on(segment: Segment, phase: Phase) -> Iterator[tuple[Passed, str]]:
    """What a function makes for others, each with its name there."""
    yield from zip(phase.gives, phase.function.outputs, strict=False)
    yield from (((segment.name, name), name) for name in phase.keeps or ())
