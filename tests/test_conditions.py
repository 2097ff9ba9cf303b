"""Gradient integrity and state consistency: they hold exactly where training on several devices is that of one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopart.capture import capture, read
from autopart.ir.graph import Size, map_arg
from autopart.ir.mesh import Mesh
from autopart.ir.placement import PRESETS, Mode, Modes, Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory
from autopart.ir.sharded import Sharded
from autopart.ir.staged import Staged
from autopart.passes.conditions import Break, Condition, conditions
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from tests import interpret
from tests.capture_cases import CASES, captured, normalised
from tests.placements import VALID

GRADIENTS, STATES = Condition.GRADIENT_INTEGRITY, Condition.STATE_CONSISTENCY


@cache
def sharded(name: str) -> Sharded:
    return shard(segment(normalised(name)[2]))


def staged(name: str, *starts: int) -> Staged:
    """A case on pipeline stages that begin at the given segments, on two data ranks each."""
    names = [item.name for item in sharded(name).segmented.segments]
    begins, mesh = (0, *starts), Mesh.of({"pp": len(starts) + 1, "dp": 2})
    ends = (*begins[1:], len(names))
    rows = [tuple(names[a:b]) for a, b in zip(begins, ends, strict=True)]
    plan = Plan(
        mesh=mesh,
        stages=tuple(Stage(row, mesh.column(i)) for i, row in enumerate(rows)),
        placements=(("*", Placement.fsdp()),),
        schedule="1f1b",
        microbatches=2,
        recompute=(),
        batch=8,
        prediction=Prediction(0.0, 0.0, (0.0,) * len(rows), (StageMemory(),) * len(rows)),
        optimality="",
        notes=(),
        fingerprint="",
    )
    return split(sharded(name), plan)


QUICK = ("mlp", "tied_by_object", "half_frozen", "called_twice")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_presets_keep_both(name: str) -> None:
    count = len(sharded(name).segmented.segments)
    for made in (staged(name), *([staged(name, count // 2)] if count > 1 else [])):
        for preset in PRESETS:
            found = conditions(Placement.pp().over(Placement.preset(preset)), made)
            assert found.gradient_integrity and found.state_consistency, str(found)
            assert str(found) == "gradient integrity and state consistency hold"


def updates(name: str, modes: Modes) -> list[interpret.Values]:
    """What each of two data ranks would update with: an independent run of the graph, with the modes taken literally.

    Of parameters used in parts the rows that a rank lacks are zero; gradients are summed where `Placement.costs` counts
    a reduction.
    """
    module, call, step = normalised(name)
    placed = Placement((("dp", modes),)).costs(parameters=1, devices=2)
    summed = any(exchange.collective in ("all_reduce", "reduce_scatter") for exchange in placed.exchanges)
    values = interpret.bind(module, step, call)
    once = interpret.execute(step.prologue, values, call.batch, call.batch)
    ranks = []
    for rank, part in enumerate(interpret.microbatch_values(step, call, values, 2)):
        given = part | {item.value.name: once[item.value.name] for item in step.of_kind("prologue")}
        for item in step.of_kind("parameter") if modes.parameters is Mode.SHARDED else ():
            held = torch.arange(len(given[item.value.name])) % 2 == rank
            given[item.value.name] = given[item.value.name] * held.view(-1, *[1] * (given[item.value.name].dim() - 1))
        found = interpret.execute(step.nodes, given, interpret.part_sizes(step, part)[0], call.batch)
        made: interpret.Values = {}
        for out in step.outputs:
            if out.kind == "grad":
                made[out.target] = made[out.target] + found[out.name] if out.target in made else found[out.name]
        ranks.append(made)
    return [{p: ranks[0][p] + ranks[1][p] for p in ranks[0]}] * 2 if summed else ranks


@pytest.mark.parametrize("name", ["mlp", "tied_by_object", "unet"])
def test_they_hold_exactly_where_the_numbers_agree(name: str) -> None:
    """Necessary and sufficient, for every way in which modes on the data axis can differ to the graph."""
    module, call, step = normalised(name)
    expected = interpret.microbatched_step(module, step, call, 1)[1]
    outcomes = set()
    for modes in {(m.parameters, m.activations): m for m in VALID}.values():
        ranks = updates(name, modes)
        agree = all(interpret.distance(rank[p], expected[p]) < 1e-9 for rank in ranks for p in expected)
        found = conditions(Placement((("dp", modes),)), step)
        assert agree == (not found.breaks), (str(modes), str(found))
        outcomes.add(agree)
    assert outcomes == {True, False}


def test_gradients_that_nothing_sums() -> None:
    """Activations that are said to be the same on every data rank, whose samples are not."""
    placement = Placement((("dp", Modes(activations=Mode.REPLICATED)),))
    found = conditions(placement, staged("mlp", 2))
    assert found.state_consistency and not found.gradient_integrity
    assert {item.parameter for item in found.breaks} == {p for p, _ in normalised("mlp")[0].named_parameters()}
    first = next(item for item in found.breaks if item.parameter == "layers.1.0.weight")
    assert (first.condition, first.axis) == (GRADIENTS, "dp")
    assert "a part of a sum over the samples, and the modes R/R/R/R sum nothing there" in first.reason
    assert first.use.startswith("layers.1") and "models.py" in first.use


def test_gradients_that_are_counted_twice() -> None:
    """An axis that splits sequences, of a graph that does not."""
    placement = Placement.ddp().over(Placement((("tp", Modes(activations=Mode.SHARDED)),)))
    found = conditions(placement, normalised("mlp")[2])
    assert {(item.condition, item.axis) for item in found.breaks} == {(GRADIENTS, "tp")}
    assert "would count it once for each" in found.breaks[0].reason
    same = Placement.ddp().over(Placement((("tp", Modes(activations=Mode.REPLICATED)),)))
    assert not conditions(same, normalised("mlp")[2]).breaks


def test_parameters_that_a_use_does_not_find() -> None:
    """Tensor parallelism of a graph whose operators take whole parameters, forward and backward."""
    rules = (("layers.1.*", Placement.ddp().over(Placement.tp())), ("*", Placement.ddp()))
    found = conditions(rules, normalised("mlp")[2])
    assert found.gradient_integrity and not found.state_consistency
    assert all("it is read whole" in item.reason and "layers.1" in item.use for item in found.breaks)
    reads = [(item.parameter, item.axis) for item in found.breaks]
    assert sorted(reads) == [("layers.1.0.bias", "tp"), *[("layers.1.0.weight", "tp")] * 2], "by its backward, too"


def test_parts_of_parameters_on_data_ranks() -> None:
    """What is used in parts has no gradient to sum; on ranks with samples of their own, each has one to sum."""
    parts = Placement((("dp", Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED)),))
    found = conditions(parts, normalised("mlp")[2])
    assert not found.gradient_integrity and not found.state_consistency


def test_two_placements_of_one_tensor() -> None:
    step = normalised("tied_by_object")[2]
    (name, known) = next((a, b) for a, b in step.tied if a != b)
    found = conditions(((name, Placement.fsdp()), ("*", Placement.zero1())), step)
    assert [(item.condition, item.parameter, item.axis) for item in found.breaks] == [(STATES, name, "dp")]
    assert f"the same tensor as {known}, whose modes are R/S/R/M and not S*/S/S/M" in str(found)


def test_a_divisor_of_the_microbatch() -> None:
    """The mean of means: right for equal microbatches only, and never a sum of parts."""
    step = normalised("mlp")[2]

    def own(arg: object) -> object:
        return replace(arg, whole=False) if isinstance(arg, Size) and arg.whole else arg

    nodes = tuple(replace(node, args=map_arg(node.args, own)) for node in step.nodes)
    assert nodes != step.nodes
    found = conditions(Placement.ddp(), replace(step, nodes=nodes))
    assert found.state_consistency and not found.gradient_integrity
    assert {item.parameter for item in found.breaks} == {p for p, _ in normalised("mlp")[0].named_parameters()}
    assert all("the size of the microbatch" in item.reason and "models.py" in item.use for item in found.breaks)


@pytest.mark.parametrize("name", ["mlp", "half_frozen"])
def test_a_graph_that_is_not_normalised(name: str) -> None:
    """Its loss is a mean over the microbatch, or over its valid targets."""
    found = conditions(Placement.ddp(), captured(name, "direct")[2])
    assert [(item.condition, item.parameter, item.axis) for item in found.breaks] == [(GRADIENTS, "", "dp")]
    assert "is it normalised?" in str(found)


def test_slices_that_are_batches_of_their_own() -> None:
    """Under ``semantics="accumulate"`` the reference is the step fed slice by slice, whose gradients are summed too."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    step = capture(module, read(module, (torch.randn(8, 3),)), loss_fn=torch.mean, route="direct")
    step = normalise(step, semantics="accumulate")
    assert step.sliced and not conditions(Placement.zero2(), step).breaks
    assert not conditions(Placement((("dp", Modes(activations=Mode.REPLICATED)),)), step).gradient_integrity


