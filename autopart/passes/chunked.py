"""chunked: Segmented + chunks -> Segmented. Modules whose tokens are computed chunk after chunk, in both directions.

before: norm_forward: norm, mm, log_softmax, nll, div                     keeps log_softmax, of all tokens
after:  norm_forward: norm, for each chunk (mm, log_softmax, nll), div    keeps norm; the backward makes the rest again
        norm_backward: div, for each chunk (mm, log_softmax, nll and log_softmax backward, mm backward), norm backward

A module's nodes in a segment are a region that is recomputed (`passes.recompute`), and of which both functions of the
body have a loop over the same tokens (`passes.chunk_loop`). A module whose result goes into nothing but the loss has
the loss in its region: the output layer. Exact: parameters' gradients are sums over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby

from autopart.errors import CaptureError
from autopart.ir.captured import Captured
from autopart.ir.graph import Dim, Node, Value, ancestors, descendants
from autopart.ir.loop import Along, Loop, Sized
from autopart.ir.names import fresh
from autopart.ir.segmented import Body, Function, Segmented, defined
from autopart.passes.chunk_loop import ADVICE, Found, first_loop, loop, only_for
from autopart.passes.output_layer import begins
from autopart.passes.recompute import Kept, recompute
from autopart.passes.segment import around
from autopart.passes.tokens import Loop as Over
from autopart.passes.tokens import Tokens, rest_of
from autopart.rules.dependence import refuse
from autopart.rules.factor import slots
from autopart.rules.split import product
from autopart.rules.table import rule

Chunks = Sequence[tuple[str, int]]
"""Patterns of module names, each with how many chunks there are at most; the first match holds."""


@dataclass(frozen=True, slots=True)
class Region:
    """What is run in chunks in a segment: some of its forward's nodes, by place; those `own` are the module's.

    Segments that share a body have equal regions, whatever the module is called.
    """

    module: str = field(compare=False)
    count: int
    own: tuple[int, ...]
    nodes: tuple[int, ...]


def chunked(
    segmented: Segmented, chunks: Chunks, names: Iterable[str] = (), *, whole: Segmented | None = None
) -> Segmented:
    """The step with what matches `chunks` in chunks, and the segments called `names` recomputed.

    Where it is that of a place, `whole` is the step of one device, which knows what modules are called.

    Raises CaptureError, naming operator, module and line, where a module cannot be run in chunks.
    """
    if not chunks:
        return recompute(segmented, names)
    found = regions(segmented, chunks, whole or segmented)
    marked, kept = _marked(segmented, found)
    again = recompute(marked, names, kept=kept)
    made: dict[object, Body] = {}
    keys = [(segment.body, each) for segment, each in zip(again.segments, found, strict=True)]
    for key, segment in zip(keys, again.segments, strict=True):
        if key not in made:
            made[key] = _looping(again.bodies[key[0]], key[1], len(segment.values))
    numbers = {key: number for number, key in enumerate(made)}
    segments = (replace(s, body=numbers[key]) for s, key in zip(again.segments, keys, strict=True))
    return replace(again, bodies=tuple(made.values()), segments=tuple(segments))


# ---- regions ---------------------------------------------------------------------------------------------------------


def regions(segmented: Segmented, chunks: Chunks, whole: Segmented) -> tuple[tuple[Region, ...], ...]:
    """What is run in chunks in every segment."""
    captured = segmented.captured
    losses = {out.name for out in captured.outputs if out.kind == "loss"}
    given = {item.value.name for item in captured.inputs if item.kind not in ("parameter", "tangent")}
    found = []
    for segment, called in zip(segmented.segments, _modules(whole), strict=True):
        forward = segmented.bodies[segment.body].forward
        values = (*segment.values, *segment.forward_fixed)
        formals = [value.name for value in forward.inputs]
        nodes = [replace(node, module=called.get(node.module, node.module)) for node in forward.nodes]
        loss = {local for local, name in zip(forward.outputs, segment.outputs, strict=False) if name in losses}
        free = frozenset(local for local, name in zip(formals, values, strict=False) if name in given)
        found.append(tuple(_regions(nodes, chunks, loss, {*formals[len(values) :]}, free)))
    return tuple(found)


def _modules(segmented: Segmented) -> list[dict[str, str]]:
    """For each segment of a whole step the modules that its body's nodes are of, and what they are called in it."""
    own: list[list[str]] = [[] for _ in segmented.segments]
    for node, home in zip(segmented.captured.nodes, segmented.homes, strict=True):
        if not node.backward:
            own[home].append(node.module)
    bodies = (segmented.bodies[segment.body] for segment in segmented.segments)
    pairs = (zip(body.forward.nodes, names, strict=True) for body, names in zip(bodies, own, strict=True))
    return [{node.module: name for node, name in each} for each in pairs]


