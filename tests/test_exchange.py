"""Planted faults of collectives inside bodies: each is noticed, by what a place does or by what places do together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopart.api.tensor import exchanged
from autopart.codegen.exchange import exchanges
from autopart.codegen.shapes import Bodies
from autopart.errors import VerificationError
from autopart.passes.costs import costs
from autopart.passes.verify import verify
from autopart.passes.verify_between import collectives
from autopart.passes.verify_texts import read as read_text
from autopart.solver.timing import segment_seconds
from tests.tensor_axis import CHEAP, axes, program
from tests.test_verify import edited, refused

SUM = 'addmm_1_sum = world.all_reduce_values(addmm_1, axis="tp", how="sum")'


@pytest.mark.parametrize(
    ("ranks", "old", "new", "message"),
    [
        ((1,), SUM, "addmm_1_sum = addmm_1", "rule values: rank 1, stage 0, .* inside it comes"),
        ((0, 1), SUM, "addmm_1_sum = addmm_1", "rule values: rank 0, .* where all_reduce_values of .* is due"),
        ((0, 1), SUM, SUM.replace("sum", "max").replace("_max", "_sum"), r"comes .* by \('max',\) where"),
        ((1,), SUM, f"{SUM}\n    {SUM}", "inside it comes all_reduce_values"),
        (
            (0,),
            SUM,
            SUM.replace('"tp"', '"dp"'),
            "TypeError: the mesh has no axis 'dp' to exchange values on; it has tp",
        ),
        ((0,), SUM, SUM.replace("all_reduce", "all_sum"), "no attribute 'all_sum_values'"),
        ((1,), "blocks_forward(world, b, B,", "blocks_forward(batch, b, B,", "its first argument is the world"),
    ],
)
def test_a_collective_that_is_missing_or_wrong_is_noticed(
    ranks: Sequence[int], old: str, new: str, message: str
) -> None:
    refused(program("gpt", axes(tp=2)), {rank: [(old, new)] for rank in ranks}, message)


def test_the_order_of_collectives_is_that_of_the_graph() -> None:
    """Gradients of a norm's weight and bias, of one shape, are summed the other way about at one place."""
    whole = program("gpt", axes(tp=2), CHEAP)
    sums = r"( +\w+ = world\.all_reduce_values\(.*\)\n)"
    changed, count = re.subn(rf"{sums}( +#.*\n){sums}", r"\3\2\1", whole.ranks[1].source, count=1)
    assert count == 1
    wrong = replace(whole, ranks=(whole.ranks[0], replace(whole.ranks[1], source=changed)))
    with pytest.raises(VerificationError, match=r"rule values: rank 1, .* inside it comes all_reduce_values of la"):
        verify(wrong)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SUM, "addmm_1_sum = addmm_1", r"rule collectives: rank 0, .* at that point rank 1,"),
        (SUM, f"{SUM}\n    {SUM}", r"rule collectives: rank 0, .* at that point rank 1,"),
        (
            "view_3 = aten.view.default(addmm_1_sum",
            f"{SUM}\n    view_3 = aten.view.default(addmm_1_sum",
            "rule collectives",
        ),
    ],
)
def test_places_that_do_not_meet_are_noticed(old: str, new: str, message: str) -> None:
    """By what they do together alone, whatever their graphs say."""
    wrong = edited(program("gpt", axes(tp=2)), {1: [(old, new)]})
    texts = [read_text(wrong, rank, wrong.plan.batch, Bodies()) for rank in range(2)]
    with pytest.raises(VerificationError, match=message):
        collectives(texts)


def test_a_place_that_adds_its_loss_twice_is_noticed() -> None:
    whole = program("gpt", axes(tp=2))
    text = whole.ranks[1].source.replace("world.total([],", "world.total(list(loss.values()),")
    wrong = replace(whole, ranks=(whole.ranks[0], replace(whole.ranks[1], source=text)))
    with pytest.raises(VerificationError, match=r"rule outputs: rank 1.*it sums the parts of the microbatches"):
        verify(wrong)


def test_the_text_of_another_place_is_noticed() -> None:
    """Uneven places: the first one's text computes with its own pieces."""
    whole = program("mlp", axes(tp=3), CHEAP)
    text = whole.ranks[0].source.replace("RANK, MESH = 0", "RANK, MESH = 2")
    with pytest.raises(VerificationError, match=r"rule text: rank 2, stage 0, .* action 0B0 .*is invalid for input"):
        verify(replace(whole, ranks=(*whole.ranks[:2], replace(whole.ranks[2], source=text))))


def test_the_time_of_exchanges_is_predicted_at_every_microbatch() -> None:
    """As many as the program has, of its bytes; those of the backward for the inputs are some of the backward's."""
    whole = program("gpt", axes(tp=2), CHEAP)
    calls = costs(whole.staged.segmented, lambda axis, kind, nbytes: 1)
    sent = costs(whole.staged.segmented, lambda axis, kind, nbytes: nbytes)
    for segment, call, size in zip(whole.staged.segmented.segments, calls, sent, strict=True):
        body = whole.staged.segmented.bodies[segment.body]
        assert body.backward is not None
        for samples in (2, 6):
            found = [exchanges(each, samples) for each in (body.forward, body.backward)]
            count, nbytes = call.at(samples), size.at(samples)
            assert [count.forward_exchange, count.backward_exchange] == [len(each) for each in found]
            payloads = [sum(one.payload for one in each) for each in found]
            assert [nbytes.forward_exchange, nbytes.backward_exchange] == payloads
            assert 0 <= nbytes.input_exchange <= nbytes.backward_exchange
    assert sum(call.at(2).forward_exchange for call in calls)


def test_slower_links_inside_make_the_step_longer_by_what_is_exchanged() -> None:
    whole = program("gpt", axes(tp=2), CHEAP)
    plan = whole.plan
    assert plan.tensor is not None
    numbers = [cost.at(plan.largest) for cost in costs(whole.staged.segmented, exchanged(plan.tensor))]
    silent = [replace(each, forward_exchange=0, backward_exchange=0, input_exchange=0) for each in numbers]
    with_it, without = (sum(sum(segment_seconds(each, CHEAP)) for each in row) for row in (numbers, silent))
    assert plan.prediction.stage_seconds[0] == pytest.approx(with_it) and with_it > without
