"""Both transports against plain torch: one body runs in the local world and on gloo processes."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from autopart.ir.traffic import sent_bytes
from autopart.runtime.distributed import join
from autopart.runtime.local import run_ranks
from autopart.runtime.outbox import Outbox
from autopart.runtime.transport import Transport
from tests.launch import launch

RANKS = 3
WHOLE = (0, 1, 2)
GROUPS = (WHOLE, (0, 2), (1, 2), (0,), (1,), (2,))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MOVED = (*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn)
MESSAGE = 4 << 20  # elements of float32: 16 MiB


def made(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The data that a rank brings: small whole numbers, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def floats(rank: int, *shape: int) -> torch.Tensor:
    """Data whose sum depends on the order of summing."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) * 10 ** (3 * rank)


def exercise(transport: Transport) -> dict[str, Any]:
    """Everything a transport does, on one rank; what came out, by name."""
    transport.prepare(GROUPS)
    out: dict[str, Any] = {"rank": transport.rank, "size": transport.size}
    for group in (group for group in GROUPS if transport.rank in group):
        for dtype in DTYPES:
            out[f"all_reduce {group} {dtype}"] = reduced(transport, group, dtype)
            whole = made(transport.rank, len(group), 2, 5, dtype=dtype)
            out[f"reduce_scatter {group} {dtype}"] = transport.reduce_scatter(whole, group)
        for dtype in MOVED:
            mine = made(transport.rank, 2, 3, dtype=dtype)
            out[f"all_gather {group} {dtype}"] = transport.all_gather(mine, group)
            out[f"shift {group} {dtype}"] = transport.shift(mine, group)
            transport.broadcast(mine, group[-1], group)
            out[f"broadcast {group} {dtype}"] = mine
        out[f"objects {group}"] = transport.all_gather_object({"rank": transport.rank}, group)
        out[f"numbers {group}"] = transport.all_gather_numbers((transport.rank, 2**62, -1), group)
        out[f"ordered {group}"] = transport.reduce_scatter(floats(transport.rank, 7 * len(group)), group)
    strided = made(transport.rank, 4, 3).t()
    transport.all_reduce(strided, WHOLE)
    out["strided"] = strided
    parameter = torch.nn.Parameter(made(transport.rank, 3))
    transport.all_reduce(parameter, WHOLE)
    out["parameter"] = parameter.detach()
    out["empty"] = [transport.all_gather(torch.empty(0), WHOLE), transport.reduce_scatter(torch.empty(0, 2), WHOLE)]
    transport.barrier()
    before = transport.bytes_sent()
    out["dtypes"] = dtypes_around(transport)
    out["large"] = large_both_ways(transport)
    out["shuffled"] = shuffled(transport)
    transport.flush()
    out["sent"] = {kind: count - before[kind] for kind, count in transport.bytes_sent().items()}
    out["collected"] = before
    out["refused"] = refused(transport)
    return out