def _regions(
    nodes: Sequence[Node], chunks: Chunks, losses: set[str], parameters: set[str], free: frozenset[str]
) -> Iterable[Region]:
    """Those of one segment, whose forward has these nodes; no node is in two, and each has its module's own."""
    owners = [matched(node.module, chunks) for node in nodes]
    taken = {i for i, match in enumerate(owners) if match is not None}
    for match, group in groupby(range(len(nodes)), key=owners.__getitem__):
        if match is None:
            continue
        own = tuple(group)
        made = {name for i in own for name in nodes[i].names()}
        rest = descendants([node for node in nodes[own[-1] + 1 :]], made) - made
        after = tuple(i for i in range(own[-1] + 1, len(nodes)) if not rest.isdisjoint(nodes[i].names()))
        ends = not losses.isdisjoint(rest) and all(parameters.isdisjoint(nodes[i].refs()) for i in after)
        wanted = (*own, *(i for i in after if i not in taken)) if ends else own
        found = tuple(i for i in only_for(nodes, wanted, free) if i in own or i not in taken)
        taken.update(found)
        yield Region(*match, own, found)


def output_module(captured: Captured) -> str:
    """The module of the product with the vocabulary; "" where the step has none, or no module computes it alone."""
    try:
        first = begins(captured)
    except CaptureError:
        return ""
    return [node for node in captured.nodes if not node.backward][first].module


def matched(module: str, chunks: Chunks) -> tuple[str, int] | None:
    """The outermost module around a path that a pattern matches, and its chunks; None if there is none."""
    for path in around(module)[1:]:
        for pattern, count in chunks:
            if fnmatchcase(path, pattern):
                return path, count
    return None


def _marked(segmented: Segmented, found: Sequence[tuple[Region, ...]]) -> tuple[Segmented, Kept]:
    """The step whose regions are recomputed, as what the user put into one checkpoint call is; and what is kept.

    Where a segment is recomputed whole, what others need of a region is kept: else it would be made before them, apart
    from its own backward.
    """
    made: dict[tuple[int, tuple[Region, ...]], Body] = {}
    keys = [(segment.body, each) for segment, each in zip(segmented.segments, found, strict=True)]
    for number, each in keys:
        if (number, each) not in made:
            made[number, each] = _with_regions(segmented.bodies[number], each)
    numbers = {key: number for number, key in enumerate(made)}
    segments = (replace(s, body=numbers[key]) for s, key in zip(segmented.segments, keys, strict=True))
    kept = {numbers[key]: frozenset(_given(segmented.bodies[key[0]], key[1])) for key in made}
    return replace(segmented, bodies=tuple(_named(made.values())), segments=tuple(segments)), kept


def _given(body: Body, found: Sequence[Region]) -> Iterable[str]:
    """What the nodes of each region make that others read."""
    if body.backward is None:
        return
    for each, later in zip(found, _backward_places(body, found), strict=True):
        for nodes, mine in ((body.forward.nodes, {*each.nodes}), (body.backward.nodes, {*later})):
            read = {name for i, node in enumerate(nodes) if i not in mine for name in node.refs()}
            yield from (name for i in each.nodes for name in body.forward.nodes[i].names() if name in read)


def _named(bodies: Iterable[Body]) -> Iterable[Body]:
    taken: set[str] = set()
    for body in bodies:
        name = body.name if body.name not in taken else fresh(f"{body.name}_in_chunks", taken)
        taken.add(name)
        yield replace(body, name=name)


