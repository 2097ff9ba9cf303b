"""Parameters in parts: as torch.tensor_split cuts, nothing lost, padded alike on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.placement import PRESETS, Placement
from autopart.ir.state import Parameter, Piece, State, Unit, used_units

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(shapes, st.integers(1, 9))
def test_parts_are_those_of_tensor_split(shape: tuple[int, ...], parts: int) -> None:
    parameter = Parameter("p", shape, torch.float32)
    whole = torch.arange(parameter.numel).view(shape)
    if not shape:
        assert [parameter.part_shape(part, parts) for part in range(parts)] == [(), *[(0,)] * (parts - 1)]
        return
    expected = torch.tensor_split(whole, parts)
    for part in range(parts):
        start, stop = parameter.rows(part, parts)
        assert torch.equal(whole[start:stop], expected[part])
        assert parameter.part_shape(part, parts) == tuple(expected[part].shape)


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(PRESETS))
def test_units_add_up(all_shapes: list[tuple[int, ...]], parts: int, preset: str) -> None:
    parameters = tuple(Parameter(f"p{i}", shape, torch.float64) for i, shape in enumerate(all_shapes))
    unit = Unit("u", parameters, True, Placement.preset(preset).on("dp"), (0,))
    sizes = [unit.part_numel(part, parts) for part in range(parts)]
    assert sum(sizes) == unit.numel and unit.padded(parts) == max(sizes)
    assert unit.nbytes == 8 * unit.numel
    assert unit.padded(1) == unit.numel


@pytest.mark.parametrize(
    ("preset", "gathered", "in_parts", "at_once", "held"),
    [
        ("ddp", False, False, False, False),
        ("zero1", False, True, False, True),
        ("zero2", False, True, True, True),
        ("fsdp", True, False, True, True),
    ],
)
def test_presets(preset: str, gathered: bool, in_parts: bool, at_once: bool, held: bool) -> None:
    modes = Placement.preset(preset).on("dp")
    unit = Unit("u", (Parameter("p", (4,), torch.float32),), True, modes, (0,))
    ways = (unit.gathered(2), unit.updated_in_parts(2), unit.reduced_at_once(2), unit.held_in_parts(2))
    assert ways == (gathered, in_parts, at_once, held)
    alone = (unit.gathered(1), unit.updated_in_parts(1), unit.reduced_at_once(1), unit.held_in_parts(1))
    assert not any(alone), "one data rank has everything"
    frozen = Unit("u", unit.parameters, False, modes, (0,))
    assert not frozen.updated_in_parts(2) and not frozen.reduced_at_once(2)
    assert frozen.gathered(2) == gathered


def test_state_finds_units() -> None:
    modes = Placement.ddp().on("dp")
    one = Unit("a", (Parameter("a.w", (2,), torch.float32), Parameter("a.b", (), torch.float32)), True, modes, (0,))
    two = Unit("t", (Parameter("t", (2,), torch.float32),), True, modes, (0, 1))
    state = State((one, two), ())
    assert state.unit("t") is two and state.homes() == {"a.w": one, "a.b": one, "t": two}
    assert used_units(["t", "a.b", "a.w"], state.homes()) == (two, one)


def test_a_piece_is_the_same_elements_of_every_run() -> None:
    whole = torch.arange(24).reshape(2, 12)
    piece = Piece("tp", (2, 12), 1, 3, 1, 3)
    assert piece.of(whole)[0].tolist() == [1, 2, 5, 6, 9, 10] and piece.local == (2, 6)
    again = Parameter("w", (1, 6), torch.int64, (piece, Piece("ep", (2, 6), 0, 1, 1, 2)))
    assert again.piece_of(whole).tolist() == [[13, 14, 17, 18, 21, 22]] and again.module_shape == (2, 12)
