"""The local world: all ranks in this process, as threads of which exactly one runs at a time.

The turn passes only where a rank must wait for another (never at a send), to the next rank in rotating order that can
go on. So the order of everything is the same on every run, no data needs a lock, and "nobody can go on" is a deadlock,
known at once. When a rank fails, the others are woken in the same order and unwind.
"""

from __future__ import annotations

import contextlib
import contextvars
import pickle
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopart.errors import RankFailure
from autopart.runtime.modes import caller_modes
from autopart.runtime.transport import (
    Pending,
    Traffic,
    Transport,
    check_asked,
    check_group,
    check_peer,
    check_pieces,
    payload,
)

_CURRENT: contextvars.ContextVar[Transport | None] = contextvars.ContextVar("autopart_transport", default=None)


def current_transport() -> Transport | None:
    """The transport of the local rank that is calling, None outside a local world."""
    return _CURRENT.get()


@dataclass(slots=True)
class Standing:
    """A local world that goes on from one `run_ranks` to the next: what was sent and not taken yet is still there."""

    transports: list[LocalTransport] = field(default_factory=list)


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    standing: Standing | None = None,
) -> list[Any]:
    """The results, in rank order, of ``fn(transport, *args)`` run once on each of `n` local ranks.

    Each rank has the caller's context variables and its grad mode, autocast and default device, and a thread of its
    own unless it is alone. The world is that of `standing`, where it has one already. The first failure ends every rank
    and is raised here once: a :class:`RankFailure` as it is, any other Exception as the cause of a RankFailure that
    names the rank. No thread outlives the call.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n: the number of ranks must be a whole number of at least 1, not {n!r}")
    standing = standing or Standing()
    if not standing.transports:
        world = _World(n, torch.device("cpu" if device is None else device))
        standing.transports = [LocalTransport(world, rank) for rank in range(n)]
    world = standing.transports[0].world
    world.begin()
    modes = caller_modes()
    results: list[Any] = [None] * n

    def body(rank: int) -> None:
        transport = standing.transports[rank]
        transport.begin()
        _CURRENT.set(transport)
        with world.life(rank), modes():
            world.check()
            results[rank] = fn(transport, *args)

    if n == 1:  # here, where debuggers stop and whose memory the allocator uses again
        contextvars.copy_context().run(body, 0)
    else:
        run = [contextvars.copy_context().run for _ in range(n)]
        _run([threading.Thread(target=run[r], args=(body, r), name=f"rank {r}", daemon=True) for r in range(n)], world)
    world.raise_failure()
    return results


def _run(threads: Sequence[threading.Thread], world: _World) -> None:
    """From the start of all threads to the end of all; what interrupts that ends the world, and is raised then."""
    try:
        for thread in threads:
            thread.start()
        world.over.wait()
    except BaseException as interrupt:
        world.fail(None, interrupt)
        for thread in threads:
            if thread.ident is None:
                thread.start()
        world.over.wait()
        raise
    finally:
        for thread in threads:
            thread.join()


class LocalTransport:
    """The `Transport` of one rank of a local world."""

    def __init__(self, world: _World, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.device = world.device
        self.world = world
        self._traffic = Traffic()
        self._thread = 0
        self._sent: Counter[int] = Counter()  # messages to each peer, and those asked for of each
        self._asked: Counter[int] = Counter()

    def begin(self) -> None:
        """Belong to the thread that calls this."""
        self._thread = threading.get_ident()

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Check that all ranks ask for the same groups; nothing else is needed here."""
        check_asked(self.all_gather_object(list(groups), tuple(range(self.size))), self.size)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Hand a copy of the tensor to `peer`."""
        check_peer(peer, self.rank, self.size)
        self.world.check()
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.world.boxes[self.rank, peer][self._sent[peer]] = copy
        self._sent[peer] += 1
        self._traffic.send(tensor)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """The next tensor from `peer`. Raises RankFailure when it is not of the shape and dtype asked for."""
        return self.begin_recv(shape, dtype, peer).wait()

    def begin_recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending[torch.Tensor]:
        """The next tensor from `peer` that no earlier receive asked for."""
        check_peer(peer, self.rank, self.size)
        number = self._asked[peer]
        self._asked[peer] += 1
        return Pending(lambda: self._received(number, shape, dtype, peer))

    def _received(self, number: int, shape: Sequence[int], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """The tensor that `peer` sent after `number` others."""
        box = self.world.boxes[peer, self.rank]
        wanted = f"{_name(dtype)}{list(shape)}"
        self.world.wait(self.rank, lambda: number in box, f"{wanted} from rank {peer}")
        tensor = box.pop(number)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            sent = f"{_name(tensor.dtype)}{list(tensor.shape)}"
            raise RankFailure(f"rank {self.rank} receives {wanted} from rank {peer}, which sent {sent}")
        return tensor

    # A collective is done when it is begun: the ranks meet there, and no other runs meanwhile.

    def begin_all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`all_reduce`, done."""
        self.all_reduce(tensor, group)
        return Pending(lambda: tensor)

    def begin_all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`all_gather`, done."""
        whole = self.all_gather(part, group)
        return Pending(lambda: whole)

    def begin_reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`reduce_scatter`, done."""
        piece = self.reduce_scatter(whole, group)
        return Pending(lambda: piece)

    def all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...], *, how: str = "sum") -> None:
        """Sum over the group, in place, in group order, or take the largest."""
        self._count("all_reduce", payload(tensor), group)
        call = "all_reduce" if how == "sum" else f"all_reduce ({how})"
        with torch.no_grad():
            tensor.copy_(self._collective(call, tensor, group, {"sum": _sum, "max": _largest}[how]))

    def all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat concatenation of every rank's flat `part`."""
        self._count("all_gather", payload(part) * len(group), group)
        return self._collective("all_gather", part.detach().reshape(-1), group, torch.cat).clone()

    def reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """This rank's piece of the sum over the group of the flat `whole`."""
        check_pieces(whole, group)
        self._count("reduce_scatter", payload(whole), group)
        total = self._collective("reduce_scatter", whole.detach().reshape(-1), group, _sum)
        return total.reshape(len(group), -1)[group.index(self.rank)].clone()

    def all_to_all(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """What every rank of the group has for this one."""
        check_pieces(whole, group)
        self._count("all_to_all", payload(whole) * len(group), group)
        every = self._collective("all_to_all", whole.detach().reshape(-1), group, torch.stack)
        return every.view(len(group), len(group), -1)[:, group.index(self.rank)].reshape(-1)

    def exchange(
        self, rows: torch.Tensor, group: tuple[int, ...], sent: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        """The rows that every rank of the group has for this one."""
        place = group.index(self.rank)
        self._traffic.rows(rows, sum(sent) - sent[place])
        call = f"all_to_all of rows of {_name(rows.dtype)}{list(rows.shape[1:])}"
        parts = torch.split(rows.detach(), list(sent))
        every = self._meet(call, parts, group, lambda parts: list(zip(*parts, strict=True)))
        return torch.cat(every[place])

    def shift(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat `part` of the rank before this one in the ring of the group."""
        self._count("shift", payload(part) * len(group), group)
        every = self._collective("shift", part.detach().reshape(-1), group, torch.stack)
        return every[group.index(self.rank) - 1].clone()

    def broadcast(self, tensor: torch.Tensor, source: int, group: tuple[int, ...]) -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if source not in group:
            raise ValueError(f"source: must be one of the group {group}, not {source}")
        self._count("broadcast", payload(tensor), group)
        place = group.index(source)
        call = f"broadcast from rank {source}"
        with torch.no_grad():
            tensor.copy_(self._collective(call, tensor, group, lambda parts: parts[place].clone()))

    def all_gather_object(self, item: Any, group: tuple[int, ...]) -> list[Any]:
        """Every rank's item, in group order, each a copy as if it came from another process."""
        parts = self._meet("all_gather_object", pickle.dumps(item), group, list)
        return [pickle.loads(part) for part in parts]

    def all_gather_numbers(self, numbers: Sequence[int], group: tuple[int, ...]) -> list[list[int]]:
        """Every rank's numbers, in group order."""
        return [list(each) for each in self._meet("all_gather_numbers", tuple(numbers), group, list)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._meet("barrier", None, tuple(range(self.size)), list)

    def flush(self) -> None:
        """Nothing to wait for: a send is done when it returns."""

    def fail(self, error: BaseException) -> None:
        """Record the failure; the other ranks end at their next communication."""
        self.world.fail(self.rank, error)

    def bytes_sent(self) -> dict[str, int]:
        """Payload bytes sent so far, by kind."""
        return self._traffic.by_kind()

    def _count(self, kind: str, whole: int, group: tuple[int, ...]) -> None:
        check_group(group, self.rank, self.size)
        self._traffic.collective(kind, whole, len(group))

    def _collective(
        self, call: str, tensor: torch.Tensor, group: tuple[int, ...], combine: Callable[[list[Any]], torch.Tensor]
    ) -> torch.Tensor:
        """Meet with this rank's tensor; `combine` makes the one result before any rank goes on to change its own."""
        call = f"{call} of {_name(tensor.dtype)}{list(tensor.shape)}"
        result: torch.Tensor = self._meet(call, tensor.detach(), group, combine)
        return result

    def _meet(self, call: str, part: Any, group: tuple[int, ...], combine: Callable[[list[Any]], Any]) -> Any:
        check_group(group, self.rank, self.size)
        self.world.check()
        if threading.get_ident() != self._thread:
            raise RankFailure(
                f"{call} is called from another thread than that of rank {self.rank} (autograd's for a CUDA device, "
                "say), where the turn cannot be passed on; use processes, or the CPU"
            )
        meeting = self.world.meetings.setdefault(group, _Meeting(call, self.rank))
        if meeting.call != call:
            raise RankFailure(
                f"the ranks of group {group} do not call the same collective: "
                f"rank {meeting.opened_by} calls {meeting.call}, rank {self.rank} calls {call}"
            )
        meeting.parts[self.rank] = part
        if len(meeting.parts) == len(group):
            del self.world.meetings[group]
            meeting.result = combine([meeting.parts[rank] for rank in group])
            meeting.done = True
        self.world.wait(self.rank, lambda: meeting.done, f"{call} over group {group}")
        return meeting.result


@dataclass(slots=True)
class _Meeting:
    """One collective in progress: what is called, who came first, what each rank brought, what comes out."""

    call: str
    opened_by: int
    parts: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    result: Any = None


class _Stopped(BaseException):
    """Unwinds a rank because another one failed; not an Exception, so the user's handlers let it through."""


class _World:
    """What the ranks share. Only the rank whose turn it is touches it, but for `fail`, which sets one field once."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.boxes: defaultdict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)  # by number
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self._failure: tuple[int | None, BaseException] | None = None
        self.begin()

    def begin(self) -> None:
        """Rank 0 has the first turn, and nobody has finished."""
        self.over = threading.Event()
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(self.size)]
        self._waits: list[tuple[Callable[[], bool], str] | None] = [None] * self.size
        self._finished = [False] * self.size

    @contextlib.contextmanager
    def life(self, rank: int) -> Iterator[None]:
        """From the first turn of a rank until it hands the turn on for good; what it raises is the world's failure."""
        self._turns[rank].acquire()
        try:
            yield
        except _Stopped:
            pass
        except BaseException as error:
            self.fail(rank, error)
        finally:
            self._finished[rank] = True
            self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready()`, giving the turn to others until then; `what` completes "rank 1 waits for"."""
        self.check()
        if ready():
            return
        self._waits[rank] = (ready, what)
        self._pass_on(rank)
        self._turns[rank].acquire()
        self._waits[rank] = None
        self.check()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Record a failure (of no rank in particular where `rank` is None) unless there is one already."""
        if self._failure is None:
            self._failure = (rank, error)

    def check(self) -> None:
        """Unwind the calling rank if the world has failed."""
        if self._failure is None:
            return
        error = self._failure[1]
        raise RankFailure(str(error)) if isinstance(error, _Deadlock) else _Stopped

    def raise_failure(self) -> None:
        """Raise what ended the world, if anything did."""
        if self._failure is None:
            return
        rank, error = self._failure
        if isinstance(error, RankFailure) or not isinstance(error, Exception):
            raise error
        raise RankFailure(f"rank {rank} failed: {type(error).__name__}: {error}") from error

    def _pass_on(self, rank: int) -> None:
        """Hand the turn to the next rank that can go on, in rotating order."""
        others = [(rank + step) % self.size for step in range(1, self.size + 1)]
        unfinished = [other for other in others if not self._finished[other]]
        following = next(filter(self._can_go_on, unfinished), None)
        if following is None and unfinished:
            self.fail(None, _Deadlock(f"deadlock: {self._stations()}"))
            following = unfinished[0]
        if following is not None:
            self._turns[following].release()
        else:
            self.over.set()

    def _can_go_on(self, rank: int) -> bool:
        wait = self._waits[rank]
        return wait is None or self._failure is not None or wait[0]()

    def _stations(self) -> str:
        """Where every rank is, in words."""
        waits = [f"waits for {wait[1]}" if wait else "has finished" for wait in self._waits]
        return "; ".join(f"rank {rank} {state}" for rank, state in enumerate(waits))


class _Deadlock(RankFailure):
    """No rank can go on; kept apart so that every rank learns of it as an ordinary error."""


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _largest(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).amax(0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
