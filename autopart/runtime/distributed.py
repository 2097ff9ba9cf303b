"""The distributed world: one process a rank, over torch.distributed with gloo or NCCL."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopart.errors import RankFailure
from autopart.runtime.outbox import Outbox
from autopart.runtime.transport import Pending, Traffic, check_asked, check_group, check_peer, check_pieces, payload
from autopart.runtime.watch import Watch

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether this process is one of several: it has a process group, or the environment (torchrun's) to make one."""
    return dist.is_initialized() or all(name in os.environ for name in _ENVIRONMENT)


def join(device: torch.device | str | None = None) -> ProcessTransport:
    """This process's transport, one and the same at every call.

    Uses the process group that is there, else makes one from torchrun's environment (NCCL if a CUDA device is meant,
    else gloo) and destroys it at exit. The device defaults to the CUDA device that the user has set, else that of
    LOCAL_RANK. Raises ValueError where there is neither a group nor such an environment.
    """
    wanted = None if device is None else torch.device(device)
    if not dist.is_initialized():
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            raise ValueError(
                "no process group: start the script with torchrun, or call torch.distributed.init_process_group first "
                f"(not in the environment: {', '.join(missing)})"
            )
        wanted = wanted or (_cuda_device() if torch.cuda.is_available() and dist.is_nccl_available() else None)
        if wanted is not None and wanted.type == "cuda":
            torch.cuda.set_device(wanted)
        dist.init_process_group("nccl" if wanted is not None and wanted.type == "cuda" else "gloo")
        atexit.register(_destroy)
    group = dist.group.WORLD
    assert group is not None
    backends = _backends(group)
    if wanted is None and torch.cuda.is_available() and backends.get("cuda") == "nccl":
        wanted = _cuda_device()
    wanted = wanted or torch.device("cpu")
    if wanted.type == "cuda":
        torch.cuda.set_device(wanted)
    return _transport(group, wanted)


