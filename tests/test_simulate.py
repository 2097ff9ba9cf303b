"""The simulator against the longest path of the dependency graph, and against figures worked out by hand."""

import math
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.action import Kind
from autopart.schedules import Link, build, read, simulate
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


def test_s_is_shared_with_t_unless_both_are_given():
    schedule = build("vocab", ranks=1, microbatches=1)
    plain = {"F": 1, "B": 2}
    assert simulate(schedule, plain).makespan == 3
    assert simulate(schedule, {**plain, "S": 4}).makespan == 7
    assert [span.end - span.start for span in simulate(schedule, {**plain, "S": 4, "T": 1}).spans] == [1, 4, 2, 1]


def test_a_pair_costs_its_members_unless_given():
    schedule = read("0F0,(0F1;0B0)&,0B1")
    assert simulate(schedule, {"F": 1, "B": 2}).makespan == 6
    assert simulate(schedule, {"F": 1, "B": 2, "PAIR": 2.5}).makespan == 5.5
    assert simulate(schedule, {"F": 1, "B": 2}).peak_activations == (2,)


def test_a_message_waits_for_the_one_before_it_on_its_link():
    """Forwards of 1 each whose messages take 2: they arrive at 3, 5 and 7, and 0.5 later with a latency."""
    schedule = build("forward", ranks=2, microbatches=3)
    for comm, arrivals in ((Link(transfer=2), [3, 5, 7]), (Link(0.5, 2), [3.5, 5.5, 7.5]), (0.5, [1.5, 2.5, 3.5])):
        spans = simulate(schedule, {"F": (1, 0.25)}, comm).spans
        assert [span.start for span in spans if span.rank == 1] == arrivals
    assert simulate(schedule, {"F": (3, 0.25)}, Link(transfer=2)).makespan == 9 + 2 + 0.25


def test_the_two_directions_of_a_link_do_not_meet():
    schedule = build("1f1b", ranks=2, microbatches=8)
    slow = simulate(schedule, {"F": 1, "B": 2}, {(0, 1): Link(transfer=0.5), (1, 0): Link(transfer=0.5)})
    assert slow.makespan == simulate(schedule, {"F": 1, "B": 2}, 0.5).makespan


def test_edges_of_their_own():
    schedule = build("gpipe", ranks=3, microbatches=1)
    each = {(0, 1): 1, (1, 2): Link(2), (2, 1): 4, (1, 0): 8.0}
    assert simulate(schedule, {"F": 0, "B": 0}, each).makespan == 15
    assert simulate(schedule, {"F": 0, "B": 0}, lambda source, target: each[source, target]).makespan == 15
    del each[2, 1]
    with pytest.raises(ValueError, match="comm: there is no link from stage 2 to stage 1"):
        simulate(schedule, comm=each)


def test_a_slice_has_its_share_of_a_message():
    schedule = build("terapipe", ranks=2, microbatches=1, slices=4)
    assert simulate(schedule, {"F": 0, "B": 0}, Link(transfer=4)).makespan == 8
    assert simulate(schedule, {"F": 0, "B": 0}, Link(latency=4)).makespan == 8


# The period of 4 ranks and 8 microbatches at F = I = W, whose work is 24, where each rank steps alone
PERIODS = [
    ("1f1b", {}, 8, 33),
    ("dualpipe", {}, 8, 26),
    ("dualpipev", {}, 8, 27),
    ("seq1f1b", {"slices": 4}, 8, 26.25),
]


@pytest.mark.parametrize(("name", "options", "microbatches", "period"), PERIODS)
def test_steady_periods(name, options, microbatches, period):
    schedule = build(name, ranks=4, microbatches=microbatches, **options)
    timeline = simulate(schedule, iterations=3, optimizer="per-rank")
    assert timeline.period == period
    once = simulate(schedule)
    assert once.period == once.makespan
    together = simulate(schedule, iterations=3, optimizer="barrier")
    assert (together.period, together.makespan) == (once.makespan, 3 * once.makespan)


def test_zero_bubble_h2_needs_ranks_that_step_alone():
    text = "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W0,1W1,1W2,1W3"
    assert [simulate(read(text), iterations=3, optimizer=how).period for how in ("barrier", "per-rank")] == [13, 12]
    alone = read("optimizer: per-rank\n" + text)
    assert simulate(alone, iterations=3).period == 12


def test_an_optimizer_step_takes_its_time():
    schedule = build("1f1b", ranks=2, microbatches=2)
    timeline = simulate(schedule, {"F": 1, "B": 2, "OPT": 5}, iterations=2)
    steps = [(span.rank, span.start, span.end) for span in timeline.spans if span.action.kind is Kind.OPT]
    assert steps == [(0, 9, 14), (0, 23, 28), (1, 9, 14), (1, 23, 28)]
    alone = simulate(schedule, {"F": 1, "B": 2, "OPT": 5}, optimizer="per-rank")
    assert [(s.rank, s.start) for s in alone.spans if s.action.kind is Kind.OPT] == [(0, 9), (1, 7)]


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
        ({"comm": Link(1, -1)}, r"comm must be a latency of at least 0, or a Link of such times, not Link\(latency=1"),
        ({"iterations": 0}, "iterations must be at least 1, not 0"),
        ({"optimizer": "never"}, "'never' is not a valid Boundary"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", ranks=2, microbatches=2), **options)


def test_wrong_types():
    with pytest.raises(TypeError, match=r"schedule: expected a Schedule, .* not '1f1b'"):
        simulate("1f1b")
    with pytest.raises(TypeError, match=r"costs: expected a time of each kind .* not 3"):
        simulate(build("1f1b", ranks=2, microbatches=2), 3)
    with pytest.raises(TypeError, match=r"schedule: expected a CSV of actions .* not 3"):
        read(3)


def test_a_schedule_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="the table never ends"):
        simulate(read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
