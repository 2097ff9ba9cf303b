"""The world that a rank's text is given to run on shapes, and its stores, which note what is asked of them.

Shapes remember the microbatch that they belong to, so a value that reaches another microbatch's work is refused where
that happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopart.codegen.exchange import Exchange
from autopart.codegen.parsed import executing
from autopart.codegen.recording_batch import RecordingBatch
from autopart.codegen.shapes import Shape, Spec, joined, shown
from autopart.ir.action import Action, Kind
from autopart.ir.dealing import How
from autopart.ir.state import State, Unit, Units, names_of


@dataclass(frozen=True, slots=True)
class Event:
    """One call of the world by a text.

    `call` is the method. `action` is what a schedule calls it, None for what schedules do not name (reading parameters,
    accumulating, making outputs whole); `within` is the compute action around it. `what` are the shapes sent, expected,
    accumulated or brought together; `axis` and `stages` say who takes part; `line` is the line of the text; `buffers`
    are those that are updated or made one; `exchange` is a collective on values inside a body. A collective that moves
    several units is an event for each of them, which are `together`. `version` is that of the weights which an action
    of a loop uses, or which a step of the optimizer makes; `delay` the steps that it makes up for. `deal` says how what
    is sent or received is dealt between stages of unlike width.
    """

    call: str
    action: Action | None = None
    within: Action | None = None
    unit: str = ""
    what: tuple[Spec | None, ...] = ()
    axis: str = ""
    stages: tuple[int, ...] = ()
    line: int = 0
    buffers: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    exchange: Exchange | None = None
    version: int = -1
    delay: int = 0
    deal: tuple[How, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a body: the `function`, the action around it, what it was given, the line, its collectives."""

    function: str
    within: Action | None
    given: tuple[Spec, ...]
    line: int
    exchanges: tuple[Exchange, ...] = ()


class RecordingStore(dict[int, Any]):
    """Values by microbatch, each to be put in and taken out once; `lines` is where they were put in."""

    def __init__(self, world: RecordingWorld) -> None:
        self.world = world
        self.lines: dict[int, int] = {}

    def __setitem__(self, k: int, value: Any) -> None:
        if k in self:
            raise TypeError(f"what line {self.lines[k]} stored for microbatch {k} is overwritten before it was taken")
        self.lines[k] = self.world.line()
        super().__setitem__(k, value)

    def __getitem__(self, k: int) -> Any:
        raise TypeError("a stored value is read without being taken; take it with .pop, once")

    def pop(self, k: int) -> Any:  # type: ignore[override]
        """Take a value out."""
        if k not in self:
            raise TypeError(f"nothing is stored for microbatch {k}: it was never made or received, or was taken before")
        value = super().pop(k)
        if isinstance(value, list):
            self.world.lists.append((self.lines[k], value))
        return value


