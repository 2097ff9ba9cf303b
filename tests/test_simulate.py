"""The simulator against the longest path of the dependency graph, and against figures worked out by hand."""

import math
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Kind
from autopart.schedules import build, read, simulate
from tests.schedule_strategies import schedules

times = st.integers(0, 9)


@st.composite
def priced(draw):
    schedule = draw(schedules())
    each = st.lists(times, min_size=schedule.stages, max_size=schedule.stages)
    return schedule, {kind: tuple(draw(each)) for kind in "FIWB"}, draw(times)


def time(action, costs):
    """Of slices as long as the microbatch, so that all times are whole numbers."""
    return sum(costs[part.kind][part.stage] for part in action.parts)


def sliced(schedule, costs):
    """Costs under which every slice takes what a microbatch would."""
    return {kind: [schedule.slices * time for time in times] for kind, times in costs.items()}


def longest_path(schedule, costs, comm):
    """The critical path of the graph of row order and data flow, written without the library's own rules."""
    graph = nx.DiGraph()
    graph.add_node("end")
    holder = {part: action for _, action in schedule.actions() for part in action.parts}
    backward, forward = {}, {}
    for a in schedule.parts():
        if a.kind is not Kind.W:
            (forward if a.kind is Kind.F else backward)[a.stage, a.microbatch, a.slice] = a

    def edge(a, b):
        if a is not None:
            crossing = schedule.places[a.pipe][a.stage] != schedule.places[b.pipe][b.stage]
            found = graph.get_edge_data(holder[a], holder[b], {"weight": 0})["weight"]
            graph.add_edge(holder[a], holder[b], weight=max(found, time(holder[a], costs) + comm * crossing))

    for row in schedule.table:
        for before, after in pairwise(row):
            edge(before.parts[0], after.parts[0])
    for action in schedule.parts():
        stage, microbatch, piece = action.stage, action.microbatch, action.slice
        if action.kind is Kind.F:
            edge(forward.get((stage - 1, microbatch, piece)), action)
            edge(forward.get((stage, microbatch, piece - 1)), action)
        elif action.kind is Kind.W:
            edge(backward[stage, microbatch, piece], action)
        else:
            edge(forward[stage, microbatch, piece], action)
            edge(backward.get((stage + 1, microbatch, piece)), action)
            edge(backward.get((stage, microbatch, piece + 1)), action)
        graph.add_edge(holder[action], "end", weight=time(holder[action], costs))
    return nx.dag_longest_path_length(graph)


@given(priced())
def test_makespan_is_the_critical_path(case):
    schedule, costs, comm = case
    timeline = simulate(schedule, costs=sliced(schedule, costs), comm=comm)
    assert timeline.makespan == longest_path(schedule, costs, comm)


@given(priced())
def test_spans_and_idle_windows_tile_every_rank(case):
    schedule, costs, comm = case
    timeline = simulate(schedule, costs=sliced(schedule, costs), comm=comm)
    for rank, row in enumerate(schedule.table):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert tuple(span.action for span in spans) == row
        assert all(span.end - span.start == time(span.action, costs) for span in spans)
        pieces = sorted([(s.start, s.end) for s in spans if s.end > s.start] + list(timeline.idle[rank]))
        assert sum(end - start for start, end in pieces) == timeline.makespan
        assert all(a[1] == b[0] for a, b in pairwise(pieces))


@given(priced())
def test_peak_counts_what_is_held(case):
    schedule, costs, _ = case
    timeline = simulate(schedule, costs=costs)
    trains = any(action.kind is not Kind.F for action in schedule.parts())
    for rank, row in enumerate(schedule.table):
        held, most = {}, 0
        for action in (part for each in row for part in each.parts):
            unit = (action.stage, action.microbatch, action.slice)
            if action.kind is Kind.F and trains:
                held[unit] = 1 / schedule.places[action.pipe].count(rank) / schedule.slices
            elif action.kind in (Kind.B, Kind.W):
                held.pop(unit)
            most = max(most, sum(held.values()))
        assert timeline.peak_activations[rank] == pytest.approx(most)


def test_two_ranks_by_hand():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), costs={"F": (1, 2), "B": {0: 3, 1: 4}}, comm=0.5)
    shown = [[(str(s.action), s.start, s.end) for s in timeline.spans if s.rank == rank] for rank in range(2)]
    assert shown == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 11), ("0B1", 14, 17)],
        [("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5)],
    ]
    assert timeline.idle == (((2, 8), (11, 14)), ((0, 1.5), (13.5, 17)))
    assert (timeline.makespan, timeline.flush_bubble, timeline.span_bubble) == (17, 5, 5)


def test_zero_bubble_h2_has_no_span_bubble():
    """Four microbatches on two ranks at F = I = W: the flush bubble stays, that of ranks that step alone is gone."""
    text = "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W0,1W1,1W2,1W3"
    timeline = simulate(read(text))
    assert (timeline.makespan, timeline.flush_bubble, timeline.span_bubble) == (13, 1, 0)


def test_one_number_is_shared_by_the_stages_of_a_rank():
    timeline = simulate(read("0F0,1F0,2F0,2B0,1B0,0B0"), costs={"F": 3, "I": 6, "W": 0.0})
    assert timeline.makespan == 9
    assert timeline.peak_activations == (1,)


def test_b_costs_its_parts_unless_given():
    schedule = build("gpipe", ranks=1, microbatches=1)
    assert simulate(schedule, costs={"F": 0, "I": 2, "W": 3}).makespan == 5
    assert simulate(schedule, costs={"F": 0, "I": 2, "W": 3, "B": 4}).makespan == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": {"F": 1, "Z": 1}}, "unknown kind 'Z'"),
        ({"costs": {"F": 1, "I": 1}}, "'1f1b' needs the cost of B, or of I and W"),
        ({"costs": {"F": (1, 2, 3), "B": 1}}, "'F' must have a number for each of the 2 stages"),
        ({"costs": {"F": {0: 1, 2: 1}, "B": 1}}, "'F' must have a number for each of the 2 stages"),
        ({"costs": {"F": -1, "B": 1}}, "'F' must be times of at least 0"),
        ({"costs": {"F": 1, "B": math.nan}}, "'B' must be times of at least 0"),
        ({"comm": -0.5}, "comm must be a latency of at least 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", ranks=2, microbatches=2), **options)


def test_a_schedule_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="the table never ends"):
        simulate(read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
