"""Placements inside segments that a plan holds: on file, tampered with, pinned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopart
from autopart.api.compiler import compile, lower
from autopart.errors import VerificationError
from autopart.ir.codec import decode
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.verify import verify
from tests.tensor_axis import LATE, axes, how, made, program, solved

# ---- the plan on file ------------------------------------------------------------------------------------------------


def test_a_saved_plan_and_a_written_program_are_the_same_program(tmp_path: Path) -> None:
    whole = program("llama", axes(tp=2))
    whole.plan.save(tmp_path / "plan.json")
    again = lower(made("llama")[2], Plan.load(tmp_path / "plan.json"))
    assert [rank.source for rank in again.ranks] == [rank.source for rank in whole.ranks]
    back = Program.read(whole.write(tmp_path / "program"))
    assert back.others == whole.others
    assert verify(back) == verify(whole)


Path_ = tuple[str | int, ...]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("choices", 1, "forward", "outputs", 0),
            {"is": "Shard", "dim": 1, "outer": 1, "unit": 1},
            "is needed as Shard",
        ),
        (("choices", 1, "forward", "moves"), [], "is needed as .*, and is never made that"),
        (("choices", 1, "saved", 0), {"is": "Partial"}, "is needed as Partial|is saved as"),
        (("choices", 1, "forward", "strategies"), [], "choices for .* inputs, operators and outputs"),
        (("segments", 1), 0, ""),
        (("segments", 1), 9, "there are"),
        (("degree",), 3, "its mesh is"),
        (("parameters", 0, 1), {"is": "Shard", "dim": 0, "outer": 1, "unit": 1}, "token.weight is Shard"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(path: Path_, value: Any, message: str) -> None:
    segmented = made("gpt")[2]
    data = json.loads(program("gpt", axes(tp=2)).plan.to_json())
    inner: Any = data["plan"]["tensor"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=r"since it was written: tensor|its mesh is|there are|choices for"):
        Plan.from_json(json.dumps(data))
    if not message:  # choices of another body: the step is placed anew
        assert verify(lower(segmented, decode(Plan, data["plan"], "plan")))
        return
    with pytest.raises((VerificationError, ValueError), match=message):  # as a plan that was made so
        lower(segmented, decode(Plan, data["plan"], "plan"))


def test_what_passes_between_segments_is_held_to_the_plan() -> None:
    whole = program("gpt", axes(tp=2))
    tensor = whole.plan.tensor
    assert tensor is not None
    for name, placement in ((tensor.between[0][0], Shard(1)), (whole.captured.loss or "", Partial())):
        wrong = replace(tensor, between=((name, placement), *tensor.between[1:]))
        with pytest.raises(VerificationError, match=f"between segments on tp: {name} is"):
            lower(made("gpt")[2], replace(whole.plan, tensor=wrong))


# ---- pins ------------------------------------------------------------------------------------------------------------


def test_pins_are_kept() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    found = solved(
        "mlp", {"dp": 2, "tp": 2}, {"out.weight": {"tp": Shard(1)}, "layers.0": {"tp": Replicate()}, "*": "zero1"}
    )
    assert how(found, "out.weight") == Shard(1)
    assert how(found, "layers.0.0.weight") == how(found, "layers.0.0.bias") == Replicate()
    assert str(found.plan.placements[-1][1]) == "zero1"
    placed = solved("gpt", {"tp": 2}, {"*.qkv.weight": {"tp": TorchShard(0)}, "*.up.weight": {"tp": Shard(-1)}})
    assert how(placed, "blocks.1.qkv.weight") == Shard(0, 3)  # in each of query, key and value
    assert how(placed, "blocks.0.up.weight") == Shard(1)


@pytest.mark.parametrize(
    ("mesh", "placement", "error", "message"),
    [
        ({"tp": 2}, {"*.gone": {"tp": Shard(0)}}, ValueError, "'[*].gone'"),
        ({"dp": 2}, {"out": {"tp": Shard(0)}}, ValueError, "'out' is placed on 'tp', but the mesh has no axis"),
        ({"tp": 2}, {"out": {"dp": Shard(0)}}, ValueError, "'out' is placed on 'dp', but tensors are split on 'tp'"),
        ({"tp": 2}, {"out.bias": {"tp": Shard(1)}}, ValueError, "'out.bias' is to be split along dim 1, but it has 1"),
        ({"tp": 2}, {"out": {"tp": "ddp"}}, TypeError, "'out' has 'ddp'; on an axis it is autopart.Shard"),
        ({"tp": 2}, {"out": {"tp": Partial()}}, TypeError, "autopart.Shard"),
        ({"tp": 6}, {"out.bias": {"tp": Shard(0)}}, ValueError, "'out.bias' cannot be Shard.0. on this axis"),
        ({"tp": 2}, {"out.bias": {"tp": Shard(0, 3)}}, ValueError, "'out.bias' cannot be Shard.0, inside 3"),
    ],
)
def test_pins_that_cannot_be_are_refused_by_name(mesh: Any, placement: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        solved("mlp", mesh, placement)


def test_names_are_public() -> None:
    assert autopart.Shard is Shard and autopart.Replicate is Replicate and autopart.Partial is Partial


def test_compile_takes_a_plan_of_a_tensor_axis() -> None:
    model, args, _ = made("mlp")
    plan = autopart.plan(model, args, mesh={"tp": 2}, cluster=LATE, capture="direct")
    assert compile(model, plan, args, capture="direct").ranks[0].source == program("mlp", axes(tp=2)).ranks[0].source
