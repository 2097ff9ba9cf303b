"""The progress checker against small interpreters of the three models, and planted deadlocks and mismatches."""

import random
from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.errors import VerificationError
from autopart.ir.action import Action, Kind
from autopart.schedules import build, lower
from autopart.schedules.dependencies import chain
from autopart.schedules.progress import MODELS, check
from tests.schedule_strategies import cases


def rows(*texts):
    return [[Action.parse(cell) for cell in text.split()] for text in texts]


def ends_with_buffers(table, places):
    """Sends never wait; receives do."""
    flying = defaultdict(int)
    left = [deque(row) for row in table]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while row:
                peer = places[row[0].pipe][row[0].peer]
                if row[0].kind is Kind.SEND:
                    flying[rank, peer] += 1
                elif row[0].kind is Kind.RECV:
                    if not flying[peer, rank]:
                        break
                    flying[peer, rank] -= 1
                row.popleft()
                moved = True
        if not moved:
            return False
    return True


def ends_with_streams(table, places):
    """The ranks of a pair queue their transfers; the heads of both queues run when one sends and the other receives."""
    queues = defaultdict(deque)
    left = [deque(row) for row in table]
    waiting = [False] * len(left)
    while any(left) or any(queues.values()):
        moved = False
        for rank, row in enumerate(left):
            while row and not waiting[rank]:
                action = row.popleft()
                moved = True
                if action.kind in (Kind.SEND, Kind.RECV):
                    queues[rank, places[action.pipe][action.peer]].append(action.kind)
                    waiting[rank] = action.kind is Kind.RECV
        for a, b in list(queues):
            if queues[a, b] and queues[b, a] and queues[a, b][0] is Kind.SEND and queues[b, a][0] is Kind.RECV:
                queues[a, b].popleft(), queues[b, a].popleft()
                waiting[b] = False
                moved = True
        if not moved:
            return False
    return True


def ends_with_rendezvous(table, places):
    """A send and its receive happen together, when both are at the head of their rows."""
    left = [deque(row) for row in table]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            if not row or row[0].kind is Kind.RECV:
                continue
            if row[0].kind is Kind.SEND:
                other = left[places[row[0].pipe][row[0].peer]]
                if not (other and other[0].kind is Kind.RECV and places[other[0].pipe][other[0].peer] == rank):
                    continue
                other.popleft()
            row.popleft()
            moved = True
        if not moved:
            return False
    return True


INTERPRETERS = dict(zip(MODELS, (ends_with_buffers, ends_with_streams, ends_with_rendezvous), strict=True))


def shuffled(table, places, rng, swaps):
    """The rows after random swaps of neighbours that leave the order of each channel alone."""
    table = [list(row) for row in table]
    for _ in range(swaps):
        row = rng.choice(table)
        if len(row) > 1:
            i = rng.randrange(len(row) - 1)
            a, b = row[i], row[i + 1]
            messages = a.kind is b.kind and a.kind in (Kind.SEND, Kind.RECV)
            if not (messages and places[a.pipe][a.peer] == places[b.pipe][b.peer]):
                row[i], row[i + 1] = b, a
    return table


@given(cases(), st.integers(0, 10**9), st.sampled_from([0, 1, 3, 10, 40]))
def test_verdict_equals_that_of_the_interpreters(case, seed, swaps):
    places = case.schedule.places
    table = shuffled(lower(case.schedule, case.edges).table, places, random.Random(seed), swaps)
    stuck = [model for model, ends in INTERPRETERS.items() if not ends(table, places)]
    assert not stuck or stuck == list(MODELS[MODELS.index(stuck[0]) :])
    if not stuck:
        check(table, places[0], places[1:])
        return
    with pytest.raises(VerificationError, match=f"deadlock under the {stuck[0]} model"):
        check(table, places[0], places[1:])


def test_the_interpreters_differ():
    """Without this the test above could pass by always seeing the same verdict."""
    seen = set()
    rng = random.Random(0)
    lowered = lower(build("1f1b", ranks=3, microbatches=3), chain(3) | {(0, 2), (2, 0)})
    for _ in range(200):
        table = shuffled(lowered.table, lowered.schedule.places, rng, 12)
        stuck = [model for model, ends in INTERPRETERS.items() if not ends(table, lowered.schedule.places)]
        seen.add(stuck[0] if stuck else "none")
    assert seen == {*MODELS, "none"}


