"""activations: the bytes that outlive the actions of a rank, found by walking its row with what each action keeps.

A storage is counted once a microbatch, however many values are views of it and whichever segments keep it. The
caller's batch, parameters and buffers are not counted: they are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap

from autopart.codegen.chunks import on_their_own
from autopart.codegen.stages import stage_edges, stores_of
from autopart.ir.action import COMPUTE, Kind, Scheduled
from autopart.ir.segmented import Phase, defined
from autopart.ir.staged import Staged
from autopart.passes.costs import copied_inputs
from autopart.rules.alias import roots

Storage = tuple[str, int]
"""A storage: a name unique on the rank and in the microbatch, and its bytes."""

Holder = tuple[str, int, int]
"""What holds values between actions: ("edge", source, target), or what a stage's F ("saved") or I ("stash") kept."""

Kept = dict[Holder, frozenset[Storage]]


def peak_activations(staged: Staged, scheduled: Scheduled, column: int, sizes: Sequence[int], *, whole: bool) -> int:
    """The most bytes that are alive at the end of an action of pp rank `column`.

    `sizes` are the samples of its microbatches; `whole` says that the one microbatch is the whole batch, so that slices
    of the caller's inputs are those inputs.
    """
    here = [stage for stage, place in enumerate(scheduled.schedule.place) if place == column]
    # The front is done here, as the stage that is first then, or elsewhere.
    fronts, others = [s for s in here if staged.is_front(s)], [s for s in here if not staged.is_front(s)]
    done = {a.microbatch for a in scheduled.table[column] if a.kind is Kind.F and a.stage in fronts}
    kept: dict[tuple[int, bool], Kept] = {(size, k in done): {} for k, size in enumerate(sizes)}
    for (size, mine), found in kept.items():
        for copy in range(staged.copies):  # a microbatch travels one copy of the model, and shares nothing with others
            stages = [*fronts * mine, *(stage for stage in others if staged.copy_of(stage) == copy)]
            found.update(_kept(staged, stages, size, whole))
    holders: list[frozenset[Holder]] = [frozenset()] * len(sizes)
    alive = [0] * len(sizes)
    known: dict[tuple[int, bool, frozenset[Holder]], int] = {}
    moves: dict[tuple[Kind, int, int], tuple[frozenset[Holder], frozenset[Holder]]] = {}
    peak = 0
    for action in scheduled.table[column]:
        k, what = action.microbatch, (action.kind, action.stage, action.peer)
        if what not in moves:
            moves[what] = _moves(staged, *what)
        emptied, filled = moves[what]
        holders[k] = (holders[k] - emptied) | filled
        key = sizes[k], k in done, holders[k]
        if key not in known:
            storages = frozenset[Storage]().union(*(kept[sizes[k], k in done][holder] for holder in holders[k]))
            known[key] = sum(nbytes for _, nbytes in storages)
        alive[k] = known[key]
        if action.kind in COMPUTE:
            peak = max(peak, sum(alive))
    return peak


def _moves(staged: Staged, kind: Kind, stage: int, peer: int) -> tuple[frozenset[Holder], frozenset[Holder]]:
    """The holders that an action empties, and those that it fills, for its microbatch."""
    match kind:
        case Kind.SEND:
            return frozenset({_edge(staged, stage, peer)}), frozenset()
        case Kind.RECV:
            return frozenset(), frozenset({_edge(staged, peer, stage)})
        case Kind.F | Kind.B | Kind.I | Kind.W | Kind.S | Kind.T:
            taken, kept = stores_of(staged, stage, kind)
            edges_in, edges_out = stage_edges(staged, stage, kind)
            emptied = [_edge(staged, e.source, e.target) for e in edges_in] + [(taken, stage, stage)] * bool(taken)
            filled = [_edge(staged, e.source, e.target) for e in edges_out] + [(kept, stage, stage)] * bool(kept)
            return frozenset(emptied), frozenset(filled)
        case Kind.OPT:
            return frozenset(), frozenset()
        case _:
            raise AssertionError(f"{kind} in a lowered row")


