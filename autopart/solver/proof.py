"""The certificate of a layout: z3 must find none that is cheaper. For small bodies; the tables are exact at any size.

    pick[u, o]        exactly one option a unit
    need[v, j]        some picked option needs v in placement j; at most `MOST` of them a value
    move[v, i, j]     v is moved from placement i to j, once; it is paid
    there[v, j, d]    v can be had in j by at most d moves, one after another: given so, or moved from what is there
    need[v, j]   ->   there[v, j, all]

and the sum of what is picked and moved is less than what is claimed: unsatisfiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopart.solver.layout import IMPOSSIBLE, MOST, Layout, Moves, evaluate

Literals = dict[tuple[Any, ...], Any]


def prove(layout: Layout, picks: Sequence[int], price: float = 0.0) -> None:
    """Raise AssertionError, an internal error, where z3 finds a cheaper layout than `picks`."""
    import z3

    claimed = evaluate(layout, picks, price)
    if claimed is None:
        raise AssertionError(f"internal error: the layout {picks} cannot be")
    solver = z3.Solver()
    pick = {(unit.name, o): z3.Bool(f"pick {unit.name} {o}") for unit in layout.units for o in range(len(unit.options))}
    costs: list[tuple[Any, int]] = []
    for unit in layout.units:
        solver.add(z3.PbEq([(pick[unit.name, o], 1) for o in range(len(unit.options))], 1))
        costs += [(pick[unit.name, o], option.cost(price)) for o, option in enumerate(unit.options)]
    for value, moves in layout.moves:
        clauses, paid = _value(layout, value, moves, pick)
        solver.add(*clauses)
        costs += paid
    solver.add(z3.Sum([z3.If(literal, cost, 0) for literal, cost in costs if cost]) < claimed)
    if solver.check() != z3.unsat:
        raise AssertionError(f"internal error: a layout cheaper than {claimed} exists or could not be excluded")


def _value(layout: Layout, value: str, moves: Moves, pick: Literals) -> tuple[list[Any], list[tuple[Any, int]]]:
    """The clauses about one value, and what its moves cost."""
    import z3

    places = range(len(moves))
    move = {
        (i, j): z3.Bool(f"move {value} {i} {j}") for i in places for j in places if i != j and moves[i][j] < IMPOSSIBLE
    }
    need = {j: z3.Or([False, *_picked(layout, value, j, pick)]) for j in places}
    there = {(j, 0): z3.Or([False, *_given(layout, value, j, pick)]) for j in places}
    clauses = [z3.PbLe([(need[j], 1) for j in places], MOST)]
    for depth in range(1, len(moves)):
        for j in places:
            there[j, depth] = z3.Bool(f"there {value} {j} {depth}")
            came = [z3.And(move[i, j], there[i, depth - 1]) for i in places if (i, j) in move]
            clauses.append(z3.Implies(there[j, depth], z3.Or(there[j, depth - 1], *came)))
    clauses += [z3.Implies(need[j], there[j, len(moves) - 1]) for j in places]
    return clauses, [(literal, moves[i][j]) for (i, j), literal in move.items()]


def _picked(layout: Layout, value: str, how: int, pick: Literals) -> Iterator[Any]:
    for unit in layout.units:
        for o, option in enumerate(unit.options):
            if any(name == value and need == how for name, need in zip(unit.reads, option.needs, strict=True)):
                yield pick[unit.name, o]


def _given(layout: Layout, value: str, how: int, pick: Literals) -> Iterator[Any]:
    for unit in layout.units:
        for o, option in enumerate(unit.options):
            if any(name == value and gives == how for name, gives in zip(unit.makes, option.gives, strict=True)):
                yield pick[unit.name, o]
