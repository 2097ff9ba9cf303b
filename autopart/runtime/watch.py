"""What ends every process of a world when one of them fails, with the cause shown once.

Two channels. *The store* of the process group carries the root cause: the first rank to fail writes its claim under
one key, and a daemon thread on every rank looks there twice a second. *Links*, TCP connections on which nothing is said
until the goodbye, tell of processes that end without a word: the kernel closes them at that moment, however busy Python
is, so unlike a heartbeat they never mistake a slow rank for a dead one. Every rank has a link to the next rank, and one
to rank 0 where that process hosts the store, for with it the other channel goes too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

_POLL = 0.5  # seconds between two looks at the store
_SETTLE = 3.0  # seconds that a broken connection waits for its root cause to arrive
_LINGER = 3.0  # seconds that the store's host stays for the others to read the cause of a failure there
_FAREWELL = 10.0  # seconds that it stays, having done its part, for the others to notice that it leaves
_LAST = 8.0  # seconds from a failure to the end of the process, whatever hangs
_HOST_LOST = "rank 0 was lost (it hosted the store)"
_GOODBYE = b"."
_FAILURE, _DONE = "autopart/failure", "autopart/done"  # keys in the store
_ADDRESS, _LEFT = "autopart/address", "autopart/left"  # each followed by a rank
_MEETINGS = "autopart/meetings"  # likewise: how often the rank has come to where all meet


class Watch:
    """Ends this process when another rank fails or is lost; lets the others know when this one does.

    `hosted` says that rank 0's process hosts the store of `world` (not so under torchrun). Making one starts the
    thread, and adds an exit handler and an exception hook that calls the one before it.
    """

    def __init__(self, world: dist.ProcessGroup, *, hosted: bool) -> None:
        self.rank = rank = world.rank()
        self.size = size = world.size()
        group_store: Any = world.get_group_store()
        self._group_store = group_store  # kept, for it may be the server, and the user may destroy the group
        self._store = group_store.clone()
        self._hosted = hosted
        self._store_left = False
        self._counted = False
        self._meetings = 0
        self._process = os.getpid()
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  lives as long as the process
        following = {(rank + 1) % size} | ({0} if hosted else set())
        self._links = _Links(self._publish, self._address, following - {rank})
        self._thread = threading.Thread(target=self._watch, name="autopart watch", daemon=True)
        self._thread.start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._leave)

    def fail(self) -> bool:
        """Claim that this rank is the root cause. False if another rank was first."""
        return self._claim(f"rank {self.rank} failed") in (None, f"rank {self.rank} failed")

    def settle(self) -> None:
        """Wait for the root cause of a broken connection: the process ends here if another rank turns out to be it."""
        time.sleep(_SETTLE)

    def arrive(self) -> None:
        """Let the others know that this rank has come to the next point where all ranks meet."""
        self._meetings += 1
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_MEETINGS}/{self.rank}", str(self._meetings))

    def missing(self) -> list[int]:
        """The ranks that have not come to the point where this rank arrived last."""
        with contextlib.suppress(RuntimeError):
            counts = [int(self._get(f"{_MEETINGS}/{rank}") or 0) for rank in range(self.size)]
            return [rank for rank, count in enumerate(counts) if count < self._meetings]
        return []

    def left(self) -> list[int]:
        """The ranks that have ended as they should."""
        if self._store_left:
            return [0]
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self.size) if self._get(f"{_LEFT}/{rank}") is not None]
        return []

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for peer, left in self._links.poll(_POLL):
                if left and peer == 0 and self._hosted:
                    self._count()
                    self._store_left = True
                elif not left:
                    self._end(self._lost(peer))
            cause = self._cause()
            if cause is not None and cause != f"rank {self.rank} failed":
                self._end(cause)

    def _publish(self, address: str) -> None:
        self._store.set(f"{_ADDRESS}/{self.rank}", address)

    def _address(self, rank: int) -> str | None:
        """What another rank has published, None before it has."""
        return self._get(f"{_ADDRESS}/{rank}")

    def _get(self, key: str) -> str | None:
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None

    def _lost(self, peer: int) -> str:
        """Why a peer's process ended without a goodbye: the root cause if it or another rank left one.

        Where the store is gone as well, its host was lost first, as it stays for the others when anything else fails.
        """
        lost = f"rank {peer} was lost (its process ended without a word)"
        if peer == 0 and self._hosted:
            self._store_left = True
        return self._claim(lost) or (lost if self._store_left or not self._hosted else _HOST_LOST)

    def _claim(self, cause: str) -> str | None:
        """The root cause after trying to be the first to name it; None if there is no store to ask."""
        if self._store_left:
            return None
        try:
            return str(self._store.compare_set(_FAILURE, "", cause), "utf-8")
        except RuntimeError:
            return None

    def _cause(self) -> str | None:
        """The root cause, None while there is none."""
        if self._store_left:
            return None
        try:
            return self._get(_FAILURE)
        except RuntimeError:
            self._store_left = True
            return _HOST_LOST if self._hosted else "the rendezvous store is gone"

    def _end(self, cause: str) -> NoReturn:
        """End this process with one line; what other threads do no longer matters."""
        with self._ending:
            self._deadline()
            self._linger()
            print(f"rank {self.rank} stopped because {cause}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def _deadline(self) -> None:
        """End the process a few seconds from now even if Python never gets to run again."""
        faulthandler.dump_traceback_later(_LAST, exit=True, file=self._nowhere)

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """For an exception that nobody caught: show it if it is the root cause."""
        if os.getpid() == self._process and not hasattr(sys, "ps1"):
            self._deadline()
            if _is_contact(error):
                self.settle()
            if not self.fail():
                self._end(self._cause() or "another rank failed")
        self._previous_hook(kind, error, trace)

    def _leave(self) -> None:
        """Say goodbye at exit, unless this rank has failed, and stay while others need the store."""
        if os.getpid() != self._process:
            return
        self._stopping.set()
        self._links.wake()
        self._thread.join(timeout=_LINGER)
        leaving = self._cause() is None
        if leaving:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{_LEFT}/{self.rank}", "")
            self._links.say_goodbye()
        self._linger(leaving=leaving)

    def _count(self) -> None:
        """Tell the store's host that this rank needs the store no more."""
        if not self._counted and not self._store_left:
            self._counted = True
            with contextlib.suppress(RuntimeError):
                self._store.add(_DONE, 1)

    def _linger(self, *, leaving: bool = False) -> None:
        """Stay, if this process hosts the store, until the others need it no more, but not for long.

        One that is `leaving` says goodbye to those who come to watch only now: their thread had no turn before.
        """
        self._count()
        until = time.monotonic() + (_FAREWELL if leaving else _LINGER)
        if self._hosted and self.rank == 0:
            while self._store.add(_DONE, 0) < self.size and time.monotonic() < until:
                time.sleep(0.02)
                if leaving:
                    self._links.say_goodbye()
                    leaving = self._cause() is None
                    until = until if leaving else min(until, time.monotonic() + _LINGER)


