"""The placements among which a request chooses: a pinned one or the presets, by pattern, and what may be on hosts."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.cluster import Cluster
from autopart.ir.placement import PRESETS, Placement, offloading, planned

Rules = tuple[tuple[str, Placement], ...]
"""(pattern, placement), the first match holds; the last pattern is '*'."""

Pinned = str | Placement | Mapping[str, str | Placement | Mapping[str, object]] | None
"""A `placement` pin: a placement, or by pattern placements and, for tensors, a Shard or Replicate by axis."""


PER_LAYER = "per-layer"
"""As a placement: one for the model is chosen, then a lighter one for layers whose ranks have memory for it."""


def per_layer(pin: Pinned) -> bool:
    """Whether a pin asks for placements layer by layer, of what it leaves open."""
    return (pin.get("*") if isinstance(pin, Mapping) else pin) == PER_LAYER


def alternatives(pin: Pinned) -> tuple[Rules, ...]:
    """The placements that a pin leaves, the preferred first; ValueError or TypeError for what is none."""
    presets = tuple(Placement.preset(name) for name in PRESETS)
    if pin is None or pin == PER_LAYER:
        return tuple((("*", preset),) for preset in presets)
    if not isinstance(pin, Mapping):
        return ((("*", _placement(pin)),),)
    rules = tuple((pattern, _placement(value)) for pattern, value in pin.items() if pattern != "*")
    if not all(isinstance(pattern, str) for pattern, _ in rules):
        raise TypeError(f"placement: patterns must be module or parameter names, not {[p for p, _ in rules]}")
    rest = presets if pin.get("*", PER_LAYER) == PER_LAYER else (_placement(pin["*"]),)
    return tuple((*rules, ("*", preset)) for preset in rest)


def _placement(value: object) -> Placement:
    if isinstance(value, str):
        value = Placement.preset(value)
    if not isinstance(value, Placement):
        names = ", ".join((*PRESETS, PER_LAYER))
        raise TypeError(f"placement: expected one of {names} or a Placement, not {value!r}")
    return planned(value)


def offloaded(every: tuple[Rules, ...]) -> tuple[Rules, ...]:
    """Placements, then what each is with the optimizer on the host, and with gradients there too; each once."""
    away = [
        tuple((pattern, list(offloading(each))[number]) for pattern, each in rules)
        for rules in every
        for number in (0, 1)
    ]
    return tuple(dict.fromkeys((*every, *away)))


def check_host(cluster: Cluster, placements: tuple[Rules, ...], *, offload: bool) -> None:
    """Refuse what is to be kept on a host that has no memory apart from its devices'."""
    away = offload or any(each.on("dp").on_host for rules in placements for _, each in rules)
    if away and not cluster.host:
        raise ValueError(
            f"{'offload' if offload else 'placement'}: the hosts of the {cluster.name} cluster have no memory apart "
            "from that of their devices; say for which cluster= to plan, such as Cluster.preset('a100-80', per_node=8)"
        )
