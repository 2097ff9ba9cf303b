"""The world as a rank's program sees it: collectives by unit and axis, sends by stage, measurements."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.errors import AutopartError, RankFailure
from autopart.ir.action import Kind
from autopart.ir.dealing import How
from autopart.ir.mesh import Mesh, Span
from autopart.ir.state import Units, names_of
from autopart.runtime.batch import Batch
from autopart.runtime.buffers import Buffers
from autopart.runtime.dealing import in_order, incoming, outgoing
from autopart.runtime.flat import flat, unflat
from autopart.runtime.measure import Log, Memory, Store
from autopart.runtime.states import States
from autopart.runtime.transport import Arriving, Pending, Transport
from autopart.runtime.values import ValueCollectives

_AWAITS: Mapping[str, tuple[bool, ...]] = {Kind.S: (True,)}
"""Of which messages an action waits for the arrival: those from earlier stages (or later ones); all, if not here.

What is begun to be received for a stage's microbatch is for its next action there, but for S, which T comes after.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A reduction of some units' gradients that the text called and that is held back."""

    units: tuple[str, ...]
    axis: str
    stages: tuple[int, ...] = ()
    scatter: bool = True


@dataclass(frozen=True, slots=True)
class _Begun:
    """A reduction on its way: bytes of its buffer, those of them that are gradients of the step, and how it ends."""

    nbytes: int
    gradients: int
    finish: Callable[[], None]


class World(ValueCollectives):
    """One rank's world for one step of one program. See `autopart.codegen` for the text that calls it."""

    def __init__(
        self,
        transport: Transport,
        mesh: Mesh,
        place: Sequence[int],
        states: States,
        buffers: Mapping[str, torch.Tensor],
        batch: Batch,
        *,
        hold: bool = False,
        ended: Callable[[World], None] | None = None,
    ) -> None:
        """With `hold`, reductions are noted in `held` rather than performed, until `release`.

        `ended` is called once all gradients are there, before the rank meets all others for what the step leaves.
        """
        self._ended = ended
        self.held: list[Held] | None = [] if hold else None
        self.transport, self.mesh, self.place = transport, mesh, tuple(place)
        self.states, self.buffers, self.batch = states, Buffers(buffers), batch
        self.memory = Memory(states, (*buffers.values(), *batch.given()))
        self.log = Log()
        self.here = mesh.coordinate(transport.rank)
        self._gathering: dict[tuple[str, ...], Pending[torch.Tensor]] = {}
        self._gathered: dict[str, Sequence[torch.Tensor]] = {}
        self._kept: dict[str, Sequence[torch.Tensor | None]] = {}
        self._arriving: dict[tuple[int, int, bool], list[Arriving]] = {}  # by stage, microbatch, if from before
        self._begun: deque[_Begun] = deque()

    # What outlives an action

    def store(self) -> Store:
        """A place for values that outlive the action that made them; its bytes are counted."""
        return self.memory.store()

    @contextlib.contextmanager
    def action(self, kind: str, *, stage: int, microbatch: int) -> Iterator[None]:
        """A compute action, once what it receives is there: logged with its times, named in whatever goes wrong."""
        for onward in _AWAITS.get(kind, (True, False)):
            for arriving in self._arriving.pop((stage, microbatch, onward), ()):
                arriving.wait()
        start = time.perf_counter()
        try:
            yield
        except AutopartError:
            raise
        except Exception as error:
            raise RankFailure(
                f"rank {self.transport.rank}, stage {stage}, microbatch {microbatch}, action {kind}: "
                f"{type(error).__name__}: {error}{_user_line(error)}"
            ) from error
        self.log.add(f"{stage}{kind}{microbatch}", start, time.perf_counter())
        self.memory.sample(sum(begun.gradients for begun in self._begun))

    # Parameters and gradients

    def parameters(self, unit: str) -> Sequence[torch.Tensor]:
        """The whole parameters of a unit that this rank keeps."""
        return self.states.whole[unit]

    def all_gather(self, units: Units, *, axis: str, then: Units = ()) -> Sequence[torch.Tensor]:
        """Whole parameters, gathered from the parts for one use; those of the units `then`, used next, begin to be.

        Those of one unit are returned; of several, each is asked for by `gathered`.
        """
        names, following = names_of(units), names_of(then)
        whole = (self._gathering.pop(names, None) or self._begin_gather(names, axis)).wait()
        if following:
            self._gathering[following] = self._begin_gather(following, axis)
        ahead = sum(self.states.units[name].wire_bytes(self.states.degree) for name in following)
        self.memory.transient(whole.nbytes + ahead)
        made = self.states.unpacked([self.states.units[name] for name in names], whole)
        if isinstance(units, str):
            return made[0]
        self._gathered.update(zip(names, made, strict=True))
        return ()

    def gathered(self, unit: str) -> Sequence[torch.Tensor]:
        """The whole parameters of one of several units that were gathered together, for one use."""
        return self._gathered.pop(unit)

    def _begin_gather(self, names: tuple[str, ...], axis: str) -> Pending[torch.Tensor]:
        packed = self.states.packed([self.states.units[name] for name in names])
        return self.transport.begin_all_gather(packed, self._group(axis))

    def regather(self, unit: str, *, axis: str) -> None:
        """Refill the whole parameters that this rank keeps from the parts that the optimizer updated."""
        found = self.states.units[unit]
        self.states.refill(found, self.transport.all_gather(self.states.packed([found]), self._group(axis)))

    def accumulate(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those of the step."""
        self.states.add(unit, grads)

    def keep(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of this microbatch until those of other units can be reduced with them."""
        self._kept[unit] = grads

    def reduce_scatter(self, units: Units, grads: Sequence[torch.Tensor | None] | None = None, *, axis: str) -> None:
        """Begin to sum gradients over an axis, each rank keeping its part.

        They are `grads` (of one unit) if given, else those that are kept of these units, else those accumulated.
        """
        names = names_of(units)
        if grads is not None:
            self.keep(names[0], grads)
        fresh = [self._kept.pop(name) for name in names if name in self._kept]
        if self.held is not None:
            self._hold(Held(names, axis), fresh)
            return
        found = [self.states.units[name] for name in names]
        whole = self.states.scattered(found, fresh or [self.states.take(unit) for unit in found])
        begun = self.transport.begin_reduce_scatter(whole, self._group(axis))
        if fresh:  # whole gradients of several buckets at a time are what parts are to avoid
            self._finish(all_but=1)
        held = 0 if fresh else sum(unit.nbytes for unit in found)
        self._begin(whole, held, lambda: self.states.add_parts(found, begun.wait()))

    def all_reduce(self, units: Units, *, axis: str, stages: Sequence[int] = ()) -> None:
        """Begin to sum accumulated gradients over an axis, or the ranks of some stages, on every rank."""
        names = names_of(units)
        if self.held is not None:
            self._hold(Held(names, axis, tuple(stages), scatter=False))
            return
        group = self._stage_group(stages) if stages else self._group(axis)
        if len(group) == 1:
            return
        each = [self.states.take_filled(self.states.units[name]) for name in names]
        shapes = [[tensor.shape for tensor in tensors] for tensors in each]
        whole = flat(tensor for tensors in each for tensor in tensors)
        begun = self.transport.begin_all_reduce(whole, group)

        def finish() -> None:
            summed = iter(unflat(begun.wait(), [shape for own in shapes for shape in own]))
            for name, own in zip(names, shapes, strict=True):
                self.states.add(name, [next(summed) for _ in own])

        self._begin(whole, whole.nbytes, finish)

    def wait(self) -> None:
        """Until every reduction that was begun is done, and its result among the gradients."""
        self._finish(all_but=0)
        self.memory.sample()

    def _begin(self, buffer: torch.Tensor, gradients: int, finish: Callable[[], None]) -> None:
        self._begun.append(_Begun(buffer.nbytes, gradients, finish))
        self.memory.transient(sum(begun.nbytes - begun.gradients for begun in self._begun))

    def _finish(self, *, all_but: int) -> None:
        while len(self._begun) > all_but:
            self._begun.popleft().finish()

    def _hold(self, reduction: Held, fresh: Sequence[Sequence[torch.Tensor | None]] = ()) -> None:
        """Note a reduction, once however many microbatches call it, and accumulate what is `fresh`, by unit."""
        assert self.held is not None
        for unit, grads in zip(reduction.units, fresh, strict=False):
            self.states.add(unit, grads)
        if reduction not in self.held:
            self.held.append(reduction)

    def release(self) -> None:
        """Perform the reductions that were held, in the text's order, on what is accumulated now."""
        held, self.held = self.held or [], None
        for reduction in held:
            if reduction.stages:  # of the parts that the reductions before it make
                self.wait()
            if reduction.scatter:
                self.reduce_scatter(reduction.units, axis=reduction.axis)
            else:
                self.all_reduce(reduction.units, axis=reduction.axis, stages=reduction.stages)
        self.wait()

    def end(self) -> None:
        """The actions are over and the gradients reduced: what comes now are outputs and buffers."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)

    def summed(self, value: torch.Tensor, *, axis: str) -> torch.Tensor:
        """The sum over an axis of what each rank computed from its own samples, on every rank of it."""
        whole = value.clone()
        self.transport.all_reduce(whole, self._group(axis))
        return whole

    # Buffers

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer or constant by name: the last update of this step, else as it was before the step."""
        return self.buffers[name]

    def update_buffer(self, name: str, value: torch.Tensor) -> None:
        """Give a buffer a new value for the forwards that come after; the caller's own tensor stays as it is."""
        self.buffers.updated[name] = value

    def average_buffers(self, *names: str, axis: str) -> None:
        """Average updated buffers over an axis."""
        self.end()
        self.buffers.average(names, self.transport, self._group(axis))

    def maximum_buffers(self, *names: str, axis: str) -> None:
        """Make updated buffers the largest over an axis, element by element."""
        self.end()
        self.buffers.maximum(names, self.transport, self._group(axis))

    def broadcast_buffers(self, *names: str, stage: int) -> None:
        """Give every stage the updated buffers of one, within each part of the batch."""
        self.end()
        self.buffers.broadcast(names, self.transport, self._rank_of(stage), self._group("pp"))

    # Stage to stage

    def send(
        self, values: Sequence[torch.Tensor], *, stage: int, to: int, microbatch: int, deal: Sequence[How] = ()
    ) -> None:
        """Post an edge's values to the rank of stage `to`; never blocks.

        Where that stage has another number of data ranks, `deal` says how each value is dealt to them.
        """
        if deal:
            here, there = self._spans(stage, microbatch), self._spans(to, microbatch)
            ranks = self.mesh.column(self.place[to])
            for peer, part in outgoing(values, deal, self.here["dp"], here, there):
                self.transport.send(part, ranks[peer])
            return
        for value in values:
            self.transport.send(value.contiguous(), self._rank_of(to))

    def recv(
        self,
        like: Sequence[tuple[tuple[int, ...], torch.dtype]],
        *,
        stage: int,
        source: int,
        microbatch: int,
        deal: Sequence[How] = (),
    ) -> Sequence[torch.Tensor]:
        """Begin to receive an edge's values from the rank of stage `source`; the action that needs them waits.

        Where that stage has another number of data ranks, `deal` says how each value is dealt by them.
        """
        if deal:
            there, here = self._spans(source, microbatch), self._spans(stage, microbatch)
            ranks, transport = self.mesh.column(self.place[source]), self.transport

            def begin(shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Pending[torch.Tensor]:
                return transport.begin_recv(shape, dtype, ranks[peer])

            begun = incoming(like, deal, self.here["dp"], there, here, begin, transport.device)
        else:
            begun = [self.transport.begin_recv(shape, dtype, self._rank_of(source)) for shape, dtype in like]
        arriving = Arriving(begun, sum(math.prod(shape) * dtype.itemsize for shape, dtype in like))
        self._arriving.setdefault((stage, microbatch, source < stage), []).append(arriving)
        return arriving

    def _spans(self, stage: int, microbatch: int) -> tuple[Span, ...]:
        """The samples of a microbatch that each data rank of a stage has."""
        count = len(self.batch.sizes)
        ranks = self.mesh.column(self.place[stage])
        return tuple(self.mesh.spans(rank, self.batch.shares, count)[microbatch] for rank in ranks)

    # Outputs

    def total(self, parts: Sequence[torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The sum over microbatches and over the whole world, on every rank."""
        self.end()
        total = self._added(parts, shape, dtype)
        self.transport.all_reduce(total, tuple(range(self.mesh.size)))
        return total

    def _added(self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        total = torch.zeros(shape, dtype=dtype, device=self.transport.device)
        for part in parts:
            total = total + part
        return total

    def joined(self, parts: Mapping[int, torch.Tensor], *, dim: int | None) -> torch.Tensor:
        """This rank's microbatches in order along `dim`; with None, the first stands for all."""
        ordered = [parts[k] for k in sorted(parts)]
        return ordered[0] if dim is None else torch.cat(ordered, dim=dim)

    def everywhere(
        self,
        parts: Mapping[int, torch.Tensor] | None,
        *,
        stage: int,
        dim: int | None,
        like: Callable[[int], tuple[tuple[int, ...], torch.dtype]],
    ) -> torch.Tensor:
        """The whole output on every rank: the data ranks of its stage broadcast their pieces, joined along `dim`."""
        self.end()
        mine = self.joined(parts, dim=dim) if parts is not None else None
        column, count = self.place[stage], len(self.batch.sizes)
        degree = self.mesh.width(column) if self.mesh.widths else self.mesh.parts
        sources = [self.mesh.rank({"pp": column, "dp": part}) for part in range(degree if dim is not None else 1)]
        spans = [self.mesh.spans(source, self.batch.shares, count) for source in sources]
        received = []
        for source, own in zip(sources, spans, strict=True):
            shape, dtype = like(sum(samples for _, samples in own))
            piece = mine.contiguous() if mine is not None and source == self.transport.rank else None
            if piece is None:
                piece = torch.empty(shape, dtype=dtype, device=self.transport.device)
            self.transport.broadcast(piece, source, tuple(range(self.mesh.size)))
            received.append(piece)
        # one that is not joined may be what a backward reads: the caller gets a copy
        return in_order(received, spans, dim) if dim is not None else received[0].clone()

    # Who takes part

    def _stage_group(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self._rank_of(stage) for stage in stages}))

    def _rank_of(self, stage: int) -> int:
        return self.mesh.rank({**self.here, "pp": self.place[stage]})


def _user_line(error: BaseException) -> str:
    """The user's line nearest above the program line that failed, from the comments of the program's text."""
    import linecache
    import re
    import traceback

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("<rank "):
            for number in range(frame.lineno or 0, 0, -1):
                line = linecache.getline(frame.filename, number).strip()
                if line.startswith("#") and re.search(r"\w:\d+  ", line):
                    return f" (at {line[1:].strip()})"
                if line.startswith("def "):
                    break
    return ""
