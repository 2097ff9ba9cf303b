"""Layouts: the abstract problem of placing values. Units choose among options; values are moved between placements.

    unit u picks one option o(u): how it needs each value that it reads, how it gives each that it makes, what it costs
    value v is given in one placement and needed in a set of them; `moves[v][i][j]` is the price of i made into j

    minimise   sum over u of time(o(u)) + price * memory(o(u))  +  sum over v of tree(v)

where tree(v) is the cheapest way to have v in all the placements that are needed, starting from the one that is given:
each is made once, from any that is there, passing through others where that is cheaper (an arborescence with optional
intermediate nodes). Formula by formula: `tree` and `evaluate` here; `solver.eliminate` finds the minimum.
Times are whole numbers (picoseconds), and so is what an option's bytes cost, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

IMPOSSIBLE = 1 << 62
"""The price of what cannot be done: more than any layout costs."""

MOST = 2
"""How many placements of one value may be needed. A third would save nothing that is worth having it in the tables."""

Moves = tuple[tuple[int, ...], ...]
"""Prices from placement i to placement j of one value; 0 on the diagonal."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a unit. Placements are numbers in the value's own list; None: any will do."""

    needs: tuple[int | None, ...]
    gives: tuple[int, ...]
    time: int = 0
    memory: int = 0

    def cost(self, price: float) -> int:
        """Picoseconds, where a byte held costs `price` of them."""
        return self.time + round(self.memory * price)


@dataclass(frozen=True, slots=True)
class Unit:
    """What chooses one of its options; `reads` and `makes` name values, in the order of the options' placements."""

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The problem: units, each value made by exactly one of them, and the prices of moving each value."""

    units: tuple[Unit, ...]
    moves: tuple[tuple[str, Moves], ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The cheapest way from one placement to a set of them: its price and its (from, to) steps in order."""

    cost: int
    steps: tuple[tuple[int, int], ...]


def tree(moves: Moves, given: int, needed: Iterable[int]) -> Tree | None:
    """The cheapest tree from `given` that has all of `needed`, of at most `MOST`; None if there is no way."""
    return cheapest(moves, given).get(frozenset(needed) - {given})


@lru_cache(maxsize=4096)
def cheapest(moves: Moves, given: int) -> dict[frozenset[int], Tree]:
    """For every set of at most `MOST` placements besides `given`: the cheapest tree that has them, if there is one."""
    found: dict[frozenset[int], Tree] = {}
    for held, each in reach(moves, given).items():
        for count in range(MOST + 1):
            for wanted in map(frozenset, combinations(held, count)):
                if wanted not in found or each.cost < found[wanted].cost:
                    found[wanted] = each
    return found


def reach(moves: Moves, given: int) -> dict[frozenset[int], Tree]:
    """For every set of placements that can be there besides `given`: the cheapest tree that makes exactly these."""
    found = {frozenset[int](): Tree(0, ())}
    layer = list(found)
    for _ in range(len(moves) - 1):
        following: dict[frozenset[int], Tree] = {}
        for held in layer:
            for new in set(range(len(moves))) - held - {given}:
                price, source = min((moves[old][new], old) for old in (given, *sorted(held)))
                if price >= IMPOSSIBLE:
                    continue
                larger, cost = held | {new}, found[held].cost + price
                if larger not in following or cost < following[larger].cost:
                    following[larger] = Tree(cost, (*found[held].steps, (source, new)))
        found |= following
        layer = list(following)
    return found


def evaluate(layout: Layout, picks: Sequence[int], price: float = 0.0) -> int | None:
    """What a choice of one option a unit costs, None if some value cannot be had as it is needed."""
    chosen = [unit.options[pick] for unit, pick in zip(layout.units, picks, strict=True)]
    total, moves = sum(option.cost(price) for option in chosen), dict(layout.moves)
    for value, given, needed in flows(layout, chosen):
        found = tree(moves[value], given, needed) if len(needed) <= MOST else None
        if found is None:
            return None
        total += found.cost
    return total


def flows(layout: Layout, chosen: Sequence[Option]) -> list[tuple[str, int, frozenset[int]]]:
    """For every value: how it is given, and all the ways in which it is needed."""
    given: dict[str, int] = {}
    needed: dict[str, set[int]] = {}
    for unit, option in zip(layout.units, chosen, strict=True):
        given.update(zip(unit.makes, option.gives, strict=True))
        for value, how in zip(unit.reads, option.needs, strict=True):
            if how is not None:
                needed.setdefault(value, set()).add(how)
    return [(value, how, frozenset(needed.get(value, ()))) for value, how in given.items()]