def _with_regions(body: Body, found: Sequence[Region]) -> Body:
    """The body with the nodes of each region, and of its backward, in a region of their own, where they have none."""
    if not found or body.backward is None:
        return body
    first = max((node.region for node in (*body.forward.nodes, *body.backward.nodes)), default=-1) + 1
    places = {i: first + number for number, each in enumerate(found) for i in each.nodes}
    later = _backward_places(body, found)

    def put(nodes: Sequence[Node], where: Mapping[int, int]) -> tuple[Node, ...]:
        return tuple(replace(n, region=where[i]) if i in where and n.region < 0 else n for i, n in enumerate(nodes))

    behind = {i: first + number for number, each in enumerate(later) for i in each}
    return replace(
        body,
        forward=replace(body.forward, nodes=put(body.forward.nodes, places)),
        backward=replace(body.backward, nodes=put(body.backward.nodes, behind)),
    )


def _backward_places(body: Body, found: Sequence[Region]) -> list[list[int]]:
    """The nodes of the backward that belong to each region.

    Those of its forward's nodes, sums of what they make, and what lies between: sums of their and others' gradients.
    """
    assert body.backward is not None
    forward, nodes = body.forward.nodes, body.backward.nodes
    by_sequence: dict[int, int] = {}
    for i, node in enumerate(forward):
        by_sequence.setdefault(node.sequence, i)
    again = {name: i for i, node in enumerate(forward) for name in node.names()}
    places = []
    for each in found:
        mine = set(each.nodes)
        taken: list[int] = []
        made: set[str] = set()  # by the backward's own
        for i, node in enumerate(nodes):
            own = by_sequence.get(node.sequence) if node.backward else again[node.names()[0]]
            added = node.backward and node.aten == "add" and made.issuperset(node.refs())
            if added or (own in mine and (node.sequence >= 0 or not node.backward)):
                taken.append(i)
                made.update(node.names() if node.backward else ())
        places.append(sorted({*taken, *_between(nodes, taken)}))
    return places


def _between(nodes: Sequence[Node], taken: Sequence[int]) -> Iterable[int]:
    """The nodes of a backward that need some of those taken, and are needed by others of these."""
    reached = descendants(nodes, [name for i in taken if nodes[i].backward for name in nodes[i].names()])
    needed = ancestors(nodes, [name for i in taken for name in nodes[i].refs()])[1]
    return (
        i for i, node in enumerate(nodes) if node.backward and any(n in reached and n in needed for n in node.names())
    )


# ---- loops -----------------------------------------------------------------------------------------------------------


def _looping(body: Body, found: Sequence[Region], given: int) -> Body:
    """The body with a loop a region in both functions; the first `given` of its forward's inputs are values."""
    forward, backward = body.forward, body.backward
    places = _backward_places(body, found) if backward is not None else [[] for _ in found]
    start = [[forward.nodes[i] for i in each.nodes] for each in found]
    later = [[backward.nodes[i] for i in each] if backward else [] for each in places]
    own = [[forward.nodes[i] for i in each.own] for each in found]
    held = {value.name for value in forward.inputs[given:]}
    for number, region in enumerate(found):
        try:
            outside = _read(own[number], held)
            known = first_loop(start[number], defined(forward), outside)
            forward = _with_loop(forward, start[number], known, region, {*forward.outputs, *body.saved})
            if backward is not None and later[number]:
                values = defined(backward)
                again = loop(later[number], values, {n: each for n, each in known.tokens.items() if n in values})
                backward = _with_loop(backward, later[number], again, region, {*backward.outputs})
        except CaptureError as error:
            raise CaptureError(f"chunks: {region.module} cannot be computed in chunks: {error}") from None
    return replace(body, forward=forward, backward=backward)


def _read(nodes: Sequence[Node], held: set[str]) -> list[str]:
    """What nodes read of what they do not make, values before what is `held` (parameters and buffers)."""
    made = {name for node in nodes for name in node.names()}
    names = dict.fromkeys(name for node in nodes for name in node.refs() if name not in made)
    return sorted(names, key=lambda name: name in held)