class ProcessTransport:
    """The `Transport` of a process, over a torch.distributed process group; made by `join`."""

    def __init__(self, world: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(world)
        self.size = dist.get_world_size(world)
        self.device = device
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(self.size)): world}
        self._nccl = _backends(world).get(device.type) == "nccl"
        self._directions = (world, world)
        self._outbox = Outbox(waits=not self._nccl)
        self._traffic = Traffic()
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._watch = Watch(world, hosted=hosted) if self.size > 1 else None

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the process groups that are not there yet, in the order given."""
        everyone = tuple(range(self.size))
        asked = self.all_gather_object(list(groups), everyone)
        check_asked(asked, self.size)
        for group in dict.fromkeys(groups):
            if group not in self._groups and len(group) > 1:
                self._groups[group] = dist.new_group(list(group))
        if self._nccl and self._directions[0] is self._directions[1]:
            # NCCL runs a pair's transfers one after the other: two ranks that both send first would wait for each other
            self._directions = (dist.new_group(list(everyone)), dist.new_group(list(everyone)))

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Post the tensor to `peer`."""
        check_peer(peer, self.rank, self.size)
        if tensor.numel():
            whole = tensor.detach().contiguous()
            with self._contact(f"a send to rank {peer}"):
                work = dist.isend(_bytes(whole), peer, group=self._directions[peer > self.rank])
                assert work is not None
                self._outbox.post(work, whole)
        self._traffic.send(tensor)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """The next tensor from `peer`."""
        return self.begin_recv(shape, dtype, peer).wait()

    def begin_recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending[torch.Tensor]:
        """The next tensor from `peer`, for which there is room from now on."""
        check_peer(peer, self.rank, self.size)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if not tensor.numel():
            return Pending(lambda: tensor)
        what = f"a receive from rank {peer}"
        with self._contact(what):
            work = dist.irecv(_bytes(tensor), peer, group=self._directions[peer < self.rank])
        return self._pending(work, what, lambda: tensor)

    def all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...], *, how: str = "sum") -> None:
        """Sum over the group, in place, or take the largest."""
        self._begin_all_reduce(tensor, group, how).wait()

    def begin_all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """Begin to sum over the group, in place."""
        return self._begin_all_reduce(tensor, group, "sum")

    def _begin_all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...], how: str) -> Pending[torch.Tensor]:
        op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
        with self._collective("all_reduce", payload(tensor), group) as handle:
            if handle is None:
                return Pending(lambda: tensor)
            whole = tensor.detach().contiguous()
            work = dist.all_reduce(whole, op=op, group=handle, async_op=True)

        def placed() -> torch.Tensor:
            if whole.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(whole)
            return tensor

        return self._pending(work, f"all_reduce over {group}", placed)

    def all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat concatenation of every rank's flat `part`."""
        return self.begin_all_gather(part, group).wait()

    def begin_all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """Begin to concatenate every rank's flat `part`."""
        part = part.detach().reshape(-1).contiguous()
        whole = part.new_empty(len(group) * part.numel())
        with self._collective("all_gather", payload(whole), group) as handle:
            if handle is None:
                whole = part.clone()
                return Pending(lambda: whole)
            work = _all_gather(_bytes(whole), _bytes(part), handle)
        return self._pending(work, f"all_gather over {group}", lambda: whole)

    def reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """This rank's piece of the sum over the group of the flat `whole`."""
        return self.begin_reduce_scatter(whole, group).wait()

    def begin_reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """Begin to sum the flat `whole` over the group; this rank gets its piece.

        Off NCCL an all-to-all and a sum in group order: gloo's own reduce-scatter all-reduces inside, twice the bytes.
        """
        check_pieces(whole, group)
        whole = whole.detach().reshape(-1).contiguous()
        with self._collective("reduce_scatter", payload(whole), group) as handle:
            if handle is None:
                piece = whole.clone()
                return Pending(lambda: piece)
            if self._nccl:
                piece = whole.new_empty(whole.numel() // len(group))
                work = _reduce_scatter(piece, whole, handle)
                return self._pending(work, f"reduce_scatter over {group}", lambda: piece)
            pieces = torch.empty_like(whole)
            work = dist.all_to_all_single(_bytes(pieces), _bytes(whole), group=handle, async_op=True)

        def summed() -> torch.Tensor:
            first, *rest = pieces.reshape(len(group), -1).unbind()
            total = first.clone()
            for other in rest:
                total += other
            return total

        return self._pending(work, f"reduce_scatter over {group}", summed)

    def all_to_all(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """What every rank of the group has for this one."""
        check_pieces(whole, group)
        whole = whole.detach().reshape(-1).contiguous()
        with self._collective("all_to_all", payload(whole) * len(group), group) as handle:
            if handle is None:
                return whole.clone()
            made = torch.empty_like(whole)
            dist.all_to_all_single(_bytes(made), _bytes(whole), group=handle)
        return made

    def exchange(
        self, rows: torch.Tensor, group: tuple[int, ...], sent: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        """The rows that every rank of the group has for this one."""
        handle = self._handle(group)
        if handle is None:
            return rows.detach().clone()
        made, rows = rows.new_empty((sum(taken), *rows.shape[1:])), rows.detach().contiguous()
        each = rows.shape[1:].numel() * rows.element_size()
        with self._contact(f"all_to_all over {group}"):
            dist.all_to_all_single(
                _bytes(made), _bytes(rows), [each * n for n in taken], [each * n for n in sent], group=handle
            )
        self._traffic.rows(rows, sum(sent) - sent[group.index(self.rank)])
        return made

    def shift(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat `part` of the rank before this one in the ring of the group."""
        part = part.detach().reshape(-1).contiguous()
        with self._collective("shift", payload(part) * len(group), group) as handle:
            if handle is None:
                return part.clone()
            made, at = torch.empty_like(part), group.index(self.rank)
            on = dist.P2POp(dist.isend, _bytes(part), group[(at + 1) % len(group)], handle)
            back = dist.P2POp(dist.irecv, _bytes(made), group[at - 1], handle)
            for work in dist.batch_isend_irecv([on, back]):
                _wait(work)
        return made

    def broadcast(self, tensor: torch.Tensor, source: int, group: tuple[int, ...]) -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if source not in group:
            raise ValueError(f"source: must be one of the group {group}, not {source}")
        with self._collective("broadcast", payload(tensor), group) as handle, torch.no_grad():
            if handle is not None:
                whole = tensor.detach().contiguous()
                dist.broadcast(_bytes(whole), source, group=handle)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)

    def all_gather_object(self, item: Any, group: tuple[int, ...]) -> list[Any]:
        """Every rank's item, in group order."""
        items = [item] * len(group)
        with self._meeting("all_gather_object", group) as handle:
            if handle is not None:
                dist.all_gather_object(items, item, group=handle)
        return items

    def all_gather_numbers(self, numbers: Sequence[int], group: tuple[int, ...]) -> list[list[int]]:
        """Every rank's numbers, in group order."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        whole = mine.repeat(len(group))
        with self._meeting("all_gather_numbers", group) as handle:
            if handle is not None:
                _wait(_all_gather(whole, mine, handle))
        return whole.view(len(group), -1).tolist()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_object(None, tuple(range(self.size)))

    def flush(self) -> None:
        """Wait until every posted send is done."""
        with self._contact("the end of its sends"):
            self._outbox.flush()

    def fail(self, error: BaseException) -> None:
        """Name this rank as the root cause, unless another was first: then this process ends here."""
        if self._watch is not None and not self._watch.fail():
            self._watch.settle()

    def bytes_sent(self) -> dict[str, int]:
        """Payload bytes sent so far, by kind."""
        return self._traffic.by_kind()

    def _handle(self, group: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of a tuple of ranks, None for this rank alone."""
        check_group(group, self.rank, self.size)
        if len(group) == 1:
            return None
        if group not in self._groups:
            raise ValueError(f"group: {group} was not given to prepare()")
        return self._groups[group]

    @contextlib.contextmanager
    def _meeting(self, call: str, group: tuple[int, ...]) -> Iterator[dist.ProcessGroup | None]:
        """The process group, None for this rank alone, of what ranks tell each other beside the program."""
        handle = self._handle(group)
        if handle is not None and self._watch is not None and len(group) == self.size:
            self._watch.arrive()
        with self._contact(f"{call} over {group}"):
            yield handle

    @contextlib.contextmanager
    def _collective(self, kind: str, whole: int, group: tuple[int, ...]) -> Iterator[dist.ProcessGroup | None]:
        """Count a collective and give its process group, None where there is nothing to exchange."""
        handle = self._handle(group) if whole else None
        with self._contact(f"{kind} over {group}"):
            yield handle
        self._traffic.collective(kind, whole, len(group))

    def _pending(self, work: dist.Work | None, what: str, result: Callable[[], torch.Tensor]) -> Pending[torch.Tensor]:
        """Begun work, and what comes out of it once it is done."""

        def finish() -> torch.Tensor:
            with self._contact(what):
                _wait(work)
            return result()

        return Pending(finish)

    @contextlib.contextmanager
    def _contact(self, what: str) -> Iterator[None]:
        """Where communication breaks because another rank has failed, end quietly: that rank shows the cause."""
        try:
            yield
        except RuntimeError as error:
            done: list[int] = []
            late: list[int] = []
            if self._watch is not None:
                late = self._watch.missing()
                self._watch.settle()
                done = self._watch.left()
            if done or late:
                why = f"rank {done[0]} has ended its script already" if done else f"rank {late[0]} has not joined in"
                rule = "every rank must make the same calls of the model, also for evaluation"
                raise RankFailure(f"rank {self.rank}: {what} cannot happen: {why}; {rule}") from error
            raise RankFailure(f"rank {self.rank}: {what} failed: {error}") from error


@functools.lru_cache(maxsize=1)
def _transport(world: dist.ProcessGroup, device: torch.device) -> ProcessTransport:
    return ProcessTransport(world, device)


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    # torch 2.13 calls it all_gather_single, and warns about the old name
    newer = getattr(dist, "all_gather_single", None)
    work: dist.Work | None = (newer or dist.all_gather_into_tensor)(whole, part, group=group, async_op=True)
    return work


def _reduce_scatter(piece: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    newer = getattr(dist, "reduce_scatter_single", None)
    work: dist.Work | None = (newer or dist.reduce_scatter_tensor)(piece, whole, group=group, async_op=True)
    return work


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat bytes: any dtype can be moved."""
    return tensor.reshape(-1).view(torch.uint8)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each device type."""
    config = str(dist.get_backend_config(group))
    return dict(entry.split(":", 1) for entry in config.split(","))


def _cuda_device() -> torch.device | None:
    """The CUDA device that this process is meant to use: the user's, else that of LOCAL_RANK; None if nothing says."""
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    if initialized() and torch.cuda.current_device() != 0:
        return torch.device("cuda", torch.cuda.current_device())
    place = os.environ.get("LOCAL_RANK")
    if place is None:
        return torch.device("cuda", torch.cuda.current_device()) if dist.is_initialized() else None
    return torch.device("cuda", int(place) if torch.cuda.device_count() > 1 else 0)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
