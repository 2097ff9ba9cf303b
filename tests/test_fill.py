"""Filling waits with W, against what the rule says and what memory allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Kind, Schedule
from autopart.schedules import build, simulate, validate
from autopart.schedules.fill import fill
from autopart.schedules.play import Clock, unit_costs


def without_weights(schedule: Schedule) -> list[tuple]:
    return [tuple(action for action in row if action.kind is not Kind.W) for row in schedule.table]


@given(
    st.sampled_from(["zb-h1", "zb-h2", "interleaved-zb", "zb-v", "gis"]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(["never", "idle", "eager"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_any_order_gets_its_w_within_the_limit(name, p, m, ahead, patience, comm, rng):
    schedule = build(name, ranks=p, microbatches=m)
    chunks = schedule.stages // p
    limit = round(max(simulate(schedule).peak_activations) * chunks)
    costs = {kind: [rng.randint(1, 9) for _ in range(schedule.stages)] for kind in (Kind.F, Kind.I, Kind.W)}
    rows = fill(without_weights(schedule), Clock(schedule.place, costs, comm), limit, ahead=ahead, patience=patience)
    filled = Schedule("filled", m, schedule.place, rows)
    validate(filled)
    assert max(simulate(filled).peak_activations) * chunks <= limit


def test_waits_are_filled_and_nothing_else_moves():
    schedule = build("zb-h1", ranks=4, microbatches=8)
    rows = fill(without_weights(schedule), Clock(schedule.place, unit_costs(4, 1)), 4)
    filled = Schedule("filled", 8, schedule.place, rows)
    assert without_weights(filled) == without_weights(schedule)
    assert simulate(filled).makespan == simulate(schedule).makespan == 27


def test_forwards_go_ahead_only_when_told():
    rows = without_weights(build("2bp-1f1b", ranks=2, microbatches=4))
    costs = unit_costs(2, 1)
    never, idle = (fill(rows, Clock((0, 1), costs), 3, ahead=ahead) for ahead in ("never", "idle"))
    assert [str(action) for action in never[0][:3]] == ["0F0", "0F1", "0I0"]
    assert [str(action) for action in idle[0][:4]] == ["0F0", "0F1", "0F2", "0I0"]


def test_patience_waits_for_what_is_due():
    rows = [tuple(build("2bp-1f1b", ranks=2, microbatches=2).table[rank][:4]) for rank in range(2)]
    costs = {Kind.F: (1, 1), Kind.I: (2, 2), Kind.W: (4, 4)}
    hasty, patient = (fill(rows, Clock((0, 1), costs), 2, patience=patience) for patience in (0.0, 1.0))
    assert [str(action) for action in hasty[0]] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    assert [str(action) for action in patient[0]] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]
