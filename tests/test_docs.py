"""The README's blocks marked runnable do run: its Python as one script, the lines of each shell block in order."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopart import cli
from tests.test_examples import losses

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+) runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^\* `([^`]+\.py)`: (.*(?:\n  .*)*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def runnable(language: str) -> list[str]:
    """The README's runnable blocks of a language."""
    return [body for kind, body in BLOCK.findall((ROOT / "README.md").read_text()) if kind == language]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command at the root of the checkout, with this interpreter's scripts first in the path."""
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=100)


def test_f107_python_blocks(tmp_path: Path) -> None:
    blocks = runnable("python")
    assert len(blocks) == 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert "def step(" in done.stdout


@pytest.fixture
def handlers() -> Iterator[None]:
    """What torch's launcher does on signals is not left to later tests of this process, which would fail by it."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    kept = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, kept, strict=True):
        signal.signal(number, handler)


@pytest.mark.timeout(500)
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("block", runnable("sh"))
def test_f107_shell_lines(block: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A line may read what one before it wrote; `autopart` is called in this process, which has torch already.

    Those of a block that train have the same losses, whichever mesh and however many processes.
    """
    monkeypatch.chdir(ROOT)
    trained = []
    for command in map(shlex.split, block.splitlines()):
        if command[0] == "autopart":
            monkeypatch.setattr("sys.argv", command)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            code, (told, wrong) = ended.value.code, capfd.readouterr()
        else:
            module = ["-m", "torch.distributed.run"] if command[0] == "torchrun" else []
            done = run([sys.executable, *module, *command[1:]])
            code, told, wrong = done.returncode, done.stdout, done.stderr
        assert not code, (command, wrong)
        assert told.strip(), command
        if "examples/train.py" in command:
            trained.append(losses(told))
    assert all(len(each) == 2 and each == pytest.approx(trained[0], abs=2e-4) for each in trained)
    assert len(trained) == 3 * ("train.py" in block)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/limits.md"])
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    missing = [link for link in LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()]
    assert not missing


def listed() -> dict[str, str]:
    """What ARCHITECTURE.md says of each file, by path: the lines of each room's section."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split("\n## Files\n")[1].split("\n## ")[0]
    rooms = re.split(r"^\*\*`(autopart/[^`]*)`\*\*", text, flags=re.MULTILINE)[1:]
    found = [
        (room + name, told)
        for room, body in zip(rooms[::2], rooms[1::2], strict=True)
        for name, told in LINE.findall(body)
    ]
    assert len(found) == len(dict(found)), "a file is listed twice"
    return dict(found)


def test_architecture_lists_every_file() -> None:
    """ARCHITECTURE.md has a line for each file of the package, in its room's section, and none for others.

    The line says what the file's docstring begins with: its first sentence, or first sentences.
    """
    lines = listed()
    files = [path for path in sorted((ROOT / "autopart").rglob("*.py")) if path.name != "__init__.py"]
    assert lines.keys() == {str(path.relative_to(ROOT)) for path in files}
    for path in files:
        docstring = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        told = " ".join(lines[str(path.relative_to(ROOT))].split())
        assert told and docstring.startswith(f"{told}."), (path, told, docstring)
