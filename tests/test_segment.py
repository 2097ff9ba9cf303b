"""Segments: names, cuts, shared bodies, and that segment by segment, forwards then backwards, is the whole step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopart.capture import capture, read
from autopart.ir.segmented import Segmented
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from tests.capture_cases import CASES, captured, normalised
from tests.interpret import assert_same, eager, segmentwise_step
from tests.models import GPT, Block


def segmented(name: str, *cuts: str) -> Segmented:
    return segment(normalised(name)[2], cuts=cuts)


def names(made: Segmented) -> list[str]:
    return [piece.name for piece in made.segments]


@pytest.mark.parametrize("name", CASES)
def test_segment_by_segment_is_the_whole(name: str) -> None:
    case = CASES[name]
    module, call, _ = normalised(name)
    made = segmented(name)
    check_flow(made)
    sized = call.resized(5)
    expected = eager(module, sized, case.loss_fn, case.target, grad=case.grad)
    assert_same(made.captured, sized, segmentwise_step(module, made, sized, 2), expected, 10 * case.tolerance)


def check_flow(made: Segmented) -> None:
    """Values flow forward only and gradients backward only; every node and every gradient is in one segment."""
    captured = made.captured
    there = {item.value.name for item in captured.of_kind("input")}
    for piece in made.segments:
        body = made.bodies[piece.body]
        assert set(piece.values) <= there
        assert len(piece.values) + len(piece.forward_fixed) + len(piece.forward_parameters) == len(body.forward.inputs)
        there |= set(piece.outputs)
    there = {item.value.name for item in captured.of_kind("tangent")}
    for piece in reversed(made.segments):
        assert set(piece.backward_inputs) <= there
        there |= set(piece.backward_outputs)
    bodies = [made.bodies[piece.body] for piece in made.segments]
    assert sum(len(body.forward.nodes) for body in bodies) == sum(not node.backward for node in captured.nodes)
    assert sum(len(body.backward.nodes) for body in bodies if body.backward) == sum(n.backward for n in captured.nodes)
    grads = Counter(target for piece in made.segments for target in piece.gradients)
    assert grads == Counter(out.target for out in captured.outputs if out.kind == "grad")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", "layers.0 layers.1 layers.2 layers.3 out"),
        ("gpt", "wte blocks.0 blocks.1 blocks.2 blocks.3 blocks.4 blocks.5 blocks.6 blocks.7 norm"),
        ("half_frozen", "encoder.0 encoder.1 encoder.2 decoder.0 decoder.1 decoder.2 output"),
        ("gpt2", "transformer.wte transformer.drop transformer.h.0 transformer.h.1 transformer.h.2 transformer.ln_f"),
        ("unet", "enc1 enc2 enc3 mid dec3 dec2 dec1 head"),
        ("lists_in_a_list", "embed groups.0.0 groups.0.1 groups.0.2 groups.1.0 groups.1.1 groups.1.2 head"),
        ("blocks_in_stages", " ".join(f"stages.{i}.{j}" for i in range(3) for j in range(3)) + " head"),
        ("shared_tables", "blocks.0 blocks.1 blocks.2 blocks.3 blocks.4 blocks.5 head"),
        ("called_twice", "lin out"),
        ("loss_fn_with_target", "0 1 2 output"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert " ".join(names(segmented(name))) == expected
    assert str(segmented(name)).splitlines()[0].startswith(expected.split()[0] + ": ")


@pytest.mark.parametrize(
    "name", ["mlp", "gpt", "half_frozen", "reused_later", "shared_tables", "tuples_between_blocks"]
)
def test_names_are_those_of_the_compile_route(name: str) -> None:
    assert names(segment(normalise(captured(name, "compile")[2]))) == names(segmented(name))


def test_a_module_that_is_reused_later() -> None:
    made = segmented("reused_later")
    assert [name for name in names(made) if name.endswith("@1")] == ["block.0@1", "block.1@1", "block.2@1"]
    uses = [piece for piece in made.segments if "block.0.weight" in piece.parameters]
    assert [piece.name for piece in uses] == ["block.0", "block.0@1"]


class Dropped(nn.Module):
    """Two uses of one module without parameters, the first of which joins the segment before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(16, 8), nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids).relu())
        for block in self.blocks:
            x = block(x)
        return self.drop(x).exp().square().mean()


@pytest.mark.parametrize("name", ["reused_later", "called_twice", "unet", "dropped"])
def test_a_plan_may_begin_a_stage_at_any_segment(name: str) -> None:
    if name == "dropped":
        ids = torch.randint(0, 16, (2, 4))
        step = normalise(capture(Dropped(), read(Dropped(), (ids,))))
    else:
        step = normalised(name)[2]
    made = names(segment(step))
    for later in range(2, len(made)):
        cuts = (made[1], made[later])
        again = names(segment(step, cuts=cuts))
        assert tuple(name for name in again if name in cuts) == cuts


