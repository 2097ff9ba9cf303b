"""activations: the bytes that outlive the actions of a rank, found by walking its row with what each action keeps.

A storage is counted once a microbatch, however many values are views of it and whichever segments keep it. The
caller's batch, parameters and buffers are not counted: they are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.action import Action, Kind, Scheduled
from autopart.ir.graph import Value
from autopart.ir.segmented import Function, Segment
from autopart.ir.staged import Edge, Staged
from autopart.passes.costs import copied_inputs, defined
from autopart.rules.alias import roots

Storage = tuple[str, int]
"""A storage: a name unique on the rank and in the microbatch, and its bytes."""

Holder = tuple[int, int]
"""What holds values between actions: an edge as (source, target), what a stage saved as (stage, stage)."""

Kept = dict[Holder, frozenset[Storage]]


def peak_activations(staged: Staged, scheduled: Scheduled, column: int, sizes: Sequence[int], *, whole: bool) -> int:
    """The most bytes that are alive at the end of an action of pp rank `column`.

    `sizes` are the samples of its microbatches; `whole` says that the one microbatch is the whole batch, so that slices
    of the caller's inputs are those inputs.
    """
    kept = {size: _kept(staged, scheduled.schedule.place, column, size, whole) for size in set(sizes)}
    holders: list[frozenset[Holder]] = [frozenset()] * len(sizes)
    alive = [0] * len(sizes)
    known: dict[tuple[int, frozenset[Holder]], int] = {}
    peak = 0
    for action in scheduled.table[column]:
        k = action.microbatch
        emptied, filled = _moves(staged, action)
        holders[k] = (holders[k] - emptied) | filled
        key = sizes[k], holders[k]
        if key not in known:
            found = kept[sizes[k]]
            known[key] = sum(nbytes for _, nbytes in frozenset[Storage]().union(*(found[h] for h in holders[k])))
        alive[k] = known[key]
        if action.kind in (Kind.F, Kind.B):
            peak = max(peak, sum(alive))
    return peak


def _moves(staged: Staged, action: Action) -> tuple[frozenset[Holder], frozenset[Holder]]:
    """The holders that an action empties, and those that it fills, for its microbatch."""
    stage, peer = action.stage, action.peer
    match action.kind:
        case Kind.SEND:
            return frozenset({(stage, peer)}), frozenset()
        case Kind.RECV:
            return frozenset(), frozenset({(peer, stage)})
        case Kind.F | Kind.B:
            forward = action.kind is Kind.F
            saved = {(stage, stage)}
            taken = {(edge.source, stage) for edge in staged.into(stage, forward=forward)}
            given = {(stage, edge.target) for edge in staged.out_of(stage, forward=forward)}
            return frozenset(taken if forward else taken | saved), frozenset(given | saved if forward else given)
        case _:
            raise AssertionError(f"{action} in a lowered row")


@dataclass(frozen=True, slots=True)
class _Local:
    """The values of one function by local name, and the root of each that is a view."""

    values: Mapping[str, Value]
    root: Mapping[str, str]

    @classmethod
    def of(cls, function: Function) -> _Local:
        return cls(defined(function), roots(function.nodes))

    def storages(self, names: Iterable[str], given: Mapping[str, Storage], place: str, batch: int) -> list[Storage]:
        """The storage of each name; `given` has those of the function's inputs, `place` makes the names of new ones."""
        found = [self.root.get(name, name) for name in names]
        return [given[r] if r in given else (f"{place}:{r}", self.values[r].nbytes(batch)) for r in found]


def _kept(staged: Staged, places: Sequence[int], column: int, batch: int, whole: bool) -> Kept:
    """What each holder of a pp rank keeps of a microbatch of `batch` samples."""
    stages = [stage for stage, place in enumerate(places) if place == column]
    at: dict[str, Storage] = {}  # by value name in the whole graph
    saved: dict[str, list[Storage]] = {}  # by segment
    kept: Kept = {}

    def receive(edges: Sequence[Edge], stage: int) -> None:
        for edge in edges:
            if places[edge.source] != column:
                at.update({v.name: (f"{v.name} at {stage}", v.nbytes(batch)) for v in edge.values})
                kept[edge.source, stage] = frozenset(at[v.name] for v in edge.values)

    def hand_on(edges: Sequence[Edge]) -> None:
        kept.update({(e.source, e.target): frozenset(at[v.name] for v in e.values) for e in edges})

    forward = [_Local.of(body.forward) for body in staged.segmented.bodies]
    backward = [None if body.backward is None else _Local.of(body.backward) for body in staged.segmented.bodies]
    for stage in stages:
        at.update(_inputs(staged, stage, batch, whole))
        receive(staged.into(stage, forward=True), stage)
        for segment in staged.stages[stage]:
            saved[segment.name] = _forward(staged, segment, forward[segment.body], at, batch)
        kept[stage, stage] = frozenset(s for segment in staged.stages[stage] for s in saved[segment.name])
        hand_on(staged.out_of(stage, forward=True))
    for stage in reversed(stages):
        receive(staged.into(stage, forward=False), stage)
        for segment in reversed(staged.stages[stage]):
            local = backward[segment.body]
            if local is not None:
                _backward(staged, segment, local, saved[segment.name], at, batch)
        hand_on(staged.out_of(stage, forward=False))
    return kept


def _inputs(staged: Staged, stage: int, batch: int, whole: bool) -> dict[str, Storage]:
    """The storages of the caller's inputs and gradients: new ones where slices are copies, none of ours elsewhere."""
    captured = staged.segmented.captured
    copied = copied_inputs(captured)
    items = [item.value for item in captured.of_kind("input", "tangent")]
    return {v.name: (f"{v.name} at {stage}", v.nbytes(batch) * (copied[v.name] and not whole)) for v in items}


def _forward(staged: Staged, segment: Segment, local: _Local, at: dict[str, Storage], batch: int) -> list[Storage]:
    """The storages that a segment saves; those of its outputs are added to `at`."""
    body, place = staged.segmented.bodies[segment.body], f"{segment.name} forward"
    given = {value.name: ("", 0) for value in body.forward.inputs}  # buffers and parameters
    given.update(zip((v.name for v in body.forward.inputs), (at[name] for name in segment.values), strict=False))
    outputs = body.forward.outputs[: len(segment.outputs)]
    at.update(zip(segment.outputs, local.storages(outputs, given, place, batch), strict=True))
    return local.storages(body.saved, given, place, batch)


def _backward(
    staged: Staged, segment: Segment, local: _Local, saved: Sequence[Storage], at: dict[str, Storage], batch: int
) -> None:
    """Add to `at` the storages of the gradients that a segment hands on."""
    function = staged.segmented.bodies[segment.body].backward
    assert function is not None
    given = {value.name: ("", 0) for value in function.inputs}  # the loss's own gradient too
    incoming = [at.get(name, ("", 0)) for name in segment.backward_inputs]
    given.update(zip((v.name for v in function.inputs), (*incoming, *saved), strict=False))
    outputs = function.outputs[: len(segment.backward_outputs)]
    made = local.storages(outputs, given, f"{segment.name} backward", batch)
    at.update(zip(segment.backward_outputs, made, strict=True))
