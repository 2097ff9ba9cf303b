"""The calculus of placements: what a device holds and sends in a step, in closed form, from the modes alone.

With Psi parameters, |s| is the bytes of state s on one device, and an axis has N devices (arXiv 2601.02311; the volumes
are those of ring algorithms, as in ZeRO, arXiv 1910.02054, section 7.1):

    memory      a state in parts (S, S*, O) takes |s| / N, any other |s|; degrees of several axes multiply; what is
                offloaded (O) on any axis is on the host and takes nothing here            -> `_held`
    buffers     parameters that are gathered or come from the host: the largest unit; gradients that are reduced or sent
                to the host as they are made: that of the largest unit                     -> `_buffers`
    before use  S*, O: all-gather of the parameters, in every forward and every backward   -> `_gathers`
    gradients   none where parameters are S, nor where all devices compute the same. Else reduced only to the mode that
                the consumer needs: reduce-scatter if gradients or optimizer are in parts, all-reduce if not; once a
                microbatch if gradients are in parts, once a step if not                   -> `_reductions`
    update      optimizer in parts, parameters R: all-gather of the parameters             -> `_update`
    host        O: to the host and back at every use, over the device's own link
    activations S*: all-gather in the backward of every microbatch; O: to the host and back -> `_activations`

Axes nest: the innermost is reduced over first and gathered over last, so an outer axis only moves what the inner ones
left; all-reduces over several axes are hierarchical in this way too. So an axis that is written as two, with the same
modes, costs the same. An all-gather or reduce-scatter over N devices of a buffer of M bytes sends (N-1)/N M from each,
an all-reduce twice that, the host link M. What operators themselves exchange (tensor parallel all-reduces, pipeline
sends, expert all-to-alls) depends on the layers: `ir.transformer` has their closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from autopart.ir.amount import Amount, check_amount, check_within
from autopart.ir.placement import IN_PARTS, STATES, Mode, Modes, Placement

Axes = tuple[tuple[str, Modes, Amount], ...]
"""The axes with their modes and degrees, outermost first."""

HOST = "host"
"""What `Exchange.axis` is for the link between a device and its host."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one parameter, of its gradient, of a state of the optimizer, and of a master copy (0 without one).

    The master copy belongs to the optimizer, as in ZeRO (section 3.1), not to the parameters.
    """

    parameters: Amount
    gradients: Amount
    states: Amount
    master: Amount = 0

    def __post_init__(self) -> None:
        for field in ("parameters", "gradients", "states", "master"):
            check_amount(f"precision.{field}", getattr(self, field))


PRECISIONS: Mapping[str, Precision] = {
    "mixed": Precision(2, 2, 4, 4),
    "fp32": Precision(4, 4, 4),
    "fp64": Precision(8, 8, 8),
    "bf16": Precision(2, 2, 2),
    "fp16": Precision(2, 2, 2),
}
"""By name: ``mixed`` is 16-bit parameters and gradients with 32-bit masters and states; the others have one dtype."""

OPTIMIZERS: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2}
"""How many values an optimizer keeps for each parameter, beside a master copy."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Communication of one kind: `times` a step a device sends `nbytes` of a state, over an axis or the `HOST` link."""

    collective: str  # all_gather, reduce_scatter, all_reduce; to_host, from_host
    axis: str
    state: str
    nbytes: Amount
    times: Amount

    @property
    def total(self) -> Amount:
        """The bytes of a step."""
        return self.nbytes * self.times


@dataclass(frozen=True, slots=True)
class Costs:
    """What a device holds and sends in a step, in bytes.

    `by_state` is what is on the device throughout, `on_host` what its host holds of it, `buffers` what comes on top for
    a time; `exchanges` is what is sent, `HOST` links included.
    """

    by_state: Mapping[str, Amount]
    on_host: Mapping[str, Amount]
    buffers: Mapping[str, Amount]
    exchanges: tuple[Exchange, ...]

    @property
    def resident(self) -> Amount:
        """Bytes on a device throughout the step: the sum of `by_state`."""
        return sum(self.by_state.values())

    @property
    def peak(self) -> Amount:
        """`resident` and all `buffers` at once."""
        return self.resident + sum(self.buffers.values())

    @property
    def host(self) -> Amount:
        """Bytes on the host of a device: the sum of `on_host`."""
        return sum(self.on_host.values())

    @property
    def traffic(self) -> Amount:
        """Bytes that a device sends in a step, with what goes between it and its host: the sum of `by_collective`."""
        return sum(self.by_collective.values())

    @property
    def by_collective(self) -> Mapping[str, Amount]:
        """Bytes sent per step and device, by collective."""
        return self._sums("collective")

    @property
    def by_axis(self) -> Mapping[str, Amount]:
        """Bytes sent per step and device, by axis, `HOST` among them."""
        return self._sums("axis")

    def __str__(self) -> str:
        """A line a total, with its parts."""
        totals: tuple[tuple[str, Amount, Mapping[str, Amount]], ...] = (
            ("resident", self.resident, self.by_state),
            ("peak", self.peak, self.buffers),
            ("host", self.host, self.on_host),
            ("traffic", self.traffic, self.by_collective),
        )
        lines = []
        for name, total, parts in totals:
            told = ", ".join(f"{part} {_told(amount)}" for part, amount in parts.items() if amount != 0)
            lines.append(f"{name:<9}{_told(total)}" + (f" ({'with ' if name == 'peak' else ''}{told})" if told else ""))
        return "\n".join(lines)

    def _sums(self, field: str) -> Mapping[str, Amount]:
        sums: dict[str, Amount] = {}
        for exchange in self.exchanges:
            key = getattr(exchange, field)
            sums[key] = sums.get(key, 0) + exchange.total
        return sums


