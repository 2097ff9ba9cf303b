"""Sums of gradients, regrouped so that each segment hands over one."""

from __future__ import annotations

import random
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.graph import Node, Ref, Value
from autopart.passes.accumulate import regroup, trees

aten = torch.ops.aten


def node(op: torch._ops.OpOverload, name: str, *names: str) -> Node:
    value = Value(name, (2,), torch.float64)
    return Node(op, tuple(Ref(n) for n in names), (), (value,), True, True, "", "")


def random_sum(seed: int, leaves: int) -> tuple[list[Node], str, dict[str, int]]:
    """Gradients from random segments, added by a random tree, the adds placed as soon as their terms are there."""
    draw = random.Random(seed)
    home = {f"g{i}": draw.randrange(4) for i in range(leaves)}
    nodes = [node(aten.neg.default, name, f"x{i}") for i, name in enumerate(home)]
    terms = list(home)
    draw.shuffle(terms)
    while len(terms) > 1:
        one, two = terms.pop(), terms.pop(draw.randrange(len(terms)))
        name = f"a{len(nodes)}"
        nodes.append(node(aten.add.Tensor, name, one, two))
        terms.append(name)
        draw.shuffle(terms)
    home |= {n.outs[0].name: 0 for n in nodes if n.outs[0] and n.outs[0].name not in home}
    return nodes, terms[0], home


@given(st.integers(0, 10**6), st.integers(2, 9))
def test_regrouped_sum_is_the_same_sum(seed: int, leaves: int) -> None:
    nodes, root, home = random_sum(seed, leaves)
    made, homes = regroup(tuple(nodes), [root], home)
    made_home = {**home, **homes}
    assert Counter(n.opname for n in made) == Counter(n.opname for n in nodes)
    terms: dict[str, Counter[str]] = {}
    for item in made:
        name = item.names()[0]
        for ref in item.refs():
            assert ref.startswith("x") or ref in terms, "defined before use"
        if item.op is aten.neg.default:
            terms[name] = Counter([name])
        else:
            terms[name] = sum((terms[ref] for ref in item.refs()), Counter())
    assert terms[root] == Counter(f"g{i}" for i in range(leaves)), "every gradient once"
    crossing = Counter()
    for item in made:
        for ref in item.refs():
            if ref in made_home and made_home[ref] != made_home[item.names()[0]]:
                crossing[made_home[ref]] += 1
    assert all(count == 1 for count in crossing.values()), "a segment hands over one value"


def test_sums_within_one_segment_stay_as_they_are() -> None:
    nodes, root, home = random_sum(1, 5)
    home = dict.fromkeys(home, 2)
    made, homes = regroup(tuple(nodes), [root], home)
    assert made == tuple(nodes) and set(homes.values()) == {2}


def test_a_sum_used_twice_is_a_tree_of_its_own() -> None:
    nodes = [node(aten.neg.default, f"g{i}", f"x{i}") for i in range(3)]
    nodes += [node(aten.add.Tensor, "a", "g0", "g1"), node(aten.add.Tensor, "b", "a", "g2")]
    assert [(t.root, t.leaves) for t in trees(nodes, ["b"])] == [("b", ("g0", "g1", "g2"))]
    assert [(t.root, t.leaves) for t in trees(nodes, ["b", "a"])] == [("a", ("g0", "g1")), ("b", ("a", "g2"))]
    again = [*nodes, node(aten.neg.default, "c", "a")]
    assert [t.root for t in trees(again, ["b", "c"])] == ["a", "b"]


def test_forward_additions_are_left_alone() -> None:
    one = Node(aten.add.Tensor, (Ref("x"), Ref("y")), (), (Value("z", (2,), torch.float64),), True, False, "", "")
    assert trees([one], ["z"]) == ()