def plain_gpt(layers: int, *, skips: bool) -> Segmented:
    module = GPT(layers=layers, width=8, heads=2, skips=skips)
    ids = torch.randint(0, 32, (2, 4))
    return segment(normalise(capture(module, read(module, (ids, ids)), route="direct")))


def test_repeated_layers_share_a_body() -> None:
    made = plain_gpt(5, skips=False)
    assert Counter(piece.body for piece in made.segments if piece.name.startswith("blocks.")) == {1: 5}
    assert [body.name for body in made.bodies] == ["wte", "blocks", "norm"]
    gpt = segmented("gpt")
    assert len({piece.body for piece in gpt.segments if piece.name.startswith("blocks.")}) == 4
    assert len({p.body for p in segmented("llama").segments if p.name.startswith("model.layers.")}) == 1
    assert len({p.body for p in segmented("gpt2").segments if p.name.startswith("transformer.h.")}) == 1
    assert len({p.body for p in segmented("blocks_in_stages").segments if p.name.startswith("stages.")}) == 2


def test_layers_that_differ_do_not_share() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(8, heads) for heads in (2, 2, 4, 2)])
            self.layers[3].norm2.eps = 1e-3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean()

    module = Stack()
    made = segment(normalise(capture(module, read(module, (torch.randn(2, 4, 8),)), route="direct")))
    first, second, wide, other = (piece.body for piece in made.segments[:4])
    assert len({first, wide, other}) == 3 and second != wide


def test_cuts_begin_segments() -> None:
    assert names(segmented("gpt", "blocks.4")) == names(segmented("gpt"))
    made = segmented("gpt", "head", "blocks.3.up")
    assert "head" in names(made) and "blocks.3.up" in names(made)
    check_flow(made)
    assert names(segmented("gpt", "blocks"))[1] == "blocks.0"


def test_a_cut_within_a_layer_parts_it_there_only() -> None:
    whole, made = segmented("gpt"), segmented("gpt", "blocks.3.norm2")
    check_flow(made)
    assert names(made) == [*names(whole)[:5], "blocks.3.norm2", *names(whole)[5:]]
    later = made.segments[6]
    assert made.bodies[later.body] == whole.bodies[whole.segments[5].body], "the next layer has the body it had"


MODULES = {
    "mlp": ["layers.1", "layers.1.1", "layers.3.0", "out"],
    "half_frozen": ["encoder.1", "decoder", "decoder.1", "decoder.2"],
    "unet": ["enc2", "enc3.1", "mid.0", "dec2", "dec1.2", "head"],
    "shared_tables": ["blocks.2", "blocks.2.lin", "blocks.5", "head"],
}


@settings(max_examples=12)
@given(st.data())
def test_any_cuts_give_the_same_step(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODULES)))
    cuts = data.draw(st.lists(st.sampled_from(MODULES[name]), unique=True))
    module, call, _ = normalised(name)
    made = segmented(name, *cuts)
    check_flow(made)
    for cut in cuts:
        begins = [n for n in names(made) if n == cut or n.startswith(cut + ".")]
        assert begins, (cut, names(made))
    found = segmentwise_step(module, made, call, data.draw(st.integers(1, 4)))
    assert_same(made.captured, call, found, eager(module, call), 1e-11)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("block.4", "is called 'block.4'; did you mean 'blocks"),
        ("blocks.40", "'blocks.4"),
        ("zzz", "is called 'zzz'; a stage can begin at blocks.0, blocks.1"),
        ("blocks.4@1", "is called 'blocks.4@1'"),
    ],
)
def test_unknown_cuts_are_refused(cut: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        segmented("gpt", "blocks.2", cut)


def test_planted_faults_are_seen() -> None:
    module, call, _ = normalised("gpt")
    made = segmented("gpt")
    expected = eager(module, call)
    middle = made.segments[4]
    dropped = replace(middle, gradients=(middle.gradients[1], middle.gradients[0], *middle.gradients[2:]))
    broken = replace(made, segments=(*made.segments[:4], dropped, *made.segments[5:]))
    with pytest.raises(AssertionError):
        assert_same(made.captured, call, segmentwise_step(module, broken, call, 1), expected, 1e-9)
    one, two = made.segments[1], made.segments[2]
    swapped = replace(one, forward_parameters=two.forward_parameters)
    broken = replace(made, segments=(made.segments[0], swapped, *made.segments[2:]))
    with pytest.raises(AssertionError):
        assert_same(made.captured, call, segmentwise_step(module, broken, call, 1), expected, 1e-9)
    with pytest.raises(AssertionError):
        check_flow(replace(made, segments=made.segments[::-1]))
