"""The command line: what it reads, what it refuses, and that each command covers its function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopart import cli

ROOT = Path(__file__).parent.parent
SAMPLE = f"{ROOT / 'examples' / 'gpt.py'}:sample"
INSPECT = ["inspect", SAMPLE, "--mesh", "pp=2", "--placement", "ddp", "--microbatches", "2"]


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
    assert exit_info.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"autopart: target: .*\n", printed.err)


def test_help_names_every_command() -> None:
    printed = invoke("--help")
    assert all(name in printed for name in ("demo", "plan", "inspect"))


def test_plan_prints_and_saves(tmp_path: Path) -> None:
    printed = invoke(
        "plan", SAMPLE, "--mesh", "pp=2,dp=2", "--placement", "fsdp", "--save", str(tmp_path / "plan.json")
    )
    assert "fsdp" in printed
    assert (tmp_path / "plan.json").read_text().strip().startswith("{")


def test_inspect_prints_the_rank_or_writes_all(tmp_path: Path) -> None:
    first, second = invoke(*INSPECT), invoke(*INSPECT, "--rank", "1")
    assert "def step(" in first and "def step(" in second and first != second
    assert "2 ranks" in invoke(*INSPECT, "--out", str(tmp_path))
    assert any(tmp_path.rglob("*.py"))
    with pytest.raises(ValueError, match=r"^rank: 2 is not one of the 2 ranks"):
        invoke(*INSPECT, "--rank", "2")
