"""Models cut into bodies, with the tensors that each gets in a step, and placed bodies run on all places of an axis.

Everything computes in float64: a cast to float32 inside a model is one to float64 here, so that 1e-12 can be asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopart.api.compiler import captured_step
from autopart.capture import read
from autopart.ir.graph import Value
from autopart.ir.placed import PlacedBody
from autopart.ir.segmented import Body, Function, Segment, Segmented
from autopart.ir.traffic import sent_bytes
from autopart.passes.localise import localise
from autopart.passes.segment import segment
from examples.gpt import GPT, Config
from tests import places
from tests.interpret import Values, bind, distance, execute, run_function
from tests.models import MLP
from tests.models import gpt as tied
from tests.zoo import resnet

SAMPLES, LENGTH, WIDTH = 2, 16, 96
Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt(heads: int = 6, vocabulary: int = 96) -> Sample:
    ids = torch.randint(vocabulary, (SAMPLES, LENGTH))
    config = Config(layers=3, width=WIDTH, heads=heads, context=LENGTH, vocabulary=vocabulary)
    return GPT(config), (ids, ids.roll(-1, 1)), {}


def gpt2() -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 97, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 6}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off)), (), _tokens()


def llama() -> Sample:
    """Eight query heads on four key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config), (), _tokens()


def _tokens() -> dict[str, Any]:
    ids = torch.randint(97, (SAMPLES, LENGTH))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def mlp() -> Sample:
    return MLP(width=10), (torch.randn(6, 10), torch.randn(6, 3)), {}


def conv() -> Sample:
    specimen = resnet()
    return specimen.model, specimen.args, {}


class Lookups(nn.Module):
    """A padded embedding, a softmax over a wide last dim and targets of which one class is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=3)
        self.out = nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.table(ids))
        mixed = scores.softmax(-1) @ self.table.weight
        return F.cross_entropy((scores + self.out(mixed)).flatten(0, 1), target.flatten(), ignore_index=7)


def lookups() -> Sample:
    ids = torch.randint(50, (2, 6))
    ids[0, :2] = 3
    target = torch.randint(50, (2, 6))
    target[1, :2] = 7
    return Lookups(), (ids, target), {}


class _Scaled(torch.autograd.Function):
    """The identity forward; its backward reads a weight and a buffer that its forward does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mask)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, mask = ctx.saved_tensors
        return gradient * weight * mask, (gradient * x).sum(0), None


class BackwardOnly(nn.Module):
    """A parameter and a buffer that only the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("mask", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(self.first(x), self.weight, self.mask).square().sum()


def backward_only() -> Sample:
    return BackwardOnly(), (torch.randn(4, 8),), {}


CASES: dict[str, Callable[[], Sample]] = {
    "gpt": gpt, "gpt_wide": lambda: gpt(vocabulary=1024), "gpt2": gpt2, "llama": llama, "mlp": mlp, "conv": conv,
    "lookups": lookups, "tied": tied, "backward_only": backward_only,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One segment of a step, and the tensors that its functions get."""

    segment: Segment
    body: Body
    forward: tuple[torch.Tensor, ...]
    backward: tuple[torch.Tensor, ...]


@cache
def steps(name: str) -> tuple[Segmented, tuple[Step, ...], int]:
    """A case in segments, what each is given in a step on the whole batch, and the batch."""
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    model = model.double()
    args = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    call = read(model, args, kwargs)
    made = segment(captured_step(model, call, None, False, "direct"))
    made = replace(made, bodies=tuple(map(_widened, made.bodies)))
    captured, batch = made.captured, call.batch
    values = bind(model, captured, call)
    values |= execute(captured.prologue, values, batch, batch)
    flow = {key: x.double() if x.dtype == torch.float32 else x for key, x in values.items()}
    return made, tuple(_walk(made, flow, batch)), batch


