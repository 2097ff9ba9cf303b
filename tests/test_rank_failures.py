"""A training step that goes wrong on one rank: every process ends in time, and one message says where and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.errors import RankFailure
from autopart.ir.program import Program
from autopart.testing import LocalWorld
from tests.launch import Result, free_port, launch

LIMIT = 10.0  # seconds from the failure to the end of every process
ROOT = Path(__file__).parent.parent
BEGIN = """

def step(world, batch):
    import time

    print(f"began at {time.time()}", flush=True)
    return steps(world, batch)
"""
LINE = "return nn.functional.mse_loss(self.layers(x), y)"


class Net(nn.Module):
    """Three layers, two of them in the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def sample() -> tuple[Net, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a batch, the same on every rank."""
    torch.manual_seed(0)
    return Net(), (torch.randn(6, 4), torch.randn(6, 2))


def broken(phase: str) -> Program:
    """Two stages under 1F1B; in microbatch 2 a layer of rank 1 is given a tensor of a wrong shape."""
    model, batch = sample()
    plan = autopart.plan(model, batch, devices=2, mesh={"pp": 2}, microbatches=3, capture="direct", schedule="1f1b")
    program = autopart.compile(model, plan, batch, capture="direct")
    good = program.ranks[1]
    call = re.compile(rf"( = layers_4_{phase}\(b, B, )(\w+)")
    source, count = call.subn(r"\1\2 if k != 2 else \2[:, 1:]", good.source)
    assert count == 1, good.source
    source = source.replace("def step(", "def steps(") + BEGIN
    return replace(program, ranks=(program.ranks[0], replace(good, source=source)))


def step(case: str) -> Any:
    """One training step of a broken program, on the ranks of whatever world this is."""
    model, batch = sample()
    autopart.parallelize(model, plan=broken(case), verify=False, capture="direct")(*batch).backward()
    return "not reached"


def loop(*call: Any) -> str:
    """A training loop on data ranks in which rank 1 does something else after two steps; called with (rank,) case."""
    model, batch = sample()
    rank, case = call if len(call) == 2 else (int(os.environ["RANK"]), *call)
    parallel = autopart.parallelize(model, placement="fsdp", microbatches=1, capture="direct", stages=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for number in range(4):
        if rank == 1 and number == 2:
            print(f"began at {time.time()}", flush=True)
            if case == "stops":
                return "left"
            if case == "raises":
                raise KeyError("the user's own fault")
            kill_inside_a_step(parallel)
        parallel(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return "not reached"


def kill_inside_a_step(model: Any) -> None:
    """Have this process die at its second collective of the next step."""
    transport = model._autopart.transport
    gather, calls = transport.begin_all_gather, []

    def dying(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*args)

    transport.begin_all_gather = dying


def assert_ended(result: Result, culprit: int) -> None:
    """Every process ended with an error, in time."""
    assert all(result.codes), result
    began = re.findall(r"began at ([\d.]+)", result.outputs[culprit])
    assert len(began) == 1, result
    assert max(result.ended) - float(began[0]) < LIMIT, result


def assert_quiet(result: Result, culprit: int, cause: str) -> None:
    """Every rank but the culprit printed one line, which names the culprit."""
    for rank, output in enumerate(result.outputs):
        if rank != culprit:
            assert output.strip().startswith(f"rank {rank} stopped because rank {culprit} {cause}"), result
            assert len(output.strip().splitlines()) == 1, result


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_fault_inside_an_action_in_the_local_world(phase: str) -> None:
    with pytest.raises(RankFailure) as caught:
        step(phase)
    message = str(caught.value)
    where = f"rank 1, stage 1, microbatch 2, action {phase[0].upper()}: RuntimeError: mat1 and mat2 shapes"
    assert message.startswith(where) and re.search(rf"test_rank_failures.py:\d+  {re.escape(LINE)}", message)


def test_f078_a_fault_inside_a_forward_on_processes() -> None:
    result = launch(step, 2, ["forward"], timeout=60, check=False)
    assert_ended(result, 1)
    assert_quiet(result, 1, "failed")
    last = result.outputs[1].strip().splitlines()[-1]
    where = "RankFailure: rank 1, stage 1, microbatch 2, action F: RuntimeError: mat1 and mat2 shapes"
    assert where in last and LINE in last and result.outputs[1].count(where) == 1, result


def test_f078_a_fault_inside_a_backward_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from tests.test_rank_failures import step\nstep('backward')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.terminate()
    ended = time.time()
    assert process.returncode != 0
    assert ended - float(re.findall(r"began at ([\d.]+)", output)[0]) < LIMIT, output
    assert output.count("rank 1, stage 1, microbatch 2, action B: RuntimeError") == 1, output
    assert "rank 0 stopped because rank 1 failed" in output and "[rank0]: Traceback" not in output, output


@pytest.mark.parametrize(("case", "size", "cause"), [("raises", 2, "failed"), ("killed", 3, "was lost")])
def test_a_loop_that_fails_on_one_rank(case: str, size: int, cause: str) -> None:
    result = launch(loop, size, [case], timeout=60, check=False)
    assert_ended(result, 1)
    assert_quiet(result, 1, cause)
    assert "".join(result.outputs).count('KeyError: "the user\'s own fault"') == (case == "raises"), result


def test_f077_a_loop_that_is_shorter_on_one_rank() -> None:
    result = launch(loop, 3, ["stops"], timeout=60, check=False)
    assert result.codes == (1, 0, 1), result
    assert max(result.ended) - result.ended[1] < LIMIT, result
    message = (
        "rank 1 has ended its script already; every rank must make the same calls of the model, also for evaluation"
    )
    assert "".join(result.outputs).count(message) == 1, result
    quiet = next(output for output in (result.outputs[0], result.outputs[2]) if message not in output)
    assert re.fullmatch(r"rank \d stopped because rank \d failed", quiet.strip()), result


@pytest.mark.parametrize(
    ("case", "message"),
    [("raises", 'rank 1 failed: KeyError: "the user\'s own fault"'), ("stops", "deadlock: .*rank 1 has finished")],
)
def test_the_same_loops_in_the_local_world(case: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        LocalWorld(3).run(loop, case)


def evaluating_alone() -> str:
    """Rank 1 evaluates while rank 0 does something else for longer than the process group waits."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    model, batch = sample()
    parallel = autopart.parallelize(model, mesh={"dp": 2}, capture="direct")
    parallel(*batch).backward()
    parallel.eval()
    if dist.get_rank() == 1:
        parallel(*batch)
    time.sleep(60)
    return "not reached"


def test_f070_an_evaluation_on_one_rank_alone_names_who_is_missing() -> None:
    result = launch(evaluating_alone, 2, timeout=40, check=False)
    assert all(result.codes), result
    message = "RankFailure: rank 1: all_gather_numbers over (0, 1) cannot happen: rank 0 has not joined in; every rank"
    assert message in result.outputs[1], result
    assert result.outputs[0].strip() == "rank 0 stopped because rank 1 failed", result
