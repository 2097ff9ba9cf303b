"""Capture on both routes: one graph, equal to eager at every batch size; what is refused, and what is left alone."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autopart import _torch
from autopart.capture import capture, read
from autopart.capture.trace import Names
from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Ref, Size, map_arg
from autopart.passes.accumulate import is_sum
from autopart.passes.normalise import normalise
from tests.capture_cases import CASES, Two, captured, normal
from tests.interpret import assert_same, eager, rebuilt, whole_step
from tests.models import GPT

ROUTES = ("compile", "direct")


@pytest.mark.parametrize(("name", "route"), [(name, route) for name, case in CASES.items() for route in case.routes])
def test_graph_equals_eager_at_every_batch_size(name: str, route: str) -> None:
    case = CASES[name]
    module, call, made = captured(name, route)
    for batch in {call.batch, 3, 1} if len(made.nodes) < 250 else {3}:
        sized = call.resized(batch)
        expected = eager(module, sized, case.loss_fn, case.target, grad=case.grad)
        assert made.training == bool(expected[1])
        assert_same(made, sized, whole_step(module, made, sized), expected, case.tolerance)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.routes_agree and len(case.routes) > 1])
def test_routes_agree(name: str) -> None:
    """The same graph after `normalise`, up to the names of values (sources and modules are compared elsewhere)."""
    one, two = (structure(normalise(captured(name, route)[2])) for route in ROUTES)
    for part_one, part_two in zip(one, two, strict=True):
        assert part_one == part_two


def structure(captured: Captured) -> tuple[Any, ...]:
    """Everything in a graph but module names, source lines and autograd's numbers, its values numbered in order."""
    names: dict[str, int] = {}
    for value in captured.values():
        names.setdefault(value.name, len(names))

    def argument(arg: Any) -> Any:
        return map_arg(arg, lambda a: ("value", names[a.name]) if isinstance(a, Ref) else a)

    def value(value: Any) -> Any:
        return (names[value.name], value.shape, value.dtype) if value is not None else None

    return (
        [(i.kind, i.target, i.requires_grad, value(i.value)) for i in captured.inputs],
        [
            (n.opname, argument(n.args), argument(n.kwargs), tuple(map(value, n.outs)), n.single, n.backward)
            for n in (*captured.prologue, *captured.nodes)
        ],
        [(names[o.name], o.kind, o.target, o.dim, o.partial) for o in captured.outputs],
        [names.get(item, item) if isinstance(item, str) else item for item in captured.result],
        (captured.training, captured.batch, captured.batch_dims, captured.tree, captured.tied),
        [(c.name, c.tensor.tolist()) for c in captured.constants],
    )


@pytest.mark.parametrize("name", ["mlp", "gpt", "half_frozen", "reused_later", "tuples_between_blocks", "constants"])
def test_routes_name_the_same_lines_and_modules(name: str) -> None:
    one, two = (normalise(captured(name, route)[2]).nodes for route in ROUTES)
    assert all(node.source for node in one if node.module)
    made = {name for node in one if node.backward for name in node.names()}
    for a, b in zip(one, two, strict=True):
        if not is_sum(a, made):  # torch gives the sum of two gradients any of the lines that used the value
            assert (a.opname, a.module, a.source) == (b.opname, b.module, b.source)


def test_sources_are_the_users_lines() -> None:
    lines, start = inspect.getsourcelines(GPT.forward)
    number = start + next(i for i, line in enumerate(lines) if "self.wpe" in line)
    for route in ROUTES:
        embeddings = [n for n in captured("gpt", route)[2].nodes if n.opname == "aten.embedding.default"]
        assert {n.source.split(" ")[0] for n in embeddings} == {f"models.py:{number}"}
        assert [n.module for n in embeddings] == ["wte", "wpe"]


def test_planted_faults_are_seen() -> None:
    module, call, made = captured("mlp", "direct")
    expected = eager(module, call)
    sums = [i for i, node in enumerate(made.nodes) if node.opname == "aten.sum.dim_IntList"]
    node = made.nodes[sums[0]]
    for changed in (
        replace(node, args=(node.args[0], (1,), *node.args[2:])),
        replace(made.nodes[0], args=(Ref(made.nodes[0].args[0].name), (Size(1), 4))),
    ):
        nodes = tuple(changed if n.names and set(n.names()) == set(changed.names()) else n for n in made.nodes)
        with pytest.raises((AssertionError, RuntimeError)):
            broken = replace(made, nodes=nodes)
            assert_same(broken, call, whole_step(module, broken, call), expected, 1e-12)
    wrong = expected[0] * 1.000001
    with pytest.raises(AssertionError):
        assert_same(made, call, whole_step(module, made, call), (wrong, expected[1]), 1e-12)


# What the result looks like


@pytest.mark.parametrize("name", ["no_grad", "no_grad_without_loss", "no_grad_logits"])
def test_no_grad_gives_the_forward_alone(name: str) -> None:
    for route in CASES[name].routes:
        made = captured(name, route)[2]
        assert not made.training and not made.of_kind("tangent")
        assert not any(node.backward for node in made.nodes)
        assert {out.kind for out in made.outputs} <= {"loss", "output"}


