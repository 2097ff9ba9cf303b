"""The transport: all that a running program needs from the machine, behind one small interface.

Two implementations: `runtime.distributed` (torch.distributed: gloo or NCCL) and `runtime.local` (all ranks in this
process). Nothing above this interface knows which one it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

import torch

from autopart.errors import AutopartError
from autopart.ir.traffic import COLLECTIVES, sent_bytes

T = TypeVar("T")


class Pending(Generic[T]):
    """Communication that was begun and goes on beside the computation; its buffers live until it is waited for."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Its result, once it is there; the same at every call."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class Arriving(Sequence[torch.Tensor]):
    """Tensors on their way here, for which there is room already; whoever reads one waits until all are there."""

    def __init__(self, pending: Sequence[Pending[torch.Tensor]], nbytes: int) -> None:
        self._pending, self.nbytes = pending, nbytes
        self._tensors: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, once they are there."""
        if self._tensors is None:
            self._tensors = tuple(each.wait() for each in self._pending)
            self._pending = ()
        return self._tensors

    @property
    def arrived(self) -> bool:
        """Whether they have been waited for."""
        return self._tensors is not None

    def __len__(self) -> int:
        return len(self.wait())

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.wait()[index]


class Transport(Protocol):
    """Communication of one rank with the others.

    What is begun with ``begin_...`` goes on in the background and is done when its `Pending` has been waited for; the
    tensors given must not be written to before that. Collectives of a group run in the order in which they were begun.

    `group` is always an ascending tuple of global ranks that contains this one. Every member calls the same collectives
    over it in the same order. Nothing here is differentiated: gradients are part of the program, not of the transport.
    """

    rank: int
    size: int
    device: torch.device

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready the groups that collectives will use. Collective: every rank, with the same `groups`.

        Raises AutopartError on every rank if the ranks differ in what they ask for.
        """

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Hand a tensor to `peer`. Never blocks: returns when the send is posted, and keeps the tensor till it is done.

        The tensor must not be written to before `flush`.
        """

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """The next tensor that `peer` sent to this rank, fresh each time. Messages of a pair arrive in order."""

    def begin_recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending[torch.Tensor]:
        """`recv`, begun: makes room for the message before it is needed."""

    def all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...], *, how: str = "sum") -> None:
        """Sum `tensor` over the group, or with `how` "max" take the largest, in place on every rank."""

    def begin_all_reduce(self, tensor: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`all_reduce`, begun; the result is `tensor`."""

    def all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat concatenation, in group order, of every rank's flat `part` (equal sizes)."""

    def begin_all_gather(self, part: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`all_gather`, begun."""

    def reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """This rank's piece of the sum over the group of the flat `whole`, cut into equal pieces, one a rank, in order.

        The sum is deterministic; outside NCCL it runs in group order.
        """

    def begin_reduce_scatter(self, whole: torch.Tensor, group: tuple[int, ...]) -> Pending[torch.Tensor]:
        """`reduce_scatter`, begun."""

    def all_to_all(self, whole: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """What every rank of the group has for this one, in order: each cuts its flat `whole` into equal pieces so."""

    def exchange(
        self, rows: torch.Tensor, group: tuple[int, ...], sent: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        """The rows that every rank of the group has for this one, `taken` from each, in order.

        `rows` are dense, `sent` for each of them. Counted are those for others.
        """

    def shift(self, part: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
        """The flat `part` of the rank before this one in the ring of the group (equal sizes): each hands on its own."""

    def broadcast(self, tensor: torch.Tensor, source: int, group: tuple[int, ...]) -> None:
        """Overwrite `tensor` with that of rank `source`, in place."""

    def all_gather_object(self, item: Any, group: tuple[int, ...]) -> list[Any]:
        """Every rank's (picklable, small) `item`, in group order. Not counted as traffic."""

    def all_gather_numbers(self, numbers: Sequence[int], group: tuple[int, ...]) -> list[list[int]]:
        """Every rank's `numbers` (as many on each, 63 bits), in group order, in one round. Not counted as traffic."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def flush(self) -> None:
        """Wait until every posted send is done, and let go of its tensor."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that each ends within seconds."""

    def bytes_sent(self) -> dict[str, int]:
        """Payload bytes sent so far by kind (send, and the collectives of `ir.traffic`)."""


class Traffic:
    """Payload bytes that one rank sent, by kind, counted by the rule of `autopart.ir.traffic`."""

    def __init__(self) -> None:
        self._sent = dict.fromkeys(("send", *COLLECTIVES), 0)

    def send(self, tensor: torch.Tensor) -> None:
        """Count a tensor sent to one peer."""
        self._sent["send"] += payload(tensor)

    def collective(self, kind: str, whole: int, ranks: int) -> None:
        """Count a collective over a whole buffer of `whole` bytes among `ranks` ranks."""
        self._sent[kind] = self._sent.get(kind, 0) + sent_bytes(kind, whole, ranks)

    def rows(self, rows: torch.Tensor, others: int) -> None:
        """Count an all-to-all in which `others` of some rows go to other ranks."""
        each = payload(rows) // len(rows) if len(rows) else 0
        self._sent["all_to_all"] = self._sent.get("all_to_all", 0) + others * each

    def by_kind(self) -> dict[str, int]:
        """The bytes so far, an entry a kind."""
        return dict(self._sent)


def payload(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def check_asked(asked: Sequence[list[tuple[int, ...]]], size: int) -> None:
    """Raise unless every rank asks for the same groups (AutopartError) and those are proper groups (ValueError)."""
    for rank, groups in enumerate(asked):
        if groups != asked[0]:
            raise AutopartError(f"prepare: rank 0 asks for the groups {asked[0]}, rank {rank} for {groups}")
    for group in asked[0]:
        check_group(group, group[0] if group else 0, size)


def check_peer(peer: int, rank: int, size: int) -> None:
    """Raise ValueError unless `peer` is another rank of the world."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"peer: must be a rank from 0 to {size - 1} other than this one ({rank}), not {peer}")


def check_group(group: tuple[int, ...], rank: int, size: int) -> None:
    """Raise ValueError unless `group` is an ascending tuple of ranks of the world that contains `rank`."""
    if list(group) != sorted(set(group)) or rank not in group or group[0] < 0 or group[-1] >= size:
        raise ValueError(f"group: must be ascending ranks from 0 to {size - 1} with this one ({rank}), not {group}")


def check_pieces(whole: torch.Tensor, group: tuple[int, ...]) -> None:
    """Raise ValueError unless `whole` can be cut into equal pieces, one a rank of the group."""
    if whole.numel() % len(group):
        raise ValueError(f"whole: {whole.numel()} elements cannot be cut into {len(group)} equal pieces")
