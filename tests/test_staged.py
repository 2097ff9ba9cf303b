"""Stages (the pass `split`): what crosses between them, where parameters are held, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopart.errors import CaptureError
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Mode, Placement
from autopart.ir.plan import Plan, Prediction, Stage, StageMemory
from autopart.ir.staged import Staged
from autopart.passes.segment import segment
from autopart.passes.shard import shard
from autopart.passes.split import split
from tests.capture_cases import CASES, normalised


def plan(names: list[str], starts: tuple[int, ...], placement: str = "fsdp") -> Plan:
    """A plan whose stages begin at the given segments, on two data ranks each."""
    mesh = Mesh.of({"pp": len(starts), "dp": 2})
    ends = (*starts[1:], len(names))
    return Plan(
        mesh=mesh,
        stages=tuple(
            Stage(tuple(names[a:b]), mesh.column(i)) for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        ),
        placements=(("*", Placement.preset(placement)),),
        schedule="1f1b",
        microbatches=2,
        recompute=(),
        batch=8,
        prediction=Prediction(0.0, 0.0, (0.0,) * len(starts), (StageMemory(),) * len(starts)),
        optimality="",
        notes=(),
        fingerprint="",
    )


def staged(name: str, *starts: int, placement: str = "fsdp") -> Staged:
    made = segment(normalised(name)[2])
    return split(shard(made), plan([s.name for s in made.segments], (0, *starts), placement))


@pytest.mark.parametrize("name", CASES)
def test_edges_carry_exactly_what_is_needed(name: str) -> None:
    count = len(segment(normalised(name)[2]).segments)
    starts = sorted({count // 3, 2 * count // 3} - {0})
    made = staged(name, *starts)
    assert [s for row in made.stages for s in row] == list(made.segmented.segments)
    inputs = {item.value.name for item in made.segmented.captured.of_kind("input", "tangent")}
    for number, row in enumerate(made.stages):
        for forward in (True, False):
            edges = made.into(number, forward=forward)
            assert [edge.source for edge in edges] == sorted(edge.source for edge in edges)
            arrived = [value.name for edge in edges for value in edge.values]
            assert len(set(arrived)) == len(arrived), "nothing arrives twice"
            read = {v for s in row for v in (s.values if forward else s.backward_inputs)}
            here = {v for s in row for v in (s.outputs if forward else s.backward_outputs)}
            assert set(arrived) == read - here - inputs
    for edge in made.edges:
        assert edge in made.out_of(edge.source, forward=made.onward(edge.source, edge.target))
        assert edge.nbytes(3) == sum(value.nbytes(3) for value in edge.values) > 0


def test_skips_go_straight_to_their_reader() -> None:
    made = staged("gpt", 3, 5, 7)  # wte 0 1 | 2 3 | 4 5 | 6 7 norm
    assert {(e.source, e.target) for e in made.edges if made.onward(e.source, e.target)} == {
        (0, 1),
        (1, 2),
        (2, 3),
        (0, 3),
        (1, 2),
    }
    assert {(e.source, e.target) for e in made.edges if not made.onward(e.source, e.target)} == {
        (3, 2),
        (2, 1),
        (1, 0),
        (3, 0),
    }
    assert str(made).splitlines()[:2] == ["stage 0: wte, blocks.0, blocks.1", "stage 1: blocks.2, blocks.3"]


def test_tables_have_no_gradient_and_buffers_do_not_travel() -> None:
    made = staged("shared_tables", 2, 4)
    floating = [len(edge.values) for edge in made.edges if made.onward(edge.source, edge.target)]
    assert floating == [3, 2, 1] or floating == [3, 1, 2], "cos and sin are handed on from where they are made"
    assert all(len(edge.values) == 1 for edge in made.edges if not made.onward(edge.source, edge.target))
    assert made.state.buffers == ("frequencies",)


def test_frozen_stages_send_no_gradients() -> None:
    made = staged("half_frozen", 2, 4)
    assert [(e.source, e.target) for e in made.edges] == [(0, 1), (1, 2), (2, 1)]
    units = {unit.name: unit for unit in made.state.units}
    assert not units["encoder.0"].trainable and units["decoder.0"].trainable


def test_every_used_parameter_is_in_one_unit() -> None:
    made = staged("unused_and_frozen", 1)
    placed = [parameter.target for unit in made.state.units for parameter in unit.parameters]
    assert sorted(placed) == ["frozen.bias", "frozen.weight", "lin.bias", "lin.weight", "out.bias", "out.weight"]
    assert "spare.weight" not in made.state.homes()


def test_shared_parameters_are_units_of_their_own() -> None:
    made = staged("gpt", 5)
    unit = made.state.homes()["wte.weight"]
    assert (unit.name, unit.stages, len(unit.parameters)) == ("wte.weight", (0, 1), 1)
    assert made.state.unit("blocks.0").stages == (0,)
    assert sum(unit.nbytes for unit in made.state.units) == sum(
        p.numel() * 8 for p in normalised("gpt")[0].parameters()
    )


def test_placements_by_pattern() -> None:
    made = segment(normalised("gpt")[2])
    base = plan([s.name for s in made.segments], (0, 4))
    mixed = replace(base, placements=(("*.up", Placement.fsdp()), ("*", Placement.ddp())))
    units = {unit.name: unit for unit in split(shard(made), mixed).state.units}
    pair = [units["blocks.0"], units["blocks.0+1"]]
    ways = {unit.modes.parameters: {p.target for p in unit.parameters} for unit in pair}
    assert ways[Mode.GATHERED] == {"blocks.0.up.weight", "blocks.0.up.bias"}
    assert len(ways[Mode.REPLICATED]) == 10


def test_another_programs_state_is_kept() -> None:
    """A forward-only program of the same model runs with the parameters where the training program has them."""
    training = staged("half_frozen", 3)
    made = segment(normalised("no_grad")[2])
    names = [s.name for s in made.segments]
    kept = split(shard(made), plan(names, (0, 3)), state=training.state)
    assert kept.state is training.state
    with pytest.raises(CaptureError, match=r"encoder\.2 uses encoder\.2\.weight on stage 1, but the plan keeps it on"):
        split(shard(made), plan(names, (0, 2)), state=training.state)


def test_a_stage_that_this_program_lacks_is_refused() -> None:
    made = segment(normalised("mlp")[2])
    names = [s.name for s in made.segments]
    other = plan(["layers.0", "blocks.3", "out"], (0, 1))
    with pytest.raises(
        CaptureError, match=r"no layer 'blocks\.3' after 'layers\.0'.*its layers are layers\.0, layers\.1"
    ):
        split(shard(made), other)
    backwards = plan(list(reversed(names)), (0, 3))
    assert backwards.stages[1].segments[0] == "layers.1"
    with pytest.raises(CaptureError, match=r"no layer 'layers\.0' after 'layers\.2'"):
        split(shard(made), plan(["layers.3", "layers.2", "layers.0"], (0, 1, 2)))
