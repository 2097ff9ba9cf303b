"""The judgement of small captured steps, checked by running them on microbatches with its adjustments applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.capture import capture, read
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Input, Node, Output, Ref, Size, Value
from autopart.ir.placement import Partial, Replicate, Shard
from autopart.passes.decompose import decompose_means, explicit_squeezes
from autopart.passes.judge import Judgement, Site, judge

aten = torch.ops.aten
BATCH = 6
TOLERANCE = 1e-12
Tensors = dict[str, torch.Tensor]


class Step(nn.Module):
    """A module whose forward is a function of itself and the inputs, in float64."""

    def __init__(self, body: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.linear = nn.Linear(4, 3)
        for name, part in parts.items():
            plain = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if plain else setattr(self, name, part)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(self, x, y)


def inputs(kind: str = "classes") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    if kind == "classes":
        y = torch.tensor([0, -100, 2, -100, -100, 1])
    elif kind == "mask":
        y = torch.tensor([1, 0, 1, 1, 0, 0])
    else:
        y = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    return x, y


def captured(module: nn.Module, args: tuple[torch.Tensor, ...], **batch: int | None) -> Captured:
    """The step of a module, its means decomposed and its squeezes explicit."""
    made = capture(module, read(module, args, batch=batch or None), route="direct")
    made = replace(made, nodes=explicit_squeezes(made.inputs, made.nodes))
    return replace(made, nodes=decompose_means(made.inputs, made.nodes))


def judged(step: Captured) -> Judgement:
    return judge(step.inputs, step.nodes, step.outputs)


# ---- running a graph at a batch size, with the judgement's adjustments -----------------------------------------------


def run(step: Captured, judgement: Judgement, given: Tensors, batch: int, prologue: Tensors) -> Tensors:
    """Every value of the graph for one microbatch, of `batch` samples out of BATCH."""
    env = dict(given)
    shares = set(judgement.shares)
    whole = set(judgement.whole)

    def resolve(arg: Any, site: Site) -> Any:
        if isinstance(arg, tuple):
            return [resolve(item, Site(site.node, (*site.path, i))) for i, item in enumerate(arg)]
        value = env[arg.name] if isinstance(arg, Ref) else arg
        if isinstance(arg, Size):
            value = arg.at(BATCH if arg.whole or site in whole else batch)
        return value * (batch / BATCH) if site in shares else value

    for index, node in enumerate(step.nodes):
        args = [resolve(arg, Site(index, (i,))) for i, arg in enumerate(node.args)]
        found = node.op(*args, **{key: resolve(arg, Site(index, (key,))) for key, arg in node.kwargs})
        results = (found,) if node.single else found
        for out, result in zip(node.outs, results, strict=True):
            if out is not None:
                assert out.at(batch) == tuple(result.shape)
                env[out.name] = prologue.get(out.name, result)
    return env


def outputs(step: Captured, judgement: Judgement, env: Tensors, share: float) -> list[torch.Tensor]:
    scaled = set(judgement.output_shares)
    return [env[out.name] * (share if i in scaled else 1.0) for i, out in enumerate(step.outputs)]


def rows(tensor: torch.Tensor, place: Shard, cuts: Sequence[int]) -> Sequence[torch.Tensor]:
    """The parts of a tensor along its batch."""
    spread = tensor.unflatten(place.dim, (place.outer, sum(cuts), -1))
    return [part.flatten(place.dim, place.dim + 2) for part in spread.split(list(cuts), place.dim + 1)]


def feed(step: Captured, module: nn.Module, args: Sequence[torch.Tensor]) -> Tensors:
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    state |= {constant.name: constant.tensor for constant in step.constants}
    named = {f"args[{i}]": arg for i, arg in enumerate(args)}
    return {
        item.value.name: (
            torch.ones((), dtype=item.value.dtype) if item.kind == "tangent" else {**state, **named}[item.target]
        ).detach()
        for item in step.inputs
    }


def check(
    step: Captured,
    judgement: Judgement,
    module: nn.Module,
    args: Sequence[torch.Tensor],
    cuts: Sequence[int] = (1, 3, 2),
) -> None:
    """Microbatches must add up to the whole batch, value by value, and the whole batch to what eager computes."""
    given = feed(step, module, args)
    whole = run(step, judgement, given, BATCH, {})
    prologue = {name: whole[name] for name in judgement.prologue}
    places = judgement.placements
    batches = []
    for i, size in enumerate(cuts):
        part = {
            n: rows(t, place, cuts)[i] if isinstance(place := places[n], Shard) else t
            for n, t in given.items()
            if n in places
        }
        batches.append(run(step, judgement, {**given, **part}, size, prologue))
    for name, place in places.items():
        parts = [env[name] for env in batches]
        if isinstance(place, Partial):
            _agree(name, sum(part.to(torch.float64) for part in parts), whole[name])
        elif isinstance(place, Shard):
            for wanted, part in zip(rows(whole[name], place, cuts), parts, strict=True):
                _agree(name, part, wanted) if name not in _counts(step) else None
        else:
            for part in parts:
                _agree(name, part, whole[name])
    totals: dict[tuple[str, str], torch.Tensor] = {}  # a tied parameter has a gradient for each of its names
    for env, size in zip(batches, cuts, strict=True):
        for out, part in zip(step.outputs, outputs(step, judgement, env, size / BATCH), strict=True):
            totals[out.kind, out.target] = totals.get((out.kind, out.target), 0) + part
    module.zero_grad()
    loss = module(*args)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    for (kind, target), total in totals.items():
        if kind in ("loss", "grad"):
            _agree(f"{kind} {target}", total, loss if kind == "loss" else grads[target])


def _counts(step: Captured) -> set[str]:
    """The values that number the samples."""
    found: set[str] = set()
    for node in step.nodes:
        if node.op.overloadpacket is aten.arange or (found & set(node.refs()) and node.op is aten.unsqueeze.default):
            found |= set(node.names())
    return found


def _agree(name: str, made: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.allclose(made.to(torch.float64), wanted.to(torch.float64), rtol=TOLERANCE, atol=TOLERANCE), name


def step_of(
    body: Callable[..., Any], kind: str = "classes", **parts: Any
) -> tuple[Captured, nn.Module, tuple[torch.Tensor, ...]]:
    module, args = Step(body, **parts), inputs(kind)
    return captured(module, args), module, args


def place(step: Captured, judgement: Judgement, op: Any) -> Any:
    """The placement of the first result of the first node of an operator."""
    node = next(node for node in step.nodes if node.op.overloadpacket is op)
    return judgement.placements[node.names()[0]]


# ---- what is accepted, and adds up -----------------------------------------------------------------------------------


def _sequence(s: Step, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The batch as the inner part of a merged dim: [5, batch, 4] seen as [5 batch, 4]."""
    steps = torch.stack([x * i for i in range(5)]).reshape(-1, 4)
    return torch.tanh(s.linear(steps)).reshape(5, -1, 3).pow(2).sum()


