"""Placement semantics: the mode of every training state on every mesh axis.

Four states (parameters, optimizer, gradients, activations) times five modes. A strategy is nothing but a choice of
modes: the presets below are written as such. See Mehta, "Placement Semantics for Distributed Deep Learning" (arXiv
2601.02311).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopart.ir.graph import Dim, Size


class Mode(Enum):
    """How one state is placed on one axis."""

    REPLICATED = "R"  # every device holds all of it, for the whole step
    SHARDED = "S"  # every device holds its own part and uses that part
    GATHERED = (
        "S*"  # sharded-with-gather: every device holds its part; the whole is gathered just before use, then dropped
    )
    MATERIALIZED = "M"  # device-local, made when needed, with no promise of equality across devices
    OFFLOADED = "O"  # held on the host; the device has staging buffers only


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of the four states on one axis."""

    parameters: Mode = Mode.REPLICATED
    optimizer: Mode = Mode.REPLICATED
    gradients: Mode = Mode.REPLICATED
    activations: Mode = Mode.MATERIALIZED

    def __str__(self) -> str:
        return "/".join(m.value for m in (self.parameters, self.optimizer, self.gradients, self.activations))


@dataclass(frozen=True, slots=True)
class Placement:
    """The modes on each axis that is spoken of; an axis that is not is left to the rest of the plan."""

    axes: tuple[tuple[str, Modes], ...]

    def on(self, axis: str) -> Modes:
        """The modes on an axis (all replicated where nothing is said)."""
        return dict(self.axes).get(axis, Modes())

    @classmethod
    def ddp(cls) -> Placement:
        """Data parallel: every state whole everywhere; gradients all-reduced."""
        return cls((("dp", Modes()),))

    @classmethod
    def zero1(cls) -> Placement:
        """ZeRO-1 (Rajbhandari et al. 2020, 5.1): the optimizer is sharded, so gradients are reduced to shards only."""
        return cls((("dp", Modes(optimizer=Mode.SHARDED)),))

    @classmethod
    def zero2(cls) -> Placement:
        """ZeRO-2 (5.2): optimizer and gradients sharded; each microbatch's gradients are reduced as they are made."""
        return cls((("dp", Modes(optimizer=Mode.SHARDED, gradients=Mode.SHARDED)),))

    @classmethod
    def fsdp(cls) -> Placement:
        """ZeRO-3 / FSDP (5.3): parameters too are sharded, and gathered just before each use."""
        return cls((("dp", Modes(Mode.GATHERED, Mode.SHARDED, Mode.SHARDED)),))

    @classmethod
    def preset(cls, name: str) -> Placement:
        """A preset by name: ddp, zero1, zero2 or fsdp."""
        if name not in PRESETS:
            raise ValueError(f"placement: unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        made: Placement = getattr(cls, name)()
        return made

    def __str__(self) -> str:
        for name in PRESETS:
            if self == Placement.preset(name):
                return name
        return ", ".join(f"{axis}:{modes}" for axis, modes in self.axes)


PRESETS = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True, slots=True)
class Replicate:
    """A value that is the same at every place of an axis."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard:
    """A value that is split along `dim`; as the inner part of ``outer x split x rest`` where a view merged dims.

    What is split is cut as `ir.mesh.pieces` cuts, in whole units of `unit` elements: heads are not cut in two. Where
    the axis divides it evenly the unit makes no difference, and is 1.
    """

    dim: int
    outer: Dim = 1
    unit: Dim = 1

    def __str__(self) -> str:
        inside = "" if self.outer == 1 else f", inside {_text(self.outer)}"
        return f"Shard({self.dim}{inside}{'' if self.unit == 1 else f', by {_text(self.unit)}'})"


@dataclass(frozen=True, slots=True)
class Partial:
    """A value whose sum over the places of an axis is the true one."""

    def __str__(self) -> str:
        return "Partial(sum)"


@dataclass(frozen=True, slots=True)
class PerSlice:
    """A value that each slice of the batch has its own of, and that nothing joins: a statistic of its samples."""

    def __str__(self) -> str:
        return "PerSlice()"


def _text(size: Dim) -> str:
    return size.text("b") if isinstance(size, Size) else str(size)


TensorPlacement = Replicate | Shard | Partial | PerSlice
"""How one value is placed on one axis; the same words say how it depends on the microbatch."""
