"""Modules in chunks where tensors are split inside them: one device's numbers, exchanges once a chunk, less kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.codegen.exchange import exchanges
from autopart.errors import CaptureError, VerificationError
from autopart.ir.placement import Shard
from autopart.ir.program import Program
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import reference_random
from tests.tensor_axis import CHEAP, LATE, close
from tests.test_chunked import Mlp, batch, padded

CHUNKS = {"h.*.mlp": 3, "lm_head": 2}

MEGATRON = {
    "*.mlp.up.weight": {"tp": Shard(0)},
    "*.mlp.gate.weight": {"tp": Shard(0)},
    "*.mlp.down.weight": {"tp": Shard(1)},
    "lm_head.weight": {"tp": Shard(0)},
}
"""Columns and rows of the MLPs, and a vocabulary in parts, whose loss exchanges sums for every token."""


class Layer(nn.Module):
    """Every token sees all others, on average; then an MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Linear(width, width), nn.LayerNorm(width), Mlp(width, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(x.mean(1, keepdim=True), self.mix.weight)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(12, 8), nn.ModuleList(Layer(8) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return padded(self.lm_head(self.norm(x)), labels)


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("mesh", "cluster", "placement", "samples"),
    [
        ({"tp": 2}, LATE, MEGATRON, 5),
        ({"tp": 2, "cp": 2}, CHEAP, None, 5),
        soak({"tp": 4}, CHEAP, None, 8),
        soak({"tp": 4}, LATE, None, 5),
        soak({"dp": 2, "tp": 2}, LATE, {**MEGATRON, "*": "fsdp"}, 6),
        soak({"pp": 2, "tp": 2}, CHEAP, None, 6),
        soak({"cp": 2}, CHEAP, None, 5),
        soak({"cp": 4}, LATE, None, 5),
        soak({"ep": 2}, CHEAP, None, 4),
    ],
)
def test_numbers_and_bytes(mesh: dict[str, int], cluster: Cluster, placement: Any, samples: int) -> None:
    torch.manual_seed(0)
    plain, args = Model().double(), batch(samples, 8, 12)
    pins: dict[str, Any] = {"mesh": mesh, "cluster": cluster, "placement": placement, "chunks": CHUNKS}
    mine = autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins)
    loss = mine(*args)
    loss.backward()
    with reference_random(torch.initial_seed(), 0):
        expected = plain(*args)
    expected.backward()
    close(loss, expected)
    for found, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
        close(found.grad, wanted.grad)
    assert mine.plan.chunks == tuple(CHUNKS.items())
    assert all(rank.bytes_sent == rank.predicted_bytes for rank in mine.report().ranks)
    mine.eval(), plain.eval()
    with torch.no_grad():
        close(mine(*args), plain(*args))


def program(**pins: Any) -> Program:
    args = batch(5, 8, 12)
    found = segment(captured_step(Model().double(), read(Model().double(), args, {}), None, False, "direct"))
    return lower(found, solve(found, mesh={"tp": 2}, cluster=LATE, placement=MEGATRON, **pins))


def test_a_place_keeps_less_and_exchanges_once_a_chunk() -> None:
    plain, made = program(), program(chunks=CHUNKS)
    before, after = (each.plan.prediction.memory[0] for each in (plain, made))
    assert after.activations < before.activations
    inside = [len(exchanges(each.staged.segmented.bodies[-1].forward, 5)) for each in (plain, made)]
    (loop,) = made.staged.segmented.bodies[-1].forward.loops
    assert inside[1] > inside[0] and len(loop.lengths(5)) == 2


def test_an_exchange_that_a_chunk_lacks_is_found() -> None:
    """The products of a place's rows, which it has twice in the first chunk instead of those of both places."""
    made = program(chunks=CHUNKS)
    source = made.ranks[0].source
    start = source.index("    for start", source.index("def norm_forward"))
    line = next(each for each in source[start:].splitlines() if "world.all_" in each)
    name, call = line.strip().split(" = ", 1)
    mine = call.split("(")[1].split(",")[0]
    broken = source.replace(line, f"        {name} = {call} if start else torch.cat(({mine}, {mine}), 1)", 1)
    ranks = (replace(made.ranks[0], source=broken), *made.ranks[1:])
    with pytest.raises(VerificationError, match=r"rule values: .*all_gather_values"):
        verify(replace(made, ranks=ranks))


def test_where_no_placement_goes_with_it_the_message_names_the_module() -> None:
    with pytest.raises(CaptureError, match=r"(?s)chunks: h\.0 cannot be computed in chunks: .*module"):
        program(chunks={"h.0": 2})
