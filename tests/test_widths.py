"""Pipeline ranks of unlike width: what passes between them is dealt anew; plans of such meshes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import autopart
from autopart import schedules
from autopart.cluster import Cluster
from autopart.errors import CaptureError, PlanInfeasible, VerificationError
from autopart.ir.cost import SegmentNumbers
from autopart.ir.dealing import EQUAL, SUM, overlap, passes, received, sent
from autopart.ir.mesh import Mesh, spans_of
from autopart.ir.placement import PRESETS
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.verify import verify
from autopart.solver import choose
from autopart.testing import LocalWorld, assert_parity
from tests.launch import launch
from tests.oracle import _backward, _exchange, _forward, every_split, stage_bytes
from tests.test_joint import Model, Point, every_plan, layer, limit_of, models, numbers_of

WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


class Net(nn.Module):
    """Layers with dropout, and a scale that is made of a parameter on the first stage and used on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = self.scale(x.new_ones(1)).sigmoid()
        for each in self.layers:
            x = self.drop(torch.tanh(each(x)))
        return F.mse_loss(self.head(x * scale), y)


class Outputs(nn.Module):
    """A loss beside outputs, one of which is split and one of which is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.first(x))
        y = self.second(h)
        return {"loss": y.square().sum(), "h": h, "y": y}


def data(samples: int, width: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, width).double(), torch.randn(samples, classes).double()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


# ---- the mesh, and how values are dealt ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(WIDTHS, st.integers(1, 3), st.integers(0, 40))
def test_each_stage_has_every_sample_of_every_microbatch_once(widths: list[int], count: int, batch: int) -> None:
    mesh = Mesh.of({"pp": tuple(widths)})
    assert mesh.size == sum(widths) and bool(mesh.widths) == (len(set(widths)) > 1)
    every = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in every] == list(range(mesh.size))
    for column, width in enumerate(widths):
        ranks = mesh.column(column)
        assert len(ranks) == mesh.width(column) == width and all(mesh.group(rank, "dp") == ranks for rank in ranks)
        spans = [mesh.spans(rank, mesh.dealt(batch), count) for rank in ranks]
        seen = [sample for each in spans for first, n in each for sample in range(first, first + n)]
        assert sorted(seen) == list(range(batch))
        if mesh.widths:
            whole = spans_of(0, batch, count)
            assert [(s[0][0], sum(n for _, n in s)) for s in zip(*spans, strict=True)] == list(whole)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 20), st.integers(0, 9))
def test_both_sides_deal_alike_and_everything_arrives_once(before: int, after: int, batch: int, first: int) -> None:
    sources, targets = spans_of(first, batch, before), spans_of(first, batch, after)
    deal = (0, EQUAL, SUM)
    out = [(i, *each) for i in range(before) for each in sent("abc", deal, i, sources, targets)]
    into = [(j, *each) for j in range(after) for each in received("abc", deal, j, sources, targets)]
    assert sorted((i, j, value, count) for i, j, value, _, (_, count) in out) == sorted(
        (i, j, value, count) for j, i, value, _, (_, count) in into
    )
    taken = [sources[i][0] + at + k for i, _, value, _, (at, n) in out if value == "a" for k in range(n)]
    assert sorted(taken) == list(range(first, first + batch))
    assert sorted(j for _, j, value, *_ in out if value == "b") == list(range(after))
    assert sorted(i for i, _, value, *_ in out if value == "c") == list(range(before))
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            same = {*range(source[0], sum(source))} & {*range(target[0], sum(target))}
            assert overlap(source, target)[1] == len(same) and passes(0, i, j, sources, targets) == bool(same)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"pp": (2, 0)}, "widths of 'pp'"),
        ({"pp": (2, 1), "dp": 2}, "go with no other axis yet, but the mesh has dp"),
        ({"tp": 2, "pp": (2, 1)}, "the mesh has tp"),
        ({"tp": (2, 1)}, "the size of 'tp'"),
    ],
)
def test_meshes_that_cannot_be(sizes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"mesh: .*{what}"):
        Mesh.of(sizes)


# ---- programs --------------------------------------------------------------------------------------------------------

ROWS = [
    ((2, 1), "fsdp", "1f1b"),
    *(
        pytest.param(widths, placement, schedule, marks=pytest.mark.soak)
        for widths in ((1, 2), (2, 1, 1), (2, 3), (1, 3, 1))
        for placement, schedule in (("ddp", "1f1b"), ("zero1", "gpipe"), ("zero2", "zb-h1"), ("fsdp", "1f1b"))
    ),
]


@pytest.mark.parametrize(("widths", "placement", "schedule"), ROWS)
def test_numbers(widths: tuple[int, ...], placement: str, schedule: str) -> None:
    """Loss, gradients, clipped norms and parameters are one device's: with dropout, uneven and with a smaller batch."""

    def batches(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return data((8, 7, 6)[step]), {}

    pins = {"mesh": {"pp": widths}, "placement": placement, "schedule": schedule, "microbatches": 2}
    assert_parity(net(), data(8), batches=batches, **pins)


def test_what_is_equal_and_what_is_a_part_of_a_sum_pass_too() -> None:
    """The scale is sent by one rank; its gradient is added up; the text says so, and bytes are as predicted."""
    pins: dict[str, Any] = {"mesh": {"pp": (2, 1)}, "stages": ["layers.2"], "microbatches": 2, "capture": "direct"}
    model = autopart.parallelize(net(), **pins)
    model(*data(7)).backward()
    assert_parity(net(), data(8), plan=model.program)
    found = {(e.source, e.target): e.deal for e in model.program.staged.edges}
    assert {how for deal in found.values() for how in deal} == {0, EQUAL, SUM}
    assert any(f"deal={order}" in model.program.ranks[0].source for order in ('(0, "equal")', '("equal", 0)'))
    for rank in model.report().ranks:
        assert rank.bytes_sent == rank.predicted_bytes and rank.peak_activations <= rank.predicted_activations
    assert Plan.from_json(model.plan.to_json()) == model.plan


@pytest.mark.parametrize("widths", [(2, 1), pytest.param((1, 3), marks=pytest.mark.soak)])
def test_outputs_and_gradients_of_inputs(widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Outputs().double()
    expected_of = plain.state_dict()
    x = data(7, 4)[0].requires_grad_()
    expected = plain(x)
    expected["loss"].backward()
    grad, x.grad = x.grad, None
    for outputs in (None, "all"):
        mine = Outputs().double()
        mine.load_state_dict(expected_of)
        model = autopart.parallelize(mine, mesh={"pp": widths}, microbatches=2, capture="direct", outputs=outputs)
        found = model(x)
        found["loss"].backward()
        for name in ("loss", "h", "y"):
            torch.testing.assert_close(found[name], expected[name])
        torch.testing.assert_close(x.grad, grad)
        assert all(rank.bytes_sent == rank.predicted_bytes for rank in model.report().ranks)
        x.grad = None
        model.eval()
        with torch.no_grad():
            for samples in (1, 2, 5):
                torch.testing.assert_close(model(x[:samples])["y"], expected["y"][:samples])


def test_a_step_without_a_loss_and_gradients_held_back() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = data(8, 4)[0]
    plain(x).square().sum().backward()
    expected = {name: 2 * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad()
    model = autopart.parallelize(plain, mesh={"pp": (2, 1)}, microbatches=2, capture="direct", placement="zero1")
    with model.no_sync():
        model(x).square().sum().backward()
    model(x).square().sum().backward()
    for name, grad in model.full_grads().items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize(
    ("rank", "old", "new", "rule"),
    [
        (0, "deal=(0,)", "deal=(1,)", "rule transfers: .*it deals what passes by"),
        (0, ", deal=(0,)", "", "rule (transfers|text): "),
        (2, ", deal=(0,)", "", "rule transfers: .*does not say how"),
        (1, "microbatch=k, deal", "microbatch=1 - k, deal", "rule (transfers|text): "),
        (2, "'pp': (2, 1)", "'pp': (1, 2)", "rule text: .*MESH"),
        (0, "world.send(acts_0_1.pop(k), stage=0, to=1, microbatch=k, deal=(0,))", "acts_0_1.pop(k)", "never sends it"),
    ],
)
def test_planted_faults(rank: int, old: str, new: str, rule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    plan = autopart.plan(
        model, (x,), target=y, loss_fn=F.mse_loss, mesh={"pp": (2, 1)}, microbatches=2, capture="direct"
    )
    made = autopart.compile(model, plan, (x,), target=y, loss_fn=F.mse_loss, capture="direct")
    text = made.write(tmp_path) / f"rank{rank}.py"
    verify(Program.read(tmp_path))
    assert old in text.read_text()
    text.write_text(text.read_text().replace(old, new))
    with pytest.raises(VerificationError, match=rule):
        verify(Program.read(tmp_path))


def loop(*_: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = autopart.parallelize(net(), mesh={"pp": (2, 1)}, microbatches=2, placement="zero2", capture="direct")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(*data(7))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach()), model.full_state_dict()


@pytest.mark.soak
def test_processes() -> None:
    expected, state = LocalWorld(3).run(loop)[0]
    for found, other in launch(loop, 3, timeout=90).values:
        assert found == pytest.approx(expected, rel=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(other[name], tensor)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y[:, :1].expand(-1, 6))


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x))
        h = torch.tanh(self.first(x))[rows, 0]
        return (self.last(x + h[:, None])[rows, 1] - y[:, 0]).square().mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


class Normed(Counting):
    """What couples the samples of the batch: a normalisation by its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.last(self.norm(self.first(x))), y)


class Classes(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.more(torch.tanh(self.first(x))))), y.argmax(1))


@pytest.mark.parametrize(
    ("model", "pins", "error", "what"),
    [
        (Tied, {}, CaptureError, "the parameter first.weight is used on the stages 0, 1, .*2 and 1 data ranks"),
        (Numbered, {"stages": ["last"]}, CaptureError, "numbers the samples of a microbatch, and goes from stage 0"),
        (Counting, {}, CaptureError, "the forward updates the buffer calls"),
        (Normed, {"semantics": "accumulate", "microbatches": 2}, ValueError, "semantics='accumulate'"),
        (Normed, {}, ValueError, "compute together, which pipeline ranks of unlike width, .*, cannot do yet"),
        (Net, {"schedule": "interleaved"}, ValueError, "schedule: interleaved is not for a mesh of pp=2 x dp=2 then 1"),
        (Net, {"schedule": "dualpipe"}, ValueError, "schedule: dualpipe is not for a mesh"),
        (Classes, {"schedule": "vocab"}, ValueError, "schedule: vocab is not for a mesh"),
        (Net, {"microbatches": 5}, ValueError, "microbatches: a batch of 8 .* allows at most 4, not 5"),
    ],
)
def test_refused(model: Any, pins: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        autopart.plan(model().double(), data(8), mesh={"pp": (2, 1)}, capture="direct", **pins)


def test_refused_in_calls() -> None:
    model = autopart.parallelize(net(), mesh={"pp": (2, 1)}, microbatches=4, capture="direct")
    model(*data(8))
    with pytest.raises(ValueError, match="batch: 7 samples cannot be cut into 8 pieces"):
        model(*data(7))
    model = autopart.parallelize(net(), mesh={"pp": (2, 1)}, microbatches=2, capture="direct")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="unlike width, which loops whose steps overlap cannot be on yet"):
        next(iter(autopart.train_loop(model, optimizer, [data(8)])))


@pytest.mark.soak
def test_stages_of_one_width_share_a_parameter_beside_others() -> None:
    pins = {"stages": ["middle", "last"], "placement": "zero1", "microbatches": 2}
    assert_parity(Tied().double(), data(8), mesh={"pp": (2, 1, 2)}, **pins)


def trained(_: int, widths: tuple[int, ...], folder: str, goes_on: bool) -> list[float]:
    """The losses of two steps, of two more after a checkpoint, or of these alone, from the checkpoint."""
    model = autopart.parallelize(net(), mesh={"pp": widths}, microbatches=2, placement="fsdp", capture="direct")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    model.eval()  # masks are drawn by the number of the call
    for step in range(4):
        if goes_on and step == 1:
            autopart.load(folder, model, optimizer)
        if goes_on and step == 3:
            break
        loss = model(*data(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if not goes_on and step == 1:
            autopart.save(folder, model, optimizer)
    return losses


@pytest.mark.soak
def test_a_checkpoint_goes_on_under_other_widths(tmp_path: Path) -> None:
    whole = LocalWorld(3).run(trained, (2, 1), str(tmp_path), False)[0]
    rest = LocalWorld(4).run(trained, (1, 3), str(tmp_path), True)[0]
    assert rest[1:] == pytest.approx(whole[2:], rel=1e-12)


# ---- the planner -----------------------------------------------------------------------------------------------------


def every_wide_plan(model: Model, devices: int) -> Iterator[Point]:
    """All plans on pipeline ranks of unlike width, written from the definitions."""
    plain, again, cluster, batch = model
    for pp in range(2, min(devices, len(plain) + 1)):
        for cuts in combinations(range(1, devices), pp - 1):
            widths = tuple(b - a for a, b in pairwise((0, *cuts, devices)))
            if len(set(widths)) == 1 or max(widths) > batch:
                continue
            for count in numbers_of(batch // max(widths)):
                yield from _wide_points(plain, again, cluster, widths, count, -(-batch // count))


def _wide_points(
    plain: Any, again: Any, cluster: Cluster, widths: tuple[int, ...], m: int, size: int
) -> Iterator[Point]:
    pieces, count = {w: -(-size // w) for w in widths}, len(plain)
    built = schedules.build("1f1b", ranks=len(widths), microbatches=m)
    for subset in chain.from_iterable(combinations(range(count), n) for n in range(count + 1)):
        rows = {w: [(again if i in subset else plain)[i].at(n) for i in range(count)] for w, n in pieces.items()}
        if any(again[i].at(1).saved_bytes >= plain[i].at(1).saved_bytes for i in subset):
            continue
        for starts in every_split(count, len(widths)):
            ends = [*starts[1:], count]
            stages = [rows[w][i:j] for w, i, j in zip(widths, starts, ends, strict=True)]
            seconds = {
                kind: [sum(time(s, cluster) for s in stage) for stage in stages]
                for kind, time in (("F", _forward), ("B", _backward))
            }
            narrow = [min(pair) for pair in pairwise(widths)]
            crossing = max(rows[w][i].boundary_bytes for w, i in zip(narrow, starts[1:], strict=True))
            edge = cluster.link_latency + crossing / cluster.link_bandwidth
            length = schedules.simulate(built, seconds, edge).makespan
            for preset in PRESETS:
                yield length + _collectives(stages, widths, preset, m, cluster), _peak(stages, widths, preset, m)


def _collectives(stages: Any, widths: tuple[int, ...], preset: str, m: int, cluster: Cluster) -> float:
    return max(sum(_exchange(s, preset, w, m, cluster) for s in k) for k, w in zip(stages, widths, strict=True))


def _peak(stages: list[list[SegmentNumbers]], widths: tuple[int, ...], preset: str, m: int) -> int:
    pairs = enumerate(zip(stages, widths, strict=True))
    return max(stage_bytes(stage, preset, w, 2, min(m, len(stages) - k)) for k, (stage, w) in pairs)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(models(), st.integers(3, 4), st.integers(25, 120))
def test_equals_brute_force(model: Model, devices: int, percent: int) -> None:
    plain, again, cluster, batch = model
    model, limit = (plain, again, cluster, max(batch, devices)), limit_of(model, percent)
    fitting = [t for t, held in chain(every_plan(model, devices), every_wide_plan(model, devices)) if held <= limit]
    pins: dict[str, Any] = {"recomputed": again, "devices": devices, "cluster": cluster, "memory": limit}
    if not fitting:
        with pytest.raises(PlanInfeasible):
            choose(plain, batch=model[3], widths=True, **pins)
        return
    plan = choose(plain, batch=model[3], widths=True, **pins)
    assert plan.prediction.step_seconds == pytest.approx(min(fitting), rel=1e-9, abs=1e-12)
    assert plan.optimality.startswith("optimal: ")
    assert all(memory.total <= limit for memory in plan.prediction.memory)
    if plan.mesh.widths:
        again_pinned = choose(plain, batch=model[3], mesh=plan.mesh, **{**pins, "devices": None})
        assert again_pinned.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds)


def test_a_heavy_segment_gets_two_devices_of_three() -> None:
    """Nothing fits whole on one device; three stages wait for the heavy segment, which two data ranks halve."""
    sizes = {"heavy": (10, 9000), "light": (40, 300), "large": (40, 300)}
    costs = [layer(name, parameters=n, saved=0, work=work) for name, (n, work) in sizes.items()]
    pins: dict[str, Any] = {"cluster": Cluster.uniform(3, 340, 1e4, 1e4, 1e6, 0.0), "placement": "ddp", "devices": 3}
    grid = choose(costs, batch=12, **pins)
    plan = choose(costs, batch=12, widths=True, **pins)
    assert (
        grid.mesh == Mesh.of({"pp": 3, "dp": 1})
        and plan.mesh.widths == (2, 1)
        and plan.optimality.startswith("optimal: ")
    )
    assert plan.prediction.step_seconds < 0.7 * grid.prediction.step_seconds
    assert "mesh pp=2 x dp=2 then 1" in plan.explain()


class Uneven(nn.Module):
    """A first layer that takes most of the time, and a second that has most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy, self.large, self.head = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.heavy(x)).mean(1)
        return self.head(torch.tanh(self.large(h))).square().mean()


def test_a_free_mesh_may_have_unlike_widths_and_trains() -> None:
    torch.manual_seed(0)
    model, x = Uneven().double(), torch.randn(12, 64, 16).double()
    cluster = Cluster.uniform(3, 10**9, 1e9, 1e9, 1e8, 1e-7)
    pins: dict[str, Any] = {"cluster": cluster, "placement": "ddp", "capture": "direct"}
    two = autopart.plan(model, (x,), mesh={"pp": (2, 1)}, **pins)
    limit = two.prediction.peak + 64
    free = autopart.plan(model, (x,), memory=limit, **pins)
    pinned = autopart.plan(model, (x,), mesh={"pp": (2, 1)}, memory=limit, **pins)
    assert free.prediction.step_seconds <= pinned.prediction.step_seconds * (1 + 1e-9)
    assert_parity(model, (x,), plan=pinned)
