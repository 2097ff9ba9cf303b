"""Bodies: the nodes of each segment under local names, equal ones shared.

before: h.0: mm = x @ h_0_w; y = tanh(mm)     h.1: mm_1 = y @ h_1_w; y_1 = tanh(mm_1)
after:  body h: mm = x @ w; tanh = tanh(mm)   h.0 = h(x; h.0.w) -> y   h.1 = h(y; h.1.w) -> y_1

Two segments share a body when their nodes, sizes, inputs and outputs are equal up to names, forward and backward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count, filterfalse

from autopart.ir.captured import Captured
from autopart.ir.graph import Node, Value, rename
from autopart.ir.names import identifier
from autopart.ir.segmented import Body, Function, Segment, Segmented

FIXED = ("buffer", "constant", "prologue", "random")


@dataclass(frozen=True, slots=True)
class _Part:
    """The nodes of one function of a segment, and names in order: what they read and make, and read of `outside`."""

    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    outside: tuple[str, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Part:
        reads = tuple(chain.from_iterable(map(Node.refs, nodes)))
        makes = tuple(chain.from_iterable(map(Node.names, nodes)))
        return cls(tuple(nodes), reads, makes, tuple(filterfalse(set(makes).__contains__, dict.fromkeys(reads))))


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a segment reads and hands on, in the whole graph's names."""

    forward: _Part
    backward: _Part
    segment: Segment
    saved: tuple[str, ...]
    gradients: tuple[str, ...]  # the values of Segment.gradients
    updates: tuple[str, ...]  # those of Segment.updates


def build(captured: Captured, names: list[str], home: Mapping[str, int]) -> Segmented:
    """The segments called `names`, given the segment number of every value that a node defines."""
    homes = tuple([home[node.names()[0]] for node in captured.nodes])
    flows = _flows(captured, names, homes, home)
    values = {value.name: value for value in captured.values()}
    targets = {item.target: item.value.name for item in captured.of_kind("parameter")}
    wishes = {item.value.name: item.target for item in captured.of_kind("parameter", *FIXED)}
    wishes |= {item.value.name: item.value.name for item in captured.of_kind("input")}
    wishes |= {item.value.name: _draw_wish(item.target) for item in captured.of_kind("random")}
    bodies: list[Body] = []
    numbers: dict[object, int] = {}
    segments = []
    for flow in flows:
        number = numbers.setdefault(_structure(flow, values, targets, wishes), len(bodies))
        if number == len(bodies):
            bodies.append(_localised(flow, values, targets, wishes))
        segments.append(replace(flow.segment, body=number))
    return Segmented(captured, tuple(_named(bodies, segments)), tuple(segments), homes)


def _draw_wish(target: str) -> str:
    """``h.3.drop.draw`` for the draw ``h.3.drop#0``: calls of one module again share a body whatever their number."""
    return f"{target.partition('#')[0]}.draw".removeprefix(".")


