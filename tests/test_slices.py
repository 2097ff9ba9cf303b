"""What is known of values on a slice, and what is changed in a step that runs on slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopart.capture import capture, read
from autopart.ir.captured import Captured
from autopart.ir.graph import Size, refs
from autopart.ir.placement import Partial, PerSlice, Replicate, Shard
from autopart.passes.normalise import normalise
from autopart.passes.slices import UNKNOWN, given, in_slice, least_samples, of_the_slice


class Coupled(nn.Module):
    """A norm over the batch, pairs of samples, the batch inside another dim, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.norm(self.lin(x))
        pairs = h @ h.T
        folded = (h + pairs.sum(1, keepdim=True)).t().reshape(-1)
        penalty = (self.lin.weight**2).sum()
        return (folded**2).mean() + penalty + pairs.logsumexp(0).sum() / (y > 0).to(y.dtype).sum()


def coupled() -> tuple[Coupled, Any, Captured]:
    torch.manual_seed(0)
    model = Coupled().double()
    call = read(model, (torch.randn(6, 4).double(), torch.randn(6).double()))
    return model, call, capture(model, call, route="direct")


def test_facts_follow_from_shapes_and_rules() -> None:
    captured = coupled()[2]
    updated = {out.target for out in captured.updates()}
    values = {item.value.name: item.value for item in captured.inputs}
    facts = {item.value.name: given(item, item.target in updated) for item in captured.inputs}
    found: dict[str, list[Any]] = {}
    for node in captured.nodes:
        values |= {out.name: out for out in node.outs if out is not None}
        facts |= in_slice(node, values, facts)
        if not node.backward:
            found.setdefault(node.op.overloadpacket.__name__, []).append([facts[name].place for name in node.names()])
    (norm,) = found["_native_batch_norm_legit_functional"]
    assert norm[0] == Shard(0) and norm[1:] == [PerSlice()] * (len(norm) - 1)
    assert found["addmm"] == [[Shard(0)]] and found["mm"] == [[Shard(0, UNKNOWN)]]
    assert found["logsumexp"] == [[Shard(0)]]
    assert [Partial()] in found["sum"] and [Replicate()] in found["sum"] and [PerSlice()] in found["mean"]
    assert facts[captured.of_kind("buffer")[0].value.name].place == PerSlice()


def test_sizes_are_those_of_the_slice() -> None:
    captured = coupled()[2]

    def sizes(arg: Any) -> Any:
        return [s for item in arg for s in sizes(item)] if isinstance(arg, tuple) else [arg]

    found = [s for node in of_the_slice(captured.nodes) for s in sizes(node.args) if isinstance(s, Size)]
    assert found and not any(size.whole for size in found)
    assert [list(refs(n.args)) for n in of_the_slice(captured.nodes)] == [list(refs(n.args)) for n in captured.nodes]


def test_a_norm_in_training_does_not_keep_its_running_statistics() -> None:
    step = normalise(coupled()[2], semantics="accumulate")
    (backward,) = (node for node in step.nodes if node.opname == "aten.native_batch_norm_backward.default")
    assert step.sliced and backward.args[3:5] == (None, None)


def test_samples_that_a_slice_needs() -> None:
    model, call, captured = coupled()
    assert least_samples(normalise(captured, semantics="accumulate")) == 2
    model.norm.eval()
    frozen = normalise(capture(model, call, route="direct"), semantics="accumulate")
    assert frozen.sliced and least_samples(frozen) == 1
