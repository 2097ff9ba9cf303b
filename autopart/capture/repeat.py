"""A step with three of many equal blocks, written out with all of them.

In the operators of a joint graph each block has a stretch in the forward and one in the backward, each to its
neighbours as the next one's is to its own. So a block more is the middle one's two stretches once more, between it and
the last; what differs are the module's path, the names of parameters, and the counters in the names of values, which
are affine in the block's place and in the number of blocks, as sizes are in the batch. None of this is assumed: it is
read off three blocks and must give the graph of four, name by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from autopart.ir.captured import Captured
from autopart.ir.graph import Input, Node, Output, Value

Key = tuple[Any, ...]
"""Where a node is: ``("else", position)``, or ``(phase, position in its block)`` with the block beside it."""


def repeated(three: Captured, four: Captured, paths: Sequence[str]) -> Captured | None:
    """The step with a block for each of `paths`; None where more blocks are not the same ones once more.

    `three` has the first, the second and the last of them, `four` the last but one, too.
    """
    small = _Layout.of(three, (*paths[:2], paths[-1]))
    large = _Layout.of(four, (*paths[:2], *paths[-2:]))
    if small is None or large is None:
        return None
    counters = _Counters.of(small, large)
    if counters is None:
        return None
    again = _written(small, counters, large.paths)
    if again is None or not _same(again, four):
        return None
    return _written(small, counters, tuple(paths))


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step and, for each of its nodes, the block that it is in, None for none, and its key."""

    captured: Captured
    paths: tuple[str, ...]
    places: tuple[tuple[int | None, Key], ...]

    @classmethod
    def of(cls, captured: Captured, paths: tuple[str, ...]) -> _Layout | None:
        """The layout of a step with blocks at `paths`; None where they are not stretches of one length."""
        nodes, count = captured.nodes, len(paths)
        turn = next((i for i, node in enumerate(nodes) if node.backward), len(nodes))
        places: list[tuple[int | None, Key]] = []
        for phase, begin, end, order in (
            ("forward", 0, turn, range(count)),
            ("backward", turn, len(nodes), reversed(range(count))),
        ):
            blocks = tuple(order)
            starts = [_first(nodes, begin, end, paths[block]) for block in blocks]
            known = [start for start in starts if start is not None]  # none at all in the backward of frozen blocks
            found = _phase(phase, known, blocks, begin, end)
            if found is None or len(known) not in (0, count):
                return None
            places += found
        return cls(captured, paths, tuple(places))


def _first(nodes: Sequence[Node], begin: int, end: int, path: str) -> int | None:
    return next((i for i in range(begin, end) if _within(nodes[i].module, path)), None)


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _phase(
    phase: str, starts: Sequence[int], blocks: Sequence[int], begin: int, end: int
) -> list[tuple[int | None, Key]] | None:
    """The places of the nodes of a phase; `starts` are where the blocks begin, in their order there."""
    lengths = {after - start for start, after in pairwise(starts)}
    if len(lengths) > 1 or any(length <= 0 for length in lengths):
        return None
    length = lengths.pop() if lengths else 0
    if starts and starts[-1] + length > end:
        return None
    made: list[tuple[int | None, Key]] = []
    for i in range(begin, end):
        block = (i - starts[0]) // length if starts and starts[0] <= i < starts[-1] + length else None
        if block is None:
            after = bool(starts) and i >= starts[0]
            made.append((None, (phase, after, i - starts[-1] - length if after else i - begin)))
        else:
            made.append((blocks[block], (phase, (i - starts[0]) % length)))
    return made


Affine = tuple[str, int, int, int]
"""A name's stem, and its counter as ``constant + per_block * block + per_depth * (depth - 3)``."""


