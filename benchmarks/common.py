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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

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
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command = [sys.executable, *launcher, script, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "BENCHMARK_RESULT": str(result)}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{script} still ran after {timeout} s") from None
        finally:
            # torchrun ends its processes when it is told to end
            process.terminate()
            process.wait()
        if process.returncode or not result.exists():
            raise RuntimeError(f"{script} failed (exit status {process.returncode}):\n{output}")
        return torch.load(result, weights_only=True)


def report(value: Any) -> None:
    """Hand a value of plain data to the process that called `ranks`; rank 0's counts."""
    if os.environ.get("RANK", "0") == "0":
        torch.save(value, os.environ["BENCHMARK_RESULT"])
