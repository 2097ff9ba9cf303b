"""Lowering: messages match in order, values arrive before their use, receives hold nothing up, steady rows repeat."""

from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given

from autopart.ir.action import Action, Kind
from autopart.schedules import build, lower, read, simulate, validate
from autopart.schedules.dependencies import chain
from autopart.schedules.progress import check
from tests.schedule_strategies import cases, schedules

MESSAGES = (Kind.SEND, Kind.RECV)


def which(action):
    """What an action's values belong to."""
    return action.microbatch, action.slice, action.pipe


def test_small_tables():
    lowered = lower(build("1f1b", ranks=2, microbatches=2), chain(2))
    assert str(lowered).splitlines() == [
        "0F0,0SEND0>1,0F1,0SEND1>1,0RECV0>1,0B0,0RECV1>1,0B1",
        "1RECV0>0,1F0,1B0,1RECV1>0,1SEND0>0,1F1,1B1,1SEND1>0",
    ]
    lowered = lower(build("forward", ranks=3, microbatches=1), frozenset({(0, 1), (0, 2), (2, 0)}))
    assert str(lowered).splitlines() == ["0F0,0SEND0>1,0SEND0>2", "1RECV0>0,1F0", "2RECV0>0,2F0"]


def test_stages_of_one_rank_hand_over_without_a_message():
    schedule = read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    lowered = lower(schedule, chain(4))
    assert [len(row) for row in lowered.table] == [8, 8]
    assert not any({action.stage, action.peer} in ({1, 2}, {0, 3}) for row in lowered.table for action in row)


@given(cases())
def test_rows_are_the_compute_rows_with_exactly_the_messages_of_the_edges(case):
    places = case.schedule.places
    lowered = lower(case.schedule, case.edges)
    for row, plain in zip(lowered.table, case.schedule.table, strict=True):
        assert tuple(action for action in row if action.kind not in MESSAGES) == plain
    expected = set()
    for action in case.schedule.parts():
        for source, target in case.edges:
            made = Kind.F if source < target else (Kind.B, Kind.I)
            place = places[action.pipe]
            if source == action.stage and action.kind in made and place[source] != place[target]:
                expected |= {(source, target, *which(action))}
    messages = [(rank, action) for rank, row in enumerate(lowered.table) for action in row if action.kind in MESSAGES]
    assert all(case.schedule.rank(action) == rank for rank, action in messages)
    sends = [(a.stage, a.peer, *which(a)) for _, a in messages if a.kind is Kind.SEND]
    receives = [(a.peer, a.stage, *which(a)) for _, a in messages if a.kind is Kind.RECV]
    assert len(sends) == len(receives) == len(expected)
    assert set(sends) == set(receives) == expected
    check(lowered.table, places[0], places[1:])


@given(cases())
def test_both_ranks_of_a_pair_agree_on_the_order_of_their_messages(case):
    seen = defaultdict(list)
    for rank, row in enumerate(lower(case.schedule, case.edges).table):
        for action in row:
            if action.kind in MESSAGES:
                ends = (action.stage, action.peer)[:: 1 if action.kind is Kind.SEND else -1]
                seen[rank, case.schedule.places[action.pipe][action.peer]].append((*ends, *which(action)))
    for (rank, peer), messages in seen.items():
        assert seen[peer, rank] == messages


@given(cases())
def test_values_arrive_before_they_are_used_and_leave_once_made(case):
    for rank, row in enumerate(lower(case.schedule, case.edges).table):
        done, last = set(), ()
        for action in row:
            if action.kind is Kind.SEND:
                made = (Kind.F,) if action.peer > action.stage else (Kind.B, Kind.I)
                assert any(a.kind in made and (a.stage, which(a)) == (action.stage, which(action)) for a in last)
            elif action.kind is Kind.RECV:
                consumer = (Kind.F,) if action.peer < action.stage else (Kind.B, Kind.I)
                assert not any((kind, action.stage, which(action)) in done for kind in consumer)
                done.add((action.peer, action.stage, which(action)))
            else:
                last = action.parts
                for part in last:
                    for source, target in case.edges:
                        wanted = part.kind is Kind.F if source < target else part.kind in (Kind.B, Kind.I)
                        if target == part.stage and wanted and case.schedule.places[part.pipe][source] != rank:
                            assert (source, target, which(part)) in done
                    done.add((part.kind, part.stage, which(part)))


@given(schedules())
def test_receives_that_block_cost_no_time(schedule):
    """Rows with blocking receives take as long as the bare schedule, each action at the moment when it could run."""
    lowered = lower(schedule, chain(schedule.stages))
    unit = (schedule.slices,) * schedule.stages
    assert _blocking_makespan(lowered) == simulate(schedule, costs={"F": unit, "I": unit, "W": unit}).makespan


def _blocking_makespan(lowered):
    cost = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.PAIR: 3, Kind.SEND: 0, Kind.RECV: 0}
    channels = defaultdict(deque)
    clock, left = [0] * len(lowered.table), [deque(row) for row in lowered.table]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while row:
                key = (row[0].peer, row[0].stage, which(row[0]))
                if row[0].kind is Kind.RECV:
                    if not channels[key]:
                        break
                    clock[rank] = max(clock[rank], channels[key].popleft())
                action = row.popleft()
                clock[rank] += cost[action.kind]
                moved = True
                if action.kind is Kind.SEND:
                    channels[action.stage, action.peer, which(action)].append(clock[rank])
        assert moved
    return max(clock)


SKIPS = [frozenset(), frozenset({(0, 2), (2, 0)}), frozenset({(0, 3), (3, 0), (1, 3), (3, 1)})]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("skips", SKIPS)
def test_the_steady_part_repeats(ranks, skips):
    """All but a part that does not grow with the microbatches is one block, repeated with the microbatch counted up."""
    edges = chain(ranks) | {edge for edge in skips if max(edge) < ranks}
    for microbatches in (ranks + 4, 12, 16):
        for name in ("1f1b", "gpipe"):
            for row in lower(build(name, ranks=ranks, microbatches=microbatches), edges).table:
                block = len(row) // microbatches
                steady = microbatches - ranks if name == "1f1b" else microbatches // 2
                assert _periodic(row, block if name == "1f1b" else None) >= block * steady


def _periodic(row, period):
    """The length of the longest stretch of a row in which every `period` actions repeat, one microbatch on."""
    longest = 0
    for size in [period] if period else range(1, len(row)):
        run = 0
        for before, after in zip(row, row[size:], strict=False):
            run = run + 1 if after == replace(before, microbatch=before.microbatch + 1) else 0
            longest = max(longest, run + size if run else 0)
    return longest


@pytest.mark.parametrize("edge", [(0, 3), (-1, 0), (1, 1)])
def test_edges_between_stages_that_are_not_there(edge):
    with pytest.raises(ValueError, match=r"edges: \(-?\d, \d\) does not join two of the stages 0 to 2"):
        lower(build("gpipe", ranks=3, microbatches=1), frozenset({edge}))


def test_an_invalid_schedule_is_refused():
    schedule = read("0F0,0B0\n1B0,1F0")
    with pytest.raises(ValueError, match="1B0 comes before 1F0"):
        lower(schedule, chain(2))
    with pytest.raises(ValueError, match="missing"):
        validate(replace(schedule, table=(schedule.table[0], (Action(Kind.F, 1, 0),))))
