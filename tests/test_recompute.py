"""Recomputation: the same gradients from less that is kept, the user's checkpoint regions, what is never run again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopart import parallelize
from autopart.api.compiler import captured_step, lower, solve
from autopart.api.plain import check_hooks
from autopart.capture import read
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Output
from autopart.ir.segmented import Body, Segmented
from autopart.passes.costs import costs, recomputed
from autopart.passes.recompute import recompute
from autopart.passes.segment import segment
from autopart.passes.verify import verify
from autopart.testing import assert_parity
from tests.capture_cases import CASES, normalised
from tests.interpret import assert_same, distance, eager, segmentwise_step
from tests.models import GPT, Block


def names(segmented: Segmented) -> list[str]:
    return [item.name for item in segmented.segments]


def body(segmented: Segmented, name: str) -> Body:
    return segmented.bodies[next(item.body for item in segmented.segments if item.name == name)]


def again(found: Body) -> list[str]:
    """The operators that a backward runs again."""
    assert found.backward is not None
    return [node.opname.split(".")[1] for node in found.backward.nodes if not node.backward]


def kept(segmented: Segmented) -> int:
    """What all segments save of a microbatch of 4."""
    return sum(cost.at(4).saved_bytes for cost in costs(segmented))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gpt2", "llama")])
def test_gradients_stay_those_of_one_device(name: str) -> None:
    """Every segment recomputed, and every second one, two microbatches, segment by segment from what is saved alone."""
    case, (module, call, captured) = CASES[name], normalised(name)
    plain = segment(captured)
    if not captured.training:
        assert recompute(plain, names(plain)) == plain
        return
    expected = eager(module, call, case.loss_fn, case.target)
    for wanted in (names(plain), names(plain)[::2]):
        made = recompute(plain, wanted)
        found = segmentwise_step(module, made, call, min(2, call.batch))
        assert_same(captured, call, found, expected, case.tolerance)


def marked(captured: Captured, region: Callable[[int], int]) -> Captured:
    """The forward's nodes in checkpoint regions by their position, backward ones in those of their forward."""
    of: dict[int, int] = {}
    nodes = []
    for position, node in enumerate(captured.nodes):
        number = of.get(node.sequence, -1) if node.backward else region(position)
        of.setdefault(node.sequence, number)
        nodes.append(replace(node, region=number))
    return replace(captured, nodes=tuple(nodes))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_any_regions_give_the_same_gradients(name: str, seed: int) -> None:
    """Runs of nodes, and nodes scattered over regions without any order."""
    drawn, (module, call, captured) = random.Random(seed), normalised(name)
    scattered = {i: drawn.randrange(-1, 3) for i in range(len(captured.nodes))}
    length = drawn.randrange(2, 9)
    made = marked(captured, scattered.__getitem__ if seed % 2 else lambda i: i // length if i // length % 3 else -1)
    segmented = recompute(segment(made))
    assert any(again(found) for found in segmented.bodies if found.backward is not None)
    assert_same(captured, call, segmentwise_step(module, segmented, call, 2), eager(module, call), 1e-12)


@cache
def gpt(*, skips: bool = True, tied: bool = True) -> tuple[nn.Module, tuple[torch.Tensor, ...], Segmented]:
    torch.manual_seed(0)
    model = GPT(layers=4, skips=skips, tied=tied).double()
    ids = torch.randint(0, 32, (6, 8))
    captured = captured_step(model, read(model, (ids, ids.flip(0))), None, False, "direct")
    return model, (ids, ids.flip(0)), segment(captured)


def test_a_block_keeps_its_input_and_drops_what_nothing_needs() -> None:
    """One body for all blocks; of the four products the last is not made again, nor the sum that the block returns."""
    plain = gpt(skips=False)[2]
    made = recompute(plain, names(plain))
    assert len(made.bodies) == len(plain.bodies)
    before, after = body(plain, "blocks.0"), body(made, "blocks.0")
    assert len(before.saved) > 5 and after.saved == ("x",)
    assert after.forward == before.forward
    assert [node.opname for node in before.forward.nodes].count("aten.addmm.default") == 4
    assert again(after).count("addmm") == 3 and again(after).count("add") == 1
    assert all(node.backward for node in after.backward.nodes[len(again(after)) :])
    segment_ = next(item for item in made.segments if item.name == "blocks.0")
    assert {"blocks.0.qkv.bias", "blocks.0.up.bias"} <= set(segment_.backward_parameters)
    assert "blocks.0.down.bias" not in segment_.backward_parameters


def test_some_of_equal_blocks_have_a_body_of_their_own() -> None:
    plain = gpt(skips=False)[2]
    made = recompute(plain, ["blocks.1", "blocks.2", "no such segment"])
    assert [made.bodies[item.body].name for item in made.segments[1:5]] == [
        "blocks",
        "blocks_recomputed",
        "blocks_recomputed",
        "blocks",
    ]
    assert body(made, "blocks.3") == body(plain, "blocks.3")
    assert recompute(plain) == plain


def test_costs_have_the_work_and_the_bytes() -> None:
    """A layer of an MLP of width 8: its product is made again, 2 * 8 * 8 FLOPs a sample, and the tanh's 8 numbers."""
    segmented = segment(normalised("mlp")[2])
    made = recompute(segmented, names(segmented))
    before, after = (costs(item)[1].at(1) for item in (segmented, made))
    assert before.saved_bytes == 2 * 8 * 8 and after.saved_bytes == 8 * 8
    assert after.recomputed_bytes == 8 * 8 and before.recomputed_bytes == 0
    assert 2 * 8 * 8 <= after.backward_flops - before.backward_flops <= 2 * 8 * 8 + 100
    assert after.forward_flops == before.forward_flops
    assert [value.name for value in recomputed(body(made, segmented.segments[1].name))] == ["tanh"]


PLANS = [
    ("gpt", {"pp": 2}, "ddp", "1f1b", True),
    ("gpt", {"dp": 2}, "fsdp", "gpipe", ["blocks.1", "blocks.3"]),
    ("mlp", {"pp": 2, "dp": 2}, "fsdp", "gpipe", True),
    ("half_frozen", {"pp": 2}, "zero1", "1f1b", ["decoder"]),
]


@pytest.mark.parametrize(("name", "mesh", "placement", "schedule", "wanted"), PLANS, ids=str)
def test_training_equals_one_device(
    name: str, mesh: dict[str, int], placement: str, schedule: str, wanted: Any
) -> None:
    """Skips, a tied table and frozen parts among them; the verified program, run by real ranks."""
    module, args, kwargs = CASES[name].make()
    segmented = segment(normalised(name)[2])
    pins = {"mesh": mesh, "placement": placement, "schedule": schedule, "microbatches": 2, "recompute": wanted}
    plan = solve(segmented, **pins)
    assert plan.recompute and set(plan.recompute) <= set(names(segmented))
    program = lower(segmented, plan)
    verify(program)
    assert sum(rank.source.count("# recomputed") for rank in program.ranks) >= 1
    assert_parity(module, args, kwargs, plan=program, steps=2)


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    """A block recomputed whole, beside equal ones that are not."""
    segmented = gpt(skips=False)[2]
    program = lower(segmented, solve(segmented, devices=1, recompute=["blocks.0"]))
    text = program.ranks[0].source
    start = text.index("def blocks_recomputed_backward")
    golden("recomputed_block.py", text[start : text.index("\n\n\ndef ", start)] + "\n")


class Checkpointed(GPT):
    """A GPT whose blocks are checkpointed, as a whole or in two parts."""

    def __init__(self, region: type[nn.Module], reentrant: bool) -> None:
        super().__init__(layers=2, skips=False)
        self.blocks = nn.ModuleList(region(16, 4) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x) if isinstance(block, Halves) else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Halves(Block):
    """Of the perceptron, one region up to its middle; of what follows it, another that keeps its matrix product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda x: torch.sin(self.up(self.norm2(x))), x, use_reentrant=False)
        return x + torch.tanh(
            checkpoint(lambda h: torch.cos(self.down(torch.exp(-h))), h, use_reentrant=False, context_fn=_products)
        )


def _products() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("reentrant", [False, True])
def test_f055_a_users_checkpoint_is_a_region_of_the_plan(reentrant: bool) -> None:
    """Reentrant or not, it is neither lost nor without gradients: whole blocks here, so the plan names them."""
    torch.manual_seed(0)
    model, ids = Checkpointed(Block, reentrant).double(), torch.randint(0, 32, (4, 8))
    args = (ids, ids.flip(0))
    plain = segment(captured_step(model, read(model, args), None, False, "compile"))
    plan = solve(plain, mesh={"pp": 2}, microbatches=2, recompute=False)
    assert plan.recompute == ("blocks.0", "blocks.1")
    assert "recompute blocks.0 .. blocks.1" in plan.summary()
    assert "blocks.0 .. blocks.1: as the model's torch.utils.checkpoint says" in plan.explain()
    made = recompute(plain)
    assert body(made, "blocks.0").saved == ("x",) and again(body(made, "blocks.0")).count("addmm") == 3
    assert kept(made) < kept(plain) / 2
    assert_parity(model, args, plan=lower(plain, plan), steps=1)


def test_regions_within_a_block() -> None:
    """Two regions: each is made again before its own backward, and one's result is what the other saves."""
    torch.manual_seed(0)
    model, ids = Checkpointed(Halves, False).double(), torch.randint(0, 32, (4, 8))
    args = (ids, ids.flip(0))
    plain = segment(captured_step(model, read(model, args), None, False, "compile"))
    made = recompute(plain)
    found = body(made, "blocks.0")
    assert again(found).count("addmm") == 1, "the second product must be saved"
    assert {"exp", "sin"} <= set(again(body(recompute(plain, names(plain)), "blocks.0")))
    assert "exp" in again(found) and "sin" not in again(found), "the first region's result is saved, not made again"
    phases = [node.backward for node in found.backward.nodes]
    assert sum(a and not b for a, b in pairwise([True, *phases])) == 2, phases
    assert kept(recompute(plain, names(plain))) < kept(made) < kept(plain)
    plan = solve(plain, devices=1)
    assert plan.recompute == () and "recompute parts of blocks.0 .. blocks.1: as the model's" in plan.explain()
    assert_parity(model, args, plan=lower(plain, plan), steps=1)


def test_hugging_face_gradient_checkpointing() -> None:
    """Turned on as its users do, with the hook that Hugging Face then puts on the embedding."""
    module, args, kwargs = CASES["gpt2"].make()
    module.train().gradient_checkpointing_enable()
    check_hooks(module, "refuse")
    call = read(module, args, kwargs)
    captured = captured_step(module, call, None, False, "compile")
    plain = segment(captured)
    made = recompute(plain)
    blocks = [name for name in names(plain) if ".h." in name]
    assert blocks and all(again(body(made, name)).count("addmm") == 3 for name in blocks)
    assert kept(made) < kept(plain) / 3
    assert_same(captured, call, segmentwise_step(module, made, call, 2), eager(module, call), 1e-6)
    module.transformer.wte.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"transformer\.wte has hooks"):
        check_hooks(module, "refuse")


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_direct_route_refuses_a_checkpoint_by_its_line(reentrant: bool) -> None:
    model, ids = Checkpointed(Block, reentrant), torch.randint(0, 32, (4, 8))
    with pytest.raises(CaptureError, match=r"test_recompute\.py:\d+: torch\.utils\.checkpoint .*capture='compile'"):
        captured_step(model, read(model, (ids, ids)), None, False, "direct")
    with torch.no_grad():
        assert not captured_step(model, read(model, (ids, ids)), None, False, "direct").training
    assert checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=reentrant).requires_grad


