"""Equal blocks in the graph of torch calls that the default route reads: a stack of layers is traced by a few of them.

What is traced further, into operators and their backward, is data by now, no user's code: where block after block does
the same calls on tensors of the same kind, it makes no difference how many there are but for repetition. So a graph
with three of the blocks stands for all, and `repeat` writes the others; one with four is the check of that.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.capture.convert import module_path, source

FEWEST = 10
"""Equal blocks that are worth it: three and four are traced instead."""

Owners = Mapping[torch.fx.Node, tuple[str, str]]
"""(kind, target) of each placeholder."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks, one behind the other: the path of each one's module and its calls, in order."""

    paths: tuple[str, ...]
    blocks: tuple[tuple[torch.fx.Node, ...], ...]

    def kept(self, count: int) -> tuple[int, ...]:
        """The positions of the blocks that stay where `count` do: the first two and the last ones."""
        return (0, 1, *range(len(self.blocks) - count + 2, len(self.blocks)))


def find_run(graph: torch.fx.Graph, owners: Owners) -> Run | None:
    """The longest run of equal blocks in the items of one list of modules; None where none is worth it."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    found = (_equal(each, owners) for each in _lists(nodes))
    runs = [run for run in found if run is not None and len(run.blocks) >= FEWEST]
    return max(runs, key=lambda run: sum(map(len, run.blocks)), default=None)


def shortened(graph: torch.fx.GraphModule, run: Run, count: int) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """The graph with `count` blocks of a run, and the positions of the placeholders that it still has."""
    kept = run.kept(count)
    left_out = {node for i, block in enumerate(run.blocks) if i not in kept for node in block}
    last_of_gap = run.blocks[kept[2] - 1]
    instead = dict(zip(last_of_gap, run.blocks[1], strict=True))
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        return copies[instead.get(node, node)]

    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.users and left_out.issuperset(node.users):
            continue
        if node not in left_out:
            copies[node] = made.node_copy(node, copied)
    places = [i for i, node in enumerate(inputs) if node in copies]
    module = torch.fx.GraphModule(graph, made)
    module.meta = dict(graph.meta)
    return module, tuple(places)


def _lists(nodes: Sequence[torch.fx.Node]) -> list[list[tuple[str, list[torch.fx.Node]]]]:
    """For each list of modules, the paths of its items and what each computes, up to where the next begins.

    Lists whose items do not come one behind the other are left out.
    """
    seen: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, node in enumerate(nodes):
        path = module_path(node)
        for match in re.finditer(r"\.(\d+)(?=\.|$)", path):
            seen[path[: match.start()]][int(match[1])].append(place)
    made = []
    for prefix, items in seen.items():
        order = sorted(items, key=lambda item: items[item][0])
        if len(items) <= FEWEST or any(items[a][-1] > items[b][0] for a, b in itertools.pairwise(order)):
            continue
        ends = [items[item][0] for item in order[1:]] + [items[order[-1]][-1] + 1]
        starts = [items[item][0] for item in order]
        made.append([(f"{prefix}.{item}", list(nodes[i:j])) for item, i, j in zip(order, starts, ends, strict=True)])
    return made


def _equal(items: Sequence[tuple[str, list[torch.fx.Node]]], owners: Owners) -> Run | None:
    """The longest run of items that are each to the one before as the next is to it."""
    forms = [_form(*items[i], items[i - 1][1], owners) for i in range(1, len(items))]
    best, start = (0, 0), 0
    for i in range(1, len(forms) + 1):
        if i == len(forms) or forms[i] is None or forms[i] != forms[start]:
            best = max(best, (i - start, -start))
            start = i
    first = 1 - best[1]
    run = items[first : first + best[0]]
    # The last block of all is another: gradients of what all blocks read begin in it, and the call may return it.
    if run and (_reaches_output(run[-1][1]) or _adds_up(forms[first])):
        run = run[:-1]
    if not _self_contained([nodes for _, nodes in run]):
        return None
    return Run(tuple(path for path, _ in run), tuple(tuple(nodes) for _, nodes in run))


def _self_contained(blocks: Sequence[Sequence[torch.fx.Node]]) -> bool:
    """Whether what a block computes is read in it and in the next alone; the last one's by anything."""
    for block, after in itertools.pairwise(blocks):
        near = {*block, *after}
        if any(not near.issuperset(node.users) for node in block):
            return False
    return True


def _adds_up(form: Any) -> bool:
    """Whether the blocks of a form read a value, or a parameter, that gets a gradient from each of them."""
    if not isinstance(form, list | tuple):
        return False
    if len(form) == 3 and form[0] == "shared":
        value = form[1].meta.get("example_value")
        return isinstance(value, torch.Tensor) and bool(value.requires_grad)
    return any(_adds_up(item) for item in form)


def _reaches_output(block: Sequence[torch.fx.Node]) -> bool:
    """Whether the call returns something of a block, as it is or copied."""
    users = [user for node in block for user in node.users]
    return any(each.op == "output" for user in users for each in (user, *user.users))


def _form(path: str, block: Sequence[torch.fx.Node], before: Sequence[torch.fx.Node], owners: Owners) -> Any:
    """What makes a block equal to another, its own parameters aside; None where it holds what is not understood.

    A parameter is its own if nothing else reads it.
    """
    own = {node: ("own", i) for i, node in enumerate(block)}
    previous = {node: ("previous", i) for i, node in enumerate(before)}

    def argument(arg: Any) -> Any:
        match arg:
            case torch.fx.Node():
                if arg in own or arg in previous:
                    return own.get(arg) or previous[arg]
                kind, target = owners.get(arg, ("", ""))
                if kind == "parameter" and target.startswith(f"{path}.") and own.keys() >= arg.users.keys():
                    return "parameter", target.removeprefix(path), _described(arg.meta.get("example_value"))
                return "shared", arg, not target.startswith(f"{path}.")
            case list() | tuple():
                return type(arg), tuple(argument(item) for item in arg)
            case dict():
                return tuple((key, argument(item)) for key, item in arg.items())
            case slice():
                return slice, argument((arg.start, arg.stop, arg.step))
            case _:
                return type(arg), arg

    form = []
    for node in block:
        if node.op not in ("call_function", "call_method"):
            return None
        inside = module_path(node)
        where = inside.removeprefix(path) if inside == path or inside.startswith(f"{path}.") else ("else", inside)
        made = _described(node.meta.get("example_value"))
        form.append((node.op, node.target, argument(node.args), argument(node.kwargs), made, where, source(node)))
    return form


def _described(value: Any) -> Any:
    """What of a value the graph depends on."""
    match value:
        case torch.Tensor():
            if value.layout is not torch.strided:
                return "layout", value.layout, tuple(value.shape), value.dtype, id(value)
            kind = type(value), value.dtype, value.device, value.is_conj(), value.is_neg()
            strides = tuple(value.stride()), value.storage_offset()
            return kind, tuple(value.shape), strides, value.requires_grad, value.is_leaf
        case list() | tuple():
            return type(value), tuple(_described(item) for item in value)
        case _:
            return type(value), value
