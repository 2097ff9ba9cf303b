"""Placement semantics: the mode of every training state on every mesh axis.

Four states (parameters, optimizer, gradients, activations) times five modes. A strategy is nothing but a choice of
modes: the presets below are written as such, and what a placement costs follows from its modes (`ir.calculus`). See
Mehta, "Placement Semantics for Distributed Deep Learning" (arXiv 2601.02311).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from autopart.ir.graph import Dim, Size

if TYPE_CHECKING:
    from autopart.ir.calculus import Costs, Precision

STATES = ("parameters", "optimizer", "gradients", "activations")


class Mode(Enum):
    """How one state is placed on one axis."""

    REPLICATED = "R"  # every device holds all of it, for the whole step
    SHARDED = "S"  # every device holds its own part and uses that part
    GATHERED = (
        "S*"  # sharded-with-gather: every device holds its part; the whole is gathered just before use, then dropped
    )
    MATERIALIZED = "M"  # device-local, made when needed, with no promise of equality across devices
    OFFLOADED = "O"  # every device's own part is held on its host; the device has staging buffers only

    __hash__ = object.__hash__  # a member is there once, and Python's hash of its name takes a call


IN_PARTS = (Mode.SHARDED, Mode.GATHERED, Mode.OFFLOADED)
"""The modes in which the devices of an axis hold disjoint parts of a state."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of the four states on one axis.

    What the activations are says how the axis divides the work: materialized, each device has its own samples (or, of
    parameters that are sharded, its own layers); replicated, all compute the same; sharded, each has its part of every
    sample. Raises ValueError, with the rule that is broken, for modes that cannot go together.
    """

    parameters: Mode = Mode.REPLICATED
    optimizer: Mode = Mode.REPLICATED
    gradients: Mode = Mode.REPLICATED
    activations: Mode = Mode.MATERIALIZED

    def __post_init__(self) -> None:
        for holds, rule in RULES:
            if not holds(self):
                raise ValueError(f"placement: the modes {self} ({'/'.join(STATES)}) break the rule: {rule}")

    @property
    def inputs_differ(self) -> bool:
        """Whether what parameters are applied to differs on the axis, so that whole gradients must be summed over it.

        They are the same only where all devices compute the same: activations replicated, or gathered from parts.
        """
        return self.activations not in (Mode.REPLICATED, Mode.GATHERED)

    @property
    def on_host(self) -> tuple[str, ...]:
        """The states that are on the host."""
        return tuple(state for state in STATES if getattr(self, state) is Mode.OFFLOADED)

    @property
    def gathered(self) -> bool:
        """Whether parameters are brought together before each use, in every forward and every backward."""
        return self.parameters in (Mode.GATHERED, Mode.OFFLOADED)

    @property
    def reduced_at_once(self) -> bool:
        """Whether gradients are kept in parts, so that they are reduced as each microbatch makes them."""
        return self.gradients in IN_PARTS

    @property
    def reduced_to_parts(self) -> bool:
        """Whether each device needs only its part of the summed gradient: its consumer, the optimizer, has no more."""
        return self.reduced_at_once or self.optimizer in IN_PARTS

    @property
    def regathered(self) -> bool:
        """Whether parameters that each device updated a part of are made whole again after the update."""
        return self.parameters is Mode.REPLICATED and self.optimizer in IN_PARTS

    def __str__(self) -> str:
        return "/".join(m.value for m in (self.parameters, self.optimizer, self.gradients, self.activations))


Rule = tuple[Callable[[Modes], bool], str]

RULES: tuple[Rule, ...] = (
    (
        lambda m: m.parameters is not Mode.MATERIALIZED,
        "parameters are the same wherever they are used (R, S, S* or O), which M does not promise",
    ),
    (
        lambda m: m.optimizer in (Mode.REPLICATED, Mode.SHARDED, Mode.OFFLOADED),
        "optimizer states are updated where they are held (R, S or O), neither gathered nor different on each device",
    ),
    (
        lambda m: m.gradients in (Mode.REPLICATED, Mode.SHARDED, Mode.OFFLOADED),
        "gradients are whole sums or parts of them when the optimizer reads them (R, S or O)",
    ),
    (
        lambda m: m.parameters is Mode.REPLICATED or m.optimizer is not Mode.REPLICATED,
        "each device updates the parameters that it holds, so the optimizer is in parts (S or O) where parameters are",
    ),
    (
        lambda m: m.parameters is not Mode.SHARDED or m.gradients is not Mode.REPLICATED,
        "parameters used in parts (S) have gradients in parts (S or O): no device makes those of the other parts",
    ),
    (
        lambda m: m.gradients is Mode.REPLICATED or m.optimizer is not Mode.REPLICATED,
        "an optimizer that is whole on every device (R) needs whole gradients (R)",
    ),
    (
        lambda m: m.gradients is not Mode.OFFLOADED or m.optimizer is Mode.OFFLOADED,
        "gradients on the host (O) are for an optimizer on the host (O): the update runs where its states are",
    ),
    (
        lambda m: m.parameters is not Mode.OFFLOADED or m.optimizer is Mode.OFFLOADED,
        "parameters on the host (O) are updated there, by an optimizer on the host (O)",
    ),
)
"""What the modes of one axis must keep."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The modes on each axis that is spoken of, outermost first; an axis that is not is left to the rest of the plan.

    Presets: ``Placement.ddp() zero1() zero2() fsdp() hsdp() tp() pp() ep() offload()``, or by name:
    ``Placement.preset("zero1")``. Placements of different axes nest: ``Placement.zero1().over(Placement.tp())``. What a
    placement costs in memory and traffic is ``placement.costs(...)``; which of them `parallelize` can carry out today
    are those in `PRESETS`.

    Raises ValueError, with the rule that is broken, for an axis named twice and modes that contradict each other,
    TypeError for what are no pairs of an axis and its `Modes`.
    """

    axes: tuple[tuple[str, Modes], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple) or not all(map(_is_axis, self.axes)):
            raise TypeError(
                f"placement: expected a tuple of pairs of an axis and its Modes, not {self.axes!r}; by name it is "
                "Placement.preset('fsdp')"
            )
        names = [name for name, _ in self.axes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"placement: {', '.join(twice)} is named twice in {names}, which breaks the rule: a state has one mode "
                "on an axis, and cannot be sharded twice on it"
            )
        offloaded = [name for name, modes in self.axes if modes.parameters is Mode.OFFLOADED]
        regathered = [name for name, modes in self.axes if modes.regathered]
        if offloaded and regathered:
            raise ValueError(
                f"placement: parameters are on the host over {', '.join(offloaded)} and made whole after the update "
                f"over {', '.join(regathered)}, which breaks the rule: parameters on the host are in parts "
                "(S, S* or O) on every axis on which their optimizer is"
            )

    def on(self, axis: str) -> Modes:
        """The modes on an axis (all replicated where nothing is said)."""
        return next((modes for name, modes in self.axes if name == axis), None) or Modes()

    def over(self, inner: Placement) -> Placement:
        """This placement with `inner` nested inside: what `inner` leaves on a device is what this one sees as whole.

        Raises ValueError where both speak of an axis, TypeError for what is no Placement.
        """
        if not isinstance(inner, Placement):
            raise TypeError(f"placement: expected a Placement such as Placement.tp() inside {self}, not {inner!r}")
        return Placement((*self.axes, *inner.axes))

    def costs(
        self,
        *,
        parameters: Any,
        devices: Any,
        precision: str | Precision = "mixed",
        optimizer: str = "adam",
        microbatches: Any = 1,
        largest_unit: Any = 0,
        prefetch: Any = 0,
        activations: Any = 0,
        largest_activation: Any = 0,
    ) -> Costs:
        """What a device holds and sends in a training step, in closed form: see `ir.calculus.costs`."""
        from autopart.ir.calculus import costs

        return costs(
            self,
            parameters=parameters,
            devices=devices,
            precision=precision,
            optimizer=optimizer,
            microbatches=microbatches,
            largest_unit=largest_unit,
            prefetch=prefetch,
            activations=activations,
            largest_activation=largest_activation,
        )

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
    def hsdp(cls) -> Placement:
        """Hybrid sharding (Zhao et al. 2023, arXiv 2304.11277): replicas, on one axis, of groups that shard as fsdp."""
        return cls((("dp_replicate", Modes()), ("dp_shard", Modes(Mode.GATHERED, Mode.SHARDED, Mode.SHARDED))))

    @classmethod
    def tp(cls) -> Placement:
        """Tensor parallel (Shoeybi et al. 2019): every layer used in parts, what flows between layers whole everywhere.

        With sequence parallelism what flows between is sharded too:
        ``Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED, Mode.SHARDED)``.
        """
        return cls((("tp", Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED, Mode.REPLICATED)),))

    @classmethod
    def pp(cls) -> Placement:
        """Pipeline parallel: every device has its own layers, and the activations of these."""
        return cls((("pp", Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED)),))

    @classmethod
    def ep(cls) -> Placement:
        """Expert parallel, of experts: each device has its own, and the tokens routed to them."""
        return cls((("ep", Modes(Mode.SHARDED, Mode.SHARDED, Mode.SHARDED, Mode.SHARDED)),))

    @classmethod
    def offload(cls) -> Placement:
        """ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840): optimizer and gradients in parts, on the hosts."""
        return cls((("dp", Modes(optimizer=Mode.OFFLOADED, gradients=Mode.OFFLOADED)),))

    @classmethod
    def preset(cls, name: str) -> Placement:
        """A preset by name, one of `STRATEGIES`."""
        if name not in STRATEGIES:
            raise ValueError(f"placement: unknown preset {name!r}; the presets are {', '.join(STRATEGIES)}")
        made: Placement = getattr(cls, name)()
        return made

    def __str__(self) -> str:
        for name in STRATEGIES:
            if self == Placement.preset(name):
                return name
        for name in PRESETS[1:]:  # on the host a state is in parts, as it is under these
            for made in offloading(Placement.preset(name)):
                if self == made:
                    return f"{name} with {' and '.join(made.on('dp').on_host)} on the host"
        return ", ".join(f"{axis}:{modes}" for axis, modes in self.axes)


def _is_axis(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Modes)


PRESETS = ("ddp", "zero1", "zero2", "fsdp")
"""The presets that programs are written for today."""

STRATEGIES = (*PRESETS, "hsdp", "tp", "pp", "ep", "offload")
"""All presets; what those that are not in `PRESETS` are for is to know their costs (`Placement.costs`)."""


def offloading(placement: Placement) -> Iterator[Placement]:
    """The placement with the optimizer on the hosts of the data ranks, in parts, and with its gradients there too."""
    for away in ({"optimizer": Mode.OFFLOADED}, {"optimizer": Mode.OFFLOADED, "gradients": Mode.OFFLOADED}):
        others = tuple((axis, modes) for axis, modes in placement.axes if axis != "dp")
        yield Placement((*others, ("dp", replace(placement.on("dp"), **away))))


def planned(placement: Placement) -> Placement:
    """The placement, if plans are made with its modes today; ValueError, with what it is good for, if not."""
    presets = [Placement.preset(name) for name in PRESETS]
    known = [each.on("dp") for preset in presets for each in (preset, *offloading(preset))]
    for axis, modes in placement.axes:
        if axis != "dp" or modes not in known:
            raise ValueError(
                f"placement: {placement} is not planned yet: plans are made with {', '.join(PRESETS)} on dp, and with "
                "their optimizer on the host; what it would hold and send is known from Placement.costs"
            )
    return placement


def executable(placement: Placement) -> Placement:
    """The placement, if programs are written for its modes today; ValueError, with what it is good for, if not."""
    if away := planned(placement).on("dp").on_host:
        raise ValueError(
            f"placement: {placement} keeps {' and '.join(away)} on the host, which programs do not do yet: "
            f"autopart.plan says what that would hold and take; to run, use {', '.join(PRESETS)}"
        )
    return placement


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
class Own:
    """What each place makes of rows that it has sorted by itself, those of its own samples (`rules.dispatch`).

    `dim` has the rows. Without one it is what counts them: where each group of the place's own rows ends.
    """

    dim: int | None = None

    def __str__(self) -> str:
        return f"Own({'' if self.dim is None else self.dim})"


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows at the places that have their groups, in the order of these: as many as there are when the program runs.

    `dim` has the rows; `ends` is the value that says where the groups end. Without a dim it is that value, of the rows
    and the groups that a place has.
    """

    ends: str
    dim: int | None = None

    def __str__(self) -> str:
        return f"Dispatched({'' if self.dim is None else f'{self.dim}, '}by {self.ends})"


@dataclass(frozen=True, slots=True)
class PerSlice:
    """A value that each slice of the batch has its own of, and that nothing joins: a statistic of its samples."""

    def __str__(self) -> str:
        return "PerSlice()"


def _text(size: Dim) -> str:
    return size.text("b") if isinstance(size, Size) else str(size)


TensorPlacement = Replicate | Shard | Partial | PerSlice | Own | Dispatched
"""How one value is placed on one axis; the same words say how it depends on the microbatch."""
