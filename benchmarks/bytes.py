"""Counted bytes against the kernel's: what the transport says it sent, and what went over the loopback device.

    python benchmarks/bytes.py [--mebibytes 1,8,32]

Two gloo processes make each kind of call with messages of 1 MiB and more; the kernel's counter is read before and after
(/proc/net/dev, received bytes of lo), the packets' headers included. The target: within 1%.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import machine, ranks, report

TARGET = 0.01
PROCESSES = 2
CALLS = ("send", "all_reduce", "all_gather", "reduce_scatter", "broadcast")
REPEATS = 8


def loopback() -> int:
    """Bytes that the loopback device has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise OSError("/proc/net/dev has no loopback device")


def call(transport: Any, kind: str, tensor: torch.Tensor) -> None:
    """One call of a kind, on this rank, with a whole buffer of the tensor's size."""
    everyone = tuple(range(transport.size))
    match kind:
        case "send":
            if transport.rank == 0:
                transport.send(tensor, 1)
            else:
                transport.recv(tensor.shape, tensor.dtype, 0)
        case "all_reduce":
            transport.all_reduce(tensor, everyone)
        case "all_gather":
            transport.all_gather(tensor[: tensor.numel() // transport.size], everyone)
        case "reduce_scatter":
            transport.reduce_scatter(tensor, everyone)
        case "broadcast":
            transport.broadcast(tensor, 0, everyone)
    transport.flush()


def counted(transport: Any, work: Callable[[], None]) -> tuple[int, int]:
    """Bytes of some work of all ranks: those counted, and the loopback's; both 0 but on rank 0."""
    everyone = tuple(range(transport.size))
    transport.barrier()
    time.sleep(0.3)  # what is still on its way arrives
    before = loopback(), sum(transport.bytes_sent().values())
    transport.barrier()
    work()
    transport.barrier()
    time.sleep(0.3)
    mine = sum(transport.bytes_sent().values()) - before[1]
    after = loopback()
    return sum(transport.all_gather_object(mine, everyone)), after - before[0]


def measure(sizes: list[int]) -> None:
    """Every kind at every size, and the same barriers without a call, which are taken off."""
    from autopart.runtime.distributed import join

    transport = join()
    transport.prepare([tuple(range(transport.size))])
    found = {}
    for size in sizes:
        for kind in CALLS:
            tensor = torch.zeros(size * 2**18)
            call(transport, kind, tensor)  # connections are made

            def work(kind: str = kind, tensor: torch.Tensor = tensor) -> None:
                for _ in range(REPEATS):
                    call(transport, kind, tensor)

            _, idle = counted(transport, lambda: None)
            ours, kernel = counted(transport, work)
            found[f"{kind} {size}"] = [ours, kernel - idle]
    report(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", default="1,8,32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure([int(size) for size in options.mebibytes.split(",")])
        return
    if not Path("/proc/net/dev").exists():
        print("this system has no /proc/net/dev to compare with")
        return
    found = ranks(__file__, ["--one", "--mebibytes", options.mebibytes], PROCESSES)
    print(f"{machine()}, {PROCESSES} processes, {REPEATS} calls each; target: within {TARGET:.0%}")
    print(f"{'call':16}{'MiB':>5}{'counted':>16}{'loopback':>16}{'more':>9}")
    for name, (ours, kernel) in found.items():
        kind, size = name.split()
        more = kernel / ours - 1
        print(f"{kind:16}{size:>5}{ours:16,}{kernel:16,}{more:9.2%}  {'met' if abs(more) <= TARGET else 'missed'}")


if __name__ == "__main__":
    main()
