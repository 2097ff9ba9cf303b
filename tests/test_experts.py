"""Experts on an axis: rows go to the places of their groups, as many as there are, and come back. All of it is exact.

Each place sorts its own samples' rows, so what is held against one device is the routing itself: which rows go where,
that all of them come back, and that experts see the rows of all places.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import autopart
from autopart.api import parallelize
from autopart.errors import VerificationError
from autopart.ir.mesh import pieces
from autopart.ir.placement import Dispatched, Replicate, Shard
from autopart.ir.program import Program
from autopart.testing import LocalWorld, assert_parity
from autopart.testing.parity import adamw, compare, train
from tests.expert_layers import LENGTH, SAMPLES, Layers, tokens
from tests.launch import launch
from tests.tensor_axis import CHEAP, close, close_calls
from tests.test_rows import CHOSEN, EXPERTS, WIDTH, WRITTEN, Mixture, ends_of, hugging_face
from tests.test_values import on_places
from tests.test_verify import refused

moe = pytest.importorskip("transformers.integrations.moe")

DEALT = {"*.up": {"ep": Shard(0)}, "*.down": {"ep": Shard(0)}}
"""Whole experts at the places of the axis."""


def program(model: torch.nn.Module, **pins: Any) -> Program:
    x = tokens().double()
    plan = autopart.plan(model.double(), (x,), cluster=CHEAP, capture="direct", **{"placement": DEALT} | pins)
    return autopart.compile(model, plan, (x,), capture="direct")


def exchanged(found: Program) -> list[str]:
    """What the bodies of the last layer call their world for, at the last place."""
    bodies = re.findall(r"^def layers_1_\w+\(.*?(?=\n\n\n)", found.ranks[-1].source, re.MULTILINE | re.DOTALL)
    return re.findall(r"world\.(\w+)_values", "\n".join(bodies))


# ---- parity ----------------------------------------------------------------------------------------------------------

MESHES: dict[str, dict[str, Any]] = {
    "ep2": {"mesh": {"ep": 2}},
    "ep3": {"mesh": {"ep": 3}},
    "ep2 in microbatches": {"mesh": {"ep": 2}, "microbatches": 3},
    "pp2 ep2 backwards in two": {"mesh": {"pp": 2, "ep": 2}, "microbatches": 3, "schedule": "zb-h1"},
    "dp3 ep2": {"mesh": {"dp": 3, "ep": 2}},
    "ep2 tp2": {"mesh": {"ep": 2, "tp": 2}},
    "recomputed": {"mesh": {"pp": 2, "ep": 2}, "microbatches": 3, "recompute": True},
}
QUICK = {("inverse_written", mesh) for mesh in ("ep3", "pp2 ep2 backwards in two", "ep2 tp2")} | {("added", "ep2")}
ROWS = [
    pytest.param(form, mesh, marks=[] if (form, mesh) in QUICK else [pytest.mark.soak])
    for form in WRITTEN
    for mesh in MESHES
]


@pytest.mark.parametrize(("form", "mesh"), ROWS)
def test_training_is_that_of_one_device(form: str, mesh: str) -> None:
    model = Layers(WRITTEN[form])
    found = program(model, **MESHES[mesh])
    assert exchanged(found).count("dispatch") >= 2, "forward and backward"
    assert_parity(model, (tokens(),), plan=found, tolerance=1e-10)


@pytest.mark.parametrize("bias", [(9.0, 8.0, 0.0), (0.0, 8.0, 9.0)], ids=["none for the last", "none for the first"])
def test_a_place_may_get_all_rows_or_none(bias: tuple[float, ...]) -> None:
    """Three experts on three places: one of them has no row."""
    model = Layers(WRITTEN["inverse_written"], bias)
    assert_parity(model, (tokens(),), plan=program(model, mesh={"ep": 3}), tolerance=1e-10)


def test_rows_of_no_expert_come_back_too() -> None:
    """Tokens whose expert is behind the last: such rows are in no group, and zero."""
    model = Layers(WRITTEN["inverse_written"], spare=2)
    counts = [(layer.gate(tokens().flatten(0, 1)).topk(CHOSEN).indices >= EXPERTS).sum() for layer in model.layers]
    assert counts[0] > 0
    assert_parity(model, (tokens(),), plan=program(model, mesh={"ep": 2}), tolerance=1e-10)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4}),
        ("GptOss", {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8}),
    ],
)
def test_hugging_faces_mixtures(kind: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's own is not for float64
    found = hugging_face(kind, **sizes)
    pins = {"*experts.gate_up_proj": {"ep": Shard(0)}, "*experts.down_proj": {"ep": Shard(0)}}
    how: dict[str, Any] = {"mesh": {"ep": 2}, "microbatches": 3, "placement": pins, "cluster": CHEAP}
    assert_parity(found.model, found.args, found.kwargs, tolerance=1e-8, capture="compile", **how)


def test_calls_that_the_plan_has_not_seen() -> None:
    """Evaluation, and samples that the axis does not divide: experts stay where they lie."""
    model, found = Layers(WRITTEN["added"]).double(), program(Layers(WRITTEN["added"]), mesh={"ep": 2})

    def main(rank: int) -> None:
        mine, plain = parallelize(copy.deepcopy(model), plan=found.plan, capture="direct"), copy.deepcopy(model)
        for samples in (6, 5, 8):
            x = tokens(samples).double()
            close_calls(mine, plain, x)
        with torch.no_grad():
            close(mine.eval()(x), plain.eval()(x))

    LocalWorld(2).run(main)


def gloo_case() -> float:
    """One rank's part of a comparison, in its own process."""
    model = Layers(WRITTEN["added"])
    mine = parallelize(copy.deepcopy(model), mesh={"ep": 2}, placement=DEALT, cluster=CHEAP, capture="direct")
    one, many = (train(m, lambda step: ((tokens(),), {}), 3, adamw, 0.5) for m in (model, mine))
    compare(many, one, 1e-4, "experts")
    return float(mine.report().bytes_sent["all_to_all"])