def costs(
    placement: Placement,
    *,
    parameters: Amount,
    devices: Amount | Mapping[str, Amount],
    precision: str | Precision,
    optimizer: str,
    microbatches: Amount,
    largest_unit: Amount,
    prefetch: Amount,
    activations: Amount,
    largest_activation: Amount,
) -> Costs:
    """What a device holds and sends in one training step under a placement, in closed form; see `Placement.costs`.

    All amounts may be numbers or sympy expressions; arithmetic is theirs, so that fractions and symbols stay exact.
    Nothing is rounded or padded to whole elements.

    Args:
        parameters: how many there are in the whole model, all trained.
        devices: how many the placement's axis has; for several axes a mapping from each to its degree.
        precision: one of `PRECISIONS`, or the bytes themselves.
        optimizer: one of `OPTIMIZERS`.
        microbatches: how many each device computes in a step, one after the other.
        largest_unit: how many parameters are gathered, or have their gradients reduced, at once: those of a layer.
        prefetch: how many units are gathered ahead of the one in use.
        activations: bytes that one microbatch keeps for its backward of a device's own samples and layers, before they
            are sharded.
        largest_activation: bytes that are gathered or come from the host at once, of what is kept.

    Raises:
        ValueError: an amount is negative or not finite, a count is not whole or below 1, the largest unit has more
            than all parameters, a name is unknown, or `devices` does not speak of just the placement's axes. The
            message names the argument.
        TypeError: an amount is not a number.
    """
    axes = _axes(placement, devices)
    made = _precision(precision)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: unknown {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    check_amount("parameters", parameters)
    check_amount("microbatches", microbatches, least=1, whole=True)
    check_amount("largest_unit", largest_unit)
    check_amount("prefetch", prefetch, whole=True)
    check_amount("activations", activations)
    check_amount("largest_activation", largest_activation)
    check_within("largest_unit", largest_unit, "parameters", parameters)
    check_within("largest_activation", largest_activation, "activations", activations)
    whole = {
        "parameters": made.parameters * parameters,
        "optimizer": (made.master + made.states * OPTIMIZERS[optimizer]) * parameters,
        "gradients": made.gradients * parameters,
        "activations": activations,
    }
    held = {state: _held(axes, state, whole[state]) for state in STATES}
    away = {state: any(_mode(modes, state) is Mode.OFFLOADED for _, modes, _ in axes) for state in STATES}
    units = {
        "parameters": made.parameters * largest_unit * (1 + prefetch),
        "gradients": made.gradients * largest_unit,
        "activations": largest_activation,
    }
    return Costs(
        by_state={state: 0 if away[state] else held[state] for state in STATES},
        on_host={state: held[state] if away[state] else 0 for state in STATES},
        buffers=_buffers(axes, units),
        exchanges=(
            *_gathers(axes, held["parameters"], 2 * microbatches),
            *_reductions(axes, whole["gradients"], microbatches),
            *_update(axes, whole["parameters"]),
            *_activations(axes, held["activations"], microbatches),
        ),
    )


def _told(amount: Amount) -> str:
    return f"{float(amount):,.0f}" if isinstance(amount, int | float | Fraction) else str(amount)


def _mode(modes: Modes, state: str) -> Mode:
    mode: Mode = getattr(modes, state)
    return mode


def _held(axes: Axes, state: str, size: Amount) -> Amount:
    """The part of a state that belongs to a device, here or on its host; activations on the host are all its own."""
    kinds = IN_PARTS if state != "activations" else (Mode.SHARDED, Mode.GATHERED)
    return _divided(size, (n for _, modes, n in axes if _mode(modes, state) in kinds))


def _divided(size: Amount, degrees: Iterator[Amount]) -> Amount:
    parts = prod(degrees)
    return size if size == 0 or parts == 1 else size / parts  # 0 / 3 is a float, and would make sums with it floats


def _buffers(axes: Axes, units: Mapping[str, Amount]) -> Mapping[str, Amount]:
    """What is whole for a time: a unit's parameters, and its gradients, which layers in parts have a part of only."""
    fetched = any(modes.gathered for _, modes, _ in axes)
    passed_on = any(
        modes.gradients is Mode.OFFLOADED or (modes.gradients is Mode.SHARDED and modes.parameters is not Mode.SHARDED)
        for _, modes, _ in axes
    )
    kept_away = any(modes.activations in (Mode.GATHERED, Mode.OFFLOADED) for _, modes, _ in axes)

    def in_layer(size: Amount) -> Amount:
        cut = (n for _, m, n in axes if m.parameters is Mode.SHARDED and m.activations is not Mode.MATERIALIZED)
        return _divided(size, cut)

    return {
        "parameters": in_layer(units["parameters"]) if fetched else 0,
        "gradients": in_layer(units["gradients"]) if passed_on else 0,
        "activations": units["activations"] if kept_away else 0,
    }


def _gather(axes: Axes, state: str, held: Amount, times: Amount) -> Iterator[Exchange]:
    """All-gathers over some axes, the outermost first, of what a device holds."""
    for axis, _, n in axes:
        yield Exchange("all_gather", axis, state, held * (n - 1), times)
        held = held * n


def _gathers(axes: Axes, held: Amount, uses: Amount) -> Iterator[Exchange]:
    """Parameters are brought together before each use."""
    if any(modes.parameters is Mode.OFFLOADED for _, modes, _ in axes):
        yield Exchange("from_host", HOST, "parameters", held, uses)
    over = tuple(axis for axis in axes if axis[1].gathered)
    yield from _gather(over, "parameters", held, uses)


def _reductions(axes: Axes, size: Amount, microbatches: Amount) -> Iterator[Exchange]:
    """Gradients are summed where inputs differ, to parts wherever no more is needed, the innermost axis first."""
    made = _divided(size, (n for _, modes, n in axes if modes.parameters is Mode.SHARDED))
    away = any(modes.gradients is Mode.OFFLOADED for _, modes, _ in axes)
    rest = [axis for axis in reversed(axes) if axis[1].parameters is not Mode.SHARDED]
    at_once = [axis for axis in rest if axis[1].reduced_at_once]
    to_parts = [axis for axis in rest if axis not in at_once and axis[1].reduced_to_parts]
    for axis, modes, n in (*at_once, *to_parts):
        # What leaves for the host with every microbatch is reduced before that.
        times = microbatches if away or modes.reduced_at_once else 1
        if modes.inputs_differ:
            yield Exchange("reduce_scatter", axis, "gradients", made * (n - 1) / n, times)
        made = made / n
    left = made
    for axis, modes, n in rest:
        if not modes.reduced_to_parts and modes.inputs_differ:
            yield Exchange("all_reduce", axis, "gradients", 2 * left * (n - 1) / n, microbatches if away else 1)
            left = left / n
    if any(modes.optimizer is Mode.OFFLOADED for _, modes, _ in axes):
        yield Exchange("to_host", HOST, "gradients", made, microbatches if away else 1)


def _update(axes: Axes, size: Amount) -> Iterator[Exchange]:
    """Parameters updated in parts are made whole where they are kept whole; those updated on the host come back."""
    updated = _divided(size, (n for _, modes, n in axes if modes.optimizer in IN_PARTS))
    if any(m.optimizer is Mode.OFFLOADED for _, m, _ in axes) and not any(
        m.parameters is Mode.OFFLOADED for _, m, _ in axes
    ):
        yield Exchange("from_host", HOST, "parameters", updated, 1)
    yield from _gather(tuple(axis for axis in axes if axis[1].regathered), "parameters", updated, 1)


def _activations(axes: Axes, held: Amount, microbatches: Amount) -> Iterator[Exchange]:
    """What is kept for the backward, where it is kept elsewhere or in parts only."""
    if any(modes.activations is Mode.OFFLOADED for _, modes, _ in axes):
        yield Exchange("to_host", HOST, "activations", held, microbatches)
        yield Exchange("from_host", HOST, "activations", held, microbatches)
    over = tuple(axis for axis in axes if axis[1].activations is Mode.GATHERED)
    yield from _gather(over, "activations", held, microbatches)


def _axes(placement: Placement, devices: Amount | Mapping[str, Amount]) -> Axes:
    names = [name for name, _ in placement.axes]
    if not isinstance(devices, Mapping):
        if len(names) != 1:
            raise ValueError(f"devices: the placement is on {', '.join(names) or 'no axis'}; give the degree of each")
        devices = {names[0]: devices}
    if set(devices) != set(names):
        raise ValueError(f"devices: speaks of {', '.join(map(str, devices))}, but the placement of {', '.join(names)}")
    for name in names:
        check_amount(f"devices[{name!r}]", devices[name], least=1, whole=True)
    return tuple((name, modes, devices[name]) for name, modes in placement.axes)


def _precision(precision: str | Precision) -> Precision:
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"precision: unknown {precision!r}; known are {', '.join(PRECISIONS)}, or a Precision")
    return PRECISIONS[precision]
