"""Vocabulary parallelism: within half an S of 1F1B, one microbatch more a barrier, no deadlock at any size."""

import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.capture import capture
from autopart.capture import read as read_call
from autopart.cluster import Cluster
from autopart.ir.action import Action, Kind, Schedule
from autopart.passes.costs import costs
from autopart.passes.normalise import normalise
from autopart.passes.segment import segment
from autopart.schedules import build, lower, read, simulate, validate
from autopart.schedules.dependencies import chain
from autopart.schedules.progress import check
from autopart.solver.timing import segment_seconds
from tests.models import GPT

SIZES = [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 7, 2 * p + 1)]


@pytest.mark.parametrize("barriers", [1, 2])
def test_every_size_ends(barriers):
    for p, m in SIZES:
        schedule = build("vocab", ranks=p, microbatches=m, barriers=barriers)
        validate(schedule)
        assert read(str(schedule), name=schedule.name) == schedule
        check(lower(schedule, chain(p)).table, schedule.place, (), barriers)
        peaks = simulate(schedule).peak_activations
        assert all(held <= min(m, p - rank + barriers) for rank, held in enumerate(peaks))


@st.composite
def split_outputs(draw):
    """Any rows of F, S, T and B that end, each rank with S and T in one order."""
    ranks, microbatches, barriers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rng = random.Random(draw(st.integers(0, 10**9)))
    left = {kind: list(range(microbatches)) for kind in "ST"}
    shared = []
    while left["T"]:
        begun = left["S"] and (not shared or rng.random() < 0.6 or len(left["S"]) == len(left["T"]))
        shared.append(("S" if begun else "T", left["S" if begun else "T"].pop(0)))
    rows, done, last = [[] for _ in range(ranks)], set(), ranks - 1
    streams = [
        {"F": deque(range(microbatches)), "B": deque(range(microbatches)), "X": deque(shared)} for _ in range(ranks)
    ]

    def ready(rank, kind, number):
        everywhere = lambda kind: {(kind, each, number) for each in range(ranks)}  # noqa: E731
        if kind == "F":
            needs = {("F", rank - 1, number)} if rank else set()
        elif kind == "B":
            needs = {("F", rank, number)}
            needs |= {("B", rank + 1, number)} if rank < last else everywhere("S" if barriers == 1 else "T")
        else:
            needs = {("F", last, number)} if kind == "S" else everywhere("S")
        return needs <= done

    def heads():
        for rank, stream in enumerate(streams):
            for name, queue in stream.items():
                if queue:
                    kind, number = queue[0] if name == "X" else (name, queue[0])
                    if ready(rank, kind, number):
                        yield rank, name, kind, number

    while options := list(heads()):
        rank, name, kind, number = rng.choice(options)
        streams[rank][name].popleft()
        done.add((kind, rank, number))
        rows[rank].append(Action(Kind(kind), rank, number))
    return Schedule("random", microbatches, tuple(range(ranks)), tuple(map(tuple, rows)), barriers=barriers)


@given(split_outputs())
def test_any_rows_that_end_still_do_with_their_messages(schedule):
    validate(schedule)
    lowered = lower(schedule, chain(schedule.ranks))
    check(lowered.table, schedule.place, (), schedule.barriers)


def test_the_bubble_does_not_grow_with_the_microbatches():
    costs = {"F": 1, "I": 1, "W": 1, "S": 0.3}
    bubbles = [simulate(build("vocab", ranks=4, microbatches=m), costs).flush_bubble for m in (8, 16, 32)]
    assert bubbles == pytest.approx([8.85] * 3)


def test_the_last_backward_waits_for_all_ranks():
    """A slow first rank holds up the last one's backward, through its S with one barrier, through its T with two."""
    for barriers, waits in ((1, "0S0"), (2, "0T0")):
        schedule = build("vocab", ranks=3, microbatches=1, barriers=barriers)
        slow = {"F": 1, "B": 2, waits[1]: (10, 1, 1), **({"T": 0} if waits[1] == "S" else {"S": 1})}
        spans = {str(span.action): span for span in simulate(schedule, slow).spans}
        assert spans["2B0"].start == spans[waits].end == (13 if barriers == 1 else 14)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1S1,", "", "rank 1: 1S1 is missing"),
        ("2T2", "2T2,2T3", "2T3 names microbatch 3"),
        ("2F0,2S0", "2S0,2F0", "2S0 comes before 2F0, which it needs"),
        ("2S0,2F1,2B0", "2F1,2B0,2S0", "2B0 comes before 2S0, which it needs"),
    ],
)
def test_planted_faults(old, new, message):
    text = str(build("vocab", ranks=3, microbatches=3))
    assert old in text
    with pytest.raises(ValueError, match=message):
        validate(replace(read(text.replace(old, new, 1)), microbatches=3))


def test_collectives_in_another_order_are_refused():
    """Such rows validate, but the ranks would take one exchange for the other."""
    schedule = build("vocab", ranks=2, microbatches=2)
    text = str(schedule).replace("0S1,0T0", "0T0,0S1")
    changed = read(text, name="vocab")
    validate(changed)
    with pytest.raises(Exception, match=r"S and T number 1: 0T0 on rank 0, but 1S1 on rank 1; all ranks perform them"):
        check(lower(changed, chain(2)).table, changed.place, (), 1)


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="barriers must be 1 or 2, not 3"):
        build("vocab", ranks=2, microbatches=2, barriers=3)
    with pytest.raises(ValueError, match="needs one stage a rank"):
        validate(replace(read("0F0,1F0,1B0,0B0"), barriers=1))
    with pytest.raises(ValueError, match="barriers must be 0, 1 or 2, not 3"):
        validate(replace(read("0F0,0B0"), barriers=3))


@pytest.mark.soak
@pytest.mark.parametrize(("vocabulary", "least", "most"), [(32768, 1.05, 1.08), (262144, 1.4, 1.51)])
def test_what_it_gains_over_the_layer_on_the_last_stage(vocabulary, least, most):
    """64 blocks of width 4096 on 8 ranks, timed by the captured graph of two of them and the output layer."""
    with torch.device("meta"):
        model = GPT(2, 4096, 32, vocabulary, 2048, skips=False, tied=False).bfloat16()
    ids = torch.zeros(2, 2048, dtype=torch.long)
    found = segment(normalise(capture(model, read_call(model, (ids, ids), None), route="direct")))
    cluster = Cluster.preset("h100-80", per_node=8)
    seconds = [segment_seconds(cost.at(1), cluster) for cost in costs(found)]
    (forward, backward), head = seconds[-2], seconds[-1]
    ranks, blocks, microbatches = 8, 8, 128

    def last(block, more):
        return [*[blocks * block] * (ranks - 1), blocks * block + more]

    whole = {"F": last(forward, head[0]), "B": last(backward, head[1])}
    shared = {"F": blocks * forward, "B": blocks * backward, "S": sum(head) / ranks}
    naive = simulate(build("1f1b", ranks=ranks, microbatches=microbatches), whole).makespan
    for barriers in (1, 2):
        split = build("vocab", ranks=ranks, microbatches=microbatches, barriers=barriers)
        assert least <= naive / simulate(split, shared).makespan <= most