@dataclass(frozen=True, slots=True)
class _Counters:
    """The counters of every value's name, by key and result, and of every node's sequence number, by key."""

    names: Mapping[tuple[Key, int], Affine]
    sequences: Mapping[Key, Affine]

    @classmethod
    def of(cls, small: _Layout, large: _Layout) -> _Counters | None:
        """Read off three blocks and four; None where some counter is not affine."""
        names: dict[tuple[Key, int], Affine] = {}
        sequences: dict[Key, Affine] = {}
        few, more = _by_key(small), _by_key(large)
        if few.keys() != more.keys():
            return None
        for key, nodes in few.items():
            others = more[key]
            if len({len(node.outs) for node in (*nodes, *others)}) > 1 or len(others) not in (1, len(nodes) + 1):
                return None
            for i in range(len(nodes[0].outs)):
                found = _affine([_counted(n.outs[i]) for n in nodes], [_counted(n.outs[i]) for n in others])
                if found is None:
                    return None
                names[key, i] = found
            base, base_more = _least(small), _least(large)
            found = _affine([_since(n, base) for n in nodes], [_since(n, base_more) for n in others])
            if found is None:
                return None
            sequences[key] = found
        return cls(names, sequences)

    def name(self, key: Key, result: int, block: int, depth: int) -> str:
        """The name of a result."""
        stem, *numbers = self.names[key, result]
        number = _at(numbers, block, depth)
        return f"{stem}_{number}" if number else stem

    def sequence(self, key: Key, block: int, depth: int, base: int) -> int:
        """The sequence number of a node."""
        stem, *numbers = self.sequences[key]
        return base + _at(numbers, block, depth) if stem else -1


def _at(numbers: Sequence[int], block: int, depth: int) -> int:
    constant, per_block, per_depth = numbers
    return constant + per_block * block + per_depth * (depth - 3)


def _by_key(layout: _Layout) -> dict[Key, list[Node]]:
    """The nodes of each key, by block."""
    found: dict[Key, dict[int, Node]] = {}
    for node, (block, key) in zip(layout.captured.nodes, layout.places, strict=True):
        found.setdefault(key, {})[block or 0] = node
    return {key: [nodes[block] for block in sorted(nodes)] for key, nodes in found.items()}


def _counted(out: Value | None) -> tuple[str, int]:
    """A name as stem and counter: ``("mm", 3)`` for ``mm_3``, ``("mm", 0)`` for ``mm``."""
    if out is None:
        return "", 0
    match = re.fullmatch(r"(.*?)_([1-9]\d*)", out.name)
    return (match[1], int(match[2])) if match else (out.name, 0)


def _since(node: Node, base: int) -> tuple[str, int]:
    return ("", 0) if node.sequence < 0 else ("since", node.sequence - base)


def _least(layout: _Layout) -> int:
    """The first sequence number, from which the others count: torch's own counter never begins anew."""
    return min((node.sequence for node in layout.captured.nodes if node.sequence >= 0), default=0)


def _affine(few: Sequence[tuple[str, int]], more: Sequence[tuple[str, int]]) -> Affine | None:
    if len({stem for stem, _ in (*few, *more)}) > 1:
        return None
    stem, first = few[0]
    step = few[1][1] - first if len(few) > 1 else 0
    growth = more[0][1] - first
    fits = all(number == first + step * i for i, (_, number) in enumerate(few))
    fits = fits and all(number == first + growth + step * i for i, (_, number) in enumerate(more))
    return (stem, first, step, growth) if fits else None


def _written(layout: _Layout, counters: _Counters, paths: tuple[str, ...]) -> Captured | None:
    """The step of a layout of three blocks, with a block for each of `paths`."""
    writer = _Writer(layout, counters, paths)
    try:
        return writer.captured()
    except _NotRepeated:
        return None


class _NotRepeated(Exception):
    """A block reads or makes something that a copy of it cannot have of its own."""