def _walk(made: Segmented, flow: Values, batch: int) -> list[Step]:
    targets = {item.target: item.value.name for item in made.captured.of_kind("parameter")}
    forwards, environments = [], []
    for piece in made.segments:
        function = made.bodies[piece.body].forward
        names = (*piece.values, *piece.forward_fixed, *(targets[t] for t in piece.forward_parameters))
        forwards.append(tuple(flow[n] for n in names))
        environments.append(run_function(function, forwards[-1], batch, batch))
        flow.update(zip(piece.outputs, (environments[-1][n] for n in function.outputs), strict=False))
    found = []
    for piece, given, env in zip(reversed(made.segments), reversed(forwards), reversed(environments), strict=True):
        body = made.bodies[piece.body]
        later: tuple[torch.Tensor, ...] = ()
        if body.backward is not None:
            parameters = [targets[t] for t in piece.backward_parameters]
            kept = [env[n] for n in body.saved]
            later = (
                *(flow[n] for n in piece.backward_inputs),
                *kept,
                *(flow[n] for n in (*piece.backward_fixed, *parameters)),
            )
            results = run_function(body.backward, later, batch, batch)
            flow.update(zip(piece.backward_outputs, (results[n] for n in body.backward.outputs), strict=False))
        found.append(Step(piece, body, given, later))
    return found[::-1]


def _widened(body: Body) -> Body:
    def leaf(arg: Any) -> Any:
        return torch.float64 if arg is torch.float32 else arg

    def value(v: Value | None) -> Any:
        return None if v is None else replace(v, dtype=leaf(v.dtype))

    def function(f: Function) -> Function:
        nodes = tuple(replace(n.mapped(leaf), outs=tuple(map(value, n.outs))) for n in f.nodes)
        return Function(tuple(map(value, f.inputs)), nodes, f.outputs)

    backward = None if body.backward is None else function(body.backward)
    return replace(body, forward=function(body.forward), backward=backward)


@dataclass(frozen=True)
class Ran:
    """What came of a placed body: the largest relative difference, and the collectives, forward and backward."""

    worst: float
    calls: tuple[tuple[str, int], ...]
    degree: int

    def counts(self, least: int = 0) -> dict[str, int]:
        """How many collectives of each kind there were, of more than `least` bytes."""
        return dict(Counter(name for name, nbytes in self.calls if nbytes > least))

    def sent(self, least: int = 0) -> int:
        """The bytes that each place sent for them."""
        return sum(sent_bytes(name, nbytes, self.degree) for name, nbytes in self.calls if nbytes > least)


def run(placed: PlacedBody, step: Step, batch: int) -> Ran:
    """Run what each place runs, forward and backward, beside the whole body."""
    local = [localise(placed, place) for place in range(placed.degree)]
    body, degree = placed.body, placed.degree
    given = _scattered(step.forward, placed.forward.inputs, degree, batch)
    envs, calls = places.run([one.forward for one in local], [*zip(*given, strict=True)], batch, batch)
    whole = run_function(body.forward, step.forward, batch, batch)
    outputs = [one.forward.outputs for one in local]
    worst = _compare(envs, outputs, placed.forward.outputs, [whole[n] for n in body.forward.outputs], batch)
    kept = [one.saved for one in local]
    worst = max(worst, _compare(envs, kept, placed.saved, [whole[n] for n in body.saved], batch))
    if body.backward is None or placed.backward is None:
        return Ran(worst, tuple(calls), degree)
    given = _scattered(step.backward, placed.backward.inputs, degree, batch)
    start = len(step.segment.backward_inputs)
    for number in range(len(body.saved)):  # the backward runs on what the places themselves have saved
        given[start + number] = [env[names[number]] for env, names in zip(envs, kept, strict=True)]
    envs, more = places.run([one.backward for one in local], [*zip(*given, strict=True)], batch, batch)  # type: ignore[misc]
    whole = run_function(body.backward, step.backward, batch, batch)
    outputs = [one.backward.outputs for one in local if one.backward is not None]
    found = _compare(envs, outputs, placed.backward.outputs, [whole[n] for n in body.backward.outputs], batch)
    return Ran(max(worst, found), (*calls, *more), degree)


def _scattered(whole: Any, how: Any, degree: int, batch: int) -> list[list[torch.Tensor]]:
    return [places.scattered(x, place, degree, batch) for x, place in zip(whole, how, strict=True)]


def _compare(envs: Any, names: Any, how: Any, wanted: Any, batch: int) -> float:
    worst = 0.0
    for number, (place, whole) in enumerate(zip(how, wanted, strict=True)):
        made = places.gathered([env[own[number]] for env, own in zip(envs, names, strict=True)], place, batch)
        assert made.shape == whole.shape
        worst = max(worst, distance(made, whole, 1e-3))
    return worst