DEADLOCKS = [
    ("dirfifo", rows("0RECV0>1 0SEND0>1", "1RECV0>0 1SEND0>0"), {0: "0RECV0>1", 1: "1RECV0>0"}),
    ("pairfifo", rows("0F0 0SEND0>1 0RECV0>1", "1SEND0>0 1RECV0>0 1F0"), {0: "0SEND0>1", 1: "1SEND0>0"}),
    (
        "block",
        rows("0SEND0>1 0RECV0>2", "1SEND0>2 1RECV0>0", "2SEND0>0 2RECV0>1"),
        {0: "0SEND0>1", 1: "1SEND0>2", 2: "2SEND0>0"},
    ),
]


@pytest.mark.parametrize(("model", "table", "stuck"), DEADLOCKS)
def test_planted_deadlocks(model, table, stuck):
    with pytest.raises(VerificationError) as caught:
        check(table, range(len(table)))
    message, *shown = str(caught.value).splitlines()
    assert message.startswith(f"deadlock under the {model} model: ")
    for rank, action in stuck.items():
        assert f"rank {rank} is stuck at {action} (step " in message
        assert f"[{action}]" in shown[rank + 1]
    cycle = message.split("cycle: ")[1].split(" waits for ")
    assert len(cycle) > 2 and cycle[0] == cycle[-1]
    assert set(stuck.values()) <= {action for event in cycle for action in event.split(" with ")}


def test_the_textbook_order_of_1f1b_is_found_to_deadlock():
    """Receive just before use, send just after: both ranks of a pair then send first in the steady state."""
    table = rows(
        "0F0 0SEND0>1 0F1 0SEND1>1 0RECV0>1 0B0 0RECV1>1 0B1",
        "1RECV0>0 1F0 1B0 1SEND0>0 1RECV1>0 1F1 1B1 1SEND1>0",
    )
    with pytest.raises(VerificationError, match="pairfifo"):
        check(table, (0, 1))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (rows("0SEND0>1", ""), "rank 0 sends 0SEND0>1, but rank 1 receives nothing more"),
        (rows("", "1RECV0>0"), "rank 0 sends nothing more, but rank 1 takes it as 1RECV0>0"),
        (rows("0SEND0>1 0SEND1>1", "1RECV1>0 1RECV0>0"), "rank 0 sends 0SEND0>1, but rank 1 takes it as 1RECV1>0"),
        (rows("1SEND0>0", ""), "rank 0, step 0: 1SEND0>0 is of a stage of rank 1"),
        (rows("0SEND0>2", ""), "rank 0, step 0: 0SEND0>2 is between two stages of one rank"),
        (rows("0SEND0>7", ""), "rank 0, step 0: 0SEND0>7 names a stage that is not among 0 to 2"),
    ],
)
def test_planted_mismatches(table, message):
    with pytest.raises(VerificationError) as caught:
        check(table, (0, 1, 0))
    assert message in str(caught.value)
    assert "[" in str(caught.value)


def test_pipes_have_places_of_their_own():
    """Stage 0 of pipe 1 is on rank 1."""
    table = rows("0F0 0SEND0>1 1RECV1p1>0 1F1p1", "1RECV0>0 1F0 0F1p1 0SEND1p1>1")
    check(table, (0, 1), ((1, 0),))
    with pytest.raises(VerificationError, match="1RECV1p1>0 names a pipe that is not among 0 to 0"):
        check(table, (0, 1))


def test_an_exchange_that_waits_for_a_message_behind_it():
    """Rank 1 takes what rank 0 sends only after T, which needs rank 0's S, which comes after the send."""
    table = rows("0F0 0SEND0>1 0F1 0SEND1>1 0S0 0T0", "1RECV0>0 1F0 1S0 1T0 1RECV1>0 1F1")
    with pytest.raises(VerificationError, match=r"deadlock under the block model.*1T0"):
        check(table, (0, 1), (), 1)
    check(rows("0F0 0SEND0>1 0F1 0SEND1>1 0S0 0T0", "1RECV0>0 1F0 1S0 1RECV1>0 1T0 1F1"), (0, 1), (), 1)


def test_other_actions_are_work_of_the_rank():
    check(rows("0GATHER-1@h 0F0 0SEND0>1 0REDUCE-1@h", "1RECV0>0 1F0"), (0, 1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward"])
def test_emitted_schedules_end(name):
    for ranks in range(1, 6):
        for microbatches in (1, 2, 5, 9):
            lowered = lower(build(name, ranks=ranks, microbatches=microbatches), chain(ranks))
            check(lowered.table, lowered.schedule.place)
