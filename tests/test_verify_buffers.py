"""Valid updates of buffers pass `verify`; a fault planted in them is refused, with a message that names it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopart.api import compile, plan
from autopart.ir.program import Program
from autopart.passes.verify import verify
from tests.test_verify import refused


class Normed(nn.Module):
    """A BatchNorm on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh()).pow(2).mean()


@cache
def normed() -> Program:
    torch.manual_seed(0)
    model, args = Normed(), (torch.randn(8, 4),)
    pins = {"mesh": {"pp": 2, "dp": 2}, "stages": ["one", "two"], "microbatches": 2, "schedule": "gpipe"}
    chosen = plan(model, args, semantics="accumulate", capture="direct", **pins)
    return compile(model, chosen, args, semantics="accumulate", capture="direct")


def test_the_report_counts_updates() -> None:
    assert "buffers          24 updates of buffers" in str(verify(normed()))


MEAN = '    world.update_buffer("one.1.running_mean", updated[1])\n'
VAR = '    world.update_buffer("one.1.running_var", updated[2])\n'
AVERAGE = '    world.average_buffers("one.1.running_mean", "one.1.running_var", axis="dp")\n'
LARGEST = '    world.maximum_buffers("one.1.num_batches_tracked", axis="dp")\n'
STORES = "    saved_0 = world.store()\n"
SPREAD = (
    '    world.broadcast_buffers("two.1.num_batches_tracked", "two.1.running_mean", "two.1.running_var", stage=1)\n'
)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        pytest.param([0], [(MEAN, "")], 'rank 0, stage 0, microbatch 0, .*"one.1.running_mean" .* 0 times', id="none"),
        pytest.param([1], [(MEAN, MEAN * 2)], 'rank 1, .*"one.1.running_mean" is updated 2 times', id="twice"),
        pytest.param(
            [0],
            [(MEAN + VAR, MEAN.replace("[1]", "[2]") + VAR.replace("[2]", "[1]"))],
            "values: rank 0, .*the new one.1.running_var is passed where the new one.1.running_mean belongs",
            id="swapped",
        ),
        pytest.param(
            [0], [(MEAN, MEAN.replace("one", "two"))], "values: .*the new two.1.running_mean belongs", id="another's"
        ),
        pytest.param([0], [(MEAN, MEAN.replace("running_mean", "mean"))], "no buffer is called", id="unknown"),
        pytest.param(
            [0], [(MEAN, MEAN.replace("[1]", "[0]"))], r"text: .*float32\[4\], its new value int64\[\]", id="shape"
        ),
        pytest.param(
            [0],
            [(MEAN, MEAN.replace("updated[1]", 'world.buffer("one.1.running_mean")'))],
            "values: rank 0, .*is passed where the new one.1.running_mean belongs",
            id="old value",
        ),
        pytest.param([0, 1], [(AVERAGE, "")], "average_buffers 0 times, not 1", id="no average"),
        pytest.param([0, 1], [(AVERAGE, AVERAGE * 2)], "average_buffers 2 times, not 1", id="averaged twice"),
        pytest.param(
            [0, 1],
            [(AVERAGE, AVERAGE.replace("average", "maximum"))],
            "average_buffers 0 times, not 1",
            id="largest of floats",
        ),
        pytest.param([0], [(LARGEST, "")], "maximum_buffers 0 times, not 1", id="one rank alone"),
        pytest.param(
            [0, 1], [(AVERAGE, ""), (STORES, AVERAGE + STORES)], "a buffer is updated after it", id="before the step"
        ),
        pytest.param([0, 1, 2, 3], [(SPREAD, "")], "broadcast_buffers from stage 1 0 times, not 1", id="kept alone"),
        pytest.param(
            [0, 1, 2, 3], [(SPREAD, SPREAD.replace("=1", "=0"))], "from stage 1 0 times, not 1", id="from another"
        ),
    ],
)
def test_planted_faults(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(normed(), dict.fromkeys(ranks, changes), f"(?s)rule .*{message}")
