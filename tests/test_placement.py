"""Placements as choices of modes: presets, the rules that modes keep, and how axes compose."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError

import pytest

import autopart
from autopart.ir.codec import decode, encode
from autopart.ir.placement import PRESETS, RULES, STATES, STRATEGIES, Mode, Modes, Placement
from tests.placements import VALID

R, S, G, M, O = Mode.REPLICATED, Mode.SHARDED, Mode.GATHERED, Mode.MATERIALIZED, Mode.OFFLOADED  # noqa: E741


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ddp", "dp:R/R/R/M"),
        ("zero1", "dp:R/S/R/M"),
        ("zero2", "dp:R/S/S/M"),
        ("fsdp", "dp:S*/S/S/M"),
        ("hsdp", "dp_replicate:R/R/R/M, dp_shard:S*/S/S/M"),
        ("tp", "tp:S/S/S/R"),
        ("pp", "pp:S/S/S/M"),
        ("ep", "ep:S/S/S/S"),
        ("offload", "dp:R/O/O/M"),
    ],
)
def test_presets_are_choices_of_modes(name: str, text: str) -> None:
    made = autopart.Placement.preset(name)
    assert ", ".join(f"{axis}:{modes}" for axis, modes in made.axes) == text
    assert made == getattr(autopart.Placement, name)() and str(made) == name
    assert decode(Placement, encode(made), "placement") == made
    assert (name in PRESETS) == (name in ("ddp", "zero1", "zero2", "fsdp"))


def test_every_preset_is_known() -> None:
    with pytest.raises(ValueError, match=f"unknown preset 'zero9'; the presets are {', '.join(STRATEGIES)}"):
        Placement.preset("zero9")
    with pytest.raises(FrozenInstanceError):
        Placement.ddp().axes = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("modes", "rule"),
    [
        ((M,), "parameters are the same wherever they are used"),
        ((R, G), "optimizer states are updated where they are held"),
        ((R, M), "optimizer states are updated where they are held"),
        ((R, S, G), "gradients are whole sums or parts of them"),
        ((R, R, M), "gradients are whole sums or parts of them"),
        ((S, R, S), "each device updates the parameters that it holds"),
        ((G, R, R), "each device updates the parameters that it holds"),
        ((S, S, R), "parameters used in parts .S. have gradients in parts"),
        ((R, R, S), "an optimizer that is whole on every device .R. needs whole gradients"),
        ((R, S, O), "gradients on the host .O. are for an optimizer on the host"),
        ((O, S, S), "parameters on the host .O. are updated there"),
    ],
)
def test_modes_that_contradict_each_other_are_refused(modes: tuple[Mode, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^placement: the modes .* break the rule: {rule}"):
        Modes(*modes)


def test_every_rule_is_needed() -> None:
    """Each rule alone refuses something, and no valid choice breaks one."""
    alone = set()
    for choice in itertools.product(Mode, repeat=len(STATES)):
        modes = object.__new__(Modes)
        for state, mode in zip(STATES, choice, strict=True):
            object.__setattr__(modes, state, mode)
        broken = [i for i, (holds, _) in enumerate(RULES) if not holds(modes)]
        assert bool(broken) == (modes not in VALID)
        alone |= set(broken) if len(broken) == 1 else set()
    assert alone == set(range(len(RULES)))


def test_axes_compose_once_each() -> None:
    both = Placement.zero1().over(Placement.tp())
    assert [axis for axis, _ in both.axes] == ["dp", "tp"] and str(both) == "dp:R/S/R/M, tp:S/S/S/R"
    assert both.on("tp") == Placement.tp().on("tp") and both.on("pp") == Modes()
    with pytest.raises(ValueError, match=r"dp is named twice .* cannot be sharded twice"):
        Placement.zero1().over(Placement.fsdp())
    with pytest.raises(TypeError, match=r"^placement: expected a Placement .* inside zero1, not 'tp'"):
        Placement.zero1().over("tp")  # type: ignore[arg-type]
    for axes in ("fsdp", (("dp", "fsdp"),), (("dp",),)):
        with pytest.raises(TypeError, match=r"^placement: expected a tuple of pairs .* Placement.preset\('fsdp'\)"):
            Placement(axes)  # type: ignore[arg-type]


def test_parameters_on_the_host_are_whole_nowhere() -> None:
    host = Placement((("dp_shard", Modes(O, O, O)),))
    Placement((("dp_replicate", Modes()),)).over(host)
    with pytest.raises(ValueError, match=r"on the host over dp_shard .* after the update over dp, which breaks"):
        Placement.zero1().over(host)