def _flows(captured: Captured, names: list[str], homes: Sequence[int], home: Mapping[str, int]) -> list[_Flow]:
    kinds = {item.value.name: item for item in captured.inputs}
    nodes: list[tuple[list[Node], list[Node]]] = [([], []) for _ in names]
    for node, place in zip(captured.nodes, homes, strict=True):
        nodes[place][node.backward].append(node)
    parts = [(_Part.of(forward), _Part.of(backward)) for forward, backward in nodes]
    backward_made = set(chain.from_iterable(backward.makes for _, backward in parts))
    grads = _at_home(captured, "grad", home)
    updates = _at_home(captured, "mutation", home)
    targets = {out.target for out in captured.updates()}
    updated = {name for name, item in kinds.items() if item.kind == "buffer" and item.target in targets}
    # gradients of parameters go to their units, new values of buffers to the world
    kept = {out.name for out in captured.outputs if out.kind not in ("grad", "mutation")}
    kept.update(_handed_on(parts, home, backward_made))
    flows = []
    for index, (name, (forward, backward)) in enumerate(zip(names, parts, strict=True)):
        own, back = set(forward.makes), backward.outside
        # The next microbatch's forward may have changed it by then: the backward has what the forward read.
        read = (*forward.outside, *(v for v in back if v in updated and v not in forward.outside))
        passing = [v for v in back if v not in own and v not in backward_made and not _direct(kinds.get(v))]
        values = tuple(dict.fromkeys([*(v for v in read if not _direct(kinds.get(v))), *passing]))
        mine = grads.get(index, [])
        segment = Segment(
            name=name,
            body=-1,
            values=values,
            forward_fixed=tuple(v for v in read if v in kinds and kinds[v].kind in FIXED),
            forward_parameters=tuple(kinds[v].target for v in read if v in kinds and kinds[v].kind == "parameter"),
            outputs=tuple(filter(kept.__contains__, forward.makes)),
            updates=tuple(target for _, target in updates.get(index, [])),
            backward_inputs=tuple(v for v in back if v in backward_made or (v in kinds and kinds[v].kind == "tangent")),
            backward_fixed=tuple(v for v in back if v in kinds and kinds[v].kind in FIXED and v not in updated),
            backward_parameters=tuple(kinds[v].target for v in back if v in kinds and kinds[v].kind == "parameter"),
            backward_outputs=tuple(filter(kept.__contains__, backward.makes)),
            gradients=tuple(target for _, target in mine),
        )
        saved = tuple(v for v in back if v in own or v in passing or v in updated)
        changed = tuple(value for value, _ in updates.get(index, []))
        flows.append(_Flow(forward, backward, segment, saved, tuple(value for value, _ in mine), changed))
    return flows


def _at_home(captured: Captured, kind: str, home: Mapping[str, int]) -> dict[int, list[tuple[str, str]]]:
    """(value, target) of the outputs of a kind, by the segment that makes them."""
    found: dict[int, list[tuple[str, str]]] = {}
    for out in captured.outputs:
        if out.kind == kind and out.name in home:
            found.setdefault(home[out.name], []).append((out.name, out.target))
    return found


def _handed_on(parts: Sequence[tuple[_Part, _Part]], home: Mapping[str, int], backward_made: Set[str]) -> Iterator[str]:
    """The values that other segments read: later ones forward values, earlier ones gradients.

    A forward value that only the backward of a later segment reads is handed to that segment's forward too.
    """
    for here, (forward, backward) in enumerate(parts):
        for name in (*forward.outside, *backward.outside):
            at = home.get(name, here)
            if here < at if name in backward_made else here > at:
                yield name


def _direct(item: object) -> bool:
    """Inputs that a segment takes from the world rather than from another segment: all but the user's inputs."""
    return item is not None and getattr(item, "kind", "input") != "input"


def _structure(
    flow: _Flow, values: Mapping[str, Value], targets: Mapping[str, str], wishes: Mapping[str, str]
) -> object:
    """What segments of one body agree on: values numbered in order of appearance, sizes, paths of parameters."""
    segment, forward, backward = flow.segment, flow.forward, flow.backward
    nodes = (*forward.nodes, *backward.nodes)
    prefix = segment.name.split("@")[0] + "."
    parameters = [targets[target] for target in segment.parameters]
    fixed = dict.fromkeys((*segment.forward_fixed, *segment.backward_fixed))
    given = dict.fromkeys((*parameters, *fixed, *segment.values, *segment.backward_inputs))
    numbers = dict(zip(dict.fromkeys((*given, *forward.makes, *backward.makes)), count()))
    typed = [(values[name].shape, values[name].dtype) for name in given]
    paths = tuple(wishes[name].removeprefix(prefix) for name in (*parameters, *fixed))
    groups = (
        (*forward.reads, *backward.reads),
        (targets[target] for target in segment.forward_parameters),
        (targets[target] for target in (*segment.backward_parameters, *segment.gradients)),
        *(segment.values, segment.forward_fixed, segment.outputs, flow.saved, segment.backward_inputs),
        *(segment.backward_fixed, segment.backward_outputs, flow.gradients, flow.updates),
    )
    return (
        tuple(typed),
        paths,
        len(forward.nodes),
        tuple([node.form for node in nodes]),
        _regions(nodes),
        tuple([tuple(map(numbers.__getitem__, names)) for names in groups]),
    )


