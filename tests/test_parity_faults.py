"""`assert_parity` sees faults: programs with something dropped or scaled wrongly do not pass."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopart.ir.program import Program
from autopart.testing import assert_parity
from tests.models import MODELS
from tests.test_parity import program_for


def edited(program: Program, pattern: str, replacement: str, *, ranks: tuple[int, ...] | None = None) -> Program:
    """The program with a line of its texts changed; every text must have it."""
    changed = []
    for rank in program.ranks:
        source = rank.source
        if ranks is None or rank.rank in ranks:
            source, count = re.subn(pattern, replacement, source, flags=re.MULTILINE)
            assert count, f"rank {rank.rank} has no {pattern}"
        changed.append(replace(rank, source=source))
    return replace(program, ranks=tuple(changed))


FAULTS = {
    "dropped all-reduce": ("mlp", {"dp": 2}, "ddp", r"^( +)world\.all_reduce\(.*$", r"\1pass"),
    "dropped regather": ("mlp", {"dp": 2}, "zero1", r"^( +)world\.regather\(.*$", r"\1pass"),
    "a gradient added twice": ("mlp", {"dp": 2}, "ddp", r"^( +)(world\.accumulate\(\"out\".*)$", r"\1\2\n\1\2"),
    "a reduction not waited for": ("mlp", {"dp": 2}, "zero1", r"^( +)world\.wait\(.*$", r"\1pass"),
    "mean over the microbatch": ("mlp", {"dp": 2}, "ddp", r"\b3 \* B\b", "3 * b"),
    "one microbatch twice": (
        "mlp",
        {"dp": 2},
        "fsdp",
        r"= stage0_forward\(world, batch, \w+",
        "= stage0_forward(world, batch, 0",
    ),
    "tied gradients not summed": ("gpt", {"pp": 2}, "ddp", r"^( +)world\.all_reduce\(\"wte.weight\".*$", r"\1pass"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str) -> None:
    model_name, mesh, placement, pattern, replacement = FAULTS[name]
    model, args, kwargs = MODELS[model_name]()
    program = program_for(model_name, mesh, placement, "gpipe")
    with pytest.raises(AssertionError, match=r"gradient|loss|parameter"):
        assert_parity(model, args, kwargs, plan=edited(program, pattern, replacement))