class _Links:
    """Connections to the processes of other ranks, and those that other ranks hold to this one.

    `publish` makes this rank's address known, `lookup` gives that of another. The side that is connected to proves
    itself with a token, so whatever else answers at an address that means another machine here (a name that resolves to
    a loopback address) is not mistaken for the rank. Where no connection can be made, that rank is not watched.
    """

    def __init__(
        self, publish: Callable[[str], None], lookup: Callable[[int], str | None], targets: Iterable[int]
    ) -> None:
        self._lookup = lookup
        self._pending = set(targets)
        self._token = secrets.token_hex(8)
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._sockets = [self._waker, woken]
        self._untold: list[socket.socket] = []
        self._listener: socket.socket | None = None
        with contextlib.suppress(OSError):
            family, address = _own_address()
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
            self._listener.setblocking(False)
            self._sockets.append(self._listener)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            publish(f"{address} {self._listener.getsockname()[1]} {self._token}")
        os.register_at_fork(after_in_child=self._release)

    def poll(self, seconds: float) -> Iterator[tuple[int, bool]]:
        """Wait up to `seconds`; yield each rank whose process has ended or is ending, and whether it said goodbye."""
        self._connect()
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Link):
                ended = key.data.read()
                if ended is not None:
                    self._selector.unregister(key.fileobj)
                    if key.data.proven:
                        yield key.data.rank, ended == "left"

    def wake(self) -> None:
        """Make a `poll` in another thread return now."""
        self._waker.send(b"x")

    def say_goodbye(self) -> None:
        """Tell those who watch this rank, and have not been told, that it is about to end as it should."""
        self._accept()
        while self._untold:
            with contextlib.suppress(OSError):
                self._untold.pop().sendall(_GOODBYE)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._listener is not None:
                peer, _ = self._listener.accept()
                peer.sendall(self._token.encode())
                self._untold.append(peer)
                self._sockets.append(peer)

    def _connect(self) -> None:
        """Connect to the ranks whose address has appeared since the last look."""
        for rank in sorted(self._pending):
            with contextlib.suppress(RuntimeError, OSError):
                published = self._lookup(rank)
                if published is None:
                    continue
                self._pending.discard(rank)
                address, port, token = published.split()
                peer = socket.create_connection((address, int(port)), timeout=2.0)
                self._sockets.append(peer)
                self._selector.register(peer, selectors.EVENT_READ, _Link(rank, peer, token.encode()))

    def _release(self) -> None:
        for each in self._sockets:
            each.close()


class _Link:
    """One connection to the process of `rank`, believed once it has sent the `token`."""

    def __init__(self, rank: int, peer: socket.socket, token: bytes) -> None:
        self.rank = rank
        self._peer = peer
        self._token = token
        self._heard = b""

    @property
    def proven(self) -> bool:
        """Whether the other side is the rank."""
        return self._heard.startswith(self._token)

    def read(self) -> str | None:
        """What became of the process: "lost" if it has ended, "left" if it said goodbye, else None."""
        try:
            data = self._peer.recv(64)
        except OSError:
            data = b""
        self._heard += data
        if self._heard == self._token + _GOODBYE:
            return "left"
        return None if data else "lost"


def _own_address() -> tuple[int, str]:
    """The family and address of the interface here that leads to the rendezvous host. Nothing is sent."""
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: Any = probe.getsockname()
        return family, address[0]


def _is_contact(error: BaseException) -> bool:
    """Whether an error says that communication broke, which is seldom its own cause."""
    words = ("connection", "gloo", "nccl", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
