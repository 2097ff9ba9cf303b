"""A process that has imported torch and autopart, once, and forks those that tests start, which saves them 3 s each.

It runs nothing itself, so it has one thread and no autograd engine, with which it could not be forked. What it forks
are processes as any other, but that strings have the same hashes in all of them. Tests in which these have to differ
start their processes afresh (`launch(fresh=True)`, or torchrun).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

PRELOADED = ("torch._dynamo", "torch.distributed", "networkx", "hypothesis", "pytest", "autopart.testing")


@dataclass(frozen=True, slots=True)
class Server:
    """The process that forks, and the way to it."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def ask(self, kind: str, value: object) -> Any:
        """Its answer to a request; one that is interrupted, as by a test's timeout, ends it and all that it forked."""
        try:
            self.connection.send((kind, value))
            return self.connection.recv()
        except BaseException:  # the answer may still come, and would be taken for that to the next request
            self.connection.close()
            running.cache_clear()
            raise


@dataclass(slots=True)
class Forked:
    """A forked process, as far as `subprocess.Popen` is needed of it."""

    pid: int
    server: Server = field(repr=False)
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self.server.ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int | None:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = self.server.ask("wait", self.pid)
        return self.returncode


def fork(folder: Path, env: dict[str, str], output: Path) -> Forked:
    """A process that calls what is pickled in the folder (see `tests.launch`), its streams in the file `output`."""
    server = running()
    return Forked(server.ask("fork", (str(folder), env, str(output))), server)


@functools.cache
def running() -> Server:
    """The server of this process, which ends with it."""
    mine, other = Pipe()
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(Path(__file__).parent / "launch.py"), "--serve", str(other.fileno())]
    process = subprocess.Popen(
        command, env=os.environ | path, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True
    )
    other.close()
    return Server(process, mine)


def serve(number: int) -> Path:
    """Fork a process a request; return in each of these, and in no other, the folder with its call."""
    client = Connection(number)
    for name in PRELOADED:
        importlib.import_module(name)
    parent = os.getpid()
    while True:
        try:
            kind, value = client.recv()
        except EOFError:
            os._exit(0)
        if kind == "fork":
            folder, env, output = value
            with contextlib.suppress(Exception):  # which the process itself raises again
                importlib.import_module(pickle.loads((Path(folder) / "call").read_bytes())[0])
            gc.collect()
            gc.freeze()
            if not (child := os.fork()):
                client.close()
                _become(env, output, parent)
                return Path(folder)
            client.send(child)
        else:
            ended, status = os.waitpid(value, 0 if kind == "wait" else os.WNOHANG)
            client.send(os.waitstatus_to_exitcode(status) if ended else None)


def _become(env: dict[str, str], output: str, parent: int) -> None:
    """Make this process one of its own: its session, environment and streams. It ends with the server."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.environ.clear()
    os.environ.update(env)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.close(stream)
    gc.set_threshold(50_000, 20, 100)  # as tests/conftest.py has it