def test_training_graph_has_its_parts() -> None:
    module, _, made = captured("gpt", "compile")
    names = [name for name, _ in module.named_parameters()]
    assert [item.target for item in made.of_kind("parameter")] == names
    assert {out.target for out in made.outputs if out.kind == "grad"} == set(names)
    assert [item.target for item in made.of_kind("input")] == ["args[0]", "args[1]"]
    assert [item.value.name for item in made.of_kind("input")] == ["ids", "labels"]
    assert made.loss == "loss" and made.batch_dims == (("args[0]", 0), ("args[1]", 0))
    assert dict(made.tied)["head.weight"] == "wte.weight"
    assert not any(isinstance(value.shape, torch.Size) for value in made.values())
    assert "loss: float64[]" in str(made)


def test_hugging_face_output_is_rebuilt() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    module, call, made = captured("gpt2", "compile")
    outputs, _ = whole_step(module, made, call)
    value = rebuilt(made, call, outputs)
    assert isinstance(value, CausalLMOutputWithCrossAttentions)
    assert value.logits.shape == (4, 8, 64) and value.past_key_values is None


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    for route in ROUTES:
        made = captured("unused_and_frozen", route)[2]
        grads = {out.target for out in made.outputs if out.kind == "grad"}
        assert grads == {"lin.weight", "lin.bias", "out.weight", "out.bias"}
        assert {i.target for i in made.of_kind("parameter") if not i.requires_grad} == {"frozen.weight", "frozen.bias"}
        assert "spare.weight" in {i.target for i in made.of_kind("parameter")}


def test_ties_are_decided_by_identity() -> None:
    for route in ROUTES:
        for name, one in (("tied_by_object", True), ("tied_by_storage", True), ("equal_values", False)):
            tied = dict(captured(name, route)[2].tied)
            assert tied == {"a.weight": "a.weight", "b.weight": "a.weight" if one else "b.weight"}


def test_a_module_under_two_names() -> None:
    class Alias(Two):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.lin

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.lin(x)))

    module = Alias()
    weight = module.lin.weight
    for route in ROUTES:
        call = read(module, (normal(4, 4),))
        made = capture(module, call, route=route)
        assert_same(made, call, whole_step(module, made, call), eager(module, call), 1e-12)
        assert module.lin.weight is weight and module.again.weight is weight


def test_parameters_that_overlap_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = nn.Parameter(module[0].weight.data.t())
    with pytest.raises(CaptureError, match=r"0\.weight and 1\.weight share memory"):
        Names.of(module)
    flat = torch.zeros(32)
    module[0].weight.data, module[1].weight = flat[:16].view(4, 4), nn.Parameter(flat[16:].view(4, 4))
    assert dict(Names.of(module).tied)["1.weight"] == "1.weight", "neighbours in one buffer do not overlap"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_parameters_without_memory(route: str, device: str) -> None:
    with torch.device("meta") if device == "meta" else _torch.fake_mode():
        module = GPT(layers=1, width=8, heads=2, skips=False)
    real = GPT(layers=1, width=8, heads=2, skips=False)
    ids = torch.randint(0, 32, (4, 8))
    one = capture(module, read(module, (ids, ids)), route=route)
    two = capture(real, read(real, (ids, ids)), route="direct")
    assert structure(normalise(one)) == structure(normalise(two))
    if device == "meta":
        assert all(parameter.is_meta for parameter in module.parameters())


def test_autocast_is_part_of_the_graph() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for route in ROUTES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = capture(module, read(module, (torch.randn(4, 4),)), loss_fn=lambda o: o.float().mean(), route=route)
        assert any(value.dtype == torch.bfloat16 for value in made.values())


# What is refused


def _branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    if h.sum() > 0:  # here
        h = h * 2
    return self.head(h)


def _item(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return self.head(h * int(h.sum().item()))  # here


def _filter(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return h[h > 0].sum()  # here


def _python_random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x) * random.random())


def _numpy_random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x) * float(numpy.random.rand()))


