"""A rank that fails or is killed ends every process within seconds, and the cause is shown once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopart.runtime.distributed import join
from autopart.runtime.watch import Watch, _Links
from tests.launch import Result, free_port, launch

LIMIT = 10.0  # seconds from the failure to the end of every process
BUSY = 60.0  # seconds that a rank would take if nothing ended it


def stamp() -> None:
    print(f"failing at {time.time()}", flush=True)


def body(case: str) -> str:
    """One rank of three; the others wait in a receive, a collective or plain computing when it happens."""
    if case == "rank 1":
        dist.init_process_group("gloo")
    if case.startswith("late ") and os.environ["RANK"] == "2":
        watch_late()
    transport = join()
    transport.all_reduce(torch.ones(1), (0, 1, 2))
    culprit = {"rank 0": 0, "rank 1": 1, "kill rank 0": 0, "kill rank 2": 2}.get(case)
    if transport.rank == culprit:
        time.sleep(1.2)  # the others are waiting by then
        stamp()
        if case.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "rank 1":
            transport.fail(ValueError("the planted fault"))
        raise ValueError("the planted fault")
    if case.startswith(("early ", "late ")):
        return leave_early(transport.rank, Path(case.split(" ", 1)[1]))
    if transport.rank == (culprit + 1) % 3:
        transport.recv((4,), torch.float32, culprit)
    elif case == "rank 1":
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(BUSY)
    return "not reached"


def watch_late() -> None:
    """Let this rank come to watch the others only when they may have left already, as on a busy machine."""
    connect = _Links._connect

    def late(links: _Links) -> None:
        time.sleep(1.0)
        connect(links)

    _Links._connect = late  # type: ignore[method-assign]


def leave_early(rank: int, note: Path) -> str:
    """Rank 0, which hosts the store, is done at once; the others go on, and still talk when its process is gone."""
    if rank == 0:
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
        return "left"
    until = time.monotonic() + BUSY / 2
    while not (note.exists() and not Path(f"/proc/{note.read_text()}").exists()):
        if time.monotonic() > until:
            return "rank 0 waits for the others"
        time.sleep(0.05)
    transport = join()
    if rank == 1:
        transport.send(torch.ones(3), 2)
        transport.flush()
        return "sent"
    return f"got {int(transport.recv((3,), torch.float32, 1).sum())}"


def assert_ended(result: Result, culprit: int) -> None:
    """Every process ended with an error, in time."""
    stamps = re.findall(r"failing at ([\d.]+)", result.outputs[culprit])
    assert len(stamps) == 1, result
    assert all(code != 0 for code in result.codes), result
    assert max(result.ended) - float(stamps[0]) < LIMIT, result


@pytest.mark.parametrize(("case", "culprit"), [("rank 1", 1), ("rank 0", 0)])
def test_a_rank_that_raises(case: str, culprit: int) -> None:
    result = launch(body, 3, [case], timeout=40, check=False)
    assert_ended(result, culprit)
    assert "".join(result.outputs).count("ValueError: the planted fault") == 1, result
    assert "ValueError: the planted fault" in result.outputs[culprit]
    for rank, output in enumerate(result.outputs):
        if rank != culprit:
            assert output.strip() == f"rank {rank} stopped because rank {culprit} failed", result


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_is_killed(culprit: int) -> None:
    result = launch(body, 3, [f"kill rank {culprit}"], timeout=40, check=False)
    assert_ended(result, culprit)
    for rank, output in enumerate(result.outputs):
        if rank != culprit:
            lines = [line for line in output.splitlines() if line.startswith("rank ")]
            assert len(lines) == 1, result
            assert lines[0].startswith(f"rank {rank} stopped because rank {culprit} was lost"), result
            assert "Traceback" not in output, result


@pytest.mark.parametrize(("gone", "cause"), [(True, "rank 2 was lost (its"), (False, "rank 0 was lost (it hosted")])
def test_the_first_of_two_lost_ranks_is_named(gone: bool, cause: str) -> None:
    """Rank 0, of which rank 1 has not heard yet, took rank 2 with it; unless it had said goodbye before."""

    class Store:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    watch: Any = object.__new__(Watch)
    watch._hosted, watch._store, watch._store_left = True, Store(), gone
    assert watch._lost(2).startswith(cause)


@pytest.mark.parametrize("case", ["early", "late"])
def test_a_rank_that_is_done_early_harms_nobody(case: str, tmp_path: Path) -> None:
    result = launch(body, 3, [f"{case} {tmp_path / 'process'}"], timeout=40)
    assert result.values == ("left", "sent", "got 3")
    assert not any(result.outputs), result


def test_launch_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(TimeoutError, match=r"still running after 1.0 s") as caught:
        launch(script, 2, timeout=1.0)
    started = [int(number) for line in re.findall(r"^\d+ \d+$", str(caught.value), re.M) for number in line.split()]
    assert len(started) == 4
    assert not any(is_running(process) for process in started)


def is_running(process: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch\n"
        "from autopart.runtime.distributed import join\n"
        "transport = join()\n"
        "transport.barrier()\n"
        "if transport.rank == 1:\n"
        "    raise ValueError('the planted fault')\n"
        "transport.recv((1,), torch.float32, 1)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(script)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode != 0
    assert output.count("ValueError: the planted fault") == 1, output
    assert "[rank0]: Traceback" not in output, output