class _Writer:
    def __init__(self, layout: _Layout, counters: _Counters, paths: tuple[str, ...]) -> None:
        self.three, self.layout, self.counters, self.paths = layout.captured, layout, counters, paths
        self.base = _least(layout)
        self.home: dict[str, tuple[int | None, Key, int]] = {}
        for node, (block, key) in zip(self.three.nodes, layout.places, strict=True):
            for i, out in enumerate(node.outs):
                if out is not None:
                    self.home[out.name] = block, key, i
        self.inputs = {item.value.name: item for item in self.three.inputs}
        self.named = {(item.kind, item.target): item.value.name for item in self.three.inputs}

    def captured(self) -> Captured:
        nodes = self._nodes()
        names = [*self.inputs, *(name for node in nodes for name in node.names())]
        if len(set(names)) < len(names):
            raise _NotRepeated
        result = tuple(self._name(item, None, None) if isinstance(item, str) else item for item in self.three.result)
        return replace(self.three, nodes=nodes, outputs=self._outputs(), result=result)

    def _instances(self, block: int) -> Sequence[int]:
        """The blocks to be written for a block of the three."""
        last = len(self.paths) - 1
        return ((0,), range(1, last), (last,))[block]

    def _nodes(self) -> tuple[Node, ...]:
        """The nodes in order: where the middle block is, its copies follow, in the backward from the last on."""
        made: list[Node] = []
        placed = zip(self.three.nodes, self.layout.places, strict=True)
        for (block, phase), group in groupby(placed, key=lambda item: (item[1][0], item[1][1][0])):
            nodes = list(group)
            order = (None,) if block is None else self._instances(block)
            for at in order if phase == "forward" else reversed(order):
                made += [self._node(node, key, block, at) for node, (_, key) in nodes]
        return tuple(made)

    def _node(self, node: Node, key: Key, block: int | None, at: int | None) -> Node:
        names = {name: self._name(name, block, at) for name in {*node.refs(), *node.names()}}
        depth = len(self.paths)
        return replace(
            node.renamed(names),
            module=self._module(node.module, block, at),
            sequence=self.counters.sequence(key, at or 0, depth, self.base),
        )

    def _name(self, name: str, block: int | None, at: int | None) -> str:
        """What block `at` calls what block `block` of the three calls `name`."""
        if name in self.inputs:
            return self._input(self.inputs[name], block, at)
        of, key, result = self.home[name]
        return self.counters.name(key, result, self._moved(of, block, at) or 0, len(self.paths))

    def _moved(self, of: int | None, block: int | None, at: int | None) -> int | None:
        """The block that is to block `at` what block `of` of the three is to `block`."""
        if of is None:
            return None
        if block is None or at is None:
            if of == 1:
                raise _NotRepeated
            return self._instances(of)[0]
        if abs(of - block) > 1:
            raise _NotRepeated
        return at + of - block

    def _input(self, item: Input, block: int | None, at: int | None) -> str:
        target = self._module(item.target, block, at)
        if target == item.target:
            return item.value.name
        if item.kind != "parameter" or ("parameter", target) not in self.named:
            raise _NotRepeated
        return self.named["parameter", target]

    def _module(self, path: str, block: int | None, at: int | None) -> str:
        """A path of the three, in or below a block's, as block `at` has it."""
        for of, prefix in enumerate(self.layout.paths):
            if _within(path, prefix):
                moved = self._moved(of, block, at)
                assert moved is not None
                return self.paths[moved] + path.removeprefix(prefix)
        return path

    def _outputs(self) -> tuple[Output, ...]:
        order = {item.target: i for i, item in enumerate(self.three.inputs) if item.kind == "parameter"}
        plain: list[Output] = []
        grads: list[Output] = []
        for out in self.three.outputs:
            block = self.home[out.name][0] if out.name in self.home else None
            for at in (None,) if block is None else self._instances(block):
                made = replace(out, name=self._name(out.name, block, at))
                if out.kind == "grad":
                    grads.append(replace(made, target=self._module(out.target, block, at)))
                else:
                    plain.append(made)
        grads.sort(key=lambda out: order[out.target])
        first = next((i for i, out in enumerate(self.three.outputs) if out.kind == "grad"), len(plain))
        return (*plain[:first], *grads, *plain[first:])


def _same(one: Captured, other: Captured) -> bool:
    """Whether two steps are equal, their sequence numbers up to where they begin."""

    def nodes(step: Captured) -> tuple[Node, ...]:
        base = min((node.sequence for node in step.nodes if node.sequence >= 0), default=0)
        return tuple(replace(n, sequence=n.sequence - base) if n.sequence >= 0 else n for n in step.nodes)

    if (one.inputs, one.outputs, one.result, one.training) != (
        other.inputs,
        other.outputs,
        other.result,
        other.training,
    ):
        return False
    return nodes(one) == nodes(other)
