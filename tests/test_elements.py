"""Elements of a tensor: what a chain of cuts leaves, its place in the whole, and what two chains share."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.elements import Elements
from autopart.runtime.parts import Slot

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def chosen(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Elements, torch.Tensor]:
    """Elements after up to three cuts, and the numbers of these in the whole tensor, by plain indexing."""
    elements, numbers = Elements.all(shape), torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(draw(st.integers(0, 3))) if shape else ():
        dim = draw(st.integers(0, len(shape) - 1))
        size = numbers.shape[dim]
        outer = draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0] or [1]))
        start = draw(st.integers(0, size // outer))
        stop = draw(st.integers(start, size // outer))
        elements = elements.cut(dim, start, stop, outer=outer)
        kept = [i for i in range(size) if start <= i % (size // outer) < stop]
        numbers = numbers.index_select(dim, torch.tensor(kept, dtype=torch.int64))
    return elements, numbers


@settings(max_examples=150, deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(chosen(shape), chosen(shape))))
def test_cuts_are_those_of_plain_indexing_and_parts_go_to_parts(
    pair: tuple[tuple[Elements, torch.Tensor], tuple[Elements, torch.Tensor]],
) -> None:
    (one, mine), (other, theirs) = pair
    whole = torch.arange(torch.Size(one.shape).numel()).view(one.shape)
    assert torch.equal(one.of(whole), mine)
    assert one.local == tuple(mine.shape) and one.count == mine.numel()
    assert one.everything == (one.local == one.shape)
    assert (one == other) == (one.local == other.local and torch.equal(mine, theirs)) or not one.count

    slot = Slot("t", one, torch.empty_like(mine))
    slot.fill(whole)
    assert torch.equal(slot.tensor, mine)
    back = torch.full_like(whole, -1)
    slot.put(back)
    assert sorted(back[back >= 0].tolist()) == mine.flatten().tolist() and torch.equal(one.of(back), mine)

    received = torch.full_like(theirs, -1)
    for here, there in one.shared(other):
        assert (received[there] == -1).all()
        received[there] = mine[here]
    both = set(mine.flatten().tolist()) & set(theirs.flatten().tolist())
    assert set(received[received >= 0].tolist()) == both
    assert torch.equal(received[received >= 0], theirs[received >= 0])


def test_a_tensor_without_dims_is_there_or_not() -> None:
    whole = torch.tensor(7)
    here = Elements.all(())
    away = here.cut(0, 0, 0)
    assert here.local == () and here.count == 1 and torch.equal(here.of(whole), whole)
    assert away.local == (0,) and away.count == 0 and away.of(whole).shape == (0,)
    assert list(here.shared(here)) == [((), ())] and list(here.shared(away)) == []


def test_elements_of_one_run_a_dim_are_a_view() -> None:
    whole = torch.zeros(4, 6)
    Elements.all((4, 6)).cut(1, 2, 5).cut(0, 1, 2).of(whole).fill_(1)
    assert whole.sum() == 3
    assert Elements.all((4, 6)).cut(1, 0, 2, outer=2).cut(1, 1, 3).runs == (((0, 4),), ((1, 2), (3, 4)))