@pytest.mark.timeout(200)
def test_gloo_processes() -> None:
    assert min(launch(gloo_case, 2, timeout=180).values) > 0


# ---- rows on their way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_rows_go_to_the_places_of_their_groups_and_back(seed: int) -> None:
    draw = Random(seed)
    degree, dim = draw.choice([1, 2, 3, 4]), draw.choice([0, 1])
    groups, rows = draw.randrange(degree, degree + 4), draw.randrange(0, 7)
    each = pieces(groups, degree)
    keys = [sorted(draw.randrange(groups + 1) for _ in range(rows)) for _ in range(degree)]  # some of no group
    ends = torch.tensor([sum(key <= g for key in mine) for mine in keys for g in range(groups)], dtype=torch.int32)
    shape = [2, rows, 3] if dim else [rows, 2, 3]
    whole = torch.arange(float(degree * rows * 6)).view(degree, *shape)
    owner = [place for place, count in enumerate(each) for _ in range(count)] + [degree - 1]
    found = [(key, place, row) for place, mine in enumerate(keys) for row, key in enumerate(mine)]

    def there_and_back(world: Any, place: int) -> Tensor:
        pins = {"axis": "tp", "dim": dim, "rows": rows, "pieces": each, "ends": ends}
        sent = world.dispatch_values(whole[place], **pins)
        mine = [(p, row) for key, p, row in sorted(found) if owner[key] == place]
        assert sent.shape[dim] == len(mine)
        for at, (p, row) in enumerate(mine):
            assert torch.equal(sent.select(dim, at), whole[p].select(dim, row))
        back: Tensor = world.combine_values(sent, **pins)
        return back

    for place, (back, sent) in enumerate(on_places(degree, there_and_back)):
        assert torch.equal(back, whole[place])
        away = sum(owner[key] != place for key in keys[place])
        came = sum(owner[key] == place for p, mine in enumerate(keys) if p != place for key in mine)
        assert sent.get("all_to_all", 0) == (away + came) * 6 * 4, "there, and back again"