def _attention(s: Step, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    q = s.linear(x.unsqueeze(1) * torch.ones(5, 1, dtype=x.dtype)).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()


ACCEPTED: Mapping[str, tuple[Callable[..., torch.Tensor], str]] = {
    "mean": (lambda s, x, y: (s.linear(x) - y).pow(2).mean(), "values"),
    "mean of a mean": (lambda s, x, y: (s.linear(x) - y).abs().mean(-1).mean(), "values"),
    "mean over the batch first": (lambda s, x, y: (s.linear(x) - y).mean(0).sum(), "values"),
    "sum": (lambda s, x, y: F.mse_loss(s.linear(x), y, reduction="sum"), "values"),
    "sum by a size": (lambda s, x, y: s.linear(x).exp().sum() / x.shape[0], "values"),
    "size as a factor": (lambda s, x, y: s.linear(x).tanh().sum() * (1 / x.shape[0]), "values"),
    "cross entropy": (lambda s, x, y: F.cross_entropy(s.linear(x), y, ignore_index=-100), "classes"),
    "weighted cross entropy": (
        lambda s, x, y: F.cross_entropy(s.linear(x), y, weight=s.classes, label_smoothing=0.1), "classes"
    ),
    "summed cross entropy": (lambda s, x, y: F.cross_entropy(s.linear(x), y, reduction="sum") / 7, "classes"),
    "masked mean": (lambda s, x, y: (s.linear(x).sum(-1) * y).sum() / y.sum(), "mask"),
    "clamped count": (lambda s, x, y: (s.linear(x).sum(-1) * y).sum() / y.sum().clamp(min=1), "mask"),
    "count and one": (lambda s, x, y: (s.linear(x).sum(-1) * y).sum() / (y.sum() + 1), "mask"),
    "normalised weights": (lambda s, x, y: (s.linear(x).sum(-1) * (y / y.sum())).sum(), "mask"),
    "penalty": (lambda s, x, y: F.mse_loss(s.linear(x), y) + 0.1 * s.linear.weight.pow(2).sum(), "values"),
    "penalty first": (lambda s, x, y: s.linear.weight.pow(2).sum() - F.mse_loss(s.linear(x), y), "values"),
    "one minus": (lambda s, x, y: 1 - F.cosine_similarity(s.linear(x), y).mean(), "values"),
    "only a penalty": (lambda s, x, y: s.linear.weight.pow(2).sum() + 0 * s.linear.bias.sum(), "values"),
    "two losses": (
        lambda s, x, y: F.mse_loss(s.linear(x), y) * 0.5 + F.l1_loss(s.linear(x.flip(1)), y, reduction="sum"), "values"
    ),
    "inputs scaled by their deviation": (lambda s, x, y: (s.linear(x / x.std(0)) - y).pow(2).mean(), "values"),
    "inputs scaled by their maximum": (lambda s, x, y: (s.linear(x / x.amax()) - y).pow(2).mean(), "values"),
    "time before batch": (_sequence, "values"),
    "attention": (_attention, "values"),
    "layer norm": (lambda s, x, y: F.mse_loss(F.layer_norm(s.linear(x), (3,), s.weight), y), "values"),
    "batch norm in evaluation": (lambda s, x, y: s.norm.eval()(s.linear(x)).pow(2).mean(), "values"),
    "positions": (lambda s, x, y: (s.linear(x).unsqueeze(1) + s.weight[torch.arange(3)]).pow(2).mean(), "values"),
    "rows picked": (lambda s, x, y: s.linear(x)[torch.arange(x.shape[0]), y.clamp(min=0)].mean(), "classes"),
    "squeezed": (lambda s, x, y: s.linear(x)[:, :1].squeeze().pow(2).mean(), "values"),
    "concatenated": (lambda s, x, y: s.linear(torch.cat([x, 2 * x])).chunk(2)[0].tanh().sum(), "values"),
    "expanded": (lambda s, x, y: (s.weight.expand(x.shape[0], 3) * s.linear(x)).sum(), "values"),
    "filled": (lambda s, x, y: torch.cat([x.new_ones(x.shape[0], 1), s.linear(x)], 1).prod(1).mean(), "values"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_microbatches_add_up_to_the_whole_batch(name: str) -> None:
    body, kind = ACCEPTED[name]
    weight = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    step, module, args = step_of(body, kind, weight=nn.Parameter(weight), classes=weight, norm=nn.BatchNorm1d(3))
    check(step, judged(step), module, args)


def test_a_mean_is_a_sum_over_the_whole_batch() -> None:
    step, _, _ = step_of(ACCEPTED["mean"][0], "values")
    judgement = judged(step)
    assert place(step, judgement, aten.addmm) == Shard(0)
    assert place(step, judgement, aten.sum) == Partial()
    divisors = [node.args[1] for node in step.nodes if node.op is aten.div.Tensor]
    assert divisors == [Size(3, whole=True)]
    assert all(isinstance(judgement.placements[out.name], Partial) for out in step.outputs)
    assert judgement.shares == () and judgement.output_shares == () and judgement.prologue == ()


def test_the_count_of_valid_targets_is_a_prologue() -> None:
    step, _, _ = step_of(ACCEPTED["cross entropy"][0])
    judgement = judged(step)
    (count,) = judgement.prologue
    assert judgement.placements[count] == Replicate()
    assert "ne" in str(next(node for node in step.nodes if "ne" in node.opname).op)
    ops = [node.op.overloadpacket for node in step.nodes if count in node.names()]
    assert ops == [aten._to_copy] or ops == [aten.sum]


def test_a_penalty_takes_its_share_once_forward_and_once_backward() -> None:
    step, _, _ = step_of(ACCEPTED["penalty"][0], "values")
    judgement = judged(step)
    nodes = [step.nodes[site.node] for site in judgement.shares]
    assert [node.op.overloadpacket for node in nodes] == [aten.add, aten.add]
    assert [node.backward for node in nodes] == [False, True]


def test_a_number_in_a_sum_takes_its_share() -> None:
    step, _, _ = step_of(ACCEPTED["one minus"][0], "values")
    (site,) = judged(step).shares
    node = step.nodes[site.node]
    assert node.op.overloadpacket in (aten.rsub, aten.sub) and node.args[int(site.path[0])] == 1


def test_a_loss_without_samples_is_shared_out() -> None:
    step, _, _ = step_of(ACCEPTED["only a penalty"][0], "values")
    judgement = judged(step)
    shared = {step.outputs[i].target for i in judgement.output_shares}
    assert {step.outputs[i].kind for i in judgement.output_shares} == {"loss", "grad"} and "linear.weight" in shared


def test_a_size_in_the_arithmetic_is_whole_and_a_size_in_a_shape_is_not() -> None:
    step, _, _ = step_of(lambda s, x, y: (s.weight.expand(x.shape[0], 3) * s.linear(x)).sum() / x.shape[0], "values",
                         weight=nn.Parameter(torch.ones(3)))  # fmt: skip
    judgement = judged(step)
    assert {step.nodes[site.node].op.overloadpacket for site in judgement.whole} == {aten.div}
    shapes = [node for node in step.nodes if node.op.overloadpacket in (aten.expand, aten.view)]
    assert any(Size(1) in arg for node in shapes for arg in node.args if isinstance(arg, tuple))


def test_the_batch_may_be_the_inner_part_of_a_dim() -> None:
    step, _, _ = step_of(_sequence, "values")
    assert place(step, judged(step), aten.addmm) == Shard(0, outer=5)


@pytest.mark.parametrize("fault", ["shares", "whole", "prologue"])
def test_a_missing_adjustment_is_noticed(fault: str) -> None:
    name = {"shares": "penalty", "whole": "sum by a size", "prologue": "masked mean"}[fault]
    step, module, args = step_of(*ACCEPTED[name])
    judgement = judged(step)
    assert getattr(judgement, fault)
    with pytest.raises(AssertionError):
        check(step, replace(judgement, **{fault: ()}), module, args)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.soak)])
