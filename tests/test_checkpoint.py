"""State out and in: whole state dicts on ranks that hold parts, checkpoints, optimizers; rows F058 to F065 and F007."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.errors import RankFailure
from autopart.runtime import checkpoint
from autopart.testing import LocalWorld
from tests.launch import launch

PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"mesh": {"pp": 2}, "microbatches": 2},
    "dp2 fsdp": {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 1},
    "dp2 zero1": {"mesh": {"dp": 2}, "placement": "zero1", "microbatches": 2},
    "pp2 dp2 zero2": {"mesh": {"pp": 2, "dp": 2}, "placement": "zero2", "microbatches": 1},
}


class Net(nn.Module):
    """Sizes that nothing divides; a tied weight, a 0-d, a frozen and an unused parameter; buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.never = nn.Linear(2, 2)
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("hidden", torch.arange(3) / 4, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x)) + self.shift * self.frozen
        h = torch.tanh(self.mid(h)) + self.back(x)
        return (self.down(h) * self.scale.exp() - self.hidden - x).pow(2).mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, vectors do not: some rank has nothing of one of the groups."""
    decay = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    rest = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 3e-2}], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def steps(model: nn.Module, optimizer: Any, schedule: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        schedule.step()


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.MultiStepLR:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 4], gamma=0.5)


def parallel(pins: dict[str, Any], seed: int = 0) -> Any:
    return autopart.parallelize(net(seed), capture="direct", **pins)


def eager(make: Make, last: int) -> tuple[Net, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model)
    steps(model, optimizer, scheduler(optimizer), 0, last)
    return model, optimizer


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def same_state(found: dict[str, Any], expected: dict[str, Any], *, exact: bool = False) -> None:
    """Two optimizers' state dicts: same groups, same keys, same or close values."""
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        assert set(found["state"][index]) == set(state)
        for key, value in state.items():
            other = found["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert other.device.type == "cpu" and other.shape == value.shape
                torch.testing.assert_close(other, value, rtol=0 if exact else 1e-8, atol=0 if exact else 1e-12)
            else:
                assert other == value


# state_dict and load_state_dict


def names_and_strictness(rank: int, pins: dict[str, Any]) -> dict[str, Any]:
    plain, model = net(), parallel(pins)
    close(model.state_dict(), plain.state_dict())
    model.load_state_dict(net(1).state_dict())
    model.load_state_dict(plain.state_dict())  # before the first call
    model(batch(0)).backward()
    out: dict[str, Any] = {"first": model.state_dict(), "prefixed": list(model.state_dict(prefix="net."))}
    out["local"] = {name: tensor.numel() for name, tensor in model.local_state_dict().items()}
    given = net(1).state_dict()
    model.load_state_dict(given)
    out["loaded"] = model.state_dict()
    odd = {name: tensor for name, tensor in net(2).state_dict().items() if name not in ("mid.bias", "shift")}
    odd["extra"] = torch.zeros(1)
    out["errors"] = [caught(lambda: model.load_state_dict(odd))]
    wrong = {**given, "down.weight": torch.zeros(4, 5)}
    out["errors"] += [caught(lambda: model.load_state_dict(wrong, strict=False))]
    out["errors"] += [caught(lambda: model.load_state_dict(odd if rank == 1 else given))]
    out["errors"] += [caught(lambda: model.load_state_dict(net(rank).state_dict()))]
    out["errors"] += [caught(lambda: model.load_state_dict(given, assign=True))]
    out["unchanged"] = model.state_dict()
    assert out["errors"][0] == caught(lambda: plain.load_state_dict(odd))
    out["lists"] = tuple(model.load_state_dict(odd, strict=False))
    assert out["lists"] == tuple(plain.load_state_dict(odd, strict=False))
    out["partly"] = model.state_dict()
    wrapper = nn.ModuleDict({"inner": model, "outer": nn.Linear(1, 1)})
    out["wrapped"] = list(wrapper.state_dict())
    return out


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("plan", ["pp2", "dp2 fsdp", "dp2 zero1"])
def test_f062_names_and_strictness_are_those_of_a_module(plan: str) -> None:
    ranks = LocalWorld(2).run(names_and_strictness, PLANS[plan])
    keys = list(net().state_dict())
    for out in ranks:
        close(out["first"], net().state_dict())
        close(out["loaded"], net(1).state_dict())
        close(out["unchanged"], net(1).state_dict())
        assert out["prefixed"] == [f"net.{key}" for key in keys]
        assert out["wrapped"] == [*(f"inner.{key}" for key in keys), "outer.weight", "outer.bias"]
        assert out["lists"] == (["shift", "mid.bias"], ["extra"])
        expected = net(1).state_dict() | {
            k: v for k, v in net(2).state_dict().items() if k not in ("mid.bias", "shift")
        }
        close(out["partly"], expected)
        assert out["errors"] == ranks[0]["errors"]
        assert sum(out["local"].values()) < sum(tensor.numel() for tensor in net().state_dict().values())
    missing, shape, one_rank, values, assign = ranks[0]["errors"]
    strict = "RuntimeError: Error(s) in loading state_dict for Net:"
    assert missing.startswith(strict) and '"shift", "mid.bias"' in missing and '"extra"' in missing
    assert shape.startswith(strict) and "size mismatch for down.weight" in shape and "[3, 5]" in shape
    assert '"mid.bias"' in one_rank
    assert "of rank 1 is not that of rank 0" in values and "assign=True" in assign


def test_f007_capture_and_calls_without_a_step_change_no_buffer_and_no_gradient() -> None:
    model, plain = parallel({"mesh": {"pp": 2}, "microbatches": 2}), net()
    with torch.no_grad():
        model(batch(0))
    model(batch(0))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training


def test_f114_pickling_says_what_to_do_and_copies_work() -> None:
    model = parallel({"mesh": {"pp": 2}, "microbatches": 2})
    for called in (False, True):
        if called:
            model(batch(0)).backward()
        with pytest.raises(TypeError, match=r"Net is parallelised and cannot be pickled.*autopart.save"):
            pickle.dumps(model)
        twin = copy.deepcopy(model)
        assert twin.up.weight is not model.up.weight and twin.back.weight is twin.up.weight
        assert copy.copy(model).up is model.up
        assert torch.equal(twin(batch(1)), model(batch(1)))


# Optimizers


def whole_optimizer(rank: int, pins: dict[str, Any], make: Make, given: Any, early: bool) -> Any:
    """Three steps, the state dict; then a new pair that loads them, before or after its first call, and three more."""
    model = parallel(pins)
    optimizer = make(model)
    schedule = scheduler(optimizer)
    steps(model, optimizer, schedule, 0, 3)
    weights, state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    later = parallel(pins, seed=4)
    fresh = make(later)
    if not early:
        later(batch(0)).backward()
    later.load_state_dict(weights)
    fresh.load_state_dict(copy.deepcopy(given if given is not None else state))  # torch's counters are shared otherwise
    resumed = scheduler(fresh)
    resumed.load_state_dict(schedule.state_dict())
    steps(later, fresh, resumed, 3, 6)
    loaded = fresh.state_dict()
    fresh.load_state_dict(loaded)
    same_state(fresh.state_dict(), loaded, exact=True)  # whole again, before any step has cut it
    return state, loaded, later.state_dict()


@pytest.mark.parametrize(("plan", "make", "early"), [("pp2", adamw, True), ("dp2 fsdp", adamw, False)])
def test_f065_an_optimizers_state_dict_is_that_of_one_device(plan: str, make: Make, early: bool) -> None:
    _, after3 = eager(make, 3)
    model, after6 = eager(make, 6)
    given = None if early else after3.state_dict()  # its own, or that of one device
    for state, loaded, weights in LocalWorld(2).run(whole_optimizer, PLANS[plan], make, given, early):
        same_state(state, after3.state_dict())
        same_state(loaded, after6.state_dict())
        close(weights, model.state_dict())
        assert {float(entry["step"]) for entry in loaded["state"].values()} == {6.0}


def head_only(rank: int) -> Any:
    model = parallel(PLANS["pp2"])
    optimizer = torch.optim.SGD(model.down.parameters(), lr=0.1)
    steps(model, optimizer, scheduler(optimizer), 0, 3)
    return model.state_dict(), model.full_grads(), [len(group["params"]) for group in optimizer.param_groups]


def test_f064_an_optimizer_over_a_part_of_the_parameters_changes_only_that() -> None:
    plain = net()
    optimizer = torch.optim.SGD(plain.down.parameters(), lr=0.1)
    schedule = scheduler(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        plain(batch(step)).backward()
        optimizer.step()
        schedule.step()
    for weights, grads, sizes in LocalWorld(2).run(head_only):
        close(weights, plain.state_dict())
        close(grads, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
        assert sizes == [2]


# Checkpoints


def saved(rank: int, folder: Path, pins: dict[str, Any], make: Make) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three steps, a save, and three more without a break."""
    model = parallel(pins)
    optimizer = make(model)
    schedule = scheduler(optimizer)
    steps(model, optimizer, schedule, 0, 3)
    autopart.save(folder, model, optimizer, step=3, schedule=schedule.state_dict(), who=torch.tensor(rank))
    steps(model, optimizer, schedule, 3, 6)
    return model.state_dict(), optimizer.state_dict()


def resumed(rank: int, folder: Path, pins: dict[str, Any], make: Make, early: bool) -> Any:
    model = parallel(pins, seed=4)
    optimizer = make(model)
    schedule = scheduler(optimizer)
    if not early:
        steps(model, optimizer, schedule, 7, 8)
    more = autopart.load(folder, model, optimizer)
    schedule.load_state_dict(more["schedule"])
    steps(model, optimizer, schedule, more["step"], 6)
    return model.state_dict(), optimizer.state_dict(), int(more["who"])


@pytest.mark.parametrize(
    ("plan", "make", "early"),
    [("pp2", adamw, False), ("dp2 fsdp", adamw, True), ("dp2 zero1", momentum, False), ("dp2 zero1", adamw, True)],
)
def test_resuming_under_the_same_plan_is_bitwise_the_run_without_a_break(
    plan: str, make: Make, early: bool, tmp_path: Path
) -> None:
    weights, state = LocalWorld(2).run(saved, tmp_path, PLANS[plan], make)[0]
    model, optimizer = eager(make, 6)
    close(weights, model.state_dict())
    for rank, out in enumerate(LocalWorld(2).run(resumed, tmp_path, PLANS[plan], make, early)):
        assert all(torch.equal(out[0][name], tensor) for name, tensor in weights.items())
        same_state(out[1], state, exact=True)
        same_state(out[1], optimizer.state_dict())
        assert out[2] == rank


def test_f058_another_plan_and_another_number_of_ranks_read_the_same_checkpoint(tmp_path: Path) -> None:
    LocalWorld(4).run(saved, tmp_path, PLANS["pp2 dp2 zero2"], adamw)
    model, optimizer = eager(adamw, 6)
    zero1 = {"mesh": {"dp": 3}, "placement": "zero1", "microbatches": 1}
    tp = {"mesh": {"tp": 2}, "placement": {"mid.weight": {"tp": autopart.Shard(0)}}, "microbatches": 1}
    for size, pins, early in ((2, tp, False), (3, zero1, True)):
        weights, state, _ = LocalWorld(size).run(resumed, tmp_path, pins, adamw, early)[0]
        close(weights, model.state_dict())
        same_state(state, optimizer.state_dict())
    weights, state, _ = resumed(0, tmp_path, {"mesh": {"pp": 2}, "microbatches": 1}, adamw, True)  # all in one process
    close(weights, model.state_dict())
    same_state(state, optimizer.state_dict())


class Small(nn.Module):
    """Parameters of 3 and of 6 rows, on four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.b[:3]) * self.b[3:].sum() * self.a.sum()).pow(2).mean()


def small(rank: int, folder: Path, load: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = autopart.parallelize(Small().double(), mesh={"dp": 4}, placement="fsdp", microbatches=1, capture="direct")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if load:
        autopart.load(folder, model, optimizer)
    model(batch(int(load))).backward()
    optimizer.step()
    if not load:
        autopart.save(folder, model, optimizer)
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def test_f060_ranks_with_no_rows_of_a_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Small().double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain(batch(step)).backward()
        optimizer.step()
    LocalWorld(4).run(small, tmp_path, False)
    for weights in LocalWorld(4).run(small, tmp_path, True):
        close(weights, plain.state_dict())


class Turning(nn.Module):
    """Complex numbers of both widths, one of them without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5 + 1j, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.to(torch.complex128) * self.narrow) @ self.wide.T * self.scale).abs().square().mean()


def turning(rank: int, folder: Path, pins: dict[str, Any], first: int) -> dict[str, torch.Tensor]:
    """Two steps, from what is saved in the folder or from the start, and a save."""
    torch.manual_seed(first)
    model = autopart.parallelize(Turning(), capture="direct", **pins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if first:
        autopart.load(folder, model, optimizer)
    for step in range(first, first + 2):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    autopart.save(folder, model, optimizer)
    return dict(model.state_dict())


def test_complex_parameters_are_saved_and_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Turning()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain(batch(step)).backward()
        optimizer.step()
    LocalWorld(2).run(turning, tmp_path, PLANS["dp2 fsdp"], 0)
    for found in LocalWorld(2).run(turning, tmp_path, PLANS["dp2 zero1"], 2):
        for name, tensor in plain.state_dict().items():
            assert found[name].dtype == tensor.dtype
            tolerance = 1e-4 if name == "narrow" else 1e-6  # what is complex64 computes so
            assert torch.allclose(found[name], tensor, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("where", ["rank 1 cannot write", "killed before the index is replaced"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalWorld(2).run(saved, tmp_path, PLANS["pp2"], adamw)
    write = checkpoint._write_parts

    def failing(path: Path, parts: Any) -> Any:
        if path.name == "rank1.safetensors":
            raise OSError("no space left")
        return write(path, parts)

    def killed(*_: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        if where.startswith("rank 1"):
            patch.setattr(checkpoint, "_write_parts", failing)
            with pytest.raises(RankFailure, match="rank 1: OSError: no space left"):
                LocalWorld(2).run(saved, tmp_path, PLANS["pp2"], momentum)
        else:
            patch.setattr(os, "replace", killed)
            with pytest.raises(SystemExit):
                LocalWorld(2).run(saved, tmp_path, PLANS["pp2"], momentum)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    after = LocalWorld(2).run(resumed, tmp_path, PLANS["pp2"], adamw, True)[0]
    close(after[0], eager(adamw, 6)[0].state_dict())
    LocalWorld(2).run(saved, tmp_path, PLANS["pp2"], momentum)  # a good one, which clears up what the failed one left
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.json", index["data"]}
    assert (index["mesh"], index["ranks"]) == ("pp=2", 2)
    assert re.fullmatch(r"\d+(-[0-9a-f]{8}){3}", index["model"])


def refused(rank: int, folder: Path) -> list[str]:
    model = parallel(PLANS["pp2"])
    optimizer = adamw(model)
    steps(model, optimizer, scheduler(optimizer), 0, 1)
    before = (model.state_dict(), copy.deepcopy(optimizer.state_dict()))
    other = autopart.parallelize(Small().double(), mesh={"dp": 2}, microbatches=1, capture="direct")
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=1.0)
    found = [
        caught(lambda: autopart.save(folder, model, optimizer, hook=(lambda: 0) if rank == 1 else 0)),
        caught(lambda: autopart.save(folder, model, foreign)),
        caught(lambda: autopart.load(folder / "nowhere", model)),
        caught(lambda: autopart.load(folder, other)),
        caught(lambda: autopart.load(folder, model, momentum(model))),
        caught(lambda: autopart.save(folder, net())),  # type: ignore[arg-type]
    ]
    autopart.save(folder / "alone", model)
    found += [caught(lambda: autopart.load(folder / "alone", model, optimizer))]
    late = parallel(PLANS["pp2"])
    autopart.load(folder, late, adamw(late))
    found += [caught(lambda: autopart.save(folder / "alone", late))]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    same_state(optimizer.state_dict(), before[1], exact=True)
    return found


def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    LocalWorld(2).run(saved, tmp_path, PLANS["pp2"], adamw)
    one, two = LocalWorld(2).run(refused, tmp_path)
    assert one == two
    words = [
        "TypeError: .*more: hook is or holds something that a checkpoint cannot have",
        "ValueError: optimizer: its parameter 10, of shape .7., is not one of the module's",
        "FileNotFoundError: .*nowhere: there is no checkpoint",
        "ValueError: .*the checkpoint holds .*, which the module does not have",
        "ValueError: .*the checkpoint's optimizer has 2 parameter groups, this one 1",
        "TypeError: expected a parallelised module, not Net",
        "ValueError: .*was saved without an optimizer",
        "ValueError: save: the model has not been called since it was built or loaded",
    ]
    for message, word in zip(one, words, strict=True):
        assert re.match(word, message), message


def process_saves(folder: str) -> Any:
    return saved(int(os.environ["RANK"]), Path(folder), PLANS["pp2"], adamw)


def process_resumes(folder: str) -> Any:
    return resumed(int(os.environ["RANK"]), Path(folder), PLANS["dp2 fsdp"], adamw, True)


def test_new_processes_resume_what_others_saved(tmp_path: Path) -> None:
    model, optimizer = eager(adamw, 6)
    for weights, state in launch(process_saves, 2, [str(tmp_path)], timeout=90).values:
        close(weights, model.state_dict())
        same_state(state, optimizer.state_dict())
    for weights, state, _ in launch(process_resumes, 2, [str(tmp_path)], timeout=90).values:
        close(weights, model.state_dict())
        same_state(state, optimizer.state_dict())
