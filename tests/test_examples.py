"""The examples run, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies

from autopart.demo import load_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: str, **variables: str) -> str:
    """What a Python command prints; its environment is this one, with some variables set."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    """The losses in what examples/train.py printed."""
    return [float(number) for number in re.findall(r"loss ([\d.]+)", printed)]


def test_gpt_learns_alone() -> None:
    gpt = load_file(EXAMPLES / "gpt.py")
    model, (ids, targets) = gpt.sample(batch=4)
    assert "import autopart" not in (EXAMPLES / "gpt.py").read_text()
    assert model(ids).shape == (*ids.shape, 256)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(8):
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert seen[-1] < seen[0] - 1.5


def test_gpt_data_is_seeded_and_shifted() -> None:
    gpt = load_file(EXAMPLES / "gpt.py")
    ids, targets = next(gpt.batches(3, 16, seed=5))
    again, _ = next(gpt.batches(3, 16, seed=5))
    other, _ = next(gpt.batches(3, 16, seed=6))
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert len(gpt.text()) > 300_000


def test_gpt_attends_to_the_past_only() -> None:
    gpt = load_file(EXAMPLES / "gpt.py")
    model, (ids, _) = gpt.sample(batch=1)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    torch.testing.assert_close(model(ids)[:, :-1], model(changed)[:, :-1])
    assert gpt.generate(model, "The ", count=5).startswith("The ")


@pytest.mark.soak
def test_train_in_one_process_and_under_torchrun_agree() -> None:
    local = losses(run("examples/train.py", "--steps", "2", "--batch", "4", "--mesh", "pp=2", "--devices", "2"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    spread = losses(run(*torchrun, "examples/train.py", "--steps", "2", "--batch", "4", "--mesh", "pp=2"))
    assert len(local) == len(spread) == 2
    assert all(abs(a - b) < 2e-4 for a, b in zip(local, spread, strict=True))


def test_inspect_program_prints_stages_and_source() -> None:
    printed = run("examples/inspect_program.py", "--rank", "1")
    for heading in ("# stage 0, forward", "# stage 1, backward", "# all that rank 1 runs", "def step("):
        assert heading in printed


def test_property_test_passes_a_few_times() -> None:
    """Here, and always with the same draws."""
    test = load_file(EXAMPLES / "property_test.py").test_trains_as_on_one_device.hypothesis.inner_test
    settings(max_examples=3, derandomize=True, database=None)(given(data=strategies.data())(test))()


@pytest.mark.soak
def test_property_test_passes() -> None:
    """A user's run draws anew; under `CI` hypothesis draws the same each time, and keeps no examples."""
    assert "each the same as one device" in run("examples/property_test.py", CI="true")
