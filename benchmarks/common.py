"""What the benchmarks share: the machine in a line, medians with bootstrap intervals, ranks as processes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the middle 95% of its bootstrap distribution."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def meets(self, target: float) -> bool:
        """Whether a target of at most `target` is met: by the interval's lower end, and nearly by the median."""
        return self.low <= target and self.median <= target + 0.03


def bootstrap(samples: Sequence[float], resamples: int = 2000) -> Interval:
    """The median of some samples, with its interval from `resamples` samples with replacement (seeded)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(resamples))
    return Interval(statistics.median(samples), medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1])


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated() -> int:
    """Bytes that this process has allocated now, over all threads, asked of the C library's allocator."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def held_and_peak(function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a call leaves allocated, and the most seen at once, above what was held before it.

    The most is that of samples a millisecond apart. Other threads count: communication frees what it sent on its own.
    """
    gc.collect()
    before, most, done = allocated(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, allocated())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    function()
    done.set()
    sampler.join()
    gc.collect()
    return allocated() - before, max(most, allocated()) - before


def machine() -> str:
    """The machine and the versions, in a line."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cpu}, {cores} cores{gpu}, torch {torch.__version__}, Python {platform.python_version()}{load}"


def seconds(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(sides: dict[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every side, an entry a round; within a round the sides take turns, each round begins with the next."""
    names = list(sides)
    for _ in range(warmup):
        for name in names:
            sides[name]()
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            found[name].append(seconds(sides[name]))
    return found


def ratios(found: dict[str, list[float]], side: str, other: str) -> Interval:
    """One side over another, round by round."""
    return bootstrap([a / b for a, b in zip(found[side], found[other], strict=True)])


def ranks(script: str, arguments: Sequence[str], nproc: int, *, threads: int = 1, timeout: float = 1800.0) -> Any:
    """Run a script as `nproc` processes under torchrun; what rank 0 saved with `report`. No process is left behind.

    Raises RuntimeError with the output where it fails, TimeoutError after `timeout` seconds.
    """
    with _Job(script, arguments, nproc, threads=threads) as job:
        return job.result(timeout)


def taking_turns(
    script: str, sides: dict[str, Sequence[str]], nproc: int, rounds: int, *, timeout: float = 1800.0
) -> dict[str, Any]:
    """What rank 0 of every side saved; a side is a script's arguments, run as `nproc` processes of its own.

    Each calls `turns`: the sides are made one after the other, and then run one at a time, in an order that begins each
    round with the next. Raises RuntimeError with the output of a side that fails, TimeoutError after `timeout` seconds.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    environment = {"BENCHMARK_STORE": str(store.port), "BENCHMARK_ROUNDS": str(rounds)}
    with ExitStack() as stack:
        jobs: dict[str, _Job] = {}

        def turn(name: str, number: int) -> None:
            store.set(f"{name} {number}", "")
            while not store.check([f"{name} {number} done"]):
                jobs[name].check(timeout)
                time.sleep(0.005)

        for name, arguments in sides.items():
            jobs[name] = stack.enter_context(_Job(script, arguments, nproc, {**environment, "BENCHMARK_SIDE": name}))
            turn(name, 0)
        for number in range(1, rounds + 1):
            first = number % len(sides)
            for name in [*sides, *sides][first : first + len(sides)]:
                turn(name, number)
        return {name: job.result(timeout) for name, job in jobs.items()}


def turns(make: Callable[[], Callable[[], Any]], meet: Callable[[], Any], warmup: int = 2) -> list[float]:
    """Seconds of what `make` makes, an entry a round, with `meet` after it: this process's part in `taking_turns`."""
    store, side = TCPStore("localhost", int(os.environ["BENCHMARK_STORE"])), os.environ["BENCHMARK_SIDE"]
    found: list[float] = []
    step: Callable[[], Any] = meet

    def timed() -> None:
        step()
        meet()

    for number in range(int(os.environ["BENCHMARK_ROUNDS"]) + 1):
        store.wait([f"{side} {number}"])
        if number:
            found.append(seconds(timed))
        else:
            step = make()
            for _ in range(warmup):
                timed()
        if os.environ.get("RANK", "0") == "0":
            store.set(f"{side} {number} done", "")
    return found


class _Job:
    """A script as processes under torchrun, all of which end with the block."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        nproc: int,
        environment: Mapping[str, str] | None = None,
        *,
        threads: int = 1,
    ) -> None:
        self.script, self.arguments, self.nproc = script, arguments, nproc
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        self.began = time.monotonic()

    def __enter__(self) -> _Job:
        self.folder = tempfile.TemporaryDirectory()
        self.saved, self.output = Path(self.folder.name) / "result", Path(self.folder.name) / "output"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.nproc}"]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**self.environment, "BENCHMARK_RESULT": str(self.saved), "PYTHONPATH": paths}
        with self.output.open("wb") as told:
            self.process = subprocess.Popen(
                [*command, self.script, *self.arguments], env=env, stdout=told, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()  # torchrun ends its processes when it is told to end
        self.process.wait()
        self.folder.cleanup()

    def check(self, timeout: float) -> None:
        """Raise where it has ended too early, or has not after so many seconds."""
        if self.process.poll() is not None and not self.saved.exists():
            status, output = self.process.returncode, self.output.read_text()
            raise RuntimeError(f"{self.script} failed (exit status {status}):\n{output}")
        if time.monotonic() - self.began > timeout:
            raise TimeoutError(f"{self.script} still ran after {timeout} s")

    def result(self, timeout: float) -> Any:
        """What rank 0 saved, once all have ended."""
        while self.process.poll() is None:
            self.check(timeout)
            time.sleep(0.02)
        if self.process.returncode:
            self.saved.unlink(missing_ok=True)
        self.check(timeout)
        return torch.load(self.saved, weights_only=True)


def report(value: Any) -> None:
    """Hand a value of plain data to the process that called `ranks`; rank 0's counts."""
    if os.environ.get("RANK", "0") == "0":
        torch.save(value, os.environ["BENCHMARK_RESULT"])
