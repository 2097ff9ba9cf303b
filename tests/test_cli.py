"""The command line: what it reads, what it refuses, and that each command covers its function."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from autopart import cli
from examples.gpt import GPT, Config, batches

ROOT = Path(__file__).parent.parent
SAMPLE = f"{__file__}:sample"
INSPECT = ["inspect", SAMPLE, "--mesh", "pp=2", "--placement", "ddp", "--microbatches", "2"]


def sample() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """A model that compiles quickly, and its arguments."""
    config = Config(layers=2, width=16, context=8)
    ids, targets = next(batches(8, config.context))
    return GPT(config), (ids, targets)


def invoke(*arguments: str) -> str:
    """What a command prints; raises what it raises."""
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_parse_mesh() -> None:
    assert cli.parse_mesh(None) is None
    assert cli.parse_mesh("pp=2, dp=4") == {"pp": 2, "dp": 4}
    assert list(cli.parse_mesh("dp=4,pp=2") or {}) == ["dp", "pp"]


@pytest.mark.parametrize("text", ["", "pp", "pp=", "=2", "pp=two", "pp=-1", "pp=2;dp=2"])
def test_parse_mesh_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"^mesh: .*pp=2,dp=2"):
        cli.parse_mesh(text)


def test_load_target(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def two(): return 'model', (1,)\ndef three(): return 'model', (), {'x': 2}\ndef one(): return 'model'"
    )
    assert cli.load_target(f"{file}:two") == ("model", (1,), {})
    assert cli.load_target(f"{file}:three") == ("model", (), {"x": 2})
    with pytest.raises(ValueError, match=r"one\(\) must return"):
        cli.load_target(f"{file}:one")
    with pytest.raises(ValueError, match="no function 'four'"):
        cli.load_target(f"{file}:four")
    with pytest.raises(ValueError, match="is not of the form"):
        cli.load_target("mine")
    with pytest.raises(ValueError, match="is not a Python file"):
        cli.load_target(f"{tmp_path / 'absent.py'}:two")


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["autopart", "plan", "mine"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"autopart: target: .*\n", printed.err)


def test_help_names_every_command() -> None:
    printed = invoke("--help")
    assert all(name in printed for name in ("demo", "plan", "inspect", "verify", "simulate", "profile", "run"))


def test_plan_prints_and_saves(tmp_path: Path) -> None:
    printed = invoke(
        "plan", SAMPLE, "--mesh", "pp=2,dp=2", "--placement", "fsdp", "--save", str(tmp_path / "plan.json")
    )
    assert "fsdp" in printed
    assert (tmp_path / "plan.json").read_text().strip().startswith("{")


def test_inspect_prints_the_rank_or_writes_all(written: Path) -> None:
    assert invoke(*INSPECT, "--rank", "1").strip() == (written / "rank1.py").read_text().strip()
    assert (written / "rank0.py").read_text() != (written / "rank1.py").read_text()
    with pytest.raises(ValueError, match=r"^rank: 2 is not one of the 2 ranks"):
        invoke(*INSPECT, "--rank", "2")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written program."""
    folder = tmp_path_factory.mktemp("program")
    assert "2 ranks" in invoke(*INSPECT, "--out", str(folder))
    return folder


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of the command line and what it prints to the error stream."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_info:
        patch.setattr("sys.argv", ["autopart", *arguments])
        cli.main()
    return int(exit_info.value.code or 0), capsys.readouterr().err


def test_verify_a_folder(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"transfers +\d+ sends with their receives", invoke("verify", str(written)))
    edited = Path(shutil.copytree(written, tmp_path / "edited"))
    text = (edited / "rank1.py").read_text()
    (edited / "rank1.py").write_text(text.replace("world.send(", "print(", 1))
    code, told = status(capsys, "verify", str(edited))
    assert code == 1 and re.match(r"autopart: rule \w+: rank", told) and "line" in told
    for folder in (tmp_path / "absent", tmp_path):
        code, told = status(capsys, "verify", str(folder))
        assert code == 2 and re.fullmatch(r"autopart: .*: not a written program .*\n", told)


def test_simulate_a_folder_or_a_plan(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, options in ((written, []), (written / "plan.json", []), (written, ["--device", "h100-80"])):
        printed = invoke("simulate", str(path), *options)
        assert re.search(r"makespan .*\nflush bubble .*%\)\nspan .*\nrank 0 .*% busy", printed) and "rank 1" in printed
    invoke("simulate", str(written), "--svg", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and json.loads((tmp_path / "a.json").read_text())
    assert status(capsys, "simulate", "nowhere.json") == (2, "autopart: path: there is no nowhere.json\n")
    code, told = status(capsys, "simulate", str(written / "actions.json"))
    assert code == 2 and "not a plan" in told and told.count("\n") == 1


RANK = """
import os, sys, time
import autopart
rank = int(os.environ["RANK"])
# in one write, which no other rank's output comes between
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} {' '.join(sys.argv[1:])} {os.getpid()}\\n".encode())
if "fail" in sys.argv and rank == 1:
    raise ValueError("the planted fault")
if len(sys.argv) > 1 and sys.argv[1] != "--well":
    time.sleep(60)
"""


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autopart.cli", "run", "--nproc", "2", str(script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(("arguments", "code"), [(["--well", "said"], 0), (["fail"], 1)])
def test_run_a_script(arguments: list[str], code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    process = start(script, *arguments)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == code, output
    assert all(f"rank {rank} of 2 {' '.join(arguments)}" in output for rank in range(2)), output
    if code:
        assert output.count("ValueError: the planted fault") == 1, output
        assert output.count("autopart: rank 1 exited with 1; all 2 processes have ended") == 1, output
        assert output.count("Traceback") == 1, output


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    process = start(script, "wait")
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == 130, output
    ranks = [int(line.split()[-1]) for line in lines]
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks), lines


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_run_wants_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(capsys, "run", "nowhere.py") == (2, "autopart: script: there is no file nowhere.py\n")