def reduced(transport: Transport, group: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = made(transport.rank, 3, 4, dtype=dtype)
    transport.all_reduce(tensor, group)
    return tensor


def dtypes_around(transport: Transport) -> list[torch.Tensor]:
    """One message of every dtype, an empty and a zero-dimensional one, round the ring."""
    after, before = (transport.rank + 1) % RANKS, (transport.rank - 1) % RANKS
    for dtype in MOVED:
        transport.send(made(transport.rank, 3, 2, dtype=dtype).t(), after)
    transport.send(torch.empty(0, 4), after)
    transport.send(torch.tensor(float(transport.rank)), after)
    got = [transport.recv((2, 3), dtype, before) for dtype in MOVED]
    return [*got, transport.recv((0, 4), torch.float32, before), transport.recv((), torch.float32, before)]


def large_both_ways(transport: Transport) -> tuple[float, float]:
    """Ranks 0 and 1 each send 16 MiB before either receives."""
    if transport.rank == 2:
        return 0.0, 0.0
    peer = 1 - transport.rank
    transport.send(torch.full((MESSAGE,), float(transport.rank + 1)), peer)
    got = transport.recv((MESSAGE,), torch.float32, peer)
    return got.min().item(), got.max().item()


def shuffled(transport: Transport) -> dict[int, list[int]]:
    """Twenty numbered messages of many sizes to each peer, received in another random order of the peers."""
    peers = [rank for rank in range(RANKS) if rank != transport.rank]
    order = random.Random(transport.rank)
    turns = order.sample(peers * 20, 40)
    sent = dict.fromkeys(peers, 0)
    for peer in turns:
        transport.send(torch.full((1 + sent[peer] ** 3,), sent[peer] + 100 * transport.rank), peer)
        sent[peer] += 1
    got: dict[int, list[int]] = {peer: [] for peer in peers}
    for peer in order.sample(turns, 40):
        message = transport.recv((1 + len(got[peer]) ** 3,), torch.int64, peer)
        assert bool((message == message[0]).all())
        got[peer].append(int(message[0]))
    return got


def refused(transport: Transport) -> list[str]:
    """The messages of calls that are wrong, the same ones on every rank, after which the transport still works."""
    tensor = torch.ones(4)
    rank = transport.rank
    calls = [
        lambda: transport.send(tensor, rank),
        lambda: transport.recv((1,), torch.float32, RANKS),
        lambda: transport.all_reduce(tensor, (2, 1, 0)),
        lambda: transport.all_gather(tensor, tuple(other for other in WHOLE if other != rank)),
        lambda: transport.reduce_scatter(tensor, WHOLE),
        lambda: transport.broadcast(tensor, 9, WHOLE),
        lambda: transport.prepare([(0, 1)] if rank == 1 else [(0, 2)]),
    ]
    messages = []
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    transport.barrier()
    return messages


def process_body() -> dict[str, Any]:
    """One process of the world: `join` twice gives one transport."""
    with pytest.raises(ValueError, match="was not given to prepare"):
        join().all_reduce(torch.ones(1), (0, 1) if join().rank < 2 else (1, 2))
    assert join() is join("cpu")
    return exercise(join())


@pytest.fixture(scope="module", params=["local", "process"])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank of a world of three reports."""
    if request.param == "local":
        return run_ranks(RANKS, exercise)
    return list(launch(process_body, RANKS, timeout=60).values)


def test_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert [(out["rank"], out["size"]) for out in outcomes] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_collectives(outcomes: list[dict[str, Any]], group: tuple[int, ...]) -> None:
    for place, rank in enumerate(group):
        out = outcomes[rank]
        for dtype in DTYPES:
            total = sum(made(member, 3, 4, dtype=dtype) for member in group)
            assert torch.equal(out[f"all_reduce {group} {dtype}"], total)
            total = sum(made(member, len(group), 2, 5, dtype=dtype) for member in group)
            assert torch.equal(out[f"reduce_scatter {group} {dtype}"], total[place].reshape(-1))
        for dtype in MOVED:
            parts = [made(member, 2, 3, dtype=dtype).reshape(-1) for member in group]
            assert_same(out[f"all_gather {group} {dtype}"], torch.cat(parts))
            assert_same(out[f"shift {group} {dtype}"], parts[place - 1])
            assert_same(out[f"broadcast {group} {dtype}"], parts[-1].reshape(2, 3))
        assert out[f"objects {group}"] == [{"rank": member} for member in group]
        assert out[f"numbers {group}"] == [[member, 2**62, -1] for member in group]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_sums_run_in_group_order(outcomes: list[dict[str, Any]], group: tuple[int, ...]) -> None:
    total = floats(group[0], 7 * len(group))
    for member in group[1:]:
        total = total + floats(member, 7 * len(group))
    got = torch.cat([outcomes[rank][f"ordered {group}"] for rank in group])
    assert torch.equal(got, total)


def test_the_order_of_sums_can_be_seen() -> None:
    forwards = floats(0, 21) + floats(1, 21) + floats(2, 21)
    assert not torch.equal(forwards, floats(2, 21) + floats(1, 21) + floats(0, 21))


def test_unusual_tensors(outcomes: list[dict[str, Any]]) -> None:
    for out in outcomes:
        assert torch.equal(out["strided"], sum(made(rank, 4, 3) for rank in WHOLE).t())
        assert torch.equal(out["parameter"], sum(made(rank, 3) for rank in WHOLE))
        assert [tensor.shape for tensor in out["empty"]] == [(0,), (0,)]


def test_messages(outcomes: list[dict[str, Any]]) -> None:
    for rank, out in enumerate(outcomes):
        before = (rank - 1) % RANKS
        *moved, empty, scalar = out["dtypes"]
        for dtype, got in zip(MOVED, moved, strict=True):
            assert_same(got, made(before, 3, 2, dtype=dtype).t())
        assert empty.shape == (0, 4)
        assert scalar.item() == before
        assert out["shuffled"] == {peer: [100 * peer + i for i in range(20)] for peer in WHOLE if peer != rank}
    assert [out["large"] for out in outcomes] == [(2.0, 2.0), (1.0, 1.0), (0.0, 0.0)]


def test_a_process_ends_after_its_sends_or_some_seconds() -> None:
    outbox, taken = Outbox(waits=True), threading.Event()
    outbox.post(cast(dist.Work, SimpleNamespace(wait=taken.wait)), torch.ones(1))
    outbox.settle(0.05)
    assert not taken.is_set()
    threading.Timer(0.1, taken.set).start()
    outbox.settle(60.0)
    assert taken.is_set()
    outbox.flush()


def test_bytes_are_counted_by_the_rule(outcomes: list[dict[str, Any]]) -> None:
    for rank, out in enumerate(outcomes):
        ring = sum(6 * dtype.itemsize for dtype in MOVED) + 4
        numbered = 2 * 8 * sum(1 + i**3 for i in range(20))
        assert out["sent"] == {
            "send": ring + numbered + (4 * MESSAGE if rank < 2 else 0),
            **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "shift"), 0),
        }
        sizes = [len(group) for group in GROUPS if rank in group]
        reductions = [(12 * dtype.itemsize, size) for size in sizes for dtype in DTYPES] + [(48, 3), (12, 3)]
        gathers = [(6 * dtype.itemsize * size, size) for size in sizes for dtype in MOVED]
        assert out["collected"]["all_reduce"] == sum(sent_bytes("all_reduce", *each) for each in reductions)
        assert out["collected"]["all_gather"] == sum(sent_bytes("all_gather", *each) for each in gathers)
        assert out["collected"]["shift"] == sum(sent_bytes("shift", *each) for each in gathers)


def test_wrong_calls_are_refused_alike(outcomes: list[dict[str, Any]]) -> None:
    for rank, out in enumerate(outcomes):
        peer, far, backwards, absent, pieces, source, groups = out["refused"]
        assert peer.startswith("ValueError: peer:") and f"not {rank}" in peer
        assert far.startswith("ValueError: peer:") and "not 3" in far
        assert backwards.startswith("ValueError: group:") and "(2, 1, 0)" in backwards
        assert absent.startswith("ValueError: group:")
        assert pieces == "ValueError: whole: 4 elements cannot be cut into 3 equal pieces"
        assert source.startswith("ValueError: source:")
        assert groups == "AutopartError: prepare: rank 0 asks for the groups [(0, 2)], rank 1 for [(0, 1)]"


def test_join_needs_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"no process group: start the script with torchrun.*RANK"):
        join()


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in shape, dtype and every byte."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert bytes(got.contiguous().view(torch.uint8).reshape(-1)) == bytes(
        expected.contiguous().view(torch.uint8).reshape(-1)
    )
