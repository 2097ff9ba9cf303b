"""`autopart profile`: what it makes of measured times, what it writes, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from autopart import cli, profiling
from autopart.cluster import Cluster
from autopart.errors import RankFailure
from autopart.profiling import REDUCED, Rates
from tests.test_cli import invoke, status

ROOT = Path(__file__).parent.parent


@given(st.floats(1e6, 1e12), st.floats(1e-6, 1e-2), st.integers(2, 8))
def test_a_link_is_what_makes_these_times(bandwidth: float, latency: float, ranks: int) -> None:
    """Times by the formula give the link back; of unlike ranks the slowest counts."""
    small = 2 * (ranks - 1) * latency
    large = small + 2 * (ranks - 1) / ranks * REDUCED / bandwidth
    rates = [Rates(2e9, 3e9, small, large), *[Rates(4e9, 1e9, small / 2, large / 2)] * (ranks - 1)]
    made = profiling.cluster(rates, memory=5)
    assert (made.devices, made.memory, made.flops, made.bandwidth) == (ranks, 5, 2e9, 1e9)
    assert made.link_latency == pytest.approx(latency)
    assert made.link_bandwidth == pytest.approx(bandwidth, rel=1e-3)


def test_a_link_too_fast_to_be_seen_is_finite() -> None:
    made = profiling.cluster([Rates(1.0, 1.0, 2e-5, 1e-5)] * 2, memory=1)
    assert made.link_bandwidth == pytest.approx(REDUCED / 1e-9)


def folders() -> set[Path]:
    return set(Path(profiling.tempfile.gettempdir()).glob("autopart-profile-*"))


def test_profile_writes_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, ticks = folders(), []
    real = profiling.profile
    monkeypatch.setattr(
        profiling, "profile", lambda n, s, tick: real(n, s, lambda done: (tick(done), ticks.append(done)))
    )
    printed = invoke("profile", "--seconds", "0.1", "--out", str(tmp_path / "here.json"))
    made = Cluster.load(tmp_path / "here.json")
    assert (made.devices, made.name) == (2, "profiled") and str(made) in printed
    assert 1e6 < made.flops < 1e15 and 1e6 < made.bandwidth < 1e13 and 0 < made.link_latency < 10
    assert ticks == sorted(ticks) and ticks[-1] == len(profiling.PHASES)
    assert folders() == before


def test_a_rank_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = folders()
    monkeypatch.setattr(profiling.sys, "executable", "/bin/false")
    with pytest.raises(RankFailure, match="rank 0 of the profile: it ended with 1"):
        profiling.profile(2, 0.1)
    assert folders() == before


def test_an_interrupt_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, started, real = folders(), [], subprocess.Popen

    def spy(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    def interrupt(done: int) -> None:
        assert [process.poll() for process in started] == [None, None] and folders() != before
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling.subprocess, "Popen", spy)
    with pytest.raises(KeyboardInterrupt):
        profiling.profile(2, 300.0, interrupt)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert folders() == before


def test_an_interrupted_command_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> Cluster:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "profile", interrupted)
    result = CliRunner().invoke(cli.app, ["profile", "--out", str(tmp_path / "out.json")])
    assert result.exit_code == 130 and "interrupted; nothing is written" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C while the ranks are at work: status 130, no process, no file."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "autopart.cli", "profile", "--seconds", "300", "--out", str(tmp_path / "out.json")]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*/1.log"))) < 1 and time.monotonic() < until:
            time.sleep(0.05)
        ranks = [int(p.name) for p in Path("/proc").glob("[0-9]*") if str(tmp_path) in command_line(p)]
        assert process.poll() is None and len(set(ranks) - {process.pid}) >= 1, ranks
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, told) == (130, "autopart: interrupted; nothing is written\n")
    assert not list(tmp_path.iterdir())
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def command_line(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().decode(errors="replace")
    return ""


def test_bad_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for processes in (1, 0, 2.0, True):
        with pytest.raises(ValueError, match="processes: a link needs at least 2"):
            profiling.profile(processes)  # type: ignore[arg-type]
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds: must be positive and finite"):
            profiling.profile(2, seconds)
    code, told = status(capsys, "profile", "--out", str(tmp_path / "nowhere" / "here.json"))
    assert code == 2 and told == f"autopart: out: there is no folder {tmp_path / 'nowhere'}\n"
    code, told = status(capsys, "plan", "x:y", "--cluster", str(tmp_path / "none.json"))
    assert code == 2 and "none.json" in told
