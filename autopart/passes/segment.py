"""segment: Captured -> Segmented. Cut the graph into segments by module names; give repeated segments one body.

before: one list of nodes, each with the path of the module that made it
after:  wte | h.0 | h.1 | ... | ln_f: a segment a layer, h.0 to h.n sharing one body

A segment's forward nodes are contiguous in execution order, so values flow forward only; a backward node belongs where
the forward node of the same autograd sequence number is. What crosses segments (skips, shared tables, tied weights) is
one more input of the segment that uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.cost import REST
from autopart.ir.graph import Node
from autopart.ir.plan import INPUT, OUTPUT
from autopart.ir.segmented import Segmented
from autopart.passes.accumulate import is_sum, regroup
from autopart.passes.bodies import build
from autopart.passes.input_layer import take_out
from autopart.passes.output_layer import begins

LARGEST = 1 / 8
"""A module that makes up more of the forward than this is cut into its children (a numbered one: more than half)."""


def segment(captured: Captured, *, cuts: Sequence[str] = ()) -> Segmented:
    """Cut the graph; `cuts` are module names at which a segment must begin.

    A cut within a module that would be a segment parts it there and nowhere else: what comes before keeps the module's
    name, what begins with the cut has the cut's (``h.4``, ``h.4.mlp``). A name means every call of its module,
    ``block@1`` the second one. With the cut `OUTPUT`, the product with the
    vocabulary and all that comes after it are the last segment; with `INPUT` too, the lookup in the input embedding is
    the first one, if it can be split (`passes.input_layer`), which the result then says.

    Raises ValueError if a name in `cuts` is no module that computes anything, CaptureError where there is no output
    layer.
    """
    forward, names, number = numbered(captured, tuple(cuts))
    home = {name: place for node, place in zip(forward, number, strict=True) for name in node.names()}
    home.update(_backward_homes(captured, forward, number))
    count = len(names)
    if INPUT in cuts:
        captured, names, home = take_out(captured, names, home)
    nodes, sums = regroup(captured.nodes, [out.name for out in captured.outputs], home)
    home.update(sums)
    return replace(build(replace(captured, nodes=nodes), names, home), lookup=len(names) > count)


def layers(captured: Captured) -> tuple[str, ...]:
    """The outermost numbered modules (``h.3``) that read parameters, in order."""
    parameters = {item.value.name for item in captured.of_kind("parameter")}
    reading = (node for node in captured.nodes if not node.backward and not parameters.isdisjoint(node.refs()))
    numbers = (next((path for path in around(node.module) if _numbered(path)), None) for node in reading)
    return tuple(dict.fromkeys(path for path in numbers if path))


def numbered(captured: Captured, cuts: tuple[str, ...]) -> tuple[list[Node], list[str], list[int]]:
    """The forward nodes, the names of the segments that `segment` makes, and each node's segment number."""
    forward = [node for node in captured.nodes if not node.backward]
    labels = _with_parameters(_labels(forward), forward, captured)
    modules, calls = tuple(cut for cut in cuts if cut not in (INPUT, OUTPUT)), _calls(forward)
    names, number = _runs(_parted(labels, forward, modules, calls), modules, calls)
    _check_cuts(modules, names, calls)
    return (forward, *(_apart(captured, forward, names, number) if OUTPUT in cuts else (names, number)))


def _apart(captured: Captured, forward: list[Node], names: list[str], number: list[int]) -> tuple[list[str], list[int]]:
    """The segments with the output layer for the last one."""
    first = begins(captured)
    before = [names[n] for n in dict.fromkeys(number[:first])]
    kept = {n: i for i, n in enumerate(dict.fromkeys(number[:first]))}
    wish = next((node.module for node in forward[first:] if node.module), "output")
    name = wish if wish not in before else f"{wish}@{sum(other.split('@')[0] == wish for other in before)}"
    count = len(forward) - first
    return [*before, name], [*(kept[n] for n in number[:first]), *[len(before)] * count]


def _calls(forward: list[Node]) -> list[dict[str, int]]:
    """For each node the modules around it, with how many calls of each began before this one."""
    begun: Counter[str] = Counter()
    calls: list[dict[str, int]] = []
    for module, run in groupby(forward, key=attrgetter("module")):
        paths, before = around(module), calls[-1] if calls else {}
        for path in paths:
            begun[path] += path not in before
        calls += [{path: begun[path] - 1 for path in paths}] * len([*run])
    return calls


