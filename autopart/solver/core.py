"""The unsat core of a request that has no plan: a smallest set of its pins that cannot be kept together, by z3.

Over the memory table: Boolean ``way[i]`` says that the global choices are made in a way of kind i, those of a kind
keeping the same pins, ``keep[p]`` that pin p is kept.

    exactly one kind of way
    keep[p]       ->  not way[i]      for each kind that does not keep pin p
    keep[memory]  ->  not way[i]      for each kind whose ways all need more than the limit on their fullest rank

A row of the table, the need of its ways over all splits and, where that is free, all recomputation, is found when z3
first chooses that kind. The pins are assumptions. A set of pins that z3 refuses is a smallest one if every
smaller set leaves out all of some pins without which there is a plan (a correction set): that is what hitting sets of
those are for (Ignatiev et al., "Smallest MUS extraction with minimal hitting set dualization", CP 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

MEMORY = "memory"
"""The pin of the limit per device, which every request has."""


@dataclass(frozen=True, slots=True)
class Way:
    """Ways to make the global choices: the pins that they keep, and what finds whether one fits the memory limit."""

    keeps: frozenset[str]
    fits: Callable[[], bool]


def smallest_core(pins: Sequence[str], ways: Sequence[Way]) -> tuple[str, ...]:
    """The fewest pins, `MEMORY` among them, of which no way keeps all; empty if some way does.

    Of equally few the first, in the order of `pins`. Any of them dropped, there is a way that keeps the others.
    """
    every, table = (*pins, MEMORY), _Table(pins, ways)
    corrections: list[frozenset[str]] = []
    for core in _hitting(every, corrections):
        if not table.allows(core):
            return tuple(pin for pin in every if pin in table.refused())
        kept = set(core)
        for pin in every:
            if pin not in kept and table.allows({*kept, pin}):
                kept.add(pin)
        corrections.append(frozenset(every) - kept)
    return ()


def _hitting(pins: Sequence[str], sets: list[frozenset[str]]) -> Iterator[tuple[str, ...]]:
    """Fewest pins with one of each set, again and again as sets are added; ends where a set is empty."""
    while all(sets):
        yield next(
            some
            for size in range(len(pins) + 1)
            for some in combinations(pins, size)
            if all(each.intersection(some) for each in sets)
        )


class _Table:
    """The memory table of some ways, as z3 knows it."""

    def __init__(self, pins: Sequence[str], ways: Sequence[Way]) -> None:
        import z3

        self.ways, self.solver = ways, z3.Solver()
        self.way = [z3.Bool(f"way {i}") for i in range(len(ways))]
        self.keep = {pin: z3.Bool(f"keep {pin}") for pin in (*pins, MEMORY)}
        self.known: dict[int, bool] = {}
        self.solver.add(z3.PbEq([(way, 1) for way in self.way], 1))
        for pin in pins:
            for literal, way in zip(self.way, ways, strict=True):
                if pin not in way.keeps:
                    self.solver.add(z3.Implies(self.keep[pin], z3.Not(literal)))

    def allows(self, kept: Collection[str]) -> bool:
        """Whether some way keeps all of these pins."""
        import z3

        while self.solver.check(*(self.keep[pin] for pin in kept)) == z3.sat:
            model = self.solver.model()
            (chosen,) = (i for i, way in enumerate(self.way) if z3.is_true(model.eval(way)))
            if MEMORY not in kept or self.known.get(chosen):
                return True
            self.known[chosen] = self.ways[chosen].fits()
            if not self.known[chosen]:
                self.solver.add(z3.Implies(self.keep[MEMORY], z3.Not(self.way[chosen])))
        return False

    def refused(self) -> Collection[str]:
        """The pins in the core of the set that was refused last."""
        core = set(self.solver.unsat_core())
        return {pin for pin, literal in self.keep.items() if literal in core}
