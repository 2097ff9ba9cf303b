"""Streams: asynchronous schedules as ticks, whose rows end on any transport and are those of the tables."""

from dataclasses import dataclass
from itertools import permutations

import pytest

from autopart.ir.action import Kind
from autopart.ir.mesh import Mesh
from autopart.schedules import build
from autopart.schedules.dependencies import chain
from autopart.schedules.progress import check
from autopart.schedules.stream import overlaps, spelled, stream_of


@dataclass
class Plan:
    """What of a plan a stream is made from."""

    schedule: str
    microbatches: int
    mesh: Mesh


def made(schedule, ranks, microbatches=None):
    text, batch = spelled(schedule, ranks, microbatches)
    return stream_of(Plan(text, batch, Mesh.of({"pp": ranks})))


@pytest.mark.parametrize("name", ["pipedream", "2bw", "paci", "pb", "paci(accumulate=1)"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_end_on_any_transport_and_are_the_table(name, ranks):
    """With edges between all stages, as skips make them, and for one batch as for many."""
    stream = made(name, ranks)
    for edges in (chain(ranks), frozenset(permutations(range(ranks), 2))):
        for batches in (1, 2, stream.shown + 3):
            rows = stream.rows(edges, batches)
            check(rows, range(ranks))
            table = build(stream.name, ranks=ranks, microbatches=batches * stream.batch).table
            moved = (Kind.SEND, Kind.RECV)
            assert tuple(tuple(a for a in row if a.kind not in moved) for row in rows) == table


def test_what_a_stream_keeps_and_how_far_it_is_ahead():
    assert (made("pipedream", 4).ahead, made("pipedream", 4).keep) == ((3, 2, 1, 0), (3, 2, 1, 0))
    assert (made("2bw", 4).batch, made("2bw", 4).keep, made("2bw", 4).lag) == (4, (1, 1, 1, 1), 1)
    assert (made("paci", 4).batch, made("paci", 4).keep) == (3, (0, 0, 0, 0))
    assert (made("pb", 4).delay, made("paci", 4).delay) == ((6, 4, 2, 0), (0, 0, 0, 0))
    assert (made("pb", 4).lag, made("2bw", 4, 8).name) == (6, "2bw(accumulate=8)")


@pytest.mark.parametrize(
    ("schedule", "microbatches", "message"),
    [
        ("seq1f1b", None, "none of a train_loop, as it has slices of the sequence; it takes pipedream, 2bw, paci, pb,"),
        ("pipedream", 4, "'pipedream' steps after every microbatch"),
        ("2bw", 3, "takes at least 4"),
        ("2bw(accumulate=4)", 8, "microbatches: 8 contradict"),
    ],
)
def test_refused(schedule, microbatches, message):
    with pytest.raises(ValueError, match=message):
        spelled(schedule, 4, microbatches)


def test_tables_of_ones_own_are_no_streams():
    table = build("paci", ranks=2, microbatches=4)
    assert overlaps("2bw(accumulate=2)") and overlaps(str(table)) and not overlaps("1f1b")
    with pytest.raises(ValueError, match="does not step after each batch of 4 microbatches"):
        stream_of(Plan(str(table), 4, Mesh.of({"pp": 2})))
