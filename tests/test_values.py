"""Collectives on values equal the whole taken apart and put together; what they send is what is predicted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from autopart.ir.mesh import Mesh, pieces
from autopart.ir.traffic import sent_bytes, wire
from autopart.runtime.local import LocalTransport, run_ranks
from autopart.runtime.values import ValueCollectives
from tests.places import joined, parts

Cut = tuple[int, int, list[int]]


class Places(ValueCollectives):
    """A rank's world, as far as its values go."""

    def __init__(self, transport: LocalTransport, mesh: Mesh) -> None:
        self.transport, self.mesh = transport, mesh


def cut(draw: Random, shape: list[int], degree: int) -> Cut:
    """A dim, the runs that it is seen as, and what each place has of a run: in units of one or two, uneven or not."""
    dim = draw.randrange(len(shape))
    outer, unit = draw.choice([1, 1, 2, 3]), draw.choice([1, 2])
    return dim, outer, [n * unit for n in pieces(draw.randrange(degree, 2 * degree + 1), degree)]


def sized(shape: list[int], *cuts: Cut) -> list[int]:
    """A shape whose dims are as long as the cuts say."""
    for dim, outer, sizes in cuts:
        shape[dim] = outer * sum(sizes)
    return shape


def on_places(degree: int, fn: Any) -> list[tuple[torch.Tensor, dict[str, int]]]:
    """The results of ``fn(places, place)`` on every place, with the bytes that it sent."""

    def main(transport: LocalTransport) -> tuple[torch.Tensor, dict[str, int]]:
        made = fn(Places(transport, Mesh.of({"tp": degree})), transport.rank)
        return made, {kind: count for kind, count in transport.bytes_sent().items() if count}

    return run_ranks(degree, main)


def keywords(found: Cut, prefix: str = "") -> dict[str, Any]:
    return dict(zip((f"{prefix}dim", f"{prefix}outer", f"{prefix}pieces"), found, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_pieces_of_a_dim(seed: int) -> None:
    draw = Random(seed)
    torch.manual_seed(seed)
    degree = draw.choice([2, 3, 4])
    first = cut(draw, shape := [draw.randrange(1, 5) for _ in range(3)], degree)
    whole = torch.randn(degree, *sized(shape, first)).double()
    total, each = whole.sum(0), parts(whole[0], *first)
    gathered = on_places(degree, lambda world, k: world.all_gather_values(each[k], axis="tp", **keywords(first)))
    scattered = on_places(degree, lambda world, k: world.reduce_scatter_values(whole[k], axis="tp", **keywords(first)))
    payload = wire("all_gather", shape, 8, first)
    for place, mine in enumerate(parts(total, *first)):
        torch.testing.assert_close(gathered[place][0], whole[0], rtol=0, atol=0)
        torch.testing.assert_close(scattered[place][0], mine)
        assert scattered[place][0].is_contiguous(), "as the program's shapes are, or a view of it fails"
        assert gathered[place][1] == {"all_gather": sent_bytes("all_gather", payload, degree)}
        assert scattered[place][1] == {"reduce_scatter": sent_bytes("reduce_scatter", payload, degree)}


@pytest.mark.parametrize("seed", range(6))
def test_pieces_go_round_a_ring(seed: int) -> None:
    """After each step a place has the piece of one place further back; after as many as there are places, its own."""
    draw = Random(seed)
    degree = draw.choice([2, 3, 4])
    first = cut(draw, shape := [draw.randrange(1, 5) for _ in range(3)], degree)
    whole = torch.randn(sized(shape, first)).double()
    each = parts(whole, *first)

    def round_trip(world: Places, k: int) -> torch.Tensor:
        held = each[k]
        for hops in range(1, degree + 1):
            held = world.shift_values(held, axis="tp", hops=hops, **keywords(first))
            torch.testing.assert_close(held, each[k - hops], rtol=0, atol=0)
        return held

    payload = wire("shift", shape, 8, (1, *first))
    for place, (made, sent) in enumerate(on_places(degree, round_trip)):
        assert made is not each[place] and torch.equal(made, each[place])
        assert sent == {"shift": degree * sent_bytes("shift", payload, degree)}


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_one_split_for_another(seed: int, same: bool) -> None:
    draw = Random(seed)
    degree = draw.choice([2, 3])
    shape = [draw.randrange(1, 5) for _ in range(3)]
    first = cut(draw, shape, degree)
    if same:  # three runs of each place's part, or each part in one run
        dim, _, sizes = first
        first, second = (dim, 3, sizes), (dim, 1, list(pieces(3 * sum(sizes), degree)))
    else:
        second = cut(draw, shape, degree)
        second = ((first[0] + 1 + second[0] % 2) % 3, *second[1:])
    whole = torch.randn(sized(shape, first) if same else sized(shape, first, second))
    each = parts(whole, *first)
    found = on_places(
        degree,
        lambda world, k: world.all_to_all_values(each[k], axis="tp", **keywords(first, "from_"), **keywords(second)),
    )
    payload = wire("all_to_all", shape, 4, (*first, *second))
    for (made, sent), expected in zip(found, parts(whole, *second), strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
        assert sent == {"all_to_all": sent_bytes("all_to_all", payload, degree)}
    assert torch.equal(joined([made for made, _ in found], *second[:2]), whole)


@pytest.mark.parametrize("how", ["sum", "max"])
def test_sums_and_maxima(how: str) -> None:
    whole = torch.randn(3, 2, 5)
    wanted = whole.sum(0) if how == "sum" else whole.amax(0)
    for made, sent in on_places(3, lambda world, k: world.all_reduce_values(whole[k].t(), axis="tp", how=how)):
        torch.testing.assert_close(made, wanted.t())
        assert sent == {"all_reduce": sent_bytes("all_reduce", 40, 3)}
