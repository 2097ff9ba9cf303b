"""``schedule="auto"``: the fastest predicted schedule that fits, against every schedule by name and an exact search."""

from __future__ import annotations

import copy
import re
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import schedules
from autopart.errors import PlanInfeasible
from autopart.ir.cost import SegmentCost
from autopart.ir.plan import Plan
from autopart.schedules.spell import AUTO, is_table
from autopart.solver import choose
from autopart.solver.families import FORWARDS_FIRST, LEAN, PORTFOLIO
from autopart.testing import assert_parity
from autopart.testing.parity import assert_close
from tests.test_choose import CLUSTER, FAST, MIB, B, gpt, layer
from tests.test_several_stages import program, sample

EDGE = 1e-6 + 1000 / 1e8
"""Seconds of the messages of one sample in `layer`'s models on `CLUSTER`."""


def uneven(seed: int, segments: int) -> list[SegmentCost]:
    """Layers of unlike cost, whose backwards for inputs and for weights differ too."""
    random, made = Random(seed), []
    for i in range(segments):
        work, kept = random.randint(1, 9) * 10**5, random.randint(1, 5) * MIB
        backward = work * random.randint(1, 3)
        inputs = backward * random.randint(1, 3) // 4
        more = {"backward_flops": backward * B, "input_flops": inputs * B, "stash_bytes": kept * B // 2}
        made.append(layer(f"s{i}", parameters=MIB, saved=kept, work=work, **more))
    return made


def seconds(costs: list[SegmentCost], plan: Plan) -> dict[str, tuple[float, ...]]:
    """The time of each kind of action at each stage for one sample, from FLOPs alone, which bind in these models."""
    ends = list(accumulate((len(stage.segments) for stage in plan.stages), initial=0))
    numbers = [cost.at(1) for cost in costs]
    stages = [numbers[i:j] for i, j in pairwise(ends)]
    forward = tuple(sum(n.forward_flops for n in stage) / 1e9 for stage in stages)
    backward = tuple(sum(n.backward_flops for n in stage) / 1e9 for stage in stages)
    inputs = (0.0, *(sum(n.input_flops for n in stage) / 1e9 for stage in stages[1:]))
    return {"F": forward, "B": backward, "I": inputs, "W": tuple(b - i for b, i in zip(backward, inputs, strict=True))}


def made(plan: Plan) -> schedules.Schedule:
    return schedules.make(plan.schedule, ranks=plan.mesh.degree("pp"), microbatches=plan.microbatches)


def peaks(costs: list[SegmentCost], plan: Plan) -> list[int]:
    """The bytes that each rank holds at most, counted along its row: AdamW, no data axis."""
    numbers = {cost.name: cost.at(plan.batch // plan.microbatches) for cost in costs}
    stages = [[numbers[name] for name in stage.segments] for stage in plan.stages]
    found = []
    split = "I" in {action.kind for _, action in made(plan).actions()}
    for rank, row in enumerate(made(plan).table):
        held = [k for k, place in enumerate(plan.place) if place == rank]
        resident = sum(4 * n.parameter_bytes for k in held for n in stages[k])
        saved = {k: sum(max(n.saved_bytes, n.stash_bytes if split else 0) for n in stages[k]) for k in held}
        kept = accumulate(saved[a.stage] * {"F": 1, "I": 0, "B": -1, "W": -1}[a.kind] for a in row)
        found.append(resident + max(kept))
    return found


def test_every_family_of_one_copy_and_whole_sequences_that_programs_can_run_is_looked_at() -> None:
    for family in schedules.names():
        looked = family.name in {text.partition("(")[0] for text in PORTFOLIO}
        try:
            built = schedules.executable(schedules.build(family.name, ranks=4, microbatches=8))
        except ValueError:
            assert not looked, family.name
        else:
            assert looked == (len(built.places) == built.slices == 1 and not built.barriers), family.name
    assert set(LEAN) <= set(PORTFOLIO)


ROWS = [(1, 2, 5, 4, 999), (4, 4, 9, 4, 60), (5, 3, 4, 5, 60)]
SOAK = [(2, 2, 8, 4, 120), (3, 4, 8, 8, 999), (6, 2, 8, 6, 70), (7, 3, 7, 6, 45)]


@pytest.mark.parametrize(
    ("seed", "pp", "segments", "microbatches", "limit"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.soak) for row in SOAK)],
)
def test_brute_force_over_the_names(seed: int, pp: int, segments: int, microbatches: int, limit: int) -> None:
    """No name gives a shorter step; a table is taken only if it is shorter than all; memory and time are its own."""
    costs = uneven(seed, segments)
    pins: dict[str, Any] = {
        "batch": microbatches,
        "mesh": {"pp": pp},
        "devices": pp,
        "cluster": CLUSTER,
        "microbatches": microbatches,
        "memory": limit * MIB,
        "recompute": False,
    }
    plan = choose(costs, schedule=AUTO, **pins)
    steps = {}
    for name in PORTFOLIO:
        try:
            steps[name] = choose(costs, schedule=name, **pins).prediction.step_seconds
        except (ValueError, PlanInfeasible):  # it is not for these numbers, or does not fit
            continue
    step, best = plan.prediction.step_seconds, min(steps.values())
    if is_table(plan.schedule):
        assert step < best
    else:
        assert step == pytest.approx(best, rel=1e-9) and steps[plan.schedule] == pytest.approx(best, rel=1e-9)
    timeline = schedules.simulate(made(plan), costs=seconds(costs, plan), comm=EDGE)
    assert timeline.makespan == pytest.approx(step, rel=1e-9)
    needs = peaks(costs, plan)
    assert [needs[rank] for rank in plan.place] == [memory.total for memory in plan.prediction.memory]
    assert max(needs) <= limit * MIB
    assert choose(costs, schedule=AUTO, **pins) == plan
    assert re.search(r"the fastest of 30 names, searched jointly, and of \d tables? made", plan.explain())
    assert "over the lower bound" in plan.explain() and "over the lower bound" in plan.summary()


@pytest.mark.parametrize("seed", range(3))
def test_small_instances_are_proven_optimal(seed: int) -> None:
    """With a layer a rank there is one split: z3 finds no shorter flush than the plan's."""
    costs = uneven(seed, 2)
    plan = choose(costs, batch=3, mesh={"pp": 2}, devices=2, cluster=CLUSTER, microbatches=3, schedule=AUTO)
    proof = schedules.auto(2, 3, seconds(costs, plan), EDGE, prove=True)
    assert proof.certificate.startswith("optimal")
    assert plan.prediction.step_seconds == pytest.approx(proof.length, rel=1e-9)


def test_the_other_choices_are_pinned_or_by_rule() -> None:
    """One rank of a pipeline has nothing to search; a number of stages may be pinned; later choices fit memory."""
    alone = choose(gpt(), batch=16, devices=4, cluster=FAST, schedule=AUTO)
    assert (alone.schedule, alone.mesh.degree("pp")) == ("1f1b", 1) and "waits for no other" in alone.explain()
    pins: dict[str, Any] = {"batch": 8, "mesh": {"pp": 2}, "devices": 2, "cluster": CLUSTER, "schedule": AUTO}
    several = choose(gpt(6), stages=4, **pins)
    assert len(several.stages) == 4 and set(several.place) == {0, 1}
    first = {"h.1", "h.2", "h.5"}
    named = choose(gpt(6), stages=sorted(first), **pins)
    assert len(named.stages) == 4 and first <= {stage.segments[0] for stage in named.stages}
    two = {**pins, "mesh": {"pp": 2, "dp": 2}, "devices": 4, "microbatches": 4}
    tight = choose(gpt(6), memory="300MiB", **two)
    assert max(memory.total for memory in tight.prediction.memory) <= 300 * MIB
    with pytest.raises(ValueError, match=r"stages: 5 stages contradict the mesh of pp=2"):
        choose(gpt(), stages=5, **pins)
    with pytest.raises(ValueError, match=r"stages: 8 stages need 8 segments, but the model has 6"):
        choose(gpt(4), stages=8, **pins)


def test_leaner_schedules_are_a_way_out_and_are_tried() -> None:
    costs = [layer(f"h.{i}", parameters=MIB, saved=4 * MIB) for i in range(8)]
    pins: dict[str, Any] = {"batch": 8, "mesh": {"pp": 4}, "devices": 4, "cluster": CLUSTER, "microbatches": 8}
    pins["stages"] = ["h.2", "h.4", "h.6"]  # with a stage a rank or two, there is one split
    least = {
        name: max(m.total for m in choose(costs, schedule=name, **pins).prediction.memory)
        for name in ("1f1b", "v1f1b", "vhalf", "vmin")
    }
    assert least["vmin"] < least["vhalf"] <= least["v1f1b"] < least["1f1b"]
    for name, way in (("gpipe", "1f1b"), ("1f1b", "v1f1b"), ("v1f1b", "vmin")):
        limit = {"memory": least[way], "recompute": False}
        with pytest.raises(PlanInfeasible, match=rf"{name}, without .* It fits with: .*schedule='{way}'"):
            choose(costs, schedule=name, **pins, **limit)
        assert max(m.total for m in choose(costs, schedule=AUTO, **pins, **limit).prediction.memory) <= least[way]
    with pytest.raises(PlanInfeasible, match=r"vmin, without recomputing: .* It fits with: ") as refusal:
        choose(costs, schedule=AUTO, memory=least["vmin"] - 1, recompute=False, **pins)
    assert "schedule=" not in str(refusal.value).split("It fits with")[1]


@pytest.mark.parametrize(("mesh", "microbatches"), [({"pp": 2}, 4), ({"pp": 4}, 6)])
def test_trains_as_one_device(mesh: dict[str, int], microbatches: int) -> None:
    """Tied ends, long skips, dropout, a frozen layer and a ragged batch, under the schedule that was found."""
    found = program("mixed", mesh, "ddp", AUTO, microbatches)
    assert found.plan.schedule not in (AUTO, "1f1b") and found.plan.notes[3].startswith("schedule ")
    assert_parity(*sample("mixed"), plan=found, steps=2)


def test_in_a_loop_with_and_without_a_loss() -> None:
    """Without a loss only schedules are looked at whose forwards all come first."""
    (plain, args), pins = sample("mlp"), {"mesh": {"pp": 2}, "capture": "direct", "microbatches": 4}
    model = autopart.parallelize(copy.deepcopy(plain), schedule=AUTO, **pins)  # type: ignore[call-overload]
    for each in (model, plain):
        each(*args).backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    assert_close({name: p.grad for name, p in model.named_parameters()}, grads, 1e-9, "gradient of")
    layers = nn.Sequential(*plain.layers)  # type: ignore[arg-type]
    plain.zero_grad()
    split = autopart.parallelize(copy.deepcopy(layers), schedule=AUTO, **pins)  # type: ignore[call-overload]
    for each in (split, layers):
        torch.logsumexp(each(args[0]).flatten(), 0).backward()
    grads = {name: p.grad for name, p in layers.named_parameters()}
    assert_close({name: p.grad for name, p in split.named_parameters()}, grads, 1e-9, "gradient of")
    assert split.plan.schedule in FORWARDS_FIRST and "table" not in split.plan.explain()