# ---- what is found and said ------------------------------------------------------------------------------------------


def test_experts_are_dealt_out_unasked() -> None:
    """Where messages cost something, rows are fewer bytes than experts are: two exchanges forward and two backward."""
    model = Layers(WRITTEN["inverse_written"])
    found = program(model, mesh={"ep": 3}, placement=None)
    assert found.plan.tensor is not None
    lie = dict(found.plan.tensor.parameters)
    assert {lie["layers.0.up"], lie["layers.0.down"]} == {Shard(0)} and lie["layers.0.gate.weight"] == Replicate()
    calls = exchanged(found)
    assert calls.count("dispatch") == calls.count("combine") == 2
    assert "1 dispatch, 1 all_gather, 1 combine" in found.plan.explain("layers.0")


def test_bytes_are_foretold_for_even_groups() -> None:
    """A layer's rows four times, of which two in three go elsewhere; no gradient goes back from the first layer."""
    model = Layers(WRITTEN["added"])
    found = program(model, mesh={"ep": 3})
    rows = SAMPLES * LENGTH * CHOSEN // 3
    sent = dict(found.plan.prediction.sent[0])
    assert sent["all_to_all"] == (4 + 3) * (rows * WIDTH * 8) * 2 // 3


def test_golden_text(golden: Any) -> None:
    golden("experts_ep2_last.py", program(Layers(WRITTEN["inverse_written"]), mesh={"ep": 2}).ranks[1].source)


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        ("pieces=[2, 1], ends", "pieces=[1, 2], ends", "dispatch"),
        ("rows=3 * b", "rows=3 * b + 1", "rows"),
        ("world.dispatch_values", "world.combine_values", "dispatch"),
        ("ends=cumsum_all)", "ends=cumsum)", "ends of 3 groups"),
    ],
)
def test_a_text_that_exchanges_otherwise_is_refused(old: str, new: str, pattern: str) -> None:
    refused(program(Layers(WRITTEN["inverse_written"]), mesh={"ep": 2}), {0: [(old, new)]}, pattern)


def test_rows_are_dispatched_by_their_own_ends_alone() -> None:
    model = Layers(WRITTEN["inverse_written"])
    found = program(model, mesh={"ep": 2})
    tensor = found.plan.tensor
    assert tensor is not None
    choice = tensor.choices[0]
    moves = tuple(
        replace(move, target=replace(move.target, ends="histc"))
        if isinstance(move.target, Dispatched) and move.target.dim is not None
        else move
        for move in choice.forward.moves
    )
    wrong = replace(choice, forward=replace(choice.forward, moves=moves))
    plan = replace(found.plan, tensor=replace(tensor, choices=(wrong, *tensor.choices[1:])))
    with pytest.raises(VerificationError, match="placements"):
        autopart.compile(model, plan, (tokens().double(),), capture="direct")


def test_an_axis_that_is_placed_after_cannot_know_how_many_rows_there_are() -> None:
    found = program(Layers(WRITTEN["added"]), mesh={"ep": 2}).plan.tensor
    assert found is not None
    with pytest.raises(ValueError, match="rows are sent to their groups on 'ep'"):
        replace(found, inner=replace(found, axis="tp"))


def test_a_pin_that_odd_microbatches_cannot_keep_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValueError, match=r"cannot be Shard\(0\).* multiples of 2 samples"):
        program(Layers(WRITTEN["added"]), mesh={"ep": 2}, microbatches=2)


# ---- what is not sent to its group -----------------------------------------------------------------------------------


def _shifted(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each row with the row before it, which may be another place's."""
    keys, order = ids.flatten().sort()
    y = s.groups(x[order // CHOSEN], ends_of(keys)).cumsum(0) * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


def test_rows_that_see_each_other_are_not_sent_to_their_groups() -> None:
    model = Layers(_shifted)
    found = program(model, mesh={"ep": 2})
    assert not {"dispatch", "combine"} & {*exchanged(found)}, "experts lie at the places, and are gathered"
    assert_parity(model, (tokens(),), plan=found, tolerance=1e-10)
