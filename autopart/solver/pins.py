"""What a caller pinned, for people, and the ways to make the global choices with some of the pins or others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import combinations

from autopart.ir.action import Schedule
from autopart.ir.mesh import Mesh
from autopart.ir.plan_text import schedule
from autopart.schedules import spell
from autopart.solver.core import MEMORY, Way, smallest_core
from autopart.solver.request import Request
from autopart.solver.search import candidates, fitting
from autopart.solver.space import Space, roomy

FRAMED = ("stages", "schedule", "recompute")
"""Those that a setting does not tell."""

Asked = Callable[[Collection[str]], Request]
"""The request with some of its pins, as if the others had not been given; ValueError where that is no request."""


def contradiction(request: Request, given: Mapping[str, object], asked: Asked) -> tuple[str, ...]:
    """A smallest set of pins, with their values, that cannot be kept together, the memory limit last.

    `given` are the pins by name, with what the caller said. Any of them left out, as if it had not been
    given, there is a plan that keeps the others of the set.
    """
    core = smallest_core(tuple(given), _ways(tuple(given), asked)) if given else (MEMORY,)
    return tuple(_limit(request) if pin == MEMORY else f"{pin}={_told(given[pin])}" for pin in core)


def _limit(request: Request) -> str:
    return f"{request.room} per device"


def _ways(given: tuple[str, ...], asked: Asked) -> tuple[Way, ...]:
    """Every way to make the global choices under some of the pins, with all those that it keeps."""
    keeps: dict[object, set[str]] = {}
    fits: dict[object, Callable[[], bool]] = {}
    for count in range(len(given), -1, -1):
        for kept in combinations(given, count):
            try:
                request = asked(kept)
            except ValueError:  # without one pin another may be none: names of stages are for the mesh, say
                continue
            framed = tuple(pin for pin in FRAMED if pin in kept)
            for choice, holds in _choices(request):
                keeps.setdefault((framed, choice), set()).update(kept)
                fits.setdefault((framed, choice), holds)
    alike: dict[frozenset[str], list[Callable[[], bool]]] = {}
    for key in keeps:
        alike.setdefault(frozenset(keeps[key]), []).append(fits[key])
    return tuple(Way(kept, partial(_any, found)) for kept, found in alike.items())


def _any(found: Iterable[Callable[[], bool]]) -> bool:
    return any(holds() for holds in found)


def _choices(request: Request) -> list[tuple[object, Callable[[], bool]]]:
    """The settings of a request, or the candidates where it goes by the rule, and what finds whether each fits."""
    space = Space(request)
    if space.joint:
        return [
            (
                (each.mesh, each.microbatches, each.placements, each.text, each.variant),
                partial(space.fits, each, request.memory),
            )
            for each in space.lean(space.settings)
        ]
    again = [request, request.recomputing()] if request.free else [request]
    there = list(roomy(request))
    if not there:  # then no schedule does, and none is made
        return [(None, lambda: False)]
    return [
        (
            (each.mesh, each.microbatches, each.placements, each.text, each.variant),
            partial(lambda each: any(fitting(one, each) is not None for one in again), each),
        )
        for each in candidates(request, there)
    ]


def _told(value: object) -> str:
    """The value of a pin, as a caller would write it."""
    if isinstance(value, Mesh):
        return str(value.sizes)
    if isinstance(value, Schedule):
        return schedule(spell(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_told(each)}" for name, each in value.items()) + "}"
    return repr(value) if isinstance(value, str | int | list | tuple) else str(value)