class Shifted(nn.Module):
    """A layer that reads a buffer on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.sin(x) + self.shift)).sum()


def test_buffers_are_read_again_unless_the_step_updates_them() -> None:
    """An updated buffer has another value by the time of the backward: what reads it is kept, and so it is not read."""
    model = Shifted().double()
    call = read(model, (torch.randn(4, 4).double(),))
    segmented = segment(captured_step(model, call, None, False, "direct"))
    (shift,) = (item.value.name for item in segmented.captured.of_kind("buffer"))
    wanted = names(segmented)
    made = recompute(segmented, wanted)
    assert [item.backward_fixed for item in made.segments if item.forward_fixed] == [(shift,)]
    assert_same(made.captured, call, segmentwise_step(model, made, call, 2), eager(model, call), 1e-12)
    update = Output(segmented.segments[-1].outputs[0], "mutation", "shift")
    changing = replace(segmented.captured, outputs=(*segmented.captured.outputs, update))
    made = recompute(replace(segmented, captured=changing), wanted)
    assert all(shift not in item.backward_fixed for item in made.segments)
    assert "add" not in [op for found in made.bodies if found.backward for op in again(found)]
    made = replace(made, captured=segmented.captured)
    assert_same(made.captured, call, segmentwise_step(model, made, call, 2), eager(model, call), 1e-12)


def test_a_pin_by_the_name_of_a_module_around() -> None:
    segmented = gpt(skips=False)[2]
    assert solve(segmented, devices=1, recompute=["blocks"]).recompute == tuple(f"blocks.{i}" for i in range(4))
    with pytest.raises(ValueError, match=r"recompute: no segment is called 'block\.1'.* blocks\.1"):
        solve(segmented, devices=1, recompute=["block.1"])
    with pytest.raises(ValueError, match=r"'blocks\.1\.up'.* such as blocks\.1; a part of one is with torch\.utils"):
        solve(segmented, devices=1, recompute=["blocks.1.up"])


def test_memory_turns_it_on_where_nothing_fits_without() -> None:
    """The plan says so, keeps less and takes longer; pinned False it is a way out that the refusal names."""
    segmented = gpt()[2]
    pins = {"mesh": {"pp": 2}, "schedule": "gpipe", "microbatches": 3}
    free = solve(segmented, **pins)
    assert free.recompute == () and "recompute for memory nothing: it fits without" in free.explain()
    limit = max(stage.total for stage in free.prediction.memory) - 1024
    tight = solve(segmented, memory=limit, **pins)
    assert tight.recompute and "what each stage needs to fit, at the least time" in tight.explain()
    assert max(stage.total for stage in tight.prediction.memory) <= limit
    assert tight.prediction.step_seconds > free.prediction.step_seconds
    with pytest.raises(Exception, match=r"without recomputing.* It fits with: .*recompute=\[.norm.\]"):
        solve(segmented, memory=limit, recompute=False, **pins)
    with pytest.raises(Exception, match=r"gpipe, recomputing [^:]*: stage"):
        solve(segmented, memory=1024, **pins)


def test_parallelize_takes_it() -> None:
    """Training, then an evaluation under the same plan, which has nothing to recompute."""
    model, args, _ = gpt(skips=False)
    expected = eager(model, read(model, args))
    mine = parallelize(copy.deepcopy(model), devices=2, mesh={"pp": 2}, capture="direct", recompute=["blocks"])
    mine(*args).backward()
    found = {name: parameter.grad for name, parameter in mine.named_parameters()}
    tied = {name: grad for name, grad in expected[1].items() if name in found}
    assert all(distance(found[name], grad) <= 1e-9 for name, grad in tied.items()) and tied.keys() == found.keys()
    again = {name.removesuffix(".norm2") for name in mine.plan.recompute}  # a stage may begin inside a block
    assert again == {f"blocks.{i}" for i in range(4)}
    mine.eval()
    with torch.no_grad():
        assert distance(mine(*args), expected[0]) <= 1e-12
    with pytest.raises(TypeError, match="recompute: expected True, False or a list of module names, not 'blocks'"):
        parallelize(recompute="blocks")
