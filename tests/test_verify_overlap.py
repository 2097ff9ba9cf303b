"""The gate of loops whose steps overlap: edited texts that train otherwise than they say are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopart
from autopart.errors import VerificationError
from autopart.ir.program import Program
from tests.test_overlapped import Layers, batches, momentum


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    """A program of each weight policy, from loops of one batch."""
    made = {}
    for schedule, mesh in (("2bw", {"pp": 2, "dp": 2}), ("pipedream", {"pp": 2}), ("pb", {"pp": 2})):
        torch.manual_seed(0)
        model, data = Layers(2).double(), batches(1, 4)
        loop = autopart.train_loop(model, momentum, data, schedule=schedule, mesh=mesh, stages=["h.1"])
        assert len(list(loop)) == 1
        assert loop.program is not None
        made[schedule] = loop.program
    return made


def edited(program: Program, before: str, after: str) -> Program:
    """The program with a line of its texts changed wherever it is, which must be somewhere."""
    assert any(before in rank.source for rank in program.ranks)
    return replace(
        program, ranks=tuple(replace(rank, source=rank.source.replace(before, after)) for rank in program.ranks)
    )


FAULTS = [
    (
        "2bw",
        "version=max(k // 2 - 1, 0)",
        "version=max(k // 2 - 1, 0) + (k == 5)",
        "rule versions: .*uses version 1 there",
    ),
    ("2bw", "keep=1", "keep=0", "version 0 of the weights is not kept; there are 1 to 1"),
    ("2bw", 'world.all_reduce("h.0", axis="dp")', "pass", 'rule updates: .*"h.0" are reduced 0 times before a step'),
    ("2bw", "world.wait()", "pass", "rule updates: .*it is not waited for before the step"),
    ("2bw", "(k + 1) % 2 == 0", "k and k % 2 == 0", "rule updates: .*0OPT0 does not come next"),
    ("2bw", "for k in batches.left(1):", "for k in batches.left(0):", "rule (transfers|stores): .*never"),
    ("pipedream", "version=used_0.pop(k)", "version=used_0.pop(k) + (k == 1)", "rule versions: .*uses version 0 there"),
    (
        "pipedream",
        "world.update(stage=1",
        "world.version(stage=1) #",
        "rule updates: .*1OPT0 does not come next",
    ),
    ("pipedream", "list(loss.values())", "[]", "rule outputs: .*for batch 0 the sum of the microbatches"),
    ("pb", "keep=0, delay=2", "keep=0", "rule versions: .*delay of 0 steps; there are 2"),
    ("pb", "microbatch=k, delay=2", "microbatch=k, delay=1", "rule versions: .*delay of 1 steps; there are 2"),
]


@pytest.mark.parametrize(("schedule", "before", "after", "message"), FAULTS)
def test_faults(programs: dict[str, Program], schedule: str, before: str, after: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        autopart.verify(edited(programs[schedule], before, after))


def test_a_step_at_the_wrong_time(programs: dict[str, Program]) -> None:
    later = edited(edited(programs["2bw"], "(k + 1) % 2 == 0", "k and k % 2 == 0"), "step=k // 2", "step=k // 2 - 1")
    with pytest.raises(VerificationError, match=r"gradients of the microbatches \[0, 1, 2\] are added up by then"):
        autopart.verify(later)


def test_what_is_checked_and_written(programs: dict[str, Program], tmp_path: Path) -> None:
    """A program read back is verified as it was made; its plan says what ranks hold and how long a step takes."""
    report = str(autopart.verify(Program.read(programs["2bw"].write(tmp_path))))
    assert "24 contributions, 12 updates" in report and "48 actions on their version of the weights" in report
    plan, one = programs["pipedream"].plan, programs["pb"].plan
    assert plan.prediction.bubble == 0 and plan.prediction.step_seconds == max(plan.prediction.stage_seconds)
    held = [[p.prediction.memory[stage].parameters for stage in (0, 1)] for p in (plan, one)]
    assert (held[0][0], held[0][1]) == (2 * held[1][0], held[1][1]), "the first stage keeps one version more"
