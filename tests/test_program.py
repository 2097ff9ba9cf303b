"""A written program is read back as it was, verified, and run, edited or not; nothing else is taken for one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import Program
from autopart.api.compiler import built, sampled
from autopart.ir.codec import decode, encode
from autopart.ir.graph import Arg, Ref, Share, Size
from autopart.testing import LocalWorld
from tests.models import MODELS


def compiled(name: str, **pins: Any) -> tuple[Any, Any, Any, Program]:
    model, args, kwargs = MODELS[name]()
    pins = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "placement": "zero2", **pins}
    return model, args, kwargs, built(sampled(model, args, kwargs, capture="direct"), **pins)


@pytest.mark.parametrize("name", ["mlp", "half_frozen", "llama"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    program = compiled(name)[-1]
    read = Program.read(program.write(tmp_path / "made"))
    assert (read.ranks, read.plan, read.state) == (program.ranks, program.plan, program.state)
    constants = [(c.name, c.tensor) for c in read.captured.constants]
    for (name, tensor), constant in zip(constants, program.captured.constants, strict=True):
        assert name == constant.name and torch.equal(tensor, constant.tensor)
    assert str(read.staged) == str(program.staged) and read.captured.nodes == program.captured.nodes
    assert str(autopart.verify(read)) == str(autopart.verify(program))
    assert [graphs.forward.code for graphs in read.stages] == [graphs.forward.code for graphs in program.stages]


def test_an_edited_text_is_verified_and_runs(tmp_path: Path) -> None:
    """The edit is in the text that runs, and one that breaks a rule does not pass."""
    model, args, kwargs, program = compiled("mlp", mesh={"dp": 2}, placement="ddp")
    folder = program.write(tmp_path)
    for rank in (0, 1):
        path = folder / f"rank{rank}.py"
        text = path.read_text()
        assert text.count("one = torch.ones((), dtype=torch.float64, device=DEVICE)") == 1
        path.write_text(
            text.replace("device=DEVICE)", "device=DEVICE)\n    one = handed(one)").replace(
                "\ndef step(", "\ndef handed(one):\n    return one\n\n\ndef step("
            )
        )
    edited = Program.read(folder)
    autopart.verify(edited)
    plain = copy.deepcopy(model)
    plain(*args, **kwargs).backward()

    def rank_main(rank: int) -> Any:
        mine = autopart.parallelize(copy.deepcopy(model), plan=Program.read(folder), capture="direct")
        mine(*args, **kwargs).backward()
        return mine.full_grads(), mine.program.ranks[rank].source

    for grads, source in LocalWorld(2).run(rank_main):
        assert "handed" in source
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-14)
    (folder / "rank1.py").write_text((folder / "rank1.py").read_text().replace("world.accumulate", "print", 1))
    with pytest.raises(autopart.VerificationError, match="rank 1"):
        autopart.verify(Program.read(folder))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("folder", "not a written program .there is no such folder"),
        ("empty", "it has no program.json"),
        ("rank", r"rank1\.py: missing from the written program"),
        ("schema", "expected schema 'autopart.program', version 4"),
        ("operator", "expected an operator that is registered here .*'aten.nothing.default'"),
        ("field", r"staged: missing field edges"),
        ("json", "program.json: not JSON"),
    ],
)
def test_what_is_no_program_is_refused(case: str, words: str, tmp_path: Path) -> None:
    folder = compiled("mlp", mesh={"pp": 2})[3].write(tmp_path / "made")
    data = json.loads((folder / "program.json").read_text())
    match case:
        case "folder":
            folder = tmp_path / "absent"
        case "empty":
            folder = tmp_path
        case "rank":
            (folder / "rank1.py").unlink()
        case "schema":
            data["version"] = 1
        case "operator":
            data["staged"]["sharded"]["segmented"]["captured"]["nodes"][0]["op"] = "aten.nothing.default"
        case "field":
            del data["staged"]["edges"]
    if folder.name == "made":
        (folder / "program.json").write_text("{" if case == "json" else json.dumps(data))
    with pytest.raises(ValueError, match=words):
        Program.read(folder)


ARGUMENTS = [
    Ref("x"),
    Size(3, 1),
    Size(0.5, inverse=True, whole=True),
    Share(2.0),
    (1, 2.5, True, None, "text", (Ref("y"),)),
    float("-inf"),
    1 + 2j,
    torch.float16,
    torch.device("cpu"),
    torch.strided,
    torch.channels_last,
    torch.ops.aten.mm.default,
]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_arguments_as_data(argument: Arg) -> None:
    found = decode(Any, json.loads(json.dumps(encode(argument, Any))), "here")
    assert found == argument and type(found) is type(argument)


@pytest.mark.parametrize(
    "data", [{"is": "Module"}, {"is": "operator", "value": "os.system"}, {"is": "float", "value": "x"}]
)
def test_data_that_names_something_else(data: Any) -> None:
    with pytest.raises(ValueError, match=r"^here: expected"):
        decode(Any, data, "here")


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Linear cannot be written as data"):
        encode(nn.Linear(1, 1), Any)
