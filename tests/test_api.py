"""The user's loop, unchanged: every way to parallelise, ordinary loop lines, and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.testing import LocalWorld
from tests.models import GPT, MODELS


class Net(nn.Module):
    """Two layers and a mean squared error; `factor` is an ordinary attribute."""

    factor = 3

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.down(torch.tanh(self.up(x))) - y) ** 2).mean()

    def helper(self) -> int:
        return self.factor + 1


def pair(**pins: Any) -> tuple[Any, Net, tuple[torch.Tensor, torch.Tensor]]:
    """A parallelised and an equal plain module, and a batch."""
    torch.manual_seed(3)
    plain = Net().double()
    pins = {"mesh": {"pp": 2}, "microbatches": 2, "capture": "direct", **pins}
    return (
        autopart.parallelize(copy.deepcopy(plain), **pins),
        plain,
        (torch.randn(6, 4).double(), torch.randn(6, 2).double()),
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-10, atol=1e-14))


def test_bare_decorator_decorator_with_arguments_and_call_on_an_instance() -> None:
    bare = autopart.parallelize(Net)
    arguments = autopart.parallelize(devices=2, mesh={"pp": 2})(Net)
    torch.manual_seed(0)
    models = [bare(width=8), arguments(8), autopart.parallelize(Net(8), devices=2)]
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    for model in models:
        assert isinstance(model, Net) and model.factor == 3 and model.helper() == 4
        assert [name for name, _ in model.named_parameters()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
        loss = model(x, y)
        loss.backward()
        assert loss.shape == () and model.up.weight.grad is not None
    assert [model.plan.mesh.size for model in models] == [1, 2, 2]
    assert bare.__name__ == "Net" and bare.__doc__ == Net.__doc__


def test_optimizer_made_before_or_after_the_first_call() -> None:
    for before in (True, False):
        model, plain, batch = pair()
        made = torch.optim.AdamW(model.parameters(), lr=1e-2) if before else None
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for _ in range(3):
            loss = model(*batch)
            loss.backward()
            made = made or torch.optim.AdamW(model.parameters(), lr=1e-2)
            plain(*batch).backward()
            for optimizer in (made, reference):
                optimizer.step()
                optimizer.zero_grad()
        assert all(same(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_accumulation_scaling_and_no_second_delivery() -> None:
    model, plain, batch = pair()
    other = tuple(t.flip(0) * 0.5 for t in batch)
    for data in (batch, other, batch):
        (model(*data) / 3).backward()
        (plain(*data) / 3).backward()
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert same(mine.grad, reference.grad)
    loss = model(*batch)
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_train_eval_and_no_grad_choose_the_program() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            out = self.fc(x) * (1.0 if self.training else 2.0)
            return out if y is None else {"loss": (out - y).square().sum(), "out": out}

    plain = Modes().double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=1, capture="direct")
    x, y = torch.randn(4, 4).double(), torch.randn(4, 3).double()
    trained = model(x, y)
    assert trained["loss"].requires_grad and same(trained["out"], plain(x, y)["out"])
    with torch.no_grad():
        assert same(model(x), plain(x)) and not model(x, y)["loss"].requires_grad
    model.eval(), plain.eval()
    with torch.no_grad():
        assert same(model(x), plain(x))
        assert same(model(x[:3]), plain(x[:3])), "a shorter batch"
    assert same(model(x), plain(x)) and not model(x).requires_grad
    model.train()
    assert same(model(x, y)["loss"], plain.train()(x, y)["loss"])


def test_clipping_by_torch_and_by_the_method() -> None:
    norms = []
    for by_method in (True, False):
        model, plain, batch = pair()
        model(*batch).backward()
        plain(*batch).backward()
        if by_method:
            norms.append(model.clip_grad_norm_(0.1))
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert same(norms[-1], expected)
        assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def parts(rank: int, pins: dict[str, Any], state: dict[str, torch.Tensor], batch: Any) -> dict[str, Any]:
    """One rank that holds parts: what a user can ask of them."""
    torch.manual_seed(rank)  # ranks may start from other weights: rank 0's hold
    model = autopart.parallelize(Net().double(), capture="direct", **pins)
    model(*batch)
    model.load_state_dict(state)
    model(*batch).backward()
    norm = torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.1)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    strict = pytest.raises(RuntimeError, match=r"(?s)Missing.*up\.bias.*Unexpected.*nonsense")
    with strict:
        model.load_state_dict({**{k: v for k, v in state.items() if k != "up.bias"}, "nonsense": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict({**state, "up.weight": torch.zeros(3, 3)})
    loose = model.load_state_dict({"nonsense": torch.zeros(1)}, strict=False)
    return {
        "state": model.full_state_dict(),
        "grads": model.full_grads(),
        "norm": norm,
        "total": total,
        "loose": (sorted(loose.missing_keys), loose.unexpected_keys),
        "local": {name: tuple(tensor.shape) for name, tensor in model.local_state_dict().items()},
        "ndims": [p.ndim for p in model.parameters()],
    }


@pytest.mark.parametrize(
    "pins", [{"mesh": {"dp": 2}, "placement": "fsdp"}, {"mesh": {"dp": 2}, "placement": "zero1"}, {"mesh": {"pp": 2}}]
)
def test_parts_come_together(pins: dict[str, Any]) -> None:
    _, plain, batch = pair()
    plain(*batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for found in LocalWorld(2).run(parts, pins, plain.state_dict(), batch):
        assert all(same(found["state"][name], value) for name, value in plain.state_dict().items())
        assert list(found["state"]) == list(plain.state_dict())
        assert all(same(found["grads"][name], p.grad) for name, p in plain.named_parameters())
        assert same(found["norm"], norm) and abs(float(found["total"]) - 0.1) < 1e-6
        assert found["loose"] == (["down.bias", "down.weight", "up.bias", "up.weight"], ["nonsense"])
        assert found["ndims"] == [2, 1, 2, 1]
        assert any(shape[0] != plain.state_dict()[name].shape[0] for name, shape in found["local"].items())


def test_f041_losses_that_are_means_sums_and_counts_under_every_plan() -> None:
    class Losses(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first, self.fc, self.kind = nn.Linear(4, 4), nn.Linear(4, 5), kind

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.fc(torch.tanh(self.first(x)))
            each = nn.functional.cross_entropy(logits, y, reduction="none", ignore_index=-1)
            match self.kind:
                case "mean":
                    return nn.functional.cross_entropy(logits, y, ignore_index=-1)
                case "sum":
                    return each.sum()
                case "count":
                    return each.sum() / (y >= 0).sum()
                case _:
                    return each.mean() + 0.1 * self.fc.weight.square().sum()

    x, y = torch.randn(8, 4).double(), torch.tensor([0, -1, 2, 3, -1, -1, 1, 4])
    for kind, mesh, microbatches in (
        ("mean", {"dp": 2}, 3),
        ("mean", {"pp": 2}, 4),
        ("mean", {"pp": 2, "dp": 2}, 2),
        ("sum", {"dp": 3}, 2),
        ("sum", {"pp": 2, "dp": 2}, 2),
        ("count", {"dp": 1}, 3),
        ("count", {"dp": 3}, 1),
        ("count", {"pp": 2}, 3),
        ("penalty", {"dp": 2}, 3),
    ):
        torch.manual_seed(1)
        plain = Losses(kind).double()
        model = autopart.parallelize(copy.deepcopy(plain), mesh=mesh, microbatches=microbatches, capture="direct")
        mine, reference = model(x, y), plain(x, y)
        mine.backward()
        reference.backward()
        assert same(mine, reference), (kind, mesh)
        for name, parameter in plain.named_parameters():
            assert same(model.get_parameter(name).grad, parameter.grad), (kind, mesh, name)


def test_train_step_with_a_loss_function() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model = autopart.parallelize(
        copy.deepcopy(plain), mesh={"pp": 2}, microbatches=2, loss_fn=nn.functional.mse_loss, capture="direct"
    )
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    loss = model.train_step((x,), target=y)
    loss.backward()
    reference = nn.functional.mse_loss(plain(x), y)
    reference.backward()
    assert same(loss, reference) and same(model[0].weight.grad, plain[0].weight.grad)
    assert same(model(x), plain(x)), "a call without a target gives the outputs"


def test_report_and_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, batch = pair(mesh={"pp": 2, "dp": 2})
    with pytest.raises(RuntimeError, match="nothing has run"):
        model.report()
    model(*batch).backward()
    report = model.report()
    assert report.bytes_sent == report.predicted_bytes and len(report.ranks) == 4
    assert [entry[0] for entry in report.log] == ["0F0", "0F1", "0B0", "0B1"] and "rank" in str(report)
    with monkeypatch.context() as patched:  # a step is predicted once, for a copy of the module too
        patched.delattr("autopart.api.delivery.predicted_of")
        assert model.report() == report == copy.deepcopy(model).report()
    folder = model.program.write(tmp_path / "program")
    assert sorted(p.name for p in folder.iterdir()) == ["actions.json", "plan.json", "program.json"] + [
        f"rank{r}.py" for r in range(4)
    ]
    assert autopart.Plan.load(folder / "plan.json") == model.plan


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_report_predicts_the_step_that_ran_last(mesh: dict[str, int]) -> None:
    """Of an evaluation, of one sample too, and of a training call with other sizes than the first."""
    model, ids = GPT(2, 8, 2, skips=False, tied=False), torch.randint(0, 32, (4, 3))
    parallel = autopart.parallelize(model, mesh=mesh, microbatches=2, placement="fsdp", capture="direct")
    sent = []
    for training, call in ((True, ids), (False, ids), (False, ids[:1]), (True, ids.repeat(1, 2)), (True, ids)):
        parallel.train(training)
        with torch.set_grad_enabled(training):
            parallel(call, call)
        for rank in parallel.report().ranks:
            assert rank.bytes_sent == rank.predicted_bytes
            assert rank.peak_activations <= rank.predicted_activations
            assert rank.peak_memory <= rank.predicted_memory
        sent.append(sum(sum(rank.predicted_bytes.values()) for rank in parallel.report().ranks))
    assert sent[0] == sent[4] and len(set(sent[:3])) == 3


def test_stage_graphs_compute_what_the_stages_do() -> None:
    model, plain, batch = pair(microbatches=1)
    model(*batch)
    forward = [stage.forward for stage in model.program.stages]
    parameters = {name.replace(".", "_"): p.detach() for name, p in plain.named_parameters()}
    given = {"args_0": batch[0], "args_1": batch[1], **parameters}

    def run(graph: torch.fx.GraphModule, received: Any) -> Any:
        names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
        return graph(*(None if n == "world" else received if n.startswith("from_") else given[n] for n in names))

    sent, *_ = run(forward[0], None)
    loss, *_ = run(forward[1], sent)
    assert same(loss, plain(*batch))
    assert any(node.op == "call_module" for node in forward[0].graph.nodes)


BAD = {
    "devices": (dict(devices=0), ValueError, "devices"),
    "devices type": (dict(devices="4"), TypeError, "devices"),
    "mesh": (dict(mesh={"pp": 2, "dp": 2}, devices=3), ValueError, "mesh.*4.*3"),
    "axis": (dict(mesh={"xx": 2}), ValueError, "xx"),
    "placement": (dict(placement="zero9"), ValueError, "zero9.*fsdp"),
    "placement to come": (dict(placement="hsdp"), ValueError, "hsdp is not planned yet.*Placement.costs"),
    "schedule": (dict(schedule="1f2b"), ValueError, "1f2b.*gpipe"),
    "microbatches": (dict(microbatches=0), ValueError, "microbatches"),
    "capture": (dict(capture="magic"), ValueError, "capture.*direct"),
    "plan": (dict(plan="best"), TypeError, "plan"),
    "stages type": (dict(stages="h.2"), TypeError, "stages"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_at_once(name: str) -> None:
    pins, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        autopart.parallelize(Net(), **pins)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        autopart.parallelize(lambda x: x, devices=2)


LATE = {
    "unknown stage": (dict(mesh={"pp": 2}, stages=["nowhere"]), ValueError, "nowhere"),
    "unknown pattern": (dict(placement={"*.mlp": "fsdp", "*": "ddp"}), ValueError, r"\*\.mlp"),
    "small batch": (dict(mesh={"dp": 2}, microbatches=4), ValueError, "microbatches"),
    "unknown input": (dict(batch={"z": 0}), ValueError, "z"),
}


@pytest.mark.parametrize("name", LATE)
def test_refused_at_the_first_call_and_nothing_is_lost(name: str) -> None:
    pins, kind, message = LATE[name]
    torch.manual_seed(0)
    plain = Net()
    before = copy.deepcopy(plain.state_dict())
    model = (
        autopart.parallelize(plain, devices=2, **pins) if "batch" not in pins else autopart.parallelize(plain, **pins)
    )
    generator = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(kind, match=message):
            model(torch.ones(6, 4), torch.ones(6, 2))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and isinstance(model, Net)


def test_a_mesh_says_how_many_devices_there_are() -> None:
    _, plain, batch = pair()
    assert autopart.plan(plain, batch, mesh={"dp": 3}, capture="direct").mesh.size == 3
    with pytest.raises(ValueError, match=r"mesh: dp=3 has 3 ranks.* 2 devices"):
        autopart.plan(plain, batch, mesh={"dp": 3}, devices=2, capture="direct")


def test_hooks_run_on_the_root_and_are_refused_below() -> None:
    model, _, batch = pair()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("root"))
    model(*batch)
    assert seen == ["root"]
    model.up.register_forward_hook(lambda *_: seen.append("up"))
    with pytest.raises(autopart.CaptureError, match="up has hooks"):
        model(*batch)


def test_another_value_is_another_program_never_the_old_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, k: int = 2, mask: torch.Tensor | None = None) -> torch.Tensor:
            out = self.fc(x) * k
            return (out if mask is None else out * mask).sum()

    plain = Scaled().double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=1, capture="direct")
    x, mask = torch.randn(4, 4).double(), torch.rand(4, 2).double()
    for kwargs in ({}, {"k": 5}, {"mask": mask}, {"k": 5, "mask": mask}, {}):
        assert same(model(x, **kwargs), plain(x, **kwargs))
    longer = torch.randn(7, 4).double()
    assert same(model(longer), plain(longer)), "another batch size, uneven pieces"


def disagreeing(rank: int, what: str) -> str:
    model = autopart.parallelize(Net(), mesh={"dp": 2}, capture="direct")
    torch.manual_seed(rank if what == "contents" else 0)
    size = 4 + 2 * rank if what == "size" else 4
    with pytest.raises(ValueError) as caught:
        model(torch.randn(size, 4), torch.randn(size, 2))
    return str(caught.value)


@pytest.mark.parametrize(("what", "word"), [("contents", "contents"), ("size", "batch size")])
def test_ranks_that_call_differently_are_told_so(what: str, word: str) -> None:
    messages = LocalWorld(2).run(disagreeing, what)
    assert messages[0] == messages[1] and word in messages[0] and "rank 1" in messages[0]


def test_world_of_another_size_is_refused_on_every_rank() -> None:
    def ask(rank: int) -> str:
        model = autopart.parallelize(Net(), devices=3)
        with pytest.raises(ValueError) as caught:
            model(torch.randn(4, 4), torch.randn(4, 2))
        return str(caught.value)

    assert all("3" in message and "2" in message for message in LocalWorld(2).run(ask))


def test_f097_one_device_has_every_method() -> None:
    model, args, kwargs = MODELS["half_frozen"]()
    plain = copy.deepcopy(model)
    parallel = autopart.parallelize(model, capture="direct")
    mine, reference = parallel(*args, **kwargs), plain(*args, **kwargs)
    mine["loss"].backward()
    reference["loss"].backward()
    assert same(mine["out"], reference["out"]) and mine["extra"] == reference["extra"]
    assert set(parallel.full_grads()) == {n for n, p in plain.named_parameters() if p.grad is not None}
    assert sum(parallel.report().bytes_sent.values()) == 0


def test_a_parameter_without_a_gradient_after_an_evaluation_first() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.side = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": self.fc(x).square().sum(), "side": self.side(x)}

    plain = Auxiliary().double()
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=1, capture="direct")
    x = torch.randn(4, 4).double()
    with torch.no_grad():
        assert same(model(x)["side"], plain(x)["side"])
    found = model(x)
    found["loss"].backward()
    plain(x)["loss"].backward()
    assert same(model.fc.weight.grad, plain.fc.weight.grad) and model.side.weight.grad is None


def evaluated_first(rank: int, plain: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    model = autopart.parallelize(copy.deepcopy(plain), mesh={"dp": 2}, microbatches=1, capture="direct")
    with torch.no_grad():
        model(x)
    model(x)["loss"].backward()
    return model.full_grads()["fc.weight"], "side.weight" in model.full_grads()


def test_the_same_on_ranks_that_hold_parts() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.side = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": self.fc(x).square().sum(), "side": self.side(x)}

    plain = Auxiliary().double()
    x = torch.randn(4, 4).double()
    plain(x)["loss"].backward()
    for gradient, side in LocalWorld(2).run(evaluated_first, plain, x):
        assert same(gradient, plain.fc.weight.grad) and not side


def steps_of(rank: int, plain: nn.Module, batch: Any, pins: dict[str, Any], kind: str) -> str:
    model = autopart.parallelize(copy.deepcopy(plain), capture="direct", **pins)
    parameters = [p for p in model.parameters() if p.ndim == 2] if kind == "Muon" else model.parameters()
    optimizer = getattr(torch.optim, kind)(parameters)
    model(*batch).backward()
    before = {name: value.clone() for name, value in model.local_state_dict().items()}
    try:
        optimizer.step(lambda: model(*batch)) if kind == "LBFGS" else optimizer.step()
    except ValueError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.local_state_dict().items())
        return str(error)
    return "stepped"


@pytest.mark.parametrize(
    ("kind", "pins", "message"),
    [
        ("Muon", {"mesh": {"dp": 2}, "placement": "zero1"}, "Muon needs whole tensors.*has a part of"),
        ("LBFGS", {"mesh": {"pp": 2}}, "LBFGS needs every tensor whole on every rank, but not every rank has"),
        ("Muon", {"mesh": {"dp": 2}, "placement": "ddp"}, "stepped"),
        ("AdamW", {"mesh": {"dp": 2}, "placement": "fsdp"}, "stepped"),
    ],
)
def test_optimizers_that_need_whole_tensors_are_stopped_on_parts(kind: str, pins: dict[str, Any], message: str) -> None:
    _, plain, batch = pair()
    for found in LocalWorld(2).run(steps_of, plain, batch, pins, kind):
        assert re.search(message, found), found