def test_hugging_face_models_add_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a padding mask, which these models read by the number of the sample, and labels to ignore."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(globals(), "TOLERANCE", 1e-6)  # their losses and rotary tables are in float32
    small = {"vocab_size": 32, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        sizes = transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=8, n_positions=8, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **small
        )
        model = transformers.GPT2LMHeadModel(sizes)
    else:
        sizes = transformers.LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=16,
            **small,
        )
        model = transformers.LlamaForCausalLM(sizes)
    ids = torch.randint(0, 32, (BATCH, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(BATCH, 7, dtype=torch.long)
    mask[1, :3], mask[4, :5] = 0, 0

    def body(s: Step, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        labels = ids.masked_fill(mask == 0, -100)
        loss: torch.Tensor = s.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss + 0 * s.linear.weight.sum() + 0 * s.linear.bias.sum()

    module = Step(body, model=model)
    step = captured(module, (ids, mask))
    check(step, judged(step), module, (ids, mask))


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: Mapping[str, tuple[Callable[..., torch.Tensor], str]] = {
    "batch norm": (lambda s, x, y: s.norm(s.linear(x)).sum(), "statistics of the whole batch"),
    "softmax over the batch": (lambda s, x, y: s.linear(x).softmax(0).pow(2).sum(), "_softmax.*whole of the batch dim"),
    "contrastive": (lambda s, x, y: (s.linear(x) @ s.linear(x).T).logsumexp(1).sum(), "mm.*relates the samples"),
    "variance": (lambda s, x, y: s.linear(x).var(0, unbiased=False).sum(), "var.*whole of the batch dim"),
    "exp of the loss": (lambda s, x, y: s.linear(x).mean().exp(), "exp.*more than a sum of self"),
    "ratio of sums": (lambda s, x, y: s.linear(x).sum() / s.linear(x).pow(2).sum(), "div.*more than a sum of other"),
    "maximum": (lambda s, x, y: s.linear(x).amax(), "amax.*max over the batch"),
    "cumsum": (lambda s, x, y: s.linear(x).cumsum(0).sum(), "cumsum.*whole of the batch dim"),
    "sort": (lambda s, x, y: (s.linear(x).sort(0).values * y).sum(), "sort.*whole of the batch dim"),
    "flip": (lambda s, x, y: (s.linear(x).flip(0) * y).sum(), "flip.*whole of the batch dim"),
    "centred": (lambda s, x, y: (s.linear(x) - s.linear(x).mean(0)).pow(2).sum(), "sub.*more than a sum of other"),
    "shifted": (lambda s, x, y: (s.linear(x)[1:] * s.linear(x)[:-1]).sum(), "slice.*whole of the batch dim"),
    "numbered": (lambda s, x, y: (s.linear(x).sum(1) * torch.arange(x.shape[0])).sum(), "mul.*numbers of the samples"),
    "regrouped": (lambda s, x, y: s.linear(x).view(3, -1).softmax(1).pow(2).sum(), "couples"),
    "without a rule": (lambda s, x, y: s.linear(x).renorm(2, 0, 1.0).sum(), "no factor rule"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_couples_the_samples_is_refused(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(CaptureError, match=f"(?s)aten.{message}" if "." in message else message) as caught:
        judged(step_of(body, "values", norm=nn.BatchNorm1d(3))[0])
    assert ("as an input" if name == "without a rule" else "batch=") in str(caught.value)


def test_a_refusal_names_the_module_and_the_line() -> None:
    x, y = Value("x", (Size(1), 4), torch.float64), Value("y", (Size(1), 4), torch.float64)
    node = Node(
        aten._softmax.default, (Ref("x"), 0, False), (), (y,), True, False, "encoder.gate", "model.py:7  h.softmax(0)"
    )
    with pytest.raises(
        CaptureError, match=r"_softmax.default in module 'encoder.gate'.*\n  model.py:7  h.softmax\(0\)"
    ):
        judge([Input(x, "input", "args[0]")], [node], [])


# ---- graphs by hand --------------------------------------------------------------------------------------------------


def node(op: Any, args: tuple[Any, ...], name: str, shape: tuple[Any, ...] = (), **kwargs: Any) -> Node:
    return Node(op, args, tuple(kwargs.items()), (Value(name, shape, torch.float64),), True, False, "", "")


X = Input(Value("x", (Size(1), 4), torch.float64), "input", "args[0]")
W = Input(Value("w", (4,), torch.float64), "parameter", "w")


def test_a_zero_needs_no_share() -> None:
    nodes = [
        node(aten.sum.default, (Ref("x"),), "total"),
        node(aten.full.default, ((), 0.0), "nothing"),
        node(aten.add.Tensor, (Ref("total"), Ref("nothing")), "y"),
        node(aten.add.Tensor, (Ref("y"), 0), "z"),
    ]
    judgement = judge([X], nodes, [Output("z", "loss", "0")])
    assert judgement.shares == () and judgement.placements["z"] == Partial()


def test_a_prologue_value_is_replicated_for_all_its_uses() -> None:
    """The sum is added to another sum before a division shows that it must be known whole: then it takes a share."""
    nodes = [
        node(aten.sum.default, (Ref("x"),), "count"),
        node(aten.mv.default, (Ref("x"), Ref("w")), "h", (Size(1),)),
        node(aten.sum.default, (Ref("h"),), "total"),
        node(aten.add.Tensor, (Ref("total"), Ref("count")), "both"),
        node(aten.div.Tensor, (Ref("both"), Ref("count")), "loss"),
    ]
    judgement = judge([X, W], nodes, [Output("loss", "loss", "0")])
    assert judgement.prologue == ("count",) and judgement.shares == (Site(3, (1,)),)


def test_two_batch_dims_are_refused() -> None:
    square = Input(Value("x", (Size(1), Size(1)), torch.float64), "input", "args[0]")
    with pytest.raises(CaptureError, match=r"shape \[batch, batch\]"):
        judge([square], [], [])


def test_a_parameter_does_not_move_with_the_batch() -> None:
    with pytest.raises(CaptureError, match="the parameter 'w'"):
        judge([replace(W, value=Value("w", (Size(1),), torch.float64))], [], [])


def test_a_buffer_is_not_updated_from_samples() -> None:
    nodes = [node(aten.sum.dim_IntList, (Ref("x"), (0,)), "seen", (4,))]
    with pytest.raises(CaptureError, match="buffer 'seen'"):
        judge([X], nodes, [Output("seen", "mutation", "seen")])


def test_the_tangent_of_an_output_is_placed_as_the_output() -> None:
    out, tangent = Value("y", (4, Size(1)), torch.float64), Value("dy", (4, Size(1)), torch.float64)
    nodes = [
        Node(aten.t.default, (Ref("x"),), (), (out,), True, False, "", ""),
        node(aten.sum.dim_IntList, (Ref("dy"), (1,)), "dw", (4,)),
    ]
    judgement = judge(
        [X, W, Input(tangent, "tangent", "0")], nodes, [Output("y", "output", "0"), Output("dw", "grad", "w")]
    )
    assert judgement.placements["dy"] == Shard(1) and judgement.placements["dw"] == Partial()
