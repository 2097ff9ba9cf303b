"""Is there a shorter schedule? The question put to z3, in a form that it answers quickly.

Microbatches are alike, so each stage may take them in order, for each kind of action: the k-th F, I or W of a stage is
that of microbatch k. (Number the k-th of each kind anew: what it needs is among the first k of its own kind.) What is
left open is how the sequences of a rank, an F and an I a stage, are merged, and how many W are done by when:

* for x of one sequence and y of another, a boolean says whether x comes before y (`_Rank.precedes`);
* the actions of a sequence before x are a sum of booleans; the W of a stage before x a whole number (`_Rank.counts`);
* if x comes before y, start(y) >= start(x) + all that lies between: the difference of their counts, times the costs. So
  each implication speaks of a whole stretch of work, not of two neighbours alone (`_Rank.merge`);
* the F before x, less the W before x, stay within the limit (`_Rank.bound_memory`);
* start(x) >= the end of what x needs on other ranks + the latency (`_connect`);
* a rank ends after its last I and all W; that is at most the length asked for (`_Rank.end_by`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import floor, lcm
from typing import Any, Literal

from autopart.ir.action import Action, Kind
from autopart.schedules.bound import cheapest
from autopart.schedules.problem import Problem
from autopart.schedules.rows import Row

MAIN = (Kind.F, Kind.I)

Queue = tuple[Kind, int]
"""The actions of one kind at one stage, in the order of microbatches."""


class Question:
    """The question of one problem, which can be asked for ever shorter schedules."""

    def __init__(self, problem: Problem) -> None:
        import z3

        self.problem = problem
        self.times = _whole_times(problem)
        self.solver = z3.Solver()
        self.ranks = [_Rank(z3, self.solver, problem, self.times, stages) for stages in problem.held]
        starts = {action: start for rank in self.ranks for action, start in rank.starts.items()}
        _connect(self.solver, problem, self.times, starts)

    def shorter(self, length: float, seconds: float) -> tuple[Row, ...] | Literal["none", "unknown"]:
        """Rows whose length is below `length`; "none" where there are none; "unknown" where `seconds` do not suffice.

        A backward counts as the cheapest that it can be (`bound.cheapest`), so where B costs less than I + W the rows
        can be longer than was asked for, while "none" holds all the same.
        """
        most = floor(Fraction(length) * self.times.scale * (1 - Fraction(1, 10**9)))
        for rank in self.ranks:
            head = self.times.head(self.problem, rank.stages[0]) if self.problem.per_rank else 0
            rank.end_by(most + head)
        self.solver.set("timeout", max(1, int(seconds * 1000)))
        answer = str(self.solver.check())
        if answer == "sat":
            return tuple(rank.row(self.solver.model()) for rank in self.ranks)
        return "none" if answer == "unsat" else "unknown"


@dataclass(frozen=True, slots=True)
class _Times:
    """All times as whole numbers, in units of 1 / scale."""

    scale: int
    cost: dict[Kind, list[int]]
    comm: int

    def hop(self, problem: Problem, stage: int) -> int:
        return self.comm if problem.place[stage] != problem.place[stage + 1] else 0

    def head(self, problem: Problem, stage: int) -> int:
        return sum(self.cost[Kind.F][before] + self.hop(problem, before) for before in range(stage))


def _whole_times(problem: Problem) -> _Times:
    inputs, rest = cheapest(problem)
    exact = {
        kind: [Fraction(repr(float(time))) for time in times]
        for kind, times in ((Kind.F, problem.costs[Kind.F]), (Kind.I, inputs), (Kind.W, rest))
    }
    comm = Fraction(repr(float(problem.comm)))
    scale = lcm(comm.denominator, *(time.denominator for times in exact.values() for time in times))
    return _Times(
        scale, {kind: [int(time * scale) for time in times] for kind, times in exact.items()}, int(comm * scale)
    )


def _connect(solver: Any, problem: Problem, times: _Times, starts: dict[Action, Any]) -> None:
    """Values pass from stage to stage; the first forwards start as early as they can."""
    last = len(problem.place) - 1
    for action, start in starts.items():
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F and stage:
            need, hop = Action(Kind.F, stage - 1, microbatch), times.hop(problem, stage - 1)
        elif action.kind is Kind.I and stage < last:
            need, hop = Action(Kind.I, stage + 1, microbatch), times.hop(problem, stage)
        elif action.kind is Kind.I:
            need, hop = Action(Kind.F, stage, microbatch), 0
        else:
            solver.add(start >= 0)
            continue
        solver.add(start >= starts[need] + times.cost[need.kind][need.stage] + hop)


class _Rank:
    """One rank: its variables, and what holds among its own actions."""

    def __init__(self, z3: Any, solver: Any, problem: Problem, times: _Times, stages: tuple[int, ...]) -> None:
        self.z3 = z3
        self.solver = solver
        self.problem = problem
        self.cost = times.cost
        self.stages = stages
        self.queues: list[Queue] = [(kind, stage) for kind in MAIN for stage in stages]
        order = range(problem.microbatches)
        self.actions = [Action(kind, stage, k) for kind, stage in self.queues for k in order]
        self.starts = {action: z3.Int(f"start {action}") for action in self.actions}
        self.booleans: dict[tuple[Action, Action], Any] = {}
        self.counts = {action: self.count(action) for action in self.actions}
        self.merge()
        self.bound_memory()

    def precedes(self, x: Action, y: Action) -> Any:
        """Whether x comes before y, an action of another queue: True, False or a boolean variable."""
        if _must(x, y):
            return True
        if _must(y, x):
            return False
        if (y, x) in self.booleans:
            return self.z3.Not(self.booleans[y, x])
        return self.booleans.setdefault((x, y), self.z3.Bool(f"{x} before {y}"))

    def count(self, action: Action) -> dict[Queue, Any]:
        """The actions of each queue, W too, before this one."""
        counts: dict[Queue, Any] = {(action.kind, action.stage): action.microbatch}
        for kind, stage in self.queues:
            if (kind, stage) not in counts:
                counts[kind, stage] = self._total(self.precedes(x, action) for x in self._of((kind, stage)))
        for stage in self.stages:
            counts[Kind.W, stage] = counts[Kind.I, stage]
            if not self.problem.whole:
                counts[Kind.W, stage] = weights = self.z3.Int(f"W of {stage} before {action}")
                self.solver.add(weights >= 0, weights <= counts[Kind.I, stage])
        return counts

    def merge(self) -> None:
        """Of any two actions one comes first, and all that lies between them takes its time."""
        for queue in self.queues:
            for x, y in pairwise(self._of(queue)):
                self.solver.add(self._between(x, y))
        for one, other in combinations(self.queues, 2):
            for x, y in product(self._of(one), self._of(other)):
                ordered = self.precedes(x, y)
                if ordered is not False:
                    self.solver.add(self._implied(ordered, self._between(x, y)))
                if ordered is not True:
                    self.solver.add(self._implied(self.precedes(y, x), self._between(y, x)))
        first = Action(Kind.F, self.stages[0], 0)
        for action in self.actions:
            if action != first:
                self.solver.add(self._between(first, action))

    def bound_memory(self) -> None:
        for action in self.actions:
            if action.kind is Kind.F:
                counts = self.counts[action]
                held = sum(counts[Kind.F, stage] - counts[Kind.W, stage] for stage in self.stages)
                self.solver.add(held + 1 <= self.problem.limit)

    def end_by(self, time: int) -> None:
        """All that comes after any action is done by this time."""
        whole = self.problem.microbatches * sum(
            self.cost[kind][stage] for kind in (*MAIN, Kind.W) for stage in self.stages
        )
        for action in self.actions:
            self.solver.add(self.starts[action] + whole - self._work(action) <= time)

    def row(self, model: Any) -> Row:
        """The row that a model describes, each W as late as its count allows."""

        def value(term: Any) -> int:
            return term if isinstance(term, int) else int(model.eval(term, model_completion=True).as_long())

        found = {
            action: {queue: value(term) for queue, term in counts.items()} for action, counts in self.counts.items()
        }
        row: list[Action] = []
        done = dict.fromkeys(self.stages, 0)

        def weights(upto: dict[int, int]) -> None:
            for stage in () if self.problem.whole else self.stages:
                row.extend(Action(Kind.W, stage, k) for k in range(done[stage], upto[stage]))
                done[stage] = upto[stage]

        for action in sorted(found, key=lambda each: sum(found[each][queue] for queue in self.queues)):
            weights({stage: found[action][Kind.W, stage] for stage in self.stages})
            whole = self.problem.whole and action.kind is Kind.I
            row.append(Action(Kind.B, action.stage, action.microbatch) if whole else action)
        weights(dict.fromkeys(self.stages, self.problem.microbatches))
        return tuple(row)

    def _of(self, queue: Queue) -> list[Action]:
        return [action for action in self.actions if (action.kind, action.stage) == queue]

    def _between(self, x: Action, y: Action) -> Any:
        """x comes before y: no count goes down, and what lies between takes its time."""
        grown = [self.counts[y][queue] >= self.counts[x][queue] for queue in self.counts[x]]
        grown.append(self.counts[y][x.kind, x.stage] >= x.microbatch + 1)
        return self.z3.And(
            self.starts[y] >= self.starts[x] + self._work(y) - self._work(x),
            *(each for each in grown if each is not True),
        )

    def _work(self, action: Action) -> Any:
        """The time of all that comes before an action on this rank."""
        return sum(count * self.cost[kind][stage] for (kind, stage), count in self.counts[action].items())

    def _implied(self, condition: Any, conclusion: Any) -> Any:
        return conclusion if condition is True else self.z3.Implies(condition, conclusion)

    def _total(self, terms: Iterable[Any]) -> Any:
        listed = list(terms)
        certain = sum(term is True for term in listed)
        open_ = [self.z3.If(term, 1, 0) for term in listed if not isinstance(term, bool)]
        return certain + self.z3.Sum(open_) if open_ else certain


def _must(x: Action, y: Action) -> bool:
    """Whether x always comes before y, both of one rank."""
    if x.kind is Kind.F:
        return x.microbatch <= y.microbatch and (y.kind is Kind.I or x.stage <= y.stage)
    return y.kind is Kind.I and x.microbatch <= y.microbatch and x.stage >= y.stage
