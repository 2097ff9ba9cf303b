"""Faults planted in the texts of ranks that hold several stages are refused, with a message that names them."""

from __future__ import annotations

from functools import cache

import pytest

from autopart.ir.program import Program
from autopart.passes.verify import verify
from tests.test_several_stages import V, program
from tests.test_verify import refused


@cache
def on_a_v(placement: str = "ddp") -> Program:
    """Stages 0 and 3, which share a parameter, on ranks 0 and 1; stages 1 and 2 on ranks 2 and 3."""
    return program("mixed", {"pp": 2, "dp": 2}, placement, V, 3, bucket=0)


def test_what_ranks_do_by_themselves_is_in_the_text() -> None:
    """Stages of a rank hand over in a store, and the gradient of a parameter that they share is reduced once, on dp."""
    for rank in on_a_v().ranks:
        text = rank.source
        assert "acts_1_2.pop" not in text or "send(acts_1_2" not in text
        assert 'axis="pp"' not in text
    first = on_a_v().ranks[0].source
    assert first.count('world.all_reduce("wte.weight", axis="dp")') == 1
    assert first.startswith('"""Rank 0 of 4 (pp 0, dp 0): stages 0, 3 of 4.\n\nstage 0: wte to ')
    verify(on_a_v())
    verify(on_a_v("fsdp"))


REDUCED = '    if last:\n        world.all_reduce("wte.weight", axis="dp")\n'
IN_STAGE_3 = '    world.accumulate("h.7", grads)\n'
F2 = '    with world.action("F", stage=2, microbatch=0):\n'
WAIT = "    world.wait()  #"


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        pytest.param([2, 3], [("acts_1_2.pop(0)", "acts_1_2.pop(1)")], "text: rank 2.*nothing is stored", id="other's"),
        pytest.param([0, 1], [(REDUCED, "")], 'rule gradients: rank 0.*"wte.weight" .* 0 times', id="not reduced"),
        pytest.param(
            [0, 1],
            [(REDUCED, ""), (IN_STAGE_3, IN_STAGE_3 + REDUCED)],
            "rule gradients: rank 0, stage 3, microbatch 2.*gradients are added after it",
            id="reduced by the stage that is not last",
        ),
        pytest.param(
            [0, 1],
            [(WAIT, f'    world.all_reduce("wte.weight", axis="pp", stages=(0, 3))\n{WAIT}')],
            r"rule gradients: rank 0, stage 0, 3: .*all_reduce over pp among stages \(0, 3\) 1 times.*not 0",
            id="reduced with itself",
        ),
        pytest.param(
            [2],
            [(F2, f"    world.send(acts_1_2.pop(0), stage=1, to=2, microbatch=0)\n{F2}")],
            "rule text: rank 2, stage 2, microbatch 0.*nothing is stored",
            id="sent to itself",
        ),
        pytest.param(
            [2],
            [(F2, f"    world.send((), stage=1, to=2, microbatch=0)\n{F2}")],
            "rule transfers: rank 2.*stage 2 is not on another rank",
            id="nothing sent to itself",
        ),
        pytest.param([0], [("PLACE = (0, 1, 1", "PLACE = (0, 1, 0")], "rule text: rank 0: PLACE is", id="place"),
    ],
)
def test_planted_faults(ranks: list[int], changes: list[tuple[str, str]], message: str) -> None:
    refused(on_a_v(), dict.fromkeys(ranks, changes), message)
