"""The demo: its small functions, a whole short run, and that no process outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopart import demo
from autopart.errors import RankFailure

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "autopart.cli", "demo", "--nproc", "2", "--batch", "4"]
SMALL = """
from dataclasses import dataclass

from examples.gpt import GPT, Config, batches, generate


@dataclass(frozen=True)
class Config(Config):
    layers: int = 2
    width: int = 16
    context: int = 16
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def endless(out: Path) -> list[str]:
    """The demo on a smaller model, whose file is in `out`."""
    (out / "small.py").write_text(SMALL)
    return [*COMMAND, "--steps", "100000", "--model", str(out / "small.py"), "--out", str(out)]


def processes(out: Path) -> list[int]:
    """The processes that have the settings of the demo run in `out` on their command line."""
    mark, found = str(out / "settings.json").encode(), []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def interruptible() -> None:
    """Undo that a shell which starts the tests in the background has SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until_none(out: Path, seconds: float) -> list[int]:
    """What of the run in `out` is still there after at most `seconds`."""
    end = time.monotonic() + seconds
    while processes(out) and time.monotonic() < end:
        time.sleep(0.1)
    return processes(out)


def test_sparkline() -> None:
    assert demo.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == demo.SPARKS
    assert demo.sparkline([7.0, 7.0, 0.0, 0.0], width=2) == "█▁"
    assert demo.sparkline([3.0, 3.0]) == "▁▁"
    assert len(demo.sparkline([float(i) for i in range(1000)], width=60)) == 60


def test_largest_difference() -> None:
    assert demo.largest_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError):
        demo.largest_difference([1.0], [1.0, 2.0])


def test_default_model_is_the_example() -> None:
    assert demo.default_model() == ROOT / "examples" / "gpt.py"


def test_default_model_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "autopart" / "demo.py"))
    with pytest.raises(ValueError, match=r"^model: .*pass --model FILE"):
        demo.default_model()


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    for name, text, when in (("error0.txt", "a consequence", 2), ("error1.txt", "the cause", 1)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (when, when))
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RankFailure, match="the cause") as caught:
        demo.watch(process, tmp_path / "losses.txt", lambda done: None)
    assert "a consequence" not in str(caught.value)


@pytest.mark.timeout(180)
def test_demo_says_everything(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "5", "--out", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr + (tmp_path / "log.txt").read_text()
    difference = re.search(r"largest relative difference over 5 steps: (\S+)", done.stdout)
    assert difference is not None and float(difference[1]) < 1e-4
    assert list((tmp_path / "program").rglob("*.py"))
    assert not processes(tmp_path)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    command, quiet = endless(tmp_path), subprocess.DEVNULL
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=quiet, preexec_fn=interruptible) as launcher:
        losses = tmp_path / "losses.txt"
        end = time.monotonic() + 120
        while launcher.poll() is None and time.monotonic() < end and not (losses.exists() and losses.stat().st_size):
            time.sleep(0.2)
        assert launcher.poll() is None, (tmp_path / "log.txt").read_text()
        assert len(processes(tmp_path)) >= 3  # torchrun and two ranks
        launcher.send_signal(number)
        launcher.wait(40)
    assert launcher.returncode != 0
    assert wait_until_none(tmp_path, 20) == []