def _edge(staged: Staged, source: int, target: int) -> Holder:
    """What holds the values of an edge: that of the front where a helper has a copy of it."""
    return "edge", staged.home(source), staged.home(target)


@dataclass(frozen=True, slots=True)
class _Local:
    """What segments with one function share: what they take, hand on and keep, by local name, and its bytes.

    Of a view it is the root.
    """

    inputs: tuple[str, ...]
    gives: tuple[tuple[str, int], ...]
    keeps: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, phase: Phase, batch: int) -> _Local:
        values, root = defined(phase.function), roots(on_their_own(phase.function))

        def sized(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
            found = (root.get(name, name) for name in names)
            return tuple((name, values[name].nbytes(batch)) for name in found)

        given = phase.function.outputs[: len(phase.gives)]
        return cls(tuple(value.name for value in phase.function.inputs), sized(given), sized(phase.keeps or ()))


def _kept(staged: Staged, stages: Sequence[int], batch: int, whole: bool) -> Kept:
    """What each holder of a pp rank keeps of a microbatch of `batch` samples that travels these stages of it."""
    at: dict[str, Storage] = {}  # by value name in the whole graph
    saved: dict[str, list[Storage]] = {}  # by segment: what its forward kept
    kept: Kept = {}
    known: dict[object, _Local] = {}
    homes = {staged.home(stage) for stage in stages}

    def perform(stage: int, kind: Kind) -> None:
        keeps: dict[str, list[Storage]] = {}
        for edge in stage_edges(staged, stage, kind)[0]:
            if staged.home(edge.source) not in homes:
                at.update({v.name: (f"{v.name} at {stage}", v.nbytes(batch)) for v in edge.values})
                kept[_edge(staged, edge.source, stage)] = frozenset(at[v.name] for v in edge.values)
        for segment, phase in staged.phases(stage, kind):
            alike = id(phase.function), len(phase.gives), phase.keeps
            if alike not in known:
                known[alike] = _Local.of(phase, batch)
            local = known[alike]
            keeps[segment.name] = _phase(f"{segment.name} {kind}", phase, local, saved.get(segment.name, ()), at)
        if kind in (Kind.F, Kind.S):
            saved.update(keeps)
        edges_out = stage_edges(staged, stage, kind)[1]
        kept.update({_edge(staged, e.source, e.target): frozenset(at[v.name] for v in e.values) for e in edges_out})
        kept[stores_of(staged, stage, kind)[1], stage, stage] = frozenset(s for each in keeps.values() for s in each)

    order = staged.in_order(stages)
    for stage in order:
        at.update(_inputs(staged, stage, batch, whole))
        perform(stage, staged.kinds(stage)[0])
    for stage in reversed(order):
        for kind in staged.kinds(stage)[1:]:
            if staged.enters(stage, kind):  # what comes after it keeps nothing
                perform(stage, kind)
    return kept


def _inputs(staged: Staged, stage: int, batch: int, whole: bool) -> dict[str, Storage]:
    """The storages of the caller's inputs and gradients: new ones where slices are copies, none of ours elsewhere."""
    captured = staged.segmented.captured
    copied = copied_inputs(captured)
    items = [item.value for item in captured.of_kind("input", "tangent")]
    return {v.name: (f"{v.name} at {stage}", v.nbytes(batch) * (copied[v.name] and not whole)) for v in items}


def _phase(place: str, phase: Phase, local: _Local, kept: Sequence[Storage], at: dict[str, Storage]) -> list[Storage]:
    """The storages that a segment keeps in one phase; those of the values that it hands on are added to `at`.

    `kept` are those that it is given of its forward. Buffers, parameters and the loss's own gradient count nothing.
    """
    nothing = ("", 0)
    given = dict.fromkeys(local.inputs, nothing)
    given.update(zip(local.inputs, [*(at.get(name, nothing) for name in phase.takes), *kept], strict=False))

    def storage(name: str, nbytes: int) -> Storage:
        return given.get(name) or (f"{place}:{name}", nbytes)

    at.update(zip(phase.gives, starmap(storage, local.gives), strict=True))
    return [*starmap(storage, local.keeps)]
