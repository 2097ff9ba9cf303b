"""The emitted text: what a person reads. Golden files change with `--update-golden`; read the difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.codegen.source import sources
from autopart.errors import VerificationError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.ir.segmented import Segmented
from autopart.ir.state import BUCKET
from autopart.passes import emit as emitting
from autopart.passes.schedule import schedule
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from tests.models import GPT, MODELS


@cache
def program(
    name: str,
    mesh: tuple[tuple[str, int], ...],
    placement: str,
    microbatches: int,
    order: str = "1f1b",
    bucket: int = BUCKET,
) -> Program:
    model, args, kwargs = MODELS[name]()
    segmented = segment(captured_step(model, read(model, args, kwargs), None, False, "direct"))
    pins = {"placement": placement, "microbatches": microbatches, "schedule": order}
    plan = solve(segmented, devices=Mesh(mesh).size, mesh=dict(mesh), **pins)
    return lower(segmented, replace(plan, bucket=bucket))


GOLDEN = {
    "mlp_pp2_dp2_fsdp": ("mlp", (("pp", 2), ("dp", 2)), "fsdp", 3, "1f1b", 0),
    "mlp_dp2_fsdp": ("mlp", (("dp", 2),), "fsdp", 1),
    "gpt_pp2_ddp": ("gpt", (("pp", 2),), "ddp", 6),
    "half_frozen_dp2_zero1": ("half_frozen", (("dp", 2),), "zero1", 1),
    "mlp_pp2_zb_h1": ("mlp", (("pp", 2),), "ddp", 3, "zb-h1"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(name: str, golden: Callable[[str, str], None]) -> None:
    made = program(*GOLDEN[name])
    golden(f"{name}_first.py", made.ranks[0].source)
    if made.plan.mesh.degree("pp") > 1:
        golden(f"{name}_last.py", made.ranks[-1].source)
    golden(f"{name}_actions.txt", "\n".join(",".join(map(str, rank.actions)) for rank in made.ranks) + "\n")


@pytest.mark.parametrize("name", ["mlp_dp2_fsdp", "mlp_pp2_dp2_fsdp", "half_frozen_dp2_zero1"])
def test_data_ranks_have_one_text_but_for_their_number(name: str) -> None:
    made = program(*GOLDEN[name])
    for stage in made.plan.stages:
        first, last = (made.ranks[rank].source.splitlines() for rank in stage.ranks)
        unlike = [pair for pair in zip(first, last, strict=True) if pair[0] != pair[1]]
        (title, _), (_, number) = unlike
        assert title.startswith(f'"""Rank {stage.ranks[0]} of ')
        assert number == f"RANK, MESH = {stage.ranks[1]}, {dict(made.plan.mesh.axes)}"


def gpt(layers: int, *, skips: bool) -> Segmented:
    torch.manual_seed(0)
    model = GPT(layers=layers, skips=skips).double()
    ids = torch.randint(0, 32, (8, 8))
    return segment(captured_step(model, read(model, (ids, ids)), None, False, "direct"))


def lines(segmented: Segmented, mesh: dict[str, int]) -> int:
    cut = len(segmented.segments) // 2
    pins = {"stages": [segmented.segments[cut].name]} if "pp" in mesh else {}
    plan = solve(segmented, devices=Mesh.of(mesh).size, mesh=mesh, placement="zero1", microbatches=4, **pins)
    return max(len(rank.source.splitlines()) for rank in lower(segmented, plan, check=False).ranks)


@pytest.mark.parametrize(("skips", "factor"), [(False, 1), (True, 1.5)], ids=["plain", "skips"])
def test_text_does_not_grow_with_depth(skips: bool, factor: float) -> None:
    deep, shallow = gpt(10, skips=skips), gpt(6, skips=skips)
    for mesh in ({"dp": 2}, {"pp": 2, "dp": 2}):
        assert lines(deep, mesh) <= factor * lines(shallow, mesh)


def test_schedule_is_rolled() -> None:
    few, many = (program("gpt", (("pp", 2),), "ddp", m) for m in (6, 8))
    for a, b in zip(few.ranks, many.ranks, strict=True):
        assert len(a.source.splitlines()) == len(b.source.splitlines())
        assert len(a.actions) < len(b.actions)


def test_names_that_python_does_not_allow() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("lambda", nn.Linear(4, 4))
            self.add_module("b", nn.Linear(4, 4))
            self.add_module("world", nn.Linear(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.children():
                x = part(x)
            return x.sum()

    model = Odd()
    segmented = segment(captured_step(model, read(model, (torch.ones(4, 4),)), None, False, "direct"))
    made = lower(segmented, solve(segmented, devices=2, mesh={"pp": 2}, microbatches=2))
    assert all("def step(world, batch):" in rank.source for rank in made.ranks)


def test_text_that_does_something_else_than_planned_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = MODELS["mlp"]()
    segmented = segment(captured_step(model, read(model, args, kwargs), None, False, "direct"))
    plan = solve(segmented, devices=2, mesh={"dp": 2}, microbatches=2, placement="ddp")
    staged = split(shard(segmented), replace(plan, bucket=0))
    scheduled = schedule(staged, plan)

    def wrong(*args: Any) -> list[str]:
        return [text.replace('world.all_reduce("out", axis="dp")', "pass") for text in sources(*args)]

    monkeypatch.setattr(emitting, "sources", wrong)
    with pytest.raises(VerificationError, match="planned"):
        emitting.emit(staged, scheduled, plan)
