"""shard: placements of every value, once a body, and the refusal of a step that does not add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.errors import CaptureError
from autopart.ir.graph import Ref
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.ir.segmented import Segmented
from autopart.passes import shard as sharding
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from tests.models import MODELS


def segmented(name: str) -> Segmented:
    model, args, kwargs = MODELS[name]()
    return segment(captured_step(model, read(model, args, kwargs), None, False, "direct"))


@pytest.mark.parametrize("name", MODELS)
def test_placements_follow_the_shapes(name: str) -> None:
    found = segmented(name)
    sharded = shard(found)
    values = {value.name: value for value in found.captured.values()}
    for value, placement in sharded.between.items():
        moving = [i for i, size in enumerate(values[value].shape) if not isinstance(size, int)]
        if moving:
            assert placement == Shard(moving[0]), value
        else:
            assert placement in (Partial(), Replicate()), value
    assert sharded.between[found.captured.loss] == Partial()
    for body, inside in zip(found.bodies, sharded.inside, strict=True):
        nodes = (*body.forward.nodes, *(body.backward.nodes if body.backward is not None else ()))
        assert {name for node in nodes for name in node.names()} <= set(inside)
    assert "Shard(0) on dp" in str(sharded)


def test_equal_layers_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    once = sharding.depend
    monkeypatch.setattr(sharding, "depend", lambda *args: calls.append(1) or once(*args))
    found = segmented("llama")
    shard(found)
    bodies = {s.body: found.bodies[s.body] for s in found.segments}.values()
    distinct = sum(len(b.forward.nodes) + (len(b.backward.nodes) if b.backward is not None else 0) for b in bodies)
    assert len(calls) == distinct < len(found.captured.nodes)


def test_a_step_that_does_not_add_up_is_refused() -> None:
    found = segmented("mlp")
    last = found.segments[-1]
    body = found.bodies[last.body]
    assert body.backward is not None
    *_, weight = (v.name for v in body.backward.inputs if v.name.endswith("weight"))
    gradients = (
        *body.backward.outputs[: len(last.backward_outputs)],
        weight,
        *body.backward.outputs[len(last.backward_outputs) + 1 :],
    )
    wrong = replace(body, backward=replace(body.backward, outputs=gradients))
    bodies = tuple(wrong if i == last.body else b for i, b in enumerate(found.bodies))
    with pytest.raises(CaptureError, match=r"out: the gradient of out.weight is Replicate"):
        shard(replace(found, bodies=bodies))


def test_a_share_left_out_is_refused() -> None:
    torch.manual_seed(0)

    class Penalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).square().sum() + self.fc.weight.square().sum()

    model = Penalised()
    found = segment(captured_step(model, read(model, (torch.ones(4, 4),)), None, False, "direct"))
    shard(found)
    number = next(i for i, b in enumerate(found.bodies) if any("Share" in repr(n.args) for n in b.forward.nodes))
    body = found.bodies[number]
    scaled = next(n for n in body.forward.nodes if "Share" in repr(n.args))
    whole = {scaled.names()[0]: scaled.args[0].name}
    nodes = tuple(
        replace(n, args=tuple(Ref(whole.get(a.name, a.name)) if isinstance(a, Ref) else a for a in n.args))
        for n in body.forward.nodes
        if n is not scaled
    )
    wrong = replace(body, forward=replace(body.forward, nodes=nodes))
    with pytest.raises(CaptureError, match="adds what is equal on all microbatches"):
        shard(replace(found, bodies=tuple(wrong if i == number else b for i, b in enumerate(found.bodies))))