def _regions(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The user's checkpoint calls, numbered in order, that nodes were made in; nothing where there are none."""
    regions, numbers = [node.region for node in nodes], {-1: -1}
    if set(regions) <= {-1}:
        return ()
    return tuple([numbers.setdefault(region, len(numbers) - 1) for region in regions])


def _localised(flow: _Flow, values: Mapping[str, Value], targets: Mapping[str, str], wishes: Mapping[str, str]) -> Body:
    """The segment's functions under local names: parameters by their path in the segment, results by their operator."""
    segment, local, taken = flow.segment, _Local(values), flow.saved
    prefix = segment.name.split("@")[0] + "."
    fixed = dict.fromkeys((*segment.forward_fixed, *segment.backward_fixed))
    for name in (*(targets[target] for target in segment.parameters), *fixed, *segment.values):
        local.add(name, wishes.get(name, "x").removeprefix(prefix))
    parameters = [targets[t] for t in segment.forward_parameters]
    formals = (*segment.values, *segment.forward_fixed, *parameters)
    forward = local.function(formals, flow.forward.nodes, (*segment.outputs, *flow.updates))
    saved = tuple(local.names[name] for name in taken)
    if not flow.backward.nodes:
        return Body("", forward, saved, None)
    for name in segment.backward_inputs:
        local.add(name, "dx")
    parameters = [targets[t] for t in segment.backward_parameters]
    formals = (*segment.backward_inputs, *taken, *segment.backward_fixed, *parameters)
    backward = local.function(formals, flow.backward.nodes, (*segment.backward_outputs, *flow.gradients))
    return Body("", forward, saved, backward)


class _Local:
    """Local names for values of the whole graph: `names` maps global to local, each local name used once."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values
        self.names: dict[str, str] = {}
        self.used: set[str] = set()
        self.last: Counter[str] = Counter()

    def add(self, name: str, wish: str) -> None:
        base = fresh = identifier(wish)
        while fresh in self.used:
            self.last[base] += 1
            fresh = f"{base}_{self.last[base]}"
        self.used.add(fresh)
        self.names[name] = fresh

    def value(self, name: str) -> Value:
        return replace(self.values[name], name=self.names[name])

    def function(self, inputs: Iterable[str], nodes: tuple[Node, ...], outputs: Iterable[str]) -> Function:
        formals = tuple(self.value(name) for name in inputs)
        made = []
        for node in nodes:
            short = _short(node.opname)
            for out in node.outs:
                if out is not None:
                    self.add(out.name, short)
            made.append(
                replace(
                    node,
                    args=rename(node.args, self.names),
                    kwargs=tuple((key, rename(arg, self.names)) for key, arg in node.kwargs),
                    outs=tuple(self.value(out.name) if out is not None else None for out in node.outs),
                )
            )
        return Function(formals, tuple(made), tuple(self.names[name] for name in outputs))


def _short(opname: str) -> str:
    """A result's name after its operator: ``layer_norm`` for ``aten.native_layer_norm.default``."""
    name = opname.split(".")[1].strip("_").removeprefix("native_").removesuffix("_functional").removesuffix("_legit")
    return "attention" + "_backward" * name.endswith("backward") if "attention" in name else name


def _named(bodies: list[Body], segments: list[Segment]) -> Iterable[Body]:
    """Bodies named after their first segment, without its number if there are several: ``h_0`` alone, else ``h``."""
    uses = Counter(segment.body for segment in segments)
    taken: Counter[str] = Counter()
    for number, body in enumerate(bodies):
        name = next(segment.name for segment in segments if segment.body == number)
        name = re.sub(r"(\.\d+)+$", "", name) if uses[number] > 1 else name
        base = fresh = identifier(name, "layer_")
        while fresh in taken or re.fullmatch(r"stage\d+", fresh):  # the stages' own functions are called so
            taken[base] += 1
            fresh = f"{base}_v{taken[base]}"
        taken[fresh] += 1
        yield replace(body, name=fresh)
