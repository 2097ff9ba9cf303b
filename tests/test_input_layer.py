"""Which lookup is taken out of the first segment, to be split; and that all else stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.ir.plan import INPUT, OUTPUT
from autopart.ir.segmented import Segmented
from autopart.passes.segment import segment

Begin = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers and a loss over a vocabulary, after what `begin` makes of the tokens."""

    def __init__(self, begin: Begin, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.small = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.register_buffer("places", torch.tensor([0, 3, 1, 2]))
        self.begin = begin
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.begin(self, ids)).tanh()).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def segmented(begin: Begin, *, frozen: bool = False, tied: bool = False) -> Segmented:
    model = Net(begin, tied=tied).double()
    model.table.weight.requires_grad_(not frozen)
    ids, targets = torch.randint(0, 5, (2, 3, 4))
    step = captured_step(model, read(model, (ids, targets), {}), None, False, "direct")
    return segment(step, cuts=(OUTPUT, INPUT))


TAKEN: dict[str, tuple[Begin, dict[str, Any], str]] = {
    "alone": (lambda net, ids: net.table(ids), {}, "table.weight"),
    "frozen": (lambda net, ids: net.table(ids), {"frozen": True}, "table.weight"),
    "tied": (lambda net, ids: net.table(ids), {"tied": True}, "table.weight"),
    "the largest of two": (lambda net, ids: net.small(ids % 5) + net.table(ids), {}, "table.weight"),
    "the only one of tokens": (lambda net, ids: net.small(ids) + net.table(net.places), {}, "small.weight"),
    "computed tokens": (lambda net, ids: net.table((ids.flatten().clamp(1) + 1).view(ids.shape)), {}, "table.weight"),
    "tokens that a buffer moves": (lambda net, ids: net.table(ids + net.places), {}, "table.weight"),
    "scaled by hand": (lambda net, ids: net.table(ids) * 2.0, {}, "table.weight"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_lookup_is_taken_out(name: str) -> None:
    """It is a segment of its own, with the gradient of its table, and makes the one value that the next begins with."""
    begin, options, table = TAKEN[name]
    made = segmented(begin, **options)
    lookup, *rest = made.segments
    (user,) = [segment for segment in rest if "looked_up" in segment.values]
    assert made.lookup and lookup.name == f"{user.name}.lookup" and lookup.parameters == (table,)
    assert lookup.gradients == (() if options.get("frozen") else (table,)) and not lookup.backward_outputs
    assert lookup.outputs == ("looked_up",) and lookup.backward_inputs == user.backward_outputs
    users = [segment.name for segment in rest if table in segment.parameters]
    assert users == ([made.segments[-1].name] if options.get("tied") else [])
    kinds = {item.value.name: item.kind for item in made.captured.inputs}
    assert {kinds[name] for name in lookup.values} == {"input"}


LEFT: dict[str, Begin] = {
    "used twice": lambda net, ids: net.table(ids) + net.table(ids + 1),
    "read otherwise": lambda net, ids: net.table(ids) + net.table.weight[0],
    "scaled as a whole": lambda net, ids: F.embedding(ids, net.table.weight * 2.0),
    "of computed scores": lambda net, ids: net.table((ids[..., None] * net.small.weight[0]).sum(-1).long().clamp(0)),
    "of positions": lambda net, ids: net.table(net.places) + ids[..., None].double(),
    "behind a layer": lambda net, ids: net.first(ids[..., None].expand(-1, -1, 6).double()).tanh() + net.table(ids),
    "none": lambda net, ids: ids[..., None].double() @ torch.ones(1, 6, dtype=torch.float64),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_split_stays(name: str) -> None:
    model = Net(LEFT[name]).double()
    ids, targets = torch.randint(0, 5, (2, 3, 4))
    step = captured_step(model, read(model, (ids, targets), {}), None, False, "direct")
    made, plain = segment(step, cuts=(OUTPUT, INPUT)), segment(step, cuts=(OUTPUT,))
    assert made == plain and not made.lookup


def test_the_node_that_made_the_tokens_stays_where_others_read_it() -> None:
    """A copy of it is the lookup's; without other readers it is gone."""

    def begin(net: Net, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.clamp(1)
        return net.table(tokens) * tokens[..., None]

    for both, wanted in ((begin, [1, 1]), (TAKEN["computed tokens"][0], [1, 0])):
        made = segmented(both)
        counts = [
            sum(node.aten in ("clamp", "clamp_min") for node in made.bodies[segment.body].forward.nodes)
            for segment in made.segments[:2]
        ]
        assert counts == wanted
