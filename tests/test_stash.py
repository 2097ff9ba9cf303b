"""What I hands to W: as few bytes as by trying every set of values, on random backwards; and known small cases."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

import pytest
import torch

from autopart.ir.graph import Node, Ref, Size, Value
from autopart.ir.segmented import Body, Function, defined
from autopart.passes.stash import Stash
from autopart.rules.alias import roots

aten = torch.ops.aten
ROWS = Size(1)
SAMPLES = 3


def value(name: str, *shape: int | Size) -> Value:
    return Value(name, (ROWS, *shape), torch.float64)


def node(op: torch._ops.OpOverload, args: Iterable[object], out: Value, *, backward: bool = True) -> Node:
    given = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
    return Node(op, given, (), (out,), True, backward, "", "")


def drawn(seed: int) -> tuple[Body, list[str]]:
    """A backward of pointwise operators, views and products, and what W needs of it.

    Saved are views of one storage of the forward, the storage of another value, and a wide one; a product reads the
    weight `w`.
    """
    chosen = random.Random(seed)
    wide = chosen.choice((2, 6))
    inputs = (value("x", 4), Value("w", (4, 4), torch.float64))
    forward = (
        node(aten.mm.default, ["x", "w"], value("h", 4), backward=False),
        node(aten.view.default, ["h", (ROWS, 2, 2)], value("v", 2, 2), backward=False),
        node(aten.view.default, ["h", (ROWS, 4)], value("u", 4), backward=False),
        node(aten.exp.default, ["h"], value("e", 4), backward=False),
        node(aten.repeat.default, ["h", (1, wide)], value("r", 4 * wide), backward=False),
    )
    saved = ("v", "u", "e", "r")
    shapes = {"dx": 4, "u": 4, "e": 4, "r": 4 * wide, "v": 0}
    nodes: list[Node] = []
    for number in range(chosen.randint(2, 5)):
        name = f"n{number}"
        flat = [each for each, width in shapes.items() if width == 4]
        kind = chosen.choice(("two", "two", "one", "view", "mm", "sum", "scaled"))
        if kind == "two":
            made = node(aten.mul.Tensor, chosen.choices(flat, k=2), value(name, 4))
        elif kind == "one":
            source = chosen.choice([each for each, width in shapes.items() if width])
            made = node(aten.exp.default, [source], value(name, shapes[source]))
        elif kind == "view":
            made = node(aten.view.default, [chosen.choice((*flat, "v")), (ROWS, 4)], value(name, 4))
        elif kind == "mm":
            made = node(aten.mm.default, [chosen.choice(flat), "w"], value(name, 4))
        elif kind == "sum":
            made = node(aten.narrow_copy.default, [chosen.choice(flat), 1, 0, 4], value(name, 4))
        else:
            made = node(aten.mul.Tensor, [chosen.choice(flat), "w"], value(name, 4))
        nodes.append(made)
        shapes[name] = made.outs[0].shape[1]
    taken = (value("dx", 4), *(defined(Function(inputs, forward, ()))[name] for name in saved), inputs[1])
    backward = Function(taken, tuple(nodes), (nodes[-1].names()[0],))
    body = Body("body", Function(inputs, forward, ()), saved, backward)
    return body, chosen.sample([*shapes, "w"], k=chosen.randint(1, 4))


def closure(body: Body, have: set[str]) -> set[str]:
    """What W can have from some values: by views, and by pointwise operators that read no parameter."""
    have = have | {"w"}
    for each in body.backward.nodes:
        free = each.op is aten.view.default or (
            each.op in (aten.mul.Tensor, aten.exp.default) and "w" not in each.refs()
        )
        if free and set(each.refs()) <= have:
            have |= {*each.names()}
    return have


def nbytes(body: Body, names: Iterable[str]) -> int:
    """The bytes of the storages of some values."""
    root = {**roots(body.forward.nodes), **roots(body.backward.nodes)}
    values = {**defined(body.forward), **defined(body.backward)}

    def storage(name: str) -> str:
        while name in root:
            name = root[name]
        return name

    return sum(values[name].nbytes(SAMPLES) for name in {storage(name) for name in names})


@pytest.mark.parametrize("seed", range(150))
def test_no_set_of_values_is_smaller(seed: int) -> None:
    body, needed = drawn(seed)
    stash, again = Stash(body, body.backward.nodes, {"w"}, SAMPLES).least(needed)
    assert set(needed) <= closure(body, set(stash))
    ran = {*stash, "w"}
    for each in body.backward.nodes:  # what is said to run again is enough, in order
        if each.names()[0] in again:
            assert set(each.refs()) <= ran
            ran |= {*each.names()}
    assert set(needed) <= ran
    every = [name for name in defined(body.backward) if name != "w"]
    least = min(
        nbytes(body, chosen)
        for count in range(len(every) + 1)
        for chosen in combinations(every, count)
        if set(needed) <= closure(body, set(chosen))
    )
    assert nbytes(body, stash) == least


def test_what_reads_a_gradient_that_is_at_hand_is_handed_over() -> None:
    """W is given it anyway, but runs again only what reads nothing else than I had."""
    taken = (value("dx", 4), value("x", 4))
    made = node(aten.mul.Tensor, ["dx", "x"], value("n", 4))
    forward = Function((value("x", 4),), (), ())
    body = Body("body", forward, ("x",), Function(taken, (made,), ("n",)))
    for at_hand, expected, again in ((set(), ("dx", "x"), {"n": made}), ({"dx"}, ("x", "n"), {})):
        assert Stash(body, [made], at_hand, SAMPLES).least(["dx", "x", "n"]) == (expected, again)


def test_the_brute_force_sees_stashes_of_every_kind() -> None:
    """The random cases hand over inputs and results, and run views and pointwise operators again."""
    kinds = set()
    for seed in range(150):
        body, needed = drawn(seed)
        stash, again = Stash(body, body.backward.nodes, {"w"}, SAMPLES).least(needed)
        made = {name for each in body.backward.nodes for name in each.names()}
        kinds |= {"input" if name not in made else "result" for name in stash} | {str(n.op) for n in again.values()}
    assert kinds == {"input", "result", "aten.view.default", "aten.mul.Tensor", "aten.exp.default"}