def _called(path: str, call: int) -> str:
    """What a call of a module is called: ``block``, ``block@1``."""
    return f"{path}@{call}" if call else path


def _check_cuts(cuts: Sequence[str], names: list[str], calls: list[dict[str, int]]) -> None:
    if not cuts:
        return
    known = {_called(path, call) for paths in calls for path, call in paths.items() if path}
    known.update(outer for name in names for outer in around(name)[1:])
    for cut in cuts:
        if cut not in known:
            close = get_close_matches(cut, sorted(known), n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise ValueError(
                f"stages: no part of the model that computes is called {cut!r}; {hint}a stage can begin at "
                f"{', '.join(names[1:])}, or at a module within one"
            )


def _parted(
    labels: list[str | None], forward: list[Node], cuts: tuple[str, ...], calls: list[dict[str, int]]
) -> list[str | None]:
    """The labels, but that of a module in `cuts` (the innermost) from where its use begins within a labelled one."""
    if not cuts:
        return labels
    parted: list[str | None] = []
    for i, (label, node) in enumerate(zip(labels, forward, strict=True)):
        goes_on = i > 0 and label is not None and label == labels[i - 1]
        before = around(forward[i - 1].module) if goes_on else []
        entered = [path for path in around(node.module) if path not in before]
        wanted = [path for path in entered if path in cuts or _called(path, calls[i][path]) in cuts]
        begins = [path for path in wanted if label is not None and path.startswith(label + ".")]
        parted.append(begins[-1] if begins else parted[-1] if goes_on else label)
    return parted


def _labels(forward: list[Node]) -> list[str | None]:
    """The segment label of each forward node: a module path, None for nodes of a module that is itself cut up."""
    weight: defaultdict[str, int] = defaultdict(int)
    paths = {module: around(module) for module in dict.fromkeys(node.module for node in forward)}
    for module, count in Counter(node.module for node in forward).items():
        for path in paths[module]:
            weight[path] += count
    total = max(weight[""], 1)
    stacks = _stacks(weight)

    def divided(path: str) -> bool:
        if path == "":
            return True
        whole = path.rsplit(".", 1)[-1].isdigit() and path not in stacks
        return weight[path] / total > (1 / 2 if whole else LARGEST)

    def label(path: str) -> str | None:
        whole = next((outer for outer in paths[path][1:] if not divided(outer)), None)
        if whole is not None:
            return whole
        return None if any(other.startswith(path + ".") if path else other for other in weight) else path

    found = {path: label(path) for path in paths}
    return [found[node.module] for node in forward]


def _with_parameters(labels: list[str | None], forward: list[Node], captured: Captured) -> list[str | None]:
    """Between modules, a node that is the first to read a parameter is labelled by it: ``x @ self.weights[3]``."""
    targets = {item.value.name: item.target for item in captured.of_kind("parameter")}
    between = (node for label, node in zip(labels, forward, strict=True) if not label)
    unread = {name for node in between for name in node.refs() if name in targets}
    found = [label or None for label in labels]
    for i, node in enumerate(forward) if unread else ():
        if not unread.isdisjoint(node.refs()):
            first = next(name for name in node.refs() if name in unread)
            found[i] = found[i] or targets[first]
            unread.difference_update(node.refs())
    return found


def around(path: str) -> list[str]:
    """The modules around and including a path, outermost first: the root, ``h``, ``h.0``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _stacks(weight: Mapping[str, int]) -> set[str]:
    """The modules that are little else than layers: numbered submodules with parts, alike in their parts.

    `weight` has the number of nodes in every module.
    """
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for module in weight:
        for outer in around(module)[1:-1]:
            parts[outer].add(module.removeprefix(outer))
    kinds = {path: (path.rpartition(".")[0], frozenset(below)) for path, below in parts.items()}
    alike = Counter(kinds.values())
    layers = {path for path, kind in kinds.items() if path.rpartition(".")[2].isdigit() and alike[kind] > 1}
    held: Counter[str] = Counter()
    for layer in layers:
        for outer in reversed(around(layer)[:-1]):
            held[outer] += weight[layer]
            if outer in layers:  # which counts for all that is around it
                break
    return {path for path in held if held[path] > weight[path] * 3 / 4}


def _runs(labels: list[str | None], cuts: tuple[str, ...], calls: list[dict[str, int]]) -> tuple[list[str], list[int]]:
    """Segment names in order and each forward node's segment number, from labels in execution order.

    Nodes between modules (label None) join the segment before them, unless that is one of a numbered list: then they
    begin the next one (``h = block(h + skip)``). Small unnumbered neighbours become one segment (``wte``, ``wpe``,
    ``drop``). A segment is named by the call of a module that it begins with.
    """
    runs = _grouped(labels)
    largest = LARGEST * len(labels)
    pieces: list[list[_Run]] = []
    waiting: list[_Run] = []
    for run in runs:
        key = run.label
        last = next((each.label for each in reversed(pieces[-1]) if each.label is not None), None) if pieces else None
        if key is None:
            if pieces and not _numbered(last) and not waiting:
                pieces[-1].append(run)
            elif run is runs[-1]:
                pieces.append([*waiting, run])
                waiting = []
            else:
                waiting.append(run)
            continue
        entered = _entered(run, last, cuts, calls)
        opens = not pieces or _numbered(key) or _numbered(last) or entered
        opens = opens or sum(each.length for each in pieces[-1]) + run.length > largest
        if pieces and key == last and not waiting and not entered:
            pieces[-1].append(run)
        elif opens or waiting:
            pieces.append([*waiting, run])
            waiting = []
        else:
            pieces[-1].append(run)
    firsts = [next((run for run in piece if run.label), None) for piece in pieces]
    names = [_called(run.label, calls[run.start].get(run.label, 0)) if run and run.label else REST for run in firsts]
    number = [i for i, piece in enumerate(pieces) for run in piece for _ in range(run.length)]
    return names, number


class _Run(NamedTuple):
    """Nodes of one label in a row."""

    label: str | None
    start: int
    length: int


def _grouped(labels: list[str | None]) -> list[_Run]:
    runs: list[_Run] = []
    for label, group in groupby(labels):
        runs.append(_Run(label, sum(runs[-1][1:]) if runs else 0, len(list(group))))
    return runs


def _entered(run: _Run, last: str | None, cuts: tuple[str, ...], calls: list[dict[str, int]]) -> bool:
    """Whether a module in `cuts` is called where a run begins that comes after one of the label `last`."""
    here, before = calls[run.start], calls[run.start - 1] if run.start else {}
    fresh = (path for path in around(run.label or "") if path not in around(last or ""))
    begun = (_called(path, call) for path, call in here.items() if call and before.get(path) != call)
    return any(name in cuts for name in (*fresh, *begun))


def _numbered(label: str | None) -> bool:
    return label is not None and any(part.isdigit() for part in label.split("."))


def _backward_homes(captured: Captured, forward: list[Node], number: list[int]) -> dict[str, int]:
    """The segment of every value of the backward: that of the forward node of the same autograd sequence number.

    A gradient-accumulation add has no forward node of its own: it belongs where its result is used, the segment that
    made the value whose gradients it adds; an input's gradients are added in the first segment that makes one.
    """
    sequences = [node.sequence for node in forward]
    # the first node of a number is the one that autograd saw
    by_sequence = dict(zip(reversed(sequences), reversed(number), strict=True))
    backward = [node for node in captured.nodes if node.backward]
    homes = {name: by_sequence.get(node.sequence, -1) for node in backward for name in node.names()}
    loose = (node for node in backward if node.sequence not in by_sequence or is_sum(node, homes))
    adrift = set(chain.from_iterable(map(Node.names, loose)))  # they belong where they are used
    used_at = {out.name: max(number) for out in captured.outputs if out.kind == "input_grad"}
    for node in reversed(backward) if adrift else ():
        if adrift.isdisjoint(node.refs()) and adrift.isdisjoint(node.names()):
            continue
        home = homes[node.names()[0]]
        if not adrift.isdisjoint(node.names()):
            home = max((used_at[name] for name in node.names() if name in used_at), default=home)
            homes.update(dict.fromkeys(node.names(), home))
        if home < 0:
            raise CaptureError(f"{node.source or node.module}: cannot tell to which layer {node.opname} belongs")
        for name in adrift.intersection(node.refs()):
            used_at[name] = max(used_at.get(name, home), home)
    earliest = len(forward)  # the first segment that the backward has come to; later ones are mostly behind it
    for node in backward:  # gradients flow from later segments to earlier ones only
        home = homes[node.names()[0]]
        if home > earliest:
            home = min([home, *(homes[name] for name in node.refs() if name in homes)])
            homes.update(dict.fromkeys(node.names(), home))
        earliest = min(earliest, home)
    return homes
