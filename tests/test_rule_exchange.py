"""Collectives of one axis under every strategy on another: on a grid of places they make up what one axis has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopart.collectives import operator
from autopart.ir.graph import Node, Ref, Value
from autopart.ir.placed import PlacedBody, PlacedFunction, Strategy
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.segmented import Body, Function
from autopart.passes.localise import localise
from autopart.rules.strategies import Ruled, matching, strategies
from tests import places

EVEN, UNEVEN = (2, 2), (3, 1)

CASES: dict[str, tuple[str, tuple[Any, ...], int, int]] = {
    "sum": ("all_reduce", ("sum",), -1, -1),
    "largest": ("all_reduce", ("max",), -1, -1),
    "gather": ("all_gather", (1, 1, EVEN), 1, -1),
    "gather within": ("all_gather", (0, 3, EVEN), 0, -1),
    "gather unlike": ("all_gather", (1, 1, UNEVEN), 1, -1),
    "scatter": ("reduce_scatter", (1, 2, EVEN), -1, 1),
    "scatter unlike": ("reduce_scatter", (2, 1, UNEVEN), -1, 2),
    "swap": ("all_to_all", (0, 3, EVEN, 2, 1, EVEN), 0, 2),
    "swap unlike": ("all_to_all", (0, 1, UNEVEN, 1, 2, EVEN), 0, 1),
    "cut again": ("all_to_all", (0, 1, (4, 4), 0, 2, EVEN), 0, 0),
}
"""Kind and arguments of a collective, and the dims that are split before and after it."""


def sizes(args: tuple[Any, ...], dims: tuple[int, int], place: int | None) -> tuple[list[int], list[int]]:
    """The shapes before and after at a place, None: whole."""
    shapes = [12, 8, 4], [12, 8, 4]
    for shape, dim, cut in zip(shapes, dims, (args[:3], args[-3:]), strict=True):
        if dim >= 0:
            _, outer, pieces = cut
            shape[dim] = outer * (sum(pieces) if place is None else pieces[place])
    for dim, cut, shape in ((dims[0], args[:3], shapes[1]), (dims[1], args[-3:], shapes[0])):
        if dim >= 0 and dims[0] != dims[1]:
            shape[dim] = cut[1] * sum(cut[2])
    return shapes


def grid(node: Node, shape: list[int], strategy: Strategy | None, place: int) -> Function:
    """What place `place` of the second axis runs, of one place of the first."""
    assert strategy is not None, "the places of the first axis have the same strategies"
    function = Function((Value("x", tuple(shape), torch.float64),), (node,), ("y",))
    ((_, how),), (given,) = strategy.needs, strategy.gives
    assert how is not None and given is not None
    part = PlacedFunction(function, (how,), (strategy,), (given,))
    return localise(PlacedBody(Body("", function, (), None), "cp", 2, part, (), None), place).forward


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_makes_up_the_whole(case: str) -> None:
    kind, args, before, after = CASES[case]
    torch.manual_seed(0)
    nodes, shapes = [], []
    for place in range(2):
        own, made = sizes(args, (before, after), place)
        out = Value("y", tuple(made), torch.float64)
        nodes.append(Node(operator(kind), (Ref("x"), "tp", *args), (), (out,), True, False, "", ""))
        shapes.append(own)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    wanted = places._perform(kind, tensors, ("tp", *args))
    rules = [Ruled.of(node, {"x": Value("x", tuple(s), torch.float64)}) for node, s in zip(nodes, shapes, strict=True)]
    found = strategies(rules[0], sorted(rules[0].cuts(2), key=str), 2)
    for strategy in found:
        alike = [matching(ruled, strategy, 2) for ruled in rules]
        ((_, how),), (given,) = strategy.needs, strategy.gives
        assert how is not None and given is not None
        taken = [places.scattered(tensor, how, 2, 1) for tensor in tensors]
        made: list[list[torch.Tensor]] = [[], []]
        for j in range(2):
            functions = [grid(*each, j) for each in zip(nodes, shapes, alike, strict=True)]
            envs, _ = places.run(functions, [[row[j]] for row in taken], 1, 1)
            for row, env in zip(made, envs, strict=True):
                row.append(env["y"])
        for row, whole in zip(made, wanted, strict=True):
            torch.testing.assert_close(places.gathered(row, given, 1), whole, msg=lambda m, s=strategy: f"{s}: {m}")
    cuts = [strategy for strategy in found if strategy.cut is not None]
    assert (case == "largest") != any(how == Partial() for s in found for _, how in s.needs)
    assert len(cuts) >= 2 and all(isinstance(how, Shard) for s in cuts for _, how in s.needs)
    assert any(how == Replicate() for _, how in found[0].needs)


@pytest.mark.parametrize(
    ("case", "placements"), [("gather", (Shard(1), Shard(1, 2))), ("scatter", (Shard(1, 4), Shard(1, 2)))]
)
def test_the_dim_itself_may_be_split_within_each_piece(case: str, placements: tuple[Shard, Shard]) -> None:
    """Each place's piece is split in two; of the whole dim these are runs, one a place."""
    kind, args, before, after = CASES[case]
    own, made = sizes(args, (before, after), 0)
    out, x = Value("y", tuple(made), torch.float64), Value("x", tuple(own), torch.float64)
    ruled = Ruled.of(Node(operator(kind), (Ref("x"), "tp", *args), (), (out,), True, False, "", ""), {"x": x})
    found = strategies(ruled, ruled.cuts(2), 2)
    assert placements in [(s.needs[0][1], s.gives[0]) for s in found]
