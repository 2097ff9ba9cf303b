"""Unsat cores of pins: smallest, minimal, and those of brute force, on tables and on plans."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.cluster import Cluster
from autopart.errors import PlanInfeasible
from autopart.ir.placement import PRESETS
from autopart.solver import choose
from autopart.solver.core import MEMORY, Way, smallest_core
from autopart.solver.question import PINS
from tests.oracle import every_split, stage_bytes
from tests.test_choose import MIB, frugal, gpt, layer
from tests.test_joint import Model, models


def by_force(pins: Collection[str], allowed: Callable[[frozenset[str]], bool]) -> tuple[str, ...]:
    """The first of the smallest sets of pins that are not allowed, all sets being tried."""
    every = (*pins, MEMORY)
    sets = (some for size in range(len(every) + 1) for some in combinations(every, size))
    return next((some for some in sets if not allowed(frozenset(some))), ())


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[tuple[frozenset[str], bool]]]:
    """Pins, and ways as the pins that they keep and whether they fit."""
    pins = list(PINS[: draw(st.integers(0, 5))])
    kept = st.frozensets(st.sampled_from(pins)) if pins else st.just(frozenset())
    return pins, draw(st.lists(st.tuples(kept, st.booleans()), min_size=1, max_size=10))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(tables())
def test_the_core_of_a_table_is_that_of_brute_force(table: tuple[list[str], list[tuple[frozenset[str], bool]]]) -> None:
    pins, rows = table
    asked: list[int] = []

    def row(i: int, fits: bool) -> Callable[[], bool]:
        return lambda: asked.append(i) or fits  # type: ignore[func-returns-value]

    def allowed(kept: frozenset[str]) -> bool:
        return any(kept - {MEMORY} <= keeps and (fits or MEMORY not in kept) for keeps, fits in rows)

    core = smallest_core(pins, [Way(keeps, row(i, fits)) for i, (keeps, fits) in enumerate(rows)])
    assert core == by_force(pins, allowed)
    assert len(asked) == len(set(asked)), "a row is found once"
    assert all(allowed(frozenset(core) - {pin}) for pin in core), "any of them dropped, there is a way"


@st.composite
def pinned(draw: st.DrawFn) -> tuple[Model, int, int, dict[str, Any]]:
    """A model, devices, a limit in percent between two needs, and pins of several kinds."""
    (plain, again, cluster, batch), devices = draw(models()), draw(st.sampled_from([2, 4]))
    names = [cost.name for cost in plain]
    meshes = [{"pp": pp, "dp": devices // pp} for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(names)]
    made = {
        "mesh": draw(st.sampled_from(meshes)),
        "stages": draw(st.sampled_from([1, names[1:2] or 1])),
        "placement": draw(st.sampled_from(PRESETS)),
        "schedule": "gpipe",
        "microbatches": draw(st.sampled_from([1, 2])),
        "recompute": draw(st.sampled_from([False, True, ["s0"]])),
    }
    wanted = draw(st.sets(st.sampled_from(list(made)), min_size=1))
    pins = {pin: made[pin] for pin in PINS if pin in wanted}
    return (plain, again, cluster, 2 * max(batch, 4)), devices, draw(st.integers(0, 100)), pins


def every_way(model: Model, devices: int, pins: dict[str, Any]) -> Iterator[tuple[frozenset[str], int]]:
    """Of all plans the pins that each keeps, and what its fullest rank holds."""
    plain, again, _, batch = model
    for pp in (pp for pp in (1, 2, 4) if devices % pp == 0 and pp <= len(plain)):
        dp = devices // pp
        most = batch // dp
        for count in {1 << i for i in range(most.bit_length())} | {most, min(most, 4 * pp)}:
            pairs = [
                (p.at(-(-batch // (dp * count))), a.at(-(-batch // (dp * count))))
                for p, a in zip(plain, again, strict=True)
            ]
            less = [i for i, (p, a) in enumerate(pairs) if a.saved_bytes < p.saved_bytes]
            sets = [*chain.from_iterable(combinations(less, n) for n in range(len(less) + 1)), (0,)]
            for starts, schedule, preset, chosen in product(
                every_split(len(plain), pp), ("1f1b", "gpipe"), PRESETS, sets
            ):
                segments = [pair[i in chosen] for i, pair in enumerate(pairs)]
                stages = [segments[i:j] for i, j in zip(starts, [*starts[1:], len(plain)], strict=True)]
                flights = [count if schedule == "gpipe" else min(count, pp - k) for k in range(pp)]
                held = max(stage_bytes(s, preset, dp, 2, flight) for s, flight in zip(stages, flights, strict=True))
                names = pins.get("stages")
                on_mesh = pins.get("mesh") == {"pp": pp, "dp": dp}
                keeps = {
                    "mesh": on_mesh,
                    "stages": pp == 1 if names == 1 else 1 in starts and (on_mesh or pp == 2),
                    "placement": pins.get("placement") in (preset, *PRESETS[: 4 * (dp == 1)]),
                    "schedule": schedule == "gpipe",
                    "microbatches": count == pins.get("microbatches"),
                    "recompute": chosen == {"False": (), "True": tuple(less)}.get(str(pins.get("recompute")), (0,)),
                }
                if (schedule == "1f1b" or "schedule" in pins) and (chosen != (0,) or 0 in less or "recompute" in pins):
                    yield frozenset(pin for pin, kept in keeps.items() if kept), held


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pinned())
def test_the_core_of_a_request_is_that_of_brute_force(case: tuple[Model, int, int, dict[str, Any]]) -> None:
    """A pin left out is an argument not given; what is fine with more of the pins is fine with fewer."""
    model, devices, percent, pins = case
    plain, again, cluster, batch = model
    ways = set(every_way(model, devices, pins))
    least, pinned_least = min(held for _, held in ways), [held for keeps, held in ways if keeps >= pins.keys()]
    # between what the best way needs, and what the best that keeps all pins does
    limit = least + percent * (min(pinned_least, default=least) - least) // 100
    try:
        choose(plain, recomputed=again, batch=batch, devices=devices, cluster=cluster, memory=limit, **pins)
        found: tuple[str, ...] = ()
    except PlanInfeasible as refusal:
        found = tuple(told.split("=")[0] if "=" in told else MEMORY for told in refusal.core)
    except ValueError:
        return  # pins that are no request
    expected = by_force(
        tuple(pins),
        lambda kept: any(kept - {MEMORY} <= k and (held <= limit or MEMORY not in kept) for k, held in ways),
    )
    assert found == expected


CLUSTER = Cluster.uniform(8, 1000 * MIB, 1e9, 1e9, 1e8, 1e-6)


def test_a_core_is_told_in_the_terms_of_the_caller() -> None:
    pins: dict[str, Any] = {"batch": 16, "devices": 4, "cluster": CLUSTER, "recomputed": frugal()}
    with pytest.raises(PlanInfeasible) as refusal:
        choose(gpt(), mesh={"dp": 4}, placement="ddp", recompute=False, microbatches=1, memory="500MiB", **pins)
    error = refusal.value
    assert error.core == ("mesh={'dp': 4}", "placement='ddp'", "500.0 MiB per device")
    assert "placement='zero1'" in error.ways and all(way in str(error) for way in error.ways)
    kept = pickle.loads(pickle.dumps(error))
    assert (str(kept), kept.core, kept.ways) == (str(error), error.core, error.ways)
    with pytest.raises(PlanInfeasible, match=r"mesh={'dp': 4} rules out what would fit\. It fits with: offload=True"):
        choose(gpt(), mesh={"dp": 4}, placement="ddp", memory="300MiB", **{**pins, "recomputed": None})
    without = "Nothing fits on 4 devices without schedule or microbatches either"
    with pytest.raises(PlanInfeasible, match=without) as refusal:
        choose(gpt(), schedule="gpipe", microbatches=2, memory="30MiB", **pins)
    assert refusal.value.core == ("30.0 MiB per device",)
    with pytest.raises(PlanInfeasible) as refusal:
        choose(gpt(), memory="30MiB", **pins)
    assert "without" not in str(refusal.value).split("recomputing", 1)[1]


def test_pins_of_a_schedule_that_goes_by_the_rule() -> None:
    costs = [layer(f"h.{i}", saved=8 * MIB, parameters=MIB) for i in range(8)]
    pins: dict[str, Any] = {"batch": 8, "devices": 2, "cluster": CLUSTER}
    given: dict[str, Any] = {"schedule": "interleaved(chunks=2)", "mesh": {"pp": 2}, "microbatches": 8}
    assert choose(costs, memory="70MiB", **given, **pins)
    with pytest.raises(PlanInfeasible) as refusal:
        choose(costs, memory="65MiB", **given, **pins)
    assert refusal.value.core == ("schedule='interleaved(chunks=2)'", "65.0 MiB per device")
    assert choose(costs, memory="65MiB", mesh={"pp": 2}, microbatches=8, **pins)
    with pytest.raises(PlanInfeasible):
        choose(costs, memory="65MiB", schedule="interleaved(chunks=2)", **pins)
