"""The slice lengths against every way to cut, with times drawn at random."""

import random
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from autopart.schedules import batch_and_slice_lengths, slice_lengths


def compositions(total):
    """Every ordered way to write a number as a sum."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def pieces(lengths):
    """(length, what comes before it) of every slice."""
    return [(size, sum(lengths[:number])) for number, size in enumerate(lengths)]


def total(times, ranks):
    return sum(times) + (ranks - 1) * max(times)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**9))
def test_no_cut_is_better(length, ranks, seed):
    rng = random.Random(seed)
    table = {(size, before): rng.randint(1, 9) + 2 * size for size in range(1, 9) for before in range(8)}
    found, lengths = slice_lengths(length, ranks, lambda size, before: table[size, before])
    assert sum(lengths) == length
    assert found == total([table[piece] for piece in pieces(lengths)], ranks)
    assert found == min(total([table[piece] for piece in pieces(cut)], ranks) for cut in compositions(length))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**9))
def test_no_cut_of_batch_and_sequence_is_better(batch, length, ranks, seed):
    rng = random.Random(seed)
    table = {
        (samples, size, before): rng.randint(1, 9) + samples * size
        for samples in range(1, 4)
        for size in range(1, 5)
        for before in range(4)
    }

    def times(parts):
        return [table[samples, *piece] for samples, lengths in parts for piece in pieces(lengths)]

    found, parts = batch_and_slice_lengths(batch, length, ranks, lambda *piece: table[piece])
    assert sum(samples for samples, _ in parts) == batch
    assert all(sum(lengths) == length for _, lengths in parts)
    assert found == total(times(parts), ranks)
    ways = (
        zip(dealt, cuts, strict=True)
        for dealt in compositions(batch)
        for cuts in product(list(compositions(length)), repeat=len(dealt))
    )
    assert found == min(total(times(list(way)), ranks) for way in ways)


def test_longer_pipelines_want_shorter_slices():
    lengths = [slice_lengths(16, ranks, lambda size, before: 1 + size)[1] for ranks in (1, 4, 32)]
    assert lengths[0] == (16,) and len(lengths[2]) > len(lengths[1]) > 1


def test_later_slices_are_not_longer_where_attention_grows():
    _, lengths = slice_lengths(24, 8, lambda size, before: 1 + size / 2 + 0.05 * size * (before + size / 2))
    assert list(lengths) == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
