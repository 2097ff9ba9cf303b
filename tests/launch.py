"""Start the processes of one world for a test and take them all down again, whatever happens.

Run as a script it is the body of one rank: it calls a pickled function and leaves its result in a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fork_server import Forked, fork, serve

Process = subprocess.Popen[bytes] | Forked


@dataclass(frozen=True, slots=True)
class Result:
    """What the ranks left: exit codes, output (both streams), return values, and when each ended (`time.time`)."""

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    values: tuple[Any, ...]
    ended: tuple[float, ...]

    def __str__(self) -> str:
        ranks = zip(self.codes, self.outputs, strict=True)
        return "\n".join(f"--- rank {rank}: exit {code}\n{text}" for rank, (code, text) in enumerate(ranks))


def launch(
    target: Callable[..., Any] | str | Path,
    nproc: int,
    args: Sequence[Any] = (),
    timeout: float = 120.0,
    *,
    check: bool = True,
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> Result:
    """Run a script with command line `args`, or an importable function called with `args`, in `nproc` processes.

    They find each other by env:// on 127.0.0.1. Processes that call a function are forked from one that has imported
    all they need (`tests.fork_server`), unless they are to be `fresh`. `check` raises AssertionError with all output if
    an exit code is not 0; TimeoutError, likewise, after `timeout` seconds. No process outlives the call or its caller.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = _command(target, args, folder)
        forked = callable(target) and not fresh and sys.platform == "linux"
        processes: list[Process] = []
        try:
            port = free_port()
            for rank in range(nproc):
                variables, output = _environment(rank, nproc, port, env or {}), folder / f"{rank}.out"
                process = fork(folder, variables, output) if forked else _start(command, variables, output)
                processes.append(process)
            ended = _wait(processes, timeout)
        finally:
            for process in processes:
                _kill(process)
        result = Result(
            tuple(process.wait() or 0 for process in processes),
            tuple((folder / f"{rank}.out").read_text(errors="replace") for rank in range(nproc)),
            tuple(_value(folder / f"{rank}.value") for rank in range(nproc)),
            tuple(ended),
        )
    if len(ended) < nproc or any(when == float("inf") for when in ended):
        raise TimeoutError(f"still running after {timeout} s\n{result}")
    if check and any(result.codes):
        raise AssertionError(f"exit codes {result.codes}\n{result}")
    return result


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _command(target: Callable[..., Any] | str | Path, args: Sequence[Any], folder: Path) -> list[str]:
    if not callable(target):
        return [sys.executable, str(target), *map(str, args)]
    (folder / "call").write_bytes(pickle.dumps((target.__module__, target.__qualname__, tuple(args))))
    return [sys.executable, __file__, str(folder)]


def _environment(rank: int, nproc: int, port: int, extra: dict[str, str]) -> dict[str, str]:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_PORT": port}
    return {
        **os.environ,
        **{name: str(value) for name, value in world.items()},
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def _start(command: list[str], env: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    with output.open("wb") as stream:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )


def _wait(processes: Sequence[Process], timeout: float) -> list[float]:
    """When each process ended; infinity for those that had not when time was up."""
    ended = [float("inf")] * len(processes)
    until = time.monotonic() + timeout
    while float("inf") in ended and time.monotonic() < until:
        for rank, process in enumerate(processes):
            if ended[rank] == float("inf") and process.poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.02)
    return ended


def _kill(process: Process) -> None:
    """End a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _value(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else None


def _rank(folder: Path) -> None:
    """Call the pickled function in this process."""
    import importlib

    module, name, args = pickle.loads((folder / "call").read_bytes())
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    torch.save(function(*args), folder / f"{os.environ['RANK']}.value")


if __name__ == "__main__":
    _rank(serve(int(sys.argv[2])) if sys.argv[1] == "--serve" else Path(sys.argv[1]))
