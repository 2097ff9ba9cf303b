"""Parameters of which mesh axes inside segments leave each rank a piece: placed, gathered, saved, clipped, resumed.

No program is needed for any of it: the states are made by hand, and gradients are set as a step would leave them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopart
from autopart.capture.trace import Names
from autopart.errors import RankFailure
from autopart.ir.mesh import Mesh, pieces
from autopart.ir.placement import Placement
from autopart.ir.state import Parameter, Piece, State, Unit
from autopart.runtime import guards
from autopart.runtime.residence import Residence
from autopart.runtime.states import States, counts, elements, whole_gradients
from autopart.testing import LocalWorld

SPLIT = {"up.weight": (0, 1), "up.bias": (0, 1), "qkv.weight": (0, 3), "down.weight": (1, 1), "embed.weight": (0, 1)}
"""By parameter, the dim that tp splits, and the number of runs that it is seen as."""

UNITS = {
    "a": ("up.weight", "up.bias", "qkv.weight", "norm"),
    "b": ("down.weight", "scale"),
    "tied": ("embed.weight",),
    "frozen": ("fixed",),
}
PLANS: dict[str, tuple[dict[str, int], str]] = {
    "tp2 dp2 fsdp": ({"dp": 2, "tp": 2}, "fsdp"),
    "tp3 dp2 zero1": ({"dp": 2, "tp": 3}, "zero1"),
    "pp2 tp2": ({"pp": 2, "tp": 2}, "ddp"),
    "tp first, pp2 dp2 fsdp": ({"tp": 2, "pp": 2, "dp": 2}, "fsdp"),
    "tp3": ({"tp": 3}, "ddp"),
    "pp2 dp2 zero1": ({"pp": 2, "dp": 2}, "zero1"),
}


class Net(nn.Module):
    """Parameters split along either dim, in runs, unevenly, and not at all; a tied, a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv = nn.Linear(4, 5), nn.Linear(4, 12, bias=False)
        self.norm = nn.Parameter(torch.randn(4))
        self.down = nn.Linear(7, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.never = nn.Linear(2, 1)
        self.register_buffer("shift", torch.arange(3.0))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def state_of(mesh: Mesh, rank: int, preset: str) -> State:
    """The state of a rank's place on tp; all units on the first pp rank but `b`, and the tied one on both."""
    whole, place = net(), mesh.coordinate(rank).get("tp", 0)
    last = mesh.degree("pp") - 1
    columns = {"a": (0,), "b": (last,), "tied": tuple(range(last + 1)), "frozen": (0,)}

    def parameter(name: str) -> Parameter:
        shape = tuple(whole.get_parameter(name).shape)
        if name not in SPLIT or mesh.degree("tp") == 1:
            return Parameter(name, shape, torch.float64)
        dim, outer = SPLIT[name]
        sizes = pieces(shape[dim] // outer, mesh.degree("tp"))
        piece = Piece("tp", shape, dim, outer, sum(sizes[:place]), sum(sizes[: place + 1]))
        return Parameter(name, piece.local, torch.float64, (piece,))

    modes = Placement.preset(preset).on("dp")
    units = [
        Unit(name, tuple(map(parameter, targets)), name != "frozen", modes, columns[name], columns[name])
        for name, targets in UNITS.items()
    ]
    return State(tuple(units), ("shift",))


def placed(model: Any, plan: str) -> Any:
    """The model, made parts as its first call would make it."""
    sizes, preset = PLANS[plan]
    mesh, session = Mesh.of(sizes), model._autopart
    transport = session.join().transport
    materials = session._materials(model)
    state = state_of(mesh, transport.rank, preset)
    session.residence = Residence(model, transport, mesh, state, dict(Names.of(model).tied))
    guards.watch(session.residence)
    session._place(model, None, materials, torch.device("cpu"))
    return model


def parallel(plan: str, seed: int = 0) -> Any:
    return autopart.parallelize(net(seed), capture="direct", mesh=PLANS[plan][0])


def run(plan: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return LocalWorld(Mesh.of(PLANS[plan][0]).size).run(fn, plan, *args)


def whole_grads(step: int) -> dict[str, torch.Tensor]:
    """A gradient of every parameter that has one."""
    generator = torch.Generator().manual_seed(step)
    named = {name: p for name, p in net().named_parameters() if p.requires_grad and "never" not in name}
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in named.items()}


def give(model: Any, grads: dict[str, torch.Tensor]) -> None:
    """Every rank's part of whole gradients, as a step leaves them."""
    holder = model._autopart.holder(model) if hasattr(model, "_autopart") else None
    for name, grad in grads.items():
        mine = grad if holder is None else holder.slot(name).elements.of(grad)
        model.get_parameter(name).grad = mine.clone()


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[torch.Tensor]:
    """Steps with given gradients, clipped; their norms."""
    norms = []
    for step in range(first, last):
        give(model, whole_grads(step))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def eager(last: int) -> tuple[Net, torch.optim.Optimizer, list[torch.Tensor]]:
    model = net()
    optimizer = adamw(model)
    return model, optimizer, train(model, optimizer, 0, last)


def close(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)


def close_optimizers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"] and list(found["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        close({key: found["state"][index][key] for key in state}, state)


# Which elements lie where


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(["pp", "dp", "tp", "ep"]),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.sampled_from(["ddp", "zero1", "fsdp"]),
    st.lists(st.integers(1, 6), max_size=3).map(tuple),
    st.data(),
)
def test_every_element_counts_on_one_rank(
    order: list[str], sizes: tuple[int, ...], preset: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    mesh = Mesh(tuple(zip(order, sizes, strict=True)))
    cuts = []
    for axis in data.draw(st.sampled_from([(), ("tp",), ("tp", "ep")])) if shape else ():
        outer = data.draw(st.sampled_from([1, 2, 3]))
        cuts.append((axis, data.draw(st.integers(0, len(shape) - 1)), outer))
    column = data.draw(st.integers(0, mesh.degree("pp") - 1))
    times, seen = torch.zeros(shape, dtype=torch.int64), 0
    whole = torch.arange(times.numel()).view(shape)
    for rank in range(mesh.size):
        here, found, local = mesh.coordinate(rank), [], shape
        for axis, dim, outer in cuts:
            outer = outer if local[dim] % outer == 0 else 1
            lengths = pieces(local[dim] // outer, mesh.degree(axis))
            place = here[axis]
            found.append(Piece(axis, local, dim, outer, sum(lengths[:place]), sum(lengths[: place + 1])))
            local = found[-1].local
        parameter = Parameter("w", local, torch.int64, tuple(found))
        unit = Unit("u", (parameter,), True, Placement.preset(preset).on("dp"), (0,), (column,))
        mine = elements(unit, parameter, mesh, rank)
        assert mine.shape == shape and (here["pp"] == column or not mine.count)
        if counts(unit, parameter, mesh, rank):
            seen += 1
            times.view(-1)[mine.of(whole).flatten()] += 1
    assert (times == 1).all() and seen >= 1


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_in_one_process_view_pieces_and_their_gradients_make_whole_ones(plan: str) -> None:
    sizes, preset = PLANS[plan]
    mesh, model, grads = Mesh.of(sizes), net(), whole_grads(0)
    whole = {name: p.data for name, p in model.named_parameters()}
    made = []
    for rank in range(mesh.size):
        state = state_of(mesh, rank, preset)
        states = States.viewing(state, mesh, rank, whole)
        for unit in states.units.values():
            here = {p.target: elements(unit, p, mesh, rank) for p in unit.parameters}
            assert all(torch.equal(states.parts[name], part.of(whole[name])) for name, part in here.items())
            states.add(unit.name, [part.of(grads[name]) if name in grads else None for name, part in here.items()])
        made.append(states)
    found = whole_gradients(made)
    assert set(found) == set(grads) and all(torch.equal(found[name], grad) for name, grad in grads.items())


# A rank with a process of its own


def life(rank: int, plan: str) -> dict[str, Any]:
    model = parallel(plan, seed=rank and 9)  # all take rank 0's values
    twin = copy.deepcopy(model)  # from before there were parts
    optimizer = adamw(model)
    residence = placed(model, plan)._autopart.residence
    placed(twin, plan)
    out: dict[str, Any] = {"first": model.state_dict(), "twin": twin.full_state_dict()}
    for name, p in residence.named().items():
        kept = residence.whole.get(name, p)
        assert kept.untyped_storage().nbytes() == kept.nbytes and kept.is_contiguous()  # no memory of what is elsewhere
        assert model.local_state_dict()[name].shape == p.shape == residence.slot(name).tensor.shape
    out["elements"] = sum(residence.slot(name).elements.count for name in residence.named() if residence.counts(name))
    out["norms"] = train(model, optimizer, 0, 2)
    out["grads"], out["after"] = model.full_grads(), model.state_dict()
    out["optimizer"] = copy.deepcopy(optimizer.state_dict())
    out["other norms"] = [torch.nn.utils.get_total_norm([p.grad for p in held(model)], p) for p in (1.0, float("inf"))]
    later = copy.deepcopy(model)
    model.load_state_dict(net(1).state_dict())
    out["loaded"], out["copied"] = model.state_dict(), later.state_dict()
    fresh = adamw(model)
    model.load_state_dict(out["after"])
    fresh.load_state_dict(copy.deepcopy(out["optimizer"]))  # whole: cut at the next step
    train(model, fresh, 2, 3)
    out["resumed"] = model.state_dict()
    residence.check(model)
    shapes = [tuple(p.shape) for p in residence.whole_copy(model).parameters()]
    assert shapes == [tuple(p.shape) for p in net().parameters()]
    return out


def held(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("plan", PLANS)
def test_a_split_parameter_lives_as_one_that_is_not(plan: str) -> None:
    model, optimizer, norms = eager(2)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    after, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.utils.get_total_norm(grads.values(), p) for p in (1.0, float("inf"))]
    train(model, optimizer, 2, 3)
    ranks = run(plan, life)
    for out in ranks:
        close(out["first"], net().state_dict())
        close(out["twin"], net().state_dict())
        close(out["grads"], grads)
        close(out["after"], after)
        close(out["copied"], after)
        close(out["loaded"], net(1).state_dict())
        close(out["resumed"], model.state_dict())
        close_optimizers(out["optimizer"], state)
        torch.testing.assert_close(torch.stack(out["norms"]), torch.stack(norms), rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.stack(out["other norms"]), torch.stack(others), rtol=1e-12, atol=0)
    assert sum(out["elements"] for out in ranks) == sum(p.numel() for p in net().parameters())


def overflowing(rank: int, plan: str) -> tuple[dict[str, Any], float]:
    model = placed(parallel(plan), plan)
    grads = whole_grads(0)
    grads["down.weight"][0, -1] = float("inf")  # at one place of the last stage
    give(model, grads)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.step(adamw(model))
    scaler.update()
    return model.state_dict(), scaler.get_scale()


def test_all_places_skip_a_step_whose_gradient_overflows_at_one() -> None:
    for weights, scale in run("pp2 tp2", overflowing):
        close(weights, net().state_dict())
        assert scale == 1.0


# Checkpoints and files


def saved(rank: int, plan: str, folder: Path) -> None:
    model = placed(parallel(plan), plan)
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    autopart.save(folder, model, optimizer)


def resumed(rank: int, plan: str, folder: Path, early: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model = parallel(plan, seed=4)
    optimizer = adamw(model)
    if not early:
        train(placed(model, plan), optimizer, 5, 6)
    autopart.load(folder, model, optimizer)
    if early:
        placed(model, plan)
    train(model, optimizer, 2, 3)
    return model.state_dict(), optimizer.state_dict()


def on_one(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model = autopart.parallelize(net(4), capture="direct", devices=1)
    optimizer = adamw(model)
    autopart.load(folder, model, optimizer)
    train(model, optimizer, 2, 3)
    return model.state_dict(), optimizer.state_dict()


def test_any_mesh_reads_what_any_other_saved(tmp_path: Path) -> None:
    model, optimizer, _ = eager(3)
    readers = ["pp2 dp2 zero1", "tp2 dp2 fsdp", "tp3", "pp2 tp2", "tp3 dp2 zero1", "tp first, pp2 dp2 fsdp"]
    for writer, (number, reader) in zip(PLANS, enumerate(readers), strict=True):
        run(writer, saved, tmp_path / writer)
        found = [*run(reader, resumed, tmp_path / writer, number % 2 == 0), on_one(tmp_path / writer)]
        for weights, state in found:
            close(weights, model.state_dict())
            close_optimizers(state, optimizer.state_dict())
    alone = autopart.parallelize(net(), capture="direct", devices=1)
    optimizer_alone = adamw(alone)
    train(alone, optimizer_alone, 0, 2)
    autopart.save(tmp_path / "alone", alone, optimizer_alone)
    close(run("tp2 dp2 fsdp", resumed, tmp_path / "alone", True)[0][0], model.state_dict())


def test_a_checkpoint_of_the_first_version_is_read_into_pieces(tmp_path: Path) -> None:
    run("pp2 dp2 zero1", saved, tmp_path)
    path = tmp_path / "checkpoint.json"
    index = json.loads(path.read_text())
    assert index["version"] == 2
    for tensor in index["tensors"].values():
        tensor["pieces"] = [[file, *runs[0][0]] for file, *runs in tensor["pieces"]]
    path.write_text(json.dumps({**index, "version": 1}))
    model, optimizer, _ = eager(3)
    for weights, state in run("tp3 dp2 zero1", resumed, tmp_path, False):
        close(weights, model.state_dict())
        close_optimizers(state, optimizer.state_dict())


def test_a_checkpoint_that_lacks_elements_is_refused(tmp_path: Path) -> None:
    run("tp3", saved, tmp_path)
    path = tmp_path / "checkpoint.json"
    index = json.loads(path.read_text())
    index["tensors"]["model/qkv.weight"]["pieces"].pop()
    path.write_text(json.dumps(index))
    with pytest.raises(RankFailure, match=r"only 0 of the 12 elements of model/qkv.weight for this rank are"):
        run("tp3", resumed, tmp_path, False)


def from_meta(rank: int, plan: str, weights: str | None) -> dict[str, Any]:
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = autopart.parallelize(Net, capture="direct", mesh=PLANS[plan][0], weights=weights)()
    model.double()
    residence = placed(model, plan)._autopart.residence
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in residence.whole.values())
    return dict(model.state_dict())


@pytest.mark.parametrize("plan", ["tp2 dp2 fsdp", "tp3 dp2 zero1", "pp2 tp2"])
@pytest.mark.parametrize("source", ["seed", "file"])
def test_what_is_on_meta_becomes_pieces(plan: str, source: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    expected = net().state_dict()
    save_file({name: t for name, t in expected.items() if name != "head.weight"}, tmp_path / "model.safetensors")
    for found in run(plan, from_meta, str(tmp_path) if source == "file" else None):
        close(found, expected)


# Groups, and what is refused


def groups(rank: int, plan: str) -> list[tuple[int, ...]]:
    return placed(parallel(plan), plan)._autopart.residence._groups()


def test_the_ranks_of_a_tied_unit_are_a_group_at_each_place() -> None:
    mesh = Mesh.of(PLANS["tp first, pp2 dp2 fsdp"][0])
    found = run("tp first, pp2 dp2 fsdp", groups)
    assert all(each == found[0] for each in found)
    for tp, part in product(range(2), range(2)):
        place = {"tp": tp, "dp": part}
        assert (mesh.rank({**place, "pp": 0}), mesh.rank({**place, "pp": 1})) in found[0]
    assert (0, 4) in found[0]  # along tp


def refused(rank: int, plan: str, kind: Any) -> str:
    model = placed(parallel(plan), plan)
    give(model, whole_grads(0))
    before = model.state_dict()
    with pytest.raises(ValueError) as caught:
        kind([p for p in model.parameters() if p.ndim == 2 and p.requires_grad]).step()
    close(model.state_dict(), before)
    return str(caught.value)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused_pieces() -> None:
    wanted = {
        torch.optim.Adafactor: "Adafactor needs whole tensors, but each place of a mesh axis has a piece of up.weight; "
        "use placement='ddp' on a mesh of pp and dp alone, or an elementwise optimizer",
        torch.optim.LBFGS: "LBFGS needs every tensor whole on every rank, but each place of a mesh axis has a piece of "
        "up.weight; use placement='ddp' on a dp axis alone, or",
    }
    for kind, words in wanted.items():
        assert all(words in message for message in run("tp3", refused, kind))


def test_pieces_that_do_not_make_up_their_parameter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_residence.pieces", lambda total, parts: [2] * parts)  # as if every place had two
    with pytest.raises(RankFailure, match=r"parameter qkv.weight: its pieces have 64 elements in all, but it has 48"):
        run("tp3", groups)