@dataclass
class RecordingWorld:
    """Takes the place of a rank's world; `events` is what it saw. `shares` are the samples of each data rank, `part`
    is this one's place among them.

    `places` are the places on axes that split the tensors inside segments. Where pipeline ranks differ in width,
    `widths` has by stage the samples of each of its data ranks, and `part` is this one's place among those of its own
    stages.
    """

    state: State
    shares: Sequence[int]
    part: int
    buffers: Mapping[str, Spec]
    places: Mapping[str, int] = field(default_factory=dict)
    tangents: Mapping[str, Spec] = field(default_factory=dict)  # the gradients of outputs that the step is sent
    widths: Mapping[int, Sequence[int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stores: list[RecordingStore] = field(default_factory=list)
    lists: list[tuple[int, list[Any]]] = field(default_factory=list)  # taken out of stores
    wholes: dict[str, tuple[Spec, ...]] = field(default_factory=dict)  # of units, as far as they were asked for
    gathering: tuple[str, ...] = ()  # the units that are being gathered ahead of their use
    gathered_here: list[str] = field(default_factory=list)  # those that are there, to be used
    kept: dict[str, tuple[Spec | None, ...]] = field(default_factory=dict)  # gradients of a microbatch, by unit
    here: Action | None = None
    file: str = ""
    batch: RecordingBatch = field(default_factory=lambda: RecordingBatch({}, (), 0))

    def store(self) -> RecordingStore:
        """A place for values that outlive the action that made them."""
        self.stores.append(RecordingStore(self))
        return self.stores[-1]

    @contextlib.contextmanager
    def action(self, kind: str, *, stage: int, microbatch: int) -> Iterator[None]:
        """A compute action; what is recorded inside belongs to it."""
        if self.here is not None:
            raise TypeError(f"action {stage}{kind}{microbatch} begins inside {self.here}")
        self.here = Action(Kind(kind), stage, microbatch)
        self._add("action", self.here)
        yield
        if unused := (*self.gathering, *self.gathered_here):
            raise TypeError(f"{unused[0]!r} is gathered and not used")
        if self.kept:
            raise TypeError(f"gradients of {next(iter(self.kept))!r} are kept and not reduced")
        self.here = None

    def parameters(self, unit: str) -> tuple[Spec, ...]:
        """The whole parameters of a unit."""
        self._add("parameters", unit=unit)
        return self._whole(unit)

    def all_gather(self, units: Units, *, axis: str, then: Units = ()) -> tuple[Spec, ...]:
        """Gather parameters for one use, and begin to gather those of the units `then`, which are used next.

        Those of one unit are returned; of several, each is asked for by `gathered`.
        """
        names, following = names_of(units), names_of(then)
        if self.gathering not in ((), names):
            asked, begun = (" and ".join(map(repr, each)) for each in (names, self.gathering))
            raise TypeError(f"{asked} is gathered where {begun} was begun to be")
        alone = isinstance(units, str)
        if self.gathering and alone:
            self._add("gathered", unit=names[0], axis=axis)
        elif not self.gathering:
            self._collective("all_gather" if alone else "prefetch", Kind.GATHER, names, axis)
        if following:
            self._collective("prefetch", Kind.GATHER, following, axis)
        self.gathering = following
        if alone:
            return self._whole(names[0])
        self.gathered_here += names
        return ()

    def gathered(self, unit: str) -> tuple[Spec, ...]:
        """The parameters of one of several units that were gathered, for one use."""
        if unit not in self.gathered_here:
            raise TypeError(f"{unit!r} is used and was not gathered")
        self.gathered_here.remove(unit)
        self._add("gathered", unit=unit, axis="dp")
        return self._whole(unit)

    def regather(self, unit: str, *, axis: str) -> None:
        """Make a unit whole again after an optimizer step on parts."""
        self._collective("regather", Kind.GATHER, (unit,), axis)

    def accumulate(self, unit: str, grads: Sequence[Spec | None]) -> None:
        """Add gradients to the unit's."""
        self._check(unit, grads)
        self._add("accumulate", unit=unit, what=tuple(grads))

    def keep(self, unit: str, grads: Sequence[Spec | None]) -> None:
        """Keep gradients of this microbatch until those of other units can be reduced with them."""
        self._check(unit, grads)
        if unit in self.kept:
            raise TypeError(f"gradients of {unit!r} are kept again before they were reduced")
        self.kept[unit] = tuple(grads)

    def reduce_scatter(self, units: Units, grads: Sequence[Spec | None] | None = None, *, axis: str) -> None:
        """Begin to reduce gradients to parts: `grads` if given, else those kept, else those accumulated."""
        names = names_of(units)
        if grads is not None:
            self.keep(names[0], grads)
        self._collective("reduce_scatter", Kind.REDUCE, names, axis, what=[self.kept.pop(n, ()) for n in names])

    def all_reduce(self, units: Units, *, axis: str, stages: Sequence[int] = ()) -> None:
        """Begin to reduce gradients, whole on every rank."""
        self._collective("all_reduce", Kind.REDUCE, names_of(units), axis, tuple(stages))

    def wait(self) -> None:
        """Wait for the reductions that were begun."""
        self._add("wait")

    def summed(self, value: Spec, *, axis: str) -> Spec:
        """A sum over an axis of what each rank computed from its own samples."""
        if not value.own:
            raise TypeError("what is summed is not of this data rank's samples alone: it is whole already")
        whole = replace(value, own=False)
        self._add("summed", what=(whole,), axis=axis)
        return whole

    def buffer(self, name: str) -> Spec:
        """A buffer or constant."""
        self._buffers((name,))
        return replace(self.buffers[name], source=("buffer", name))

    def update_buffer(self, name: str, value: Spec) -> None:
        """Give a buffer a new value."""
        self._buffers((name,))
        if value != self.buffers[name]:
            raise TypeError(f"the buffer {name} is {shown([self.buffers[name]])}, its new value {shown([value])}")
        self.owner([value])
        self._add("update_buffer", what=(value,), buffers=(name,))

    def average_buffers(self, *names: str, axis: str) -> None:
        """Average buffers over an axis."""
        self._buffers(names)
        self._add("average_buffers", axis=axis, buffers=names)

    def maximum_buffers(self, *names: str, axis: str) -> None:
        """Make buffers the largest over an axis."""
        self._buffers(names)
        self._add("maximum_buffers", axis=axis, buffers=names)

    def broadcast_buffers(self, *names: str, stage: int) -> None:
        """Give every stage the buffers of one."""
        self._buffers(names)
        self._add("broadcast_buffers", axis="pp", stages=(stage,), buffers=names)

    def send(self, values: Sequence[Spec], *, stage: int, to: int, microbatch: int, deal: Sequence[How] = ()) -> None:
        """Send an edge's values."""
        self._own(values, microbatch)
        self._add("send", Action(Kind.SEND, stage, microbatch, peer=to), what=tuple(values), deal=tuple(deal))

    def recv(
        self,
        like: Sequence[tuple[Shape, torch.dtype]],
        *,
        stage: int,
        source: int,
        microbatch: int,
        deal: Sequence[How] = (),
    ) -> tuple[Spec, ...]:
        """Receive an edge's values."""
        self._own([size for shape, _ in like for size in shape], microbatch)
        specs = tuple(
            Spec(tuple(map(int, shape)), dtype, microbatch, source=("edge", f"{source} {stage} {i}"))
            for i, (shape, dtype) in enumerate(like)
        )
        self._add("recv", Action(Kind.RECV, stage, microbatch, peer=source), what=specs, deal=tuple(deal))
        return specs

    def total(self, parts: Sequence[Spec], *, shape: Shape, dtype: torch.dtype) -> Spec:
        """A sum over microbatches and ranks."""
        whole = Spec(tuple(shape), dtype)
        if any(part != whole for part in parts):
            raise TypeError(f"parts of shapes {shown(parts)} are summed as {shown([whole])}")
        self._add("total", what=(whole, *parts), axis="world")
        return replace(whole, parts=tuple(parts))

    def joined(self, parts: Mapping[int, Spec], *, dim: int | None) -> Spec:
        """This rank's microbatches in order along `dim`; with None, the first stands for all."""
        count = len(self.batch.sizes)
        if sorted(parts) != list(range(count)):
            raise TypeError(f"an output has parts of the microbatches {sorted(parts)}, not of all {count}")
        for k in range(count):
            self._own([parts[k]], k)
        ordered = tuple(parts[k] for k in range(count))
        return replace(joined(ordered, dim), parts=ordered)

    def everywhere(
        self,
        parts: Mapping[int, Spec] | None,
        *,
        stage: int,
        dim: int | None,
        like: Callable[[int], tuple[Shape, torch.dtype]],
    ) -> Spec:
        """An output brought to every rank from the data ranks of its stage."""
        shares = [Spec(*like(share)) for share in self.widths.get(stage, self.shares)]
        mine = None if parts is None else self.joined(parts, dim=dim)
        if mine is not None and mine != shares[self.part]:
            raise TypeError(
                f"an output of shape {shown([mine])} goes to ranks that expect {shown([shares[self.part]])}"
            )
        self._add("everywhere", what=tuple(shares), axis="world", stages=(stage,))
        return replace(joined(shares, dim), parts=() if mine is None else mine.parts)

    def line(self) -> int:
        """The line of the text that is being executed, the innermost."""
        return executing(self.file)

    def owner(self, values: Iterable[Any]) -> int | None:
        """The one microbatch that values belong to, None if to none; TypeError if it is not that of the action."""
        found: set[int] = set()
        for value in values:
            if isinstance(value, Spec) and value.whole:
                raise TypeError(
                    f"{shown([value])} of the whole batch is used for a microbatch; take its piece with batch.cut"
                )
            if (mark := getattr(value, "microbatch", None)) is not None:
                found.add(mark)
        if len(found) > 1 or (self.here is not None and not found <= {self.here.microbatch}):
            where = f" in {self.here}" if self.here is not None else ""
            raise TypeError(f"values of microbatch {' and '.join(map(str, sorted(found)))} are used together{where}")
        return next(iter(found), None)

    def exchanged(self, exchanges: Iterable[Exchange], first: int) -> None:
        """Note the collectives of a body, whose text begins at line `first`."""
        for each in exchanges:
            name = f"{each.kind}_values"
            self.events.append(Event(name, None, self.here, axis=each.axis, line=first + each.line, exchange=each))

    def _own(self, values: Iterable[Any], k: int) -> None:
        for value in values:
            if getattr(value, "microbatch", None) not in (None, k):
                raise TypeError(f"what belongs to microbatch {value.microbatch} is passed on as microbatch {k}")

    def _add(self, call: str, action: Action | None = None, **details: Any) -> None:
        self.events.append(Event(call, action, self.here, line=self.line(), **details))

    def _collective(
        self,
        call: str,
        kind: Kind,
        units: tuple[str, ...],
        axis: str,
        stages: tuple[int, ...] = (),
        what: Sequence[tuple[Spec | None, ...]] = (),
    ) -> None:
        stage, microbatch = (self.here.stage, self.here.microbatch) if self.here is not None else (-1, -1)
        for unit, given in zip(units, what or [()] * len(units), strict=True):
            self._unit(unit)
            action = Action(kind, stage, microbatch, unit=unit)
            self._add(call, action, unit=unit, what=given, axis=axis, stages=stages, together=units)

    def _buffers(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self.buffers]:
            raise TypeError(f"no buffer is called {unknown[0]!r}")

    def _unit(self, name: str) -> Unit:
        for unit in self.state.units:
            if unit.name == name:
                return unit
        raise TypeError(f"no unit is called {name!r}")

    def _whole(self, unit: str) -> tuple[Spec, ...]:
        if unit not in self.wholes:
            self.wholes[unit] = tuple(
                Spec(p.shape, p.dtype, source=("parameter", p.target)) for p in self._unit(unit).parameters
            )
        return self.wholes[unit]

    def _check(self, unit: str, grads: Sequence[Spec | None]) -> None:
        whole = self._whole(unit)
        if len(grads) != len(whole) or any(g is not None and g != p for g, p in zip(grads, whole, strict=True)):
            raise TypeError(f"gradients of {unit} have the shapes {shown(grads)}, its parameters {shown(whole)}")
        self.owner(grads)
