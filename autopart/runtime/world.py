"""The world as a rank's program sees it: collectives by unit and axis, sends by stage, measurements."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from autopart.errors import AutopartError, RankFailure
from autopart.ir.mesh import Mesh
from autopart.runtime.batch import Batch
from autopart.runtime.measure import Log, Memory, Store
from autopart.runtime.states import States
from autopart.runtime.transport import Transport


class World:
    """One rank's world for one step of one program. See `autopart.codegen` for the text that calls it."""

    def __init__(
        self,
        transport: Transport,
        mesh: Mesh,
        place: Sequence[int],
        states: States,
        buffers: Mapping[str, torch.Tensor],
        batch: Batch,
    ) -> None:
        self.transport, self.mesh, self.place = transport, mesh, tuple(place)
        self.states, self.buffers, self.batch = states, buffers, batch
        self.memory = Memory(states, (*buffers.values(), *batch.given()))
        self.log = Log()
        self.here = mesh.coordinate(transport.rank)

    # What outlives an action

    def store(self) -> Store:
        """A place for values that outlive the action that made them; its bytes are counted."""
        return self.memory.store()

    @contextlib.contextmanager
    def action(self, kind: str, *, stage: int, microbatch: int) -> Iterator[None]:
        """A compute action: logged with its times, named in whatever goes wrong inside."""
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
        self.memory.sample()

    # Parameters and gradients

    def parameters(self, unit: str) -> Sequence[torch.Tensor]:
        """The whole parameters of a unit that this rank keeps."""
        return self.states.whole[unit]

    def all_gather(self, unit: str, *, axis: str) -> Sequence[torch.Tensor]:
        """A unit's whole parameters, gathered from the parts for one use."""
        found = self.states.units[unit]
        gathered = self.transport.all_gather(self.states.packed(found), self._group(axis))
        self.memory.transient(gathered.nbytes)
        return self.states.unpacked(found, gathered)

    def regather(self, unit: str, *, axis: str) -> None:
        """Refill the whole parameters that this rank keeps from the parts that the optimizer updated."""
        found = self.states.units[unit]
        self.states.refill(found, self.transport.all_gather(self.states.packed(found), self._group(axis)))

    def accumulate(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those of the step."""
        self.states.add(unit, grads)

    def reduce_scatter(self, unit: str, grads: Sequence[torch.Tensor | None] | None = None, *, axis: str) -> None:
        """Sum gradients over an axis, each rank keeping its part: `grads` if given, else those accumulated."""
        found = self.states.units[unit]
        local = self.states.take(found) if grads is None else grads
        whole = self.states.scattered(found, local)
        self.memory.transient(whole.nbytes)
        flat = self.transport.reduce_scatter(whole, self._group(axis))
        self.states.add(unit, self.states.gathered_part(found, flat))

    def all_reduce(self, unit: str, *, axis: str, stages: Sequence[int] = ()) -> None:
        """Sum a unit's accumulated gradients over an axis, or over the ranks of some stages, on every rank."""
        group = self._stage_group(stages) if stages else self._group(axis)
        if len(group) == 1:
            return
        found = self.states.units[unit]
        grads = self.states.gradients.get(unit, [None] * len(found.parameters))
        shapes = [(self.states.parts[p.target], g) for p, g in zip(found.parameters, grads, strict=True)]
        tensors = [torch.zeros_like(part) if g is None else g for part, g in shapes]
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self.transport.all_reduce(flat, group)
        pieces = torch.split(flat, [t.numel() for t in tensors])
        self.states.gradients[unit] = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]

    def summed(self, value: torch.Tensor, *, axis: str) -> torch.Tensor:
        """The sum over an axis of what each rank computed from its own samples, on every rank of it."""
        whole = value.clone()
        self.transport.all_reduce(whole, self._group(axis))
        return whole

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer or constant by name."""
        return self.buffers[name]

    # Stage to stage

    def send(self, values: Sequence[torch.Tensor], *, stage: int, to: int, microbatch: int) -> None:
        """Post an edge's values to the rank of stage `to`; never blocks."""
        for value in values:
            self.transport.send(value.contiguous(), self._rank_of(to))

    def recv(
        self, like: Sequence[tuple[tuple[int, ...], torch.dtype]], *, stage: int, source: int, microbatch: int
    ) -> tuple[torch.Tensor, ...]:
        """An edge's values from the rank of stage `source`."""
        return tuple(self.transport.recv(shape, dtype, self._rank_of(source)) for shape, dtype in like)

    # Outputs

    def total(self, parts: Sequence[torch.Tensor], *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The sum over microbatches and over the whole world, on every rank."""
        total = torch.zeros(shape, dtype=dtype, device=self.transport.device)
        for part in parts:
            total = total + part
        self.transport.all_reduce(total, tuple(range(self.mesh.size)))
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
        mine = self.joined(parts, dim=dim) if parts is not None else None
        degree = self.mesh.degree("dp")
        received = []
        for part in range(degree if dim is not None else 1):
            source = self.mesh.rank({"pp": self.place[stage], "dp": part})
            shape, dtype = like(self.batch.shares[part])
            piece = mine.contiguous() if mine is not None and source == self.transport.rank else None
            if piece is None:
                piece = torch.empty(shape, dtype=dtype, device=self.transport.device)
            self.transport.broadcast(piece, source, tuple(range(self.mesh.size)))
            received.append(piece)
        return torch.cat(received, dim=dim) if dim is not None else received[0]

    # Who takes part

    def _group(self, axis: str) -> tuple[int, ...]:
        return self.mesh.group(self.transport.rank, axis)

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
