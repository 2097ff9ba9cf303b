"""Operators without a rule: whole at every place of an axis, with a note; models are made of none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.cluster import Cluster
from autopart.ir.captured import Captured
from autopart.ir.placed import PlacedBody
from autopart.ir.placement import Replicate, Shard
from autopart.passes.consistent import faults
from autopart.passes.segment import segment
from autopart.passes.unruled import unruled
from autopart.rules.flops import flops
from autopart.rules.strategies import Ruled, strategies
from autopart.rules.table import family
from autopart.solver.axis import Axis
from autopart.solver.place import place
from tests import tensor_cases
from tests.own_ops import FUSED, FUSED_BACKWARD, fused, registered
from tests.zoo import SAMPLES, VARIANTS, ZOO, Specimen

FAST = Cluster.uniform(8, 2**40, 1e9, 1e18, 1e12, 1e-9)
"""Products take long, messages do not."""


class Weights(nn.Module):
    """The operator on frozen weights alone, which need no rule, or on samples, which do."""

    def __init__(self, samples: bool) -> None:
        super().__init__()
        self.samples = samples
        self.left, self.right = nn.Parameter(torch.randn(1, 12, 12)), nn.Parameter(torch.randn(8, 12))
        self.bias, self.last = nn.Parameter(torch.randn(8)), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.samples:
            return self.last(fused(x, self.right, self.bias)).square().mean()
        return self.last(x @ fused(self.left.detach(), self.right.detach(), self.bias.detach())[0]).square().mean()


def placed(name: str, samples: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[PlacedBody]]:
    """The model's segments as the solver places them on two places; each is run there, beside the whole."""
    case = lambda: (Weights(samples), (torch.randn(4, 3, 12),), {})  # noqa: E731
    monkeypatch.setitem(tensor_cases.CASES, name, case)
    made, each, batch = tensor_cases.steps(name)
    found = place(made, Axis("tp", 2, FAST, batch, copies=1))
    for step, body in zip(each, found.segments, strict=True):
        assert faults(body, step.segment) == ()
        assert tensor_cases.run(body, step, batch).worst < 1e-12
    return made, list(found.segments)


def chosen(bodies: list[PlacedBody]) -> list[tuple[Any, ...]]:
    """How the results of the operator are placed, forward and backward."""
    parts = [part for body in bodies for part in (body.forward, body.backward) if part is not None]
    pairs = [pair for part in parts for pair in zip(part.function.nodes, part.strategies, strict=True)]
    return [strategy.gives for node, strategy in pairs if "fused" in node.opname]


def test_an_operator_without_a_rule_is_computed_whole_at_every_place_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, bodies = placed("unruled", False, monkeypatch)
    assert chosen(bodies) == [(Replicate(),)]
    (note,) = unruled(made)
    assert note.startswith("test_unruled.py:")
    assert "autopart_tests.fused.default has no sharding rule, so every place computes all of it; autopart.reg" in note


def test_a_plan_notes_it() -> None:
    plan = autopart.plan(Weights(False), (torch.randn(4, 3, 12),), mesh={"tp": 2})
    (note,) = [note for note in plan.notes if "no sharding rule" in note]
    assert "autopart_tests.fused.default" in note and f"- {note}" in plan.explain()


def test_with_its_rule_it_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(FUSED, FUSED_BACKWARD):
        made, bodies = placed("ruled", True, monkeypatch)
        forward, backward = chosen(bodies)
        assert unruled(made) == ()
    assert forward == (Shard(2),)  # its columns, as of the first of Megatron's pair
    assert backward == (None, Shard(0), Shard(0))  # x needs no gradient


# ---- the models of the zoo -------------------------------------------------------------------------------------------


def moe(config: str, model: str, **more: Any) -> Specimen:
    """A mixture of experts of Hugging Face's, whose tokens are sorted by expert and multiplied in groups."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    ids = torch.randint(32, (SAMPLES, 5))
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **more))
    return Specimen(made, (), {"input_ids": ids, "labels": ids.clone()}, semantics="accumulate")


def mixtral() -> Specimen:
    return moe("MixtralConfig", "MixtralForCausalLM", num_local_experts=4)


def qwen_moe() -> Specimen:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return moe("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **experts, shared_expert_intermediate_size=8)


MODELS = {**ZOO, **VARIANTS, "mixtral": mixtral, "qwen-moe": qwen_moe}
QUICK = {"einsum"}


def work(captured: Captured) -> Counter[str]:
    """The FLOPs of a step: of all operators, of those without a rule, and of those that two places cannot share."""
    known = {value.name: value.sized(lambda size: int(size.at(SAMPLES))) for value in captured.values()}
    found = Counter[str]()
    for node in (*captured.prologue, *captured.nodes):
        plain = node.sized(lambda size: int(size.at(SAMPLES)))
        ruled = Ruled.of(plain, known)
        count = round(flops(plain, known))
        found["all"] += count
        if family(node.op) is None:
            found["without a rule"] += count
        elif not any(taken.cut for taken in strategies(ruled, ruled.cuts(2), 2)):
            found["whole"] += count
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.soak]) for name in MODELS]
)
def test_models_are_made_of_operators_that_have_rules(name: str) -> None:
    """No FLOP is done at every place for want of a rule. What cannot be shared is arithmetic of single numbers (the
    loss), a concatenation along a dim, a mask of triangles, a mean over the batch: less than 1 FLOP in 1000.
    """
    found = MODELS[name]()
    call = read(found.model, found.args, found.kwargs, batch=found.batch)
    captured = captured_step(found.model, call, None, False, found.capture, found.semantics)
    assert unruled(segment(captured)) == ()
    counted = work(captured)
    assert counted["all"] > 10_000 and counted["without a rule"] == 0
    assert counted["whole"] < counted["all"] / 1000