def _loop(self: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(self.head(self.lin(sample)) for sample in x)  # type: ignore[return-value]


def _size_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return self.head(h.tanh() if len(x) > 6 else h)


def _quadratic(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.lin(x)
    return self.head((h @ h.T).reshape(-1, 4))  # here


def _broken(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.lin(x[:, :3]))  # here


def _raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such luck")  # here


def _parameter_back(self: Any, x: torch.Tensor) -> Any:
    return self.head(self.lin(x)), self.lin.weight


@dataclass
class Result:
    """No plain container."""

    loss: torch.Tensor


def _own_class(self: Any, x: torch.Tensor) -> Any:
    return Result(self.head(self.lin(x)))


def _detached(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (x.detach().clone().requires_grad_() * self.lin(x).detach()).sum()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_branch, "torch.where"),
        (_item, "value of a tensor"),
        (_filter, "value of a tensor"),
        (_python_random, "random"),
        (_numpy_random, "random|data-dependent"),
        (_loop, "another computation at another batch size"),
        (_size_branch, "another computation at another batch size"),
        (_quadratic, "no multiple of the batch"),
        (_broken, "forward fails: RuntimeError"),
        (_raises, "no such luck"),
        (_parameter_back, "neither computed nor was given"),
        (_own_class, "returns a Result, which cannot be taken apart"),
        (_detached, "no parameter gets a gradient|requires_grad_"),
    ],
)
def test_f084_refused_with_the_line(forward: Callable[..., Any], message: str, route: str) -> None:
    module = type("Model", (Two,), {"forward": forward})()
    call = read(module, (normal(4, 4),))
    before = (torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()))
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module, call, route=route)
    lines, start = inspect.getsourcelines(forward)
    marked = [start + i for i, line in enumerate(lines) if "# here" in line]
    if marked:
        assert f"test_capture.py:{marked[0]}" in str(caught.value)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(numpy.random.get_state()))


@pytest.mark.parametrize("route", ROUTES)
def test_inputs_whose_batch_is_not_said_are_refused(route: str) -> None:
    class Flat(Two):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.head(self.lin(x).repeat(2, 1) * y)

    module = Flat()
    with pytest.raises(CaptureError, match=r"This happens with 8 samples.*batch=.*y \[8, 4\] not split"):
        capture(module, read(module, (normal(4, 4), normal(8, 4))), route=route)


def test_refusals_with_a_single_sample() -> None:
    """The trace is at two samples then, but that is not what is wrong."""
    module = type("Model", (Two,), {"forward": _branch})()
    with pytest.raises(CaptureError) as caught:
        capture(module, read(module, (normal(1, 4),)), route="direct")
    assert "batch=" not in str(caught.value)


@pytest.mark.parametrize("route", ROUTES)
def test_a_step_without_a_loss_has_a_tangent_an_output_and_gradients_of_inputs(route: str) -> None:
    module = Two()
    module.forward = lambda x: module.lin(x)  # type: ignore[assignment]
    made = capture(module, read(module, (normal(4, 4).requires_grad_(),)), route=route)
    assert made.deferred and made.loss is None
    tangents = [(item.target, item.value.shape) for item in made.of_kind("tangent")]
    assert [target for target, _ in tangents] == ["0"] and tangents[0][1][0] == Size(1)
    assert [out.target for out in made.outputs if out.kind == "input_grad"] == ["args[0]"]
    plain = capture(module, read(module, (normal(4, 4),)), route=route)
    assert not [out for out in plain.outputs if out.kind == "input_grad"]
    with torch.no_grad():
        assert not capture(module, read(module, (normal(4, 4).requires_grad_(),)), route=route).training


def test_unknown_route() -> None:
    module = Two()
    with pytest.raises(ValueError, match="unknown route 'trace'; one of compile, direct"):
        capture(module, read(module, (normal(4, 4),)), route="trace")


# What is left alone


class Stateful(Two):
    """A forward that writes to its module wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.calls, self.seen, self.table = 0, [], {"last": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        h = self.norm(self.lin(x))
        self.last = h
        self.seen.append(h.shape)
        self.table["last"] = h
        return self.head(h)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_of_the_users_changes(route: str) -> None:
    module, x = Stateful(), normal(4, 4)
    ran: list[str] = []
    handles = [module.register_forward_hook(lambda *_: ran.append("root"))]
    handles.append(module.lin.register_forward_pre_hook(lambda *_: ran.append("lin")))
    module.norm.eval()
    module.out.weight.requires_grad_(False)
    module.lin.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    seen, table = module.seen, module.table
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    attributes = [dict(part.__dict__) for part in module.modules()]
    generators = (torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()))
    with pytest.raises(CaptureError, match=r"Stateful.forward changes "):
        capture(module, read(module, (x,)), route=route)
    assert ran == []
    assert [part.__dict__ for part in module.modules()] == attributes
    assert module.seen is seen and seen == [] and module.table is table and table == {"last": None}
    assert module.calls == 0 and not hasattr(module, "last")
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(parameters[name] is p for name, p in module.named_parameters())
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["lin.weight"]
    assert torch.equal(module.lin.weight.grad, torch.ones(4, 4, dtype=torch.float64))
    assert not module.norm.training and module.training and not module.out.weight.requires_grad
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), repr(numpy.random.get_state()))
    module(x)
    assert ran == ["lin", "root"]


def test_capture_leaves_no_compiled_code_behind() -> None:
    """Ten captures of one module: no recompilation limit is met, and torch.compile afterwards is the user's own."""
    module, x = nn.Linear(4, 1), torch.randn(4, 4)
    call = read(module, (x,))
    for _ in range(10):
        capture(module, call)
    assert torch.equal(module(x), torch.compile(module, backend="eager", fullgraph=True)(x))