def _with_loop(function: Function, nodes: Sequence[Node], found: Found, region: Region, kept: set[str]) -> Function:
    """The function with those of the `nodes` that are found to run in a loop in one; what is `kept` is needed after."""
    inside = [nodes[i] for i in found.inside]
    function = _together(function, inside)
    start = function.nodes.index(inside[0])
    stop = start + len(inside)
    made = {name for node in inside for name in node.names()}
    outside = (*function.nodes[:start], *function.nodes[stop:])
    needed = kept.union(*(node.refs() for node in outside))
    read = dict.fromkeys(name for node in inside for name in node.refs())
    values, tokens = defined(function), found.tokens
    taken = {*values, *(name for each in function.loops for name in _names(each))}

    def new(wish: str) -> str:
        name = fresh(wish, taken)
        taken.add(name)
        return name

    def along(name: str) -> Along:
        at = tokens[name]
        return Along(name, new(f"{name}_part"), at.dim, at.outer, rest_of(values[name].shape[at.dim], at))

    cuts = tuple(along(name) for name in read if name not in made and name in tokens)
    ends = [name for name in values if name in made and name in needed]
    first = next(iter(found.inside.values()))
    made_loop = Loop(
        start=start,
        stop=stop,
        length=first.length,
        count=region.count,
        cuts=cuts,
        joined=tuple(along(name) for name in ends if name in tokens),
        summed=tuple((name, new(f"{name}_part")) for name in ends if name in found.summed),
        inner=tuple(
            (name, at.dim, _times(values[name].shape[at.dim], at))
            for name, at in tokens.items()
            if name in made and name not in needed
        ),
        sizes=tuple(_sizes(inside, values, found, start)),
        names=(new("start"), new("n"), new("most")),
        module=region.module,
    )
    return replace(function, loops=tuple(sorted((*function.loops, made_loop), key=lambda each: each.start)))


def _names(each: Loop) -> tuple[str, ...]:
    """The names that a loop has beside those of values."""
    return (*each.names, *(a.part for a in (*each.cuts, *each.joined)), *(part for _, part in each.summed))


def _times(size: Dim, at: Tokens | Over) -> Dim:
    """The elements of a loop or dim of ``outer x length x rest`` for each token."""
    return product((at.outer, rest_of(size, at)))


def _sizes(inside: Sequence[Node], values: Mapping[str, Value], found: Found, start: int) -> Iterable[Sized]:
    """The arguments that are smaller for a chunk."""
    for number, (node, over) in enumerate(zip(inside, found.inside.values(), strict=True)):
        own = rule(node, values)
        assert own is not None  # it has a loop
        for slot, path, _ in slots(node):
            factors = dict(own.sizes).get(slot, ())
            if over.factor in factors:
                others = (own.factors[f].size for f in factors if f != over.factor)
                times = product((*others, _times(own.factors[over.factor].size, over)))
                yield Sized(start + number, path, times)


def _together(function: Function, inside: Sequence[Node]) -> Function:
    """The function with these nodes in a row: what lies between them goes before them if it can, else behind.

    Raises CaptureError where some need what only others of them make possible.
    """
    nodes, wanted = function.nodes, {node.names() for node in inside}
    runs = {each.start: each for each in function.loops}
    items: list[tuple[Node, ...]] = []
    at = 0
    while at < len(nodes):
        stop = runs[at].stop if at in runs else at + 1
        items.append(nodes[at:stop])
        at = stop
    chosen = [i for i, item in enumerate(items) if item[0].names() in wanted]
    if len(chosen) != len(inside) or any(len(items[i]) > 1 for i in chosen):
        refuse(inside[0], "is computed together with another module that is in chunks, too", ADVICE)
    first, last = chosen[0], chosen[-1]
    before, run, behind = items[:first], [], list[tuple[Node, ...]]()
    reached: set[str] = set()
    made = {name for node in inside for name in node.names()}
    for i in range(first, last + 1):
        read = {name for node in items[i] for name in node.refs()}
        if i in chosen:
            if read & reached:
                refuse(items[i][0], "needs what other modules make of what it is to make in chunks", ADVICE)
            run.append(items[i])
        elif read & (made | reached):
            behind.append(items[i])
            reached.update(name for node in items[i] for name in node.names())
        else:
            before.append(items[i])
    order = [*before, *run, *behind, *items[last + 1 :]]
    starts: dict[int, int] = {}
    at = 0
    for item in order:
        starts[id(item[0])] = at
        at += len(item)
    loops = (_moved(each, starts[id(nodes[each.start])]) for each in function.loops)
    return replace(function, nodes=tuple(node for item in order for node in item), loops=tuple(loops))


def _moved(each: Loop, start: int) -> Loop:
    """The loop where it begins elsewhere."""
    by = start - each.start
    sizes = tuple(replace(sized, node=sized.node + by) for sized in each.sizes)
    return replace(each, start=start, stop=each.stop + by, sizes=sizes)