def test_contributions_that_are_lost_or_counted_twice() -> None:
    """A layer that no stage runs, or that two do: of a tied weight, one use of several."""
    good = staged("tied_by_object", 1)
    last = good.stages[1][-1]
    for row, count in ((good.stages[1][:-1], 1), ((*good.stages[1], last), 3)):
        counted = [b for b in breaks(replace(good, stages=(good.stages[0], row))) if "contributions" in b.reason]
        found = [b for b in counted if b.parameter == "a.weight"]
        assert len(found) == 1 and found[0].condition is GRADIENTS and f"and {count} are counted" in found[0].reason


def breaks(step: Staged) -> list[Break]:
    return list(conditions(Placement.ddp(), step).breaks)


def test_a_stage_that_uses_what_it_does_not_hold() -> None:
    """A tied weight on two stages: both read it and both make gradients of it, and each has to be among its holders."""
    good = staged("tied_by_object", 1)
    unit = next(unit for unit in good.state.units if len(unit.stages) > 1)
    units = tuple(replace(u, stages=(0,)) if u is unit else u for u in good.state.units)
    found = breaks(replace(good, state=replace(good.state, units=units)))
    assert {(b.condition, b.parameter, b.axis) for b in found} == {
        (condition, unit.parameters[0].target, "pp") for condition in Condition
    }
    assert all("only the stages (0,) hold it" in b.reason and "on stage 1" in b.use for b in found)


def test_parameters_of_two_units_or_none() -> None:
    good = staged("mlp", 2)
    first = good.state.units[0]
    for units, count in (((*good.state.units, replace(first, name="again")), 2), (good.state.units[1:], 0)):
        found = breaks(replace(good, state=replace(good.state, units=units)))
        assert {b.parameter for b in found} == {p.target for p in first.parameters}
        assert all(f"{count} units hold it" in b.reason for b in found)


def test_stages_are_asked_of_what_has_them() -> None:
    with pytest.raises(ValueError, match="pp deals stages, and the graph has none"):
        conditions(Placement.pp(), normalised("mlp")[2])
    with pytest.raises(ValueError, match="no pattern matches"):
        conditions((("nowhere", Placement.ddp()),), normalised("mlp")[2])
