"""The local world: deterministic order, deadlocks and mismatches named, failures end every rank."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from autopart.errors import RankFailure
from autopart.runtime.local import LocalTransport, current_transport, run_ranks
from autopart.runtime.transport import Transport
from autopart.testing.world import LocalWorld


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def test_results_come_in_rank_order() -> None:
    expected = [(rank, 4, "x") for rank in range(4)]
    assert run_ranks(4, lambda transport, x: (transport.rank, transport.size, x), "x") == expected
    assert LocalWorld(3).run(lambda rank, x: rank * x, 10) == [0, 10, 20]


def test_every_rank_finds_its_world() -> None:
    def body(transport: Transport) -> bool:
        transport.barrier()
        return current_transport() is transport

    assert run_ranks(3, body) == [True] * 3
    assert LocalWorld(2).run(lambda rank: current_transport().rank == rank) == [True] * 2
    assert current_transport() is None


def test_worlds_nest() -> None:
    def body(transport: Transport) -> list[int]:
        inner = run_ranks(2, lambda inside: current_transport() is inside and inside.size)
        assert current_transport() is transport
        return inner

    assert run_ranks(2, body) == [[2, 2], [2, 2]]


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2"])
def test_the_number_of_ranks_is_checked(n: object) -> None:
    with pytest.raises(ValueError, match="n: the number of ranks"):
        run_ranks(n, print)
    with pytest.raises(ValueError, match="n: the number of ranks"):
        LocalWorld(n)


def test_one_rank_runs_at_a_time_in_a_fixed_order() -> None:
    def once() -> list[tuple[int, int]]:
        log: list[tuple[int, int]] = []
        running: list[int] = []

        def body(transport: Transport) -> None:
            for round_ in range(5):
                assert not running
                running.append(transport.rank)
                time.sleep(0.0005 * ((transport.rank * 7 + round_) % 3))
                log.append((round_, transport.rank))
                running.pop()
                transport.send(torch.ones(1), (transport.rank + 1) % 3)
                transport.recv((1,), torch.float32, (transport.rank - 1) % 3)
                transport.barrier()

        run_ranks(3, body)
        return log

    first = once()
    assert sorted(first) == [(round_, rank) for round_ in range(5) for rank in range(3)]
    assert [rank for _, rank in first[:3]] == [0, 1, 2]
    assert all(once() == first for _ in range(3))


def test_a_sent_tensor_may_be_reused() -> None:
    def body(transport: Transport) -> list[float]:
        if transport.rank == 0:
            buffer = torch.zeros(2)
            for value in (1.0, 2.0):
                transport.send(buffer.fill_(value), 1)
            return []
        return [transport.recv((2,), torch.float32, 0)[0].item() for _ in range(2)]

    assert run_ranks(2, body)[1] == [1.0, 2.0]


def test_receives_come_in_the_order_in_which_they_were_begun() -> None:
    def body(transport: Transport) -> list[float]:
        if transport.rank == 0:
            for value in (1.0, 2.0):
                transport.send(torch.full((1,), value), 1)
            return []
        first, second = (transport.begin_recv((1,), torch.float32, 0) for _ in range(2))
        return [second.wait().item(), first.wait().item()]

    assert run_ranks(2, body)[1] == [2.0, 1.0]


def test_a_rank_that_is_alone_runs_in_the_thread_that_asks() -> None:
    assert run_ranks(1, lambda transport: threading.get_ident()) == [threading.get_ident()]
    assert current_transport() is None
    others = run_ranks(2, lambda transport: threading.get_ident())
    assert threading.get_ident() not in others


def test_ranks_do_not_share_what_a_collective_returns() -> None:
    def body(transport: Transport) -> torch.Tensor:
        gathered = transport.all_gather(torch.ones(1), (0, 1))
        transport.barrier()
        gathered += transport.rank
        transport.barrier()
        assert transport.all_gather_object([0], (0, 1))[0] is not transport.all_gather_object([0], (0, 1))[0]
        return gathered

    assert [part.tolist() for part in run_ranks(2, body)] == [[1, 1], [2, 2]]


def test_the_callers_modes_hold_on_every_rank() -> None:
    def body(transport: Transport) -> tuple[object, ...]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_grad_enabled(), product.dtype, torch.ones(1).device.type

    assert run_ranks(2, body) == [(True, torch.float32, "cpu")] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_ranks(2, body) == [(False, torch.bfloat16, "cpu")] * 2
    with torch.device("meta"):
        assert run_ranks(2, body) == [(True, torch.float32, "meta")] * 2
    assert torch.is_grad_enabled()


def test_a_failure_is_raised_once_with_its_rank() -> None:
    unwound = []

    def body(transport: Transport) -> None:
        try:
            transport.barrier()
            if transport.rank == 1:
                raise KeyError("root")
            with contextlib.suppress(Exception):
                transport.barrier()
        finally:
            unwound.append(transport.rank)

    with pytest.raises(RankFailure, match="rank 1 failed: KeyError: 'root'") as caught:
        run_ranks(3, body)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(unwound) == [0, 1, 2]


def test_a_rank_that_has_not_begun_never_does() -> None:
    begun = []

    def body(transport: Transport) -> None:
        begun.append(transport.rank)
        raise ValueError

    with pytest.raises(RankFailure, match="rank 0 failed: ValueError"):
        run_ranks(3, body)
    assert begun == [0]


def test_a_rank_failure_is_raised_as_it_is() -> None:
    error = RankFailure("rank 1, stage 0, microbatch 2")

    def body(transport: Transport) -> None:
        if transport.rank == 1:
            transport.fail(error)
            raise ValueError("a consequence")
        transport.recv((1,), torch.float32, 1)

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, body)
    assert caught.value is error


def test_what_is_not_an_exception_passes_through() -> None:
    with pytest.raises(pytest.skip.Exception):
        run_ranks(2, lambda transport: pytest.skip("no") if transport.rank else transport.barrier())


def test_a_deadlock_says_what_each_rank_waits_for() -> None:
    seen = []

    def body(transport: Transport) -> None:
        try:
            if transport.rank == 0:
                transport.recv((2, 3), torch.float32, 1)
            elif transport.rank == 1:
                transport.all_reduce(torch.ones(4), (0, 1))
        except RankFailure as error:
            seen.append((transport.rank, str(error)))
            raise

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, body)
    assert time.monotonic() - start < 2
    assert str(caught.value) == (
        "deadlock: rank 0 waits for float32[2, 3] from rank 1; "
        "rank 1 waits for all_reduce of float32[4] over group (0, 1); rank 2 has finished"
    )
    assert sorted(seen) == [(0, str(caught.value)), (1, str(caught.value))]


def differing(name: str, transport: LocalTransport) -> None:
    """A collective that rank 1 calls otherwise than the rest."""
    odd = transport.rank == 1
    match name:
        case "kind":
            transport.all_reduce(torch.ones(6), (0, 1, 2)) if odd else transport.all_gather(torch.ones(6), (0, 1, 2))
        case "shape":
            transport.all_reduce(torch.ones(5 + odd), (0, 1, 2))
        case "dtype":
            transport.reduce_scatter(torch.ones(6, dtype=torch.int32 if odd else torch.float32), (0, 1, 2))
        case "source":
            transport.broadcast(torch.ones(6), int(odd), (0, 1, 2))
        case "object":
            transport.barrier() if odd else transport.all_gather_object(1, (0, 1, 2))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("kind", r"all_gather of float32\[6\]", r"all_reduce of float32\[6\]"),
        ("shape", r"all_reduce of float32\[5\]", r"all_reduce of float32\[6\]"),
        ("dtype", r"reduce_scatter of float32\[6\]", r"reduce_scatter of int32\[6\]"),
        ("source", r"broadcast from rank 0 of float32\[6\]", r"broadcast from rank 1 of float32\[6\]"),
        ("object", "all_gather_object", "barrier"),
    ],
)
def test_mismatched_collectives_name_both_calls(name: str, first: str, second: str) -> None:
    with pytest.raises(RankFailure, match=f"rank 0 calls {first}, rank 1 calls {second}"):
        run_ranks(3, lambda transport: differing(name, transport))


def test_order_of_collectives_matters() -> None:
    def body(transport: Transport) -> None:
        shapes = [(2,), (3,)] if transport.rank else [(3,), (2,)]
        for shape in shapes:
            transport.all_reduce(torch.ones(shape), (0, 1))

    with pytest.raises(RankFailure, match="do not call the same collective"):
        run_ranks(2, body)


@pytest.mark.parametrize(("shape", "dtype"), [((3,), torch.float32), ((2,), torch.float64)])
def test_a_message_of_another_shape_or_dtype_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(torch.ones(2), 1)
        else:
            transport.recv(shape, dtype, 0)

    with pytest.raises(RankFailure, match=r"rank 1 receives .* from rank 0, which sent float32\[2\]"):
        run_ranks(2, body)


def test_an_interrupt_of_the_caller_ends_every_rank() -> None:
    ended = []

    def body(transport: Transport) -> None:
        try:
            while True:
                time.sleep(0.001)
                transport.barrier()
        finally:
            ended.append(transport.rank)

    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(3, body)
    finally:
        signal.signal(signal.SIGINT, handler)
        timer.join()
    assert sorted(ended) == [0, 1, 2]


def test_backward_on_every_rank() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def body(transport: Transport) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((weight * (transport.rank + 1)).sum(), weight)
        transport.all_reduce(gradient, (0, 1, 2))
        return gradient

    assert all(torch.equal(gradient, torch.full((3,), 6.0)) for gradient in run_ranks(3, body))
