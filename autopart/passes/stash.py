"""stash: the fewest bytes of what I is given or makes from which W can go on, by a minimum cut.

A flow goes from what I has to what W needs. A storage is as wide as its bytes: cut there, it is handed over. What W may
run again (views, which cost nothing, and pointwise operators) is fed by its operands, anything else by I alone; views
are not handed over themselves, but made again from their storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from autopart.ir.graph import Node
from autopart.ir.segmented import Body, defined
from autopart.rules.alias import roots, viewed
from autopart.rules.pointwise import is_pointwise


class Stash:
    """What a body's W may be handed: values that its backward is given, and results of its nodes `first`, those of I.

    W has `at_hand` some of the backward's inputs anyway. Bytes are those of a microbatch of `samples`.
    """

    def __init__(self, body: Body, first: Iterable[Node], at_hand: Set[str], samples: int) -> None:
        assert body.backward is not None
        self.values, self.at_hand, self.samples = defined(body.backward), at_hand, samples
        self.makers = {name: node for node in first for name in node.names()}
        self.order = {name: place for place, name in enumerate(self.values)}
        saved, root = defined(body.forward), roots(body.forward.nodes)
        # Saved views of one storage are kept as soon as one of them is.
        self.storages = {name: saved[root.get(name, name)] for name in body.saved}

    def least(self, needed: Iterable[str]) -> tuple[tuple[str, ...], dict[str, Node]]:
        """What to hand over so that W has what is `needed`, and the nodes that it runs again, by a name they make.

        Of equally small stashes it is the one that runs fewest nodes again.
        """
        wanted = [name for name in needed if name not in self.at_hand]
        late = self._late(wanted)
        stash: set[str] = set()
        again: dict[str, Node] = {}
        used: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in used or name in self.at_hand:
                continue
            used.add(name)
            node = self.makers.get(name)
            if node is None or ("made", name) not in late:
                stash.add(name)
            else:
                again[node.names()[0]] = node
                wanted += node.refs()
        return tuple(sorted(stash, key=self.order.__getitem__)), {key: _only(node, used) for key, node in again.items()}

    def _late(self, wanted: Sequence[str]) -> set[object]:
        """The cut's side on which W is: ("made", x) lies there if W makes x itself."""
        import networkx as nx

        flow: nx.DiGraph[object] = nx.DiGraph()
        flow.add_nodes_from(["I", "W"])
        flow.add_edges_from((("there", name), "W") for name in wanted)
        waiting, seen = list(wanted), set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen or name in self.at_hand:
                continue
            seen.add(name)
            node = self.makers.get(name)
            if node is None:
                storage = self.storages.get(name, self.values[name])
                flow.add_edge("I", ("storage", storage.name), capacity=storage.nbytes(self.samples))
                flow.add_edge(("storage", storage.name), ("there", name))
                continue
            width = {} if viewed(node) is not None else {"capacity": self.values[name].nbytes(self.samples)}
            flow.add_edge(("made", name), ("there", name), **width)
            if self._again(node):
                flow.add_edges_from((("there", ref), ("made", name)) for ref in node.refs() if ref not in self.at_hand)
                waiting += node.refs()
            else:
                flow.add_edge("I", ("made", name))
        return set(nx.minimum_cut(flow, "I", "W")[1][1])

    def _again(self, node: Node) -> bool:
        """Whether W may run a node of I again: a view, or a pointwise operator that reads nothing that is at hand.

        That is: no parameter or buffer, nor a gradient that comes in for both halves or later.
        """
        return viewed(node) is not None or (is_pointwise(node) and self.at_hand.isdisjoint(node.refs()))


def _only(node: Node, used: Set[str]) -> Node:
    """The node with those of its results that are used."""
    return replace(node, outs=tuple(out if out is not None and out.name in used else None for out in node.outs))
