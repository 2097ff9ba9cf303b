"""Profiling: the rates of this machine's processor, measured while all ranks work at once, as a `Cluster` to plan for.

Each of several processes, which share the cores, multiplies matrices, copies memory and all-reduces over gloo. A rank
is as fast as the slowest; of repetitions the median counts. The link is what an all-reduce makes of it:

    seconds(M bytes, N ranks) = 2 (N-1) latency + 2 (N-1)/N M / bandwidth
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from autopart.cluster import Cluster
from autopart.demo import end_with, interruptible
from autopart.errors import RankFailure

PHASES = ("matmul", "memory", "latency", "bandwidth")
"""What is measured, in this order."""

SIDE = 1024
"""Rows and columns of the matrices, in float32."""

COPIED = 2**26
"""Bytes of the tensor that is copied, well beyond a cache."""

REDUCED = 2**24
"""Bytes of the tensor that is all-reduced for the bandwidth."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank measured: FLOP/s, bytes/s of memory, seconds of a small and of a large all-reduce."""

    flops: float
    bandwidth: float
    small: float
    large: float


def profile(processes: int = 2, seconds: float = 4.0, tick: Callable[[int], None] = lambda done: None) -> Cluster:
    """The present machine as a cluster of `processes` devices, measured for about `seconds` in all.

    `tick` is called with the number of phases done, of ``len(PHASES)``. However the call ends, its processes have ended
    and its files are gone.

    Raises:
        ValueError: fewer than two processes, which have no link, or no time.
        RankFailure: a process failed; the message is its last line.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 2:
        raise ValueError(f"processes: a link needs at least 2, not {processes!r}")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds: must be positive and finite, not {seconds!r}")
    with tempfile.TemporaryDirectory(prefix="autopart-profile-") as name:
        folder = Path(name)
        with _ranks(folder, processes, seconds / len(PHASES)) as ranks:
            _wait(ranks, folder, tick)
        rates = [Rates(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(processes)]
    return cluster(rates, memory=_memory() // processes)


def cluster(rates: list[Rates], memory: int) -> Cluster:
    """The cluster of equal devices that ranks with these rates are."""
    ranks, small = len(rates), max(rate.small for rate in rates)
    # A large all-reduce that is no slower than a small one says only that the link is faster than can be seen.
    transfer = max(max(rate.large for rate in rates) - small, 1e-9)
    return Cluster.uniform(
        devices=ranks,
        memory=memory,
        flops=min(rate.flops for rate in rates),
        bandwidth=min(rate.bandwidth for rate in rates),
        host=0.0,
        link_bandwidth=2 * (ranks - 1) / ranks * REDUCED / transfer,
        link_latency=small / (2 * (ranks - 1)),
        name="profiled",
    )


@contextlib.contextmanager
def _ranks(folder: Path, processes: int, budget: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The measuring processes. However the block is left, none remains."""
    ranks: list[subprocess.Popen[bytes]] = []
    threads = max(1, (os.cpu_count() or 1) // processes)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name need not resolve
    with interruptible():
        try:
            for rank in range(processes):
                about = [str(folder), str(rank), str(processes), str(budget), str(os.getpid())]
                # A session of its own, so that a Ctrl-C ends the ranks from here and not each with a traceback.
                with (folder / f"{rank}.log").open("wb") as log:
                    command = [sys.executable, "-m", "autopart.profiling", *about]
                    ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            yield ranks
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, tick: Callable[[int], None]) -> None:
    """Wait for all ranks, telling of the phases that the first has done."""
    done = folder / "0.phases"
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
                raise RankFailure(f"rank {rank} of the profile: {lines[-1] if lines else f'it ended with {code}'}")
        tick(len(done.read_bytes()) if done.exists() else 0)
        if None not in codes:
            return
        time.sleep(0.05)


def _memory() -> int:
    """Bytes of memory that the machine has, or the container that this is."""
    limit, whole = Path("/sys/fs/cgroup/memory.max"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(told)) if told.isdecimal() else whole


def measure(folder: Path, rank: int, ranks: int, budget: float) -> Rates:
    """Measure on this rank, together with the others: `budget` seconds a phase, a byte in a file after each."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    left, right, copied = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
    source, target = torch.zeros(COPIED, dtype=torch.uint8), torch.empty(COPIED, dtype=torch.uint8)
    small, large = torch.zeros(1), torch.zeros(REDUCED // 4)
    calls: tuple[Callable[[], object], ...] = (
        lambda: torch.mm(left, right, out=copied),
        lambda: target.copy_(source),
        lambda: dist.all_reduce(small),
        lambda: dist.all_reduce(large),
    )
    taken = []
    for call in calls:
        taken.append(_seconds(call, budget))
        with (folder / f"{rank}.phases").open("ab") as done:
            done.write(b".")
    dist.destroy_process_group()
    return Rates(2 * SIDE**3 / taken[0], 2 * COPIED / taken[1], taken[2], taken[3])


def _seconds(call: Callable[[], object], budget: float) -> float:
    """The median time of a call, repeated for about `budget` seconds, on every rank as often."""
    call()
    dist.barrier()
    first = time.perf_counter()
    call()
    # The slowest decides how often, so that collectives meet.
    longest = torch.tensor(time.perf_counter() - first)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    times = []
    for _ in range(max(3, min(1000, int(budget / max(longest.item(), 1e-6))))):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """The entry of a measuring process."""
    folder, rank, ranks, budget, parent = sys.argv[1:]
    end_with(int(parent))
    rates = measure(Path(folder), int(rank), int(ranks), float(budget))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(rates)))


if __name__ == "__main__":
    main()
